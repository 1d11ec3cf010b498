"""Pooling in plain torch. input is [N, C, H, W]."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tessella.operations.operation import row

Tensor = torch.Tensor
Sizes = tuple[int, ...] | list[int]


def max_pool2d(
    input: Tensor,
    *,
    kernel_size: Sizes,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    ceil_mode: bool,
) -> Tensor:
    x = input.half() if input.dtype == torch.int8 else input
    made = F.max_pool2d(x, kernel_size, stride, padding, dilation, ceil_mode)
    # int8 is pooled on no GPU; float16 holds each of its numbers
    return made if x is input else made.to(torch.int8)


def avg_pool2d(
    input: Tensor,
    *,
    kernel_size: Sizes,
    stride: Sizes,
    padding: Sizes,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    return F.avg_pool2d(
        input, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
    )


def adaptive_avg_pool2d(input: Tensor, *, output_size: Sizes) -> Tensor:
    height, width = output_size
    return F.adaptive_avg_pool2d(input, (height, width))


ROWS = (
    row(
        max_pool2d,
        "input",
        "kernel_size stride padding dilation ceil_mode",
        aten="max_pool2d.default",
        defaults={"non_negative": False},
        hints="non_negative",
    ),
    row(
        avg_pool2d,
        "input",
        "kernel_size stride padding ceil_mode count_include_pad divisor_override",
        aten="avg_pool2d.default",
    ),
    row(adaptive_avg_pool2d, "input", "output_size", aten="adaptive_avg_pool2d.default"),
)
