"""Problems from shapes: arguments as torch.nn.functional has them become what a kernel is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

from tessella.core.dtype import Math
from tessella.core.errors import UsageError
from tessella.operations import shapes
from tessella.operations.epilogue import ACTIVATIONS, NUMBERS, is_gamma
from tessella.operations.norm_step import NormStep, norm_step
from tessella.operations.problem import Problem
from tessella.operations.table import operation
from tessella.operations.tensor_meta import TensorMeta

Sizes = int | Sequence[int]
Extra = TensorMeta | None


def conv(
    x: TensorMeta,
    weight: TensorMeta,
    bias: Extra = None,
    residual: Extra = None,
    scale: Extra = None,
    *,
    stride: Sizes = 1,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    out_dtype: str | None = None,
    constant: tuple[int, ...] = (),
    math: Math = "ieee",
    **epilogue: Any,
) -> Problem:
    """Convolution of x [N, C, …] with weight [K, C / groups, …]; the result has x's format.

    Args:
        stride, padding, dilation: one number, or one for each spatial axis.
        out_dtype: default x's; for int8 operands int8 if there is a scale, else int32.
        epilogue: activation, alpha, beta, gamma.

    Raises:
        UsageError: shapes that do not go together.
    """
    axes = _spatial_axes(x, weight)
    window = _window(axes, stride, padding, dilation, groups)
    if 0 in weight.shape[1:]:
        raise UsageError(
            "a convolution without channels or taps has no products",
            seen=f"weight {weight.shape}",
            fix="give [out, in / groups, …] with at least one of each",
        )
    shape = (x.shape[0], weight.shape[0], *_out_sizes(x.shape[2:], weight.shape[2:], window))
    out = TensorMeta(shape=shape, dtype=out_dtype or _out_dtype(x, scale), format=_dense(x))
    return _whole(
        op=f"conv{axes}d",
        inputs=_trimmed(x, weight, bias, residual, scale),
        outputs=(out,),
        attrs={**window, "activation": None, **_given(epilogue)},
        constant=constant,
        math=math,
    )


def conv2d_chain(first: Problem, second: Problem, *, keep: bool = True) -> Problem:
    """Two 1 × 1 convolutions as one problem: ``second`` reads what ``first`` makes.

    Args:
        keep: what lies between is a result too, after that of the second.

    Raises:
        UsageError: they are no such pair; ``unchainable`` says why.
    """
    if why := unchainable(first, second):
        raise UsageError(
            "these convolutions are no chain",
            seen=why,
            fix="let the second read the first's result",
        )
    row, named = operation("conv2d_chain"), ("weight", "bias", "scale")
    operands = {name: first.get(name) for name in first.operation.operands}
    operands |= {f"next_{name}": second.get(name) for name in named}
    known = (*first.constants, *(f"next_{name}" for name in second.constants))
    shared = ("activation", "beta")
    attrs: dict[str, Any] = {name: first.attrs[name] for name in shared if name in first.attrs}
    if first["input"].dtype == "int8":
        attrs |= {"dtype": first.output.dtype, "next_dtype": second.output.dtype}
    return Problem(
        op=row.name,
        inputs=row.ordered(**operands),
        outputs=(second.output, first.output) if keep else (second.output,),
        attrs={**attrs, "next_activation": second.epilogue.activation, "keep": keep},
        constant=row.positions(known),
        math=first.math,
    )


def unchainable(first: Problem, second: Problem) -> str | None:
    """Why two convolutions are no chain, or None."""
    for problem in (first, second):
        if problem.op != "conv2d" or problem["weight"].shape[2:] != (1, 1):
            return "1×1 convolutions of images only"
        a = problem.attrs
        if tuple(a["stride"]) != (1, 1) or any(a["padding"]) or a["groups"] != 1:
            return "no stride, padding or groups"
        ending = problem.epilogue
        if (ending.alpha, ending.gamma, ending.floor) != (1, 1, 0):
            return "neither alpha nor gamma nor a floor"
    if second.get("residual") is not None:
        return "the second adds no residual"
    if replace(first.output, strides=None) != replace(second["input"], strides=None):
        return f"the second reads {second['input']}, not {first.output}"
    return None


# attributes of a pooling, and what they are called behind a convolution
POOLED = {
    "kernel_size": "kernel_size",
    "stride": "pool_stride",
    "padding": "pool_padding",
    "dilation": "pool_dilation",
    "ceil_mode": "ceil_mode",
}


def conv2d_pool(first: Problem, pool: Problem) -> Problem:
    """A convolution and a ``max_pool2d`` of its result as one problem.

    Raises:
        UsageError: they are no such pair; ``unpoolable`` says why.
    """
    if why := unpoolable(first, pool):
        raise UsageError(
            "these are no convolution and its pooling",
            seen=why,
            fix="let a max_pool2d read the convolution's result",
        )
    attrs = {name: pool.attrs[pooled] for pooled, name in POOLED.items()}
    return replace(first, op="conv2d_pool", outputs=pool.outputs, attrs={**first.attrs, **attrs})


def unpoolable(first: Problem, pool: Problem) -> str | None:
    """Why these are no convolution and the largest number in each window of its result, or None."""
    if first.op != "conv2d" or pool.op != "max_pool2d":
        return "a conv2d and a max_pool2d"
    if replace(first.output, strides=None) != replace(pool["input"], strides=None):
        return f"the pooling reads {pool['input']}, not {first.output}"
    return None


def linear_norm(first: Problem, second: Problem, *, keep: bool) -> Problem:
    """A ``linear`` and the layer norm over its rows as one problem.

    Its inputs are eight: the linear's five, the norm's weight and bias, the scale of quantized
    values. The attribute ``results`` says what each output is: ``norm``, ``codes`` (the norm's
    result, quantized), or ``sum``, which is normalized.

    Args:
        second: a ``layer_norm``, or a ``pointwise`` that normalizes and quantizes.
        keep: the sum is a result too, the last.

    Raises:
        UsageError: they are no such pair; ``unnormable`` says why.
    """
    norm = norm_step(second)
    if (why := unnormable(first, second)) or not isinstance(norm, NormStep):
        raise UsageError(
            "these are no linear and its norm",
            seen=why,
            fix="let a layer_norm read the linear's result",
        )
    row = operation("linear_norm")
    read = {"norm_weight": norm.weight, "norm_bias": norm.bias, "code_scale": norm.code_scale}
    operands = {name: first.get(name) for name in first.operation.operands}
    operands |= {name: None if i is None else second.meta(i) for name, i in read.items()}
    known = (*first.constants, *(name for name, i in read.items() if i in second.constant))
    attrs = {"eps": norm.eps, "results": (*norm.results, *["sum"] * keep)}
    if norm.code_dtype is not None:
        attrs["code_dtype"] = norm.code_dtype
    return replace(
        first,
        op=row.name,
        inputs=row.ordered(**operands),
        outputs=(*second.outputs, *first.outputs[: int(keep)]),
        attrs={**first.attrs, **attrs},
        constant=row.positions(known),
    )


def unnormable(first: Problem, second: Problem) -> str | None:
    """Why these are no ``linear`` and the layer norm over the rows of its result, or None."""
    if first.op != "linear" or first.output.dtype not in ("float16", "bfloat16"):
        return "a linear that makes float16 or bfloat16"
    norm = norm_step(second)
    if isinstance(norm, str):
        return norm
    value = second.meta(norm.value)
    if value is None or replace(first.output, strides=None) != replace(value, strides=None):
        return f"the norm reads {value}, not {first.output}"
    return None


def conv_dgrad(
    dy: TensorMeta,
    weight: TensorMeta,
    input_size: Sequence[int],
    *,
    stride: Sizes = 1,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    math: Math = "ieee",
) -> Problem:
    """The gradient of a convolution's input [N, C, …] from that of its result dy [N, K, …]."""
    axes = _spatial_axes(dy, weight)
    window = _window(axes, stride, padding, dilation, groups)
    shape = tuple(int(size) for size in input_size)
    if len(shape) != axes + 2:
        raise UsageError(
            "input_size must be [N, C, spatial…]",
            seen=shape,
            fix="give the shape of the convolution's input",
        )
    return _whole(
        op=f"conv{axes}d_dgrad",
        inputs=(dy, weight),
        outputs=(TensorMeta(shape=shape, dtype=dy.dtype, format=_dense(dy)),),
        attrs={**window, "input_size": shape},
        math=math,
    )


