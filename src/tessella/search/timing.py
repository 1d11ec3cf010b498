"""How long calls take: candidates in interleaved rounds, so that a busy moment hits all alike."""

from __future__ import annotations

import functools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from tessella.execution.capture import Captured

Run = Callable[[], object]

MIN_SAMPLE_S = 50e-6  # a sample repeats a short call until the clock's own cost is below a percent
MIN_ROUNDS, MAX_ROUNDS = 3, 31
REPLAY_S = 2e-3  # one replay on a GPU holds about this much of a call, at most ten of it
DISTURBED = 1.5  # a sample that took this many times the quickest: something else had the machine
CLOSE = 1.1  # a kernel's configurations whose first sample is this near its best run to the end


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Median time of one call, and half the distance between the quartiles.

    Samples in which something else had the machine do not count. With other work on every core
    they are the most, and one burst made a kernel look ten times slower than it is.
    """

    time_us: float
    spread_us: float


def measure(
    runs: Mapping[str, Run], *, device: torch.device, budget_s: float = 0.02
) -> dict[str, Timing]:
    """The time of each call.

    Args:
        runs: what to call, by name; each has run once already and does not synchronize.
        device: on CUDA, calls are timed inside a graph, so that launch cost does not hide theirs,
            and with a cold L2.
        budget_s: about how long to measure, all candidates together; at least three rounds.
    """
    return _rounds({name: _sampler(run, device) for name, run in runs.items()}, budget_s)


def glance(runs: Mapping[str, Run], *, device: torch.device) -> dict[str, float]:
    """About how many microseconds each call takes: one sample, to drop slow ones."""
    return {n: statistics.median(_sampler(run, device)()) * 1e6 for n, run in runs.items()}


def race(
    runs: Mapping[str, Run],
    heats: Mapping[str, str],
    *,
    device: torch.device,
    budget_s: float = 0.02,
) -> dict[str, Timing]:
    """``measure``, but a call much slower than the best of its heat is sampled only once.

    Args:
        heats: the heat of each run: here, the kernel that it is one configuration of.
    """
    samplers = {name: _sampler(run, device) for name, run in runs.items()}
    once = {name: [t * 1e6 for t in sampler()] for name, sampler in samplers.items()}
    first = {name: statistics.median(times) for name, times in once.items()}
    best: dict[str, float] = {}
    for name, time_us in first.items():
        best[heats[name]] = min(time_us, best.get(heats[name], time_us))
    close = {n: s for n, s in samplers.items() if first[n] <= CLOSE * best[heats[n]]}
    return {name: _timing(times) for name, times in once.items()} | _rounds(close, budget_s)


Sampler = Callable[[], list[float]]  # seconds of single calls, a few of them


def _sampler(run: Run, device: torch.device) -> Sampler:
    return _cuda_sampler(run, device) if device.type == "cuda" else _cpu_sampler(run)


def _rounds(samplers: Mapping[str, Sampler], budget_s: float) -> dict[str, Timing]:
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    started, rounds = time.perf_counter(), 0
    while rounds < MIN_ROUNDS or (rounds < MAX_ROUNDS and time.perf_counter() - started < budget_s):
        for name, sampler in samplers.items():
            samples[name] += [t * 1e6 for t in sampler()]
        rounds += 1
    return {name: _timing(times) for name, times in samples.items()}


def _timing(times_us: list[float]) -> Timing:
    quickest = min(times_us)
    times_us = [t for t in times_us if t <= DISTURBED * quickest]
    if len(times_us) == 1:
        return Timing(time_us=round(times_us[0], 3), spread_us=0.0)
    low, middle, high = statistics.quantiles(times_us, n=4, method="inclusive")
    return Timing(time_us=round(middle, 3), spread_us=round((high - low) / 2, 3))


def _cpu_sampler(run: Run) -> Sampler:
    start = time.perf_counter()
    run()
    once_s = time.perf_counter() - start
    repeats = max(1, min(1000, math.ceil(MIN_SAMPLE_S / max(once_s, 1e-9))))

    def sample() -> list[float]:
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        return [(time.perf_counter() - start) / repeats]

    return sample


def _cuda_sampler(run: Run, device: torch.device) -> Sampler:
    """Calls in a CUDA graph, each between two events, each after a write that empties the L2.

    The two events add about 2.3 µs (a 4-byte fill reads 3.3 µs, and 1.0 µs back to back).
    """
    begin, end = _events()
    begin.record()
    run()
    end.record()
    end.synchronize()
    once_s = begin.elapsed_time(end) * 1e-3
    repeats = max(1, min(10, math.ceil(REPLAY_S / max(once_s, 1e-9))))
    flushed = _l2_filler(torch.cuda.current_device())
    events = [_events(external=True) for _ in range(repeats)]

    def calls() -> None:
        for begin, end in events:
            flushed.zero_()
            begin.record()
            run()
            end.record()

    torch.cuda.synchronize()
    with warnings.catch_warnings():  # a view launches nothing
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        captured = Captured(calls, warm_up_runs=0)

    def sample() -> list[float]:
        captured.replay()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) * 1e-3 for begin, end in events]

    return sample


def _events(**options: bool) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Marks for the begin and the end of a call on a stream."""
    event = functools.partial(torch.cuda.Event, enable_timing=True, **options)
    return event(), event()


@functools.cache
def _l2_filler(device: int) -> torch.Tensor:
    """A tensor of twice the L2: writing it drives out everything else.

    It is kept, since graphs hold its address.
    """
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    with torch.inference_mode(False):  # else it could not be written outside of that mode
        return torch.empty(2 * l2_bytes, dtype=torch.int8, device=device)


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
