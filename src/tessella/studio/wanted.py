"""What is asked of ``tessella compile``: what the plan page's form can say, and its command."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tessella.artifacts.plan import Plan
from tessella.core.dtype import plain_precision
from tessella.core.errors import UsageError
from tessella.jobs import commands
from tessella.jobs.job import JobSpec
from tessella.studio.workspace import plain_name

How = Literal["one", "budget", "lock"]

TARGETS = {"cpu": "cpu", "sm_90": "sm_90 (H100, H200)", "reference": "reference"}
WAYS: dict[How, tuple[str, str]] = {
    "one": ("Precision", "Every layer in the precision that you choose."),
    "budget": ("Budget", "The fastest plan that loses at most so much accuracy: each layer gets a "
               "precision of its own, judged by your data."),
    "lock": ("Like a plan", "Decided as another plan was: nothing is measured, and the same "
             "checkpoint gives the same bytes."),
}  # fmt: skip
# What a precision is, and the targets on which it is worth choosing.
PRECISIONS = {
    "fp32": (("cpu", "sm_90", "reference"), "IEEE float32: the most exact."),
    "tf32": (("sm_90",), "float32 values, multiplied by tensor cores with 10 bits of mantissa."),
    "bf16": (("cpu", "sm_90", "reference"), "Half the memory; the range of float32, 8 bits."),
    "fp16": (("cpu", "sm_90", "reference"), "Half the memory; 11 bits, values to 65,504."),
    "int8": (("cpu", "sm_90", "reference"), "A quarter of the memory; scales from calibration."),
    "fp8": (("sm_90",), "A quarter of the memory; e4m3, scales from calibration."),
}
ROUNDED = ("int8", "fp8")
# The precisions that a budget may be spent on, by target.
LEAST = {
    "cpu": ("fp32", "bf16", "int8"),
    "sm_90": ("fp32", "bf16", "fp16", "int8", "fp8"),
    "reference": ("fp32", "bf16", "int8"),
}
METHODS = {
    "mse": "The threshold with the least mean-square error.",
    "entropy": "The threshold whose levels tell least less than the values do.",
    "percentile": "All but the largest 0.01 % of the values.",
    "min-max": "The largest value that was seen.",
}
USUAL_METHOD, USUAL_SAMPLES = "mse", 512  # the command's own: not said


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the form says; ``spec`` makes the command of it.

    Attributes:
        how: one precision, a budget, or a plan to follow.
        precision: with a budget, the least exact that a layer may get; fp32 is any.
        batches: as typed: one size, or three.
        calibrate: what int8 and fp8 are calibrated with: a dataset's ref, its split, how many
            images and by which method; with a budget, None is the judge's training split.
        judge: the dataset whose validation split judges; points: what may be lost on it.
        lock: the plan to follow.
        cache: where what was measured is kept, for builds with a time limit.
    """

    source: str
    name: str
    how: How = "one"
    target: str = "cpu"
    precision: str = "fp32"
    batches: str = "1, 8, 32"
    uint8: bool = False
    calibrate: tuple[str, str, int | None, str] | None = None
    points: float | None = None
    judge: str | None = None
    lock: str | None = None
    time_limit_s: float | None = None
    cache: str = ".studio/timings.jsonl"

    @property
    def plan_name(self) -> str:
        """The name that was typed, or one that says what the plan is."""
        if self.name:
            return plain_name(self.name)
        ending = {"budget": "-budget", "lock": "-again"}.get(self.how, "")
        if self.how == "one" and self.precision != "fp32":
            ending = f"-{self.precision}"
        return plain_name(Path(self.source).name) + ending

    @property
    def out(self) -> str:
        return f"plans/{self.plan_name}.plan"

    def spec(self) -> JobSpec:
        """The job that makes the plan.

        Raises:
            UsageError: something is missing, or cannot be.
        """
        return commands.compile_plan(
            self.source,
            self.out,
            target=self.target,
            precision=self.precision,
            batches=batches_of(self.batches),
            calibrate=self._calibrate(),
            budget=self._budget(),
            uint8=self.uint8,
            lock=self._lock(),
            time_limit_s=_positive(self.time_limit_s),
            cache=None if self.time_limit_s is None else self.cache,
        )

    def _calibrate(self) -> commands.Calibrate | None:
        if self.calibrate is None:
            if self.how == "one" and self.precision in ROUNDED:
                raise UsageError(
                    f"{self.precision} needs a dataset to calibrate with",
                    fix="import one on the Data page, or choose another precision",
                )
            return None
        dataset, split, samples, method = self.calibrate
        if samples is not None and samples < 1:
            raise UsageError("a calibration needs samples", seen=samples, fix="give 1 or more")
        return commands.Calibrate(
            dataset=dataset,
            split=split,
            samples=None if samples == USUAL_SAMPLES else samples,
            method=None if method == USUAL_METHOD else method,
        )

    def _budget(self) -> commands.Budget | None:
        if self.how != "budget":
            return None
        if self.judge is None or self.points is None:
            raise UsageError(
                "a budget needs the points that may be lost, and a dataset that judges",
                seen=f"{self.points} points, {self.judge or 'no dataset'}",
                fix="give both; the dataset must have the network's classes",
            )
        front = str(Path(self.out).with_suffix(".front"))
        return commands.Budget(points=self.points, dataset=self.judge, front=front)

    def _lock(self) -> str | None:
        if self.how == "lock" and not self.lock:
            raise UsageError("there is no plan to follow", fix="choose one, or another way")
        return self.lock if self.how == "lock" else None


