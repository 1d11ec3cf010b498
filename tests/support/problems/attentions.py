"""Attention problems with their tensors, and the answer in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from tessella.operations import problems
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import Format, meta_of

TOLERANCE = {"float32": 1e-5, "tf32": 2e-3, "float16": 2e-3, "bfloat16": 1.5e-2}
# what rounding to quantized values adds: a part of the number, and half of the smallest step
ROUNDING = {"int8": (0.0, 0.5), "float8_e4m3fn": (2.0**-4, 2.0**-10)}
MOST = {"int8": (-128.0, 127.0), "float8_e4m3fn": (-448.0, 448.0)}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attention.

    Attributes:
        groups: heads of keys; None for as many as there are of queries.
        mask: its shape, or None; ``mask_dtype``: of its elements.
        lowest: what a number of the mask is where it hides a key; -inf hides whole rows.
        hidden: which keys the mask hides, and nothing else is added: the "end", the "front", the
            "middle", "none"; any half of them, and none is 0, where it is left out.
        fused: q, k and v are views of one tensor [N, L, 3, heads, width].
        batched: without it the tensors have three axes.
        out: what the result is stored as; None for the queries' type.
    """

    n: int = 2
    heads: int = 2
    groups: int | None = None
    queries: int = 50
    keys: int = 45
    width: int = 16
    value_width: int | None = None
    dtype: str = "float16"
    math: Any = "ieee"
    causal: bool = False
    scale: float | None = None
    mask: tuple[int, ...] | None = None
    mask_dtype: str = "bool"
    lowest: float = -torch.inf
    hidden: str | None = None
    fused: bool = False
    batched: bool = True
    format: Format = "strided"
    gamma: float = 1.0
    out: str | None = None


