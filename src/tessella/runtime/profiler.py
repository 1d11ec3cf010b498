"""The profiler: how long each step of an engine takes, and how much it moves and computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tessella.kernels.auction import sample_inputs
from tessella.kernels.float32_math import float32_math
from tessella.kernels.timing import Timing, measure
from tessella.kernels.work import flops, nbytes
from tessella.runtime.bucket import BoundStep
from tessella.runtime.engine import Engine


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """One step's time, measured by itself.

    Attributes:
        time_us: median; ``spread_us``: half the distance between the quartiles.
        nbytes: of all inputs and outputs, the least that must be moved.
        flops: floating-point operations, None where the step is no product.
        share: of the time of all steps, 0 to 1.
    """

    step: str
    op: str
    kernel: str
    layer: str
    time_us: float
    spread_us: float
    nbytes: int
    flops: int | None
    share: float


def profile(engine: Engine, batch: int, *, budget_s: float = 0.02) -> list[StepTime]:
    """Time every step of one of the engine's buckets, on random inputs.

    Args:
        batch: one of ``engine.buckets``.
        budget_s: about how long to measure each step.
    """
    steps = engine.bound(batch).steps
    with torch.inference_mode():
        timings = [_time(step, engine.device, budget_s) for step in steps]
    total_us = sum(t.time_us for t in timings)
    return [
        StepTime(
            step=bound.step.outputs[0],
            op=bound.step.op,
            kernel=bound.step.kernel,
            layer=bound.step.layer,
            time_us=timing.time_us,
            spread_us=timing.spread_us,
            nbytes=nbytes(bound.problem),
            flops=flops(bound.problem),
            share=timing.time_us / total_us,
        )
        for bound, timing in zip(steps, timings, strict=True)
    ]


def _time(bound: BoundStep, device: torch.device, budget_s: float) -> Timing:
    inputs = sample_inputs(bound.problem, device)
    # a buffer of its own: the arena may be in use
    out = {} if bound.out is None else {"out": torch.empty_like(bound.out)}
    with float32_math(bound.problem.math):
        bound.call(*inputs, **out)
        runs = {"step": lambda: bound.call(*inputs, **out)}
        return measure(runs, device=device, budget_s=budget_s)["step"]


def table(times: Sequence[StepTime]) -> str:
    """The profile as text: a line a step, in the order in which they run."""
    rows = [("step", "kernel", "layer", "time_us", "share", "GB/s", "GFLOP/s")]
    for t in times:
        seconds = max(t.time_us, 1e-3) * 1e-6
        rows.append(
            (
                t.step,
                t.kernel,
                t.layer,
                f"{t.time_us:.1f}",
                f"{100 * t.share:.1f}%",
                f"{t.nbytes / seconds / 1e9:.1f}",
                "" if t.flops is None else f"{t.flops / seconds / 1e9:.1f}",
            )
        )
    widths = [max(len(r[c]) for r in rows) for c in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(r, widths, strict=True)) for r in rows]
    return "\n".join(line.rstrip() for line in lines)
