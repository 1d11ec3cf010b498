"""torch's layers become ours: convolutions, norms, products, attention, pooling, interpolation.

``aten`` has all other operators. What is None here is left to the operation's row.
"""

from __future__ import annotations

from collections.abc import Callable

from tessella.core.errors import CompileError
from tessella.graph.attributes import is_attribute
from tessella.graph.build import Builder
from tessella.graph.graph import Value
from tessella.graph.operator_call import OperatorCall

Result = Value | tuple[Value, ...] | None


def _convolution(call: OperatorCall, build: Builder) -> Result:
    """The general operator, which some modules call directly."""
    a = call.arguments
    spatial = len(a["stride"])
    inputs = [call.input, a["weight"], a["bias"]]
    if len(call.input.shape) != spatial + 2:
        return None
    attrs = {k: a[k] for k in ("stride", "padding", "dilation", "groups")}
    if not a["transposed"]:
        return build.one(f"conv{spatial}d", inputs, **attrs)
    if spatial not in (2, 3):
        return None
    attrs["output_padding"] = a["output_padding"]
    return build.one(f"conv_transpose{spatial}d", inputs, **attrs)


def _conv_padding_by_name(call: OperatorCall, build: Builder) -> Result:
    """``padding="same"`` or ``"valid"``; an odd total puts the extra row or column after."""
    a = call.arguments
    spatial = call.overload[len("conv")]
    kernel = a["weight"].shape[2:]
    rank = len(kernel)
    if len(call.input.shape) != rank + 2:
        return None
    stride, dilation = (
        tuple(a[k]) * (rank if len(a[k]) == 1 else 1) for k in ("stride", "dilation")
    )
    total = (
        [d * (k - 1) for d, k in zip(dilation, kernel)] if a["padding"] == "same" else [0] * rank
    )
    x, padding = call.input, [t // 2 for t in total]
    if any(t % 2 for t in total):
        after = [n for t in reversed(total) for n in (t // 2, t - t // 2)]
        x, padding = build.one("pad", [x], pad=after, mode="constant", value=0.0), [0] * rank
    return build.one(
        f"conv{spatial}d",
        [x, a["weight"], a["bias"]],
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=a["groups"],
    )


def _batch_norm(call: OperatorCall, build: Builder) -> Result:
    a = call.arguments
    if a.get("training") or a.get("running_mean") is None:
        if call.input.shape[0] == 1:  # statistics of one sample, as weight standardization takes
            made = _per_channel(call, build)
            return (made,) if len(call.shapes) > 1 else made
        raise CompileError(
            "a batch normalization without running statistics mixes the images of a batch",
            seen=build.layer or "the network itself",
            fix="train it with track_running_stats=True",
        )
    inputs = [call.input, a["running_mean"], a["running_var"], a["weight"], a["bias"]]
    made = build.one("batch_norm", inputs, eps=a["eps"])
    return (made,) if len(call.shapes) > 1 else made


def _instance_norm(call: OperatorCall, build: Builder) -> Result:
    """With running statistics (``track_running_stats``) it is a batch norm, in evaluation mode."""
    a = call.arguments
    if a["use_input_stats"]:
        return _per_channel(call, build)
    inputs = [call.input, a["running_mean"], a["running_var"], a["weight"], a["bias"]]
    return build.one("batch_norm", inputs, eps=a["eps"])


def _per_channel(call: OperatorCall, build: Builder) -> Value:
    """Normalize each channel of each sample: a group normalization with groups of one."""
    a = call.arguments
    inputs = [call.input, a["weight"], a["bias"]]
    return build.one("group_norm", inputs, num_groups=call.input.shape[1], eps=a["eps"])


def _linear(call: OperatorCall, build: Builder) -> Result:
    """Of a weight that is one row, which torch takes without an axis of rows; others: None."""
    weight = call.arguments["weight"]
    if len(weight.shape) != 1 or call.arguments["bias"] is not None:
        return None
    row = build.one("reshape", [weight], shape=(1, *weight.shape))
    made = build.one("linear", [call.input, row, None])
    return build.one("reshape", [made], shape=call.shapes[0])


def _matmul(call: OperatorCall, build: Builder) -> Result:
    return build.one("matmul", [call.input, call.arguments["mat2"]])


def _embedding(call: OperatorCall, build: Builder) -> Result:
    return build.one("embedding", [call.arguments["indices"], call.arguments["weight"]])


def _adaptive_avg_pool1d(call: OperatorCall, build: Builder) -> Result:
    shape = call.input.shape
    if len(shape) != 3 or call.shapes[0] is None:
        return None
    flat = build.one("reshape", [call.input], shape=(*shape[:2], 1, shape[2]))
    size = (1, *call.arguments["output_size"])
    pooled = build.one("adaptive_avg_pool2d", [flat], output_size=size)
    return build.one("reshape", [pooled], shape=call.shapes[0])


def _attention(call: OperatorCall, build: Builder) -> Result:
    if call.arguments["dropout_p"]:
        raise CompileError(
            "an attention layer drops values at random even in evaluation mode",
            seen=f"dropout_p={call.arguments['dropout_p']} in {build.layer or 'the network'}",
            fix="pass dropout_p=self.p if self.training else 0.0",
        )
    return None  # the row shares its arguments


def _interpolate(mode: str) -> Callable[[OperatorCall, Builder], Result]:
    def translator(call: OperatorCall, build: Builder) -> Result:
        a = call.arguments
        if len(call.input.shape) < 3 or not is_attribute([a["output_size"], a["scale_factors"]]):
            return None
        return build.one(
            "interpolate",
            [call.input],
            size=a["output_size"],
            scale_factor=a["scale_factors"],
            mode=mode,
            align_corners=a.get("align_corners"),
            antialias=call.overload.endswith("_aa.vec"),
        )

    return translator


# by the overloads that a function translates
LAYERS: dict[str, Callable[[OperatorCall, Builder], Result]] = {
    "adaptive_avg_pool1d.default": _adaptive_avg_pool1d,
    "convolution.default": _convolution,
    "conv1d.padding conv2d.padding conv3d.padding": _conv_padding_by_name,
    "batch_norm.default _native_batch_norm_legit_no_training.default": _batch_norm,
    "_native_batch_norm_legit.no_stats": _batch_norm,
    "instance_norm.default": _instance_norm,
    "mm.default bmm.default": _matmul,
    "linear.default": _linear,
    "embedding.default": _embedding,
    "scaled_dot_product_attention.default": _attention,
    "upsample_nearest1d.vec upsample_nearest2d.vec": _interpolate("nearest"),
    "upsample_nearest3d.vec": _interpolate("nearest"),
    "upsample_linear1d.vec": _interpolate("linear"),
    "upsample_bilinear2d.vec _upsample_bilinear2d_aa.vec": _interpolate("bilinear"),
    "upsample_bicubic2d.vec _upsample_bicubic2d_aa.vec": _interpolate("bicubic"),
    "upsample_trilinear3d.vec": _interpolate("trilinear"),
}
