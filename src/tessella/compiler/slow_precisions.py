"""Precisions in which a target is slower than in others, as it has no instructions for them.

On a CPU with AVX2 alone, torch converts every bfloat16 that it multiplies: products take 5 times as
long as in float32. The same is true of float16 on every CPU without AVX512-FP16. GPUs before Ampere
have no bfloat16, and those before Ada no FP8: layers in it are the reference's there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch.nn import functional

from tessella.core import processor
from tessella.core.architectures import ARCHITECTURES, Feature, has, is_gpu
from tessella.core.dtype import PRECISIONS, SIXTEEN_BIT, plain_precision
from tessella.graph.graph import Graph
from tessella.search.timing import Run, quickest_us

WORTH_SAYING = 1.1  # times float32's time
BUDGET_S = 0.02  # of measuring a product
ROUNDS = 3  # in turns: of one look each, a busy machine once in ten called AMX slower than float32
# what a GPU multiplies it by, and what to take where it does not; Turing's own types are libraries'
ON_GPUS: dict[str, tuple[Feature, str]] = {
    "bf16": ("bf16_mma", "fp16"), "fp8": ("fp8_mma", "int8"),
}  # fmt: skip
BFLOAT16 = frozenset(("avx512_bf16", "amx_bf16"))  # instructions that multiply it


def slowdown(precision: str, target: str, op: str = "conv2d") -> float:
    """How many times as long as in float32 a product takes here; 1 where it is not slower.

    Args:
        op: ``conv2d`` or ``linear``: which kind of product.
    """
    dtype = PRECISIONS[plain_precision(precision)]
    if target != "cpu" or dtype not in SIXTEEN_BIT:
        return 1.0
    ratio = _ratio(dtype, op)
    return ratio if ratio > WORTH_SAYING else 1.0


def warnings_for(graph: Graph, precisions: Iterable[str], target: str) -> list[str]:
    """What to tell who asks for these precisions, for people."""
    asked = sorted({*map(plain_precision, precisions)})
    if is_gpu(target):
        return [
            f"{precision} is slow on {target} ({ARCHITECTURES[target].chips}), which has no "
            f"instructions for it; compile with precision {better}"
            for precision, (needed, better) in ON_GPUS.items()
            if precision in asked and not has(target, needed)
        ]
    op = "conv2d" if any(node.op == "conv2d" for node in graph.nodes) else "linear"
    product = {"conv2d": "a convolution", "linear": "a matrix product"}[op]
    return [
        f"{precision} is slower than fp32 on this processor, which has no instructions for it: "
        f"{product} takes {ratio:.1f} times as long (measured); compile with precision fp32"
        for precision in asked
        if (ratio := slowdown(precision, target, op)) > 1.0
    ]


@functools.cache
def _ratio(dtype: str, op: str) -> float:
    if dtype == "bfloat16" and not BFLOAT16.isdisjoint(processor.extensions()):
        return 1.0
    types = [getattr(torch, name) for name in (dtype, "float32")]
    rounds_us = [[_product_us(op, each) for each in types] for _ in range(ROUNDS)]
    narrow_us, wide_us = map(min, zip(*rounds_us, strict=True))
    return float(narrow_us / wide_us)


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
