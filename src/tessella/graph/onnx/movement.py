"""ONNX's operators that move, cut, join or make elements."""

from __future__ import annotations

import math
from typing import Any

import torch

from tessella.graph.graph import Dim, Value
from tessella.graph.onnx.budget import MOST_SIZES
from tessella.graph.onnx.call import Call, Result, Translator, table
from tessella.graph.value import fixed, product

# ── constants and what does nothing ───────────────────────────────────────────────────────────────


def _constant(call: Call) -> Result:
    for name, value in call.attrs.items():
        if name == "value":
            return call.build.constant(call.outputs[0], value)
        if name in ("value_float", "value_floats", "value_int", "value_ints"):
            dtype = torch.float32 if "float" in name else torch.int64
            return call.build.constant(call.outputs[0], torch.tensor(value, dtype=dtype))
    raise call.wrong("a constant that is not a tensor of numbers", seen=", ".join(call.attrs))


def _constant_of_shape(call: Call) -> Result:
    number = call.attrs.get("value", torch.zeros(1)).reshape(())
    shape = tuple(call.sizes(0).flat)
    return call.emit("expand", call.build.constant(call.outputs[0], number), shape=shape)


def _identity(call: Call) -> Result:
    return call.value(0)


def _dropout(call: Call) -> Result:
    ratio = call.number(1, "ratio", 0.5)
    if call.has(2) and call.number(2, "") and ratio:
        raise call.wrong("it draws random numbers: it is in training mode")
    x = call.value(0)
    if not call.wants(1):
        return x
    return [x, call.emit("expand", call.tensor(torch.tensor(True)), shape=x.shape)]


def _eye_like(call: Call) -> Result:
    x = call.value(0)
    if any(isinstance(d, Dim) for d in x.shape):
        raise call.wrong("its size follows the batch")
    rows, columns = map(fixed, x.shape)
    call.modest(rows, columns)
    dtype = getattr(torch, call.attrs.get("dtype", x.dtype))
    shift = call.attrs.get("k", 0)
    ones = torch.arange(columns)[None, :] - torch.arange(rows)[:, None] == shift
    return call.tensor(ones.to(dtype))


def _size(call: Call) -> Result:
    total: Any = 1
    for d in call.value(0).shape:
        total = d * total
    if isinstance(total, Dim):
        raise call.wrong("the number of elements follows the batch")
    return call.build.constant(call.outputs[0], torch.tensor(total))


def _range(call: Call) -> Result:
    start, limit, delta = (call.known(i) for i in range(3))
    call.modest(abs(int((limit.item() - start.item()) / delta.item())))
    made = torch.arange(start.item(), limit.item(), delta.item(), dtype=start.dtype)
    return call.build.constant(call.outputs[0], made)


# ── shapes ────────────────────────────────────────────────────────────────────────────────────────


def _reshape(call: Call) -> Result:
    x = call.value(0)
    shape = list(call.ints(1, "shape") or ())
    if not call.attrs.get("allowzero", 0):
        shape = [x.shape[i] if d == 0 else d for i, d in enumerate(shape)]
    return call.emit("reshape", x, shape=_resolved(call, x, shape))


def _resolved(call: Call, x: Value, shape: list[int | Dim]) -> tuple[int | Dim, ...]:
    """The shape with a number, or a ``Dim`` that follows the batch, in place of −1."""
    if -1 not in shape:
        return tuple(shape)
    known = [d for d in shape if isinstance(d, int) and d != -1]
    if any(isinstance(d, Dim) for d in shape) or not all(isinstance(d, int) for d in x.shape[1:]):
        return tuple(shape)  # the batch is elsewhere in the shape: −1 is a plain number
    missing = product(x.shape) // math.prod(known)
    return tuple(missing if d == -1 else d for d in shape)


