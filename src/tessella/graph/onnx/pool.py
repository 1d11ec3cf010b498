"""ONNX's poolings, over one to three axes, with padding, dilation and ceiling of every kind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tessella.graph.graph import Dim, Value
from tessella.graph.onnx.call import Call, Result, Translator, table
from tessella.graph.onnx.layers import static, torch_pads, window


@dataclass(frozen=True, kw_only=True)
class _Windows:
    """Where the windows of a pooling lie: sizes for each spatial axis, two where there is one.

    Attributes:
        before, after: padding. ``beyond`` is what the last window reaches over it (``ceil_mode``).
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    beyond: tuple[int, ...]
    ceil: bool

    @property
    def even(self) -> bool:
        """Whether torch's own poolings can pad like this."""
        halves = zip(self.before, self.kernel, strict=True)
        return self.before == self.after and all(2 * p <= k for p, k in halves)


def _windows(call: Call) -> tuple[Value, _Windows]:
    """The input, with one spatial axis made two, and where its windows lie."""
    x, kernel = call.value(0), tuple(call.attrs["kernel_shape"])
    if not 1 <= len(kernel) <= 3:
        raise call.wrong("a pooling over 1 to 3 axes is known", seen=f"{len(kernel)} axes")
    attrs, before, after = window(call, kernel)
    stride, dilation = attrs["stride"], attrs["dilation"]
    ceil = bool(call.attrs.get("ceil_mode", 0))
    if len(kernel) == 1:
        x = call.emit("reshape", x, shape=(*x.shape[:2], 1, *x.shape[2:]))
        kernel, stride, dilation = (1, *kernel), (1, *stride), (1, *dilation)
        before, after = [0, *before], [0, *after]
    beyond = [0] * len(kernel)
    if ceil:
        spatial = static(call, x.shape[2:])
        for i, (n, k, s, d) in enumerate(zip(spatial, kernel, stride, dilation, strict=True)):
            reach, room = (k - 1) * d + 1, n + before[i] + after[i]
            count = -(-(room - reach) // s) + 1
            if (count - 1) * s >= n + before[i]:  # a window must not start in the padding
                count -= 1
            beyond[i] = max(0, (count - 1) * s + reach - room)
    return x, _Windows(
        kernel=kernel,
        stride=tuple(stride),
        dilation=tuple(dilation),
        before=tuple(before),
        after=tuple(after),
        beyond=tuple(beyond),
        ceil=ceil,
    )


def _as_given(call: Call, pooled: Value) -> Value:
    """The result with the axis taken out again that ``_windows`` put in."""
    if len(call.attrs["kernel_shape"]) > 1:
        return pooled
    return call.emit("reshape", pooled, shape=(*pooled.shape[:2], pooled.shape[3]))


def _max_pool(call: Call) -> Result:
    x, w = _windows(call)
    if call.wants(1):
        return _max_pool_with_places(call, x, w)
    dtype = x.dtype
    if not dtype.startswith(("float", "bfloat")):  # torch pools what floats
        x = call.emit("to", x, dtype="float32")
    padding = w.before
    if not w.even:
        pads = torch_pads(w.before, [a + b for a, b in zip(w.after, w.beyond, strict=True)])
        x = call.aten("constant_pad_nd", x, pads, -math.inf)
        padding = (0,) * len(padding)
    ceil = w.ceil and w.even
    if len(w.kernel) == 3:
        made = call.aten("max_pool3d", x, w.kernel, w.stride, padding, w.dilation, ceil)
    else:
        made = call.emit(
            "max_pool2d",
            x,
            kernel_size=w.kernel,
            stride=w.stride,
            padding=padding,
            dilation=w.dilation,
            ceil_mode=ceil,
        )
    return _as_given(call, made if made.dtype == dtype else call.emit("to", made, dtype=dtype))


def _max_pool_with_places(call: Call, x: Value, w: _Windows) -> Result:
    """The largest values, and where each lies in the whole tensor, counted through all its axes."""
    if len(w.kernel) != 2 or not w.even:
        raise call.wrong("places of the largest are known over 2 axes with equal padding")
    target, order = "max_pool2d_with_indices", call.attrs.get("storage_order", 0)
    made, places = call.atens(target, x, w.kernel, w.stride, w.before, w.dilation, w.ceil)
    n, channels, height, width = static(call, x.shape)
    if order:
        rows = call.aten("floor_divide", places, call.tensor(torch.tensor(width)))
        columns = call.aten("remainder.Scalar", places, width)
        places = call.emit("add", rows, columns, alpha=height)
    call.modest(n, channels)
    start = torch.arange(n * channels).reshape(n, channels, 1, 1) * (height * width)
    places = call.emit("add", places, call.tensor(start), alpha=1)
    return [_as_given(call, made), _as_given(call, places)]


def _average_pool(call: Call) -> Result:
    x, w = _windows(call)
    inclusive = bool(call.attrs.get("count_include_pad", 0))
    if not w.even or set(w.dilation) != {1}:
        total = _summed(call, x, w)
        return _as_given(call, call.emit("div", total, _counted(call, x, w, inclusive)))
    if len(w.kernel) == 3:
        made = call.aten("avg_pool3d", x, w.kernel, w.stride, w.before, w.ceil, inclusive)
    else:
        made = call.emit(
            "avg_pool2d",
            x,
            kernel_size=w.kernel,
            stride=w.stride,
            padding=w.before,
            ceil_mode=w.ceil,
            count_include_pad=inclusive,
        )
    return _as_given(call, made)


def _summed(call: Call, x: Value, w: _Windows) -> Value:
    """The sum over each window: a convolution of every channel with ones."""
    rank, channels = len(w.kernel), static(call, x.shape[1:])[0]
    after = [a + b for a, b in zip(w.after, w.beyond, strict=True)]
    pads = torch_pads(w.before, after)
    x = call.emit("pad", x, pad=pads, mode="constant", value=0.0) if any(pads) else x
    call.modest(channels, *w.kernel)
    ones = call.tensor(torch.ones(channels, 1, *w.kernel, dtype=getattr(torch, x.dtype)))
    return call.emit(
        f"conv{rank}d",
        *(x, ones),
        stride=w.stride,
        padding=(0,) * rank,
        dilation=w.dilation,
        groups=channels,
    )


def _counted(call: Call, x: Value, w: _Windows, inclusive: bool) -> Value:
    """How many elements of each window count: [1, 1, …]."""
    call.modest(*static(call, x.shape[2:]))
    inside = torch.ones(1, 1, *static(call, x.shape[2:]), dtype=getattr(torch, x.dtype))
    pads = torch_pads(w.before, w.after)
    inside = torch.nn.functional.pad(inside, pads, value=1.0 if inclusive else 0.0)
    bare = replace(w, before=(0,) * len(w.before), after=(0,) * len(w.after))
    return _summed(call, call.tensor(inside), bare)


def _lp_pool(call: Call) -> Result:
    """``(Σ |x|^p)^(1/p)`` over each window."""
    x, w = _windows(call)
    p = float(call.attrs.get("p", 2))
    powers = call.emit("pow", call.emit("abs", x), scalar=p)
    total = _summed(call, powers, w)
    return _as_given(call, call.emit("pow", total, scalar=1 / p))


def _global(op: str) -> Translator:
    def translator(call: Call) -> Result:
        x = call.value(0)
        if op == "mean" and len(x.shape) == 4:
            return call.emit("adaptive_avg_pool2d", x, output_size=(1, 1))
        return call.emit(op, x, dim=tuple(range(2, len(x.shape))), keepdim=True)

    return translator


def _global_lp(call: Call) -> Result:
    x, p = call.value(0), float(call.attrs.get("p", 2))
    powers = call.emit("pow", call.emit("abs", x), scalar=p)
    total = call.emit("sum", powers, dim=tuple(range(2, len(x.shape))), keepdim=True)
    return call.emit("pow", total, scalar=1 / p)


def _max_unpool(call: Call) -> Result:
    """Each element at the place that a pooling wrote down; zeros elsewhere."""
    x, places = call.value(0), call.value(1)
    kernel = tuple(call.attrs["kernel_shape"])
    stride = tuple(call.attrs.get("strides", (1,) * len(kernel)))
    pads = call.attrs.get("pads", [0] * (2 * len(kernel)))
    ends = [a + b for a, b in zip(pads[: len(kernel)], pads[len(kernel) :], strict=True)]
    spatial = static(call, x.shape[2:])
    sizes = [(n - 1) * s + k - p for n, s, k, p in zip(spatial, stride, kernel, ends, strict=True)]
    natural = (*static(call, x.shape[:2]), *sizes)
    wanted = natural if not call.has(2) else tuple(int(n) for n in call.sizes(2).flat)
    call.modest(*natural)
    empty = call.tensor(torch.zeros(math.prod(natural), dtype=getattr(torch, x.dtype)))
    lines = [call.emit("reshape", v, shape=(math.prod(v.shape),)) for v in (places, x)]
    made = call.emit("reshape", call.aten("scatter.src", empty, 0, *lines), shape=natural)
    more = [w - n for w, n in zip(wanted, natural, strict=True)]
    if not any(more):
        return made
    return call.emit("pad", made, pad=_at_end(more), mode="constant", value=0.0)


def _at_end(more: Sequence[int | Dim]) -> list[int | Dim]:
    return [n for extra in reversed(more) for n in (0, extra)]


POOL: dict[str, Translator] = table(
    ("MaxPool", _max_pool),
    ("AveragePool", _average_pool),
    ("LpPool", _lp_pool),
    ("GlobalAveragePool", _global("mean")),
    ("GlobalMaxPool", _global("amax")),
    ("GlobalLpPool", _global_lp),
    ("MaxUnpool", _max_unpool),
)
