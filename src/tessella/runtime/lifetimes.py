"""Lifetimes: no two values of a program that are needed at the same time share memory.

A checker of what a planner decided: it finds out by itself until when a value is needed, and shares
no code with ``execution.liveness``, so that no error is on both sides.

Slices of one buffer are its family: they live in its memory, from the first that is written to the
last that is read, and among themselves they must not overwrite each other either.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tessella.artifacts.program import Bucket, Buffer, Program, Step
from tessella.core.errors import CorruptArtifact
from tessella.kernels import catalog
from tessella.operations.problem import Problem

Range = tuple[int, int, int]  # axis, first place on it, end
Place = tuple[int, int, str]  # first byte, end, name

WHOLE: Range = (-1, 0, 0)  # of a buffer


def check(program: Program, bucket: Bucket, problems: Sequence[Problem]) -> None:
    """Refuse a bucket in whose arena a step would overwrite what is still read.

    A view keeps alive what it is a view of. What ``Step.frees`` says is not believed.

    Args:
        problems: what each step is asked to do.

    Raises:
        CorruptArtifact: two live buffers overlap; names both.
    """
    buffers = {b.name: b for b in bucket.buffers}
    last = _last_use(program, bucket)
    whole = {b.name: b.slice.of if b.slice else b.name for b in bucket.buffers}
    until: dict[str, int] = {}
    for name, base in whole.items():
        until[base] = max(until.get(base, -1), last.get(name, -1))
    families = {
        b.slice.of: _Family(bucket.batch, b.slice.of, buffers, last)
        for b in bucket.buffers
        if b.slice is not None
    }
    views = [step for step in bucket.steps if catalog.kernel(step.kernel).views]
    viewed = {name for step in views for name in step.inputs}
    arena = _Arena(bucket.batch)
    started: set[str] = set()
    for index, (step, problem) in enumerate(zip(bucket.steps, problems, strict=True)):
        for name in step.outputs:
            base = whole[name]
            if base in families:
                families[base].make(index, step, problem, name)
            if base not in started:
                started.add(base)
                dying = {n for n in step.inputs if n is not None and until.get(n) == index}
                over = _overwritten(step, name, dying - viewed, buffers)
                arena.add(index, buffers[base], until[base], over)
        if step.workspace is not None:
            arena.add(index, buffers[step.workspace], index, None)
        arena.end(index)


def _overwritten(
    step: Step, name: str, dying: set[str], buffers: Mapping[str, Buffer]
) -> str | None:
    """The input whose memory the step may take for its result, or None.

    Its kernel reads an element before it writes the same one, and nothing else reads it, then or
    later: not through a view either.
    """
    if not catalog.kernel(step.kernel).in_place:
        return None
    made = buffers[name]
    for other in (buffers[n] for n in step.inputs if n is not None and n in dying):
        alike = (other.offset, other.shape, other.dtype, other.format, other.slice) == (
            made.offset, made.shape, made.dtype, made.format, made.slice
        )  # fmt: skip
        if alike and made.offset is not None:
            return other.name
    return None


@dataclass
class _Arena:
    """The values that lie at each place of the arena, step by step."""

    batch: int
    live: list[Place] = field(default_factory=list)  # sorted, apart from each other
    ends: dict[int, list[Place]] = field(default_factory=dict)

    def add(self, index: int, buffer: Buffer, until: int, over: str | None) -> None:
        """A buffer lives from step ``index`` on; only ``over`` may lie where it lies."""
        nbytes = math.prod(buffer.shape) * getattr(torch, buffer.dtype).itemsize
        if buffer.offset is None or nbytes == 0:
            return
        place = (buffer.offset, buffer.offset + nbytes, buffer.name)
        at = bisect(self.live, place)
        for other in self.live[max(0, at - 1) : at + 1]:
            if place[0] < other[1] and other[0] < place[1] and other[2] != over:
                raise _overlap(
                    buffer.name, other[2], self.batch, index, f"{place[:2]}, {other[:2]}"
                )
        self.live.insert(at, place)
        self.ends.setdefault(until, []).append(place)

    def end(self, index: int) -> None:
        for place in self.ends.pop(index, []):
            self.live.remove(place)


@dataclass
class _Family:
    """The slices of one buffer, as far as they have been made."""

    batch: int
    name: str
    buffers: Mapping[str, Buffer]
    last: Mapping[str, int]
    members: dict[str, Range] = field(default_factory=dict)

    def make(self, index: int, step: Step, problem: Problem, name: str) -> None:
        """A step makes a member: what it writes must not be what is still read of another one."""
        for written in self._written(step, problem, name):
            for other, there in self.members.items():
                if self.last[other] >= index and _meet(written, there):
                    where = f"{written[1:]}, {there[1:]} of {self.name}"
                    raise _overlap(name, other, self.batch, index, where)
        self.members[name] = self._range(name)

    def _written(self, step: Step, problem: Problem, name: str) -> list[Range]:
        """Nothing by a view; by a concatenation, the parts that do not lie in it already."""
        here = self._range(name)
        if catalog.kernel(step.kernel).views:
            if name != self.name and self.name not in step.inputs:
                raise CorruptArtifact(
                    f"{name} is made as a view, but not of {self.name}",
                    seen=f"{step.kernel} of {step.inputs}"[:300],
                    fix="build the plan again",
                )
            return []
        if not problem.in_place:
            return [here]
        axis, start, copied = problem.attrs["dim"], here[1], []
        for position, meta in enumerate(problem.inputs):
            end = start + (0 if meta is None else meta.shape[axis])
            if position not in problem.in_place:
                copied.append((axis, start, end))
            start = end
        return copied

    def _range(self, name: str) -> Range:
        buffer = self.buffers[name]
        if buffer.slice is None:
            return WHOLE
        place = buffer.slice
        return (place.axis, place.start, place.start + buffer.shape[place.axis])


def _overlap(name: str, other: str, batch: int, index: int, where: str) -> CorruptArtifact:
    return CorruptArtifact(
        f"{name} and {other} lie in the same memory at the same time",
        seen=f"batch {batch}, step {index}: {where}",
        fix="build the plan again",
    )


def _meet(one: Range, other: Range) -> bool:
    """Whether two parts of a buffer have elements in common, or may have."""
    if one[0] != other[0] or WHOLE in (one, other):
        return True
    return one[1] < other[2] and other[1] < one[2]


def _last_use(program: Program, bucket: Bucket) -> dict[str, int]:
    """The last step that needs each value's memory, its views included."""
    last: dict[str, int] = {}
    for index, step in enumerate(bucket.steps):
        last |= {n: index for n in (*step.inputs, *step.outputs) if n is not None}
    last |= {n: len(bucket.steps) for n in program.outputs}
    for step in reversed(bucket.steps):  # so a view of a view is known before what it views
        if catalog.kernel(step.kernel).views:
            until = max(last[n] for n in step.outputs)
            for name in step.inputs:
                if name is not None:
                    last[name] = max(last[name], until)
    return last
