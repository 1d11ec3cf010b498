"""Short steps of a GPU's program: what is near the fastest is tried in the program itself.

A search times a kernel alone, with empty caches, between two marks that cost as much as a short
kernel does. Among its neighbours it finds their results in the second-level cache, begins while the
one before still runs, and leaves the next one multiprocessors or not. So for the steps that weigh
most, one after the other, whole programs are measured that differ in that step's kernel or its
configuration, and the fastest is kept.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from tessella.compiler.choices import race
from tessella.compiler.choices.choose_kernels import Choice, Tuner, as_measured, constants_of
from tessella.compiler.choices.race_close_calls import is_short, may_take_over, with_first
from tessella.core.device import fingerprint
from tessella.core.errors import CompileError
from tessella.core.events import Emit, phase
from tessella.core.record import digest
from tessella.graph.graph import Graph
from tessella.kernels import catalog
from tessella.search.allowance import OutOfTime
from tessella.search.find import find
from tessella.search.timing import Timing
from tessella.search.tuning import Trial

NEAR, NEAR_US = 1.25, 1.0  # times the fastest alone, or so much more: what may win in its place
MIN_SHARE = 0.01  # of the program: a step that takes less changes little that can be measured
MAX_STEPS, MAX_OTHERS = 20, 4  # of a bucket, steps of one problem counted once; of each of these
MAX_LOST = 5  # in a row changed nothing: lighter ones will not either
MOST_SHARE, LEAST_S = 0.1, 5.0  # of the time since the build began to measure; but so long
SECONDS = 2.5  # of measuring a program, for each second that one step may take
WORTH_IT = 0.998  # the other program must win by a fifth of a percent
NAME = "in_place"  # of what the cache keeps
VERSION = 1


def apply(graph: Graph, choices: Sequence[Choice], tuner: Tuner, emit: Emit) -> list[Choice]:
    """The choices for a graph with concrete shapes, short steps decided by the whole program.

    Steps with one problem change together. What was raced is in ``Choice.raced_us``. Where the time
    for measuring ends, the rest stays as it is.
    """
    chosen = list(choices)
    races, lost = _Races(graph, tuner), 0
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
            lost = -1
        if (lost := lost + 1) == MAX_LOST:
            break
    return chosen


def _heaviest(choices: Sequence[Choice], tuner: Tuner) -> list[list[int]]:
    """The steps by their problem, the groups that take the most time first."""
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
    """The races of one program."""

    def __init__(self, graph: Graph, tuner: Tuner) -> None:
        self._graph, self._tuner = graph, tuner

    def decided(
        self, choices: Sequence[Choice], steps: Sequence[int]
    ) -> tuple[Trial, dict[str, float]]:
        """What steps of one problem shall run, and the program's time by kernel, as far as told.

        The decision is remembered, not the times: a lock does not keep which configurations there
        were.
        """
        tuner, first = self._tuner, choices[steps[0]]
        device = fingerprint(tuner.target).hash
        made = [(c.problem.key, c.kernel, c.config, c.slices) for c in choices]
        able = [t.kernel for t in first.trials if t.refused is None]
        versions = [catalog.kernel(name).version for name in able]
        key = digest([NAME, steps, able, versions, made])
        if (known := tuner.cache.get(device, key, NAME, VERSION)) is not None:
            return Trial(**known.config["trial"]), known.config["raced_us"]
        began, trials = time.monotonic(), [first.trials[0], *_others(first)]
        winner, raced_us, lasting = trials[0], dict[str, float](), len(trials) == 1
        allowance = tuner.allowance
        most_s = max(LEAST_S, MOST_SHARE * allowance.since_s)
        if not lasting and allowance.optional_s < most_s:
            with contextlib.suppress(OutOfTime):  # every step has a kernel
                timings = self._timings(trials, choices, steps)
                winner, raced_us = self._winner(first, trials, timings)
                lasting = not any(timing.noisy for timing in timings)  # else another build asks
        decided: dict[str, Any] = {"trial": _plain(winner), "raced_us": raced_us}
        trial = Trial(kernel=NAME, config=decided)
        tuner.cache.put(device, key, VERSION, trial, lasting=lasting)
        allowance.optional_s += time.monotonic() - began
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
        return race.measured(programs, self._tuner, seconds)

    def _winner(
        self, choice: Choice, trials: Sequence[Trial], timings: Sequence[Timing]
    ) -> tuple[Trial, dict[str, float]]:
        """The first trial, or that with which the program is clearly the fastest, if it is right;
        and the times of both.
        """
        first, kept = trials[0], timings[0]
        for trial, timing in sorted(
            zip(trials, timings, strict=True), key=lambda one: one[1].time_us
        ):
            if timing.time_us >= WORTH_IT * kept.time_us:
                break
            if timing.noisy or kept.noisy:
                continue
            if (right := self._checked(choice, trial)) is not None:
                return right, {first.kernel: kept.time_us} | {right.kernel: timing.time_us}
        return first, {first.kernel: kept.time_us}

    def _checked(self, choice: Choice, trial: Trial) -> Trial | None:
        """The trial as a search has it that tries nothing else, and compares ours with float64;
        None if it is wrong.
        """
        tuner, row = self._tuner, catalog.kernel(trial.kernel)
        problem = as_measured(choice.problem)
        with contextlib.suppress(CompileError):
            found = find(
                problem,
                constants_of(choice.node, problem, tuner.constants),
                target=tuner.target,
                options=replace(tuner.options, algorithms=[row.algorithm]),
                candidates=[(row, trial.config)],
            )
            same = (t for t in found if (t.kernel, t.config) == (trial.kernel, trial.config))
            return next((t for t in same if t.refused is None), None)
        return None


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
