"""The parts of a task. A folder of ``tasks`` has a module for each, with the functions named here.

A module satisfies the protocol of its name; tests/tasks/test_folders.py checks that it does.
Letters of shapes: N images of a split, B of a batch, K classes (or numbers), R numbers that measure
one image.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from tessella.artifacts.checkpoint import Answering
from tessella.core.pictures import Pixels
from tessella.core.preprocess import Preprocess
from tessella.core.task import TaskRecord
from tessella.core.tiles import Tiles
from tessella.tasks.found import Found, Request
from tessella.tasks.moves import Moves
from tessella.tasks.thing import Thing
from tessella.tasks.view import View

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor

Numbers = Mapping[str, tuple[float, ...]]
Rows = npt.NDArray[np.float32]
# Measures by name, each [S], of S draws of a split's images: given is how often each image counts
# in each draw, [N, S]. NaN is a measure with nothing to count.
Resampled = Callable[[npt.NDArray[np.float64]], dict[str, npt.NDArray[np.float64]]]
Outputs = npt.NDArray[Any]


class Targets(Protocol):
    """The targets of a split, checked."""

    def __len__(self) -> int: ...

    def having(self, label: int) -> npt.NDArray[np.int64]:
        """The places of the images whose targets count for a class, in order."""
        ...

    def batch(self, indices: npt.NDArray[np.int64], moves: Sequence[Moves] | None = None) -> Any:
        """The targets of some images, an array [B, …] where they are one; the loss has tensors.

        ``moves`` say where the network sees each image's pixels; None: all of it, unmoved.
        """
        ...


class Cuttable(Targets, Protocol):
    """The targets of a task whose things can be pasted into other pictures."""

    def things(self, index: int) -> npt.NDArray[np.float64]:
        """The boxes x0 y0 x1 y1 of an image's things in pixels of the fitted image, [M, 4]."""
        ...


class Examples(Protocol):
    """``examples.py``: how targets look on disk and in a dataset.

    A *target* is what is known of one image, as Python values: ``Source.label``.
    """

    NAMES: str  # what a dataset's names are: classes, of which there can be too few, or numbers
    SMOOTHED: bool  # whether the loss smooths its targets: ``LossSettings.smoothing``
    PLACED: (
        bool  # whether what is answered lies somewhere in the image: large ones take much memory
    )
    JOINED: tuple[str, ...]  # the settings of ``Augment`` that join its pictures: mosaic, paste

    def find(self, request: Request) -> Found:
        """The images of a source with their targets, checked.

        Raises:
            DataError: nothing there, or a file that cannot be understood.
        """
        ...

    def stored(self, target: Any, file: str, record: Preprocess) -> Any:
        """The target as the dataset holds it beside the fitted picture of a file.

        Raises:
            DataError: target and picture do not belong together: the import skips both.
        """
        ...

    def lacking(self, classes: Sequence[str]) -> str | None:
        """Why a network of these classes cannot be trained, or None where it can."""
        ...

    def column(self) -> pa.DataType:
        """The Arrow type of the dataset's column ``label``."""
        ...

    def feature(self, classes: tuple[str, ...]) -> dict[str, Any]:
        """The same column as a feature of Hugging Face ``datasets``."""
        ...

    def occurs(self, target: Any) -> Iterable[int]:
        """The classes that a target counts for."""
        ...

    def renumbered(self, target: Any, numbers: Sequence[int], classes: int) -> Any:
        """The target with class ``numbers[k]`` of so many in place of class k."""
        ...

    def contradiction(self, targets: Sequence[Any]) -> Callable[[Sequence[int]], bool]:
        """Whether images that look alike cannot all be right: told of their places in a dataset."""
        ...

    def strata(self, targets: Sequence[Any]) -> npt.NDArray[np.int64]:
        """A group for each image; a holdout takes the same share of each group."""
        ...

    def targets(self, column: pa.ChunkedArray, classes: int) -> Targets:
        """The targets in a split's column.

        Raises:
            ValueError: a target that no import writes; the text says which.
        """
        ...

    def blank(self, count: int, classes: int, size: Sequence[int]) -> Any:
        """A batch of targets for a trial step; ``size``: height and width of the input."""
        ...


