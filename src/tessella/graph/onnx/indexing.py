"""ONNX's operators that read or write elements at places which are data."""

from __future__ import annotations

import math

import torch

from tessella.graph.graph import Dim, Value
from tessella.graph.onnx.call import Call, Result, Translator, table
from tessella.graph.onnx.layers import static
from tessella.graph.value import product

LOOKED_UP = 1 << 16  # indices into a longer axis are computed: no table is held for them


def _from_front(call: Call, index: Value, size: int | Dim) -> Value:
    """Indices that may be negative, counted from the front: torch's operators want them so.

    Those that are data are looked up in 0, 1, 2, …: one outside is torch's error, as it is ONNX's.
    """
    known = call.build.graph.constants.get(index)
    if known is not None and isinstance(size, int) and not _inside(known, size):
        raise call.wrong(
            "an index is outside of its axis", seen=f"{_outside(known, size)} of {size}"
        )
    if known is None and isinstance(size, int) and 0 < size <= LOOKED_UP:
        return call.aten("index.Tensor", call.tensor(torch.arange(size)), [_wide(call, index)])
    if known is None:
        return _signed(call, index, size)
    return call.aten("remainder.Scalar", _wide(call, index), size)


def _wide(call: Call, index: Value) -> Value:
    return index if index.dtype == "int64" else call.emit("to", index, dtype="int64")


def _inside(index: torch.Tensor, size: int) -> bool:
    return bool(((index >= -size) & (index < size)).all())


def _outside(index: torch.Tensor, size: int) -> int:
    return int(index[(index < -size) | (index >= size)][0])


def _gather(call: Call) -> Result:
    x, axis = call.value(0), call.axis(0)
    index = call.constant(1)
    if index is not None and index.ndim == 0:
        return call.emit("select", x, dim=axis, index=int(index))
    rows = call.value(1)
    if axis == 0 and len(x.shape) == 2 and x in call.build.graph.constants and index is None:
        return call.emit("embedding", rows, x)
    if rows not in call.build.graph.constants:  # one step, which counts and refuses by itself
        return call.aten("index.Tensor", x, [*[None] * axis, _wide(call, rows)])
    rows = _from_front(call, rows, x.shape[axis])
    flat = (product(rows.shape),)
    line = rows if len(rows.shape) == 1 else call.emit("reshape", rows, shape=flat)
    taken = call.aten("index_select", x, axis, line)
    shape = (*x.shape[:axis], *rows.shape, *x.shape[axis + 1 :])
    return taken if len(rows.shape) == 1 else call.emit("reshape", taken, shape=shape)


def _gather_elements(call: Call) -> Result:
    x, axis = call.value(0), call.axis(0)
    return call.aten("gather", x, axis, _from_front(call, call.value(1), x.shape[axis]))


def _gather_nd(call: Call) -> Result:
    """Slices of ``x`` at the index tuples in the last axis of the second input."""
    x, places = call.value(0), call.value(1)
    batch = call.attrs.get("batch_dims", 0)
    depth = static(call, places.shape[-1:])[0]
    columns = [
        _from_front(call, call.emit("select", places, dim=len(places.shape) - 1, index=i), size)
        for i, size in enumerate(x.shape[batch : batch + depth])
    ]
    rank = len(places.shape) - 1
    counted = []
    for axis, size in enumerate(static(call, x.shape[:batch])):
        call.modest(size)
        along = [size if i == axis else 1 for i in range(rank)]
        counted.append(call.tensor(torch.arange(size).reshape(along)))
    return call.aten("index.Tensor", x, [*counted, *columns])


_HOW = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def _scatter_elements(call: Call) -> Result:
    x, places, updates = call.value(0), call.value(1), call.value(2)
    axis, how = call.axis(0), call.attrs.get("reduction", "none")
    places = _from_front(call, places, x.shape[axis])
    if how == "none":
        return call.aten("scatter.src", x, axis, places, updates)
    return call.aten("scatter_reduce.two", x, axis, places, updates, _HOW[how])


def _scatter_nd(call: Call) -> Result:
    """``updates`` at the index tuples in the last axis of the second input."""
    x, places, updates = call.value(0), call.value(1), call.value(2)
    how = call.attrs.get("reduction", "none")
    shape, depth = static(call, x.shape), static(call, places.shape[-1:])[0]
    last = len(places.shape) - 1
    columns = [
        _from_front(call, call.emit("select", places, dim=last, index=i), shape[i])
        for i in range(depth)
    ]
    if how in ("none", "add"):
        return call.aten("index_put", x, columns, updates, how == "add")
    inner = math.prod(shape[depth:])
    row = columns[0]
    for column, size in zip(columns[1:], shape[1:depth], strict=True):
        row = call.emit("add", call.emit("mul", row, scalar=size), column, alpha=1)
    count = math.prod(static(call, row.shape))
    lines = call.emit("reshape", row, shape=(count, 1))
    grid = call.emit("expand", lines, shape=(count, inner))
    flat = call.emit("reshape", x, shape=(math.prod(shape[:depth]), inner))
    new = call.emit("reshape", updates, shape=(count, inner))
    made = call.aten("scatter_reduce.two", flat, 0, grid, new, _HOW[how])
    return call.emit("reshape", made, shape=shape)


