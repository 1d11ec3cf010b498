"""Quantization-aware training: a calibrated network as a module that rounds as its plan will."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from tessella.compiler.calibration import Calibration
from tessella.compiler.layers import LAYERS
from tessella.compiler.passes import Request, run
from tessella.compiler.pipeline import optimized
from tessella.core.device import default_target
from tessella.core.errors import CompileError
from tessella.graph import onnx
from tessella.graph.graph import Graph
from tessella.graph.onnx.write import write_bytes
from tessella.graph.quantization_aware import QuantizationAware


def quantization_aware(
    graph: Graph,
    calibration: Calibration,
    *,
    target: str | None = None,
    precisions: Mapping[str, str] | None = None,
) -> QuantizationAware:
    """A captured network, optimized and rounded to int8, as a module to be trained.

    Batch norms are folded as in a plan. What the calibration found about scales and biases is the
    start; which layers are int8 does not change any more.

    Args:
        graph: as captured; it is not changed.
        calibration: of this graph, for int8.
        target: of the plan, which evaluation follows; by default what this machine has.
        precisions: another precision for single layers, by the names of ``compiler.layers``.

    Raises:
        CompileError: no layer is int8, or ONNX, which checkpoints hold it as, has no word for an
            operation.
        UsageError: a precision that a layer cannot have.
    """
    target = target or default_target()
    exact = optimized(graph)
    request = Request(
        target=target,
        precision="int8",
        precisions=precisions or {},
        calibration=calibration,
    ).assigned(exact)
    others = sorted(set(request.decided.kinds.values()) - {"int8"})
    if others:
        raise CompileError("only int8 is trained for", seen=", ".join(others), fix="use int8")
    rounded = run(exact, request, after="optimize", until="round")
    return read_quantized(write_bytes(rounded), target=target, floats=_floats(exact, rounded))


def read_quantized(
    content: bytes,
    *,
    target: str | None = None,
    floats: Mapping[str, torch.Tensor] | None = None,
) -> QuantizationAware:
    """The module of an ONNX file that rounds, checked as any stranger's is.

    Args:
        floats: weights as they were before they were rounded, by the name of the rounded one.

    Raises:
        CompileError: it is no ONNX file that can be read, or rounds nothing.
    """
    lower = partial(as_compiled, target=target or default_target())
    return QuantizationAware(onnx.read(content), floats=floats, lower=lower)


def as_compiled(graph: Graph, target: str) -> Graph:
    """A graph that rounds by itself, as kernels of a target will compute it."""
    exact = optimized(graph)
    request = Request(target=target, precision="int8").assigned(exact)
    return run(exact, request, after="optimize", until="mark")


def _floats(exact: Graph, rounded: Graph) -> dict[str, torch.Tensor]:
    """The weights of an optimized graph, by the names that their rounded values have."""
    before = {node.output.name: node for node in exact.nodes if len(node.outputs) == 1}
    found = {}
    for node in rounded.nodes:
        if node.op not in LAYERS:
            continue
        source = rounded.producer(node["weight"])
        weight = exact.constant(before[node.output.name]["weight"])
        if source is not None and source.op == "dequantize" and weight is not None:
            found[source["input"].name] = weight
    return found
