"""Labelled samples as a judge: how much worse than in float32 is it, and how sure is that."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from tessella.artifacts.receipt import MAX_FLIPS, Flip, Receipt
from tessella.core.errors import CompileError, UsageError

Tensors = Mapping[str, torch.Tensor]
Predict = Callable[[Tensors], Tensors]
Metric = Callable[[Tensors, torch.Tensor], float]
Rows = npt.NDArray[np.float32]

CALIBRATION = 512  # samples at most that are taken off for it
CALIBRATION_SHARE = 4  # and at most one of so many
ERROR = 0.05  # the chance that an interval misses
RESAMPLES = 400  # of the bootstrap, for metrics of which nothing is known
LEAST_RESAMPLES, SECONDS = 60, 10.0  # and of a task's score, of which one may take long: a receipt


class Score(Protocol):
    """How a task judges answers, whose places are those of samples in their source."""

    @property
    def name(self) -> str: ...

    def rows(self, outputs: Tensors, places: Sequence[int]) -> Rows:
        """What the task keeps of each answer, [N, R]."""
        ...

    def score(self, rows_NR: Rows, places: Sequence[int]) -> float:
        """Higher is better, 1 is a hundred points."""
        ...

    def changed(self, before: Tensors, after: Tensors) -> list[int]:
        """The answers, by their place in the outputs, that say something else."""
        ...

    def aligned(self, before: Tensors, after: Tensors) -> Tensors:
        """The outputs ``after`` so that their numbers can be compared with those before."""
        ...

    def flip(self, place: int, before: torch.Tensor, after: torch.Tensor) -> Flip:
        """How one answer has changed."""
        ...


class Labels(Protocol):
    """Right answers: int64 [N], or whatever a metric takes."""

    def __getitem__(self, places: list[int], /) -> torch.Tensor: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """Samples with their right answers.

    Attributes:
        read: the inputs by name of the samples at these places of the source, stacked.
        labels: int64 [N], or whatever the metric takes: one row a sample of the source.
        score: how the samples' task judges, where no other metric does; None: top-1.
        places: which of the source's samples these are.
        paths: of the source's samples, for people.
        classes: names of the labels, for people.
    """

    read: Callable[[Sequence[int]], Tensors]
    labels: Labels
    places: tuple[int, ...]
    paths: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    score: Score | None = None

    @property
    def truth(self) -> torch.Tensor:
        return self.labels[list(self.places)]

    def __len__(self) -> int:
        return len(self.places)

    def batches(self, size: int) -> Iterator[Tensors]:
        """The inputs in order; the last batch may be smaller."""
        for start in range(0, len(self), size):
            yield self.read(self.places[start : start + size])

    def spread(self, count: int) -> Labelled:
        """So many of the samples, at even distances."""
        count = min(count, len(self))
        return replace(
            self, places=tuple(self.places[i * len(self) // count] for i in range(count))
        )

    def parted(self) -> tuple[Labelled, Labelled]:
        """The samples to judge by, and those to calibrate with; the division is the same every
        time.
        """
        count = min(CALIBRATION, len(self) // CALIBRATION_SHARE)
        if not count:
            raise UsageError(
                "too few samples to calibrate with some and judge by the others",
                seen=len(self),
                fix="give more, or a calibration",
            )
        shown = self.spread(count)
        taken = set(shown.places)
        return replace(self, places=tuple(p for p in self.places if p not in taken)), shown


def of_tensors(
    inputs: Tensors,
    labels: torch.Tensor,
    *,
    paths: Sequence[str] = (),
    classes: Sequence[str] = (),
) -> Labelled:
    """Samples that lie in memory: inputs by name, [N, …] each, and a row of labels for each.

    Raises:
        UsageError: there are not as many labels as inputs, or none.
    """
    counts = {len(labels), *(len(t) for t in inputs.values())}
    if len(counts) != 1 or not len(labels):
        raise UsageError("inputs and labels are not of one number of samples", seen=sorted(counts))
    return Labelled(
        read=lambda places: {n: t[list(places)] for n, t in inputs.items()},
        labels=labels,
        places=tuple(range(len(labels))),
        paths=tuple(paths),
        classes=tuple(classes),
    )


def top1(outputs: Tensors, labels: torch.Tensor) -> float:
    """The share of samples whose first output is highest at their label."""
    return float((first_of(outputs).argmax(1) == labels).double().mean())


def first_of(outputs: Tensors) -> torch.Tensor:
    return next(iter(outputs.values()))


def answers(predict: Predict, data: Labelled, size: int) -> dict[str, torch.Tensor]:
    """A network's outputs for all samples, in order, on the CPU.

    Raises:
        CompileError: one of them is NaN or infinite.
    """
    made: dict[str, list[torch.Tensor]] = {}
    for batch in data.batches(size):
        for name, tensor in predict(batch).items():
            made.setdefault(name, []).append(tensor.cpu())
    outputs = {name: torch.cat(parts) for name, parts in made.items()}
    for name, tensor in outputs.items():
        if not torch.isfinite(tensor).all():
            raise CompileError(
                f"output {name!r} is not finite on the samples",
                seen="NaN or infinity",
                fix="keep the layers that overflow in fp32",
            )
    return outputs


@dataclass(frozen=True, kw_only=True)
class Judge:
    """What is compared with: the float32 answers.

    Attributes:
        data: the samples; before: the float32 network's answers to them.
        metric: of outputs and labels, higher is better, 1 is a hundred points; None: the score of
            the data's task, or top-1.
    """

    data: Labelled
    before: Tensors
    metric: Metric | None = None

    @property
    def name(self) -> str:
        """The metric's name."""
        if self._task is not None:
            return self._task.name
        return getattr(self._metric, "__name__", "metric")

    @property
    def _task(self) -> Score | None:
        return self.data.score if self.metric is None else None

    @property
    def _metric(self) -> Metric:
        return top1 if self.metric is None else self.metric

    @functools.cached_property
    def worth(self) -> float:
        """The metric of the float32 answers."""
        return self.paired(self.before)(None)[0]

    def loss(self, after: Tensors) -> float:
        """Percentage points of the metric below float32; negative: better."""
        return 100 * (self.worth - self.paired(after)(None)[1])

    def paired(self, after: Tensors) -> Callable[[torch.Tensor | None], tuple[float, float]]:
        """The metric of the float32 answers and of others, for some of the samples or all."""
        pair, task = (self.before, after), self._task
        if task is None:
            truth, metric = self.data.truth, self._metric

            def by_metric(drawn: torch.Tensor | None) -> tuple[float, float]:
                if drawn is None:
                    return metric(pair[0], truth), metric(pair[1], truth)
                one, two = ({n: t[drawn] for n, t in outputs.items()} for outputs in pair)
                return metric(one, truth[drawn]), metric(two, truth[drawn])

            return by_metric
        kept = self._rows, self._rows if after is self.before else self._rows_of(after)

        def by_task(drawn: torch.Tensor | None) -> tuple[float, float]:
            chosen = list(range(len(self.data))) if drawn is None else drawn.tolist()
            places = [self.data.places[i] for i in chosen]
            if tuple(chosen) not in self._known:
                self._known[tuple(chosen)] = task.score(kept[0][chosen], places)
            return self._known[tuple(chosen)], task.score(kept[1][chosen], places)

        return by_task

    @functools.cached_property
    def _known(self) -> dict[tuple[int, ...], float]:
        """A task's score of the float32 answers by samples: each plan's interval draws the same."""
        return {}

    @functools.cached_property
    def _rows(self) -> Rows:
        return self._rows_of(self.before)

    def _rows_of(self, outputs: Tensors) -> Rows:
        assert self._task is not None
        return self._task.rows(outputs, self.data.places)

    def flipped(self, after: Tensors) -> list[int]:
        """The samples, by their place in ``data``, whose answer is another one."""
        if self._task is not None:
            return self._task.changed(self.before, after)
        if not self._scores():
            return []
        changed = first_of(self.before).argmax(1) != first_of(after).argmax(1)
        return changed.nonzero().flatten().tolist()

    def receipt(self, after: Tensors, budget: float) -> Receipt:
        """All that is to be said of a plan's answers."""
        flipped = self.flipped(after)
        low, high, resamples = self._interval(after)
        before, now = self.paired(after)(None)
        return Receipt(
            metric=self.name,
            samples=len(self.data),
            before=before,
            after=now,
            loss=100 * (before - now),
            low=low,
            high=high,
            resamples=resamples,
            p_value=mcnemar(*self._changes(after)) if self._counts else None,
            budget=budget,
            flipped=len(flipped),
            flips=tuple(self._flip(i, after) for i in flipped[:MAX_FLIPS]),
        )

    def resolution(self) -> float:
        """The points that even a plan which changes no answer may lose, for all one can know.

        Of a task's score: as if a sample could lose its whole share of it, as in a mean.
        """
        if self._task is not None:
            return paired_interval(0, 0, len(self.data))[1]
        return self._interval(self.before)[1]

    @property
    def _counts(self) -> bool:
        """Whether the metric is the share of samples that are right."""
        return self._task is None and self._metric is top1

    def _scores(self) -> bool:
        """Whether the first output has a score for each class."""
        scores = first_of(self.before)
        return scores.dim() == 2 and scores.shape[1] > 1 and scores.is_floating_point()

    def _interval(self, after: Tensors) -> tuple[float, float, int | None]:
        """Where the loss lies, and how often samples were drawn again for it."""
        if not self._counts:
            return _bootstrap(self, after)
        return *paired_interval(*self._changes(after), len(self.data)), None

    def _changes(self, after: Tensors) -> tuple[int, int]:
        """How many right answers became wrong, and wrong ones right."""
        old, new = (first_of(o).argmax(1) == self.data.truth for o in (self.before, after))
        return int((old & ~new).sum()), int((~old & new).sum())

    def _flip(self, index: int, after: Tensors) -> Flip:
        classes, place = self.data.classes, self.data.places[index]
        if self._task is not None:
            pair = (first_of(o)[index].float() for o in (self.before, after))
            return self._task.flip(place, *pair)
        old, new = (first_of(o)[index].double() for o in (self.before, after))

        def name(label: int) -> str:
            return classes[label] if 0 <= label < len(classes) else str(label)

        truth = self.data.truth[index]
        return Flip(
            index=place,
            path=self.data.paths[place] if self.data.paths else "",
            label=name(int(truth)) if truth.numel() == 1 else "",
            before=name(int(old.argmax())),
            after=name(int(new.argmax())),
            probability_before=float(probabilities(old[None]).max()),
            probability=float(probabilities(new[None]).max()),
        )


