"""A program with one pooling in three parts: what is done to pixels, the windows, what follows.

A pooling alone is such a program, without the first part and the last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from tessella.core.errors import KernelError
from tessella.kernels.shared.axes import Strides, along
from tessella.kernels.shared.lowering import Lowered, lower, metas_of
from tessella.operations.pointwise_program import POOLS, Instruction, parse
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta

MAX_OPERANDS = 8  # of the kernels' parameters


class Steps(NamedTuple):
    """Element-wise steps, as a kernel takes them: constants of the compiler.

    Attributes:
        COUNT: tensors that they read.
        RESULT: the value that they make.
    """

    COUNT: int
    OPS: tuple[str, ...]
    READS: tuple[tuple[int, ...], ...]
    NUMBERS: tuple[tuple[float, ...], ...]
    RESULT: int


@dataclass(frozen=True, kw_only=True)
class Part:
    """Element-wise steps on one shape.

    Attributes:
        lowered: the steps; none where what is read is the result.
        reads: what its inputs are called in the whole program.
        strides: of each operand along the axes of the shape, 0 where it is broadcast.
    """

    lowered: Lowered
    reads: tuple[int, ...]
    strides: tuple[Strides, ...]

    def binder(
        self, constants: Mapping[int, torch.Tensor]
    ) -> Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]:
        """A function from the whole problem's operands to this part's; any tensor stands in for
        ``y``.
        """
        own = {i: constants[r] for i, r in enumerate(self.reads) if r in constants}
        bound = self.lowered.binder(own)
        return lambda given: bound([given[r if r < len(given) else 0] for r in self.reads])


@dataclass(frozen=True, kw_only=True)
class PooledProgram:
    """A program with a pooling.

    Attributes:
        pool: the pooling as an instruction; ``x`` and ``y`` are what it reads and makes.
        before: from the inputs to ``x``.
        after: from ``y``, its operand 0, and the inputs to the result.
    """

    pool: Instruction
    x: TensorMeta
    y: TensorMeta
    before: Part
    after: Part

    @property
    def first(self) -> Steps:
        return _steps(self.before, len(self.before.strides))

    @property
    def then(self) -> Steps:
        return _steps(self.after, len(self.after.strides) - 1)

    def binder(
        self, constants: Mapping[int, torch.Tensor]
    ) -> Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]:
        """A function from the problem's operands to the kernel's eight: before, after, then the
        first again.
        """
        first, then = self.before.binder(constants), self.after.binder(constants)

        def tensors(given: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            made = (*first(given), *then(given)[1:])
            return made + made[:1] * (MAX_OPERANDS - len(made))

        return tensors


def _steps(part: Part, count: int) -> Steps:
    made = part.lowered
    return Steps(
        COUNT=count,
        OPS=tuple(made.ops),
        READS=tuple(made.reads),
        NUMBERS=tuple(made.numbers),
        RESULT=made.results[0],
    )


def in_parts(problem: Problem) -> PooledProgram:
    """A problem ``pointwise``, or a pooling alone, in three parts.

    Raises:
        KernelError: it is no such program.
        CompileError: no program.
    """
    if problem.op in POOLS:
        attrs = {"program": ((problem.op, (0,), problem.attrs),), "results": (1,)}
        problem = replace(problem, op="pointwise", attrs=attrs)
    inputs = problem.given
    if len(inputs) != len(problem.inputs) or len(problem.outputs) != 1:
        raise KernelError("no input may be left out, and one result is made")
    count = len(inputs)
    program = parse(problem.attrs["program"], count, problem.attrs["results"])
    pools = [i for i, step in enumerate(program) if step.op in POOLS]
    if len(pools) != 1:
        raise KernelError("needs one pooling")
    pool, made, result = program[pools[0]], count + pools[0], problem.attrs["results"][0]
    metas = [*inputs, *metas_of(program, inputs)[count:]]
    parts = _Parts(problem, program, metas)
    found = PooledProgram(
        pool=pool,
        x=metas[pool.x],
        y=metas[made],
        before=parts.part((), pool.x, metas[pool.x].shape),
        after=parts.part((made,), result, metas[made].shape),
    )
    if len(found.before.strides) + len(found.after.strides) - 1 > MAX_OPERANDS:
        raise KernelError(f"reads at most {MAX_OPERANDS} tensors")
    return found


class _Parts:
    """Makes programs of their own of parts of a program's instructions."""

    def __init__(
        self, problem: Problem, program: Sequence[Instruction], metas: Sequence[TensorMeta]
    ) -> None:
        self._problem, self._program, self._metas = problem, program, metas

    def part(self, known: tuple[int, ...], result: int, shape: tuple[int, ...]) -> Part:
        """The program that makes a value from inputs and known values; the latter come first."""
        metas, count = self._metas, len(self._problem.inputs)
        steps = self._needed(known, result)
        made = {count + i: n for n, i in enumerate(steps)}
        read = {r for i in steps for r in self._program[i].reads if r is not None} - set(made)
        reads = (*known, *sorted(read - set(known))) if steps else (result,)
        if not steps:
            lowered = Lowered(shape=shape, operands=[0], results=(0,))
        else:
            number = {r: i for i, r in enumerate(reads)}
            number |= {value: len(reads) + n for value, n in made.items()}
            lowered = lower(self._as_problem(steps, reads, number, result))
        if lowered.rows or lowered.shape != shape or len(shape) != 4:
            raise KernelError("pools [N, C, H, W], with element-wise steps of that shape around")
        if known and 0 not in lowered.operands:
            raise KernelError("a result that does not depend on the pooling")
        operands = lowered.metas([metas[r] for r in reads])
        strides = tuple(along(meta, shape) for meta in operands)
        return Part(lowered=lowered, reads=reads, strides=strides)

    def _needed(self, known: tuple[int, ...], result: int) -> list[int]:
        """The instructions that make a value, in order."""
        count, found, open_ = len(self._problem.inputs), set(), [result]
        while open_:
            value = open_.pop()
            if value >= count and value not in known and value - count not in found:
                found.add(value - count)
                open_ += [r for r in self._program[value - count].reads if r is not None]
        if any(self._program[i].op in POOLS for i in found):
            raise KernelError("what is pooled is read at its own size too")
        return sorted(found)

    def _as_problem(
        self,
        steps: Sequence[int],
        reads: tuple[int, ...],
        number: Mapping[int, int],
        result: int,
    ) -> Problem:
        renumbered = [
            replace(step, reads=tuple(None if r is None else number[r] for r in step.reads)).data()
            for step in (self._program[i] for i in steps)
        ]
        return Problem(
            op="pointwise",
            inputs=tuple(self._metas[r] for r in reads),
            outputs=(self._metas[result],),
            attrs={"program": renumbered, "results": (number[result],)},
            constant=tuple(i for i, r in enumerate(reads) if r in self._problem.constant),
        )