class Head(Protocol):
    """``head.py``: what comes out of the network, and how a plan finishes it."""

    OUTPUT: str  # the name of a plan's output
    ANSWERS: Answering  # what a network's outputs are for: ``artifacts.checkpoint.Network``
    FINISHES: bool  # whether ``finish`` changes anything
    TAUGHT: bool  # whether a network in training takes the targets, too, and answers its own loss

    def width(self, classes: int) -> int:
        """The number of outputs of the network for K classes."""
        ...

    def shape(self, classes: int, size: Sequence[int]) -> tuple[int, ...]:
        """The shape of one image's finished outputs; ``size``: height and width of the input."""
        ...

    def finish(self, outputs: Tensor, numbers: Numbers) -> Tensor:
        """The network's outputs [B, …] as a plan answers them."""
        ...

    def aligned(self, made: Tensor, right: Tensor) -> Tensor:
        """Finished outputs [B, …] in the order of others, so that their numbers can be compared.

        Where ``finish`` sorts, the last bit of a score moves a whole row.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """What a loss depends on beside outputs and targets.

    Attributes:
        weights_K: weight of each class, or None.
        smoothing: the share of the target that all classes have alike.
    """

    numbers: Numbers = field(default_factory=dict)
    weights_K: Tensor | None = None
    smoothing: float = 0.0


class Loss(Protocol):
    """``loss.py``: what a training step minimizes."""

    STEP_MEASURE: str  # what ``step_measure`` measures; the training's log calls it train/…

    def numbers(self, targets: Targets, classes: int) -> dict[str, tuple[float, ...]]:
        """What the training split decides: see ``TaskRecord.numbers``."""
        ...

    def balanced(self, counts: Sequence[int], images: int) -> Tensor | None:
        """A weight for each class by how often it occurs in so many images; None: no classes."""
        ...

    def loss(self, outputs: Tensor, targets: Any, settings: LossSettings) -> Tensor:
        """The mean loss over the images of a batch, in float32.

        ``outputs`` are [loss, measure] where the head says that the network is taught.
        """
        ...

    def step_measure(self, outputs: Tensor, targets: Any, numbers: Numbers) -> Tensor:
        """The measure over the images of a batch, a scalar."""
        ...


class Report(Protocol):
    """What was measured on a split."""

    @property
    def count(self) -> int: ...

    @property
    def values(self) -> dict[str, float]:
        """The measures by name, the task's score among them; a training logs them as val/…"""
        ...

    @property
    def numbers(self) -> dict[str, tuple[float, ...]]:
        """Numbers of the task's record that this split decided: thresholds."""
        ...

    @property
    def resampled(self) -> Resampled | None:
        """The same measures of draws of the images; None where each has to be measured anew."""
        ...

    def to_json(self) -> dict[str, Any]:
        """The report, ready for ``json.dumps``."""
        ...

    def table(self) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
        """Titles and rows for people: one row a class."""
        ...


class Metrics(Protocol):
    """``metrics.py``: how good the answers of a split are."""

    COUNTED: bool  # whether the score is the share of images whose one class has most

    def width(self, classes: int) -> int:
        """R."""
        ...

    def rows(self, outputs: Tensor, targets: Any, classes: int) -> Tensor:
        """Finished outputs [B, …] and their targets as R numbers an image, [B, R].

        Processes measure parts of a split and join the rows.
        """
        ...

    def measure(self, rows_NR: Rows, targets: Targets, labels: tuple[str, ...]) -> Report:
        """The report of a whole split."""
        ...

    def losses(
        self, rows_NR: Rows, targets: Targets, record: TaskRecord, classes: int
    ) -> npt.NDArray[np.float64]:
        """How wrong the answer of each image is, [N]: the worst have the most. What is told is what
        reaches the record's thresholds."""
        ...


@dataclass(frozen=True, kw_only=True)
class Query:
    """What a client asks of an answer.

    Attributes:
        top: how many classes at most, the best first; None: as the task has it.
        threshold: the least probability that counts; None: those of the record.
        views: where the network saw each picture, for answers in a picture's own pixels; empty:
            answers are in fractions of what it saw.
    """

    top: int | None = None
    threshold: float | None = None
    views: tuple[View, ...] = ()


class Answers(Protocol):
    """``answers.py``: what is told of an image to a client, a terminal, and a comparison.

    Imports no torch: the studio and the import of images do without.
    """

    VERB: str  # the server's route: classify, predict, …
    SLOW: bool  # whether an answer takes long to make, as masks do: others do not wait for it
    HEADER: tuple[str, ...]  # of ``lines``

    def answer(
        self, outputs: Outputs, labels: tuple[str, ...], record: TaskRecord, query: Query
    ) -> list[Any]:
        """One JSON value for each image of finished outputs [B, …]."""
        ...

    def lines(self, answer: Any) -> list[tuple[str, ...]]:
        """An image's answer as rows for a terminal."""
        ...

    def same(self, one: Outputs, other: Outputs, record: TaskRecord) -> npt.NDArray[np.bool_]:
        """Whether two networks say the same, bool [B]."""
        ...

    def said(self, output: Outputs, labels: tuple[str, ...], record: TaskRecord) -> str:
        """One image's finished output in a few words."""
        ...

    def changes(
        self, one: Outputs, other: Outputs, labels: tuple[str, ...], record: TaskRecord
    ) -> str:
        """What the second of two finished outputs of an image says otherwise, in a few words."""
        ...

    def truth(self, target: Any, labels: tuple[str, ...]) -> str:
        """One image's target in a few words."""
        ...

    def drawn(self, picture: Pixels, answer: Any) -> Pixels | None:
        """A picture, HWC RGB of 8 bits, with its answer drawn; None: the task has nothing to draw.

        ``answer`` is one of those that ``answer`` gives for the picture's view.
        """
        ...

    def things(self, answer: Any) -> tuple[Thing, ...]:
        """What the answer finds at places in the picture, the surest first; often nothing."""
        ...

    def marked(self, target: Any, labels: tuple[str, ...]) -> tuple[Thing, ...]:
        """What a target has at places in the picture as it is stored."""
        ...

    def taught(self, picture: Pixels, target: Any, labels: tuple[str, ...]) -> Pixels:
        """A picture of a training, HWC RGB of 8 bits, with its target drawn over it, if that has
        places in it.

        ``target`` is one of ``Targets.batch``.
        """
        ...