def conv_wgrad(
    dy: TensorMeta,
    x: TensorMeta,
    kernel_size: Sizes,
    *,
    stride: Sizes = 1,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    out_dtype: str | None = None,
    math: Math = "ieee",
) -> Problem:
    """The gradient of a convolution's weight [K, C / groups, …]; it has x's format."""
    axes = _spatial_axes(dy, x)
    window = _window(axes, stride, padding, dilation, groups)
    taps = _sizes(kernel_size, axes, "kernel_size")
    shape = (dy.shape[1], x.shape[1] // groups, *taps)
    return _whole(
        op=f"conv{axes}d_wgrad",
        inputs=(dy, x),
        outputs=(TensorMeta(shape=shape, dtype=out_dtype or x.dtype, format=_dense(x)),),
        attrs={**window, "kernel_size": taps},
        math=math,
    )


def matmul(
    a: TensorMeta,
    b: TensorMeta,
    bias: Extra = None,
    residual: Extra = None,
    scale: Extra = None,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    out_dtype: str | None = None,
    constant: tuple[int, ...] = (),
    math: Math = "ieee",
    **epilogue: Any,
) -> Problem:
    """op(a) [..., M, K] times op(b) [..., K, N]; b's leading axes are a's, or absent.

    Args:
        transpose_a: a is [..., K, M].
        transpose_b: b is [..., N, K].
        epilogue: activation, alpha, beta, gamma, fast_accumulation.

    Raises:
        UsageError: shapes that do not go together.
    """
    if len(a.shape) < 2 or len(b.shape) < 2:
        raise UsageError(
            "a matrix product takes matrices",
            seen=f"{a.shape} and {b.shape}",
            fix="give tensors of two or more axes",
        )
    m, k = a.shape[:-3:-1] if transpose_a else a.shape[-2:]
    inner, n = b.shape[:-3:-1] if transpose_b else b.shape[-2:]
    if k != inner or b.shape[:-2] not in (a.shape[:-2], ()):
        raise UsageError(
            "the matrices do not fit together: [..., M, K] times [..., K, N]",
            seen=f"{a.shape}{'ᵀ' * transpose_a} and {b.shape}{'ᵀ' * transpose_b}",
            fix="let the inner sizes be equal, and leading axes equal or absent in the second",
        )
    transposes = {"transpose_a": transpose_a, "transpose_b": transpose_b}
    out = TensorMeta(shape=(*a.shape[:-2], m, n), dtype=out_dtype or _out_dtype(a, scale))
    return _whole(
        op="matmul",
        inputs=_trimmed(a, b, bias, residual, scale),
        outputs=(out,),
        attrs={**{k: v for k, v in transposes.items() if v}, **_given(epilogue)},
        constant=constant,
        math=math,
    )


def linear(
    x: TensorMeta,
    weight: TensorMeta,
    bias: Extra = None,
    residual: Extra = None,
    scale: Extra = None,
    *,
    out_dtype: str | None = None,
    constant: tuple[int, ...] = (),
    math: Math = "ieee",
    **epilogue: Any,
) -> Problem:
    """x [..., K] times weight [N, K] transposed."""
    shape = (*x.shape[:-1], weight.shape[0])
    out = TensorMeta(shape=shape, dtype=out_dtype or _out_dtype(x, scale))
    return _whole(
        op="linear",
        inputs=_trimmed(x, weight, bias, residual, scale),
        outputs=(out,),
        attrs={"activation": None, **_given(epilogue)},
        constant=constant,
        math=math,
    )


DEFAULT = {**NUMBERS, "fast_accumulation": False}


def _given(epilogue: dict[str, Any]) -> dict[str, Any]:
    """The attributes that differ from the defaults, so that equal problems have equal keys."""
    if unknown := set(epilogue) - set(DEFAULT):
        raise UsageError(
            "unknown argument of a product", seen=sorted(unknown), fix=f"use {', '.join(DEFAULT)}"
        )
    activation = epilogue.get("activation")
    if activation is not None and activation not in ACTIVATIONS:
        raise UsageError(
            "unknown activation", seen=activation, fix=f"use one of {', '.join(ACTIVATIONS)}"
        )
    factors: dict[str, Any] = {n: epilogue[n] for n in ("alpha", "beta", "floor") if n in epilogue}
    if not all(map(isfinite, factors.values())):
        raise UsageError(
            "alpha, beta and floor are finite", seen=factors, fix="change the one that is not"
        )
    if "gamma" in epilogue:
        if not is_gamma(epilogue["gamma"]):
            raise UsageError(
                "gamma is a number above zero that float32 holds",
                seen=epilogue["gamma"],
                fix="give the factor behind the activation, 1 / the scale of the result",
            )
        factors["gamma"] = epilogue["gamma"]
    given = {**epilogue, **{name: float(value) for name, value in factors.items()}}
    return {name: value for name, value in given.items() if value != DEFAULT[name]}


def _whole(**asked: Any) -> Problem:
    """A problem whose tensors have the shapes that the rule of its operation wants."""
    problem = Problem(**asked)
    if reason := problem.misfit:
        raise UsageError(
            f"the tensors of {problem.op} do not go together",
            seen=reason,
            fix="give the shapes that the function's help names",
        )
    return problem


def _out_dtype(x: TensorMeta, scale: Extra) -> str:
    return x.dtype if x.dtype != "int8" or scale is not None else "int32"


def _dense(x: TensorMeta) -> Any:
    return "channels_last" if x.format == "channels_last" else "contiguous"


def attention(
    query: TensorMeta,
    key: TensorMeta,
    value: TensorMeta,
    attn_mask: Extra = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    gamma: float = 1.0,
    out_dtype: str | None = None,
    constant: tuple[int, ...] = (),
    math: Math = "ieee",
) -> Problem:
    """gamma · softmax(scale · query · keyᵀ + mask) · value; its strides are the kernel's choice.

    query [N, heads, L, E], key [N, heads, S, E], value [N, heads, S, V]; the other arguments are
    those of torch's ``scaled_dot_product_attention``.

    Args:
        gamma: 1 / the scale of a result of int8 or fp8.
        out_dtype: default the query's.

    Raises:
        UsageError: shapes that do not go together.
    """
    inputs = _trimmed(query, key, value, attn_mask)
    attrs: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    attrs |= _given({"gamma": gamma})
    if out_dtype not in (None, query.dtype):
        attrs["dtype"] = out_dtype
    try:
        ((dtype, shape),) = shapes.made("scaled_dot_product_attention", inputs, attrs)
    except (RuntimeError, IndexError) as error:
        raise UsageError(
            "query, key, value and mask do not go together",
            seen=", ".join(str(t.shape) for t in inputs if t is not None),
            fix="give [N, heads, L, E], twice [N, heads, S, E], and a mask for [N, heads, L, S]",
        ) from error
    return Problem(
        op="scaled_dot_product_attention",
        inputs=inputs,
        outputs=(TensorMeta(shape=shape, dtype=dtype, format="strided"),),
        attrs=attrs,
        constant=constant,
        math=math,
    )


def _trimmed(*inputs: Extra) -> tuple[Extra, ...]:
    """The inputs without the optional ones at the end that are left out."""
    found = list(inputs)
    while found[-1] is None:
        found.pop()
    return tuple(found)


def _spatial_axes(x: TensorMeta, weight: TensorMeta) -> int:
    axes = len(x.shape) - 2
    if axes not in (1, 2, 3) or len(weight.shape) != len(x.shape):
        raise UsageError(
            "a convolution takes tensors of three, four or five axes, as many as its weight",
            seen=f"{x.shape} and {weight.shape}",
            fix="give [N, C, spatial…] and [K, C / groups, taps…]",
        )
    return axes


def _window(
    axes: int, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int
) -> dict[str, Any]:
    window: dict[str, Any] = {
        "stride": _sizes(stride, axes, "stride"),
        "padding": _sizes(padding, axes, "padding"),
        "dilation": _sizes(dilation, axes, "dilation"),
        "groups": groups,
    }
    if min(*window["stride"], *window["dilation"], groups) < 1 or min(window["padding"]) < 0:
        raise UsageError(
            "stride, dilation and groups are at least 1, padding at least 0",
            seen=window,
            fix="change the one that is not",
        )
    return window


def _sizes(sizes: Sizes, axes: int, name: str) -> tuple[int, ...]:
    made = (sizes,) * axes if isinstance(sizes, int) else tuple(sizes) if _are(sizes) else ()
    if len(made) != axes:
        fix = f"give an integer, or {axes}"
        raise UsageError(f"{name} needs one integer an axis", seen=repr(sizes), fix=fix)
    return made


def _are(sizes: object) -> bool:
    """Whether these are integers."""
    return isinstance(sizes, Sequence) and all(isinstance(size, int) for size in sizes)


def _out_sizes(
    sizes: Sequence[int], taps: Sequence[int], window: dict[str, Any]
) -> tuple[int, ...]:
    made = tuple(
        (size + 2 * padding - dilation * (tap - 1) - 1) // stride + 1
        for size, tap, stride, padding, dilation in zip(
            sizes, taps, window["stride"], window["padding"], window["dilation"], strict=True
        )
    )
    if min(made) < 1:
        raise UsageError(
            "the kernel is larger than the padded input",
            seen=f"input {tuple(sizes)}, kernel {tuple(taps)}, padding {window['padding']}",
            fix="pad more, or use a smaller kernel",
        )
    return made
