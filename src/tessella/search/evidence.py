"""What a search may leave out, as problems of one kind have shown it.

Problems are of one kind if they differ only in the batch and in how many channels there are. Of
neighbours, where no such number is more than doubled, the same kernels win: in ResNet-50 and
DenseNet-121 at batches of 1 to 32 on a CPU, the winner was within 1.1 of the best at the neighbour
in 99 of 100 steps, and what was lost in the others by taking the neighbour's was below 2 %.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tessella.core.record import digest
from tessella.kernels.catalog import Config, Kernel
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta
from tessella.search.inputs import Numbers
from tessella.search.tuning import Trial

NEIGHBOUR = 2.0  # times a size, at most
NEAR = 1.3  # times the best: a kernel that took longer at the neighbour is left out
CLOSE = 1.2  # times its kernel's best: so are configurations that took longer
NOISE = 1.5  # times these, where the timing was noisy
# Where calls are long and all threads have images, as many again change nothing: of DenseNet-121's
# layers of 1 ms or more, what took 1.1 times the best at a batch lost at the next in all cases, and
# at 32 what had at 8, but for 0.007 % of the time (an EPYC with AVX2, one thread). With 1.05, and
# fewer runs of what is near, ResNet-50's plan was 3 to 6 % slower at 1, 2, 16 and 32 images.
LONG_US, NEAR_LONG = 1000.0, 1.1
# If the batch is more than doubled: from 1 or 2 to 8 images 0.1 % was lost in ResNet-50
NEAR_FAR = 1.2
CLOSE_FAR = 1.5  # for configurations: Winograd's tiles depend on how many images there are
NOISE_LONG = 1.1  # times these where calls are long: a burst of other work is a part of them
DIVISORS = 64  # of channels: what divides them up to here decides how tiles fit

Candidate = tuple[Kernel, Config]


@dataclass(frozen=True)
class _Known:
    """A problem that was searched, and its kind where only the batch may differ."""

    sizes: tuple[float, ...]  # their logarithms
    problem: str
    layer: str
    trials: tuple[Trial, ...]

    @property
    def best_us(self) -> float:
        ran = (t.time_us for t in self.trials if t.refused is None and t.time_us is not None)
        return min(ran, default=0.0)


@dataclass(frozen=True, kw_only=True)
class _Reach:
    """What a neighbour's times tell.

    Attributes:
        near, close, noise: as ``NEAR``, ``CLOSE`` and ``NOISE``.
        gain: so many times what a kernel is behind may it have caught up: a doubled size can halve
            it, not more.
        steady: the same layer, with long calls: the order changes no more.
        settled: and so have a kernel's configurations: the best is.
    """

    near: float
    close: float
    gain: float
    noise: float = NOISE
    steady: bool = False
    settled: bool = False


@dataclass(frozen=True, kw_only=True)
class Shortlist:
    """What of a problem's kernels may win by what its neighbour has shown.

    Attributes:
        candidates: nothing without a neighbour.
        behind: how far the kernels are behind that are left out.
        steady: the neighbour is the same layer, and its calls are long: few runs will do.
    """

    candidates: Sequence[Candidate] = ()
    behind: Mapping[str, float] = field(default_factory=dict)
    steady: bool = False


@dataclass
class Evidence:
    """The trials of a build by the kind of their problem.

    Attributes:
        numbers: what all its searches run their kernels on.
    """

    numbers: Numbers = field(default_factory=Numbers)
    _by_kind: dict[str, dict[str, _Known]] = field(default_factory=dict)
    _right: set[tuple[str, str, str]] = field(default_factory=set)
    _kinds: dict[tuple[str, int], tuple[str, tuple[float, ...]]] = field(default_factory=dict)

    def has_shown_right(self, problem: Problem, kernel: str, config: Config) -> bool:
        """Whether a configuration was compared with float64 on a problem of this kind.

        At other sizes, what is built of it is compared with the float32 network.
        """
        return (self._kind(problem)[0], kernel, name_of(config)) in self._right

    def add_right(self, problem: Problem, kernel: str, config: Config) -> None:
        self._right.add((self._kind(problem)[0], kernel, name_of(config)))

    def add(self, problem: Problem, trials: Sequence[Trial]) -> None:
        shared, sizes = self._kind(problem)
        known = _Known(sizes, problem.key, self._kind(problem, 0)[0], tuple(trials))
        self._by_kind.setdefault(shared, {})[problem.key] = known

    def _kind(self, problem: Problem, divisors: int = DIVISORS) -> tuple[str, tuple[float, ...]]:
        """``kind`` with the logarithms of the sizes, found once: a network asks of 2,000 problems
        eight times each.
        """
        key = problem.key, divisors
        if key not in self._kinds:
            shared, sizes = kind(problem, divisors)
            self._kinds[key] = shared, tuple(map(math.log2, sizes))
        return self._kinds[key]

    def _neighbour(self, problem: Problem, images: int | None) -> tuple[_Known | None, _Reach]:
        """The nearest problem of this kind, and what is told of this one by it.

        None that are farther than ``NEIGHBOUR``; but the same layer with more images or fewer,
        where it says more than the nearest.
        """
        shared, sizes = self._kind(problem)
        layer = self._kind(problem, 0)[0]
        best, nearest = math.log2(NEIGHBOUR), None
        least, same = math.inf, None
        fewest = None if images is None else math.log2(images)
        for known in self._by_kind.get(shared, {}).values():
            if known.problem == problem.key:
                continue
            steps = [abs(a - b) for a, b in zip(sizes, known.sizes, strict=True)]
            distance = round(max(steps, default=0.0), 9)
            many = fewest is not None and fewest <= min(sizes[0], known.sizes[0])
            if many and known.layer == layer and known.best_us >= LONG_US and distance < least:
                least, same = distance, known
            if distance <= best:
                best, nearest = distance, known
        if same is not None:
            is_far = least > math.log2(NEIGHBOUR)
            near, close = (NEAR_FAR, CLOSE_FAR) if is_far else (NEAR_LONG, NEAR_LONG)
            return same, _Reach(
                near=near, close=close, gain=1.0, noise=NOISE_LONG, steady=True,
                settled=not is_far and sizes[0] > same.sizes[0],
            )  # fmt: skip
        plain = None if images is None else self._lasting(problem)
        if plain is not None and plain.best_us >= LONG_US:
            reach = _Reach(near=NEAR_LONG, close=NEAR_LONG, gain=1.0, noise=NOISE_LONG)
            return plain, reach
        return nearest, _Reach(near=NEAR, close=CLOSE, gain=2**best)

    def _lasting(self, problem: Problem) -> _Known | None:
        """The same problem where no operand dies: what overwrites none takes as long."""
        if not problem.dying:
            return None
        lasting = replace(problem, dying=())
        return self._by_kind.get(self._kind(lasting)[0], {}).get(lasting.key)

    def shortlist(
        self,
        problem: Problem,
        configs: dict[Kernel, tuple[Config, ...]],
        *,
        images: int | None = None,
    ) -> Shortlist:
        """The candidates that may win, and how far the kernels are behind that are left out.

        Args:
            configs: those of each kernel that fits, the most promising first.
            images: with so many all threads have one; None where more can change the order.
        """
        neighbour, reach = self._neighbour(problem, images)
        chosen: list[Candidate] = []
        behind: dict[str, float] = {}
        if neighbour is None or not neighbour.best_us:
            return Shortlist()
        known = {trial.kernel: trial for trial in neighbour.trials}
        for row, proposed in configs.items():
            trial = known.get(row.id)
            ratio = None if trial is None else _behind(trial, neighbour.best_us)
            if trial is None or ratio is None:  # it did not fit there
                chosen += [(row, config) for config in proposed]
            elif trial.behind is not None and trial.behind / reach.gain > reach.near:
                behind[row.id] = trial.behind / reach.gain
            elif trial.behind is None and ratio > reach.near * (
                reach.noise if trial.noisy else 1.0
            ):
                behind[row.id] = ratio
            else:
                chosen += [(row, config) for config in _configs(trial, proposed, reach)]
        return Shortlist(candidates=chosen, behind=behind, steady=reach.steady)


def _behind(trial: Trial, best_us: float) -> float | None:
    """The ratio of a kernel's time to the best kernel's; None if the kernel was refused."""
    if trial.behind is not None:
        return trial.behind
    return None if trial.time_us is None or trial.refused else trial.time_us / max(best_us, 1e-3)


def _configs(trial: Trial, proposed: Sequence[Config], reach: _Reach) -> list[Config]:
    """The neighbour's best configurations, and the first that is proposed here, if that is new.

    Twice as many images are the same work on an image twice: of them the best alone.
    """
    best = [config for config in proposed if name_of(config) == name_of(trial.config)]
    if reach.settled and best and not trial.noisy:
        return best
    limit_us = reach.close * (reach.noise if trial.noisy else 1.0) * (trial.time_us or 0.0)
    ran = {name_of(t.config): t.time_us for t in trial.tried} or {name_of(trial.config): 0.0}
    near = {key for key, time_us in ran.items() if time_us is not None and time_us <= limit_us}
    near.add(name_of(trial.config))
    return [
        config
        for place, config in enumerate(proposed)
        if name_of(config) in near or (place == 0 and name_of(config) not in ran)
    ]


def name_of(config: Config) -> str:
    """Equal configurations, equal names; their digest takes ten times as long."""
    return repr(sorted(config.items()))


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