def _flatten(call: Call) -> Result:
    x = call.value(0)
    rank = len(x.shape)
    axis = call.attrs.get("axis", 1)
    axis = axis if axis == rank else call.from_front(axis, rank)
    rows: Any = 1
    for d in x.shape[:axis]:
        rows = d * rows
    columns: Any = 1
    for d in x.shape[axis:]:
        columns = d * columns
    return call.emit("reshape", x, shape=(rows, columns))


def _squeeze(call: Call) -> Result:
    x, axes = call.value(0), call.axes(1)
    drop = {i for i, d in enumerate(x.shape) if d == 1} if axes is None else set(axes)
    if any(x.shape[i] != 1 for i in drop):
        raise call.wrong("an axis to drop is not 1", seen=x)
    return call.emit("reshape", x, shape=[d for i, d in enumerate(x.shape) if i not in drop])


def _unsqueeze(call: Call) -> Result:
    x = call.value(0)
    given = call.ints(1, "axes") or ()
    rank = len(x.shape) + len(given)
    axes = {call.from_front(a, rank) for a in given}
    rest = iter(x.shape)
    return call.emit("reshape", x, shape=[1 if i in axes else next(rest) for i in range(rank)])


def _transpose(call: Call) -> Result:
    x = call.value(0)
    order = call.attrs.get("perm", list(range(len(x.shape)))[::-1])
    same = list(order) == list(range(len(x.shape)))
    return x if same else call.emit("permute", x, dims=order)


def _expand(call: Call) -> Result:
    """Both ways: an axis of 1 in the shape keeps the tensor's."""
    x = call.value(0)
    given = list(call.ints(1, "") or ())
    have = [1] * (len(given) - len(x.shape)) + list(x.shape)
    given = [1] * (len(have) - len(given)) + given
    shape = [h if a == 1 else a for h, a in zip(have, given, strict=True)]
    return x if tuple(shape) == x.shape else call.emit("expand", x, shape=shape)


def _tile(call: Call) -> Result:
    return call.aten("repeat", call.value(0), call.ints(1, ""))


# ── cutting and joining ───────────────────────────────────────────────────────────────────────────


def _concat(call: Call) -> Result:
    tensors = [call.value(i) for i in range(len(call.inputs))]
    return call.emit("cat", *tensors, dim=call.axis(1))


def _split(call: Call) -> Result:
    x = call.value(0)
    axis = call.axis(0)
    total = x.shape[axis]
    sizes = call.ints(1, "split")
    if sizes is None:
        if isinstance(total, Dim):
            raise call.wrong("it splits the batch")
        count = call.attrs.get("num_outputs", len(call.outputs))
        if not 1 <= count <= MOST_SIZES:
            raise call.wrong("it makes too many parts, or none", seen=count)
        each = -(-total // count)
        sizes = (*[each] * (count - 1), total - each * (count - 1))
    return call.build.node("split", [x], name=call.outputs[0], sizes=sizes, dim=axis)


def _slice(call: Call) -> Result:
    x = call.value(0)
    starts, ends = call.ints(1, "starts") or (), call.ints(2, "ends") or ()
    axes = call.ints(3, "axes") or tuple(range(len(starts)))
    steps = call.ints(4, "steps") or (1,) * len(starts)
    places = [call.from_front(axis, len(x.shape)) for axis in axes]
    if len(set(places)) < len(places):
        raise call.wrong("it cuts an axis more than once", seen=axes)
    for start, end, axis, step in zip(starts, ends, places, steps, strict=True):
        x = _cut(call, x, axis, start, end, step)
    return x


def _cut(call: Call, x: Value, axis: int, start: Any, end: Any, step: Any) -> Value:
    size = x.shape[axis]
    if isinstance(size, int):
        index = range(size)[slice(start, end, step)]
        if len(index) == size and step == 1:
            return x
        if step < 0:  # torch's slices only go forwards: take the same elements, then turn them
            low = index[-1] if index else 0
            high = index[0] + 1 if index else 0
            x = call.emit("slice", x, dim=axis, start=low, end=high, step=-step)
            return call.aten("flip", x, [axis])
        start, end = index.start, index.stop
    elif isinstance(start, int) and isinstance(end, int) and end >= 2**31 - 1 and step == 1:
        if start == 0:
            return x
        end = None
    elif isinstance(step, Dim) or step < 0:
        raise call.wrong("it goes backwards through the batch")
    return call.emit("slice", x, dim=axis, start=start, end=end, step=step)


def _pad(call: Call) -> Result:
    x = call.value(0)
    rank = len(x.shape)
    pads = [int(p) for p in call.ints(1, "pads") or ()]
    axes = call.axes(3) or range(rank)
    before, after = [0] * rank, [0] * rank
    for i, axis in enumerate(axes):
        before[axis], after[axis] = pads[i], pads[i + len(axes)]
    mode = call.attrs.get("mode", "constant")
    modes = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}
    if mode not in modes:
        raise call.wrong("an unknown way to pad", seen=mode)
    value: float = call.number(2, "value", 0.0) if mode == "constant" else 0.0
    first = next((i for i in range(rank) if before[i] or after[i]), rank)
    if first == rank:
        return x
    first = first if mode == "constant" else min(first, 2)
    pairs = [n for axis in reversed(range(first, rank)) for n in (before[axis], after[axis])]
    if mode != "constant":
        return call.emit("pad", x, pad=pairs, mode=modes[mode], value=None)
    if not math.isfinite(value):
        return call.aten("constant_pad_nd", x, pairs, value)
    return call.emit("pad", x, pad=pairs, mode="constant", value=value)


