"""A bucket made ready to run: every step bound to its kernel, every name a slot number."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tessella.artifacts.program import Bucket, Program, Slice, Step, dying, in_place
from tessella.core.dtype import Math
from tessella.core.errors import ArtifactError, CompileError, CorruptArtifact
from tessella.core.memory import is_out_of_memory
from tessella.core.record import canonical_json
from tessella.kernels import catalog
from tessella.kernels.catalog import Call
from tessella.operations import shapes
from tessella.operations.problem import Problem
from tessella.operations.table import OPERATIONS
from tessella.operations.tensor_meta import TensorMeta
from tessella.runtime import lifetimes
from tessella.runtime.arena import Arena

Slots = list[Any]  # tensors; None where nothing lives


@dataclass(frozen=True, kw_only=True)
class BoundStep:
    """A step with its kernel: ``call(*inputs)``, with ``out=out`` too if ``out`` is not None."""

    step: Step
    problem: Problem
    call: Call
    out: torch.Tensor | None


class BoundBucket:
    """The program of one batch size. Not safe for two threads at once: the arena is shared.

    Attributes:
        strides: by name, of views of which the plan does not tell them; known after the first run.

    Raises:
        ArtifactError: the plan names a kernel that is not here, or that cannot run here.
    """

    def __init__(
        self,
        program: Program,
        bucket: Bucket,
        weights: Mapping[str, torch.Tensor],
        metas: Mapping[str, TensorMeta],
        *,
        target: str,
        math: Math,
        arena: Arena,
    ) -> None:
        self.batch = bucket.batch
        buffers = {b.name: b for b in bucket.buffers}
        names = [*program.inputs, *buffers]
        slot_of = {name: i for i, name in enumerate(names)}
        self._slots: Slots = [None] * len(names)
        self._inputs = [slot_of[n] for n in program.inputs]
        self._outputs = [slot_of[n] for n in program.outputs]
        self.steps: list[BoundStep] = []
        self.strides: dict[str, tuple[int, ...]] = {}
        self._writes: list[list[int]] = []
        self._runs: list[tuple[Callable[[Slots], None], tuple[int, ...]]] = []
        self._slices = {
            slot_of[b.name]: (slot_of[b.slice.of], b.slice)
            for b in bucket.buffers
            if b.slice is not None
        }
        binder = _Binder(bucket, weights, metas, arena, target, math)
        placed: set[str] = set()
        for step, ends in zip(bucket.steps, _dying(program, bucket, weights), strict=True):
            bound = binder.bind(step, ends)
            reads = [slot_of[n] for n in step.inputs if n is not None and n not in weights]
            writes = [slot_of[n] for n in step.outputs]
            if bound.out is not None:
                self._slots[writes[0]] = bound.out
                placed.add(step.outputs[0])
            drops = tuple(slot_of[n] for n in step.frees if n not in placed)
            self._writes.append(writes)
            self._runs.append((_runner(bound.call, reads, writes, bound.out), drops))
            self.steps.append(bound)
        lifetimes.check(program, bucket, [step.problem for step in self.steps])
        self._checked = False

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the steps. Results may lie in the arena or alias an input: copy them at once.

        Raises:
            CorruptArtifact: in the first run, a step made another tensor than the plan says.
        """
        if not self._checked:
            return self._first_run(inputs)
        slots = self._slots
        for slot, tensor in zip(self._inputs, inputs, strict=True):
            slots[slot] = tensor
        for run, drops in self._runs:
            run(slots)
            for slot in drops:
                slots[slot] = None
        return [slots[slot] for slot in self._outputs]

    def step_times_s(self, inputs: Sequence[torch.Tensor]) -> list[float]:
        """One run, each step by the host's clock: on a CPU what it takes among the others."""
        slots, times = self._slots, []
        for slot, tensor in zip(self._inputs, inputs, strict=True):
            slots[slot] = tensor
        for run, drops in self._runs:
            begin = time.perf_counter()
            run(slots)
            for slot in drops:
                slots[slot] = None
            times.append(time.perf_counter() - begin)
        return times

    def _first_run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the steps one by one: the kernels behind each were bound to what the plan says."""
        slots = list(self._slots)
        for slot, tensor in zip(self._inputs, inputs, strict=True):
            slots[slot] = tensor
        for (run, drops), step, writes in zip(self._runs, self.steps, self._writes, strict=True):
            run(slots)
            places = [self._slices.get(slot) for slot in writes]
            for slot, meta, place in zip(writes, step.problem.outputs, places, strict=True):
                if not meta.matches(slots[slot]) or not _lies_there(slots, slot, place):
                    made = slots[slot]
                    raise CorruptArtifact(
                        f"step {step.step.outputs[0]!r} makes another tensor than the plan says",
                        seen=f"{made.dtype} {tuple(made.shape)} strides {made.stride()}, "
                        f"not {meta}",
                        fix="build the plan again",
                    )
            for name, slot, meta in zip(
                step.step.outputs, writes, step.problem.outputs, strict=True
            ):
                if meta.format == "strided":
                    self.strides[name] = slots[slot].stride()
            for slot in drops:
                slots[slot] = None
        self._checked = True
        return [slots[slot] for slot in self._outputs]


def _lies_there(slots: Slots, slot: int, place: tuple[int, Slice] | None) -> bool:
    """Whether a view is the slice that the plan says, where it can be seen."""
    if place is None or (whole := slots[place[0]]) is None:
        return True
    size = slots[slot].shape[place[1].axis]
    right = whole.narrow(place[1].axis, place[1].start, size)
    return bool(slots[slot].data_ptr() == right.data_ptr())


class _Binder:
    """What all steps of a bucket are bound with."""

    def __init__(
        self,
        bucket: Bucket,
        weights: Mapping[str, torch.Tensor],
        metas: Mapping[str, TensorMeta],
        arena: Arena,
        target: str,
        math: Math,
    ) -> None:
        self._weights, self._arena, self._target, self._math = weights, arena, target, math
        self._buffers = {b.name: b for b in bucket.buffers}
        self._slices = {b.name: b.slice for b in bucket.buffers if b.slice is not None}
        self._metas = {**metas, **buffer_metas(bucket)}

    def bind(self, step: Step, ends: tuple[int, ...]) -> BoundStep:
        """The step's kernel, checked and bound to its constants and its place.

        Args:
            ends: positions of inputs whose memory the step may take.
        """
        constants = {i: self._weights[n] for i, n in enumerate(step.inputs) if n in self._weights}
        problem = self._problem(step, tuple(constants), ends)
        try:
            _require_shapes(step, problem)
            row = catalog.kernel(step.kernel)
            here = row.op in (step.op, "*") and self._target in row.targets
            if reason := row.refusal(problem) if here else "of another target":
                raise ArtifactError(
                    f"kernel {step.kernel} cannot run step {step.outputs[0]!r} here",
                    seen=reason,
                    fix="build the plan again on this machine",
                )
            out = self._place(step, row)
            if all(canonical_json(step.config) != canonical_json(c) for c in row.configs(problem)):
                raise ArtifactError(
                    f"kernel {step.kernel} does not know the configuration of {step.outputs[0]!r}",
                    seen=step.config,
                    fix="build the plan again with this version of Tessella",
                )
            scratch = self._scratch(step, row.workspace_bytes(problem, step.config))
            call = row.load().bind(problem, constants, **step.config)
            if scratch is not None:
                call = functools.partial(call, workspace=scratch)
        except ArtifactError:
            raise
        except Exception as error:  # attributes from a stranger: what they may raise has no end
            if is_out_of_memory(error):
                raise
            raise CorruptArtifact(
                f"step {step.outputs[0]!r} cannot be bound to kernel {step.kernel}",
                seen=first_line(error),
                fix="build the plan again with this version of Tessella",
            ) from error
        return BoundStep(step=step, problem=problem, call=call, out=out)

    def _problem(self, step: Step, constant: tuple[int, ...], ends: tuple[int, ...]) -> Problem:
        metas = self._metas
        ready: tuple[int, ...] = ()
        if step.op == "cat" and isinstance(axis := step.attrs.get("dim"), int):
            parts = [(n, metas[n].shape[axis : axis + 1]) for n in step.inputs if n is not None]
            if all(size for _, size in parts):
                sized = [(name, size[0]) for name, size in parts]
                ready = in_place(self._slices, step.outputs[0], axis, sized)
        return Problem(
            op=step.op,
            inputs=tuple(None if n is None else metas[n] for n in step.inputs),
            outputs=tuple(metas[n] for n in step.outputs),
            attrs=step.attrs,
            constant=constant,
            in_place=ready,
            dying=ends,
            math=self._math,
        )

    def _place(self, step: Step, row: catalog.Kernel) -> torch.Tensor | None:
        """Where the step's kernel writes its result; None if it makes a tensor itself."""
        outputs = [self._buffers[n] for n in step.outputs]
        own = [b for b in outputs if b.offset is not None or (b.slice and not row.views)]
        out = self._arena.view(own[0], self._buffers) if own else None
        wanted = 1 if row.writes_out else 0
        if len(own) != wanted or (own and len(outputs) > 1) or (wanted and out is None):
            raise CorruptArtifact(
                f"step {step.outputs[0]!r} has no place for its result", fix="build the plan again"
            )
        return out

    def _scratch(self, step: Step, needed: int) -> torch.Tensor | None:
        """The step's workspace, if its kernel needs one."""
        scratch = None
        if step.workspace is not None:
            scratch = self._arena.view(self._buffers[step.workspace], self._buffers)
        if needed > (scratch.nbytes if scratch is not None else 0):
            raise CorruptArtifact(
                f"step {step.outputs[0]!r} has too little workspace",
                seen=f"{scratch.nbytes if scratch is not None else 0} bytes, {needed} needed",
                fix="build the plan again",
            )
        return scratch if needed else None


