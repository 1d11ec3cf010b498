"""Reshapes, permutes, pads, casts and copies that change nothing, and pairs that are one.

And indices that take everything: ``mask[arange(N)[:, None, None, None], arange(T)]``, which
transformers' masks are, is ``mask`` with axes of one between, a reshape.
"""

from __future__ import annotations

from typing import Any

import torch

from tessella.graph.graph import Graph, Node, Value
from tessella.graph.value import product

_SAMPLES = [
    ("sub", 1, None),
    ("aten::cumsum", None, ({"input": 0}, 0)),
    ("aten::ones_like", None, ({"input": 0},)),
]


def apply(graph: Graph) -> int:
    """Drop operations that change nothing; returns how many. A graph's output keeps its name."""
    dropped = 0
    for node in list(graph.nodes):
        if _takes_all(node, graph):
            node.op, node.attrs = "reshape", {"shape": node.output.shape}
            node.inputs = node.inputs[:1]
            dropped += 1
        dropped += _merge_pair(graph, node)
        if _changes_nothing(node) and node.output not in graph.outputs:
            graph.replace_uses(node.output, node["input"])
            graph.nodes.remove(node)
            dropped += 1
    return dropped


def _merge_pair(graph: Graph, node: Node) -> bool:
    """Whether a reshape of a reshape, or a permute of a permute, reads the first's input now."""
    before = graph.producer(node["input"]) if node.op in ("reshape", "permute") else None
    if before is None or before.op != node.op:
        return False
    node.inputs = before.inputs
    if node.op == "permute":
        node.attrs["dims"] = tuple(before.attrs["dims"][d] for d in node.attrs["dims"])
    return True


def _changes_nothing(node: Node) -> bool:
    if node.op == "clone":
        return True
    if node.op == "permute":
        return tuple(node.attrs["dims"]) == tuple(range(len(node.attrs["dims"])))
    if node.op == "pad":
        return not any(node.attrs["pad"])
    if node.op in ("reshape", "expand") or (node.op == "interpolate" and _keeps_pixels(node)):
        return node["input"].shape == node.output.shape
    return node.op == "to" and node["input"].dtype == node.output.dtype


def _keeps_pixels(node: Node) -> bool:
    """Whether a resize to the size that is there takes each pixel as it is.

    A factor that is given with the size is what places are computed with.
    """
    return node.attrs.get("scale_factor") is None


def _takes_all(node: Node, graph: Graph) -> bool:
    """Whether each index counts the places of its axis, along axes that come in the same order."""
    if node.op != "fallback" or node.attrs["target"] != "aten::index.Tensor":
        return False
    whole, *indices = (v for v in node.inputs if v is not None)
    if node.attrs["args"] != ({"input": 0}, tuple({"input": i + 1} for i in range(len(indices)))):
        return False
    along: list[int] = []  # axes of the result, from the last backwards
    for index, size in zip(indices, whole.shape, strict=False):
        constant = graph.constant(index)
        counted = _counts(constant) if constant is not None else _counts_samples(graph, index)
        if not counted or product(n for n in index.shape if n != 1) != size:
            return False
        along += [i - len(index.shape) for i, n in enumerate(index.shape) if n != 1]
    return along == sorted(set(along))


def _counts(places: torch.Tensor) -> bool:
    return torch.equal(places.flatten(), torch.arange(places.numel(), dtype=torch.int64))


def _counts_samples(graph: Graph, value: Value | None) -> bool:
    """Whether a value is 0, 1, … for each sample, as ``capture`` writes it: Σ 1 - 1."""
    ops: list[tuple[str, Any, Any]] = []
    while (node := graph.producer(value)) is not None and ops == _SAMPLES[: len(ops)]:
        kind = node.attrs["target"] if node.op == "fallback" else node.op
        if kind not in ("reshape", "to"):
            ops.append((kind, node.attrs.get("scalar"), node.attrs.get("args")))
        if kind == "aten::ones_like":
            return ops == _SAMPLES
        value = node.first
    return False
