"""What a search may leave out, as problems of one kind have shown it.

Problems are of one kind if they differ only in the batch and in how many channels there are. Of
neighbours, where no such number is more than doubled, the same kernels win: in ResNet-50 and
DenseNet-121 at batches of 1 to 32 on a CPU, the winner was within 1.1 of the best at the neighbour
in 99 of 100 steps, and what was lost in the others by taking the neighbour's was below 2 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tessella.core.record import digest
from tessella.kernels.catalog import Config, Kernel
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta
from tessella.search.tuning import Trial

NEIGHBOUR = 2.0  # times a size, at most
NEAR = 1.3  # times the best: a kernel that took longer at the neighbour is left out
CLOSE = 1.2  # times its kernel's best: so are configurations that took longer
NOISE = 1.5  # times these, where the timing was noisy
DIVISORS = 64  # of channels: what divides them up to here decides how tiles fit

Candidate = tuple[Kernel, Config]


@dataclass(frozen=True)
class _Known:
    sizes: tuple[int, ...]
    problem: str
    trials: tuple[Trial, ...]


@dataclass
class Evidence:
    """The trials of a build by the kind of their problem."""

    _by_kind: dict[str, dict[str, _Known]] = field(default_factory=dict)
    _right: set[tuple[str, str, str]] = field(default_factory=set)

    def has_shown_right(self, problem: Problem, kernel: str, config: Config) -> bool:
        """Whether a configuration was compared with float64 on a problem of this kind.

        At other sizes, what is built of it is compared with the float32 network.
        """
        return (kind(problem)[0], kernel, digest(config)) in self._right

    def add_right(self, problem: Problem, kernel: str, config: Config) -> None:
        self._right.add((kind(problem)[0], kernel, digest(config)))

    def add(self, problem: Problem, trials: Sequence[Trial]) -> None:
        shared, sizes = kind(problem)
        known = _Known(sizes, problem.key, tuple(trials))
        self._by_kind.setdefault(shared, {})[problem.key] = known

    def of_neighbour(self, problem: Problem) -> tuple[tuple[Trial, ...], float]:
        """The trials of the nearest problem of this kind, and how far it is: 1 is one size doubled.

        None that are farther than ``NEIGHBOUR``; then there are no trials.
        """
        shared, sizes = kind(problem)
        best, nearest = math.log2(NEIGHBOUR), None
        for known in self._by_kind.get(shared, {}).values():
            steps = [abs(math.log2(a / b)) for a, b in zip(sizes, known.sizes, strict=True)]
            distance = max(steps, default=0.0)
            if known.problem != problem.key and distance <= best:
                best, nearest = distance, known
        return ((), 0.0) if nearest is None else (nearest.trials, best)

    def shortlist(
        self, problem: Problem, configs: dict[Kernel, tuple[Config, ...]]
    ) -> tuple[list[Candidate], dict[str, float]]:
        """The candidates that may win, and how far the kernels are behind that are left out.

        Args:
            configs: those of each kernel that fits, the most promising first.

        Returns:
            Nothing without a neighbour.
        """
        trials, distance = self.of_neighbour(problem)
        known = {trial.kernel: trial for trial in trials}
        ran = [t.time_us for t in trials if t.refused is None and t.time_us is not None]
        chosen: list[Candidate] = []
        behind: dict[str, float] = {}
        if not ran:
            return chosen, behind
        best_us = min(ran)
        for row, proposed in configs.items():
            trial = known.get(row.id)
            ratio = None if trial is None else _behind(trial, best_us)
            if trial is None or ratio is None:  # it did not fit there
                chosen += [(row, config) for config in proposed]
            elif trial.behind is not None and trial.behind / 2**distance > NEAR:
                behind[row.id] = trial.behind / 2**distance  # a doubled size can halve it, not more
            elif trial.behind is None and ratio > NEAR * (NOISE if trial.noisy else 1.0):
                behind[row.id] = ratio
            else:
                chosen += [(row, config) for config in _configs(trial, proposed)]
        return chosen, behind


def _behind(trial: Trial, best_us: float) -> float | None:
    """The ratio of a kernel's time to the best kernel's; None if the kernel was refused."""
    if trial.behind is not None:
        return trial.behind
    return None if trial.time_us is None or trial.refused else trial.time_us / max(best_us, 1e-3)


def _configs(trial: Trial, proposed: Sequence[Config]) -> list[Config]:
    """The neighbour's best configurations, and the first that is proposed here, if that is new."""
    limit_us = CLOSE * (NOISE if trial.noisy else 1.0) * (trial.time_us or 0.0)
    ran = {digest(t.config): t.time_us for t in trial.tried} or {digest(trial.config): 0.0}
    near = {key for key, time_us in ran.items() if time_us is not None and time_us <= limit_us}
    near.add(digest(trial.config))
    return [
        config
        for place, config in enumerate(proposed)
        if digest(config) in near or (place == 0 and digest(config) not in ran)
    ]


def kind(problem: Problem, divisors: int = DIVISORS) -> tuple[str, tuple[int, ...]]:
    """What problems of one kind share, and the sizes in which they differ.

    Args:
        divisors: of channels, up to which they are shared; 0 where all of them must be.
    """
    sizes: list[int] = []

    def described(meta: TensorMeta | None, constant: bool) -> object:
        if meta is None:
            return None
        sizes.extend(max(1, size) for size in meta.shape[:2])
        first = [math.gcd(d, divisors) for d in meta.shape[:2]]
        first = first if constant else first[1:]  # the batch may be any
        dense = meta.strides is None
        return [len(meta.shape), first, meta.shape[2:], meta.dtype, meta.format, dense]

    key = digest(
        [
            problem.op,
            [described(m, i in problem.constant) for i, m in enumerate(problem.inputs)],
            [described(m, False) for m in problem.outputs],
            problem.attrs,
            problem.constant,
            problem.in_place,
            problem.dying,
            problem.math,
        ]
    )
    return key, tuple(sizes)
