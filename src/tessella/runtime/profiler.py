"""The profiler: how long each step of an engine takes, and how far that is from what the machine
allows.

A step is measured by itself, on operands of its own, which lie as its own would; on a CPU also
inside a run of the whole program, where caches are as cold as the other steps leave them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from tessella.core.count import with_spread
from tessella.core.device import using
from tessella.core.spec import TensorSpec
from tessella.device.ahead_of_time import using_kernels
from tessella.device.float32_math import float32_math
from tessella.execution.bucket import BoundBucket
from tessella.execution.steps import BoundStep
from tessella.kernels import catalog
from tessella.operations.problem import Problem
from tessella.runtime.engine import Engine
from tessella.search.inputs import place, sample_inputs
from tessella.search.limits import Limits, limits
from tessella.search.timing import Timing, latency, measure

MIN_RUNS, MAX_RUNS = 3, 31  # of the whole program
DISTURBED = " (disturbed by other work on the machine)"
TENSOR_CORE_TYPES = ("float16", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """One step's time, measured by itself.

    Attributes:
        time_us: median; ``spread_us``: half the distance between the quartiles.
        in_run_us: median inside runs of the whole program; None on a GPU.
        nbytes: of all inputs and outputs, the least that must be moved; 0 for a view.
        flops: floating-point operations, None where the step is no product.
        share: of the time of all steps, 0 to 1.
        least_us: what the machine's limits allow: the roofline.
        bound: which limit that is.
        peak_share: arithmetic rate over what the machine reaches in large products of the step's
            types; None where the step is no product, or the machine was not measured in its types.
        tensor_cores: whether those products, and so this step's limit, are the tensor cores'.
        noisy: other work on the machine disturbed the measurement.
    """

    step: str
    op: str
    kernel: str
    layer: str
    time_us: float
    spread_us: float | None
    in_run_us: float | None
    nbytes: int
    flops: int | None
    share: float
    least_us: float
    bound: Literal["memory", "arithmetic"]
    peak_share: float | None
    tensor_cores: bool
    noisy: bool = False

    @property
    def reached(self) -> float:
        """The share of the roofline: 1 is all that the machine allows."""
        return self.least_us / max(self.time_us, 1e-3)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The steps of one bucket, in the order in which they run.

    Attributes:
        total_us: median time of the whole program, from call to finished answer, without the
            engine's copies.
        noisy: other work on the machine disturbed the whole program's time.
        limits: what the machine can do at most, measured.
    """

    plan: str
    target: str
    batch: int
    total_us: float
    limits: Limits
    steps: tuple[StepTime, ...]
    noisy: bool = False

    def __iter__(self) -> Iterator[StepTime]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, index: int) -> StepTime:
        return self.steps[index]

    @property
    def sum_us(self) -> float:
        """The sum of all steps' times, each step measured by itself."""
        return sum(s.time_us for s in self.steps)

    @property
    def least_us(self) -> float:
        """The sum of the least times that the machine's limits allow for each step."""
        return sum(s.least_us for s in self.steps)

    @property
    def tensor_core_share(self) -> float:
        """How busy the tensor cores are, in all steps' time, of their measured rate."""
        busy_us = sum(s.time_us * (s.peak_share or 0.0) for s in self.steps if s.tensor_cores)
        return busy_us / max(self.sum_us, 1e-3)

    def __str__(self) -> str:
        return table(self)


def profile(
    engine: Engine, batch: int, *, budget_s: float = 0.02, folder: Path | None = None
) -> Profile:
    """Time every step of one of the engine's buckets, on random inputs.

    Args:
        batch: one of ``engine.buckets``.
        budget_s: about how long to measure each step.
        folder: where this machine's limits are kept; measured now (about a second) if None.
    """
    with engine.alone(batch) as bucket, torch.inference_mode(), using_kernels(engine.machine_code):
        inputs = [sample(spec, batch, engine.device) for spec in engine.inputs]
        bucket(inputs)  # views' strides are known after it
        measured = [_time(s, bucket.strides, engine.device, budget_s) for s in bucket.steps]
        seconds = budget_s * len(measured)
        bucket(inputs)
        total = latency({"run": lambda: bucket(inputs)}, device=engine.device, seconds=seconds,
                        rounds=MAX_RUNS)["run"]  # fmt: skip
        in_run = _in_run_us(bucket, inputs, seconds) if isinstance(bucket, BoundBucket) else None
    target = engine.manifest.fingerprint.target
    with using(str(engine.device)):
        ceilings = limits(target, folder)
    sum_us = sum(timing.time_us for timing, _ in measured)
    steps = tuple(
        _step_time(bound, *measured[i], sum_us, in_run[i] if in_run else None, ceilings)
        for i, bound in enumerate(bucket.steps)
    )
    return Profile(
        plan=engine.manifest.built_from,
        target=target,
        batch=batch,
        total_us=total.time_us,
        noisy=total.noisy,
        limits=ceilings,
        steps=steps,
    )


