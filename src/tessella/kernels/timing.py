"""How long calls take: candidates in interleaved rounds, so that a busy moment hits all alike."""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Run = Callable[[], object]

MIN_SAMPLE_S = 50e-6  # a sample repeats a short call until the clock's own cost is below a percent
MIN_ROUNDS, MAX_ROUNDS = 3, 31


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Median time of one call, and half the distance between the quartiles."""

    time_us: float
    spread_us: float


def measure(
    runs: Mapping[str, Run], *, device: torch.device, budget_s: float = 0.02
) -> dict[str, Timing]:
    """The time of each call.

    Args:
        runs: what to call, by name; each has run once already and does not synchronize.
        device: on CUDA, calls are timed inside a graph, so that launch cost does not hide theirs.
        budget_s: about how long to measure, all candidates together; at least three rounds.
    """
    clock = _cuda_sampler if device.type == "cuda" else _cpu_sampler
    samplers = {name: clock(run) for name, run in runs.items()}
    round_s = sum(sampler() * repeats for sampler, repeats in samplers.values())
    rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, int(budget_s / max(round_s, 1e-9))))
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, (sampler, _) in samplers.items():
            samples[name].append(sampler() * 1e6)
    return {name: _timing(times) for name, times in samples.items()}


def _timing(times_us: list[float]) -> Timing:
    low, middle, high = statistics.quantiles(times_us, n=4, method="inclusive")
    return Timing(time_us=round(middle, 3), spread_us=round((high - low) / 2, 3))


Sampler = Callable[[], float]  # seconds a call, from one sample


def _cpu_sampler(run: Run) -> tuple[Sampler, int]:
    start = time.perf_counter()
    run()
    once_s = time.perf_counter() - start
    repeats = max(1, min(1000, math.ceil(MIN_SAMPLE_S / max(once_s, 1e-9))))

    def sample() -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - start) / repeats

    return sample, repeats


def _cuda_sampler(run: Run) -> tuple[Sampler, int]:
    repeats = 10
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with warnings.catch_warnings():  # a view launches nothing
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def sample() -> float:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3 / repeats

    return sample, repeats


def latency(
    runs: Mapping[str, Run], *, device: torch.device, seconds: float, rounds: int = 1000
) -> dict[str, Timing]:
    """The time from call to finished answer, as a caller waits for it: host clock, synchronized.

    Args:
        runs: what to call, by name, in turn: a slow moment of the machine falls on all alike.
        seconds: stop after this long or after ``rounds``; at least five rounds.
    """
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        for _ in range(3):
            _waited_s(run, device)
    started = time.perf_counter()
    for done in range(rounds):
        if done >= 5 and time.perf_counter() - started > seconds:
            break
        for name, run in runs.items():
            samples[name].append(_waited_s(run, device) * 1e6)
    return {name: _timing(times) for name, times in samples.items()}


def _waited_s(run: Run, device: torch.device) -> float:
    begin = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin
