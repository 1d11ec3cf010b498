"""A bucket made ready to run: every step bound to its kernel, every name a slot number."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tessella.artifacts.plan import Bucket, Program, Step
from tessella.core.errors import ArtifactError, CorruptArtifact
from tessella.core.record import canonical_json
from tessella.kernels import catalog, reference
from tessella.kernels.catalog import Call
from tessella.kernels.problem import Math, Problem, TensorMeta
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
        self._writes: list[list[int]] = []
        self._runs: list[tuple[Callable[[Slots], None], tuple[int, ...]]] = []
        metas = {
            **metas,
            **{
                b.name: TensorMeta(shape=b.shape, dtype=b.dtype, format=b.format)
                for b in bucket.buffers
            },
        }
        for step in bucket.steps:
            outs = [arena.view(buffers[n]) for n in step.outputs if buffers[n].offset is not None]
            scratch = arena.view(buffers[step.workspace]) if step.workspace else None
            bound = _bind(step, weights, metas, outs, scratch, target, math)
            reads = [slot_of[n] for n in step.inputs if n is not None and n not in weights]
            writes = [slot_of[n] for n in step.outputs]
            drops = tuple(slot_of[n] for n in step.frees if not _in_arena(buffers, n))
            if bound.out is not None:
                self._slots[writes[0]] = bound.out
            self._writes.append(writes)
            self._runs.append((_runner(bound.call, reads, writes, bound.out), drops))
            self.steps.append(bound)
        lifetimes.check(program, bucket)
        self._checked = False

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the steps. Results may lie in the arena or alias an input: copy them at once.

        Raises:
            CorruptArtifact: in the first run, a step made another tensor than the plan says.
        """
        if not self._checked:
            self._first_run(inputs)
        slots = self._slots
        for slot, tensor in zip(self._inputs, inputs, strict=True):
            slots[slot] = tensor
        for run, drops in self._runs:
            run(slots)
            for slot in drops:
                slots[slot] = None
        return [slots[slot] for slot in self._outputs]

    def _first_run(self, inputs: Sequence[torch.Tensor]) -> None:
        """Run the steps one by one: the kernels behind each were bound to what the plan says."""
        slots = list(self._slots)
        for slot, tensor in zip(self._inputs, inputs, strict=True):
            slots[slot] = tensor
        for (run, drops), step, writes in zip(self._runs, self.steps, self._writes, strict=True):
            run(slots)
            for slot, meta in zip(writes, step.problem.outputs, strict=True):
                if not meta.matches(slots[slot]):
                    made = slots[slot]
                    raise CorruptArtifact(
                        f"step {step.step.outputs[0]!r} makes another tensor than the plan says",
                        seen=f"{made.dtype} {tuple(made.shape)} strides {made.stride()}, "
                        f"not {meta}",
                        fix="build the plan again",
                    )
            for slot in drops:
                slots[slot] = None
        self._checked = True


def _in_arena(buffers: Mapping[str, Any], name: str) -> bool:
    return name in buffers and buffers[name].offset is not None


def _bind(
    step: Step,
    weights: Mapping[str, torch.Tensor],
    metas: Mapping[str, TensorMeta],
    outs: list[torch.Tensor],
    scratch: torch.Tensor | None,
    target: str,
    math: Math,
) -> BoundStep:
    """The step's kernel, checked and bound to its constants."""
    constants = {i: weights[n] for i, n in enumerate(step.inputs) if n in weights}
    problem = Problem(
        op=step.op,
        inputs=tuple(None if n is None else metas[n] for n in step.inputs),
        outputs=tuple(metas[n] for n in step.outputs),
        attrs=step.attrs,
        constant=tuple(constants),
        math=math,
    )
    try:
        _require_shapes(step, problem)
        row = catalog.kernel(step.kernel)
        module = row.load()
        wrong = None if row.op in (step.op, "*") and target in row.targets else "of another target"
        if reason := wrong or module.fits(problem):
            raise ArtifactError(
                f"kernel {step.kernel} cannot run step {step.outputs[0]!r} here",
                seen=reason,
                fix="build the plan again on this machine",
            )
        if len(outs) != (1 if module.WRITES_OUT else 0) or (outs and len(step.outputs) > 1):
            raise CorruptArtifact(
                f"step {step.outputs[0]!r} has no place for its result", fix="build the plan again"
            )
        if all(canonical_json(step.config) != canonical_json(c) for c in row.configs(problem)):
            raise ArtifactError(
                f"kernel {step.kernel} does not know the configuration of {step.outputs[0]!r}",
                seen=step.config,
                fix="build the plan again with this version of Tessella",
            )
        needed = row.workspace_bytes(problem, step.config)
        if needed > (scratch.nbytes if scratch is not None else 0):
            raise CorruptArtifact(
                f"step {step.outputs[0]!r} has too little workspace",
                seen=f"{scratch.nbytes if scratch is not None else 0} bytes, {needed} needed",
                fix="build the plan again",
            )
        call = module.bind(problem, constants, **step.config)
        if needed:
            call = functools.partial(call, workspace=scratch)
    except ArtifactError:
        raise
    except Exception as error:  # attributes from a stranger: what they may raise has no end
        raise CorruptArtifact(
            f"step {step.outputs[0]!r} cannot be bound to kernel {step.kernel}",
            seen=first_line(error),
            fix="build the plan again with this version of Tessella",
        ) from error
    return BoundStep(step=step, problem=problem, call=call, out=outs[0] if outs else None)


def _require_shapes(step: Step, problem: Problem) -> None:
    """Refuse a step whose operation does not make what the plan says, found without numbers.

    The reference runs on torch's meta device, which allocates nothing, however large a shape is,
    before a kernel sees the attributes.
    """
    if step.op == "fallback" and set(step.attrs["kwargs"]) & {"device", "pin_memory"}:
        raise ValueError("a fallback that says where its result lies")
    meta = torch.device("meta")
    inputs = [None if m is None else m.empty(meta) for m in problem.inputs]
    made = [
        (str(t.dtype).removeprefix("torch."), tuple(t.shape))
        for t in reference.call(step.op, inputs, step.attrs)
    ]
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
