"""Maps of several sizes that are made one size and mixed are mixed first, where there are fewer
pixels.

A resize is linear over pixels, with weights that sum to one, and a 1×1 convolution over channels,
so their order does not matter to the result::

    conv2d 1×1 (cat(resize(a), resize(b), c))  →  resize(A a) + resize(B b) + (C c + bias)

What makes ``a`` is often a layer by pixel itself, which then has the product of both weights: the
head of SegFormer, where four maps of 256 channels came together.
"""

from __future__ import annotations

import math

import torch

from tessella.compiler.rewrites import dead_code
from tessella.compiler.rewrites.swap_means import is_product
from tessella.graph.graph import Graph, Node, Value, attrs_at, shape_at
from tessella.graph.value import fixed

VIEWS = frozenset(("permute", "reshape"))


def apply(graph: Graph) -> int:
    """Mix maps before they are resized; returns how many resizes come later."""
    moved = 0
    for node in list(graph.nodes):
        if is_product(graph, node) and (parts := _parts(graph, node)):
            moved += _mix(graph, node, parts)
    if moved:
        dead_code.apply(graph)  # the concatenations, and weights
    return moved


def _parts(graph: Graph, mix: Node) -> list[tuple[Value, Node | None]]:
    """The parts of what a layer mixes, with the resize that makes one of more pixels.

    Empty unless half of the channels are resized, which costs no more for the layer's result.
    """
    joined = graph.producer(mix["input"])
    if joined is None or joined.op != "cat" or joined.attrs["dim"] != 1:
        return []
    if graph.only_reader(joined.output) is not mix:
        return []
    parts: list[tuple[Value, Node | None]] = []
    for value in joined.inputs:
        if value is None or value in graph.constants:
            return []
        maker = graph.producer(value)
        resized = maker is not None and _makes_more(maker) and graph.only_reader(value) is joined
        parts.append((value, maker if resized else None))
    resized_channels = sum(fixed(v.shape[1]) for v, resize in parts if resize is not None)
    made = fixed(mix.output.shape[1])
    if any(resize is not None and made > fixed(v.shape[1]) for v, resize in parts):
        return []
    return parts if 2 * resized_channels >= fixed(mix["input"].shape[1]) else []


def _makes_more(node: Node) -> bool:
    if node.op != "interpolate" or len(node.output.shape) != 4:
        return False
    before, after = (math.prod(map(fixed, v.shape[2:])) for v in (node["input"], node.output))
    return before < after


def _mix(graph: Graph, mix: Node, parts: list[tuple[Value, Node | None]]) -> int:
    weight, bias = graph.constants[mix["weight"]], mix.get("bias")
    found = None if bias is None else graph.constants[bias]
    result, start, terms, rest = mix.output, 0, [], []
    for value, resize in parts:
        size = fixed(value.shape[1])
        columns = weight[:, start : start + size]
        start += size
        if resize is None:
            rest.append((value, columns))
            continue
        # the bias may go through one resize where nothing else takes it
        taken = found if resize is parts[-1][1] and not rest else None
        mixed = _product(graph, mix, resize["input"], columns, taken, before=resize)
        resize.rebind(input=mixed)
        shape = (*result.shape[:2], *resize.output.shape[2:])
        name = graph.fresh_name(f"{resize.output.name}.mixed")
        resize.outputs = (Value(name, result.dtype, shape),)
        terms.append(resize.output)
    if rest:
        terms.append(_rest(graph, mix, rest, found))
    total = terms[0]
    for position, term in enumerate(terms[1:], 2):
        last = position == len(terms)
        name = graph.fresh_name(f"{result.name}.sum")
        made = result if last else Value(name, result.dtype, result.shape)
        add = Node("add", (term, total), (made,), {"scalar": None, "alpha": 1}, mix.layer)
        if last:
            graph.nodes.replace(mix, add)
        else:
            graph.nodes.insert_before(mix, add)
        total = made
    if len(terms) == 1:
        graph.replace_uses(result, total)
        graph.nodes.remove(mix)
    return len(terms) - bool(rest)


