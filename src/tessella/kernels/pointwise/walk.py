"""A program and the tensors it walks over: what the kernel is compiled for, or why it cannot be."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tessella.core.dtype import FLOATS
from tessella.core.errors import CompileError, KernelError
from tessella.kernels.pointwise.single import as_program
from tessella.kernels.shared.axes import Axes, common_axes
from tessella.kernels.shared.lowering import SMALL, Lowered, lower
from tessella.operations.problem import Problem

MAX_ELEMENTS = 2**31 - 1  # offsets have 32 bits
MAX_OPERANDS, MAX_OUTPUTS = 10, 4  # of the kernel's parameters


@dataclass(frozen=True, kw_only=True)
class Walk:
    """A program and the tensors it walks over: what the kernel is compiled for."""

    lowered: Lowered
    axes: Axes
    inputs: int

    @property
    def forms(self) -> tuple[str, ...]:
        """For each tensor, whether its numbers change with the row, the column, or both."""
        names = {(True, True): "tile", (False, True): "row", (True, False): "column"}
        made = [names.get((any(s[:-1]), s[-1] != 0), "one") for s in self.axes.strides]
        whole = "column" if self.axes.columns == 1 else "tile"
        outputs = ["column" if f == "column" else whole for f in made[self.inputs :]]
        return (*made[: self.inputs], *outputs)


def refusal(problem: Problem) -> str | None:
    """Why the kernel cannot carry a problem out, or None."""
    try:
        walk(problem)
    except (KernelError, CompileError) as reason:
        return str(reason)
    return None


_last: tuple[Problem, Walk] | None = None


def walk(problem: Problem) -> Walk:
    """The problem as the kernel sees it.

    The last one is kept: ``fits`` and ``bind`` are asked of one problem after another, and this is
    half of what a pointwise step of a plan takes to load.

    Raises:
        KernelError: it cannot; the message says why.
        CompileError: the program is none.
    """
    global _last
    if (known := _last) is None or known[0] is not problem:
        _last = known = problem, _walk(problem)
    return known[1]


def _walk(problem: Problem) -> Walk:
    problem = as_program(problem)
    metas = [m for m in (*problem.inputs, *problem.outputs) if m is not None]
    if any(m.format == "strided" and m.strides is None for m in metas):
        raise KernelError("strides must be known when the plan is built")
    if any(m.dtype not in (*FLOATS, *SMALL) for m in problem.outputs):
        raise KernelError("makes floating numbers of 16 or 32 bits, or quantized values")
    lowered = lower(problem)
    tensors = [*lowered.metas(problem.given), *problem.outputs]
    if len(lowered.operands) > MAX_OPERANDS or len(problem.outputs) > MAX_OUTPUTS:
        raise KernelError(f"reads at most {MAX_OPERANDS} tensors and makes at most {MAX_OUTPUTS}")
    if max(math.prod(m.shape) for m in tensors) > MAX_ELEMENTS:
        raise KernelError("indices have 32 bits")
    full = [i for i, m in enumerate(tensors) if m.shape == lowered.shape]
    lead = max((i for i in full if i >= len(lowered.operands)), default=full[0] if full else 0)
    axes = common_axes(lowered.shape, tensors, lead=lead, keep_last=lowered.rows)
    return Walk(lowered=lowered, axes=axes, inputs=len(lowered.operands))
