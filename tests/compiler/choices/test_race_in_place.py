"""Short steps of a GPU's program: the whole program decides among what was near by itself."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tessella.compiler.choices import choose_kernels, race, race_close_calls, race_in_place
from tessella.compiler.choices.choose_kernels import Choice, Tuner
from tessella.core.events import silent
from tessella.graph import Graph
from tessella.search.allowance import Allowance
from tessella.search.evidence import Candidate
from tessella.search.timing import Timing
from tessella.search.tuning import Lock, TimingCache, Trial, Tried
from tests.support.networks import captured

# alone: the first one's configurations, then the other's; 13.0 is too far, 10.9 was refused, and
# the third configuration is wrong when it is compared with float64
FIRST = ((0, 10.0), (1, 10.4), (2, 13.0), (3, 10.1))
TRIALS = (
    Trial(
        kernel="conv2d.onednn",
        config={"tile": 0},
        time_us=10.0,
        tried=tuple(Tried(config={"tile": tile}, time_us=us) for tile, us in FIRST),
    ),
    Trial(kernel="conv2d.aten", time_us=10.5, workspace_bytes=64),
    Trial(kernel="reference", time_us=10.9, refused="for this test"),
)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return captured("lenet").at_batch(2)


def tuner_of(graph: Graph, cache: TimingCache, budget_s: float = 0.01) -> Tuner:
    constants = {v.name: t for v, t in graph.constants.items()}
    return Tuner(target="cpu", math="ieee", constants=constants, cache=cache, budget_s=budget_s)


@functools.cache
def choices_of(graph: Graph) -> list[Choice]:
    """LeNet's steps: of the convolutions with what stands above, the rest light."""
    made = choose_kernels.apply(graph, {}, tuner_of(graph, TimingCache(), 0.0), silent, "test")
    return [
        replace(
            c, trials=TRIALS if c.node.op == "conv2d" else (replace(c.trials[0], time_us=0.01),)
        )
        for c in made
    ]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What the races were of; a CPU's steps count as a GPU's."""
    monkeypatch.setattr(race_close_calls, "is_gpu", lambda target: True)
    return []


def decided(
    graph: Graph,
    us: dict[str, float],
    asked: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    cache: TimingCache,
    choices: list[Choice],
    noisy: bool = False,
) -> list[Choice]:
    """The pass, where a program takes what ``us`` says of its convolutions, and 1 µs for others."""

    def measured(programs: race.Programs, *_: object) -> list[Timing]:
        convolutions = [[c for c in made if c.node.op == "conv2d"] for _, made in programs]
        asked.append([", ".join(map(name, made)) for made in convolutions])
        times = [sum(us.get(name(c), 1.0) for c in made) for made in convolutions]
        return [Timing(time_us=time_us, spread_us=0.0, noisy=noisy) for time_us in times]

    monkeypatch.setattr(race, "measured", measured)
    monkeypatch.setattr(race_in_place, "find", searched)
    return race_in_place.apply(graph, choices, tuner_of(graph, cache), silent)


def searched(*_: object, candidates: Sequence[Candidate], **__: object) -> tuple[Trial, ...]:
    """The search of one candidate, which a third configuration does not survive."""
    ((row, config),) = candidates
    refused = "wrong" if config.get("tile") == 3 else None
    return (Trial(kernel=row.id, config=config, time_us=9.0, workspace_bytes=8, refused=refused),)


def name(choice: Choice) -> str:
    return f"{choice.kernel.split('.')[1]} {choice.config.get('tile', '-')}"


def convolutions(choices: list[Choice]) -> list[Choice]:
    return [c for c in choices if c.node.op == "conv2d"]


@pytest.mark.parametrize(
    ("us", "taken", "raced_us"),
    [
        ({"onednn 0": 100.0, "onednn 1": 99.0, "aten -": 99.5}, "onednn 1", {"onednn": 198.0}),
        ({"onednn 0": 100.0, "onednn 1": 99.9, "aten -": 99.0}, "aten -",
         {"onednn": 199.0, "aten": 198.0}),
        ({"onednn 0": 100.0, "onednn 1": 99.9, "aten -": 99.9}, "onednn 0", {"onednn": 200.0}),
    ],
)  # fmt: skip
def test_what_makes_the_program_faster_is_taken_for_each_step(
    graph: Graph,
    us: dict[str, float],
    taken: str,
    raced_us: dict[str, float],
    asked: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two convolutions of two problems, one race after the other; nothing far or refused."""
    cache, choices = Lock(), choices_of(graph)
    made = decided(graph, us, asked, monkeypatch, cache, choices)
    assert [name(c) for c in convolutions(made)] == [taken, taken]
    assert asked[0] == [
        "onednn 0, onednn 0", "onednn 3, onednn 0", "onednn 1, onednn 0", "aten -, onednn 0",
    ]  # fmt: skip
    assert asked[1][0] == f"{taken}, onednn 0"
    assert len(asked) == 2
    last = convolutions(made)[1]
    assert {k.split(".")[1]: us for k, us in last.raced_us.items()} == raced_us
    was_first = taken == "onednn 0"
    assert last.trials[0].workspace_bytes == (0 if was_first else 8)  # its own, not the first's
    assert all(a is b for a, b in zip(made, choices, strict=True) if b.node.op != "conv2d")
    # a lock remembers the decision, and not which configurations there were
    plain = [replace(c, trials=tuple(replace(t, tried=()) for t in c.trials)) for c in choices]
    again = decided(graph, us, asked, monkeypatch, Lock(lines=cache.used), plain)
    assert [(name(c), c.raced_us) for c in again] == [(name(c), c.raced_us) for c in made]
    assert len(asked) == 2


