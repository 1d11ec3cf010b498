"""Layers as ONNX: convolutions, products, normalizations, poolings, attention, reductions."""

from __future__ import annotations

import math

import torch

from tessella.graph.graph import Node, Value
from tessella.graph.onnx.export import (
    Export,
    cast,
    dtype_of,
    first,
    names,
    reduced,
    refused,
    same,
    static,
)
from tessella.graph.onnx.export_elements import ELEMENTS
from tessella.graph.onnx.writer import Writer


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
    bare = node.get("residual") is None and node.attrs["activation"] is None
    return node.output.name if bare else w.fresh(f"{node.output.name}.product")


def _epilogue(w: Writer, node: Node) -> None:
    """``activation(product + residual)``."""
    quantized = node.get("scale") is not None
    if quantized or any(node.attrs.get(k) is not None for k in ("alpha", "beta")):
        raise refused(node, "it is a layer of int8 or fp8: write the network as it was captured")
    residual, activation = node.get("residual"), node.attrs["activation"]
    made = w.last
    if residual is not None:
        out = node.output.name if activation is None else ""
        made = w.add("Add", [made, residual.name], out=out)
    if activation is not None:
        kind = activation.removesuffix("_tanh")
        attrs = {"approximate": "tanh" if kind != activation else "none"} if kind == "gelu" else {}
        value = Value(made, node.output.dtype, node.output.shape)
        ELEMENTS[kind](w, Node(kind, (value,), node.outputs, attrs, node.layer))


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
        known = w.graph.constant(node["weight"])
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
    like = torch.ones(static(node, first(node).shape[1:2]), dtype=dtype_of(first(node)))
    scale, shift = weight or w.constant(like), bias or w.constant(like * 0)
    eps = node.attrs["eps"]
    w.add("BatchNormalization", [x, scale, shift, mean, var], out=node.output.name, epsilon=eps)


def _layer_norm(w: Writer, node: Node) -> None:
    x, weight, bias = names(node)
    shape = node.attrs["normalized_shape"]
    scale = weight or w.constant(torch.ones(tuple(shape), dtype=dtype_of(first(node))))
    inputs = [x, scale, *([bias] if bias else [])]
    eps = node.attrs["eps"]
    w.add("LayerNormalization", inputs, out=node.output.name, axis=-len(shape), epsilon=eps)


def _group_norm(w: Writer, node: Node) -> None:
    """Each group as one channel of an instance normalization."""
    x, weight, bias = names(node)
    value, groups = first(node), node.attrs["num_groups"]
    ones = torch.ones(groups, dtype=dtype_of(value))
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
    eps = torch.finfo(dtype_of(value)).eps if eps is None else eps
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
        torch.nn.functional.adaptive_avg_pool1d(torch.eye(n, dtype=dtype_of(x))[None], m)[0].t()
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
    query, key, value, mask = node["query"], node["key"], node["value"], node.get("attn_mask")
    rank = len(query.shape)
    if node.attrs["enable_gqa"] and query.shape[-3] != key.shape[-3]:
        raise refused(node, "groups of queries that share a key")
    scale = node.attrs["scale"]
    scale = static(node, query.shape[-1:])[0] ** -0.5 if scale is None else scale
    turned = w.add("Transpose", [key.name], perm=[*range(rank - 2), rank - 1, rank - 2])
    scores = w.add("MatMul", [query.name, turned])
    scores = w.add("Mul", [scores, w.number(scale, query)])
    if node.attrs["is_causal"]:
        rows, columns = static(node, (query.shape[-2], key.shape[-2]))
        hidden = torch.full((rows, columns), -math.inf, dtype=dtype_of(query)).triu(1)
        scores = w.add("Add", [scores, w.constant(hidden)])
    if mask is not None and mask.dtype == "bool":
        scores = w.add("Where", [mask.name, scores, w.number(-math.inf, query)])
    elif mask is not None:
        scores = w.add("Add", [scores, cast(w, mask, query.dtype)])
    share = w.add("Softmax", [scores], axis=-1)
    w.add("MatMul", [share, value.name], out=node.output.name)


def _reduce(op: str) -> Export:
    def export(w: Writer, node: Node) -> None:
        x, dim = first(node), node.attrs["dim"]
        axes = range(len(x.shape)) if dim in (None, ()) else dim
        axes = [axes] if isinstance(axes, int) else axes
        keep = bool(node.attrs["keepdim"])
        reduced(w, op, cast(w, x, node.output.dtype), axes, keep, node.output.name)

    return export


LAYERS: dict[str, Export] = {
    "conv1d": _conv,
    "conv2d": _conv,
    "conv3d": _conv,
    "conv_transpose2d": _conv_transpose,
    "conv_transpose3d": _conv_transpose,
    "linear": _linear,
    "matmul": same("MatMul"),
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
}