def probabilities(scores_NK: torch.Tensor) -> torch.Tensor:
    """Softmax of scores; scores that are probabilities already stay as they are."""
    sums_to_one = ((scores_NK.sum(1) - 1).abs() < 1e-3).all()
    return scores_NK if sums_to_one and (scores_NK >= 0).all() else scores_NK.softmax(1)


# ── how sure ──────────────────────────────────────────────────────────────────────────────────────


def paired_interval(lost: int, won: int, count: int, error: float = ERROR) -> tuple[float, float]:
    """Where the loss of accuracy lies, in points, if ``lost`` right answers became wrong.

    Clopper and Pearson's exact intervals for the two kinds of change, each missed with half of the
    error: together they hold whatever the two have to do with each other.
    """
    (lost_low, lost_high), (won_low, won_high) = (
        binomial_interval(k, count, error / 2) for k in (lost, won)
    )
    return 100 * (lost_low - won_high), 100 * (lost_high - won_low)


def binomial_interval(hits: int, count: int, error: float = ERROR) -> tuple[float, float]:
    """Clopper and Pearson 1934: the rates at which ``hits`` of ``count`` is not too unlikely."""
    low = 0.0 if hits == 0 else _root(lambda p: 1 - _at_most(hits - 1, count, p), error / 2)
    high = 1.0 if hits == count else _root(lambda p: 1 - _at_most(hits, count, p), 1 - error / 2)
    return low, high


