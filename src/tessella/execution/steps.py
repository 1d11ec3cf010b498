"""Steps bound to kernels, constants and memory; what a plan says of them is not believed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from tessella.artifacts.program import Bucket, Buffer, Program, Slice, Step, in_place
from tessella.core.dtype import Math, dtype_name
from tessella.core.errors import ArtifactError, CompileError, CorruptArtifact, first_line
from tessella.core.memory import is_out_of_memory
from tessella.device.x86.code import Launch
from tessella.execution import liveness
from tessella.execution.arena import Arena
from tessella.execution.liveness import Use
from tessella.kernels import catalog
from tessella.kernels.catalog import Call
from tessella.operations import shapes
from tessella.operations.problem import Problem
from tessella.operations.table import OPERATIONS
from tessella.operations.tensor_meta import TensorMeta
from tessella.operations.user_operators import as_tuple

Slots = list[Any]  # tensors; None where nothing lives


@dataclass(frozen=True, kw_only=True)
class BoundStep:
    """A step with its kernel: ``call(*inputs)``, with ``out=out`` too if ``out`` is not None.

    Attributes:
        lying: its results, where each run has them in the same place of the arena: ``out``, or
            what is a view of it or overwrites it. For views a run need not call anything: one is
            2 µs of Python by itself, and up to 40 between the steps of a network, as code is cold.
    """

    step: Step
    problem: Problem
    call: Call
    out: torch.Tensor | None
    lying: tuple[torch.Tensor, ...] = ()

    @property
    def views(self) -> bool:
        """Whether it only looks at its input in another way, or joins what lies there joined."""
        there = len(self.problem.in_place)
        is_there = there > 0 and there == len(self.problem.given)
        return is_there or (self.out is None and not isinstance(self.call, Launch))


@dataclass(frozen=True, kw_only=True)
class Binder:
    """What the steps of a bucket are bound with.

    Attributes:
        weights: the constants by name, on the target's device.
        inputs: what each of the program's inputs is at this batch size.
    """

    program: Program
    bucket: Bucket
    weights: Mapping[str, torch.Tensor]
    inputs: Sequence[TensorMeta]
    target: str
    math: Math
    arena: Arena

    @cached_property
    def _buffers(self) -> dict[str, Buffer]:
        return {b.name: b for b in self.bucket.buffers}

    @cached_property
    def _slices(self) -> dict[str, Slice]:
        return {b.name: b.slice for b in self.bucket.buffers if b.slice is not None}

    @cached_property
    def _metas(self) -> dict[str, TensorMeta]:
        inputs = dict(zip(self.program.inputs, self.inputs, strict=True))
        weights = {name: _meta(tensor) for name, tensor in self.weights.items()}
        return {**weights, **inputs, **buffer_metas(self.bucket)}

    def steps(self) -> Iterator[BoundStep]:
        """Each step of the program with its kernel, checked and bound to its constants and its
        memory.
        """
        lying: dict[str, torch.Tensor] = {}
        for step, ends in zip(self.bucket.steps, self._dying(), strict=True):
            bound = self._bind(step, ends, lying)
            lying |= dict(zip(step.outputs, bound.lying, strict=False))
            yield bound

    def _bind(
        self, step: Step, ends: tuple[int, ...], lying: Mapping[str, torch.Tensor]
    ) -> BoundStep:
        constants = {
            i: self.weights[n]
            for i, n in enumerate(step.inputs)
            if n is not None and n in self.weights
        }
        problem = self._problem(step, tuple(constants), ends)
        try:
            _require_shapes(step, problem)
            row = catalog.kernel(step.kernel)
            here = row.op in (step.op, "*") and row.runs_on(self.target)
            if reason := row.refusal(problem) if here else "of another target":
                raise ArtifactError(
                    f"kernel {step.kernel} cannot run step {step.outputs[0]!r} here",
                    seen=reason,
                    fix="build the plan again on this machine",
                )
            out = self._place(step, row)
            if not row.knows(problem, step.config):
                raise ArtifactError(
                    f"kernel {step.kernel} does not know the configuration of {step.outputs[0]!r}",
                    seen=step.config,
                    fix="build the plan again with this version of Tessella",
                )
            scratch = self._scratch(step, row.workspace_bytes(problem, step.config))
            call = row.load().bind(problem, constants, **step.config)
            if scratch is not None and isinstance(call, Launch):
                call = call.within(scratch)
            elif scratch is not None:
                call = functools.partial(call, workspace=scratch)
            made = self._lying(step, row, call, out, lying)
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
        return BoundStep(step=step, problem=problem, call=call, out=out, lying=made)

    def _lying(
        self,
        step: Step,
        row: catalog.Kernel,
        call: Call,
        out: torch.Tensor | None,
        lying: Mapping[str, torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """The results of a step, where their memory is known before it runs; else none."""
        if out is not None:
            return (out,)
        names = [n for n in step.inputs if n is not None and n not in self.weights]
        if not all(name in lying for name in names):
            return ()
        reads = [lying[name] for name in names]
        if isinstance(call, Launch):
            return (call.result(*reads, out=None),)
        if row.algorithm != "view":
            return ()
        made = as_tuple(call(*reads))
        whole = {t.untyped_storage().data_ptr() for t in reads}  # of a copy it is another
        return made if {t.untyped_storage().data_ptr() for t in made} == whole else ()

    def _dying(self) -> list[tuple[int, ...]]:
        """For each step, the input whose memory its kernel may take: the plan is not asked."""
        slices = {n for name, place in self._slices.items() for n in (name, place.of)}
        rows = [_row(step) for step in self.bucket.steps]
        uses = [
            Use(step.inputs, step.outputs, aliases=row is None or row.aliases)
            for step, row in zip(self.bucket.steps, rows, strict=True)
        ]
        lasting = {*self.program.inputs, *self.program.outputs, *self.weights, *slices}
        return [
            (row.overwritten,) if row is not None and row.overwritten in ends else ()
            for row, ends in zip(rows, liveness.dying(uses, lasting), strict=True)
        ]

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
            math=self.math,
        )

    def _place(self, step: Step, row: catalog.Kernel) -> torch.Tensor | None:
        """The buffer into which a step's kernel writes; None if the kernel makes a tensor
        itself.
        """
        outputs = [self._buffers[n] for n in step.outputs]
        own = [b for b in outputs if b.offset is not None or (b.slice and not row.views)]
        out = self.arena.view(own[0], self._buffers) if own else None
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
            scratch = self.arena.view(self._buffers[step.workspace], self._buffers)
        if needed > (scratch.nbytes if scratch is not None else 0):
            raise CorruptArtifact(
                f"step {step.outputs[0]!r} has too little workspace",
                seen=f"{scratch.nbytes if scratch is not None else 0} bytes, {needed} needed",
                fix="build the plan again",
            )
        return scratch if needed else None


def _row(step: Step) -> catalog.Kernel | None:
    """The step's kernel; None if there is no such, which is told when it is bound."""
    try:
        return catalog.kernel(step.kernel)
    except CompileError:
        return None


def buffer_metas(bucket: Bucket) -> dict[str, TensorMeta]:
    """The description of each buffer of a bucket; a slice has the strides of the buffer it lies
    in.
    """
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


def _meta(tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(shape=tuple(tensor.shape), dtype=dtype_name(tensor.dtype))


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


def runner(
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
