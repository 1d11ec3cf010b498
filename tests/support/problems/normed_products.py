"""A product and the norm of its rows as one problem, and what is right in float64."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tessella.operations.epilogue import ACTIVATIONS
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta

FP8 = "float8_e4m3fn"
EPS = 1e-5


def meta(dtype: str, *shape: int) -> TensorMeta:
    return TensorMeta(shape=shape, dtype=dtype)


def problem_of(
    m: int,
    n: int,
    k: int,
    *results: str,
    dtype: str = "float16",
    half: str = "float16",
    quantized: str = FP8,
    residual: bool = True,
    bias: bool = True,
    vectors: str | None = None,
    lead: tuple[int, ...] = (),
    **attrs: Any,
) -> Problem:
    """As ``problems.linear_norm`` makes it; ``vectors``: the type of the norm's."""
    of_results = {"norm": half, "sum": half, "codes": quantized}
    scaled = dtype != half
    attrs |= {"eps": EPS, "results": results}
    if scaled:
        attrs |= {"dtype": half, "fast_accumulation": dtype == FP8}
    inputs = (
        meta(dtype, *lead, m, k),
        meta(dtype, n, k),
        meta("float32", n) if bias else None,
        meta(half, *lead, m, n) if residual else None,
        meta("float32", n) if scaled else None,
        meta(vectors or half, n),
        meta(vectors or half, n),
        meta("float32") if "codes" in results else None,
    )
    return Problem(
        op="linear_norm",
        inputs=inputs,
        outputs=tuple(meta(of_results[name], *lead, m, n) for name in results),
        attrs=attrs,
        constant=tuple(i for i in (1, 2, 4, 5, 6, 7) if inputs[i] is not None),
    )


CASES: dict[str, Problem] = {
    "BERT fp8": problem_of(1000, 1024, 1024, "codes", "norm", dtype=FP8),
    "BERT": problem_of(1000, 1024, 1024, "norm"),
    "ViT": problem_of(1000, 768, 768, "norm", "sum"),
    "ViT fp8": problem_of(1000, 768, 768, "codes", "sum", dtype=FP8),
    "alone": problem_of(1000, 128, 256, "norm", half="bfloat16", dtype="bfloat16", residual=False),
    "int8": problem_of(1000, 512, 256, "codes", "norm", dtype="int8", quantized="int8"),
}


def operands_of(problem: Problem, seed: int) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(seed)

    def drawn(name: str, given: TensorMeta | None) -> torch.Tensor | None:
        if given is None:
            return None
        if name == "code_scale":
            return torch.tensor(0.03)
        values = torch.randn(given.shape, generator=generator)
        if given.dtype == "int8":
            values = (20 * values).round().clamp(-127, 127)
        if name == "scale":
            values = values.abs() * 1e-3
        if name == "bias":
            values += 3  # a mean far from zero
        return values.to(getattr(torch, given.dtype))

    return [drawn(*one) for one in zip(problem.operation.operands, problem.inputs, strict=False)]


def exact(problem: Problem, operands: list[torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """All results in float64; quantized values limited, but not rounded."""
    x, w, bias, residual, scale, weight, offset, quantum = (
        None if t is None else t.double() for t in operands
    )
    assert x is not None
    assert w is not None
    y = x @ w.T * problem.attr("alpha")
    if scale is not None:
        y = y * scale
    if bias is not None:
        y = y + bias
    if residual is not None:
        y = y + problem.attr("beta") * residual
    activation = problem.attr("activation")
    y = problem.attr("gamma") * (ACTIVATIONS[activation](y) if activation else y)
    made = F.layer_norm(y, y.shape[-1:], weight, offset, EPS)
    quantized = made if quantum is None else made / quantum
    if "codes" in problem.attrs["results"]:
        of_codes = problem.outputs[problem.attrs["results"].index("codes")].dtype
        quantized = quantized.clamp(-128, 127) if of_codes == "int8" else quantized.clamp(-448, 448)
    return {"sum": y, "norm": made, "codes": quantized}


def results(made: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """One result is no tuple."""
    return (made,) if isinstance(made, torch.Tensor) else made