def _step_time(
    bound: BoundStep,
    timing: Timing,
    moves: bool,
    sum_us: float,
    in_run_us: float | None,
    ceilings: Limits,
) -> StepTime:
    problem, view = bound.problem, not moves
    work, rate = problem.flops, ceilings.flops_limit(problem)
    least_us = 0.0 if view else ceilings.least_us(problem)
    moved_us = 0.0 if view else 1e6 * problem.nbytes / ceilings.copy_bytes_s
    busy_us = 1e6 * work / rate if work and rate else None
    return StepTime(
        step=bound.step.outputs[0],
        op=bound.step.op,
        kernel=bound.step.kernel,
        layer=bound.step.layer,
        time_us=timing.time_us,
        spread_us=timing.spread_us,
        in_run_us=in_run_us,
        nbytes=0 if view else problem.nbytes,
        flops=work,
        share=timing.time_us / max(sum_us, 1e-3),
        least_us=least_us,
        bound="arithmetic" if busy_us and busy_us > moved_us else "memory",
        peak_share=None if busy_us is None else busy_us / max(timing.time_us, 1e-3),
        tensor_cores=work is not None and _on_tensor_cores(problem, ceilings),
        noisy=timing.noisy,
    )


def _on_tensor_cores(problem: Problem, ceilings: Limits) -> bool:
    first = problem.first
    if first is None or "float16" not in ceilings.flops_s:  # measured on GPUs only
        return False
    tf32 = first.dtype == "float32" and problem.math == "tf32"
    return first.dtype in TENSOR_CORE_TYPES or tf32


def _time(
    bound: BoundStep, strides: Mapping[str, tuple[int, ...]], device: torch.device, budget_s: float
) -> tuple[Timing, bool]:
    """A step's time, and whether it moves anything: a reshape of a permuted view does."""
    names = bound.step.inputs
    known = {i: strides[name] for i, name in enumerate(names) if name and name in strides}
    inputs = sample_inputs(bound.problem, device, known)
    # a buffer of its own, as the arena may be in use; a slice with the gaps of its tensor
    out = {} if bound.out is None else {"out": place(bound.problem.output, device)}
    with float32_math(bound.problem.math):
        made = bound.call(*inputs, **out)
        runs = {"step": lambda: bound.call(*inputs, **out)}
        timing = measure(runs, device=device, budget_s=budget_s)["step"]
    if catalog.kernel(bound.step.kernel).algorithm != "view":
        return timing, True
    first = made if isinstance(made, torch.Tensor) else made[0]
    places = {t.untyped_storage().data_ptr() for t in inputs}
    return timing, first.untyped_storage().data_ptr() not in places


def sample(spec: TensorSpec, batch: int, device: torch.device) -> torch.Tensor:
    """An input to time an engine with: random floats, a picture's bytes, or zeros where a number
    may mean a place.
    """
    dtype = getattr(torch, spec.dtype)
    if dtype == torch.uint8:
        return torch.randint(0, 256, spec.at(batch), dtype=dtype, device=device)
    if dtype.is_floating_point:
        return torch.randn(spec.at(batch), device=device).to(dtype)
    return torch.zeros(spec.at(batch), dtype=dtype, device=device)


def _in_run_us(bucket: BoundBucket, inputs: Sequence[torch.Tensor], seconds: float) -> list[float]:
    """The median of each step inside runs of all."""
    runs: list[list[float]] = []
    while len(runs) < MIN_RUNS or (len(runs) < MAX_RUNS and sum(map(sum, runs)) < seconds):
        times, begin = [], time.perf_counter()
        for _ in bucket.stepwise(inputs):
            now = time.perf_counter()
            times.append(now - begin)
            begin = now
        runs.append(times)
    return [round(1e6 * statistics.median(times), 3) for times in zip(*runs, strict=True)]


def table(profile: Profile) -> str:
    """The profile as text: a line a step, in the order in which they run, then the sums."""
    rows = [HEAD, *([_shown(cell) for cell in row] for row in rows_of(profile))]
    widths = [max(len(r[c]) for r in rows) for c in range(len(HEAD))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(r, widths, strict=True)) for r in rows]
    return "\n".join([*(line.rstrip() for line in lines), summary(profile)])


HEAD = (
    "step", "kernel", "layer", "time_us", "in_run_us", "share", "GB/s", "GFLOP/s", "of_peak",
    "limit_us", "reached",
)  # fmt: skip


def rows_of(profile: Profile) -> list[tuple[str | float | None, ...]]:
    """A row a step under ``HEAD``."""
    rows: list[tuple[str | float | None, ...]] = []
    for t in profile:
        time_us = max(t.time_us, 1e-3)
        rows.append(
            (
                t.step,
                t.kernel,
                t.layer,
                f"{with_spread(t.time_us, t.spread_us)}{' ~' * t.noisy}",
                None if t.in_run_us is None else round(t.in_run_us, 1),
                f"{100 * t.share:.1f}%",
                round(t.nbytes / time_us / 1e3, 1),
                None if t.flops is None else round(t.flops / time_us / 1e3, 1),
                None if t.peak_share is None else f"{100 * t.peak_share:.0f}%",
                round(t.least_us, 1),
                f"{100 * t.reached:.0f}%",
            )
        )
    return rows


def summary(profile: Profile) -> str:
    """The whole program in a line."""
    parts = [
        f"whole program {profile.total_us:,.1f} µs{DISTURBED * profile.noisy}",
        f"sum of the steps {profile.sum_us:,.1f} µs",
        f"the machine's limits allow {profile.least_us:,.1f} µs",
    ]
    if any(s.tensor_cores for s in profile):
        parts.append(f"tensor cores busy {100 * profile.tensor_core_share:.0f} %")
    if noisy := sum(s.noisy for s in profile):
        parts.append(f"{noisy} of {len(profile)} steps were disturbed by other work on the machine")
    return f"batch {profile.batch}: " + ", ".join(parts)


def _shown(cell: str | float | None) -> str:
    return "" if cell is None else str(cell)
