"""Close calls: which steps are asked again, and that the whole program decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tessella.compiler.choices import choose_kernels, race, race_close_calls
from tessella.compiler.choices.choose_kernels import Choice, Tuner
from tessella.core.events import Event
from tessella.graph import Graph
from tessella.graph.graph import Value
from tessella.search.tuning import TimingCache, Trial
from tests.support.networks import captured, plan

KERNELS = ("conv2d.onednn", "conv2d.aten")


def choices_of(graph: Graph) -> list[Choice]:
    """LeNet's steps: two heavy convolutions, the rest light."""
    tuner = tuner_of(graph, 0.0)
    made = choose_kernels.apply(graph, {}, tuner, lambda event: None, "test")
    return [
        replace(c, trials=tuple(Trial(kernel=k, time_us=100.0, spread_us=1.0) for k in KERNELS))
        if c.node.op == "conv2d"
        else replace(c, trials=(replace(c.trials[0], time_us=0.5),))
        for c in made
    ]


def tuner_of(graph: Graph, budget_s: float) -> Tuner:
    constants = {v.name: t for v, t in graph.constants.items()}
    return Tuner(
        target="cpu", math="ieee", constants=constants, cache=TimingCache(), budget_s=budget_s
    )


def decided(
    times: dict[str, float], choices: Sequence[Choice], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Choice], list[str]]:
    """The pass, where a program takes the sum of what ``times`` says of its convolutions."""

    def programs_us(programs: race.Programs, tuner: Tuner, *, seconds: float) -> list[float]:
        return [sum(times.get(c.kernel, 0.0) for c in made) for _, made in programs]

    monkeypatch.setattr(race, "times_us", programs_us)
    told: list[Event] = []
    graph = captured("lenet").at_batch(2)
    made = race_close_calls.apply(graph, choices, tuner_of(graph, 0.01), told.append)
    return made, [str(event) for event in told]


@pytest.fixture
def choices() -> list[Choice]:
    return choices_of(captured("lenet").at_batch(2))


def convolutions(choices: Sequence[Choice]) -> list[str]:
    return [c.kernel for c in choices if c.node.op == "conv2d"]


def test_the_faster_program_decides(choices: list[Choice], monkeypatch: pytest.MonkeyPatch) -> None:
    made, told = decided({"conv2d.onednn": 90.0, "conv2d.aten": 50.0}, choices, monkeypatch)
    assert convolutions(made) == ["conv2d.aten"] * 2
    first = next(c for c in made if c.node.op == "conv2d")
    assert first.raced_us == {"conv2d.onednn": 180.0, "conv2d.aten": 140.0}
    assert len(told) == 2
    assert "whole program" in told[0]


