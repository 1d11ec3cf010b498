"""A bucket made ready to run: every step bound to its kernel, every name a slot number.

The compiler races and checks a bucket as this, before there is a plan; the runtime runs it as this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from tessella.artifacts.program import Slice
from tessella.core.dtype import DTYPES, dtype
from tessella.core.errors import CorruptArtifact
from tessella.device.x86.chain import Chain, chained
from tessella.device.x86.code import Launch, Ready
from tessella.execution.steps import Binder, BoundStep, Slots, runner

Run = Callable[[Slots], None]
RESHAPE = "reshape.view"
Made = tuple[BoundStep, list[torch.Tensor]]  # a step, and its results


class SettledSteps(NamedTuple):
    """The steps of a program as calls that always read the same inputs.

    Attributes:
        calls: to be run in order; neighbours that are machine code of ours are one.
        slots: where they find and leave tensors.
        results: the slots of the results.
        moves: the slots in which each run makes another tensor.
        asks_torch: one of the calls does, and so all are to be run in inference mode.
    """

    calls: list[Callable[[], object]]
    slots: Slots
    results: list[int]
    moves: set[int]
    asks_torch: bool


class BoundBucket:
    """The program of one batch size. Not safe for two threads at once: the arena is shared.

    Which values share memory is as the bucket says: ``runtime.lifetimes`` checks a stranger's.

    Attributes:
        strides: by name, of views of which the plan does not tell them; known after the first run.

    Raises:
        ArtifactError: the plan names a kernel that is not here, or that cannot run here.
    """

    def __init__(self, binder: Binder) -> None:
        program, bucket = binder.program, binder.bucket
        self.batch = bucket.batch
        names = [*program.inputs, *(b.name for b in bucket.buffers)]
        slot_of = {name: i for i, name in enumerate(names)}
        self._slots: Slots = [None] * len(names)
        self._inputs = [slot_of[n] for n in program.inputs]
        self._outputs = [slot_of[n] for n in program.outputs]
        self.steps: list[BoundStep] = []
        self.strides: dict[str, tuple[int, ...]] = {}
        self._reads: list[list[int]] = []
        self._writes: list[list[int]] = []
        self._runs: list[tuple[Run, tuple[int, ...]]] = []
        self._slices = {
            slot_of[b.name]: (slot_of[b.slice.of], b.slice)
            for b in bucket.buffers
            if b.slice is not None
        }
        moving: list[int] = []  # the steps that do something in each run
        placed: set[str] = set()
        for step, bound in zip(bucket.steps, binder.steps(), strict=True):
            reads = [slot_of[n] for n in step.inputs if n is not None and n not in binder.weights]
            writes = [slot_of[n] for n in step.outputs]
            if bound.lying:
                placed.update(step.outputs)
            for slot, tensor in zip(writes, bound.lying, strict=False):
                self._slots[slot] = tensor
            if not (bound.lying and bound.views):
                moving.append(len(self._runs))
            drops = tuple(slot_of[n] for n in step.frees if n not in placed)
            self._reads.append(reads)
            self._writes.append(writes)
            self._runs.append((self._runner(bound, reads, writes), drops))
            self.steps.append(bound)
        self._moving = moving
        each = [self._runs[i] for i in moving]
        self._each = [
            (made, ()) if isinstance(made, Chain) else made for made in chained(each, _alone)
        ]
        self._checked = False

    def _runner(self, bound: BoundStep, reads: list[int], writes: list[int]) -> Run:
        """The step as a function of the slots; where it always finds the same, it asks no more."""
        given = [self._slots[slot] for slot in reads]
        if isinstance(bound.call, Launch) and bound.lying and all(t is not None for t in given):
            return bound.call.at(*given, out=bound.out)
        return runner(bound.call, reads, writes, bound.out)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the steps. Results may lie in the arena or alias an input: copy them at once.

        Raises:
            CorruptArtifact: in the first run, a step made another tensor than the plan says.
        """
        slots = self._filled(inputs)
        if self._checked:
            for run, drops in self._each:
                run(slots)
                for slot in drops:
                    slots[slot] = None
        else:
            for _ in self._one_by_one(slots):
                pass
            self._checked = True
        return [slots[slot] for slot in self._outputs]

    def settled(self, inputs: Sequence[torch.Tensor]) -> SettledSteps | None:
        """The steps on tensors that stay; None before the first run, or where NumPy lacks a type
        that torch makes.

        Raises:
            TypeError: a reshape of an element type that NumPy lacks.
        """
        if not self._checked:
            return None
        slots, moves = list(self._slots), set[int]()
        for slot, tensor in zip(self._inputs, inputs, strict=True):
            slots[slot] = tensor
        calls: list[Callable[[], object]] = []
        asks_torch = False
        for i in self._moving:
            bound, reads, writes = self.steps[i], self._reads[i], self._writes[i]
            given = [slots[slot] for slot in reads]
            if moves.isdisjoint(reads) and isinstance(bound.call, Launch) and bound.lying:
                calls.append(bound.call.at(*given, out=bound.out))
            elif moves.isdisjoint(reads) and bound.step.kernel == RESHAPE:
                ((write,), (whole,)) = writes, given
                slots[write] = made = bound.call(whole)
                if made.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
                    place = made.numpy().reshape(whole.shape)
                    calls.append(partial(np.copyto, place, whole.numpy()))
            elif all(m.dtype in DTYPES and dtype(m.dtype).numpy for m in bound.problem.outputs):
                calls.append(partial(self._runs[i][0], slots))
                asks_torch = True
                moves.update(() if bound.lying else writes)
            else:
                return None
        together = chained(calls, lambda call: call if isinstance(call, Ready) else None)
        return SettledSteps([*together], slots, self._outputs, moves, asks_torch)

    def stepwise(self, inputs: Sequence[torch.Tensor]) -> Iterator[Made]:
        """Run step after step; yields each and its results, which later steps may overwrite."""
        return self._one_by_one(self._filled(inputs))

    def _filled(self, inputs: Sequence[torch.Tensor]) -> Slots:
        for slot, tensor in zip(self._inputs, inputs, strict=True):
            self._slots[slot] = tensor
        return self._slots

    def _one_by_one(self, slots: Slots) -> Iterator[Made]:
        """Run each step; in the first run it is checked: the kernels behind it were bound to what
        the plan says.
        """
        for (run, drops), step, writes in zip(self._runs, self.steps, self._writes, strict=True):
            run(slots)
            if not self._checked:
                self._check(step, writes, slots)
            made = [slots[slot] for slot in writes]
            for slot in drops:
                slots[slot] = None
            yield step, made

    def _check(self, step: BoundStep, writes: Sequence[int], slots: Slots) -> None:
        outputs = step.step.outputs
        for name, slot, meta in zip(outputs, writes, step.problem.outputs, strict=True):
            made = slots[slot]
            if not meta.matches(made) or not _lies_there(slots, slot, self._slices.get(slot)):
                raise CorruptArtifact(
                    f"step {outputs[0]!r} makes another tensor than the plan says",
                    seen=f"{made.dtype} {tuple(made.shape)} strides {made.stride()}, not {meta}",
                    fix="build the plan again",
                )
            if meta.format == "strided":
                self.strides[name] = made.stride()


def _alone(run: tuple[Run, tuple[int, ...]]) -> Ready | None:
    """A step that is nothing but machine code, which drops nothing behind it."""
    call, drops = run
    return call if isinstance(call, Ready) and not drops else None


def _lies_there(slots: Slots, slot: int, place: tuple[int, Slice] | None) -> bool:
    """Whether a view is the slice that the plan says, where it can be seen."""
    if place is None or (whole := slots[place[0]]) is None:
        return True
    size = slots[slot].shape[place[1].axis]
    right = whole.narrow(place[1].axis, place[1].start, size)
    return bool(slots[slot].data_ptr() == right.data_ptr())
