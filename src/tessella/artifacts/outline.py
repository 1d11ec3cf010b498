"""outline: what a plan says of itself, read without torch, and the tables that people see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

from tessella.artifacts.files import Member
from tessella.artifacts.program import Program
from tessella.artifacts.receipt import Receipt
from tessella.core.architectures import TARGETS, is_gpu
from tessella.core.compiled import CompiledKernels
from tessella.core.count import counted, numbered, with_spread
from tessella.core.device import Fingerprint
from tessella.core.dtype import dtype_name
from tessella.core.errors import UsageError
from tessella.core.preprocess import Preprocess
from tessella.core.spec import TensorSpec
from tessella.core.task import CLASSIFICATION, TaskRecord

UNTUNED = (
    "untuned: nothing was measured, a cost model chose the kernels; on the machine itself, "
    "tessella tune PLAN measures them"
)
SMALL = ("int8", "fp8")  # precisions in which layers compute that fit, and the rest does not
SMALL_TYPES = ("int8", "float8_e4m3fn", "float8_e5m2")  # of their weights
WRONG = "wrong: "  # how the reason of a candidate begins whose answers were not the problem's
ROUNDED = ("conv2d", "linear")  # how the names of steps begin that could be
NEVER_ROUNDED = ("conv1d", "conv3d")
NOISY_SHARE = 0.1  # of the steps' time: a plan of which so much was disturbed is called noisy


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A line of ``tuning.jsonl``: one kernel tried for one step.

    Attributes:
        time_us: median time, None if the kernel was refused.
        spread_us: half the distance between the quartiles.
        refused: why the kernel was not measured or not chosen.
        workspace_bytes: scratch memory of the kernel.
        program_us: time of the whole program with this kernel, where that settled a close call.
        noisy: other work on the machine disturbed the measurement.
        estimate_us: what the cost model says, in a plan where nothing was measured.
    """

    batch: int
    step: str
    kernel: str
    chosen: bool
    time_us: float | None = None
    spread_us: float | None = None
    refused: str | None = None
    workspace_bytes: int = 0
    program_us: float | None = None
    noisy: bool = False
    estimate_us: float | None = None

    def is_close_to(self, other: Candidate) -> bool:
        """Whether the spreads of two times overlap, so that either may be the faster."""
        if self.time_us is None or other.time_us is None or self.refused or other.refused:
            return False
        spreads_us = (self.spread_us or 0.0) + (other.spread_us or 0.0)
        return abs(self.time_us - other.time_us) <= spreads_us


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What holds of every program in a plan's file: the network, and the members' hashes.

    Attributes:
        rebuild: the command that builds the plan again, for all its targets.
        weights_sha256: the hash of the file of weights of the checkpoint that it was made from.
        task: what the outputs mean, together with ``labels``.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    precision: str
    preprocess: Preprocess | None
    preprocess_hash: str | None
    labels: tuple[str, ...]
    accuracy: dict[str, float]
    built_from: str
    rebuild: str
    members: dict[str, Member]
    weights_sha256: str | None = None
    task: TaskRecord = CLASSIFICATION

    def __post_init__(self) -> None:
        self.task.check(self.labels)

    @property
    def main_input(self) -> TensorSpec:
        """The first input: an image network's images. All inputs have its sizes of batch."""
        return self.inputs[0]


@dataclass(frozen=True, kw_only=True)
class Build:
    """What holds of the program for one target.

    Attributes:
        fingerprint: the machine that the program was built for.
        tolerance: of the self-test, relative.
        imports: for each user-defined operator or kernel in the program the module that defines it.
            A plan never brings such code, and loading a plan imports nothing.
        precisions: precisions of single operations that differ from ``precision``, with ``+2:4``
            appended where the operation's weight was made sparse.
        snr_db: signal-to-noise ratio of each layer in int8 or fp8, by module path: the power of the
            layer's product over the power of the error that rounding its operands causes, as
            measured in the calibration.
        receipt: the accuracy that these precisions cost, where it was measured.
        untuned: no kernel was measured, or run: the cost model chose for a machine that was not
            there. ``tessella tune`` measures.
    """

    fingerprint: Fingerprint
    built_with: dict[str, str]
    tolerance: float
    imports: dict[str, str] = field(default_factory=dict)
    precisions: dict[str, str] = field(default_factory=dict)
    snr_db: dict[str, float] = field(default_factory=dict)
    receipt: Receipt | None = None
    untuned: bool = False


