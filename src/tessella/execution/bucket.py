"""A bucket made ready to run: every step bound to its kernel, every name a slot number.

The compiler races and checks a bucket as this, before there is a plan; the runtime runs it as this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from tessella.artifacts.program import Bucket, Program, Slice
from tessella.core.dtype import Math
from tessella.core.errors import CorruptArtifact
from tessella.execution.arena import Arena
from tessella.execution.steps import Binder, BoundStep, Slots, runner
from tessella.operations.problem import TensorMeta


class BoundBucket:
    """The program of one batch size. Not safe for two threads at once: the arena is shared.

    Which values share memory is as the bucket says: ``runtime.lifetimes`` checks a stranger's.

    Args:
        weights: the constants by name, on the target's device.
        inputs: what each of the program's inputs is at this batch size.

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
        inputs: Sequence[TensorMeta],
        *,
        target: str,
        math: Math,
        arena: Arena,
    ) -> None:
        self.batch = bucket.batch
        names = [*program.inputs, *(b.name for b in bucket.buffers)]
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
        metas = dict(zip(program.inputs, inputs, strict=True))
        binder = Binder(program, bucket, weights, metas, target=target, math=math, arena=arena)
        placed: set[str] = set()
        for step, bound in zip(bucket.steps, binder.steps(), strict=True):
            reads = [slot_of[n] for n in step.inputs if n is not None and n not in weights]
            writes = [slot_of[n] for n in step.outputs]
            if bound.out is not None:
                self._slots[writes[0]] = bound.out
                placed.add(step.outputs[0])
            drops = tuple(slot_of[n] for n in step.frees if n not in placed)
            self._writes.append(writes)
            self._runs.append((runner(bound.call, reads, writes, bound.out), drops))
            self.steps.append(bound)
        self._checked = False

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the steps. Results may lie in the arena or alias an input: copy them at once.

        Raises:
            CorruptArtifact: in the first run, a step made another tensor than the plan says.
        """
        slots = self._slots if self._checked else list(self._slots)
        for slot, tensor in zip(self._inputs, inputs, strict=True):
            slots[slot] = tensor
        if self._checked:
            for run, drops in self._runs:
                run(slots)
                for slot in drops:
                    slots[slot] = None
        else:
            for _ in self._one_by_one(slots):
                pass
            self._checked = True
        return [slots[slot] for slot in self._outputs]

    def stepwise(
        self, inputs: Sequence[torch.Tensor]
    ) -> Iterator[tuple[BoundStep, list[torch.Tensor]]]:
        """Run the steps one by one: each with what it made, which a later one may overwrite."""
        slots = list(self._slots)
        for slot, tensor in zip(self._inputs, inputs, strict=True):
            slots[slot] = tensor
        yield from self._one_by_one(slots)

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

    def _one_by_one(self, slots: Slots) -> Iterator[tuple[BoundStep, list[torch.Tensor]]]:
        """Run and check each step: the kernels behind it were bound to what the plan says."""
        for (run, drops), step, writes in zip(self._runs, self.steps, self._writes, strict=True):
            run(slots)
            for name, slot, meta in zip(
                step.step.outputs, writes, step.problem.outputs, strict=True
            ):
                made = slots[slot]
                if not meta.matches(made) or not _lies_there(slots, slot, self._slices.get(slot)):
                    raise CorruptArtifact(
                        f"step {step.step.outputs[0]!r} makes another tensor than the plan says",
                        seen=f"{made.dtype} {tuple(made.shape)} strides {made.stride()}, "
                        f"not {meta}",
                        fix="build the plan again",
                    )
                if meta.format == "strided":
                    self.strides[name] = made.stride()
            yield step, [slots[slot] for slot in writes]
            for slot in drops:
                slots[slot] = None


def _lies_there(slots: Slots, slot: int, place: tuple[int, Slice] | None) -> bool:
    """Whether a view is the slice that the plan says, where it can be seen."""
    if place is None or (whole := slots[place[0]]) is None:
        return True
    size = slots[slot].shape[place[1].axis]
    right = whole.narrow(place[1].axis, place[1].start, size)
    return bool(slots[slot].data_ptr() == right.data_ptr())