def _dying(
    program: Program, bucket: Bucket, weights: Mapping[str, torch.Tensor]
) -> list[tuple[int, ...]]:
    """For each step, the input whose memory its kernel may take: the plan is not asked."""
    slices = {n for b in bucket.buffers if b.slice for n in (b.name, b.slice.of)}
    rows = [_row(step) for step in bucket.steps]
    steps = [
        (s.inputs, s.outputs, row is None or row.aliases)
        for s, row in zip(bucket.steps, rows, strict=True)
    ]
    found = dying(steps, {*program.inputs, *program.outputs, *weights, *slices})
    return [
        (row.overwrites,) if row is not None and row.overwrites in ends else ()
        for row, ends in zip(rows, found, strict=True)
    ]


def _row(step: Step) -> catalog.Kernel | None:
    """The step's kernel; None if there is no such, which is told when it is bound."""
    try:
        return catalog.kernel(step.kernel)
    except CompileError:
        return None


def buffer_metas(bucket: Bucket) -> dict[str, TensorMeta]:
    """What each buffer of a bucket is, slices with the strides of what they are slices of."""
    metas = {
        b.name: TensorMeta(shape=b.shape, dtype=b.dtype, format=b.format)
        for b in bucket.buffers
        if b.slice is None
    }
    for b in bucket.buffers:
        if b.slice is not None:
            part = metas[b.slice.of].part(b.slice.axis, b.shape[b.slice.axis])
            if part.format != b.format:
                raise CorruptArtifact(
                    f"{b.name} is not laid out like a slice of {b.slice.of}",
                    seen=f"{b.format}, not {part.format}",
                    fix="build the plan again",
                )
            metas[b.name] = part
    return metas