def batches_of(written: str) -> tuple[int, ...]:
    """``"8"`` or ``"1, 8, 32"`` as sizes.

    Raises:
        UsageError: they are no increasing sizes.
    """
    numbers = [n.strip() for n in written.split(",")]
    if all(re.fullmatch("0*[1-9][0-9]{0,8}", n) for n in numbers) and len(numbers) in (1, 3):
        sizes = tuple(int(n) for n in numbers)
        if list(sizes) == sorted(sizes):
            return sizes
    raise UsageError(
        "a batch is one size, or the smallest, the usual and the largest",
        seen=written or "nothing",
        fix="8, or 1, 8, 32",
    )


def _positive(seconds: float | None) -> float | None:
    if seconds is not None and seconds <= 0:
        raise UsageError("a time limit is seconds, more than 0", seen=seconds)
    return seconds


def followed(plan: Plan) -> dict[str, object]:
    """What a plan that is followed decides of ``Wanted``, besides its kernels.

    Raises:
        UsageError: the command line cannot say what this plan was built with.
    """
    manifest = plan.manifest
    if manifest.precisions and manifest.receipt is None:
        raise UsageError(
            "this plan has precisions of single layers that were given in Python",
            fix="follow it there: compile(…, precisions=…, lock=…)",
        )
    first = manifest.inputs[0]
    span = first.batch
    sizes = (span.min,) if span.min == span.max else (span.min, span.opt, span.max)
    return {
        "target": manifest.fingerprint.target,
        # a plan that a budget chose says itself which layer has which precision
        "precision": "fp32" if manifest.receipt is not None else manifest.precision,
        "batches": ", ".join(str(n) for n in sizes),
        "uint8": first.dtype == "uint8" and manifest.preprocess is not None,
    }


def rounds(plan: Plan) -> bool:
    """Whether building this plan again takes a calibration."""
    manifest = plan.manifest
    used = {manifest.precision, *map(plain_precision, manifest.precisions.values())}
    return bool(used & set(ROUNDED))


def followed_words(plan: Plan) -> str:
    """What a plan that is followed decides, in a line."""
    manifest = plan.manifest
    batch = manifest.inputs[0].batch
    kinds = "a precision for each layer" if manifest.receipt else manifest.precision
    return f"{manifest.fingerprint.target}, {kinds}, batch {batch}, {manifest.inputs[0].dtype}"