def draw(case: Case, device: str = "cpu", seed: int = 0) -> tuple[Problem, list[torch.Tensor]]:
    """The problem and its inputs."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    if case.fused:
        whole = normal(case.n, case.queries, 3, case.heads, case.width)
        inputs = [whole[:, :, i].transpose(1, 2) for i in range(3)]
    else:
        groups = case.groups or case.heads
        inputs = [
            normal(case.n, case.heads, case.queries, case.width),
            normal(case.n, groups, case.keys, case.width),
            normal(case.n, groups, case.keys, case.value_width or case.width),
        ]
    if not case.batched:
        inputs = [t[0] for t in inputs]
    if case.mask is not None:
        inputs.append(_mask(case, generator, device))
    problem = problems.attention(
        *map(meta_of, inputs),
        is_causal=case.causal,
        scale=case.scale,
        enable_gqa=case.groups is not None,
        gamma=case.gamma,
        out_dtype=case.out,
        math=case.math,
    )
    output = replace(problem.output, format=case.format)
    return replace(problem, outputs=(output,)), inputs


def _mask(case: Case, generator: torch.Generator, device: str) -> torch.Tensor:
    """Half of the keys hidden; all, of the last batch or query."""
    seen = torch.rand(case.mask, generator=generator, device=device) > 0.5
    seen[-1] = False
    numbers = torch.randn(case.mask, generator=generator, device=device)
    if case.hidden is not None:
        first, end = {"end": (0.6, 1.0), "front": (0.0, 0.4), "middle": (0.4, 0.6), "none": (0, 0)}[
            case.hidden
        ]
        place = torch.arange(case.keys, device=device) / case.keys
        seen = ((place < first) | (place >= end)).expand(case.mask).clone()
        numbers.zero_()
    if case.mask_dtype == "bool":
        return seen
    return numbers.masked_fill(~seen, case.lowest).to(getattr(torch, case.mask_dtype))


def exact(problem: Problem, inputs: list[torch.Tensor]) -> torch.Tensor:
    """The answer in float64, by torch; of quantized values, what is rounded to them."""
    q, k, v, mask = (*(t if t.dtype == torch.bool else t.double() for t in inputs), None)[:4]
    if mask is not None and mask.dim() == 4 and 1 < len(mask) < len(q):
        mask = torch.cat([mask] * (len(q) // len(mask)))  # one for every few windows
    attrs = {n: problem.attrs[n] for n in ("is_causal", "scale", "enable_gqa")}
    return problem.epilogue.gamma * F.scaled_dot_product_attention(q, k, v, mask, **attrs)


def run(module: Any, case: Case, device: str = "cpu", config: Mapping[str, Any] = {}) -> None:
    """Assert that a kernel takes a case, and that its answer is right."""
    problem, inputs = draw(case, device)
    assert module.fits(problem) is None
    made, right = module.bind(problem, {}, **config)(*inputs), exact(problem, inputs)
    assert problem.output.matches(made)
    largest = right.abs().max() if right.numel() else right.sum()
    tolerance = TOLERANCE[case.math if case.math == "tf32" else case.dtype]
    part, step = ROUNDING.get(problem.output.dtype, (0.0, 0.0))
    right = right.clamp(*MOST.get(problem.output.dtype, (None, torch.inf)))
    allowed = tolerance * largest + part * right.abs() + step
    assert (made.double() - right).abs().le(allowed).all()  # and no NaN


FLOAT32_LOWEST = torch.finfo(torch.float32).min
CASES = {
    "odd": Case(),
    "fused heads": Case(fused=True, queries=39),
    "one query": Case(queries=1),
    "one of all": Case(n=1, heads=1, queries=1, keys=1),
    "causal": Case(causal=True, keys=50),
    "causal, more keys": Case(causal=True, queries=45, keys=100),
    "causal, fewer keys": Case(causal=True, queries=100, keys=45),
    "causal groups": Case(causal=True, heads=4, groups=2),
    "padding of keys": Case(mask=(2, 1, 1, 45)),
    "padding of keys, numbers": Case(mask=(2, 1, 1, 45), mask_dtype="float16"),
    "all hidden by the lowest": Case(
        mask=(2, 1, 1, 45), mask_dtype="float32", lowest=FLOAT32_LOWEST
    ),
    "a mask for each query": Case(mask=(50, 45)),
    "a mask for each head": Case(mask=(1, 2, 50, 45), mask_dtype="float32"),
    "wide values": Case(width=24, value_width=40),
    "scaled": Case(scale=0.7),
    "three axes": Case(batched=False),
    "contiguous": Case(fused=True, format="contiguous"),
    "large numbers": Case(scale=30.0),
}

BY_WINDOW = {
    "by window": Case(n=6, mask=(3, 1, 50, 45), mask_dtype="float16"),
    "by window and head": Case(n=6, mask=(2, 2, 50, 45), mask_dtype="float32"),
    "by window, bool, of one tensor": Case(
        n=8, queries=49, keys=49, fused=True, mask=(4, 1, 1, 49)
    ),
}

IN_A_WINDOW = {name: case for name, case in CASES.items() if max(case.queries, case.keys) <= 64}

QUANTIZED = {
    "quantized": Case(width=32, gamma=50.0, out="int8"),
    "quantized, many saturate": Case(width=32, gamma=300.0, out="int8"),
    "quantized, contiguous": Case(width=32, gamma=60.0, out="int8", format="contiguous"),
    "quantized, one wide head": Case(heads=1, width=32, value_width=48, gamma=40.0, out="int8"),
    "quantized, all hidden": Case(
        width=32, mask=(2, 1, 1, 45), mask_dtype="float16", gamma=50.0, out="int8"
    ),
    "quantized, causal": Case(
        n=1, queries=150, keys=150, width=32, causal=True, gamma=50.0, out="int8"
    ),
    "quantized without a factor": Case(width=32, scale=9.0, out="int8"),
    "a factor": Case(gamma=0.25),
}
HOPPER = {
    **{name: case for name, case in CASES.items() if case.width % 8 == 0},
    "many tiles": Case(n=1, queries=300, keys=450),
    "many tiles, causal": Case(n=1, queries=450, keys=450, causal=True),
    "many tiles, fused": Case(n=1, queries=197, fused=True, width=64),
    "many tiles, masked": Case(queries=197, keys=197, mask=(2, 1, 1, 197), mask_dtype="float32"),
    "many tiles, padded": Case(
        queries=197, keys=330, mask=(2, 1, 1, 330), mask_dtype="float16", lowest=-1e4, hidden="end"
    ),
    "many tiles, padded in front": Case(
        n=1, queries=130, keys=330, mask=(1, 1, 1, 330), hidden="front"
    ),
    "many tiles, a gap": Case(
        n=1,
        queries=130,
        keys=330,
        mask=(1, 2, 1, 330),
        mask_dtype="float32",
        lowest=FLOAT32_LOWEST,
        hidden="middle",
    ),
    "many tiles, nothing hidden": Case(
        n=1, queries=130, keys=330, mask=(1, 1, 1, 330), mask_dtype="float32", hidden="none"
    ),
    **QUANTIZED,
    "many tiles, quantized": Case(n=1, queries=300, keys=450, width=32, gamma=150.0, out="int8"),
}

LARGE = Case(n=16, heads=9, queries=300, keys=384, width=64)
COMPILED = {
    "ragged": replace(LARGE, keys=197, queries=197, fused=True),
    "causal": replace(LARGE, causal=True, dtype="bfloat16"),
    "by key": replace(LARGE, mask=(16, 1, 1, 384), mask_dtype="float16"),
    "by query": replace(LARGE, mask=(300, 384), mask_dtype="bool"),
    "wide": replace(LARGE, width=128),
    "int8": replace(LARGE, gamma=50.0, out="int8"),
    "fp8": replace(LARGE, queries=197, keys=197, fused=True, gamma=50.0, out="float8_e4m3fn"),
    "fp8 by key": replace(
        LARGE, mask=(16, 1, 1, 384), mask_dtype="float16", gamma=50.0, out="float8_e4m3fn"
    ),
    "fp8, narrow": replace(LARGE, width=32, dtype="bfloat16", out="float8_e4m3fn"),
    "int8, wide": replace(LARGE, width=128, causal=True, gamma=50.0, out="int8"),
}
WINDOW = Case(
    n=512, heads=3, queries=49, keys=49, width=32, fused=True, mask=(64, 3, 49, 49),
    mask_dtype="float16",
)  # fmt: skip
WINDOWS = {
    "swin": WINDOW,
    "one mask": replace(WINDOW, mask=(1, 3, 49, 49)),
    "no mask": replace(WINDOW, mask=None, dtype="bfloat16", width=64),
    "quantized": replace(WINDOW, gamma=50.0, out="int8"),
}


def put_extremes(inputs: list[torch.Tensor]) -> None:
    """A huge value wherever the mask hides a key, which must not be seen, and infinities at a key
    of the first image that is seen.
    """
    _, _, values, mask = inputs
    is_hidden = (~mask if mask.dtype == torch.bool else mask == -torch.inf)[:, 0, 0]
    values.masked_fill_(is_hidden[:, None, :, None], 3e38)
    seen = int(is_hidden[0].logical_not().nonzero()[-1])
    values[0, 0, seen, 9], values[0, 1, seen, 3] = torch.inf, -torch.inf