def mcnemar(lost: int, won: int) -> float:
    """How likely changes this one-sided are if both ways are alike (exact, two-sided)."""
    return min(1.0, 2 * _at_most(min(lost, won), lost + won, 0.5))


def _at_most(hits: int, count: int, rate: float) -> float:
    """P(X ≤ hits) of a binomial."""
    if rate <= 0:
        return 1.0
    if rate >= 1:
        return float(hits >= count)
    k = torch.arange(hits + 1, dtype=torch.float64)
    logs = -torch.lgamma(k + 1) - torch.lgamma(count - k + 1) + math.lgamma(count + 1)
    logs += k * math.log(rate) + (count - k) * math.log1p(-rate)
    return float(logs.logsumexp(0).exp())


def _root(grows: Callable[[float], float], value: float) -> float:
    """Where a function that grows on [0, 1] has a value."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if grows(middle) < value else (low, middle)
    return (low + high) / 2


def _bootstrap(judge: Judge, after: Tensors) -> tuple[float, float, int]:
    """Efron's percentile interval of the paired loss, over samples drawn again; and how often."""
    generator = torch.Generator().manual_seed(0)
    count, paired = len(judge.data), judge.paired(after)
    begun, losses = time.perf_counter(), list[float]()
    for done in range(RESAMPLES):
        late = done >= LEAST_RESAMPLES and time.perf_counter() - begun > SECONDS
        if late and judge._task is not None:
            break
        drawn = torch.randint(count, (count,), generator=generator)
        old, new = paired(drawn)
        losses.append(100 * (old - new))
    edges = torch.tensor([ERROR / 2, 1 - ERROR / 2], dtype=torch.float64)
    low, high = torch.tensor(losses, dtype=torch.float64).quantile(edges).tolist()
    loss = judge.loss(after)
    return min(low, loss), max(high, loss), len(losses)