def _rest(
    graph: Graph,
    mix: Node,
    rest: list[tuple[Value, torch.Tensor]],
    bias: torch.Tensor | None,
) -> Value:
    """The product of the parts that have all pixels already."""
    value = rest[0][0]
    if len(rest) > 1:
        shape = (value.shape[0], sum(fixed(v.shape[1]) for v, _ in rest), *value.shape[2:])
        joined = Value(graph.fresh_name(f"{mix.output.name}.rest"), value.dtype, shape)
        values = tuple(v for v, _ in rest)
        graph.nodes.insert_before(mix, Node("cat", values, (joined,), {"dim": 1}, mix.layer))
        value = joined
    return _product(graph, mix, value, torch.cat([w for _, w in rest], 1), bias, before=mix)


def _product(
    graph: Graph,
    mix: Node,
    value: Value,
    columns: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    before: Node,
) -> Value:
    """``columns`` times a map: by the layer that makes the map, or by one of its own."""
    layer = _maker(graph, value)
    square = layer is not None and graph.constants[layer["weight"]].shape[0] == len(columns)
    if layer is not None and square:
        first, second = graph.constants[layer["weight"]], columns.flatten(1).double()
        own = layer.get("bias")
        added = 0 if own is None else second @ graph.constants[own].double()
        added = added + (0 if bias is None else bias.double())
        both = (second @ first.flatten(1).double()).reshape(first.shape).to(first.dtype)
        layer.rebind(weight=graph.add_constant(f"{layer['weight'].name}.mixed", both))
        if isinstance(added, torch.Tensor):
            name = f"{layer['weight'].name}.bias"
            layer.rebind(bias=graph.add_constant(name, added.to(first.dtype)))
        return value
    shape = (value.shape[0], len(columns), *value.shape[2:])
    made = Value(graph.fresh_name(f"{value.name}.mixed"), mix.output.dtype, shape)
    node = Node(mix.op, mix.inputs, (made,), dict(mix.attrs), mix.layer)
    name = f"{mix['weight'].name}.{value.name}"
    node.rebind(input=value, weight=graph.add_constant(name, columns.contiguous()), bias=None)
    if bias is not None:
        node.rebind(bias=graph.add_constant(f"{name}.bias", bias))
    graph.nodes.insert_before(before, node)
    return made


def _maker(graph: Graph, value: Value) -> Node | None:
    """The linear layer whose result a map is, seen in another way, if nothing else reads it."""
    if value in graph.outputs or len(graph.users(value)) > 1:
        return None
    views: list[Node] = []
    node = graph.producer(value)
    while node is not None and node.op in VIEWS:
        if graph.only_reader(node["input"]) is not node:
            return None
        views.append(node)
        node = graph.producer(node["input"])
    if node is None or node.op != "linear" or node.attrs["activation"] is not None:
        return None
    plain = node.has_only("input", "weight", "bias") and node["weight"] in graph.constants
    own = node.get("bias")
    if not plain or (own is not None and own not in graph.constants):
        return None
    return node if _columns_are_channels(node.output, views[::-1]) else None


def _columns_are_channels(made: Value, views: list[Node]) -> bool:
    """Whether views make channels of a layer's columns: tried with the columns' numbers."""
    shape = shape_at(made.shape, 1)
    numbers = torch.arange(shape[-1], dtype=torch.int32).expand(shape)
    for view in views:
        attrs = attrs_at(view.attrs, 1)
        if view.op == "permute":
            numbers = numbers.permute(attrs["dims"])
        else:
            numbers = numbers.reshape(attrs["shape"])
    channels = torch.arange(numbers.shape[1], dtype=torch.int32)[:, None, None]
    return numbers.dim() == 4 and bool((numbers == channels).all())
