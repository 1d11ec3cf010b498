"""A layer norm as a step of a plan: alone, or in a program that quantizes the result as well."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from tessella.operations.problem import Problem

QUANTIZED_TYPES = ("float8_e4m3fn", "int8")
PLAIN = "only layer_norm(input, weight, bias), and one quantize of its result"


@dataclass(frozen=True, kw_only=True)
class NormStep:
    """What a step makes of rows.

    Attributes:
        value, weight, bias: positions among the step's inputs.
        eps: as layer_norm has it.
        results: what each output is: ``norm``, the normalized, or ``codes``, that rounded.
        code_scale: the position of the divisor before rounding; None if nothing is quantized.
        code_dtype: of the quantized values.
    """

    value: int
    weight: int
    bias: int
    eps: float
    results: tuple[str, ...]
    code_scale: int | None = None
    code_dtype: str | None = None


def norm_step(problem: Problem) -> NormStep | str:
    """A problem as such a step over the last axis, or why it is none."""
    count = len(problem.inputs)
    program: tuple[Any, ...] = (("layer_norm", range(count), problem.attrs),)
    results: tuple[int, ...] = (count,)
    if problem.op == "pointwise":
        program, results = (tuple(problem.attrs[name]) for name in ("program", "results"))
    elif problem.op != "layer_norm":
        return "a layer_norm, or a step that computes one"
    (op, reads, attrs), *rounding = program
    if op != "layer_norm" or len(rounding) > 1:
        return PLAIN
    value, weight, bias = (*reads, None, None)[:3]
    rows, *vectors = (None if i is None else problem.meta(i) for i in (value, weight, bias))
    shape = tuple(attrs["normalized_shape"])
    if rows is None or len(shape) != 1:
        return f"a norm over the last axis only, not over {shape}"
    if any(v is None or v.shape != shape for v in vectors):
        return "the norm has a weight and a bias"
    step = NormStep(
        value=value,
        weight=weight,
        bias=bias,
        eps=float(attrs["eps"]),
        results=tuple("norm" if n == count else "codes" for n in results),
    )
    return _quantized(step, problem, rounding[0]) if rounding else step


def _quantized(step: NormStep, problem: Problem, rounding: Any) -> NormStep | str:
    op, reads, attrs = rounding
    of, scale, zero = (*reads, None, None)[:3]
    if op != "quantize" or of != len(problem.inputs):
        return PLAIN
    if zero is not None:
        return "quantized values without a zero point"
    if attrs["dtype"] not in QUANTIZED_TYPES:
        return f"quantized values of {' or '.join(QUANTIZED_TYPES)}, not {attrs['dtype']}"
    meta = None if scale is None else problem.meta(scale)
    if meta is None or math.prod(meta.shape) != 1 or scale not in problem.constant:
        return "quantized values of one constant scale"
    return replace(step, code_scale=scale, code_dtype=attrs["dtype"])
