"""What each operation becomes in ONNX, in the versions 17 to 21 of its operators."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tessella.core.errors import CompileError
from tessella.graph.graph import Dim, Node, Value
from tessella.graph.onnx.types import NUMBERS
from tessella.graph.onnx.writer import Writer

Export = Callable[[Writer, Node], object]

TO_THE_END = 2**63 - 1


def names(node: Node) -> list[str]:
    """What a node reads, empty where an input is left out."""
    return ["" if v is None else v.name for v in node.inputs]


def first(node: Node) -> Value:
    value = node.inputs[0]
    assert value is not None
    return value


def cast(w: Writer, value: Value | str, dtype: str, have: str = "") -> str:
    """A tensor in an element type; as it is if it has that already."""
    if isinstance(value, Value):
        value, have = value.name, value.dtype
    return value if have == dtype else w.add("Cast", [value], to=NUMBERS[dtype])


def refused(node: Node, why: str) -> CompileError:
    where = f" (layer {node.layer})" if node.layer else ""
    return CompileError(f"{node.op} cannot be written as ONNX: {why}", seen=f"{node.output}{where}")


def static(node: Node, sizes: Sequence[int | Dim]) -> list[int]:
    if any(isinstance(d, Dim) for d in sizes):
        raise refused(node, "a size that ONNX wants as a constant follows the batch")
    return [int(d) for d in sizes]


# ── layers ────────────────────────────────────────────────────────────────────────────────────────


def _conv(w: Writer, node: Node) -> None:
    a, (x, weight, bias, *_) = node.attrs, names(node)
    w.add(
        "Conv",
        [x, weight, bias] if bias else [x, weight],
        out=_before_epilogue(w, node),
        strides=list(a["stride"]),
        dilations=list(a["dilation"]),
        pads=[*a["padding"], *a["padding"]],
        group=a["groups"],
    )
    _epilogue(w, node)


def _before_epilogue(w: Writer, node: Node) -> str:
    """The name of a product whose residual and activation come after it."""
    bare = node.inputs[3] is None and node.attrs["activation"] is None
    return node.output.name if bare else w.fresh(f"{node.output.name}.product")


def _epilogue(w: Writer, node: Node) -> None:
    """``activation(product + residual)``."""
    if len(node.inputs) > 4 or any(node.attrs.get(k) is not None for k in ("alpha", "beta")):
        raise refused(node, "it is a layer of int8 or fp8: write the network as it was captured")
    residual, activation = node.inputs[3], node.attrs["activation"]
    made = w.last
    if residual is not None:
        out = node.output.name if activation is None else ""
        made = w.add("Add", [made, residual.name], out=out)
    if activation is not None:
        kind = activation.removesuffix("_tanh")
        attrs = {"approximate": "tanh" if kind != activation else "none"} if kind == "gelu" else {}
        value = Value(made, node.output.dtype, node.output.shape)
        EXPORTS[kind](w, Node(kind, (value,), node.outputs, attrs, node.layer))


def _conv_transpose(w: Writer, node: Node) -> None:
    a = node.attrs
    w.add(
        "ConvTranspose",
        [n for n in names(node) if n],
        out=node.output.name,
        strides=list(a["stride"]),
        dilations=list(a["dilation"]),
        pads=[*a["padding"], *a["padding"]],
        output_padding=list(a["output_padding"]),
        group=a["groups"],
    )


def _linear(w: Writer, node: Node) -> None:
    x, weight, bias, *_ = names(node)
    out = _before_epilogue(w, node)
    if len(first(node).shape) == 2:
        w.add("Gemm", [x, weight, *([bias] if bias else [])], out=out, transB=1)
    else:
        known = w.graph.constant(node.inputs[1])
        turned = (
            w.add("Transpose", [weight], perm=[1, 0])
            if known is None
            else w.constant(known.t().contiguous())
        )
        product = w.add("MatMul", [x, turned], out="" if bias else out)
        if bias:
            w.add("Add", [product, bias], out=out)
    _epilogue(w, node)


def _batch_norm(w: Writer, node: Node) -> None:
    x, mean, var, weight, bias = names(node)
    like = torch.ones(static(node, first(node).shape[1:2]), dtype=_dtype(first(node)))
    scale, shift = weight or w.constant(like), bias or w.constant(like * 0)
    eps = node.attrs["eps"]
    w.add("BatchNormalization", [x, scale, shift, mean, var], out=node.output.name, epsilon=eps)


def _layer_norm(w: Writer, node: Node) -> None:
    x, weight, bias = names(node)
    shape = node.attrs["normalized_shape"]
    scale = weight or w.constant(torch.ones(tuple(shape), dtype=_dtype(first(node))))
    inputs = [x, scale, *([bias] if bias else [])]
    eps = node.attrs["eps"]
    w.add("LayerNormalization", inputs, out=node.output.name, axis=-len(shape), epsilon=eps)


def _group_norm(w: Writer, node: Node) -> None:
    """Each group as one channel of an instance normalization."""
    x, weight, bias = names(node)
    value, groups = first(node), node.attrs["num_groups"]
    ones = torch.ones(groups, dtype=_dtype(value))
    flat = w.add("Reshape", [x, w.ints(0, groups, -1)])
    inputs = [flat, w.constant(ones), w.constant(ones * 0)]
    made = w.add("InstanceNormalization", inputs, epsilon=node.attrs["eps"])
    last = {"out": node.output.name}
    made = w.add("Reshape", [made, w.sizes(value.shape)], **({} if weight or bias else last))
    along = w.ints(-1, *[1] * (len(value.shape) - 2))
    if weight:
        weight = w.add("Reshape", [weight, along])
        made = w.add("Mul", [made, weight], **({} if bias else last))
    if bias:
        w.add("Add", [made, w.add("Reshape", [bias, along])], **last)


def _rms_norm(w: Writer, node: Node) -> None:
    x, weight = names(node)
    value, eps = first(node), node.attrs["eps"]
    eps = torch.finfo(_dtype(value)).eps if eps is None else eps
    rank = len(node.attrs["normalized_shape"])
    axes = list(range(len(value.shape) - rank, len(value.shape)))
    mean = reduced(w, "ReduceMean", w.add("Mul", [x, x]), axes, True)
    root = w.add("Sqrt", [w.add("Add", [mean, w.number(eps, value)])])
    made = w.add("Div", [x, root], out="" if weight else node.output.name)
    if weight:
        w.add("Mul", [made, weight], out=node.output.name)


def _local_response_norm(w: Writer, node: Node) -> None:
    a = node.attrs
    if a["size"] % 2 == 0:
        raise refused(node, "an even window, which ONNX would shift by one channel")
    attrs = {"size": a["size"], "alpha": a["alpha"], "beta": a["beta"], "bias": float(a["k"])}
    w.add("LRN", names(node), out=node.output.name, **attrs)


def _max_pool(w: Writer, node: Node) -> None:
    a = node.attrs
    w.add(
        "MaxPool",
        names(node),
        out=node.output.name,
        kernel_shape=list(a["kernel_size"]),
        strides=list(a["stride"]),
        pads=[*a["padding"], *a["padding"]],
        dilations=list(a["dilation"]),
        ceil_mode=int(a["ceil_mode"]),
    )


def _avg_pool(w: Writer, node: Node) -> None:
    a, divisor = node.attrs, node.attrs["divisor_override"]
    made = w.add(
        "AveragePool",
        names(node),
        out="" if divisor else node.output.name,
        kernel_shape=list(a["kernel_size"]),
        strides=list(a["stride"]),
        pads=[*a["padding"], *a["padding"]],
        ceil_mode=int(a["ceil_mode"]),
        count_include_pad=int(bool(a["count_include_pad"] or divisor)),
    )
    if divisor:
        factor = w.number(math.prod(a["kernel_size"]) / divisor, node.output)
        w.add("Mul", [made, factor], out=node.output.name)


def _adaptive_avg_pool(w: Writer, node: Node) -> None:
    """Windows that differ in size are a product with a matrix on each axis."""
    x, size = first(node), node.attrs["output_size"]
    have = static(node, x.shape[2:])
    if tuple(size) == (1, 1):
        w.add("GlobalAveragePool", [x.name], out=node.output.name)
        return
    rows, columns = (
        torch.nn.functional.adaptive_avg_pool1d(torch.eye(n, dtype=_dtype(x))[None], m)[0].t()
        for n, m in zip(have, size, strict=True)
    )
    made = w.add("MatMul", [w.constant(rows), x.name])
    w.add("MatMul", [made, w.constant(columns.t())], out=node.output.name)


# ── softmax, attention, reductions ────────────────────────────────────────────────────────────────


def _softmax(op: str) -> Export:
    def export(w: Writer, node: Node) -> None:
        x = cast(w, first(node), node.attrs["dtype"] or first(node).dtype)
        w.add(op, [x], out=node.output.name, axis=node.attrs["dim"])

    return export


def _attention(w: Writer, node: Node) -> None:
    """``softmax(q · kᵀ · scale + mask) · v``."""
    query, key, value, *_ = node.inputs
    assert query is not None
    assert key is not None
    assert value is not None
    mask, rank = node.inputs[3], len(query.shape)
    if node.attrs["enable_gqa"] and query.shape[-3] != key.shape[-3]:
        raise refused(node, "groups of queries that share a key")
    scale = node.attrs["scale"]
    scale = static(node, query.shape[-1:])[0] ** -0.5 if scale is None else scale
    turned = w.add("Transpose", [key.name], perm=[*range(rank - 2), rank - 1, rank - 2])
    scores = w.add("MatMul", [query.name, turned])
    scores = w.add("Mul", [scores, w.number(scale, query)])
    if node.attrs["is_causal"]:
        rows, columns = static(node, (query.shape[-2], key.shape[-2]))
        hidden = torch.full((rows, columns), -math.inf, dtype=_dtype(query)).triu(1)
        scores = w.add("Add", [scores, w.constant(hidden)])
    if mask is not None and mask.dtype == "bool":
        scores = w.add("Where", [mask.name, scores, w.number(-math.inf, query)])
    elif mask is not None:
        scores = w.add("Add", [scores, cast(w, mask, query.dtype)])
    share = w.add("Softmax", [scores], axis=-1)
    w.add("MatMul", [share, value.name], out=node.output.name)


def reduced(w: Writer, op: str, x: str, axes: Sequence[int], keep: bool, out: str = "") -> str:
    """A reduction; its axes are an input in new versions, and of ReduceSum in all."""
    if op == "ReduceSum" or w.opset >= 18:
        return w.add(op, [x, w.ints(*axes)], out=out, keepdims=int(keep))
    return w.add(op, [x], out=out, axes=list(axes), keepdims=int(keep))


def _reduce(op: str) -> Export:
    def export(w: Writer, node: Node) -> None:
        x, dim = first(node), node.attrs["dim"]
        axes = range(len(x.shape)) if dim in (None, ()) else dim
        axes = [axes] if isinstance(axes, int) else axes
        keep = bool(node.attrs["keepdim"])
        reduced(w, op, cast(w, x, node.output.dtype), axes, keep, node.output.name)

    return export


# ── element by element ────────────────────────────────────────────────────────────────────────────


def _same(op: str, **attrs: Any) -> Export:
    """One operator of the same inputs."""
    return lambda w, node: w.add(op, names(node), out=node.output.name, **attrs)


def _silu(w: Writer, node: Node) -> None:
    (x,) = names(node)
    w.add("Mul", [x, w.add("Sigmoid", [x])], out=node.output.name)


def _gelu(w: Writer, node: Node) -> None:
    (x,), like = names(node), first(node)
    if node.attrs["approximate"] == "tanh":
        cube = w.add("Mul", [w.add("Mul", [x, x]), x])
        inner = w.add("Add", [x, w.add("Mul", [cube, w.number(0.044715, like)])])
        inner = w.add("Mul", [inner, w.number(math.sqrt(2 / math.pi), like)])
        shape = w.add("Tanh", [inner])
    else:
        shape = w.add("Erf", [w.add("Mul", [x, w.number(math.sqrt(0.5), like)])])
    twice = w.add("Mul", [x, w.add("Add", [shape, w.number(1.0, like)])])
    w.add("Mul", [twice, w.number(0.5, like)], out=node.output.name)


def _mish(w: Writer, node: Node) -> None:
    (x,) = names(node)
    w.add("Mul", [x, w.add("Tanh", [w.add("Softplus", [x])])], out=node.output.name)


def _elu(w: Writer, node: Node) -> None:
    """``scale · (max(x, 0) + min(0, alpha · (exp(input_scale · x) − 1)))``."""
    (x,), like, a = names(node), first(node), node.attrs
    if (a["scale"], a["input_scale"]) == (1.0, 1.0):
        w.add("Elu", [x], out=node.output.name, alpha=float(a["alpha"]))
        return
    power = w.add("Exp", [w.add("Mul", [x, w.number(a["input_scale"], like)])])
    below = w.add("Sub", [power, w.number(1.0, like)])
    below = w.add("Min", [w.add("Mul", [below, w.number(a["alpha"], like)]), w.number(0.0, like)])
    made = w.add("Add", [w.add("Relu", [x]), below])
    w.add("Mul", [made, w.number(a["scale"], like)], out=node.output.name)


def _softplus(w: Writer, node: Node) -> None:
    (x,), like, beta = names(node), first(node), float(node.attrs["beta"])
    if beta == 1.0:
        w.add("Softplus", [x], out=node.output.name)
        return
    made = w.add("Softplus", [w.add("Mul", [x, w.number(beta, like)])])
    w.add("Div", [made, w.number(beta, like)], out=node.output.name)


def _clamp(w: Writer, node: Node) -> None:
    bounds = [node.attrs[k] for k in ("min", "max")]
    x = cast(w, first(node), node.output.dtype)
    inputs = [x, *["" if b is None else w.number(b, node.output) for b in bounds]]
    w.add("Clip", inputs[:2] if bounds[1] is None else inputs, out=node.output.name)


def _relu6(w: Writer, node: Node) -> None:
    (x,), like = names(node), first(node)
    w.add("Clip", [x, w.number(0, like), w.number(6, like)], out=node.output.name)


def _rsqrt(w: Writer, node: Node) -> None:
    w.add("Reciprocal", [w.add("Sqrt", names(node))], out=node.output.name)


def _prelu(w: Writer, node: Node) -> None:
    x, slope = names(node)
    along = w.ints(-1, *[1] * max(0, len(first(node).shape) - 2))
    w.add("PRelu", [x, w.add("Reshape", [slope, along])], out=node.output.name)


def _binary(op: str) -> Export:
    def export(w: Writer, node: Node) -> None:
        like, (left, right) = node.output, node.inputs
        assert left is not None
        alpha = node.attrs.get("alpha", 1)
        other = (
            w.number(node.attrs["scalar"], like) if right is None else cast(w, right, like.dtype)
        )
        if alpha != 1:
            other = w.add("Mul", [other, w.number(alpha, like)])
        w.add(op, [cast(w, left, like.dtype), other], out=like.name)

    return export


# ── moving elements ───────────────────────────────────────────────────────────────────────────────


def _reshape(w: Writer, node: Node) -> None:
    shape = node.output.shape
    free = [isinstance(d, Dim) for d in shape]
    sizes = (
        w.ints(*[-1 if isinstance(d, Dim) else d for d in shape])
        if sum(free) == 1
        else w.sizes(shape)
    )
    w.add("Reshape", [first(node).name, sizes], out=node.output.name)


def _slice(w: Writer, node: Node) -> None:
    a = node.attrs
    bounds = (a["start"], TO_THE_END if a["end"] is None else a["end"])
    start, end = (w.sizes((b,)) for b in bounds)
    inputs = [first(node).name, start, end, w.ints(a["dim"]), w.ints(a["step"])]
    w.add("Slice", inputs, out=node.output.name)


def _select(w: Writer, node: Node) -> None:
    index, axis = node.attrs["index"], node.attrs["dim"]
    if isinstance(index, Dim):
        raise refused(node, "an index that follows the batch")
    place = w.constant(torch.tensor(index))
    w.add("Gather", [first(node).name, place], out=node.output.name, axis=axis)


def _split(w: Writer, node: Node) -> None:
    outputs = [v.name for v in node.outputs]
    sizes = w.sizes(tuple(node.attrs["sizes"]))
    w.add("Split", [first(node).name, sizes], out=outputs, axis=node.attrs["dim"])


def _cat(w: Writer, node: Node) -> None:
    parts = [cast(w, v, node.output.dtype) for v in node.inputs if v is not None]
    w.add("Concat", parts, out=node.output.name, axis=node.attrs["dim"])


_MODES = {"constant": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def _pad(w: Writer, node: Node) -> None:
    value = node.attrs["value"] or 0.0
    padded(w, node, node.attrs["pad"], node.attrs["mode"], value)


def padded(w: Writer, node: Node, pad: Sequence[int], mode: str, value: float) -> None:
    x = first(node)
    if mode == "circular" and w.opset < 19:
        raise refused(node, "circular padding needs opset 19")
    rank, pairs = len(x.shape), len(pad) // 2
    before, after = [0] * rank, [0] * rank
    for i in range(pairs):
        before[rank - 1 - i], after[rank - 1 - i] = pad[2 * i], pad[2 * i + 1]
    inputs = [x.name, w.ints(*before, *after)]
    inputs += [w.number(value, x)] if mode == "constant" else []
    w.add("Pad", inputs, out=node.output.name, mode=_MODES[mode])


def _interpolate(w: Writer, node: Node) -> None:
    x, a = first(node), node.attrs
    if a["antialias"] and w.opset < 18:
        raise refused(node, "antialiasing needs opset 18")
    modes = {"nearest": "nearest", "bicubic": "cubic"}
    mode = modes.get(a["mode"], "linear")
    if a["size"] is None:
        scales = w.constant(torch.tensor([1.0, 1.0, *a["scale_factor"]], dtype=torch.float32))
        inputs = [x.name, "", scales]
    else:
        inputs = [x.name, "", "", w.sizes((*x.shape[:2], *a["size"]))]
    where = "asymmetric" if mode == "nearest" else "half_pixel"
    w.add(
        "Resize",
        inputs,
        out=node.output.name,
        mode=mode,
        coordinate_transformation_mode="align_corners" if a["align_corners"] else where,
        nearest_mode="floor" if mode == "nearest" else None,
        cubic_coeff_a=-0.75 if mode == "cubic" else None,
        antialias=1 if a["antialias"] else None,
    )


def _embedding(w: Writer, node: Node) -> None:
    rows, weight = names(node)
    w.add("Gather", [weight, rows], out=node.output.name, axis=0)


def _to(w: Writer, node: Node) -> None:
    w.add("Cast", names(node), out=node.output.name, to=NUMBERS[node.attrs["dtype"]])


def _expand(w: Writer, node: Node) -> None:
    w.add("Expand", [first(node).name, w.sizes(node.output.shape)], out=node.output.name)


def _permute(w: Writer, node: Node) -> None:
    w.add("Transpose", names(node), out=node.output.name, perm=list(node.attrs["dims"]))


# ── int8 and bytes ────────────────────────────────────────────────────────────────────────────────


def _quantize(w: Writer, node: Node) -> None:
    x, scale, zero = names(node)
    zero = zero or _zeros(w, node, node.attrs["dtype"])
    w.add("QuantizeLinear", [x, scale, zero], out=node.output.name, axis=node.attrs["axis"])


def _dequantize(w: Writer, node: Node) -> None:
    x, scale, zero = names(node)
    made = [x, scale, zero] if zero else [x, scale]
    w.add("DequantizeLinear", made, out=node.output.name, axis=node.attrs["axis"])


def _zeros(w: Writer, node: Node, dtype: str) -> str:
    scale = node.inputs[1]
    assert scale is not None
    shape = static(node, scale.shape)
    return w.constant(torch.zeros(shape, dtype=getattr(torch, dtype)))


def _image_to_tensor(w: Writer, node: Node) -> None:
    a, like = node.attrs, node.output
    x = w.add("Transpose", [cast(w, first(node), like.dtype)], perm=[0, 3, 1, 2])
    gain, offset = (
        w.constant(torch.tensor(a[k], dtype=_dtype(like)).reshape(-1, 1, 1))
        for k in ("gain", "offset")
    )
    w.add("Add", [w.add("Mul", [x, gain]), offset], out=like.name)


def _dtype(value: Value) -> torch.dtype:
    return getattr(torch, value.dtype)


EXPORTS: dict[str, Export] = {
    "conv1d": _conv,
    "conv2d": _conv,
    "conv3d": _conv,
    "conv_transpose2d": _conv_transpose,
    "linear": _linear,
    "matmul": _same("MatMul"),
    "batch_norm": _batch_norm,
    "layer_norm": _layer_norm,
    "group_norm": _group_norm,
    "rms_norm": _rms_norm,
    "local_response_norm": _local_response_norm,
    "max_pool2d": _max_pool,
    "avg_pool2d": _avg_pool,
    "adaptive_avg_pool2d": _adaptive_avg_pool,
    "softmax": _softmax("Softmax"),
    "log_softmax": _softmax("LogSoftmax"),
    "scaled_dot_product_attention": _attention,
    "mean": _reduce("ReduceMean"),
    "sum": _reduce("ReduceSum"),
    "amax": _reduce("ReduceMax"),
    "amin": _reduce("ReduceMin"),
    "relu": _same("Relu"),
    "relu6": _relu6,
    "sigmoid": _same("Sigmoid"),
    "tanh": _same("Tanh"),
    "silu": _silu,
    "gelu": _gelu,
    "hardswish": _same("HardSwish"),
    "hardsigmoid": _same("HardSigmoid", alpha=1 / 6, beta=0.5),
    "mish": _mish,
    "leaky_relu": lambda w, n: _same("LeakyRelu", alpha=float(n.attrs["negative_slope"]))(w, n),
    "elu": _elu,
    "softplus": _softplus,
    "clamp": _clamp,
    "exp": _same("Exp"),
    "log": _same("Log"),
    "sqrt": _same("Sqrt"),
    "rsqrt": _rsqrt,
    "reciprocal": _same("Reciprocal"),
    "neg": _same("Neg"),
    "abs": _same("Abs"),
    "erf": _same("Erf"),
    "to": _to,
    "prelu": _prelu,
    "add": _binary("Add"),
    "sub": _binary("Sub"),
    "mul": _binary("Mul"),
    "div": _binary("Div"),
    "pow": _binary("Pow"),
    "maximum": _binary("Max"),
    "minimum": _binary("Min"),
    "quantize": _quantize,
    "dequantize": _dequantize,
    "reshape": _reshape,
    "permute": _permute,
    "expand": _expand,
    "slice": _slice,
    "select": _select,
    "split": _split,
    "cat": _cat,
    "pad": _pad,
    "interpolate": _interpolate,
    "embedding": _embedding,
    "clone": _same("Identity"),
    "image_to_tensor": _image_to_tensor,
}
