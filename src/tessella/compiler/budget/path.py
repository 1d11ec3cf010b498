"""The order in which layers are lowered, and how far a budget reaches on that way.

Greedy by gain per damage. For each unit only precisions on the upper hull of (damage, gain) can be
on the way, each step with a worse ratio than the one before: the relaxed knapsack of Sinha and
Zoltners 1979, whose prefixes are the best mixes for their damage if damages add up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tessella.compiler.budget.mixes import Mix, Unit

LEAST_DAMAGE = 1e-12  # less is float32's own noise


@dataclass(frozen=True, kw_only=True)
class Move:
    """A unit goes to another precision.

    Attributes:
        gain_us: what it saves, after the unit's earlier moves; damage: what it adds.
    """

    unit: Unit
    precision: str
    gain_us: float
    damage: float

    @property
    def worth(self) -> float:
        """Time saved for each unit of damage."""
        return math.inf if self.damage <= 0 else self.gain_us / self.damage


def greedy(
    units: Sequence[Unit],
    gains_us: Mapping[tuple[int, str], float],
    damage: Mapping[tuple[int, str], float],
) -> list[Move]:
    """All moves that pay, the best ratio first; gains and damages by a unit's place and precision.

    What gains nothing is no move, however little it damages.
    """
    moves = []
    for index, unit in enumerate(units):
        options = {
            kind: (max(LEAST_DAMAGE, damage[index, kind]), gains_us[index, kind])
            for kind in unit.kinds
            if (index, kind) in damage and gains_us.get((index, kind), 0.0) > 0
        }
        moves += _hull(unit, options)
    return sorted(moves, key=lambda move: -move.worth)  # stable: a unit's own stay in order


def _hull(unit: Unit, options: Mapping[str, tuple[float, float]]) -> list[Move]:
    at: tuple[float, float] = (0.0, 0.0)
    moves: list[Move] = []
    while True:
        steps = [
            Move(unit=unit, precision=kind, gain_us=gain - at[1], damage=damage - at[0])
            for kind, (damage, gain) in options.items()
            if gain > at[1]
        ]
        if not steps:
            return moves
        moves.append(max(steps, key=lambda move: (move.worth, move.gain_us)))
        at = options[moves[-1].precision]


def mix_of(moves: Sequence[Move]) -> dict[str, str]:
    """The mix of precisions that these moves result in."""
    mix: dict[str, str] = {}
    for move in moves:
        mix |= move.unit.mix(move.precision)
    return mix


def reach(path: Sequence[Move], within: Callable[[Mix], bool]) -> int:
    """How many moves of the path a budget pays for, found by bisection.

    A larger budget never gets fewer: both ask about the same middle until the smaller turns back.
    """
    low, high = 0, len(path)
    if within(mix_of(path)):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if within(mix_of(path[:middle])) else (low, middle)
    return low


def repair(path: Sequence[Move], reached: int, within: Callable[[Mix], bool]) -> None:
    """Put back what broke the budget, and try to go on without it: all the way, half, a quarter.

    Nothing is returned: ``within`` remembers what it has judged.
    """
    if reached >= len(path):
        return
    offender = path[reached].unit
    others = [move for move in path[reached + 1 :] if move.unit is not offender]
    for share in (1, 2, 4):
        taken = others[: len(others) // share]
        if taken and within(mix_of([*path[:reached], *taken])):
            return
