"""Learning-rate policies: what the learning rate is at a point of training, as pure functions.

They lie in core because two rooms need the same curve: training follows it and the studio draws it.
The names and formulas of the first seven are Caffe's (``caffe.proto``, SolverParameter.lr_policy),
with progress for iterations: ``t`` runs from 0 (start) to 1 (end of training).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tessella.core.errors import UsageError

PolicyName = Literal[
    "fixed", "step", "multistep", "exponential", "inverse", "polynomial", "sigmoid", "cosine",
    "onecycle",
]  # fmt: skip

# The shape of torch's OneCycleLR: the rate begins at a 25th of its peak and ends a factor of 10⁴
# lower than it began; the momentum swings by 0.05 either way, lowest where the rate is highest.
_CYCLE_START, _CYCLE_END, _CYCLE_MOMENTUM = 1 / 25, 1e-4, 0.05


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How the learning rate changes. Points in time are fractions of the whole training, 0 to 1.

    Attributes:
        name: fixed · step · multistep · exponential · inverse · polynomial · sigmoid · cosine ·
            onecycle (rises for the warm-up, falls for the rest, the momentum against it).
        gamma: step, multistep: factor at each step. exponential: factor reached at the end.
            inverse: ``(1 + gamma·t) ** −power``.
            sigmoid: steepness, ``1 / (1 + exp(gamma·(t − 0.5)))``.
        power: exponent of inverse and polynomial.
        steps: step: how many steps in all. multistep: see ``at``.
        at: multistep: the fractions at which the rate is multiplied by gamma.
        warmup: fraction of training in which the rate rises linearly from 0 to the policy's value;
            in onecycle along half a cosine, from a 25th of the base rate.
        floor: cosine and polynomial end at this fraction of the base rate.
    """

    name: PolicyName = "cosine"
    gamma: float = 0.1
    power: float = 1.0
    steps: int = 3
    at: tuple[float, ...] = (0.5, 0.75)
    warmup: float = 0.0
    floor: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.warmup < 1.0:
            raise UsageError("warm-up is a fraction of training, 0 to 1", seen=self.warmup)
        if self.gamma <= 0 or self.steps < 1 or not 0.0 <= self.floor <= 1.0:
            raise UsageError(
                "a learning-rate policy needs gamma > 0, steps ≥ 1 and a floor from 0 to 1",
                seen=f"gamma={self.gamma}, steps={self.steps}, floor={self.floor}",
            )

    def factor(self, t: float) -> float:
        """The learning rate at progress ``t`` (0 to 1), as a multiple of the base rate."""
        t = min(max(t, 0.0), 1.0)
        factor = _FORMULAS[self.name](self, t)
        if self.warmup and t < self.warmup and self.name != "onecycle":
            factor *= t / self.warmup
        return factor

    def momentum(self, base: float, t: float) -> float:
        """The solver's momentum at progress ``t``: ``base``, which only onecycle changes."""
        if self.name != "onecycle" or not base:
            return base
        low = max(base - _CYCLE_MOMENTUM, 0.0)
        high = max(base, min(base + _CYCLE_MOMENTUM, 1.0 - _CYCLE_MOMENTUM))
        return _cycle(self, min(max(t, 0.0), 1.0), high, low, high)

    def curve(self, base: float, points: int = 200) -> list[tuple[float, float]]:
        """``points`` pairs (progress, learning rate) from start to end, for drawing."""
        return [(i / (points - 1), base * self.factor(i / (points - 1))) for i in range(points)]


def _sigmoid(p: Policy, t: float) -> float:
    return 1.0 / (1.0 + math.exp(min(500.0, p.gamma * (t - 0.5))))


def _steps_done(p: Policy, t: float) -> int:
    """Whole steps at ``t``. Iteration 29 of 100 is 0.29, and 0.29 · 100 is less than 29."""
    return min(p.steps - 1, math.floor(t * p.steps + 1e-9))


def _cycle(p: Policy, t: float, start: float, middle: float, end: float) -> float:
    """Half a cosine from ``start`` to ``middle`` in the warm-up, then another one to ``end``."""
    rises = t < p.warmup
    part = t / p.warmup if rises else (t - p.warmup) / (1.0 - p.warmup)
    a, b = (start, middle) if rises else (middle, end)
    return b + (a - b) * 0.5 * (1.0 + math.cos(math.pi * part))


_FORMULAS: dict[str, Callable[[Policy, float], float]] = {
    "fixed": lambda p, t: 1.0,
    "step": lambda p, t: p.gamma ** _steps_done(p, t),
    "multistep": lambda p, t: p.gamma ** sum(t >= point for point in p.at),
    "exponential": lambda p, t: p.gamma**t,
    "inverse": lambda p, t: (1.0 + p.gamma * t) ** -p.power,
    "polynomial": lambda p, t: p.floor + (1.0 - p.floor) * (1.0 - t) ** p.power,
    "sigmoid": _sigmoid,
    "cosine": lambda p, t: p.floor + (1.0 - p.floor) * 0.5 * (1.0 + math.cos(math.pi * t)),
    "onecycle": lambda p, t: _cycle(p, t, _CYCLE_START, 1.0, _CYCLE_START * _CYCLE_END),
}
