"""Timing: what other work on the machine does to a measurement, and what it must not do."""

from __future__ import annotations

import collections
import functools
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch

from tessella.search import timing
from tessella.search.timing import Sample, Timing, latency, measure

CPU = torch.device("cpu")


def timed(*times_us: float, disturbed: int = 0) -> Timing:
    """The timing of these samples, the first few of which were disturbed."""
    return timing._timing([Sample(t, i < disturbed) for i, t in enumerate(times_us)])


def test_the_median_of_what_was_not_disturbed() -> None:
    quiet = (10.0, 10.2, 10.4)
    assert timed(*quiet) == Timing(time_us=10.2, spread_us=0.1)
    assert timed(*quiet, 95.0, 80.0, 400.0, 51.0).time_us == 10.2
    assert timed(10.0, 14.0, 13.0, 12.0).time_us == pytest.approx(12.5)
    assert timed(14.0, 14.1, *quiet, disturbed=2).time_us == 10.2
    assert timed(7.0) == Timing(time_us=7.0, spread_us=None)  # one sample shows no spread


def test_a_timing_says_that_it_was_disturbed() -> None:
    assert not timed(10.0, 10.1, 10.2, 95.0).noisy
    assert timed(10.0, 10.1, 10.2, 95.0, 80.0).noisy  # two of five are far off
    assert timed(10.0, 10.1, 10.2, 10.0, disturbed=2).noisy
    assert timed(10.0, 12.0, 14.0, 11.0).noisy  # they lie far apart
    assert timed(10.0, disturbed=1).noisy


def sampler(name: str, *times_us: float) -> Callable[[], list[Sample]]:
    """Samples that take these times, again and again; ``TAKEN`` counts them."""
    times = itertools.cycle(times_us)

    def sample() -> list[Sample]:
        TAKEN[name] += 1
        return [Sample(next(times))]

    return sample


TAKEN: collections.Counter[str] = collections.Counter()


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is the sampler of its times."""
    TAKEN.clear()
    monkeypatch.setattr(timing, "_sampler", lambda run, device, begun=None: run)


@pytest.mark.usefixtures("simulated")
def test_a_burst_of_other_work_does_not_turn_the_order() -> None:
    """The faster call is interrupted in most of its rounds; the slower one never is."""
    runs = {"fast": sampler("fast", 30.0, 1.0, 30.0), "slow": sampler("slow", 4.0)}
    times = measure(runs, device=CPU, budget_s=0.01)
    assert times["fast"].time_us == 1.0
    assert times["slow"].time_us == 4.0
    assert times["fast"].noisy
    assert not times["slow"].noisy


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(
    ("times_us", "threads", "longer"),
    [
        ((10.0, 30.0, 30.0), 2, True),
        ((10.0,), 2, False),
        ((10.0, 30.0, 30.0), 1, False),  # what others had is known, and what is left agrees
        ((10.0, 12.0, 14.0), 1, True),
    ],
)
def test_what_may_be_the_fastest_is_measured_longer_while_it_is_noisy(
    times_us: tuple[float, ...], threads: int, longer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    runs = {"first": sampler("first", *times_us), "far": sampler("far", 40.0)}
    times = measure(runs, device=CPU, budget_s=0.01)
    assert times["first"].noisy == (len(times_us) > 1)  # and it ends though it stays so
    assert (TAKEN["first"] > timing.MAX_ROUNDS) == longer
    assert TAKEN["far"] <= timing.MAX_ROUNDS


@pytest.mark.usefixtures("simulated")
def test_kernels_that_are_far_behind_are_sampled_once() -> None:
    """So are configurations; a first sample that is known to be disturbed is taken again."""
    times = {"best": 1.0, "config": 1.35, "near": 1.4, "far": 20.0}
    runs = {name: sampler(name, t) for name, t in times.items()}
    heats = {"best": "a", "config": "a", "near": "b", "far": "c"}
    timings = timing.time_interleaved(runs, heats, device=CPU, budget_s=0.01, far=1.5)
    assert {n: t.time_us for n, t in timings.items()} == times
    assert {n for n, t in timings.items() if t.spread_us is None} == {"config", "far"}
    disturbed = iter([Sample(50.0, True), Sample(40.0, True), Sample(2.0)])
    assert timing.glance({"x": lambda: [next(disturbed)]}, device=CPU) == {"x": 2.0}


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(("time_us", "taken"), [(2000.0, 3), (10.0, 4)])
def test_the_first_samples_of_long_calls_are_a_round(time_us: float, taken: int) -> None:
    """Short ones may have found the caches cold."""
    runs = {name: sampler(name, time_us) for name in "ab"}
    found = timing.time_interleaved(runs, {"a": "a", "b": "b"}, device=CPU, budget_s=0.0)
    assert found == {n: Timing(time_us=time_us, spread_us=0.0) for n in "ab"}
    assert dict(TAKEN) == {"a": taken, "b": taken}


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(("rival_us", "taken"), [(20_000.0, 1), (6000.0, 3)])
def test_a_long_call_without_a_rival_is_sampled_once(rival_us: float, taken: int) -> None:
    runs = {"best": sampler("best", 6000.0), "rival": sampler("rival", rival_us)}
    heats = {name: name for name in runs}
    found = timing.time_interleaved(runs, heats, device=CPU, budget_s=0.0, far=1.5)
    assert {name: t.time_us for name, t in found.items()} == {"best": 6000.0, "rival": rival_us}
    assert dict(TAKEN) == {"best": taken, "rival": taken}


@pytest.mark.usefixtures("simulated")
def test_a_second_sample_ends_what_is_behind_where_calls_are_long() -> None:
    """And where those that are left stay noisy, half as long again is measured, not thrice."""
    runs = {
        "best": sampler("best", 10_000.0),
        "near": sampler("near", 10_500.0, 12_500.0),
        "behind": sampler("behind", 12_000.0),
    }
    found = timing.time_interleaved(
        runs, {name: name for name in runs}, device=CPU, budget_s=0.0, far=1.5
    )
    assert dict(TAKEN) == {"best": 3, "near": 3, "behind": 2}
    assert found["behind"].time_us == 12_000.0


@pytest.mark.parametrize(
    ("names", "scale", "is_known", "again"),
    [
        ("abf", 1.0, True, "ab"),  # who has a rival near is run once more
        ("af", 1.0, True, ""),  # without one, the first run told enough
        ("a", 1.0, True, ""),
        ("a", 1.0, False, "a"),
        ("a", 0.1, True, "a"),
    ],
)
def test_where_a_neighbour_has_told_few_runs_of_a_long_call_do(
    names: str, scale: float, is_known: bool, again: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quicker counts: the first one may have found its memory cold."""
    second = {"a": 10_000.0, "b": 9_000.0, "f": 1.0}
    first = {"a": 10_500.0, "b": 11_000.0, "f": 14_000.0}
    called: collections.Counter[str] = collections.Counter()

    def watched(run: Callable[[], str], repeats: int = 1) -> Sample:
        name = run()
        called[name] += 1
        return Sample(scale * second[name])

    monkeypatch.setattr(timing, "watched", watched)
    found = timing.time_interleaved(
        {name: functools.partial(str, name) for name in names},
        {name: name for name in names},
        device=CPU,
        budget_s=0.0,
        first={name: Sample(scale * first[name]) for name in names},
        is_known=is_known,
    )
    times = {n: scale * (second if n in again else first)[n] for n in names}
    assert {n: t.time_us for n, t in found.items()} == times
    assert called == dict.fromkeys(again, 1)


