"""evaluate: what a model is worth on images that nothing was chosen by, and how sure that is."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tessella.api.predicting import Model, Openable, name_of, opened, predictor, task_of
from tessella.api.samples import Data, split_of
from tessella.artifacts.checkpoint import Checkpoint
from tessella.artifacts.dataset import Dataset, Split
from tessella.artifacts.files import write_atomic
from tessella.core.errors import ArtifactError, UsageError
from tessella.core.events import Emit, progress, silent, warning
from tessella.core.preprocess import encode, fitted, to_depth
from tessella.core.record import to_plain
from tessella.core.task import CLASSIFICATION, TaskRecord
from tessella.core.volumes import middle_slice
from tessella.tasks import Report, Targets, Task, counted_examples, targets_of
from tessella.tasks.task import ErrorCounts, Errors
from tessella.training.confidence import (
    Bin,
    Curve,
    Floats,
    Measure,
    bootstrapped,
    calibration,
    curve_of,
    exact_share,
    fitted_temperature,
    mcnemar,
    softmax,
)
from tessella.training.evaluate import measure, predict_split

LEVEL, RESAMPLES, ERRORS, BATCH = 0.95, 1000, 20, 64
FEW = 10  # images, of which an interval at 95 % held the truth in 87 of 100 splits
LEAST_OVERLAP = 0.15  # of a hit: below a tenth, a box has nothing to do with a thing
MACRO = ("macro_precision", "macro_recall", "macro_f1")


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """An image with a large loss.

    Attributes:
        index: its number in the split.
        said: what the model answers; empty where that is a picture itself.
        wrong: whether the answer is not the truth; None where a task knows no right and wrong.
    """

    index: int
    path: str
    truth: str
    said: str
    loss: float
    wrong: bool | None


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Whether probabilities are what they say: of images with 0.8, 80 % should be right.

    Attributes:
        error: the expected calibration error; 0 is perfect.
        temperature: what scores are to be divided by, fitted on the validation split; None
            without one, where that split itself is measured, or all of it is answered right.
        scaled_error: the error then, on the split that is measured.
        bins: what ``error`` is the mean over.
    """

    error: float
    temperature: float | None
    scaled_error: float | None
    bins: tuple[Bin, ...]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two models on the same images.

    Attributes:
        other: the model that was compared with.
        difference: of the score, the first model's minus the other's, with its interval from
            images drawn anew in pairs.
        only_this, only_other: images that one alone has right (classification).
        p_value: McNemar's exact test of these: the probability of so uneven a split by chance.
    """

    other: str
    other_value: float
    difference: Measure
    only_this: int | None = None
    only_other: int | None = None
    p_value: float | None = None


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A model on a split.

    Attributes:
        score: the task's measure, such as ``accuracy``.
        measures: by name, each with its interval at ``level``: of an accuracy exact, of others
            from images drawn anew.
        report: all that the task measures: the confusion matrix and figures of each class.
        curves: precision and recall by threshold of each class (classification).
        errors: how often it errs in each way, where a task knows several (detection).
        mistakes: images by their loss, the largest first.
    """

    model: str
    split: str
    task: str
    count: int
    score: str
    level: float
    measures: dict[str, Measure]
    report: Report = field(repr=False)
    calibration: Calibration | None = None
    curves: tuple[Curve, ...] = field(default=(), repr=False)
    errors: ErrorCounts | None = field(default=None, repr=False)
    mistakes: tuple[Mistake, ...] = field(default=(), repr=False)
    comparison: Comparison | None = None

    @property
    def value(self) -> Measure:
        """The score with its interval."""
        return self.measures[self.score]

    def to_json(self) -> dict[str, Any]:
        """The judgement, ready for ``json.dumps``."""
        plain = {k: to_plain(v) for k, v in vars(self).items() if k != "report"}
        return {**plain, "report": self.report.to_json()}


@dataclass(frozen=True, kw_only=True)
class _Answered:
    """A model's answers on a split."""

    rows_NR: npt.NDArray[np.float32]
    report: Report


