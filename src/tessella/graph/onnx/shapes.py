"""Arithmetic on shapes: what ONNX files compute with ``Shape`` when a size follows the batch.

Here a tensor is a NumPy array of objects, each an ``int`` or a ``Dim``. Everything is done at once;
nothing of it reaches the graph but the sizes that come out.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tessella.graph.graph import Dim
from tessella.graph.onnx.budget import MOST_SIZES
from tessella.graph.onnx.call import Call, Result, Sizes, Translator, table


def _array(values: Any) -> Sizes:
    """An array of objects, of the shape that nested lists or an array say."""
    return np.array(values, dtype=object)


def _shape(call: Call) -> Result:
    given = call.given(0)
    shape = given.shape if isinstance(given, np.ndarray) else call.value(0).shape
    return _array(list(shape[call.attrs.get("start", 0) : call.attrs.get("end")]))


def _gather(call: Call) -> Result:
    axis = call.attrs.get("axis", 0)
    return _array(np.take(call.sizes(0), call.sizes(1).astype(np.int64), axis=axis))


def _slice(call: Call) -> Result:
    sizes = call.sizes(0)
    starts, ends = call.ints(1, "starts"), call.ints(2, "ends")
    axes = call.ints(3, "axes") or tuple(range(len(starts or ())))
    steps = call.ints(4, "steps") or (1,) * len(axes)
    index = [slice(None)] * sizes.ndim
    for axis, start, end, step in zip(axes, starts or (), ends or (), steps, strict=True):
        index[axis] = slice(start, end, step)
    return sizes[tuple(index)]


def _concat(call: Call) -> Result:
    return np.concatenate([call.sizes(i) for i in range(len(call.inputs))], call.attrs["axis"])


def _unsqueeze(call: Call) -> Result:
    axes = call.ints(1, "axes")
    if axes is None:
        raise call.wrong("it says no axes")
    return np.expand_dims(call.sizes(0), axes)


def _squeeze(call: Call) -> Result:
    return np.squeeze(call.sizes(0), call.ints(1, "axes"))


def _reshape(call: Call) -> Result:
    sizes, shape = call.sizes(0), list(call.sizes(1).flat)
    if not call.attrs.get("allowzero", 0):
        kept = [*sizes.shape, *[0] * len(shape)]
        shape = [kept[i] if size == 0 else size for i, size in enumerate(shape)]
    return sizes.reshape(tuple(shape))


def _cast(call: Call) -> Result:
    if not call.attrs["to"].startswith("int"):
        raise call.wrong("arithmetic on the batch size in floating point")
    return call.sizes(0)


def _same(call: Call) -> Result:
    return call.sizes(0)


def _binary(function: Callable[[Any, Any], Any]) -> Translator:
    def translator(call: Call) -> Result:
        return _array(function(call.sizes(0), call.sizes(1)))

    return translator


def _equal(call: Call) -> Result:
    left, right = np.broadcast_arrays(call.sizes(0), call.sizes(1))
    return _array([int(a == b) for a, b in zip(left.flat, right.flat)]).reshape(left.shape)


def _where(call: Call) -> Result:
    condition, left, right = np.broadcast_arrays(*(call.sizes(i) for i in range(3)))
    chosen = [a if c else b for c, a, b in zip(condition.flat, left.flat, right.flat)]
    return _array(chosen).reshape(condition.shape)


def _product(call: Call) -> Result:
    total: Any = 1
    for size in call.sizes(0).flat:
        total = size * total
    return _array([total] if call.attrs.get("keepdims", 1) else total)


def _constant_of_shape(call: Call) -> Result:
    """A tensor of one number whose shape follows the batch: that number, spread.

    Where its shape is known and its numbers are whole, files go on to compute a shape with them.
    """
    number, shape = call.attrs.get("value", torch.zeros(1)), list[Any](call.sizes(0).flat)
    known = [int(size) for size in shape if not isinstance(size, Dim)]
    if number.dtype == torch.int64 and len(known) == len(shape) and math.prod(known) <= MOST_SIZES:
        return np.full(known, int(number), dtype=object)
    spread = call.build.constant(call.outputs[0], number.reshape(()))
    return call.emit("expand", spread, shape=tuple(shape))


ON_SIZES: dict[str, Translator] = table(
    ("Shape", _shape),
    ("Gather", _gather),
    ("Slice", _slice),
    ("Concat", _concat),
    ("Unsqueeze", _unsqueeze),
    ("Squeeze", _squeeze),
    ("Reshape", _reshape),
    ("Cast", _cast),
    ("Identity", _same),
    ("Add", _binary(operator.add)),
    ("Sub", _binary(operator.sub)),
    ("Mul", _binary(operator.mul)),
    ("Div", _binary(operator.floordiv)),
    ("Equal", _equal),
    ("Where", _where),
    ("ReduceProd", _product),
    ("ConstantOfShape", _constant_of_shape),
)

# In these a shape may be any input; in the others it is what they read, not how they read it.
_ANY_INPUT = frozenset({"Concat", "Add", "Sub", "Mul", "Div", "Equal", "Where"})


def on_sizes(call: Call) -> Translator | None:
    """The translation of a node that computes with a shape, or None if it works on tensors."""
    among = call.inputs if call.op in _ANY_INPUT else call.inputs[:1]
    if call.op == "Shape" or any(isinstance(i, np.ndarray) for i in among):
        return ON_SIZES.get(call.op)
    return None