def test_first_runs_of_long_calls_are_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of shorter ones may have found the caches cold: these are timed as ever."""
    called: collections.Counter[str] = collections.Counter()

    def watched(run: Callable[[], str], repeats: int = 1) -> Sample:
        called[run()] += 1
        return Sample(time_us)

    monkeypatch.setattr(timing, "watched", watched)
    runs = {name: functools.partial(str, name) for name in "ab"}
    for time_us, taken in ((10_000.0, 2), (1000.0, 3)):
        called.clear()
        timing.time_interleaved(
            runs, {n: n for n in runs}, device=CPU, budget_s=0.0,
            first={n: Sample(time_us) for n in runs},
        )  # fmt: skip
        assert called == {"a": taken, "b": taken}


@pytest.mark.parametrize(("call_us", "calls"), [(2000.0, 1), (100.0, 2)])
def test_a_long_call_is_not_called_again_to_see_how_long_it_is(
    call_us: float, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[int] = []

    def watched(run: Callable[[], object], repeats: int = 1) -> Sample:
        called.append(repeats)
        return Sample(call_us)

    monkeypatch.setattr(timing, "watched", watched)
    sample = timing._cpu_sampler(lambda: None)
    assert called == [1] * calls
    assert sample() == [Sample(call_us)]
    assert len(called) == (1 if calls == 1 else 3)  # to see how long it is was a sample
    sample()
    assert len(called) == (2 if calls == 1 else 4)


@pytest.mark.usefixtures("simulated")
def test_the_limits_of_a_machine_are_its_quickest_moments() -> None:
    run = sampler("copy", *[30.0] * 9, 10.0)
    assert timing.quickest_us(run, device=CPU, budget_s=0.01) == 10.0


BURNER = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
print("burning", flush=True)
until = time.monotonic() + 60
while time.monotonic() < until and os.getppid() == int(sys.argv[2]):
    pass
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system pins no process")
def test_another_process_on_the_core_does_not_show_in_a_time_on_one_thread() -> None:
    """A call of many slices of the scheduler takes twice as long by the clock, and is marked."""
    allowed, threads = os.sched_getaffinity(0), torch.get_num_threads()
    core = max(allowed)
    factor = torch.randn(640, 640)

    def call() -> None:
        for _ in range(4):
            factor @ factor

    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    command = [sys.executable, "-c", BURNER, str(core), str(os.getpid())]
    burner = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert burner.stdout is not None
        burner.stdout.readline()
        begun, own = time.perf_counter(), time.thread_time()
        for _ in range(20):
            call()
        share = (time.thread_time() - own) / (time.perf_counter() - begun)
        assert share < 0.8, "the burner does not burn"
        begun = time.thread_time()
        busy = latency({"call": call}, device=CPU, seconds=0.5)["call"]
    finally:
        burner.kill()
        burner.communicate()
        os.sched_setaffinity(0, allowed)
        torch.set_num_threads(threads)
    own_us = []
    for _ in range(5):
        begun = time.thread_time()
        call()
        own_us.append(1e6 * (time.thread_time() - begun))
    assert busy.noisy
    assert busy.time_us < 1.5 * min(own_us)