def evaluate(
    model: Openable,
    data: Data,
    *,
    split: str = "test",
    against: Openable | None = None,
    errors: int = ERRORS,
    threshold: float | None = None,
    overlap: float | None = None,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
    trust_code: bool = False,
    emit: Emit = silent,
) -> Judgement:
    """Measure a model on a split that neither training nor any choice has seen.

    Args:
        model: a checkpoint, a run (its best), a plan, or a path of one.
        data: the dataset, or its folder; its test split was made at import (``test=0.1``).
        against: a second model, compared on the same images by paired tests.
        errors: how many of the images with the largest losses to list.
        threshold: the score that every class needs to be told; None: those that the model has.
        overlap: from which a box hits a thing; None: one half. Both are of a detection.
        level: of the intervals, 0 to 1.
        resamples: how often images are drawn anew for those that are not exact.
        seed: decides these draws.

    Raises:
        UsageError: the dataset has no such split.
        DataError: its task or classes are others than the model's.
    """
    _check_numbers(level, resamples, errors)
    subject = opened(model)
    task, record = task_of(subject)
    labels = predictor(subject, trust_code=trust_code)[2]
    _check_places(task, threshold, overlap)
    rival = None if against is None else opened(against)
    if rival is not None:  # before anything is measured
        _require_same_question(subject, labels, rival, trust_code)
    samples = split_of(data, split, labels, record)
    if threshold is not None:
        same = {"threshold": (threshold,) * len(labels)}
        record = replace(record, numbers={**record.numbers, **same})
    _warn(subject, data, split, emit)
    _warn_of_few(task, len(samples), emit)
    own = _answered(subject, samples, trust_code, emit)
    truth = targets_of(samples)
    single = task.name == CLASSIFICATION.name
    drawn = _Drawn(samples, task, labels, level, resamples, seed, emit)
    measures = drawn.measures(own)
    curves: tuple[Curve, ...] = ()
    calibrated = None
    if single:
        curves = _curves(own, samples, labels)
        calibrated = _calibrated(subject, own, samples, data, trust_code, emit)
    comparison = None
    if rival is not None:
        comparison = drawn.compared(own, _answered(rival, samples, trust_code, emit), rival)
    losses_N = task.metrics.losses(own.rows_NR, truth, record, len(labels))
    order = np.argsort(-losses_N, kind="stable")[:errors]
    wrong = order[losses_N[order] > 0].tolist()  # where there is no error nothing is to be seen
    return Judgement(
        model=name_of(subject),
        split=samples.name,
        task=task.name,
        count=len(samples),
        score=task.score,
        level=level,
        measures=measures,
        report=own.report,
        calibration=calibrated,
        curves=curves,
        errors=_counted(task.errors, own, truth, (record, labels), overlap),
        mistakes=tuple(_mistake(i, losses_N, own, samples, (task, record), labels) for i in wrong),
        comparison=comparison,
    )


def _check_numbers(level: float, resamples: int, errors: int) -> None:
    if not 0 < level < 1 or resamples < 1 or errors < 0:
        raise UsageError(
            "level is between 0 and 1, resamples at least 1 and errors not negative",
            seen=f"level={level}, resamples={resamples}, errors={errors}",
        )


def _curves(own: _Answered, samples: Split, labels: tuple[str, ...]) -> tuple[Curve, ...]:
    probabilities_NK = softmax(own.rows_NR)
    return tuple(
        curve_of(label, probabilities_NK[:, k], samples.labels == k)
        for k, label in enumerate(labels)
    )


def _check_places(task: Task, threshold: float | None, overlap: float | None) -> None:
    if task.errors is None and (threshold is not None or overlap is not None):
        raise UsageError(
            "a threshold and an overlap are for tasks whose answers have a place",
            seen=task.title,
            fix="leave them out",
        )
    _check_share("threshold", threshold, 0.0)
    _check_share("overlap", overlap, LEAST_OVERLAP)


def _require_same_question(
    model: Model, labels: tuple[str, ...], rival: Model, trust_code: bool
) -> None:
    others = predictor(rival, trust_code=trust_code)[2]
    if others != labels or task_of(rival)[0] != task_of(model)[0]:
        raise ArtifactError(
            "the two models answer other questions",
            seen=f"{name_of(model)} and {name_of(rival)}",
            fix="compare models of the same task and classes",
        )