def _one_hot(call: Call) -> Result:
    """``values[1]`` where the count along a new axis is the index, else ``values[0]``."""
    index, depth = call.value(0), int(call.number(1, ""))
    off, on = (call.emit("select", call.value(2), dim=0, index=i) for i in (0, 1))
    rank = len(index.shape) + 1
    axis = call.from_front(call.attrs.get("axis", -1), rank)
    wide = call.emit("reshape", index, shape=(*index.shape[:axis], 1, *index.shape[axis:]))
    wide = (
        _from_front(call, wide, depth) if _all_inside(call, depth) else _signed(call, wide, depth)
    )
    call.modest(depth)
    count = torch.arange(depth).reshape([depth if i == axis else 1 for i in range(rank)])
    return call.aten("where.self", call.aten("eq.Tensor", wide, call.tensor(count)), on, off)


def _all_inside(call: Call, depth: int) -> bool:
    known = call.constant(0)
    return known is not None and _inside(known, depth)


def _signed(call: Call, index: Value, depth: int | Dim) -> Value:
    """Negative indices counted from the end; those outside stay outside."""
    index = _wide(call, index)
    below = call.aten("lt.Scalar", index, 0)
    return call.aten("where.self", below, call.aten("add.Scalar", index, depth), index)


def _top_k(call: Call) -> Result:
    """A stable sort, so that of equals the first comes first."""
    x, axis = call.value(0), call.axis(-1)
    count = int(call.number(1, "k"))
    size = x.shape[axis]
    if count < 0 or (isinstance(size, int) and count > size):
        raise call.wrong("it asks for more than there are, or for fewer than none", seen=count)
    descending = bool(call.attrs.get("largest", 1))
    call.attrs.get("sorted", 1)  # sorted is one of the orders that unsorted allows
    wide = call.emit("to", x, dtype="int64") if x.dtype.startswith("uint") else x
    keyword = {"stable": True, "dim": axis, "descending": descending}
    made = call.atens("sort.stable", wide, **keyword)
    values, places = (call.emit("slice", v, dim=axis, start=0, end=count, step=1) for v in made)
    return [values if wide is x else call.emit("to", values, dtype=x.dtype), places]


def _compress(call: Call) -> Result:
    """The elements where a condition that is known holds."""
    x = call.value(0)
    chosen = call.known(1).nonzero().flatten()
    if "axis" in call.attrs:
        return call.aten("index_select", x, call.axis(), call.tensor(chosen))
    flat = call.emit("reshape", x, shape=(math.prod(static(call, x.shape)),))
    return call.aten("index_select", flat, 0, call.tensor(chosen))


def _reverse_sequence(call: Call) -> Result:
    """Each sample's first ``lengths[i]`` elements along the time axis, backwards."""
    x, lengths = call.value(0), call.value(1)
    time, batch = call.attrs.get("time_axis", 0), call.attrs.get("batch_axis", 1)
    return reversed_sequences(call, x, lengths, time, batch)


def reversed_sequences(call: Call, x: Value, lengths: Value, time: int, batch: int) -> Value:
    """``x`` with each sample turned round up to its length."""
    rank, steps = len(x.shape), static(call, x.shape)[time]
    call.modest(steps)
    along = [x.shape[batch] if i == batch else 1 for i in range(rank)]
    lengths = call.emit("to", lengths, dtype="int64") if lengths.dtype != "int64" else lengths
    ends = call.emit("reshape", lengths, shape=along)
    count = torch.arange(steps).reshape([steps if i == time else 1 for i in range(rank)])
    step = call.tensor(count)
    turned = call.emit("sub", call.emit("add", ends, scalar=-1, alpha=1), step, alpha=1)
    place = call.aten("where.self", call.aten("lt.Tensor", step, ends), turned, step)
    return call.aten("gather", x, time, call.emit("expand", place, shape=x.shape))


INDEXING: dict[str, Translator] = table(
    ("Gather", _gather),
    ("GatherElements", _gather_elements),
    ("GatherND", _gather_nd),
    ("ScatterElements Scatter", _scatter_elements),
    ("ScatterND", _scatter_nd),
    ("OneHot", _one_hot),
    ("TopK", _top_k),
    ("Compress", _compress),
    ("ReverseSequence", _reverse_sequence),
)
