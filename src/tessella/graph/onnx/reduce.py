"""ONNX's softmax and reductions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from tessella.graph.graph import Value
from tessella.graph.onnx.call import Call, Result, Translator, table
from tessella.graph.onnx.layers import static


def _softmax(op: str) -> Translator:
    def translator(call: Call) -> Result:
        x = call.value(0)
        if call.opset >= 13:
            return call.emit(op, x, dim=call.axis(-1))
        axis = call.axis(1)  # before, all axes from this one on together
        if axis == len(x.shape) - 1:
            return call.emit(op, x, dim=axis)
        rows = call.emit(
            "reshape", x, shape=(*x.shape[:axis], math.prod(static(call, x.shape[axis:])))
        )
        return call.emit("reshape", call.emit(op, rows, dim=axis), shape=x.shape)

    return translator


def _axes(call: Call) -> tuple[int, ...] | None:
    """The axes of a reduction; None for all. The empty tuple where there is nothing to do."""
    axes, nothing = call.axes(1), call.attrs.get("noop_with_empty_axes", 0)
    return () if axes is None and nothing else axes


def _reduce(op: str) -> Callable[[Call], Value]:
    def translator(call: Call) -> Value:
        x, axes = call.value(0), _axes(call)
        keep = bool(call.attrs.get("keepdims", 1))
        dim = tuple(range(len(x.shape))) if axes is None else axes
        if not dim:
            return x
        if op in _LIMITS and any(x.shape[d] == 0 for d in dim):
            return _of_nothing(call, op, x, dim, keep)
        if op in _LIMITS or x.dtype.startswith(("float", "bfloat")):
            return call.emit(op, x, dim=dim, keepdim=keep)
        if op == "mean":  # integers: torch has no mean of them
            wide = call.emit("mean", call.emit("to", x, dtype="float64"), dim=dim, keepdim=keep)
            return call.emit("to", call.aten("trunc", wide), dtype=x.dtype)
        return call.emit(op, x, dim=dim, keepdim=keep, dtype=x.dtype)

    return translator


_LIMITS = {"amax": -math.inf, "amin": math.inf}


def _of_nothing(call: Call, op: str, x: Value, dim: tuple[int, ...], keep: bool) -> Value:
    """The largest or smallest of no elements: the lowest or highest that the type has."""
    dtype = getattr(torch, x.dtype)
    if dtype.is_floating_point:
        limit = _LIMITS[op]
    elif x.dtype == "bool":
        limit = op == "amin"
    else:
        limit = torch.iinfo(dtype).min if op == "amax" else torch.iinfo(dtype).max
    shape = [1 if i in dim else d for i, d in enumerate(x.shape) if keep or i not in dim]
    return call.emit("expand", call.tensor(torch.tensor(limit, dtype=dtype)), shape=shape)


def _sum_of(first: str, last: str | None = None) -> Translator:
    """A sum of a function of the elements: of squares, of magnitudes, …"""
    reduce = _reduce("sum")

    def translator(call: Call) -> Result:
        x = call.value(0)
        squared = call.emit("mul", x, x) if first == "square" else x
        squared = squared if first in ("", "square") else call.emit(first, x)
        made = reduce(_with_input(call, squared))
        return call.emit(last, made) if last else made

    return translator


def _with_input(call: Call, x: Value) -> Call:
    return replace(call, inputs=(x, *call.inputs[1:]))


def _log_sum_exp(call: Call) -> Result:
    """Shifted by the largest, so that no power leaves the range."""
    x, axes = call.value(0), _axes(call)
    keep = bool(call.attrs.get("keepdims", 1))
    dim = tuple(range(len(x.shape))) if axes is None else axes
    if any(x.shape[d] == 0 for d in dim):
        return _of_nothing(call, "amax", x, dim, keep)
    return call.aten("logsumexp", x, dim, keep) if dim else x


def _reduce_product(call: Call) -> Result:
    x, axes = call.value(0), _axes(call)
    keep = bool(call.attrs.get("keepdims", 1))
    dtype = getattr(torch, x.dtype)
    for axis in sorted(range(len(x.shape)) if axes is None else axes, reverse=True):
        x = call.aten("prod.dim_int", x, axis, keep, dtype=dtype)
    return x


def _arg(target: str) -> Translator:
    def translator(call: Call) -> Result:
        x, axis = call.value(0), call.axis(0)
        keep = bool(call.attrs.get("keepdims", 1))
        if not call.attrs.get("select_last_index", 0):
            return call.aten(target, x, axis, keep)
        first = call.aten(target, call.aten("flip", x, [axis]), axis, keep)
        last = call.emit("neg", first)
        return call.emit("add", last, scalar=x.shape[axis] - 1, alpha=1)

    return translator


def _hardmax(call: Call) -> Result:
    """One where the first largest element is, else zero."""
    x = call.value(0)
    axis = call.axis(-1 if call.opset >= 13 else 1)
    if call.opset < 13 and axis != len(x.shape) - 1:
        raise call.wrong("several axes together, as before opset 13")
    size = static(call, x.shape)[axis]
    call.modest(size)
    place = call.aten("argmax", x, axis, True)
    along = [size if i == axis else 1 for i in range(len(x.shape))]
    count = call.tensor(torch.arange(size).reshape(along))
    return call.emit("to", call.aten("eq.Tensor", place, count), dtype=x.dtype)


def _lp_normalization(call: Call) -> Result:
    x, axis, p = call.value(0), call.axis(-1), call.attrs.get("p", 2)
    if p not in (1, 2):
        raise call.wrong("norms 1 and 2 are known", seen=p)
    size = call.emit("mul", x, x) if p == 2 else call.emit("abs", x)
    norm = call.emit("sum", size, dim=(axis,), keepdim=True)
    norm = call.emit("sqrt", norm) if p == 2 else norm
    zero = call.aten("eq.Scalar", norm, 0)
    return call.emit(
        "div", x, call.emit("add", norm, call.emit("to", zero, dtype=x.dtype), alpha=1)
    )


def _cumulate(target: str, neutral: int) -> Translator:
    """Running sums or products; ``exclusive`` leaves the element itself out."""

    def translator(call: Call) -> Result:
        x = call.value(0)
        axis = call.from_front(int(call.number(1, "")), len(x.shape))
        exclusive, back = call.attrs.get("exclusive", 0), call.attrs.get("reverse", 0)
        made = call.aten("flip", x, [axis]) if back else x
        if exclusive:
            size = x.shape[axis]
            made = call.emit("slice", made, dim=axis, start=0, end=size - 1, step=1)
            pad = [0] * (2 * (len(x.shape) - 1 - axis)) + [1, 0]
            made = call.emit("pad", made, pad=pad, mode="constant", value=neutral)
        made = call.aten(target, made, axis, dtype=getattr(torch, x.dtype))
        return call.aten("flip", made, [axis]) if back else made

    return translator


def _mean_variance(call: Call) -> Result:
    x = call.value(0)
    axes = tuple(call.from_front(a, len(x.shape)) for a in call.attrs.get("axes", (0, 2, 3)))
    if 0 in axes and x.shape[0] != 1 and not isinstance(x.shape[0], int):
        raise call.wrong("it mixes the samples of a batch")
    distance = call.emit("sub", x, call.emit("mean", x, dim=axes, keepdim=True), alpha=1)
    square = call.emit("mul", distance, distance)
    deviation = call.emit("sqrt", call.emit("mean", square, dim=axes, keepdim=True))
    return call.emit("div", distance, call.emit("add", deviation, scalar=1e-9, alpha=1))


REDUCE: dict[str, Translator] = table(
    ("Softmax", _softmax("softmax")),
    ("LogSoftmax", _softmax("log_softmax")),
    ("Hardmax", _hardmax),
    ("ReduceMean", _reduce("mean")),
    ("ReduceSum", _reduce("sum")),
    ("ReduceMax", _reduce("amax")),
    ("ReduceMin", _reduce("amin")),
    ("ReduceL1", _sum_of("abs")),
    ("ReduceL2", _sum_of("square", "sqrt")),
    ("ReduceSumSquare", _sum_of("square")),
    ("ReduceLogSum", _sum_of("", "log")),
    ("ReduceLogSumExp", _log_sum_exp),
    ("ReduceProd", _reduce_product),
    ("ArgMax", _arg("argmax")),
    ("ArgMin", _arg("argmin")),
    ("LpNormalization", _lp_normalization),
    ("MeanVarianceNormalization", _mean_variance),
    ("CumSum", _cumulate("cumsum", 0)),
    ("CumProd", _cumulate("cumprod", 1)),
)
