"""Attention that is written out is found and made one step.

``softmax(scale · Q·Kᵀ + mask) · V``, as ONNX files and many networks have it: factors before the
first product or behind it, as numbers or a number a head, and any number of masks, of which a
constant one may be added window by window (Swin)::

    matmul [W·N, H, L, S] → reshape [N, W, H, L, S] → + [1, W, 1, L, S] → reshape → softmax

The products of all queries with all keys are never in memory then (Swin-T for 8 images on a CPU:
398 → 307 ms). A query that a computed mask
hides from all keys by -inf becomes 0; written out it is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tessella.core.dtype import dtype_name
from tessella.graph.build import drop_unused
from tessella.graph.graph import Graph, Node, Shape, Value

OP = "scaled_dot_product_attention"


def apply(graph: Graph) -> int:
    """Replace each attention that is written out by one step; returns how many were replaced."""
    fused = 0
    for node in [n for n in graph.nodes if n.op == "matmul"]:
        weights = _weights(graph, node)
        if weights is None or not _is_last(weights):
            continue
        products = _Products(graph).of(weights["input"], weights)
        if products is not None and _replace(graph, node, products):
            fused += 1
    drop_unused(graph)
    return fused


def _weights(graph: Graph, product: Node) -> Node | None:
    """The softmax whose result a product reads, and nobody else does.

    ``where(isnan(weights), 0, weights)`` between them says what attention does anyway: a query that
    sees no key is 0.
    """
    weights = product["input"]
    node = graph.producer(weights)
    if node is None or graph.only_reader(weights) is not product:
        return None
    if node.op == "fallback" and node.attrs["target"] == "aten::where.self":
        condition, zero, kept = node.inputs
        is_nan, constant = graph.producer(condition), graph.constant(zero)
        if is_nan is None or is_nan.attrs.get("target") != "aten::isnan" or kept is None:
            return None
        weights = kept
        if is_nan.inputs != (weights,) or constant is None or constant.count_nonzero():
            return None
        if graph.users(weights) not in ([is_nan, node], [node, is_nan]):
            return None
        node = graph.producer(weights)
    return node if node is not None and node.op == "softmax" else None


def _is_last(softmax: Node) -> bool:
    (result,) = softmax.outputs
    dtype = softmax.attrs["dtype"]
    last = softmax.attrs["dim"] % len(result.shape) == len(result.shape) - 1
    return bool(last) and dtype in (None, softmax["input"].dtype)


@dataclass
class _Found:
    """``matmul``, and what it goes through on its way to the softmax.

    Attributes:
        scale: the product of all numbers.
        by_head: constants [..., H, 1, 1] that products are multiplied by.
        constant: the sum of constant masks.
        mask: one that is computed.
    """

    matmul: Node
    scale: float = 1.0
    by_head: list[Value] = field(default_factory=list)
    constant: torch.Tensor | None = None
    mask: Value | None = None


class _Products:
    """Walks from the softmax back to the product of queries and keys."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def of(self, value: Value, reader: Node) -> _Found | None:
        """What ``reader`` reads as such a product; None if it is none, or read elsewhere too."""
        node = self.graph.producer(value)
        if node is None or self.graph.only_reader(value) is not reader:
            return None
        if node.op == "matmul":
            return _Found(node)
        if node.op == "reshape":
            return self._by_window(node)
        for source, other in (node.inputs, node.inputs[::-1]) if len(node.inputs) == 2 else ():
            if source is None or source.shape != value.shape:
                continue
            found = self.of(source, node)
            if found is not None:
                return found if self._takes(found, node, source, other) else None
        return None

    def _takes(self, found: _Found, node: Node, source: Value, other: Value | None) -> bool:
        """Add to ``found`` what ``node`` does to products; False if attention has no such step."""
        if node.op in ("mul", "div"):
            if node.op == "div" and source is not node["input"]:
                return False
            if found.mask is not None or found.constant is not None:
                return False  # a factor behind a mask is one of the mask, too
            number = _number(self.graph, node, other)
            if number is not None:
                found.scale *= number if node.op == "mul" else 1 / number
                return True
            if node.op == "div" or other is None or other not in self.graph.constants:
                return False
            found.by_head.append(other)
            return _one_a_head(other)
        if node.op != "add" or other is None or node.attrs["alpha"] != 1:
            return False
        constant = self.graph.constant(other)
        if constant is not None:
            return _add(found, constant, source.shape)
        if found.mask is not None or other.dtype != source.dtype or len(other.shape) < 2:
            return False
        found.mask = other
        return _broadcasts(other.shape, source.shape)

    def _by_window(self, joined: Node) -> _Found | None:
        """Behind ``joined`` [W·N, H, L, S], sums with constants [1, W, H, L, S]."""
        split, masks = joined["input"], list[torch.Tensor]()
        value, reader = split, joined
        if len(split.shape) != 5 or split.shape[2:] != joined.output.shape[1:]:
            return None
        while (node := self.graph.producer(value)) is not None and node.op == "add":
            source, other = node["input"], node.get("other")
            if other not in self.graph.constants and other is not None:
                source, other = other, source
            constant = self.graph.constant(other)
            if constant is None or node.attrs["alpha"] != 1 or source.shape != split.shape:
                return None
            if self.graph.only_reader(value) is not reader:
                return None
            masks.append(constant)
            value, reader = source, node
        if node is None or node.op != "reshape":
            return None
        if self.graph.only_reader(value) is not reader:
            return None
        if node["input"].shape != joined.output.shape:
            return None
        found = self.of(node["input"], node)
        windows = (1, *split.shape[1:])
        for mask in masks:
            if found is None or not _broadcasts(tuple(mask.shape), windows):
                return None
            by_window = mask.reshape((1,) * (5 - mask.ndim) + tuple(mask.shape))[0]
            found = found if _add(found, by_window, split.shape[1:]) else None
        return found


