"""Permutes that meet and cancel: chains of permute, reshape and select as few views as they are.

A chain only names elements in another order. Written in factors of its base's axes, it is split,
select, permute, merge, whatever its length; and where the order of rows is changed before a layer
that treats each row alike, it can as well be changed after, where it often meets its undoing:
attention in torch's older form turns [N, S, E] to [S, N, E] and back around every product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from tessella.compiler.rewrites import dead_code
from tessella.graph.graph import Dim, Graph, Node, Value, shape_at
from tessella.graph.value import product

VIEWS = frozenset(("permute", "reshape", "select"))
MOST_VIEWS = 32  # in a row that are looked at; networks have less than ten
Size = int | Dim


@dataclass(frozen=True, eq=False)
class _Factor:
    """A part of an axis: the axis is the product of its factors, the first one outermost."""

    size: Size


@dataclass(frozen=True)
class _Views:
    """Which elements of a base there are, and in which order.

    Attributes:
        base: what is looked at.
        order: the factors of the base's axes, in its order.
        axes: what each axis of the view runs over; nothing, for a size of 1.
        picked: the factors of which one place is taken.
        steps: how many nodes it is made of; ``copies``: of them, reshapes of what is not dense.
    """

    base: Value
    order: tuple[_Factor, ...]
    axes: tuple[tuple[_Factor, ...], ...]
    picked: tuple[tuple[_Factor, int], ...] = ()
    steps: int = 0
    copies: int = 0
    dense: bool = True

    @property
    def flat(self) -> list[_Factor]:
        """The factors in the view's order."""
        return [factor for axis in self.axes for factor in axis]

    @property
    def in_order(self) -> bool:
        """Whether it is all of the base, in its order: a reshape of it, or the base itself."""
        return self.flat == list(self.order)


def apply(graph: Graph) -> int:
    """Shorten chains, and move permutes behind layers, if less is copied then; returns how many."""
    dead_code.apply(graph)  # views that nobody reads any more would look like readers
    both = _changed(graph, move=False), _changed(graph, move=True)
    best, count = min(both, key=lambda made: _cost(made[0]))
    if _cost(best) >= _cost(graph):
        return 0
    graph.become(best)
    return count


def _changed(graph: Graph, *, move: bool) -> tuple[Graph, int]:
    """A copy with shorter chains, and how many changes it got."""
    graph, count = graph.copy(), 0
    undone = _undone(graph) if move else set()
    for node in list(graph.nodes):
        if node.op in VIEWS:
            count += _shorten(graph, node)
        elif move and (_by_row(node) or _is_unary(node)) and node.output in undone:
            count += _permute_after(graph, node)
    dead_code.apply(graph)
    return graph, count


def _cost(graph: Graph) -> tuple[int, int]:
    return _copied(graph), len(graph.nodes)


def _copied(graph: Graph) -> int:
    """Elements of a sample that must be moved, because a view is not dense and its reader wants it.

    That is a reshape, or a layer by row: those by element read what they get.
    """
    views = (n for n in graph.nodes if n.operation.view and n.op != "reshape")
    strided = {v for n in views for v in n.outputs}
    return sum(
        math.prod(shape_at(node["input"].shape, 1))
        for node in graph.nodes
        if (node.op == "reshape" or _by_row(node)) and node["input"] in strided
    )


# --- chains ---------------------------------------------------------------------------------------


def _chain(graph: Graph, value: Value) -> _Views | None:
    """The longest chain that makes a value; None if it is not made by a view."""
    nodes: list[Node] = []
    while len(nodes) < MOST_VIEWS and (node := graph.producer(value)) and node.op in VIEWS:
        nodes.append(node)
        value = node["input"]
    nodes.reverse()
    for first in range(len(nodes)):
        chain = _all_of(nodes[first]["input"])
        for node in nodes[first:]:
            chain = None if chain is None else _followed(chain, node)
        if chain is not None:
            return chain
    return None