def test_what_is_not_asked(
    graph: Graph, asked: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cases: dict[str, Any] = {"SHORT_US": (race_close_calls, 9.9), "MIN_SHARE": (race_in_place, 0.6)}
    for limit, (module, value) in cases.items():
        with monkeypatch.context() as changed:
            changed.setattr(module, limit, value)
            decided(graph, {}, asked, monkeypatch, TimingCache(), choices_of(graph))
    monkeypatch.setattr(race_close_calls, "is_gpu", lambda target: False)
    decided(graph, {}, asked, monkeypatch, TimingCache(), choices_of(graph))
    assert asked == []


def test_a_busy_machine_changes_nothing_and_is_asked_again(
    graph: Graph, asked: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    us = {"onednn 0": 100.0, "onednn 1": 90.0, "aten -": 50.0}
    cache, choices = TimingCache(), choices_of(graph)
    for noisy, taken in ((True, "onednn 0"), (False, "aten -")):
        made = decided(graph, us, asked, monkeypatch, cache, choices, noisy)
        assert [name(c) for c in convolutions(made)] == [taken, taken]
    assert len(asked) == 4
    # where the time for measuring has ended, every step has a kernel all the same
    monkeypatch.setattr(race, "measured", lambda programs, tuner, *_: tuner.allowance.spend())
    for allowance in (Allowance(seconds=0.0, measured=True), Allowance(optional_s=99.0)):
        tuner = replace(tuner_of(graph, TimingCache()), allowance=allowance)
        made = race_in_place.apply(graph, choices, tuner, silent)
        assert [name(c) for c in convolutions(made)] == ["onednn 0", "onednn 0"]
    # what the check has found wrong since is not taken from the cache
    wrong = [
        replace(c, trials=tuple(replace(t, refused="wrong") if "aten" in t.kernel else t
                                for t in c.trials))
        for c in choices
    ]  # fmt: skip
    made = decided(graph, us, asked, monkeypatch, cache, wrong)
    assert [name(c) for c in convolutions(made)] == ["onednn 1", "onednn 1"]
