"""The greedy way and how far a budget reaches on it."""

from __future__ import annotations

import itertools
import random

import pytest

from tessella.compiler.budget.mixes import Unit
from tessella.compiler.budget.path import greedy, mix_of, reach, repair

KINDS = ("bf16", "int8")


def units(count: int) -> list[Unit]:
    return [Unit(layers=(f"layer{i}",), kinds=KINDS) for i in range(count)]


@pytest.mark.parametrize("seed", range(20))
def test_every_prefix_is_the_fastest_mix_for_its_damage(seed: int) -> None:
    rng, some = random.Random(seed), units(5)
    keys = [(i, kind) for i in range(5) for kind in KINDS]
    gains = {key: rng.choice([0.0, rng.random()]) for key in keys}
    damage = {key: rng.random() + 0.01 for key in keys}

    def total(mix) -> tuple[float, float]:
        taken = [(int(name[5:]), kind) for name, kind in mix.items()]
        return sum(damage[k] for k in taken), sum(gains[k] for k in taken)

    path = greedy(some, gains, damage)
    everything = [
        total({f"layer{i}": kind for i, kind in enumerate(chosen) if kind})
        for chosen in itertools.product((None, *KINDS), repeat=5)
    ]
    for end in range(len(path) + 1):
        cost, gain = total(mix_of(path[:end]))
        assert gain >= max(g for d, g in everything if d <= cost + 1e-12) - 1e-9
        assert cost == pytest.approx(sum(m.damage for m in path[:end]))


def test_what_gains_nothing_or_was_refused_is_no_move() -> None:
    gains = {(0, "bf16"): 0.0, (0, "int8"): 5.0, (1, "bf16"): 2.0, (1, "int8"): 9.0}
    damage = {(0, "bf16"): 0.0, (0, "int8"): 1.0, (1, "bf16"): 0.0}
    moves = greedy(units(2), gains, damage)
    assert mix_of(moves) == {"layer0": "int8", "layer1": "bf16"}
    assert [m.unit.layers[0] for m in moves] == ["layer1", "layer0"]


@pytest.mark.parametrize("seed", range(20))
def test_a_larger_budget_never_reaches_less_far_though_losses_jump(seed: int) -> None:
    rng = random.Random(seed)
    path = greedy(
        units(30), {(i, "bf16"): 1.0 for i in range(30)}, {(i, "bf16"): i for i in range(30)}
    )
    losses = [0.0, *(max(0.0, i / 10 + rng.gauss(0, 1)) for i in range(30))]
    asked: set[int] = set()

    def reached(budget: float) -> int:
        def within(mix) -> bool:
            asked.add(len(mix))
            return losses[len(mix)] <= budget

        return reach(path, within)

    ends = [reached(b) for b in (0.1, 0.3, 0.5, 1.0, 2.0, 4.0)]
    assert ends == sorted(ends)
    assert all(losses[end] <= b for end, b in zip(ends, (0.1, 0.3, 0.5, 1.0, 2.0, 4.0)))
    asked.clear()
    reached(0.3)
    assert len(asked) <= 6


def test_repair_goes_on_without_the_offender() -> None:
    path = greedy(
        units(9), {(i, "int8"): 1.0 for i in range(9)}, {(i, "int8"): i for i in range(9)}
    )
    judged: list[dict[str, str]] = []

    def within(mix) -> bool:
        judged.append(dict(mix))
        return "layer4" not in mix

    end = reach(path, within)
    assert end == 4
    repair(path, end, within)
    assert judged[-1] == {f"layer{i}": "int8" for i in range(9) if i != 4}