@dataclass(frozen=True, kw_only=True)
class Manifest(Build, Shared):
    """What a plan says of itself: of the network, and of the program that is in use."""


class Constant(Protocol):
    """What is known of a constant with or without its values: a tensor of torch's is one, too."""

    @property
    def nbytes(self) -> int: ...
    @property
    def dtype(self) -> object: ...


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in a file, without its values; ``sha256`` is that of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, repr=False)
class Outline:
    """A plan without the values of its tensors: what people look at, read without torch.

    It is one program, for one target; those for other targets, in the same file, lie in ``others``.

    Attributes:
        weights: constants by name, packed where their kernels require it.
        graph: the optimized graph as text, for people.
        lock: the measurements that decided the plan, as JSON lines: a build with this lock makes
            the same plan.
        compiled: machine code of the steps' GPU kernels, so that loading the plan compiles nothing.
        others: the programs of the same network for other targets; they have no others themselves.
    """

    manifest: Manifest
    program: Program
    weights: Mapping[str, Constant]
    tuning: tuple[Candidate, ...] = ()
    graph: str = ""
    lock: str = ""
    compiled: CompiledKernels = field(default_factory=CompiledKernels)
    others: tuple[Self, ...] = ()

    @property
    def target(self) -> str:
        """What the program in use was built for."""
        return self.manifest.fingerprint.target

    @property
    def targets(self) -> tuple[str, ...]:
        """What the plan has programs for, in the file's order."""
        return tuple(sorted((self.target, *(o.target for o in self.others)), key=TARGETS.index))

    def at(self, target: str) -> Self:
        """The plan with its program for this target in use.

        Raises:
            UsageError: it has none.
        """
        if target not in self.targets:
            raise UsageError(
                f"the plan has no program for {target}",
                seen=f"those for {', '.join(self.targets)}",
                fix="ask for one of these"
                + f", or build it again with --target {','.join((*self.targets, target))}"
                * (target in TARGETS),
            )
        programs = (replace(self, others=()), *self.others)
        (used,) = (p for p in programs if p.target == target)
        return replace(used, others=tuple(p for p in programs if p is not used))

    @property
    def noisy_share(self) -> float:
        """How much of the steps' time was measured while other work disturbed it, from 0 to 1."""
        chosen = [c for c in self.tuning if c.chosen and c.time_us is not None]
        noisy_us = sum(c.time_us or 0.0 for c in chosen if c.noisy)
        return noisy_us / (sum(c.time_us or 0.0 for c in chosen) or 1.0)

    @property
    def is_noisy(self) -> bool:
        """Whether the times of a plan are to be doubted, and with them what was chosen by them."""
        return self.noisy_share >= NOISY_SHARE

    @property
    def found_wrong(self) -> str:
        """Which kernels gave other answers than their steps', and how far off; empty if none."""
        steps: dict[str, list[str]] = {}
        for one in self.tuning:
            if one.refused is not None and one.refused.startswith(WRONG):
                steps.setdefault(one.kernel, []).append(one.refused.removeprefix(WRONG))
        found = [f"{name} in {counted(len(why), 'step')} ({why[0]})" for name, why in steps.items()]
        return f"found wrong and not taken, please report: {', '.join(found)}" * bool(found)

    @property
    def unrounded(self) -> str:
        """Why no layer computes in the int8 or fp8 that was asked for; empty where one does."""
        manifest, rounding = self.manifest, self.manifest.precision
        types = {dtype_name(tensor.dtype) for tensor in self.weights.values()}
        if rounding not in SMALL or types & set(SMALL_TYPES):
            return ""
        rest = "fp16" if is_gpu(self.target) else "fp32"
        same = f"compile with precision {rest}, which is the same plan"
        if manifest.precisions:
            why = "those that could were given another precision"
        elif any(s.op.startswith(ROUNDED) for s in self.program.buckets[-1].steps):
            why = "its convolutions and linear layers are grouped or read fewer than 16 channels"
            same += f"; --layer NAME={rounding} rounds one of them all the same"
        elif any(s.op.startswith(NEVER_ROUNDED) for s in self.program.buckets[-1].steps):
            why = "convolutions over one axis, or three, have no kernels for it"
        else:
            why = "it has no convolution or linear layer with weights of its own"
        return f"no layer computes in {rounding}: {why}; {same}"

    def __str__(self) -> str:
        return table(self)

    def __repr__(self) -> str:
        count = len(self.program.buckets[-1].steps)
        steps = f"{count} step" + "s" * (count != 1)
        busy = ", timed on a busy machine" * self.is_noisy
        return f"<{_title(self)}: {steps}, {_weight_bytes(self):,} bytes of weights{busy}>"


