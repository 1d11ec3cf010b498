"""How long calls take: candidates in interleaved rounds, so that a busy moment hits all alike.

What other work takes of the core is watched. On one thread it is subtracted; samples in which it
happened count only if there are hardly any others; and where too little is left to be sure, it is
measured for longer, and the timing says so (``noisy``).
"""

from __future__ import annotations

import functools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from tessella.execution.capture import Captured
from tessella.search.interruptions import interruptions

Run = Callable[[], object]

MIN_SAMPLE_S = 50e-6  # a sample repeats a short call until the clock's own cost is below a percent
LONG_S = 10 * MIN_SAMPLE_S  # a call that takes so long is a sample by itself, cold or warm
# Without a rival, one sample of so long a call tells its time: of DenseNet-121's convolutions it
# was within 2 % of the median of the next six, of shorter steps up to 18 % above
SURE_S = 5e-3
WARM_UP_S = 0.1  # after so long, what is timed as a whole is warm
MIN_ROUNDS, MAX_ROUNDS = 3, 31
REPLAY_S = 2e-3  # one replay on a GPU holds about this much of a call, at most ten of it
# A kernel's configurations whose first sample is this near its best run to the end. On a CPU that
# is one call, not the median of ten: in a busy moment 1.1 dropped the better of two for good
CLOSE = {"cpu": 1.3, "cuda": 1.1}
RIVAL = 1.1  # times the quickest: what may be the fastest once it is measured longer
ENOUGH = 4  # rivals of a candidate or more: the whole budget; without one nothing is to tell apart
AGAIN = 1.15  # times the quickest first run: what runs a second time where a neighbour has told
LOST = 0.02  # of a sample: others may have the core for so long before it counts as disturbed
DISTURBED = 1.5  # a sample that took this many times the quickest: something else had the machine
NOISY_SHARE = 1 / 3  # of the samples were disturbed: so was, probably, what was left of them
NOISY_SPREAD, LEAST_US = 0.05, 0.5  # of the time, and at least so much; usual is 0.005
TRIES = 3  # to get a first sample that is not disturbed
LONGER = 3.0  # times as long again may be measured, where it is noisy
LONGER_LONG = 0.5  # where calls take ``SURE_S``: a burst is a small part of one


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Median time of one call, and half the distance between the quartiles.

    Samples in which something else had the machine do not count. With other work on every core
    they are the most, and one burst made a kernel look ten times slower than it is.

    Attributes:
        spread_us: None of a single sample.
        noisy: other work disturbed a third of the samples, or they lie far apart.
    """

    time_us: float
    spread_us: float | None
    noisy: bool = False


@dataclass(frozen=True)
class Sample:
    """The time of one call, and whether other work is known to have had the core meanwhile."""

    time_us: float
    disturbed: bool = False


Sampler = Callable[[], list[Sample]]  # single calls, a few of them


def measure(
    runs: Mapping[str, Run], *, device: torch.device, budget_s: float = 0.02
) -> dict[str, Timing]:
    """The time of each call.

    Args:
        runs: what to call, by name; each has run once already and does not synchronize.
        device: on CUDA, calls are timed inside a graph, so that launch cost does not hide theirs,
            and with a cold L2.
        budget_s: about how long to measure, all candidates together; at least three rounds, and
            up to ``LONGER`` times as long again where it is noisy.
    """
    return _rounds({name: _sampler(run, device) for name, run in runs.items()}, budget_s)


def quickest_us(run: Run, *, device: torch.device, budget_s: float) -> float:
    """The least time of a call: what the machine can do, whatever else it had to do meanwhile."""
    sampler, started = _sampler(run, device), time.perf_counter()
    best = min(sample.time_us for sample in sampler())
    while time.perf_counter() - started < budget_s:
        best = min(best, *(sample.time_us for sample in sampler()))
    return best


def glance(runs: Mapping[str, Run], *, device: torch.device) -> dict[str, float]:
    """About how many microseconds each call takes: one sample, to drop slow ones."""
    return {n: _timing(_once(_sampler(run, device))).time_us for n, run in runs.items()}


def time_interleaved(
    runs: Mapping[str, Run],
    heats: Mapping[str, str],
    *,
    device: torch.device,
    budget_s: float = 0.02,
    far: float = math.inf,
    first: Mapping[str, Sample] | None = None,
    is_known: bool = False,
) -> dict[str, Timing]:
    """``measure``, but a call much slower than the best of its heat is sampled only once.

    Args:
        heats: the heat of each run: here, the kernel that it is one configuration of.
        far: a heat whose best takes this many times the best of all is not run to the end either.
        first: the first run of each on a CPU, which counts as a sample of calls that take
            ``SURE_S``.
        is_known: that little is left to be told: of calls that take ``SURE_S`` or longer, one more
            of each that is near tells, and the quicker of the two counts; one without a rival was
            run often enough. One without a rival, of shorter calls, is run once more.
    """
    shortest_s = 1e-6 * min((sample.time_us for sample in (first or {}).values()), default=0.0)
    if first and shortest_s >= (SURE_S if len(first) > 1 else LONG_S) and is_known:
        return _twice(runs, first)
    if first and len(first) == 1 and shortest_s >= SURE_S:  # a step and its slice, by like times
        return {n: _timing([min(s, watched(runs[n]), key=_time_us)]) for n, s in first.items()}
    begun = first if first and shortest_s >= SURE_S else {}
    samplers = {name: _sampler(run, device, begun.get(name)) for name, run in runs.items()}
    sampled = {name: _once(sampler) for name, sampler in samplers.items()}
    once = {name: _timing(samples) for name, samples in sampled.items()}
    best: dict[str, float] = {}
    for name, timing in once.items():
        best[heats[name]] = min(timing.time_us, best.get(heats[name], math.inf))
    limit_us = far * min(best.values(), default=0.0)
    close = {
        name: sampler
        for name, sampler in samplers.items()
        if once[name].time_us <= CLOSE[device.type] * best[heats[name]]
        and best[heats[name]] <= limit_us
    }
    quickest_us = min((once[name].time_us for name in close), default=0.0)
    is_long = device.type == "cpu" and quickest_us >= 1e6 * LONG_S
    if is_long and len(close) == 1 and quickest_us >= 1e6 * SURE_S:
        return once
    rounds = {name: sampled[name] for name in close} if is_long else {}
    return once | _rounds(close, budget_s * min(1.0, max(0, len(close) - 1) / ENOUGH), rounds)


def _twice(runs: Mapping[str, Run], first: Mapping[str, Sample]) -> dict[str, Timing]:
    """The quicker of two samples of each call, the second taken where the first had a rival near,
    or was short.
    """
    quickest_us = min(sample.time_us for sample in first.values())
    near = [name for name, sample in first.items() if sample.time_us <= AGAIN * quickest_us]
    again = near if len(near) > 1 or quickest_us < 1e6 * SURE_S else []
    samples = {
        name: [sample, *([watched(runs[name])] if name in again else [])]
        for name, sample in first.items()
    }
    return {name: _timing([min(taken, key=_time_us)]) for name, taken in samples.items()}


def _time_us(sample: Sample) -> float:
    return sample.time_us


def _sampler(run: Run, device: torch.device, begun: Sample | None = None) -> Sampler:
    return _cuda_sampler(run, device) if device.type == "cuda" else _cpu_sampler(run, begun)


def _once(sampler: Sampler) -> list[Sample]:
    """A sample that was not disturbed, if there is one in a few tries."""
    samples = sampler()
    for _ in range(TRIES - 1):
        if not all(sample.disturbed for sample in samples):
            break
        samples += sampler()
    return samples


def _rounds(
    samplers: Mapping[str, Sampler],
    budget_s: float,
    begun: Mapping[str, Sequence[Sample]] | None = None,
) -> dict[str, Timing]:
    """Interleaved samples of all; then of those that may be the fastest, while they are noisy.

    Args:
        begun: the samples of a first round, of all or of none.
    """
    samples = {name: [*(begun or {}).get(name, ())] for name in samplers}
    started, rounds, near = time.perf_counter(), 1 if begun else 0, dict(samplers)
    while rounds < MIN_ROUNDS or (rounds < MAX_ROUNDS and time.perf_counter() - started < budget_s):
        for name, sampler in near.items():
            samples[name] += sampler()
        rounds += 1
        near = _still_near(near, samples)
    timings = {name: _timing(taken) for name, taken in samples.items()}
    is_long = min((t.time_us for t in timings.values()), default=0.0) >= 1e6 * SURE_S
    longer = LONGER_LONG if is_long else LONGER
    until = time.perf_counter() + longer * (time.perf_counter() - started)
    while budget_s and _is_undecided(timings) and time.perf_counter() < until:
        for name in _first(timings):
            for _ in range(MIN_ROUNDS):
                samples[name] += samplers[name]()
            timings[name] = _timing(samples[name])
    return timings


def _still_near(
    samplers: dict[str, Sampler], samples: Mapping[str, Sequence[Sample]]
) -> dict[str, Sampler]:
    """The samplers that may still win, where calls are long enough for two samples to decide."""
    quickest = {name: min(s.time_us for s in samples[name]) for name in samplers}
    best_us = min(quickest.values(), default=0.0)
    if best_us < 1e6 * SURE_S or any(len(samples[name]) < 2 for name in samplers):
        return samplers
    return {n: sampler for n, sampler in samplers.items() if quickest[n] <= RIVAL * best_us}


def _first(timings: Mapping[str, Timing]) -> list[str]:
    """The names of the candidates that may be the fastest, by their times."""
    best = min(timings.values(), key=lambda timing: timing.time_us)
    limit_us = RIVAL * best.time_us + (best.spread_us or 0.0)
    return [n for n, t in timings.items() if t.time_us - (t.spread_us or 0.0) <= limit_us]


def _is_undecided(timings: Mapping[str, Timing]) -> bool:
    """Whether more samples could tell more of those that may be the fastest.

    On one thread what others had is subtracted: where what is left lies together, it is enough.
    """
    alone = torch.get_num_threads() == 1
    first = [timings[name] for name in _first(timings)] if timings else []
    return any(t.noisy and not (alone and _lies_together(t)) for t in first)


def _lies_together(timing: Timing) -> bool:
    return (timing.spread_us or 0.0) <= max(LEAST_US, NOISY_SPREAD * timing.time_us)


def _timing(samples: Sequence[Sample]) -> Timing:
    quickest_us = min(sample.time_us for sample in samples)
    plausible = [s for s in samples if s.time_us <= DISTURBED * quickest_us]
    quiet = [s for s in plausible if not s.disturbed]
    counted = [s.time_us for s in (quiet if len(quiet) >= MIN_ROUNDS else plausible)]
    noisy = len(samples) - len(quiet) > NOISY_SHARE * len(samples)
    if len(counted) == 1:
        return Timing(time_us=round(counted[0], 3), spread_us=None, noisy=noisy)
    low, middle, high = statistics.quantiles(counted, n=4, method="inclusive")
    spread_us = (high - low) / 2
    timing = Timing(time_us=round(middle, 3), spread_us=round(spread_us, 3), noisy=noisy)
    return timing if _lies_together(timing) else replace(timing, noisy=True)


def watched(run: Run, repeats: int = 1, *, computes: bool = True) -> Sample:
    """One sample of a call.

    Args:
        computes: it runs on this processor. On one thread, what others had of the core is
            subtracted; the thread's own time bounds that, as they may have had it just outside.
    """
    before, own_s, start = interruptions(), time.thread_time(), time.perf_counter()
    for _ in range(repeats):
        run()
    taken_s = time.perf_counter() - start
    own_s, after = time.thread_time() - own_s, interruptions()
    lost_s = after.waited_s - before.waited_s
    alone = torch.get_num_threads() == 1
    disturbed = lost_s > LOST * taken_s or (not alone and after.switches > before.switches)
    if computes and alone:
        taken_s = max(taken_s - lost_s, min(own_s, taken_s))
    return Sample(1e6 * taken_s / repeats, disturbed)


def _cpu_sampler(run: Run, begun: Sample | None = None) -> Sampler:
    first = begun or watched(run)
    once_s = 1e-6 * first.time_us
    long = [first] if once_s >= LONG_S else []
    if not long:  # the first call may have found its data and code outside the caches
        once_s = min(once_s, 1e-6 * watched(run).time_us)
    repeats = max(1, min(1000, math.ceil(MIN_SAMPLE_S / max(once_s, 1e-9))))

    def sample() -> list[Sample]:
        return [long.pop() if long else watched(run, repeats)]

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

    def sample() -> list[Sample]:
        captured.replay()
        torch.cuda.synchronize()
        return [Sample(begin.elapsed_time(end) * 1e3) for begin, end in events]

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
        seconds: stop after this long or after ``rounds``; at least five rounds (three of long
            calls), and up to ``LONGER`` times as long again where it is noisy.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in runs}
    waiting = {name: partial(_finished, run, device) for name, run in runs.items()}
    started = time.perf_counter()
    for _ in range(3):
        for run in waiting.values():
            run()
        if time.perf_counter() - started > WARM_UP_S:
            break
    started, patience, least = time.perf_counter(), 1.0, 5
    for done in range(rounds):
        taken_s = time.perf_counter() - started
        if done == MIN_ROUNDS and taken_s > 2 * seconds:
            least = MIN_ROUNDS
        if done >= least and taken_s > patience * seconds:
            timings = {name: _timing(taken) for name, taken in samples.items()}
            if patience > LONGER or not _is_undecided(timings):
                return timings
            patience += 1.0
        for name, run in waiting.items():
            samples[name].append(watched(run, computes=device.type == "cpu"))
    return {name: _timing(taken) for name, taken in samples.items()}


def _finished(run: Run, device: torch.device) -> None:
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
