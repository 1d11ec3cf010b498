"""Two convolutions of one input whose results are added become one.

A filter of one tap is a filter of 3×3 whose other taps are zero, so both are one filter, their sum.
D-FINE's and RTMDet's blocks learn with two such branches (RepVGG, arXiv:2101.03697); where they
were not joined before, each read the map and wrote it again for the other.
"""

from __future__ import annotations

import torch

from tessella.graph.graph import Graph, Node
from tessella.graph.value import fixed


def apply(graph: Graph) -> int:
    """Join each plain convolution with the one that alone adds its result; returns how many."""
    joined = 0
    for last in [n for n in graph.nodes if n.op == "conv2d"]:
        first = graph.producer(last.get("residual"))
        if first is None or not _are_branches(graph, first, last):
            continue
        for small, large in ((first, last), (last, first)):
            if _is_middle(small, large):
                _join(graph, small, large, last)
                graph.nodes.remove(first)
                joined += 1
                break
    return joined


def _are_branches(graph: Graph, first: Node, last: Node) -> bool:
    """Whether ``last`` adds what a convolution of the same input makes for it alone."""
    both = (first, last)
    return (
        first.op == "conv2d"
        and graph.only_reader(first.output) is last
        and first["input"] is last["input"]
        and first.has_only("input", "weight", "bias")
        and last.has_only("input", "weight", "bias", "residual")
        and first.attrs["activation"] is None
        and not any({"alpha", "beta", "gamma", "dtype"} & {*n.attrs} for n in both)
        and all(v is None or v in graph.constants for n in both for v in n.inputs[1:3])
        and len({tuple(n.attrs["stride"]) for n in both}) == 1
        and len({n.attrs["groups"] for n in both}) == 1
    )


def _is_middle(small: Node, large: Node) -> bool:
    """Whether one tap stands where the middle of an odd filter stands."""
    taps = [fixed(size) for size in large["weight"].shape[2:]]
    reach = [d * (n // 2) for d, n in zip(large.attrs["dilation"], taps, strict=True)]
    return (
        all(fixed(size) == 1 for size in small["weight"].shape[2:])
        and all(n % 2 for n in taps)
        and tuple(small.attrs["padding"]) == (0, 0)
        and tuple(large.attrs["padding"]) == tuple(reach)
    )


def _join(graph: Graph, small: Node, large: Node, last: Node) -> None:
    """Let ``last`` be both."""
    name, known = large["weight"].name, graph.constants[large["weight"]]
    weight = known.double().clone()
    rows, columns = (size // 2 for size in weight.shape[2:])
    weight[:, :, rows, columns] += graph.constants[small["weight"]].double()[:, :, 0, 0]
    biases = [graph.constant(n.get("bias")) for n in (small, large)]
    added = [b.double() for b in biases if b is not None]
    total = torch.stack(added).sum(0).to(known.dtype) if added else None
    last.attrs |= {key: large.attrs[key] for key in ("padding", "dilation")}
    last.rebind(
        residual=None,
        weight=graph.add_constant(f"{name}.joined", weight.to(known.dtype)),
        bias=None if total is None else graph.add_constant(f"{name}.joined_bias", total),
    )