def table(plan: Outline) -> str:
    """The program of the largest bucket as a table for people: step, kernel, layer, time."""
    bucket = plan.program.buckets[-1]
    tried: dict[str, list[Candidate]] = {}
    for candidate in plan.tuning:
        if candidate.batch == bucket.batch:
            tried.setdefault(candidate.step, []).append(candidate)
    rows = [("step", "kernel", "output", "layer", "time_us", "close to")]
    buffers = {b.name: b for b in bucket.buffers}
    for index, step in enumerate(bucket.steps):
        out = buffers[step.outputs[0]]
        shape = "×".join(str(d) for d in out.shape)
        timed = _timed(tried.get(step.outputs[0], ()))
        rows.append((str(index), step.title, f"{out.dtype} {shape}", step.layer, *timed))
    widths = [max(len(r[c]) for r in rows) for c in range(6)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(r, widths, strict=True)) for r in rows]
    manifest = plan.manifest
    memory = (
        f"memory: {bucket.held_bytes:,} bytes ({bucket.arena_bytes:,} of them the arena), "
        f"{bucket.packing:.2f} × the {bucket.peak_bytes:,} that live at once at the peak"
    )
    named = f"batch {bucket.batch}:"
    closing = [memory, *_close_calls(plan, bucket.batch)]
    if plan.is_noisy:
        closing.append(
            f"timed on a busy machine: {plan.noisy_share:.0%} of the steps' time, in all batch "
            "sizes, was measured while other work disturbed it (~ above); compile again on a quiet "
            "one, with another --cache if there was one"
        )
    if manifest.untuned:
        closing.append(UNTUNED)
    closing += filter(None, (plan.unrounded, plan.found_wrong))
    if manifest.precisions:
        layers = ", ".join(f"{name} {kind}" for name, kind in manifest.precisions.items())
        closing.append(f"layers in another precision: {layers}")
    closing += [] if manifest.receipt is None else [str(manifest.receipt)]
    closing += [
        f"it has a program for {o.target} ({o.manifest.fingerprint.name}) too, "
        f"{len(o.program.buckets[-1].steps)} steps{', untuned' * o.manifest.untuned}"
        for o in sorted(plan.others, key=lambda o: TARGETS.index(o.target))
    ]
    return "\n".join([_title(plan), named, *(line.rstrip() for line in lines), *closing])


def _timed(candidates: Sequence[Candidate]) -> tuple[str, str]:
    """The time of the chosen kernel, ``~`` behind a noisy one, and which others may be as fast."""
    chosen = next((c for c in candidates if c.chosen), None)
    if chosen is None or chosen.time_us is None:
        return "", ""
    close = [c.kernel for c in candidates if c is not chosen and c.is_close_to(chosen)]
    shown = with_spread(chosen.time_us, chosen.spread_us)
    return f"{shown}{' ~' * chosen.noisy}", ", ".join(close)


def _title(plan: Outline) -> str:
    """One line: source, device, precision and batch sizes of the plan."""
    manifest, buckets = plan.manifest, plan.program.buckets
    device = manifest.fingerprint
    return (
        f"plan of {manifest.built_from} for {device.target} ({device.name}), {manifest.precision},"
        f" {numbered([b.batch for b in buckets], 'batch', 'batches')}"
        f"{', untuned' * manifest.untuned}"
        + "".join(f", and for {t}" for t in plan.targets if t != device.target)
    )


def _weight_bytes(plan: Outline) -> int:
    return sum(tensor.nbytes for tensor in plan.weights.values())


def _close_calls(plan: Outline, batch: int) -> list[str]:
    """One line for each step of a bucket whose kernel was chosen by timing the whole program."""
    tried: dict[str, list[Candidate]] = {}
    for candidate in plan.tuning:
        if candidate.batch == batch and candidate.program_us is not None:
            tried.setdefault(candidate.step, []).append(candidate)
    return [
        f"close call {step}: "
        + ", ".join(
            f"{c.kernel} {c.time_us or 0.0:,.1f} µs alone, {c.program_us:,.0f} µs the whole program"
            + (" (taken)" if c.chosen else "")
            for c in candidates
        )
        for step, candidates in tried.items()
    ]