def save_mistakes(judgement: Judgement, data: Data, folder: str | Path) -> Path:
    """The pictures of a judgement's mistakes as PNG files, named by rank, truth and answer."""
    samples = data if isinstance(data, Split) else _dataset(data).split(judgement.split)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    record = None if isinstance(data, Split) else _dataset(data).preprocess
    for rank, mistake in enumerate(judgement.mistakes, start=1):
        content = samples[mistake.index].content
        if record is not None:  # stored as pixels, perhaps, which no viewer opens
            if record.volume is not None:
                pixels = to_depth(middle_slice(content), 8)
            else:
                pixels = fitted(content, record, name=mistake.path)
            content = encode(pixels)
        words = (f"{rank:03d}", mistake.truth, *(("as", mistake.said) if mistake.said else ()))
        name = re.sub(r"[^\w.-]+", "-", "-".join(words))[:150].strip("-.")
        write_atomic(folder / f"{name}.png", bytes(content))
    return folder


def _dataset(data: Dataset | str | Path) -> Dataset:
    return data if isinstance(data, Dataset) else Dataset(data)


def _warn(model: Model, data: Data, split: str, emit: Emit) -> None:
    if split != "test":
        emit(warning(f"the network was chosen by its {split} split: measured there it flatters"))
    if not isinstance(model, Checkpoint) or isinstance(data, Split):
        return
    trained_on, here = model.info.dataset_hash, _dataset(data).info.content_hash
    if trained_on and trained_on != here:
        emit(
            warning(
                "the network was trained on another dataset: if the two share images, this "
                "flatters (tessella data doctor finds copies within one)"
            )
        )


def _warn_of_few(task: Task, images: int, emit: Emit) -> None:
    if images < FEW and task.name != CLASSIFICATION.name:  # whose accuracy's interval is exact
        few = counted_examples(task.name, images)
        emit(warning(f"intervals of {few} are too narrow (of one, its own value): measure on more"))


def _answered(model: Model, samples: Split, trust_code: bool, emit: Emit) -> _Answered:
    predict, record, labels = predictor(model, trust_code=trust_code)
    rows_NR = predict_split(
        lambda batch: predict(batch.images), samples, record, len(labels), batch_size=BATCH,
        emit=emit,
    )  # fmt: skip
    return _Answered(rows_NR=rows_NR, report=measure(rows_NR, samples, labels))


def _calibrated(
    model: Model, own: _Answered, samples: Split, data: Data, trust_code: bool, emit: Emit
) -> Calibration:
    error, bins = calibration(softmax(own.rows_NR), samples.labels)
    dataset = None if isinstance(data, Split) else _dataset(data)
    temperature = scaled = None
    if dataset is not None and samples.name != "val" and "val" in dataset.info.splits:
        fitted_on = _answered(model, dataset.val, trust_code, emit)
        temperature = fitted_temperature(fitted_on.rows_NR, dataset.val.labels)
        if temperature is not None:
            scaled = calibration(softmax(own.rows_NR / temperature), samples.labels)[0]
    return Calibration(error=error, temperature=temperature, scaled_error=scaled, bins=bins)


def _mistake(
    index: int, losses_N: npt.NDArray[np.float64], own: _Answered, samples: Split,
    asked: tuple[Task, TaskRecord], labels: tuple[str, ...],
) -> Mistake:  # fmt: skip
    task, record = asked
    example = samples[index]
    truth = task.answers.truth(example.label, labels)
    of_picture = task.head.ANSWERS == "picture"  # other tasks' rows are counts, or chosen boxes
    said = task.answers.said(own.rows_NR[index], labels, record) if of_picture else ""
    return Mistake(
        index=index,
        path=example.path,
        truth=truth,
        said=said,
        loss=float(losses_N[index]),
        wrong=said != truth if task.name == CLASSIFICATION.name else None,
    )


def _check_share(name: str, value: float | None, least: float) -> None:
    if value is not None and not least <= value <= 1:
        raise UsageError(f"the {name} is between {least} and 1", seen=value)


def _counted(
    ways: Errors | None, own: _Answered, truth: Targets, about: tuple[TaskRecord, tuple[str, ...]],
    overlap: float | None,
) -> ErrorCounts | None:  # fmt: skip
    """How often the model errs in each way, told as it would be told to a client."""
    if ways is None:
        return None
    record, labels = about
    found = ways.match(own.rows_NR, truth, ways.OVERLAP if overlap is None else overlap)
    return found.report(labels, ways.thresholds(record, len(labels)))


