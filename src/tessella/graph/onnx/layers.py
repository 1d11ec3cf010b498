"""ONNX's layers: convolution, matrix products, normalization, pooling, softmax, reductions."""

from __future__ import annotations

import math
from typing import Any

import torch

from tessella.graph.graph import Dim, Value
from tessella.graph.onnx.call import Call, Result, Translator, table

# ── convolution ───────────────────────────────────────────────────────────────────────────────────


def _window(call: Call, kernel: tuple[int, ...]) -> tuple[dict[str, Any], list[int], list[int]]:
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


def _pads(before: list[int], after: list[int]) -> tuple[int, ...]:
    """torch's order: (before, after) pairs, the last axis first."""
    return tuple(n for pair in zip(before[::-1], after[::-1], strict=True) for n in pair)


def _conv(call: Call) -> Result:
    x, weight = call.value(0), call.value(1)
    kernel = _static(call, weight.shape[2:])
    if not 1 <= len(kernel) <= 3:
        raise call.wrong("a convolution over 1 to 3 axes is known", seen=f"{len(kernel)} axes")
    attrs, before, after = _window(call, kernel)
    if before != after:
        x = call.emit("pad", x, pad=_pads(before, after), mode="constant", value=0.0)
        before = [0] * len(kernel)
    attrs |= {"padding": before, "groups": call.attrs.get("group", 1)}
    return call.emit(f"conv{len(kernel)}d", x, weight, call.optional(2), **attrs)


def _conv_transpose(call: Call) -> Result:
    weight = call.value(1)
    kernel = _static(call, weight.shape[2:])
    attrs, before, after = _window(call, kernel)
    automatic = call.attrs.get("auto_pad", "NOTSET") != "NOTSET" or "output_shape" in call.attrs
    if len(kernel) != 2 or before != after or automatic:
        raise call.wrong("a transposed convolution over 2 axes with equal padding is known")
    output_padding = call.attrs.get("output_padding", (0, 0))
    attrs |= {"padding": before, "groups": call.attrs.get("group", 1)}
    return call.emit(
        "conv_transpose2d",
        call.value(0),
        weight,
        call.optional(2),
        output_padding=output_padding,
        **attrs,
    )


def _static(call: Call, sizes: tuple[int | Dim, ...]) -> tuple[int, ...]:
    if any(isinstance(d, Dim) for d in sizes):
        raise call.wrong("the size of a kernel follows the batch")
    return sizes


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
    if call.attrs.get("training_mode", 0):
        raise call.wrong("it is in training mode")
    call.only_first_output()
    x, weight, bias, mean, var = (call.value(i) for i in range(5))
    return call.emit("batch_norm", x, mean, var, weight, bias, eps=call.attrs.get("epsilon", 1e-5))


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
    call.only_first_output()
    x = call.value(0)
    axis = call.axis(-1)
    shape = _static(call, x.shape[axis:])
    weight, bias = (
        v if v is None or v.shape == shape else call.emit("expand", v, shape=shape)
        for v in (call.optional(1), call.optional(2))
    )
    eps = call.attrs.get("epsilon", 1e-5)
    return call.emit("layer_norm", x, weight, bias, normalized_shape=shape, eps=eps)


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


# ── pooling ───────────────────────────────────────────────────────────────────────────────────────


def _flat_pool(call: Call) -> tuple[Value, tuple[int, ...], dict[str, Any], list[int], list[int]]:
    """Input, kernel, stride and dilation, and padding of a pooling, with one axis made two."""
    x, kernel = call.value(0), tuple(call.attrs["kernel_shape"])
    attrs, before, after = _window(call, kernel)
    if len(kernel) == 1:
        x = call.emit("reshape", x, shape=(*x.shape[:2], 1, *x.shape[2:]))
        kernel, before, after = (1, *kernel), [0, *before], [0, *after]
        attrs = {k: (1, *v) for k, v in attrs.items()}
    if len(kernel) != 2:
        raise call.wrong("a pooling over 1 or 2 axes is known", seen=f"{len(kernel)} axes")
    return x, kernel, attrs, before, after


def _as_given(call: Call, pooled: Value) -> Value:
    """The result with the axis taken out again that ``_flat_pool`` put in."""
    if len(call.attrs["kernel_shape"]) == 2:
        return pooled
    return call.emit("reshape", pooled, shape=(*pooled.shape[:2], pooled.shape[3]))


def _max_pool(call: Call) -> Result:
    call.only_first_output()
    x, kernel, attrs, before, after = _flat_pool(call)
    if before != after or any(2 * p > k for p, k in zip(before, kernel, strict=True)):
        x = call.aten("constant_pad_nd", x, _pads(before, after), -math.inf)
        before = [0, 0]
    ceil = bool(call.attrs.get("ceil_mode", 0))
    pooled = call.emit("max_pool2d", x, kernel_size=kernel, padding=before, ceil_mode=ceil, **attrs)
    return _as_given(call, pooled)