def _require_shapes(step: Step, problem: Problem) -> None:
    """Refuse a step whose operation does not make what the plan says, found without numbers.

    So before a kernel sees the attributes, and however large a shape is.
    """
    if step.op not in OPERATIONS:
        raise ValueError(f"{step.op[:80]!r} is no operation of a network")
    if reason := problem.misfit:
        raise ValueError(reason)
    made = shapes.made(step.op, problem.inputs, step.attrs)
    if made != [(m.dtype, m.shape) for m in problem.outputs]:
        raise ValueError(f"{step.op} makes {made}")


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _runner(
    call: Call, reads: list[int], writes: list[int], out: torch.Tensor | None
) -> Callable[[Slots], None]:
    """The step as a function of the slots; common shapes are spelled out, 0.1 µs faster."""
    if len(writes) > 1:

        def run(slots: Slots) -> None:
            for slot, tensor in zip(writes, call(*[slots[i] for i in reads]), strict=True):
                slots[slot] = tensor

    elif out is not None and len(reads) == 1:
        (read,) = reads

        def run(slots: Slots) -> None:
            call(slots[read], out=out)

    elif out is not None:

        def run(slots: Slots) -> None:
            call(*[slots[i] for i in reads], out=out)

    elif len(reads) == 1:
        (read,), (write,) = reads, writes

        def run(slots: Slots) -> None:
            slots[write] = call(slots[read])

    else:
        (write,) = writes

        def run(slots: Slots) -> None:
            slots[write] = call(*[slots[i] for i in reads])

    return run