def _depth_to_space(call: Call) -> Result:
    x, block = call.value(0), call.attrs["blocksize"]
    n, c, h, w = x.shape
    inner = c // (block * block)
    if call.attrs.get("mode", "DCR") == "DCR":
        shape, order = (n, block, block, inner, h, w), (0, 3, 4, 1, 5, 2)
    else:
        shape, order = (n, inner, block, block, h, w), (0, 1, 4, 2, 5, 3)
    turned = call.emit("permute", call.emit("reshape", x, shape=shape), dims=order)
    return call.emit("reshape", turned, shape=(n, inner, h * block, w * block))


def _space_to_depth(call: Call) -> Result:
    x, block = call.value(0), call.attrs["blocksize"]
    n, c, h, w = x.shape
    wide = call.emit("reshape", x, shape=(n, c, h // block, block, w // block, block))
    channels_last = call.attrs.get("mode", "DCR") == "CRD"
    order = (0, 1, 3, 5, 2, 4) if channels_last else (0, 3, 5, 1, 2, 4)
    turned = call.emit("permute", wide, dims=order)
    return call.emit("reshape", turned, shape=(n, c * block * block, h // block, w // block))


def _einsum(call: Call) -> Result:
    return call.aten(
        "einsum", call.attrs["equation"], [call.value(i) for i in range(len(call.inputs))]
    )


def _trilu(call: Call) -> Result:
    diagonal = int(call.number(1, "", 0))
    return call.aten("triu" if call.attrs.get("upper", 1) else "tril", call.value(0), diagonal)


MOVEMENT: dict[str, Translator] = table(
    ("Constant", _constant),
    ("ConstantOfShape", _constant_of_shape),
    ("Identity", _identity),
    ("Dropout", _dropout),
    ("EyeLike", _eye_like),
    ("Size", _size),
    ("Range", _range),
    ("Reshape", _reshape),
    ("Flatten", _flatten),
    ("Squeeze", _squeeze),
    ("Unsqueeze", _unsqueeze),
    ("Transpose", _transpose),
    ("Expand", _expand),
    ("Tile", _tile),
    ("Concat", _concat),
    ("Split", _split),
    ("Slice", _slice),
    ("Pad", _pad),
    ("DepthToSpace", _depth_to_space),
    ("SpaceToDepth", _space_to_depth),
    ("Einsum", _einsum),
    ("Trilu", _trilu),
)