def _average_pool(call: Call) -> Result:
    x, kernel, attrs, before, after = _flat_pool(call)
    if set(attrs.pop("dilation")) != {1}:
        raise call.wrong("an average pooling with dilation")
    attrs |= {
        "kernel_size": kernel,
        "ceil_mode": bool(call.attrs.get("ceil_mode", 0)),
        "count_include_pad": bool(call.attrs.get("count_include_pad", 0)),
    }
    if before == after and all(2 * p <= k for p, k in zip(before, kernel, strict=True)):
        return _as_given(call, call.emit("avg_pool2d", x, padding=before, **attrs))
    pads = _pads(before, after)
    padded = call.emit("pad", x, pad=pads, mode="constant", value=0.0)
    pooled = call.emit("avg_pool2d", padded, padding=(0, 0), **attrs)
    if not attrs["count_include_pad"]:  # then by how many of a window are not padding
        one = torch.ones(1, 1, 1, 1, dtype=getattr(torch, x.dtype))
        inside = call.build.constant(f"{call.outputs[0]}.inside", one)
        inside = call.emit("expand", inside, shape=(1, 1, *x.shape[2:]))
        inside = call.emit("pad", inside, pad=pads, mode="constant", value=0.0)
        share = call.emit("avg_pool2d", inside, padding=(0, 0), **attrs)
        pooled = call.emit("div", pooled, share)
    return _as_given(call, pooled)


def _global_average(call: Call) -> Result:
    x = call.value(0)
    if len(x.shape) == 4:
        return call.emit("adaptive_avg_pool2d", x, output_size=(1, 1))
    return call.emit("mean", x, dim=tuple(range(2, len(x.shape))), keepdim=True)


def _global_max(call: Call) -> Result:
    x = call.value(0)
    return call.emit("amax", x, dim=tuple(range(2, len(x.shape))), keepdim=True)


# ── softmax and reductions ────────────────────────────────────────────────────────────────────────


def _softmax(op: str) -> Translator:
    def translator(call: Call) -> Result:
        x = call.value(0)
        if call.opset >= 13:
            return call.emit(op, x, dim=call.axis(-1))
        axis = call.axis(1)  # before, all axes from this one on together
        if axis == len(x.shape) - 1:
            return call.emit(op, x, dim=axis)
        rows = call.emit(
            "reshape", x, shape=(*x.shape[:axis], math.prod(_static(call, x.shape[axis:])))
        )
        return call.emit("reshape", call.emit(op, rows, dim=axis), shape=x.shape)

    return translator


def _axes(call: Call) -> tuple[int, ...] | None:
    """The axes of a reduction; None for all. The empty tuple where there is nothing to do."""
    axes = call.axes(1)
    if axes is None and call.attrs.get("noop_with_empty_axes", 0):
        return ()
    return axes


def _reduce(op: str) -> Translator:
    def translator(call: Call) -> Result:
        x, axes = call.value(0), _axes(call)
        if axes == ():
            return x
        dim = tuple(range(len(x.shape))) if axes is None else axes
        keep = bool(call.attrs.get("keepdims", 1))
        if not dim:
            return x
        return call.emit(op, x, dim=dim, keepdim=keep)

    return translator


def _reduce_after(first: str, op: str, last: str | None = None) -> Translator:
    """A reduction of a function of the elements: sum of squares, of magnitudes, …"""
    reduce = _reduce(op)

    def translator(call: Call) -> Result:
        x = call.value(0)
        squared = call.emit("mul", x, x) if first == "square" else call.emit(first, x)
        made = reduce(_with_input(call, squared))
        return call.emit(last, made) if last else made

    return translator


def _with_input(call: Call, x: Value) -> Call:
    return Call(**{**vars(call), "inputs": (x, *call.inputs[1:])})


def _reduce_product(call: Call) -> Result:
    x, axes = call.value(0), _axes(call)
    keep = bool(call.attrs.get("keepdims", 1))
    for axis in sorted(range(len(x.shape)) if axes is None else axes, reverse=True):
        x = call.aten("prod.dim_int", x, axis, keep)
    return x


def _arg(target: str) -> Translator:
    def translator(call: Call) -> Result:
        if call.attrs.get("select_last_index", 0):
            raise call.wrong("select_last_index")
        return call.aten(target, call.value(0), call.axis(0), bool(call.attrs.get("keepdims", 1)))

    return translator


LAYERS: dict[str, Translator] = table(
    ("Conv", _conv),
    ("ConvTranspose", _conv_transpose),
    ("Gemm", _gemm),
    ("MatMul", _matmul),
    ("BatchNormalization", _batch_normalization),
    ("InstanceNormalization", _instance_normalization),
    ("GroupNormalization", _group_normalization),
    ("LayerNormalization", _layer_normalization),
    ("LRN", _lrn),
    ("MaxPool", _max_pool),
    ("AveragePool", _average_pool),
    ("GlobalAveragePool", _global_average),
    ("GlobalMaxPool", _global_max),
    ("Softmax", _softmax("softmax")),
    ("LogSoftmax", _softmax("log_softmax")),
    ("ReduceMean", _reduce("mean")),
    ("ReduceSum", _reduce("sum")),
    ("ReduceMax", _reduce("amax")),
    ("ReduceMin", _reduce("amin")),
    ("ReduceL1", _reduce_after("abs", "sum")),
    ("ReduceL2", _reduce_after("square", "sum", "sqrt")),
    ("ReduceSumSquare", _reduce_after("square", "sum")),
    ("ReduceProd", _reduce_product),
    ("ArgMax", _arg("argmax")),
    ("ArgMin", _arg("argmin")),
)
