"""Layers on int8 or fp8 whose activated result is only rounded again write the codes themselves.

``lower_quantization`` takes the result's scale into the layer's own factors, which a ReLU lets
through. Behind a GELU or a SiLU it is a factor of its own, ``gamma``, and only some kernels know
it: where none does, as on a CPU, the layer writes floating numbers and a step rounds them.
"""

from __future__ import annotations

from tessella.compiler.fitting import has_kernel
from tessella.compiler.passes import pad_channels
from tessella.compiler.passes.fuse_epilogue import LAYERS, only_use
from tessella.compiler.passes.lower_quantization import CODES, Code, code_of
from tessella.graph.graph import Graph, Node
from tessella.kernels.problem import is_gamma


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
        if has_kernel(rounding, target, graph.constants):
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