def _all_of(value: Value) -> _Views | None:
    if not all(_is_plain(d) for d in value.shape):
        return None
    axes = tuple(() if d == 1 else (_Factor(d),) for d in value.shape)
    return _Views(base=value, order=tuple(f for axis in axes for f in axis), axes=axes)


def _is_plain(size: Size) -> bool:
    """Whether a size is a number, or a number times the batch, and not 0."""
    return size.offset == 0 if isinstance(size, Dim) else size > 0


def _followed(chain: _Views, node: Node) -> _Views | None:
    """The chain with one more view; None if it is not made of factors."""
    if node.op == "permute":
        axes = tuple(chain.axes[d] for d in node.attrs["dims"])
        made: _Views | None = replace(chain, axes=axes)
    elif node.op == "select":
        made = _picked(chain, node.attrs["dim"], node.attrs["index"])
    else:
        made = _cut(chain, node.output.shape)
        if made is not None and not chain.dense:
            made = replace(made, copies=chain.copies + 1)
    if made is None:
        return None
    outer = made.order[len(made.picked) :] if _picks_outermost(made) else made.order
    dense = made.flat == list(outer) or (node.op == "reshape")
    return replace(made, steps=chain.steps + 1, dense=dense)


def _picks_outermost(chain: _Views) -> bool:
    picked = {id(factor) for factor, _ in chain.picked}
    return {id(f) for f in chain.order[: len(picked)]} == picked


def _picked(chain: _Views, axis: int, index: int) -> _Views | None:
    factors = chain.axes[axis]
    if len(factors) > 1 or any(isinstance(f.size, Dim) for f in factors):
        return None
    axes = chain.axes[:axis] + chain.axes[axis + 1 :]
    return replace(chain, axes=axes, picked=chain.picked + tuple((f, index) for f in factors))


def _cut(chain: _Views, shape: Sequence[Size]) -> _Views | None:
    """The same elements in the same order as axes of other sizes; factors are split as needed."""
    rest, order, axes = chain.flat, list(chain.order), []
    for wanted in shape:
        axis: list[_Factor] = []
        while wanted != 1:
            if not rest:
                return None
            factor = rest.pop(0)
            if (left := _divided(wanted, factor.size)) is not None:
                axis.append(factor)
                wanted = left
                continue
            inner = _divided(factor.size, wanted)
            if inner is None:
                return None
            outer, inside = _Factor(wanted), _Factor(inner)
            at = order.index(factor)
            order[at : at + 1] = [outer, inside]
            rest.insert(0, inside)
            axis.append(outer)
            wanted = 1
        axes.append(tuple(axis))
    if rest:
        return None
    return replace(chain, order=tuple(order), axes=tuple(axes))


