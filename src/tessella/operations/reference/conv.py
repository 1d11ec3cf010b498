"""Convolutions, and what is computed with one in a step: what every kernel of them must agree with.

Shapes: N batch, C input channels, K output channels, then the spatial axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from tessella.operations.epilogue import NOTHING, Epilogue, bias_inside, exact, finish_as
from tessella.operations.operation import (
    Attributes,
    Shape,
    Shapes,
    differs,
    first_of,
    row,
    shown,
    vectors,
)
from tessella.operations.reference.pool import Sizes, max_pool2d

Tensor = torch.Tensor
Added = Epilogue[torch.Tensor]


def _convolution(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A convolution with its epilogue, over one, two or three spatial axes.

    input [N, C, …], weight [K, C / groups, …], bias and scale [K], residual like the result
    [N, K, …]. Integers and fp8 are computed exactly, in float64; ``dtype`` says what is stored.
    """

    def convolution(
        input: Tensor,
        weight: Tensor,
        *,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
        epilogue: Added = NOTHING,
        dtype: str | None = None,
    ) -> Tensor:
        x, w = exact(input), exact(weight)
        bias, rest = bias_inside(epilogue, x.dtype)
        made = product(x, w, bias, stride, padding, dilation, groups)
        return finish_as(dtype, made, rest, axis=1)

    return convolution


