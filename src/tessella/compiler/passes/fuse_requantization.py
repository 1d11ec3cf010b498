"""Layers on int8 or fp8 whose activated result is only rounded again write the codes themselves.

``lower_quantization`` takes the result's scale into the layer's own factors, which a ReLU lets
through. Behind a GELU or a SiLU it is a factor of its own, ``gamma``, and only some kernels know
it: where none does, as on a CPU, the layer writes floating numbers and a step rounds them.
"""

from __future__ import annotations

from collections.abc import Collection

from tessella.compiler.passes import pad_channels
from tessella.compiler.passes.fuse_epilogue import LAYERS, only_use
from tessella.compiler.passes.lower_quantization import CODES, Code, code_of
from tessella.graph.graph import Graph, Node, Value
from tessella.kernels import catalog
from tessella.kernels.problem import Format, Problem, TensorMeta, is_gamma

# to ask the kernels with: more pixels than a kernel of few rows takes, and a size few axes have
BATCH = 176


def apply(graph: Graph, target: str) -> int:
    """Let such layers round; returns how many do now."""
    fused = 0
    for node in [n for n in graph.nodes if n.op in LAYERS]:
        readers = graph.users()[node.output]
        reader = readers[0] if len(readers) == 1 else None
        code = code_of(graph, reader, "quantize")
        if reader is None or code is None or not only_use(graph, node.output, reader):
            continue
        if not _takes(node, code) or not is_gamma(gamma := 1.0 / code.factor):
            continue
        rounding = Node(
            op=node.op,
            inputs=node.inputs,
            outputs=reader.outputs,
            attrs={**node.attrs, "dtype": code.dtype, "gamma": gamma},
            layer=node.layer,
        )
        if _has_kernel(rounding, target, graph.constants):
            graph.nodes[graph.nodes.index(node)] = rounding
            graph.nodes.remove(reader)
            fused += 1
    if fused and target == "sm_90":
        pad_channels.apply(graph)  # what lies between two of these layers is codes only now
    return fused


def _takes(node: Node, code: Code) -> bool:
    """Whether one factor behind the layer's activation makes these codes: zero must stay zero.

    A residual in floating numbers beside codes is what fast kernels do not read.
    """
    return (
        len(node.inputs) == 5
        and node.inputs[3] is None
        and node.inputs[0].dtype in CODES
        and code.dtype == node.inputs[0].dtype
        and code.scale.numel() == 1
        and code.zero == 0
        and node.attrs.get("gamma", 1.0) == 1.0
    )


def _has_kernel(node: Node, target: str, constants: Collection[Value]) -> bool:
    """Whether a kernel that is not the last resort carries it out, in one of the formats."""
    formats: tuple[Format, ...] = ("contiguous",)
    if node.op == "conv2d":
        formats = ("channels_last", "contiguous")
    rows = [
        row
        for row in catalog.candidates(node.op, target)
        if not (row.last_resort or row.unproven or row.sparse)
    ]
    return any(
        row.refusal(_problem(node, format, constants)) is None for format in formats for row in rows
    )


def _problem(node: Node, format: Format, constants: Collection[Value]) -> Problem:
    def meta(value: Value) -> TensorMeta:
        shape = tuple(d if isinstance(d, int) else d.at(BATCH) for d in value.shape)
        kept = format if len(shape) == 4 and value not in constants else "contiguous"
        return TensorMeta(shape=shape, dtype=value.dtype, format=kept)

    return Problem(
        op=node.op,
        inputs=tuple(None if v is None else meta(v) for v in node.inputs),
        outputs=tuple(meta(v) for v in node.outputs),
        attrs=node.attrs,
        constant=tuple(i for i, v in enumerate(node.inputs) if v in constants),
    )