class Charts(Protocol):
    """``charts.py``: what the studio may draw."""

    CLASS_COUNTS: str  # what ``SplitInfo.class_counts`` counts, for people
    CONFUSION: bool  # whether a report has a matrix of true and predicted classes
    PERCENT: tuple[str, ...]  # measures to be shown in percent
    CURVES: tuple[tuple[str, str], ...]  # title of a chart, and how its metrics end


# Top and left of each tile of a picture, row by row, and a network's finished outputs [1, …] of it.
TileOutputs = Iterable[tuple[int, int, Outputs]]


class Joining(Protocol):
    """``tiles.py``, which a task has where the answers of a picture's tiles can be joined."""

    def joined(
        self, outputs: TileOutputs, tiles: Tiles, size: tuple[int, int], view: View,
        about: tuple[tuple[str, ...], TaskRecord], query: Query,
    ) -> Any:  # fmt: skip
        """The answer to a picture of a height and a width, as ``Answers.answer`` gives it.

        Args:
            view: where the network sees a tile.
            about: the labels, and the record of the task.
        """
        ...


class ErrorCounts(Protocol):
    """How often a model errs in each way, with a table for people."""

    @property
    def errors(self) -> dict[str, int]: ...

    def table(self) -> tuple[tuple[str, ...], list[tuple[object, ...]]]: ...


class Matching(Protocol):
    """Answers of a split beside what is there."""

    def report(self, names: Sequence[str], least_K: npt.NDArray[np.float64]) -> ErrorCounts:
        """The counts where an answer needs a score of so much to be told, for each class."""
        ...


class Errors(Protocol):
    """``errors.py``, which a task has where its answers err in several ways.

    Imports no torch, as ``answers`` does not.
    """

    FIELDS: int  # numbers of one answer in a row of ``Metrics.rows``
    OVERLAP: float  # from which an answer hits a thing, where nobody says more
    TITLES: dict[Any, str]  # the ways to err, and what people call them

    def thresholds(self, record: TaskRecord, classes: int) -> npt.NDArray[np.float64]:
        """The score that an answer of each class needs to be told, [K]."""
        ...

    def match(self, rows_NR: Rows, targets: Any, overlap: float) -> Matching:
        """The rows of ``Metrics.rows`` beside the targets of their images."""
        ...


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task, with its parts: each is imported when it is asked for.

    So an import of images has ``examples`` and no torch, and starts in a quarter of the time.

    Attributes:
        name: the folder's name.
        title: what the task is, for people: ``TITLE`` of the folder.
        score: the measure of which a better network has more: ``SCORE`` of the folder.
        package: the folder as a module.
        volumes: whether its examples are volumes: ``VOLUMES`` of the folder, if it says so;
            otherwise they are pictures.
    """

    name: str
    title: str
    score: str
    package: str
    volumes: bool = False

    def _part(self, name: str) -> Any:
        return importlib.import_module(f"{self.package}.{name}")

    @functools.cached_property
    def examples(self) -> Examples:
        return cast(Examples, self._part("examples"))

    @functools.cached_property
    def head(self) -> Head:
        return cast(Head, self._part("head"))

    @functools.cached_property
    def loss(self) -> Loss:
        return cast(Loss, self._part("loss"))

    @functools.cached_property
    def metrics(self) -> Metrics:
        return cast(Metrics, self._part("metrics"))

    @functools.cached_property
    def answers(self) -> Answers:
        return cast(Answers, self._part("answers"))

    @functools.cached_property
    def charts(self) -> Charts:
        return cast(Charts, self._part("charts"))

    @functools.cached_property
    def errors(self) -> Errors | None:
        """What a task says of its errors beyond a loss; most say nothing."""
        if importlib.util.find_spec(f"{self.package}.errors") is None:
            return None
        return cast(Errors, self._part("errors"))

    @functools.cached_property
    def tiles(self) -> Joining | None:
        """How answers to a picture's tiles become one; None where they cannot."""
        if importlib.util.find_spec(f"{self.package}.tiles") is None:
            return None
        return cast(Joining, self._part("tiles"))

    def record(self, numbers: Numbers | None = None) -> TaskRecord:
        """The record that a dataset, a run or a plan of this task holds."""
        return TaskRecord(name=self.name, score=self.score, numbers=dict(numbers or {}))
