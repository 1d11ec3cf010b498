"""Both gradients of a convolution by cuDNN through torch, its own search on: the fastest it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from tessella.kernels.catalog import Call
from tessella.kernels.conv.libraries import backward_aten
from tessella.operations.problem import Problem


def fits(problem: Problem) -> str | None:
    if problem.output.dtype == "float64":
        return "multiplies float32, float16 or bfloat16, not float64"
    if 0 in problem.output.shape or any(0 in meta.shape for meta in problem.inputs if meta):
        return "there is nothing to multiply"
    return backward_aten.fits(problem)


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    call: Callable[..., torch.Tensor] = backward_aten.bind(problem, constants)

    def searched(*inputs: torch.Tensor) -> torch.Tensor:
        with _search():
            return call(*inputs)

    return searched


@contextmanager
def _search() -> Iterator[None]:
    """torch lets cuDNN time its algorithms once a shape; the first call does, later ones know."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
