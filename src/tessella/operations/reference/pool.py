"""Pooling in plain torch. input is [N, C, H, W]."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from tessella.operations.operation import row

Tensor = torch.Tensor


def max_pool2d(
    input: Tensor,
    *,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> Tensor:
    settings = (kernel_size, stride, padding, dilation, ceil_mode)
    if input.dtype == torch.int8:  # which torch pools on no GPU; float16 holds each of them
        return F.max_pool2d(input.half(), *settings).to(torch.int8)
    return F.max_pool2d(input, *settings)


def avg_pool2d(
    input: Tensor,
    *,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    return F.avg_pool2d(
        input, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
    )


def adaptive_avg_pool2d(input: Tensor, *, output_size: Sequence[int]) -> Tensor:
    return F.adaptive_avg_pool2d(input, list(output_size))


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
