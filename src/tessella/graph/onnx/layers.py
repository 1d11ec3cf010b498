"""ONNX's layers with weights: convolution, matrix products, normalization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tessella.graph.graph import Dim, Value
from tessella.graph.onnx.call import Call, Result, Translator, table
from tessella.graph.value import fixed

# ── convolution ───────────────────────────────────────────────────────────────────────────────────


def window(call: Call, kernel: tuple[int, ...]) -> tuple[dict[str, Any], list[int], list[int]]:
    """Stride and dilation of a window, and the padding before and after each of its axes."""
    rank = len(kernel)
    stride = tuple(call.attrs.get("strides", (1,) * rank))
    dilation = tuple(call.attrs.get("dilations", (1,) * rank))
    pads = call.attrs.get("pads", [0] * (2 * rank))
    before, after = list(pads[:rank]), list(pads[rank:])
    auto = call.attrs.get("auto_pad", "NOTSET")
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        spatial = call.value(0).shape[2:]
        for i, (size, k, s, d) in enumerate(zip(spatial, kernel, stride, dilation, strict=True)):
            if isinstance(size, Dim):
                raise call.wrong("a spatial axis follows the batch")
            total = max(0, (-(-size // s) - 1) * s + (k - 1) * d + 1 - size)
            half = (total // 2, total - total // 2)
            before[i], after[i] = half if auto == "SAME_UPPER" else half[::-1]
    elif auto == "VALID":
        before, after = [0] * rank, [0] * rank
    return {"stride": stride, "dilation": dilation}, before, after


def torch_pads(before: Sequence[int], after: Sequence[int]) -> tuple[int, ...]:
    """torch's order: (before, after) pairs, the last axis first."""
    return tuple(n for pair in zip(before[::-1], after[::-1], strict=True) for n in pair)


def _conv(call: Call) -> Result:
    x, weight = call.value(0), call.value(1)
    kernel = static(call, weight.shape[2:])
    if not 1 <= len(kernel) <= 3:
        raise call.wrong("a convolution over 1 to 3 axes is known", seen=f"{len(kernel)} axes")
    attrs, before, after = window(call, kernel)
    if before != after:
        x = call.emit("pad", x, pad=torch_pads(before, after), mode="constant", value=0.0)
        before = [0] * len(kernel)
    attrs |= {"padding": before, "groups": call.attrs.get("group", 1)}
    return call.emit(f"conv{len(kernel)}d", x, weight, call.optional(2), **attrs)


def _conv_transpose(call: Call) -> Result:
    x, weight = call.value(0), call.value(1)
    kernel = static(call, weight.shape[2:])
    rank = len(kernel)
    if not 1 <= rank <= 3:
        raise call.wrong("a transposed convolution over 1 to 3 axes is known", seen=rank)
    stride = tuple(call.attrs.get("strides", (1,) * rank))
    dilation = tuple(call.attrs.get("dilations", (1,) * rank))
    extra = tuple(call.attrs.get("output_padding", (0,) * rank))
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    full = [
        (n - 1) * s + r + e
        for n, s, r, e in zip(static(call, x.shape[2:]), stride, reach, extra, strict=True)
    ]
    before, after = _cropped(call, full, stride)
    short = [max(0, -(p + q)) for p, q in zip(before, after, strict=True)]
    extra = tuple(e + n for e, n in zip(extra, short, strict=True))
    after = [q + n for q, n in zip(after, short, strict=True)]
    groups = call.attrs.get("group", 1)
    # torch takes one padding for both sides, so crop as much as both have, then the rest.
    both = [max(0, min(pair)) for pair in zip(before, after, strict=True)]
    if rank > 1:
        made = call.emit(
            f"conv_transpose{rank}d",
            *(x, weight, call.optional(2)),
            stride=stride,
            padding=both,
            output_padding=extra,
            groups=groups,
            dilation=dilation,
        )
    else:
        bias = call.optional(2)
        given = (x, weight, bias, stride, both, extra, groups, dilation)
        made = call.aten("conv_transpose1d", *given)
    rest = [(p - c, q - c) for p, q, c in zip(before, after, both, strict=True)]
    for axis, (low, high) in enumerate(rest, start=2):
        if low < 0 or high < 0:
            raise call.wrong("its output is larger than what it computes")
        if low or high:
            end = static(call, made.shape)[axis] - high
            made = call.emit("slice", made, dim=axis, start=low, end=end, step=1)
    return made