def test_what_was_chosen_stays_unless_the_other_is_clearly_faster(
    choices: list[Choice], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = decided({"conv2d.onednn": 100.0, "conv2d.aten": 99.8}, choices, monkeypatch)
    assert convolutions(made) == ["conv2d.onednn"] * 2
    assert all(c.raced_us for c in made if c.node.op == "conv2d")


def test_what_one_batch_size_decided_holds_for_the_next(
    choices: list[Choice], monkeypatch: pytest.MonkeyPatch
) -> None:
    raced: list[int] = []

    def programs_us(programs: race.Programs, *_: object, **__: object) -> list[float]:
        raced.append(len(programs))
        return [sum(c.kernel == "conv2d.onednn" for c in made) for _, made in programs]

    monkeypatch.setattr(race, "times_us", programs_us)
    graph = captured("lenet")
    tuner = tuner_of(graph, 0.01)
    first = race_close_calls.apply(graph.at_batch(2), choices, tuner, lambda event: None)
    assert convolutions(first) == ["conv2d.aten"] * 2
    assert raced == [2, 2]
    next_ = choices_of(graph.at_batch(4))
    second = race_close_calls.apply(graph.at_batch(4), next_, tuner, lambda event: None)
    assert convolutions(second) == ["conv2d.aten"] * 2
    assert raced == [2, 2]


def test_long_steps_of_a_cpu_are_not_asked_again(choices: list[Choice]) -> None:
    """Their data do not fit its caches, alone or in the program."""
    long = [
        replace(c, trials=tuple(replace(t, time_us=80 * (t.time_us or 0)) for t in c.trials))
        for c in choices
    ]
    assert race_close_calls._close_calls(long, "cpu") == []
    assert race_close_calls._close_calls(long, "sm_90") != []


@pytest.mark.parametrize(
    ("device", "behind_us", "program_us", "taken"),
    [
        ("cuda", 1.0, 90.0, True), ("cuda", 1.0, 99.9, False), ("cuda", 2.0, 90.0, False),
        ("cpu", 20.0, 90.0, True), ("cpu", 20.0, 99.9, False), ("cpu", 30.0, 90.0, False),
    ],
)  # fmt: skip
def test_ours_together_where_a_library_wins_by_less_than_a_start(
    device: str,
    behind_us: float,
    program_us: float,
    taken: bool,
    choices: list[Choice],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is asked so is no close call then, in whichever way it was decided."""
    library, ours = {
        "cuda": ("conv2d.cudnn", "conv2d.implicit_gemm.sm90"),
        "cpu": ("conv2d.onednn", "conv2d.avx2"),
    }[device]
    times = {library: 10.0, "reference": 10.9, ours: 10.0 + behind_us}
    trials = tuple(Trial(kernel=k, time_us=t, spread_us=0.01) for k, t in times.items())
    measured = [replace(c, trials=trials) if c.node.op == "conv2d" else c for c in choices]
    monkeypatch.setattr(race_close_calls, "torch_device", lambda target: torch.device(device))
    made, told = decided({library: 50.0, ours: program_us / 2}, measured, monkeypatch)
    assert convolutions(made) == [ours if taken else library] * 2
    asked = behind_us < {"cuda": 2.0, "cpu": 30.0}[device]
    raced = {library: 100.0, ours: program_us} if asked else {}
    assert all(c.raced_us == raced for c in made if c.node.op == "conv2d")
    assert len(told) == asked


@pytest.mark.parametrize(("other_us", "spread_us", "close"), [
    (104.0, 1.0, True), (106.0, 1.0, False), (120.0, 12.0, True), (130.0, 12.0, False),
])  # fmt: skip
def test_what_is_close(
    choices: list[Choice], other_us: float, spread_us: float, close: bool
) -> None:
    first, second = KERNELS
    trials = (
        Trial(kernel=first, time_us=100.0, spread_us=spread_us),
        Trial(kernel=second, time_us=other_us, spread_us=spread_us),
    )
    changed = [replace(c, trials=trials) if c.node.op == "conv2d" else c for c in choices]
    assert bool(race_close_calls._close_calls(changed, "cpu")) is close


def test_light_steps_and_views_are_left_alone(choices: list[Choice]) -> None:
    light = [
        replace(c, trials=tuple(replace(t, time_us=0.5) for t in c.trials))
        if c.node.op == "conv2d"
        else replace(c, trials=(replace(c.trials[0], time_us=1000.0),))
        for c in choices
    ]
    assert race_close_calls._close_calls(light, "cpu") == []
    view = next(c for c in choices if c.node.op == "reshape")
    trials = (view.trials[0], Trial(kernel="reference", time_us=0.5))
    assert race_close_calls._within_noise(replace(view, trials=trials)) is None


def test_a_real_build_takes_it_down_and_a_second_one_repeats_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(race_close_calls, "CLOSE", 100.0)  # everything is close
    made = plan(captured("lenet"), (1, 1, 1), budget_s=0.001)
    raced = [c for c in made.tuning if c.program_us is not None]
    assert len(raced) >= 2
    assert "close call" in str(made)
    assert "(taken)" in str(made)
    again = plan(captured("lenet"), (1, 1, 1), budget_s=0.001, lock=made.lock)
    assert again.tuning == made.tuning
    assert not [c for c in plan(captured("lenet"), (1, 1, 1)).tuning if c.program_us is not None]


@pytest.mark.parametrize(
    ("dtype", "mean", "deviation"),
    [("float32", 0, 1), ("float16", 0, 1), ("uint8", 127.5, 73.9), ("int64", 0, 0)],
)
def test_programs_run_on_inputs_like_real_ones(dtype: str, mean: float, deviation: float) -> None:
    image = Value("image", dtype, (4, 3, 64, 64))
    made = race.sample(image, torch.device("cpu"))
    assert (tuple(made.shape), made.dtype) == (image.shape, getattr(torch, dtype))
    assert made.double().mean() == pytest.approx(mean, abs=0.02 * deviation)
    assert made.double().std() == pytest.approx(deviation, rel=0.02)
    assert torch.equal(made, race.sample(image, torch.device("cpu")))