def _divided(size: Size, by: Size) -> Size | None:
    """``size / by`` if that is a whole number, or one times the batch."""
    if isinstance(by, Dim):
        if not isinstance(size, Dim) or size.offset or by.offset or size.factor % by.factor:
            return None
        return size.factor // by.factor
    if isinstance(size, Dim):
        if size.offset or size.factor % by:
            return None
        return Dim(size.factor // by)
    return None if size % by else size // by


# --- shorter --------------------------------------------------------------------------------------


def _shorten(graph: Graph, node: Node) -> int:
    """Make a view from the base of its chain, if that copies less, or takes fewer nodes."""
    chain = _chain(graph, node.output)
    if chain is None or chain.steps < 2:
        return 0
    ops = list(_canonical(chain, node.output.shape))
    copies = _copies(chain, ops)
    if copies > chain.copies or (copies, len(ops)) >= (chain.copies, chain.steps):
        return 0
    if copies == chain.copies and copies and _is_shared(graph, node, chain.base):
        return 0  # the others would still need the copy
    if not ops:
        if node.output in graph.outputs:
            return 0
        graph.replace_uses(node.output, chain.base)
        graph.nodes.remove(node)
        return 1
    _write(graph, node, chain.base, ops)
    return 1


def _is_shared(graph: Graph, node: Node, base: Value) -> bool:
    """Whether somebody else reads what lies between a base and the end of its chain."""
    value: Value | None = node["input"]
    while value is not None and value is not base:
        if len(graph.users(value)) > 1 or value in graph.outputs:
            return True
        view = graph.producer(value)
        value = None if view is None else view["input"]
    return False


Made = tuple[str, dict[str, Any], tuple[Size, ...]]  # operation, attributes, shape


def _canonical(chain: _Views, shape: Sequence[Size]) -> Iterator[Made]:
    """Split, select, permute, merge: what of these a chain needs."""
    shape = tuple(shape)
    if chain.in_order:
        if shape != tuple(chain.base.shape):
            yield "reshape", {"shape": shape}, shape
        return
    parts = _runs(chain)
    merges = len(parts) > len(chain.picked) + sum(bool(axis) for axis in chain.axes)
    units = 0 if merges else sum(not axis for axis in chain.axes)  # free while all is dense
    sizes = (*(1,) * units, *map(_product, parts))
    base = tuple(chain.base.shape)
    longer = [axis for axis, size in enumerate(base) if size != 1]
    stays = merges and not chain.picked and tuple(base[axis] for axis in longer) == sizes
    if stays:  # without a reshape, which would copy what attention makes of one image
        sizes = base
    elif sizes != base:
        yield "reshape", {"shape": sizes}, sizes
    places = {id(factor): index for factor, index in chain.picked}
    left = [part for part in parts if id(part[0]) not in places]
    for at in reversed(range(len(parts))):
        if (index := places.get(id(parts[at][0]))) is not None:
            at += units
            sizes = sizes[:at] + sizes[at + 1 :]
            yield "select", {"dim": at, "index": index}, sizes
    order = {id(factor): at for at, factor in enumerate(chain.flat)}
    ordered = iter(sorted(range(len(left)), key=lambda i: order[id(left[i][0])]))
    if units:
        ones = iter(range(units))
        dims = tuple(next(ordered) + units if axis else next(ones) for axis in chain.axes)
    elif stays:
        ones = (axis for axis, size in enumerate(base) if size == 1)
        dims = (*ones, *(longer[at] for at in ordered))
    else:
        dims = tuple(ordered)
    if dims != tuple(range(len(dims))):
        sizes = tuple(sizes[d] for d in dims)
        yield "permute", {"dims": dims}, sizes
    if sizes != shape:
        yield "reshape", {"shape": shape}, shape


def _runs(chain: _Views) -> list[list[_Factor]]:
    """The base's factors, those together that stay together: within one axis, before and after."""
    axis_of = {id(f): i for i, axis in enumerate(chain.axes) for f in axis}
    after = {id(f): g for axis in chain.axes for f, g in pairwise(axis)}
    parts: list[list[_Factor]] = []
    ends = _ends(chain)
    for factor in chain.order:
        last = parts[-1][-1] if parts else None
        together = (
            last is not None
            and id(last) not in ends
            and after.get(id(last)) is factor
            and axis_of.get(id(last)) == axis_of.get(id(factor))
        )
        if together:
            parts[-1].append(factor)
        else:
            parts.append([factor])
    return parts


def _ends(chain: _Views) -> set[int]:
    """The last factor of each of the base's axes."""
    return {id(axis[-1]) for axis in _base_axes(chain) if axis}


def _base_axes(chain: _Views) -> list[list[_Factor]]:
    """The base's axes in factors; nothing, for a size of 1."""
    axes, rest = [], list(chain.order)
    for size in chain.base.shape:
        axis: list[_Factor] = []
        left: Size | None = size
        while left is not None and left != 1:
            axis.append(rest.pop(0))
            left = _divided(left, axis[-1].size)
        axes.append(axis)
    return axes


def _product(factors: Sequence[_Factor]) -> Size:
    return product(factor.size for factor in factors)


def _copies(chain: _Views, ops: Sequence[Made]) -> int:
    """Only a merge at the end can copy: before it there are views."""
    views = [op for op, _, _ in ops[:-1]]
    strided = "permute" in views or ("select" in views and not _picks_outermost(chain))
    return int(bool(ops) and ops[-1][0] == "reshape" and strided)


def _write(graph: Graph, node: Node, base: Value, ops: Sequence[Made]) -> None:
    """Put the operations in a node's place; it is the last of them. Equal ones are there once."""
    value = base
    for op, attrs, shape in ops[:-1]:
        same = (
            n
            for n in graph.users(value)
            if n < node and n.op == op and n.inputs == (value,) and n.attrs == attrs
        )
        found = next(same, None)
        if found is None:
            made = Value(graph.fresh_name(f"{value.name}.{op}"), value.dtype, shape)
            found = Node(op=op, inputs=(value,), outputs=(made,), attrs=attrs, layer=node.layer)
            graph.nodes.insert_before(node, found)
        value = found.output
    node.op, node.attrs, _ = ops[-1]
    node.inputs = (value,)


# --- behind what works by row ---------------------------------------------------------------------


def _is_unary(node: Node) -> bool:
    return node.operation.elementwise and len(node.operation.inputs) == len(node.inputs) == 1


def _by_row(node: Node) -> bool:
    """Whether every row of the last axis is treated alike, by itself."""
    if node.op == "layer_norm":
        return len(node.attrs["normalized_shape"]) == 1
    return node.op == "linear" and node.has_only("input", "weight", "bias")


def _permute_after(graph: Graph, node: Node) -> int:
    """Let a layer read rows in the order in which they lie, and change the order of its result."""
    chain = _chain(graph, node["input"])
    if chain is None or chain.picked or not chain.axes or not chain.axes[-1]:
        return 0
    last = chain.axes[-1]
    rows = [f for f in chain.order if f not in last]
    axes = [  # the base's, without what is in the rows themselves
        kept
        for axis in _base_axes(chain)
        if (kept := tuple(f for f in axis if f not in last)) or not axis
    ]
    straight = replace(chain, axes=(*axes, last))
    shape = tuple(_product(axis) for axis in straight.axes)
    moved = [f for axis in chain.axes[:-1] for f in axis] != rows
    if not (moved or shape != tuple(node["input"].shape)):
        return 0
    new = node.output.shape[-1]
    result = Value(
        graph.fresh_name(f"{node.output.name}.rows"), node.output.dtype, (*shape[:-1], new)
    )
    before = Node(op="reshape", inputs=(chain.base,), outputs=(), attrs={}, layer=node.layer)
    source = chain.base
    ops = list(_canonical(straight, shape))
    if ops:
        source = Value(graph.fresh_name(f"{chain.base.name}.rows"), chain.base.dtype, shape)
        before.outputs = (source,)
        graph.nodes.insert_before(node, before)
        _write(graph, before, chain.base, ops)
    old = node.output
    after = Node(op="reshape", inputs=(result,), outputs=(old,), attrs={}, layer=node.layer)
    node.rebind(input=source)
    node.outputs = (result,)
    graph.nodes.insert_after(node, after)
    final = () if new == 1 else (_Factor(new),)
    turned = _Views(base=result, order=(*rows, *final), axes=(*chain.axes[:-1], final))
    _write(graph, after, result, list(_canonical(turned, old.shape)))
    return 1


def _undone(graph: Graph) -> set[Value]:
    """The values that all readers permute, at once or behind other views and layers by row.

    What comes after a node is as it was when the pass comes to the node, so it is asked once.
    """
    found: set[Value] = set()

    def undoes(user: Node, value: Value) -> bool:
        if user.op == "permute":
            return True
        passes = user.op in VIEWS or ((_by_row(user) or _is_unary(user)) and user["input"] is value)
        return passes and found.issuperset(user.outputs)

    for node in reversed(graph.nodes):
        for value in node.outputs:
            users = graph.users(value)
            if users and value not in graph.outputs and all(undoes(u, value) for u in users):
                found.add(value)
    return found