def _cropped(call: Call, full: list[int], stride: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """How much of a transposed convolution's full output is cut off before and after."""
    rank = len(full)
    auto = call.attrs.get("auto_pad", "NOTSET")
    pads = list(call.attrs.get("pads", [0] * (2 * rank)))
    wanted = call.attrs.get("output_shape", None)
    if wanted is None and auto not in ("SAME_UPPER", "SAME_LOWER"):
        return ([0] * rank, [0] * rank) if auto == "VALID" else (pads[:rank], pads[rank:])
    if wanted is None:
        spatial = static(call, call.value(0).shape[2:])
        wanted = [n * s for n, s in zip(spatial, stride, strict=True)]
    total = [f - w for f, w in zip(full, wanted[-rank:], strict=True)]
    halves = [t // 2 for t in total]
    others = [t - h for t, h in zip(total, halves, strict=True)]
    return (halves, others) if auto == "SAME_UPPER" else (others, halves)


def static(call: Call, sizes: tuple[int | Dim, ...]) -> tuple[int, ...]:
    if any(isinstance(d, Dim) for d in sizes):
        raise call.wrong("the size of a kernel follows the batch")
    return tuple(map(fixed, sizes))


# ── matrix products ───────────────────────────────────────────────────────────────────────────────


def _gemm(call: Call) -> Result:
    """``alpha · A · B + beta · C``: a linear layer, with C as bias if it is one row."""
    a, b, c = call.value(0), call.value(1), call.optional(2)
    alpha, beta = call.attrs.get("alpha", 1.0), call.attrs.get("beta", 1.0)
    if call.attrs.get("transA", 0):
        a = call.emit("permute", a, dims=(1, 0))
    if not call.attrs.get("transB", 0):
        b = call.emit("permute", b, dims=(1, 0))
    if alpha != 1.0:
        b = call.emit("mul", b, scalar=alpha)
    if c is not None and beta != 1.0:
        c = call.emit("mul", c, scalar=beta)
    columns = b.shape[0]
    if c is not None and c in call.build.graph.constants and c.shape in ((columns,), (1, columns)):
        return call.emit("linear", a, b, call.emit("reshape", c, shape=(columns,)))
    product = call.emit("linear", a, b)
    return product if c is None else call.emit("add", product, c, alpha=1)


def _matmul(call: Call) -> Result:
    a, b = call.value(0), call.value(1)
    if b in call.build.graph.constants and len(b.shape) == 2 and a.shape:
        return call.emit("linear", a, call.emit("permute", b, dims=(1, 0)))
    return call.emit("matmul", a, b)


# ── normalization ─────────────────────────────────────────────────────────────────────────────────


def _batch_normalization(call: Call) -> Result:
    x, weight, bias, mean, var = (call.value(i) for i in range(5))
    eps = call.attrs.get("epsilon", 1e-5)
    if not call.attrs.get("training_mode", 0):
        x, (weight, bias, mean, var) = _one_type(call, x, weight, bias, mean, var)
        return call.emit("batch_norm", x, mean, var, weight, bias, eps=eps)
    if x.shape[0] != 1:
        raise call.wrong("in training mode it mixes the samples of a batch")
    raise call.wrong("it is in training mode")


def _one_type(call: Call, x: Value, *others: Value) -> tuple[Value, tuple[Value, ...]]:
    """The statistics in the type of the input, where a file keeps them in another."""
    cast = [o if o.dtype == x.dtype else call.emit("to", o, dtype=x.dtype) for o in others]
    return x, tuple(cast)


def _instance_normalization(call: Call) -> Result:
    x, weight, bias = (call.value(i) for i in range(3))
    eps = call.attrs.get("epsilon", 1e-5)
    return call.emit("group_norm", x, weight, bias, num_groups=x.shape[1], eps=eps)


def _group_normalization(call: Call) -> Result:
    x, weight, bias = (call.value(i) for i in range(3))
    groups, eps = call.attrs["num_groups"], call.attrs.get("epsilon", 1e-5)
    channels = x.shape[1]
    if weight.shape != (channels,):  # before opset 21: one number a group
        weight, bias = (
            call.emit(
                "reshape",
                call.emit(
                    "expand",
                    call.emit("reshape", v, shape=(groups, 1)),
                    shape=(groups, channels // groups),
                ),
                shape=(channels,),
            )
            for v in (weight, bias)
        )
    return call.emit("group_norm", x, weight, bias, num_groups=groups, eps=eps)


def _layer_normalization(call: Call) -> Result:
    x, axis, eps = call.value(0), call.axis(-1), call.attrs.get("epsilon", 1e-5)
    shape = static(call, x.shape[axis:])
    weight, bias = (_spread(call, v, shape) for v in (call.optional(1), call.optional(2)))
    made = call.emit("layer_norm", x, weight, bias, normalized_shape=shape, eps=eps)
    if not call.wants(1) and not call.wants(2):
        return made
    axes = tuple(range(axis, len(x.shape)))
    mean = call.emit("mean", x, dim=axes, keepdim=True)
    distance = call.emit("sub", x, mean, alpha=1)
    square = call.emit("mul", distance, distance)
    variance = call.emit("mean", square, dim=axes, keepdim=True)
    inverse = call.emit("rsqrt", call.emit("add", variance, scalar=eps, alpha=1))
    return [made, mean, inverse]


def _rms_normalization(call: Call) -> Result:
    x, axis, eps = call.value(0), call.axis(-1), call.attrs.get("epsilon", 1e-5)
    shape = static(call, x.shape[axis:])
    weight = _spread(call, call.value(1), shape)
    return call.emit("rms_norm", x, weight, normalized_shape=shape, eps=eps)


def _spread(call: Call, value: Value | None, shape: tuple[int, ...]) -> Value | None:
    """A weight that broadcasts, as one of the whole shape."""
    return (
        value if value is None or value.shape == shape else call.emit("expand", value, shape=shape)
    )


def _lrn(call: Call) -> Result:
    size = call.attrs["size"]
    if size % 2 == 0:
        raise call.wrong("its window is even: it would be shifted by one channel", seen=size)
    return call.emit(
        "local_response_norm",
        call.value(0),
        size=size,
        alpha=call.attrs.get("alpha", 1e-4),
        beta=call.attrs.get("beta", 0.75),
        k=call.attrs.get("bias", 1.0),
    )


LAYERS: dict[str, Translator] = table(
    ("Conv", _conv),
    ("ConvTranspose", _conv_transpose),
    ("Gemm", _gemm),
    ("MatMul", _matmul),
    ("BatchNormalization", _batch_normalization),
    ("InstanceNormalization", _instance_normalization),
    ("GroupNormalization", _group_normalization),
    ("LayerNormalization", _layer_normalization),
    ("RMSNormalization", _rms_normalization),
    ("LRN", _lrn),
)