def _number(graph: Graph, node: Node, other: Value | None) -> float | None:
    """The number above zero that a ``mul`` or ``div`` is by, if it is by one."""
    number = node.attrs["scalar"]
    constant = graph.constant(other)
    if constant is not None and constant.numel() == 1:
        number = constant.item()
    return float(number) if number is not None and 0 < number < float("inf") else None


def _one_a_head(value: Value) -> bool:
    return 2 < len(value.shape) <= 4 and tuple(value.shape[-2:]) == (1, 1)


def _broadcasts(shape: Shape, to: Shape) -> bool:
    if len(shape) > len(to):
        return False
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return all(size in (1, wide) for size, wide in pairs)


def _add(found: _Found, constant: torch.Tensor, shape: Shape) -> bool:
    """Add a constant mask for products of this shape to those found before."""
    if not _broadcasts(tuple(constant.shape), shape) or constant.ndim == 0:
        return False
    rows = constant[None] if constant.ndim == 1 else constant
    if rows.isneginf().all(-1).any():  # of a query that sees nothing: NaN
        return False
    if found.constant is not None:
        if not all(m in (n, 1) or n == 1 for m, n in zip(*_aligned(found.constant, rows))):
            return False
        rows = found.constant + rows
    found.constant = rows
    return True


def _aligned(*tensors: torch.Tensor) -> list[tuple[int, ...]]:
    """The shapes of the tensors, each with ones in front so that all have as many axes."""
    rank = max(t.ndim for t in tensors)
    return [(1,) * (rank - t.ndim) + tuple(t.shape) for t in tensors]


def _replace(graph: Graph, last: Node, found: _Found) -> bool:
    """Put attention in the place of the product with the values."""
    if found.mask is not None and found.constant is not None:
        return False  # their sum would be as large as the products
    queries, keys, scale = found.matmul["input"], found.matmul["other"], found.scale
    values, result = last["other"], last.output
    queries, scale = _unscaled(graph, queries, found.matmul, scale)
    keys, scale = _unscaled(graph, keys, found.matmul, scale)
    leading = queries.shape[:-2]
    rank = len(result.shape)
    if rank not in (3, 4) or not leading == keys.shape[:-2] == values.shape[:-2]:
        return False
    added = found.mask.dtype if found.mask is not None else _dtype(found.constant, result.dtype)
    if {v.dtype for v in (queries, keys, values, *found.by_head)} | {added} != {result.dtype}:
        return False
    if any(len(v.shape) > rank for v in found.by_head):
        return False
    layer = found.matmul.layer
    swapped = (*range(rank - 2), rank - 1, rank - 2)
    turned = Value(
        graph.fresh_name(f"{keys.name}.keys"), keys.dtype, (*leading, *keys.shape[:-3:-1])
    )
    made = [Node("permute", (keys,), (turned,), {"dims": swapped}, layer)]
    for factor in found.by_head:
        scaled = Value(graph.fresh_name(f"{queries.name}.by_head"), queries.dtype, queries.shape)
        made.append(Node("mul", (queries, factor), (scaled,), {"scalar": None}, layer))
        queries = scaled
    mask = found.mask
    if found.constant is not None:
        mask = graph.add_constant(f"{result.name}.mask", found.constant)
    attrs = {"is_causal": False, "scale": scale, "enable_gqa": False}
    made.append(Node(OP, (queries, turned, values, mask), (result,), attrs, layer))
    graph.nodes.replace(last, *made)
    return True


def _dtype(tensor: torch.Tensor | None, default: str) -> str:
    return default if tensor is None else dtype_name(tensor.dtype)


def _unscaled(graph: Graph, value: Value, reader: Node, scale: float) -> tuple[Value, float]:
    """The value that a product reads, as it was before a multiplication by a number, and ``scale``
    times that number.
    """
    node = graph.producer(value)
    if node is None or node.op not in ("mul", "div") or graph.only_reader(value) is not reader:
        return value, scale
    source, other = node.inputs
    if node.op == "mul" and source in graph.constants:
        source, other = other, source
    number = _number(graph, node, other)
    if number is None or source is None:
        return value, scale
    if (source.shape, source.dtype) != (value.shape, value.dtype):
        return value, scale
    return source, scale * (number if node.op == "mul" else 1 / number)
