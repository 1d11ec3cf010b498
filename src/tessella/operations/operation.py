"""The operations that a graph or a plan may hold: names, inputs, attributes. A static table.

Names and attributes are torch.nn.functional's. What an operation means is its reference,
``operations.reference``; how torch's operators become these is ``graph.aten``.
"""

from __future__ import annotations

from dataclasses import dataclass

from tessella.core.errors import CompileError


@dataclass(frozen=True, kw_only=True)
class Op:
    """One row.

    Attributes:
        name: the operation.
        inputs: names of its tensor inputs, in order. A node has exactly as many, None where left
            out.
        optional: those of the inputs that may be left out.
        attrs: names of its attributes. A node has exactly these, and any of ``extras``.
        late: inputs that may follow; a node without them is shorter.
        extras: attributes that a node may leave out (``operations.problem.DEFAULTS``).
        aten: torch's overloads whose arguments of the same names say the same.
        variadic: takes any number of tensors instead of ``inputs``.
        elementwise: each element of the result depends on one element of each input (broadcast).
        view: only reinterprets shape or strides; the elements need not move.
        many: makes one or more outputs, by its attributes.
    """

    name: str
    inputs: tuple[str, ...]
    optional: tuple[str, ...] = ()
    attrs: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    aten: tuple[str, ...] = ()
    variadic: bool = False
    elementwise: bool = False
    view: bool = False
    many: bool = False


def _op(
    name: str,
    inputs: str,
    attrs: str = "",
    aten: str = "",
    late: str = "",
    extras: str = "",
    **flags: bool,
) -> Op:
    """A row from words: an input that may be left out ends in ``?``."""
    words = inputs.split()
    return Op(
        name=name,
        inputs=tuple(w.removesuffix("?") for w in words),
        optional=tuple(w.removesuffix("?") for w in words if w.endswith("?")),
        attrs=tuple(attrs.split()),
        late=tuple(late.split()),
        extras=tuple(extras.split()),
        aten=tuple(aten.split()),
        **flags,
    )


def _unary(name: str, attrs: str = "", aten: str = "") -> Op:
    return _op(name, "input", attrs, aten or f"{name}.default", elementwise=True)


def _binary(name: str, attrs: str = "") -> Op:
    """``other`` is left out where it is the number ``scalar``."""
    return _op(name, "input other?", f"scalar {attrs}", elementwise=True)


_CONV = "stride padding dilation groups activation"
# of a layer on int8 or fp8: one factor a channel, the residual's factor, the one behind the
# activation, the result's element type, how fp8 sums are kept; of a weight: its sparsity
_FACTORS = "alpha beta gamma dtype fast_accumulation sparsity"

