"""Precisions in which this processor is slower than in float32, as it has no instructions for them.

On a CPU with AVX2 alone, torch converts every bfloat16 that it multiplies: products take 5 times as
long as in float32. The same is true of float16 on every CPU without AVX512-FP16.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch.nn import functional

from tessella.core import processor
from tessella.core.dtype import PRECISIONS, SIXTEEN_BIT, plain_precision
from tessella.graph.graph import Graph
from tessella.search.timing import Run, quickest_us

WORTH_SAYING = 1.1  # times float32's time
BUDGET_S = 0.02  # of measuring a product
BFLOAT16 = {"avx512_bf16", "amx_bf16"}  # processors that multiply it


def slowdown(precision: str, target: str, op: str = "conv2d") -> float:
    """How many times as long as in float32 a product takes here; 1 where it is not slower.

    Args:
        op: ``conv2d`` or ``linear``: which kind of product.
    """
    dtype = PRECISIONS[plain_precision(precision)]
    if target != "cpu" or dtype not in SIXTEEN_BIT:
        return 1.0
    if dtype == "bfloat16" and not BFLOAT16.isdisjoint(processor.extensions()):
        return 1.0
    ratio = _ratio(dtype, op)
    return ratio if ratio > WORTH_SAYING else 1.0


def warnings_for(graph: Graph, precisions: Iterable[str], target: str) -> list[str]:
    """What to tell who asks for these precisions, for people."""
    op = "conv2d" if any(node.op == "conv2d" for node in graph.nodes) else "linear"
    product = {"conv2d": "a convolution", "linear": "a matrix product"}[op]
    return [
        f"{precision} is slower than fp32 on this processor, which has no instructions for it: "
        f"{product} takes {ratio:.1f} times as long (measured); compile with precision fp32"
        for precision in sorted({*map(plain_precision, precisions)})
        if (ratio := slowdown(precision, target, op)) > 1.0
    ]


@functools.cache
def _ratio(dtype: str, op: str) -> float:
    times_us = [_product_us(op, getattr(torch, name)) for name in (dtype, "float32")]
    return times_us[0] / times_us[1]


def _product_us(op: str, dtype: torch.dtype) -> float:
    """The least time of a product of about 30 million multiply-adds."""
    with torch.inference_mode():
        if op == "conv2d":
            x, weight = torch.randn(1, 64, 28, 28), torch.randn(64, 64, 3, 3)
            x, weight = (
                t.to(dtype).contiguous(memory_format=torch.channels_last) for t in (x, weight)
            )
            run: Run = functools.partial(functional.conv2d, x, weight, padding=1)
        else:
            rows, weight = torch.randn(256, 384).to(dtype), torch.randn(384, 384).to(dtype)
            run = functools.partial(functional.linear, rows, weight)
        run()
        return quickest_us(run, device=torch.device("cpu"), budget_s=BUDGET_S)
