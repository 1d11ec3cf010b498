"""A profile as a trace: the JSON events that Perfetto and Chrome's tracing page read.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format)
"""

from __future__ import annotations

from typing import Any

from tessella.runtime.profiler import Profile, StepTime

PROCESS, STEPS, LIMITS = 1, 1, 2  # one process, two threads: rows of the picture


def chrome_trace(profile: Profile) -> dict[str, Any]:
    """One event a step, one after another, and below each what the machine's limits allow for it.

    Times are microseconds: inside a run where the profile has them, else each step by itself.
    """
    title = f"{profile.plan}, batch {profile.batch}, {profile.limits.device}"
    events: list[dict[str, Any]] = [
        _name("process_name", 0, title),
        _name("thread_name", STEPS, "steps"),
        _name("thread_name", LIMITS, "what the machine's limits allow"),
    ]
    start_us = 0.0
    for step in profile:
        time_us = step.time_us if step.in_run_us is None else step.in_run_us
        events += [_event(step, STEPS, start_us, time_us), _event(step, LIMITS, start_us,
                   min(step.least_us, time_us))]  # fmt: skip
        start_us += time_us
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {
            "plan": profile.plan,
            "target": profile.target,
            "batch": profile.batch,
            "whole_program_us": profile.total_us,
            "noisy": profile.noisy,
        },
    }


def _name(kind: str, thread: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": PROCESS, "tid": thread, "args": {"name": text}}


def _event(step: StepTime, thread: int, start_us: float, time_us: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": step.layer or step.step,
        "cat": step.op,
        "pid": PROCESS,
        "tid": thread,
        "ts": round(start_us, 3),
        "dur": round(time_us, 3),
        "args": {
            "step": step.step,
            "kernel": step.kernel,
            "alone_us": step.time_us,
            "noisy": step.noisy,
            "bytes": step.nbytes,
            "flops": step.flops,
            "limit_us": round(step.least_us, 3),
            "bound": step.bound,
            "reached": round(step.reached, 3),
            "share_of_peak": None if step.peak_share is None else round(step.peak_share, 3),
            "tensor_cores": step.tensor_cores,
        },
    }
