"""Close calls: where two kernels of a step were within noise, the whole program is raced with each.

A step measured alone has warm caches and the machine to itself; its neighbours change both, and a
burst of other work falls into one step's few milliseconds. So the kernels whose order the search
cannot tell apart are asked again in the program, the heaviest steps first, greedily.

A kernel of ours costs less among others than a library's, which no search of single kernels sees:
on a GPU it starts while the one before still runs (``device.overlap``), on a CPU it is little code,
where a call of torch's is much that the other steps have thrown out of the caches. So first, all
that a library wins by less than that are asked together. Short steps of a GPU have a pass of their
own, ``race_in_place``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from tessella.compiler.choices import race
from tessella.compiler.choices.choose_kernels import Choice, Tuner, as_measured
from tessella.core.architectures import is_gpu
from tessella.core.device import torch_device
from tessella.core.events import Emit, phase
from tessella.graph.graph import Graph
from tessella.kernels import catalog
from tessella.search.evidence import kind
from tessella.search.tuning import Trial

CLOSE = 0.05  # of the winner's time; or the two spreads together, if that is more
MIN_SHARE = 0.01  # of the program: a step that takes less changes nothing that can be measured
MAX_CALLS = 6  # a bucket
# On a CPU, so long a step brings all its data into the caches itself: alone or among others, its
# time is the same. In ResNet-50 at batches of 16 and 32 no race of two such gained 2 %; at 4 images
# a race takes 3 s to tell one twentieth of a twentieth of the program
LONG_US = 2000.0
# On a GPU, among others such a step's time is another than alone: caches and starts are most of it
SHORT_US = 25.0
SECONDS = 10.0  # of one race, for each second that one step may take
WORTH_IT = 0.995  # the other kernel's program must win by half a percent
# What overlap hides of a kernel on a GPU: about 1 µs, and as much noise as is usual; on a CPU
# torch's products of 4 to 11 µs took 20 to 44 among the steps of a MobileNetV3, ours the same 10
START_US = {"cuda": 1.5, "cpu": 25.0}


def apply(graph: Graph, choices: Sequence[Choice], tuner: Tuner, emit: Emit) -> list[Choice]:
    """The choices for a graph with concrete shapes, close calls decided by the whole program.

    Steps with one problem change together. What was raced is in ``Choice.raced_us``.
    """
    if tuner.budget_s <= 0:
        return list(choices)
    chosen, asked = _overlapped(graph, list(choices), tuner, emit)
    for steps, other in _close_calls(chosen, tuner.target, asked):
        before = chosen[steps[0]]
        group = kind(as_measured(before.problem), 0)[0], str(bool(before.slices))
        pair = (*group, *sorted((before.kernel, other.kernel)))
        swapped = {i: with_first(other, chosen[i]) for i in steps}
        changed = [swapped.get(i, choice) for i, choice in enumerate(chosen)]
        if (winner := tuner.raced.get(pair)) is not None:
            chosen = changed if winner == other.kernel else chosen
            continue
        programs = [(graph, chosen), (graph, changed)]
        kept_us, other_us = race.times_us(programs, tuner, seconds=SECONDS * tuner.budget_s)
        raced_us = {before.kernel: kept_us, other.kernel: other_us}
        if other_us < WORTH_IT * kept_us:
            chosen = changed
        for i in steps:
            chosen[i] = replace(chosen[i], raced_us={**chosen[i].raced_us, **raced_us})
        tuner.raced[pair] = chosen[steps[0]].kernel
        name = before.node.outputs[0].name
        emit(phase("race", f"{name}: {_told(raced_us)} (whole program); {chosen[steps[0]].kernel}"))
    return chosen


def _overlapped(
    graph: Graph, choices: list[Choice], tuner: Tuner, emit: Emit
) -> tuple[list[Choice], frozenset[int]]:
    """Ours for all steps that a library wins by less than a start, if that program is faster.

    Returns:
        The choices, and which steps were asked.
    """
    most_us = START_US[torch_device(tuner.target).type]
    changed = list(choices)
    for index, choice in enumerate(choices):
        best = choice.trials[0]
        if best.time_us is None or catalog.kernel(best.kernel).source == "tessella":
            continue
        for trial in choice.trials[1:]:
            ours = catalog.kernel(trial.kernel).source == "tessella"
            ours = ours and may_take_over(trial, choice)
            if ours and trial.refused is None and trial.time_us is not None:
                if trial.time_us - best.time_us <= most_us:
                    changed[index] = with_first(trial, choice)
                break
    asked = [i for i, (a, b) in enumerate(zip(choices, changed, strict=True)) if a is not b]
    if not asked:
        return choices, frozenset()
    programs = [(graph, choices), (graph, changed)]
    kept_us, ours_us = race.times_us(programs, tuner, seconds=SECONDS * tuner.budget_s)
    emit(phase("race", f"{len(asked)} steps: {kept_us:,.0f} µs, with our kernels {ours_us:,.0f}"))
    is_faster = ours_us < WORTH_IT * kept_us
    chosen = changed if is_faster else choices
    for i in asked:
        raced_us = {choices[i].kernel: kept_us, changed[i].kernel: ours_us}
        chosen[i] = replace(chosen[i], raced_us={**chosen[i].raced_us, **raced_us})
    # a CPU's steps together say nothing of each, as the bound is far: close calls are asked again
    is_decided = is_faster or torch_device(tuner.target).type != "cpu"
    return chosen, frozenset(asked if is_decided else ())


def _told(times_us: dict[str, float]) -> str:
    return ", ".join(f"{kernel} {time:,.0f} µs" for kernel, time in times_us.items())


def _close_calls(
    choices: Sequence[Choice], target: str, asked: Collection[int] = ()
) -> list[tuple[list[int], Trial]]:
    """Steps of one problem, and the kernel that may be as good: the heaviest first.

    Args:
        asked: steps that are decided already.
    """
    groups: dict[tuple[str, bool], list[int]] = {}
    for index, choice in enumerate(choices):
        if index not in asked:
            key = as_measured(choice.problem).key, bool(choice.slices)
            groups.setdefault(key, []).append(index)
    total_us = sum(c.trials[0].time_us or 0.0 for c in choices)
    found = []
    for steps in groups.values():
        first = choices[steps[0]]
        heavy_us = len(steps) * (first.trials[0].time_us or 0.0)
        other = _within_noise(first)
        is_asked = not _is_long(first, target) and not is_short(first, target)
        if other is not None and heavy_us >= MIN_SHARE * total_us and is_asked:
            found.append((heavy_us, steps, other))
    found.sort(key=lambda call: (-call[0], call[1]))
    return [(steps, other) for _, steps, other in found[:MAX_CALLS]]


def is_short(choice: Choice, target: str) -> bool:
    """Whether a step is one that ``race_in_place`` asks for."""
    best = choice.trials[0]
    is_counted = best.time_us is not None and not catalog.kernel(best.kernel).aliases
    return is_gpu(target) and is_counted and (best.time_us or 0.0) <= SHORT_US


def _is_long(choice: Choice, target: str) -> bool:
    return target == "cpu" and (choice.trials[0].time_us or 0.0) > LONG_US


def _within_noise(choice: Choice) -> Trial | None:
    """The next kernel that could take the step over, if its time says nothing against it."""
    best = choice.trials[0]
    if best.time_us is None or catalog.kernel(best.kernel).aliases:
        return None
    for trial in choice.trials[1:]:
        if trial.refused is not None or trial.time_us is None or not may_take_over(trial, choice):
            continue
        margin_us = max(CLOSE * best.time_us, (best.spread_us or 0.0) + (trial.spread_us or 0.0))
        return trial if trial.time_us - best.time_us <= margin_us else None
    return None


def may_take_over(trial: Trial, choice: Choice) -> bool:
    """No view, whose memory the other steps would have to know of; a slice is written into."""
    row = catalog.kernel(trial.kernel)
    return not row.aliases and (not choice.slices or row.writes_out)


def with_first(trial: Trial, choice: Choice) -> Choice:
    """The choice with another winner."""
    others = (t for t in choice.trials if t.kernel != trial.kernel)
    return replace(choice, trials=(trial, *others))