def conv_volumes(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """``F.conv3d``; on a CPU in float32 where oneDNN reads memory that nobody wrote.

    It does by AMX (torch 2.15) in bfloat16, where the result is one wide and the stride along the
    width is more than 1: answers are of 1e30, or right by chance.
    """
    reach = dilation[-1] * (weight.shape[-1] - 1) + 1
    narrow = x.shape[-1] + 2 * padding[-1] - reach < stride[-1]
    if narrow and stride[-1] > 1 and x.dtype == torch.bfloat16 and x.device.type == "cpu":
        added = None if bias is None else bias.float()
        made = F.conv3d(x.float(), weight.float(), added, stride, padding, dilation, groups)
        return made.to(x.dtype)
    return F.conv3d(x, weight, bias, stride, padding, dilation, groups)


conv1d = _convolution(F.conv1d)
conv2d = _convolution(F.conv2d)
conv3d = _convolution(conv_volumes)


def conv2d_chain(
    input: Tensor,
    weight: Tensor,
    next_weight: Tensor,
    *,
    epilogue: Added,
    next_epilogue: Added,
    keep: bool,
    dtype: str | None = None,
    next_dtype: str | None = None,
) -> tuple[Tensor, ...]:
    """Two 1 × 1 convolutions, each with its epilogue: the result, and if kept what lies between.

    input [N, C, H, W], weight [K, C, 1, 1], residual and between [N, K, H, W], next_weight
    [L, K, 1, 1], result [N, L, H, W]; ``next_…`` are the second one's.
    """
    window: dict[str, Any] = {
        "stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1
    }  # fmt: skip
    between = conv2d(input, weight, **window, epilogue=epilogue, dtype=dtype)
    made = conv2d(between, next_weight, **window, epilogue=next_epilogue, dtype=next_dtype)
    return (made, between) if keep else (made,)


def conv2d_pool(
    *inputs: Tensor,
    kernel_size: Sizes,
    pool_stride: Sizes,
    pool_padding: Sizes,
    pool_dilation: Sizes,
    ceil_mode: bool,
    **attrs: Any,
) -> Tensor:
    """``conv2d`` with its epilogue, and the largest number in each window of the result."""
    return max_pool2d(
        conv2d(*inputs, **attrs),
        kernel_size=kernel_size,
        stride=pool_stride,
        padding=pool_padding,
        dilation=pool_dilation,
        ceil_mode=ceil_mode,
    )


def _transposed_convolution(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``function`` of torch.nn.functional as a reference, its arguments by name."""

    def reference(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        stride: Sequence[int],
        padding: Sequence[int],
        output_padding: Sequence[int],
        groups: int,
        dilation: Sequence[int],
    ) -> Tensor:
        """input [N, C, …], weight [C, K / groups, …] → [N, K, …]."""
        return function(input, weight, bias, stride, padding, output_padding, groups, dilation)

    return reference


conv_transpose2d = _transposed_convolution(F.conv_transpose2d)
conv_transpose3d = _transposed_convolution(F.conv_transpose3d)


def _input_gradient(
    dy: Tensor,
    weight: Tensor,
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    input_size: Sequence[int],
) -> Tensor:
    """dy [N, K, …], weight [K, C / groups, …] → dx of shape input_size [N, C, …].

    A transposed convolution; pixels that the stride leaves over are output padding.
    """
    reached = [
        (p - 1) * s - 2 * pad + d * (r - 1) + 1
        for p, s, pad, d, r in zip(
            dy.shape[2:], stride, padding, dilation, weight.shape[2:], strict=True
        )
    ]
    rest = [size - most for size, most in zip(input_size[2:], reached, strict=True)]
    transposed = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[len(rest) - 1]
    return transposed(dy, weight, None, stride, padding, rest, groups, dilation)


def _weight_gradient(
    dy: Tensor,
    x: Tensor,
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    kernel_size: Sequence[int],
) -> Tensor:
    """dy [N, K, …], x [N, C, …] → dw [K, C / groups, *kernel_size]."""
    shape = (dy.shape[1], x.shape[1] // groups, *kernel_size)
    weight = x.new_empty(shape)
    made: Tensor = torch.ops.aten.convolution_backward(
        dy, x, weight, None, stride, padding, dilation, False, [0] * len(kernel_size), groups,
        [False, True, False],
    )[1]  # fmt: skip
    return made


def _convolved(shapes: Shapes, result: Shape, attrs: Attributes) -> str | None:
    """x [N, C, …], weight [K, C / groups, …] → [N, K, …]"""
    x, weight, groups = shapes["input"], shapes["weight"], attrs.get("groups", 1)
    if type(groups) is not int or groups < 1 or len(weight) != len(x) or len(x) < 3:
        return f"a weight {shown(weight)} of {groups} groups for an image {shown(x)}"
    if x[1] != weight[1] * groups or weight[0] % groups:
        return f"a weight {shown(weight)} of {groups} groups for {x[1]} channels"
    if len(result) != len(x) or result[:2] != (x[0], weight[0]):
        return f"a result {shown(result)} of {weight[0]} channels for {x[0]} images"
    reason = vectors(shapes, weight[0], "bias", "scale")
    if reason or "residual" not in shapes:
        return reason
    # a reference adds a larger one, too, and then has its shape
    return _window(x, attrs) or differs(shapes, "residual", _convolved_shape(shapes, attrs))


def _window(x: Shape, attrs: Attributes) -> str | None:
    """Why a convolution's attributes are not whole numbers for the axes of an image, or None."""
    windows = [attrs.get(name) for name in ("stride", "padding", "dilation")]
    lists = [window for window in windows if isinstance(window, list | tuple)]
    if [len(w) for w in lists if {*map(type, w)} == {int}] != [len(x) - 2] * len(windows):
        return f"a window {windows} for an image {shown(x)}"
    return None


def _pooled(shapes: Shapes, result: Shape, attrs: Attributes) -> str | None:
    """A convolution, whose residual is added before its result is pooled."""
    x, weight = shapes["input"], shapes["weight"]
    pairs = all(_is_pair(attrs.get(n, ())) for n in ("stride", "padding", "dilation"))
    if len(x) != 4 or len(weight) != 4 or not pairs:
        return "a convolution before pooling has two axes"
    between = _convolved_shape(shapes, attrs)
    if result[:2] != between[:2]:
        return f"a result {shown(result)} of {weight[0]} channels for {x[0]} images"
    return _convolved(shapes, between, attrs)


def _convolved_shape(shapes: Shapes, attrs: Attributes) -> Shape:
    x, weight = shapes["input"], shapes["weight"]
    windows = (attrs[name] for name in ("stride", "padding", "dilation"))
    places = zip(x[2:], weight[2:], *windows, strict=True)
    sizes = [(n + 2 * p - d * (k - 1) - 1) // max(1, s) + 1 for n, k, s, p, d in places]
    return (x[0], weight[0], *sizes)


def _is_pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and {*map(type, value)} == {int}


def _chained(shapes: Shapes, result: Shape, attrs: Attributes) -> str | None:
    """Two 1 × 1 convolutions: the second reads what the first makes."""
    x, weight, following = shapes["input"], shapes["weight"], shapes["next_weight"]
    if len(x) != 4 or weight != (weight[0], x[1], 1, 1):
        return f"a weight {shown(weight)} for an image {shown(x)}"
    if following != (following[0], weight[0], 1, 1):
        return f"a next weight {shown(following)} for {weight[0]} channels"
    between = (x[0], weight[0], *x[2:])
    return first_of(
        vectors(shapes, weight[0], "bias", "scale"),
        differs(shapes, "residual", between),
        vectors(shapes, following[0], "next_bias", "next_scale"),
    )


def _transposed(shapes: Shapes, result: Shape, attrs: Attributes) -> str | None:
    """x [N, C, …], weight [C, K / groups, …] → [N, K, …]"""
    x, weight, groups = shapes["input"], shapes["weight"], attrs.get("groups", 1)
    if type(groups) is not int or groups < 1 or len(weight) != len(x) or len(x) < 3:
        return f"a weight {shown(weight)} of {groups} groups for an image {shown(x)}"
    if x[1] != weight[0] or x[1] % groups:
        return f"a weight {shown(weight)} of {groups} groups for {x[1]} channels"
    return vectors(shapes, weight[1] * groups, "bias")


def _gradient(shapes: Shapes, result: Shape, attrs: Attributes) -> str | None:
    """A convolution of x with a weight makes what the gradient is of; either is the result."""
    x, weight = shapes.get("input", result), shapes.get("weight", result)
    if reason := _convolved({"input": x, "weight": weight}, shapes["grad"], attrs):
        return reason
    return _window(x, attrs) or differs(
        shapes, "grad", _convolved_shape({"input": x, "weight": weight}, attrs)
    )


def products(shapes: Shapes, result: Shape, attrs: Attributes) -> int:
    """The work where each number of the result is a sum over the weight's other axes."""
    return 2 * math.prod(result) * math.prod(shapes["weight"][1:])


def _products_before_pooling(shapes: Shapes, result: Shape, attrs: Attributes) -> int:
    return products(shapes, _convolved_shape(shapes, attrs), attrs)


def _products_of_both(shapes: Shapes, result: Shape, attrs: Attributes) -> int:
    pixels = math.prod(result) // result[1]
    return 2 * pixels * sum(math.prod(shapes[name]) for name in ("weight", "next_weight"))


def _products_of_transposed(shapes: Shapes, result: Shape, attrs: Attributes) -> int:
    """Each number of the input is multiplied by each of its channel's weights."""
    return 2 * math.prod(shapes["input"]) * math.prod(shapes["weight"][1:])


def _products_of_gradient(shapes: Shapes, result: Shape, attrs: Attributes) -> int:
    """The number of products of a gradient, which is that of the convolution itself."""
    weight = shapes.get("weight", result)
    return 2 * math.prod(shapes["grad"]) * math.prod(weight[1:])


WINDOW = "stride padding dilation groups"
FACTORS = {"alpha": 1.0, "beta": 1.0, "gamma": 1.0, "floor": 0.0}
OF_QUANTIZED = {"dtype": None, "fast_accumulation": False, "sparsity": None}
PRODUCT: dict[str, Any] = {  # facts of a row whose sums get an epilogue
    "defaults": {
        "activation": None,
        "non_negative": False,
        "wide_sums": False,
        **FACTORS,
        **OF_QUANTIZED,
    },
    "hints": "fast_accumulation sparsity non_negative wide_sums",
    "epilogues": ("",),
}

ROWS = (
    *(
        row(
            reference,
            "input weight bias? residual?",
            f"{WINDOW} activation",
            name=name,
            aten=f"{name}.default",
            late="scale",
            **PRODUCT,
            rule=_convolved,
            flops=products,
        )
        for name, reference in (("conv1d", conv1d), ("conv2d", conv2d), ("conv3d", conv3d))
    ),
    *(
        row(
            reference,
            "input weight bias?",
            "stride padding output_padding groups dilation",
            name=name,
            aten=f"{name}.input",
            rule=_transposed,
            flops=_products_of_transposed,
        )
        for name, reference in (
            ("conv_transpose2d", conv_transpose2d),
            ("conv_transpose3d", conv_transpose3d),
        )
    ),
    # the second reads what the first makes, which is a result too, if it is kept
    row(
        conv2d_chain,
        "input weight bias? residual? scale? next_weight next_bias? next_scale?",
        "activation next_activation keep",
        defaults={"activation": None, "beta": 1.0, "dtype": None, "next_dtype": None},
        epilogues=("", "next_"),
        rule=_chained,
        flops=_products_of_both,
        pair=("conv2d", "conv2d"),
        many=True,
    ),
    row(
        conv2d_pool,
        "input weight bias? residual?",
        f"{WINDOW} activation kernel_size pool_stride pool_padding pool_dilation ceil_mode",
        late="scale",
        **PRODUCT,
        rule=_pooled,
        flops=_products_before_pooling,
        pair=("conv2d", "max_pool2d"),
    ),
    *(
        row(
            _input_gradient,
            "grad weight",
            f"{WINDOW} input_size",
            name=f"conv{axes}d_dgrad",
            rule=_gradient,
            flops=_products_of_gradient,
        )
        for axes in (1, 2, 3)
    ),
    *(
        row(
            _weight_gradient,
            "grad input",
            f"{WINDOW} kernel_size",
            name=f"conv{axes}d_wgrad",
            rule=_gradient,
            flops=_products_of_gradient,
        )
        for axes in (1, 2, 3)
    ),
)