class _Drawn:
    """Measures over images that are drawn anew."""

    def __init__(
        self, samples: Split, task: Task, labels: tuple[str, ...], level: float, resamples: int,
        seed: int, emit: Emit,
    ) -> None:  # fmt: skip
        self._samples, self._task, self._labels = samples, task, labels
        self._level, self._resamples, self._seed, self._emit = level, resamples, seed, emit

    def measures(self, own: _Answered) -> dict[str, Measure]:
        """Every measure with its interval."""
        if self._task.name != CLASSIFICATION.name:
            names = tuple(own.report.values)
            found = self._interval(lambda drawn_NS: self._values(own, names, drawn_NS))
            return dict(zip(names, found, strict=True))
        truth_N, said_N = self._samples.labels, own.rows_NR.argmax(axis=1)
        losses_N = self._task.metrics.losses(
            own.rows_NR, targets_of(self._samples), CLASSIFICATION, len(self._labels)
        )
        right = int((said_N == truth_N).sum())
        pairs_N = truth_N * len(self._labels) + said_N
        found = self._interval(
            lambda drawn_NS: np.stack(
                [_mean_of(losses_N, drawn_NS), *self._macro(pairs_N, drawn_NS)]
            )
        )
        accuracy = exact_share(right, len(truth_N), self._level)
        return {"accuracy": accuracy, **dict(zip(("loss", *MACRO), found, strict=True))}

    def compared(self, own: _Answered, other: _Answered, rival: Model) -> Comparison:
        """The two models on the same images."""
        score = self._task.score
        if self._task.name != CLASSIFICATION.name:
            (difference,) = self._interval(
                lambda drawn_NS: (
                    self._values(own, (score,), drawn_NS) - self._values(other, (score,), drawn_NS)
                )
            )
            return Comparison(
                other=name_of(rival), other_value=other.report.values[score], difference=difference
            )
        right_2N = [a.rows_NR.argmax(axis=1) == self._samples.labels for a in (own, other)]
        gain_N = right_2N[0].astype(np.float64) - right_2N[1]
        (difference,) = self._interval(lambda drawn_NS: _mean_of(gain_N, drawn_NS)[None])
        one, two, p = mcnemar(*right_2N)
        return Comparison(
            other=name_of(rival),
            other_value=float(right_2N[1].mean()),
            difference=difference,
            only_this=one,
            only_other=two,
            p_value=p,
        )

    def _interval(self, measured: Callable[[Floats], Floats]) -> list[Measure]:
        return bootstrapped(
            measured, len(self._samples), level=self._level, resamples=self._resamples,
            seed=self._seed,
            told=lambda done: self._emit(progress("draw anew", done, self._resamples)),
        )  # fmt: skip

    def _values(self, answered: _Answered, names: Sequence[str], drawn_NS: Floats) -> Floats:
        """Measures of a task's report over draws of the images, [V, S]."""
        if answered.report.resampled is not None:
            found = answered.report.resampled(drawn_NS)
            return np.stack([found[name] for name in names])
        made = []
        for drawn_N in drawn_NS.T:
            chosen = np.repeat(np.arange(len(drawn_N)), drawn_N.astype(np.int64))
            targets = self._task.examples.targets(
                self._samples.column.take(chosen), len(self._labels)
            )
            report = self._task.metrics.measure(answered.rows_NR[chosen], targets, self._labels)
            made.append([report.values.get(name, np.nan) for name in names])
        return np.array(made, np.float64).T

    def _macro(self, pairs_N: npt.NDArray[np.int64], drawn_NS: Floats) -> Floats:
        """Means over the classes of the split of precision, recall and F1, as scikit-learn's, of
        pairs of true and said classes, [3, S]."""
        classes = len(self._labels)
        made = []
        for drawn_N in drawn_NS.T:
            pairs = np.bincount(pairs_N, drawn_N, minlength=classes**2)
            confusion_KK = pairs.reshape(classes, classes)
            hits, said, support = confusion_KK.diagonal(), confusion_KK.sum(0), confusion_KK.sum(1)
            there = (said + support) > 0
            each = (
                hits / np.maximum(said, 1),
                hits / np.maximum(support, 1),
                2 * hits / np.maximum(said + support, 1),
            )
            made.append([values[there].mean() for values in each])
        return np.array(made, np.float64).T


def _mean_of(values_N: Floats, drawn_NS: Floats) -> Floats:
    """The means of draws, [S]."""
    return np.asarray(values_N @ drawn_NS / drawn_NS.sum(axis=0))
