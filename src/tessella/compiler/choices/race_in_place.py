"""Short steps of a GPU's program: what is near the fastest is tried in the program itself.

A search times a kernel alone, with empty caches, between two marks that cost as much as a short
kernel does. Among its neighbours it finds their results in the second-level cache, begins while the
one before still runs, and leaves the next one multiprocessors or not. So for the steps that weigh
most, one after the other, whole programs are measured that differ in that step's kernel or its
configuration, and the fastest is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from tessella.compiler.choices import race
from tessella.compiler.choices.choose_kernels import Choice, Tuner, as_measured
from tessella.compiler.choices.race_close_calls import is_short, may_take_over, with_first
from tessella.compiler.execution import Ground
from tessella.core.device import fingerprint
from tessella.core.events import Emit, phase
from tessella.core.record import digest
from tessella.graph.graph import Graph
from tessella.search.timing import Timing
from tessella.search.tuning import Trial

NEAR, NEAR_US = 1.25, 1.0  # times the fastest alone, or so much more: what may win in its place
MIN_SHARE = 0.004  # of the program: a step that takes less changes nothing that can be measured
MAX_STEPS, MAX_OTHERS = 20, 5  # of a bucket, steps of one problem counted once; of each of these
SECONDS = 5.0  # of measuring a program, for each second that one step may take
WORTH_IT = 0.998  # the other program must win by a fifth of a percent
NAME = "in_place"  # of what the cache keeps
VERSION = 1


def apply(graph: Graph, choices: Sequence[Choice], tuner: Tuner, emit: Emit) -> list[Choice]:
    """The choices for a graph with concrete shapes, short steps decided by the whole program.

    Steps with one problem change together. What was raced is in ``Choice.raced_us``.
    """
    chosen = list(choices)
    races = _Races(graph, tuner)
    for steps in _heaviest(chosen, tuner):
        first = chosen[steps[0]]
        winner, times_us = races.decided(chosen, steps)
        for i in steps:
            told = {**chosen[i].raced_us, **times_us}
            chosen[i] = replace(with_first(winner, chosen[i]), raced_us=told)
        if (winner.kernel, winner.config) != (first.kernel, first.config):
            what = f"{winner.kernel} {winner.config}, alone it was {first.kernel} {first.config}"
            took = f"{times_us[winner.kernel]:,.0f} µs (whole program)"
            emit(phase("race", f"{first.node.outputs[0].name}: {took}; {what}"))
    return chosen


def _heaviest(choices: Sequence[Choice], tuner: Tuner) -> list[list[int]]:
    """Steps of one problem together: those that weigh most come first."""
    if tuner.budget_s <= 0:
        return []
    total_us = sum(c.trials[0].time_us or 0.0 for c in choices)
    groups: dict[tuple[str, bool], list[int]] = {}
    for index, choice in enumerate(choices):
        if is_short(choice, tuner.target):
            key = as_measured(choice.problem).key, bool(choice.slices)
            groups.setdefault(key, []).append(index)
    weights = [
        (sum(choices[i].trials[0].time_us or 0.0 for i in steps), steps)
        for steps in groups.values()
    ]
    heavy = [(us, steps) for us, steps in weights if us >= MIN_SHARE * total_us]
    heavy.sort(key=lambda one: (-one[0], one[1]))
    return [steps for _, steps in heavy[:MAX_STEPS]]


class _Races:
    """The races of one program, in one place: most steps of all are the same, and bound once."""

    def __init__(self, graph: Graph, tuner: Tuner) -> None:
        self._graph, self._tuner = graph, tuner
        self._ground: Ground | None = None

    def decided(
        self, choices: Sequence[Choice], steps: Sequence[int]
    ) -> tuple[Trial, dict[str, float]]:
        """What steps of one problem shall run, and the program's time by kernel, as far as told.

        The decision is remembered, not the times: a lock does not keep which configurations there
        were.
        """
        tuner = self._tuner
        device = fingerprint(tuner.target).hash
        made = [(c.problem.key, c.kernel, c.config, c.slices) for c in choices]
        able = [t.kernel for t in choices[steps[0]].trials if t.refused is None]
        key = digest([NAME, steps, able, made])
        if (known := tuner.cache.get(device, key, NAME, VERSION)) is not None:
            return Trial(**known.config["trial"]), known.config["raced_us"]
        trials = [choices[steps[0]].trials[0], *_others(choices[steps[0]])]
        timings = self._timings(trials, choices, steps) if len(trials) > 1 else []
        winner, raced_us = _winner(trials, timings)
        decided: dict[str, Any] = {"trial": _plain(winner), "raced_us": raced_us}
        trial = Trial(kernel=NAME, config=decided)
        quiet = not any(timing.noisy for timing in timings)  # else another build asks again
        tuner.cache.put(device, key, VERSION, trial, lasting=quiet)
        return winner, raced_us

    def _timings(
        self, trials: Sequence[Trial], choices: Sequence[Choice], steps: Sequence[int]
    ) -> list[Timing]:
        """The time of the program with each of these trials at the steps."""
        programs = [
            (self._graph, [with_first(t, c) if i in steps else c for i, c in enumerate(choices)])
            for t in trials
        ]
        seconds = SECONDS * self._tuner.budget_s * len(programs)
        timings, self._ground = race.measured(programs, self._tuner, seconds, self._ground)
        return timings


def _winner(trials: Sequence[Trial], timings: Sequence[Timing]) -> tuple[Trial, dict[str, float]]:
    """The first trial, or that with which the program is clearly faster; and the times of both."""
    if not timings:
        return trials[0], {}
    best, timing = min(zip(trials, timings, strict=True), key=lambda one: one[1].time_us)
    is_clear = timing.time_us < WORTH_IT * timings[0].time_us
    if not is_clear or timing.noisy or timings[0].noisy:
        best, timing = trials[0], timings[0]
    return best, {trials[0].kernel: timings[0].time_us} | {best.kernel: timing.time_us}


def _others(choice: Choice) -> list[Trial]:
    """Kernels and configurations that were near the fastest by themselves, the nearest first."""
    best = choice.trials[0]
    best_us = best.time_us or 0.0
    limit_us = max(NEAR * best_us, best_us + NEAR_US)
    near = [
        trial
        for trial in _configurations(choice)
        if (trial.time_us or 0.0) <= limit_us
        and (trial.kernel, trial.config) != (best.kernel, best.config)
    ]
    return sorted(near, key=lambda trial: trial.time_us or 0.0)[:MAX_OTHERS]


def _configurations(choice: Choice) -> Iterator[Trial]:
    """Each configuration that was timed of each kernel that may take the step over."""
    for trial in choice.trials:
        if trial.refused is not None or trial.time_us is None or not may_take_over(trial, choice):
            continue
        yield trial
        for tried in trial.tried:
            if tried.refused is None and tried.time_us is not None and tried.config != trial.config:
                yield replace(trial, config=tried.config, time_us=tried.time_us)


def _plain(trial: Trial) -> dict[str, Any]:
    """A trial as the cache keeps it, without the other configurations."""
    return asdict(replace(trial, tried=(), inspection=None))