_ROWS = (
    # convolution and matrix products: activation(… + bias + residual)
    _op("conv1d", "input weight bias? residual?", _CONV, "conv1d.default"),
    _op("conv2d", "input weight bias? residual?", _CONV, "conv2d.default", "scale", _FACTORS),
    _op("conv3d", "input weight bias? residual?", _CONV, "conv3d.default"),
    _op(
        "conv_transpose2d",
        "input weight bias?",
        "stride padding output_padding groups dilation",
        "conv_transpose2d.input",
    ),
    # two 1×1 convolutions: the second reads what the first makes, which is a result too, if kept
    _op(
        "conv2d_chain",
        "input weight bias? residual? scale? next_weight next_bias? next_scale?",
        "activation next_activation keep",
        extras="beta dtype next_dtype",
        many=True,
    ),
    # a convolution, and the largest of its results in each window
    _op(
        "conv2d_pool",
        "input weight bias? residual?",
        f"{_CONV} kernel_size pool_stride pool_padding pool_dilation ceil_mode",
        late="scale",
        extras=_FACTORS,
    ),
    _op(
        "linear",
        "input weight bias? residual?",
        "activation",
        "linear.default",
        "scale",
        _FACTORS,
    ),
    # a layer and the norm over its result's rows; results are norm, codes of it, and what it reads
    _op(
        "linear_norm",
        "input weight bias? residual? scale? norm_weight norm_bias code_scale?",
        "activation eps results",
        extras=f"{_FACTORS} code_dtype",
        many=True,
    ),
    _op("matmul", "input other", aten="matmul.default"),
    # normalization
    _op("batch_norm", "input running_mean running_var weight? bias?", "eps"),
    _op("layer_norm", "input weight? bias?", "normalized_shape eps", "layer_norm.default"),
    _op("group_norm", "input weight? bias?", "num_groups eps", "group_norm.default"),
    _op("rms_norm", "input weight?", "normalized_shape eps", "rms_norm.default"),
    _op("local_response_norm", "input", "size alpha beta k"),
    # pooling
    _op(
        "max_pool2d",
        "input",
        "kernel_size stride padding dilation ceil_mode",
        "max_pool2d.default",
        extras="non_negative",
    ),
    _op(
        "avg_pool2d",
        "input",
        "kernel_size stride padding ceil_mode count_include_pad divisor_override",
        "avg_pool2d.default",
    ),
    _op("adaptive_avg_pool2d", "input", "output_size", "adaptive_avg_pool2d.default"),
    # softmax, attention, reductions
    _op("softmax", "input", "dim dtype", "softmax.int"),
    _op("log_softmax", "input", "dim dtype", "log_softmax.int"),
    _op(
        "scaled_dot_product_attention",
        "query key value attn_mask?",
        "is_causal scale enable_gqa",
        "scaled_dot_product_attention.default",
        extras="gamma dtype",
    ),
    _op("mean", "input", "dim keepdim dtype", "mean.dim"),
    _op("sum", "input", "dim keepdim dtype", "sum.dim_IntList"),
    _op("amax", "input", "dim keepdim", "amax.default"),
    _op("amin", "input", "dim keepdim", "amin.default"),
    # element by element, one input
    _unary("relu"),
    _unary("relu6"),
    _unary("sigmoid"),
    _unary("tanh"),
    _unary("silu"),
    _unary("gelu", "approximate"),
    _unary("hardswish"),
    _unary("hardsigmoid"),
    _unary("mish"),
    _unary("leaky_relu", "negative_slope"),
    _unary("elu", "alpha scale input_scale"),
    _unary("softplus", "beta threshold"),
    _unary("clamp", "min max"),
    _unary("exp"),
    _unary("log"),
    _unary("sqrt"),
    _unary("rsqrt"),
    _unary("reciprocal"),
    _unary("neg"),
    _unary("abs"),
    _unary("erf"),
    _unary("to", "dtype", "to.dtype"),
    # element by element, two inputs
    _op("prelu", "input weight", aten="prelu.default"),
    _binary("add", "alpha"),
    _binary("sub", "alpha"),
    _binary("mul"),
    _binary("div"),
    _binary("pow"),
    _binary("maximum"),
    _binary("minimum"),
    # int8 and fp8: store(input / scale + zero_point), and back
    _op("quantize", "input scale zero_point?", "axis dtype"),
    _op("dequantize", "input scale zero_point?", "axis dtype"),
    # moving, cutting and joining
    _op("reshape", "input", "shape", view=True),
    _op("permute", "input", "dims", view=True),
    # axes in parts, some rolled, permuted, joined again: a copy, where the two above are views
    _op("rearrange", "input", "sizes rolls dims shape"),
    _op("expand", "input", "shape", view=True),
    _op("slice", "input", "dim start end step", view=True),
    _op("select", "input", "dim index", "select.int", view=True),
    _op("split", "input", "sizes dim", view=True, many=True),
    _op("cat", "", "dim", variadic=True),
    _op("pad", "input", "pad mode value", "pad.default"),
    _op("interpolate", "input", "size scale_factor mode align_corners antialias"),
    _op("embedding", "input weight"),
    _op("clone", "input"),
    # bytes of images [N, H, W, C] → [N, C, H, W]: input · gain + offset, one of each a channel
    _op("image_to_tensor", "input", "gain offset dtype"),
    # a program of element-wise operations and some along the last axis (kernels.pointwise.program)
    _op("pointwise", "", "program results", variadic=True, many=True),
    # an operator of torch that has no row: args and kwargs are templates, see
    # operations.torch_operators.arguments
    _op("fallback", "", "target args kwargs", variadic=True, many=True),
    # an operator of a user's own (kernels.user), by its name; args is such a template
    _op("user", "", "target args", variadic=True, many=True),
)

OPS: dict[str, Op] = {row.name: row for row in _ROWS}

# torch's overload, as in ``conv2d.default`` → the row whose arguments it shares
BY_ATEN: dict[str, Op] = {overload: row for row in _ROWS for overload in row.aten}


def op(name: str) -> Op:
    """The row called ``name``; raises ``CompileError`` if there is none."""
    if name not in OPS:
        raise CompileError("unknown operation", seen=name, fix=f"use one of {', '.join(OPS)}")
    return OPS[name]
