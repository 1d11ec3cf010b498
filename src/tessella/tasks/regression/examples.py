"""Targets of regression: a number for each name, a list of float64 in the dataset.

A number may be missing, which NaN says: the loss and the measures leave it out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tessella.artifacts.dataset import SkippedFile
from tessella.core.errors import CorruptArtifact, DataError, UsageError
from tessella.core.preprocess import Preprocess
from tessella.tasks import tables
from tessella.tasks.found import Found, Request, Source
from tessella.tasks.moves import Moves

NAMES = "numbers"
SMOOTHED = False
PLACED = False
JOINED: tuple[str, ...] = ()
Target = tuple[float, ...]
BINS = 8  # of the first number, for the holdout
SCALES = ("mean", "std")  # of each number, in the record of the task
APART = 0.1  # standard deviations: numbers of two equal pictures that are farther apart contradict


def find(request: Request) -> Found:
    """A table with a column for each number, or a folder whose subfolders are numbers."""
    if not tables.is_table(request.source):
        return _in_folders(request)
    table = tables.read(request.source, image_root=request.image_root)
    names = request.labels or tuple(table.columns)
    if unknown := [name for name in names if name not in table.columns]:
        raise UsageError(
            "the table has no column of this name", seen=repr(unknown[0]), fix="correct the name"
        )
    values_NK = np.stack([table.floats(name) for name in names], axis=1)
    sources, skipped = [], list(table.skipped)
    for file, path, values in zip(table.files, table.paths, values_NK, strict=True):
        if np.isnan(values).all():
            skipped.append(SkippedFile(path=path, reason="the table has no number"))
            continue
        sources.append(Source(file, path, tuple(values.tolist())))
    return table.found(names, sources, skipped)


def _in_folders(request: Request) -> Found:
    found = request.by_folder(request.source)
    numbers = [tables.number_in(name) for name in found.classes]
    for name, number in zip(found.classes, numbers, strict=True):
        if number is None:
            raise DataError(
                "a folder's name is no number",
                seen=repr(name[:80]),
                fix="give a table with a column for each number, or name each folder by its number",
            )
    return Found(
        classes=("value",),
        sources=tuple(Source(s.file, s.path, (numbers[s.label],)) for s in found.sources),
        skipped=found.skipped,
        notes=found.notes,
    )


def stored(target: Target, file: str, record: Preprocess) -> Target:
    return target


def lacking(classes: Sequence[str]) -> str | None:
    return None if classes else "no picture has a number"


def column() -> pa.DataType:
    return pa.list_(pa.float64())


def feature(classes: tuple[str, ...]) -> dict[str, Any]:
    return {"_type": "List", "feature": {"_type": "Value", "dtype": "float64"}}


def occurs(target: Target) -> Iterable[int]:
    return (k for k, value in enumerate(target) if not math.isnan(value))


def renumbered(target: Target, numbers: Sequence[int], classes: int) -> Target:
    moved = [math.nan] * classes
    for value, place in zip(target, numbers, strict=True):
        moved[place] = value
    return tuple(moved)


def contradiction(targets: Sequence[Target]) -> Callable[[Sequence[int]], bool]:
    """Numbers farther apart than a tenth of their standard deviation; a missing one is right."""
    values_NK = np.array(targets, np.float64)
    least_K = APART * np.array([_spread(values_N) for values_N in values_NK.T])

    def contradict(places: Sequence[int]) -> bool:
        some_NK = values_NK[list(places)]
        spans = zip(some_NK.T, least_K, strict=True)
        return any(_spread(v, np.ptp) > least for v, least in spans)

    return contradict


def _spread(
    values_N: npt.NDArray[np.float64], measure: Callable[..., np.floating] = np.std
) -> float:
    known = values_N[~np.isnan(values_N)]
    return float(measure(known)) if len(known) else 0.0


def strata(targets: Sequence[Target]) -> npt.NDArray[np.int64]:
    """Eight groups of equal size by the first number, so that a holdout spans its range."""
    first = np.array([target[0] for target in targets], np.float64)
    ranks = np.argsort(np.argsort(first, kind="stable"), kind="stable")
    return np.asarray(ranks * BINS // max(len(first), 1), np.int64)


class Values:
    """The numbers of a split, float64 [N, K], NaN where one is missing."""

    def __init__(self, values_NK: npt.NDArray[np.float64]) -> None:
        self.values_NK = values_NK

    def __len__(self) -> int:
        return len(self.values_NK)

    def having(self, label: int) -> npt.NDArray[np.int64]:
        return np.flatnonzero(~np.isnan(self.values_NK[:, label]))

    def batch(
        self, indices: npt.NDArray[np.int64], moves: Sequence[Moves] | None = None
    ) -> npt.NDArray[np.float64]:
        return self.values_NK[indices]


def targets(column: pa.ChunkedArray, classes: int) -> Values:
    """The numbers of a column; raises ``ValueError`` for a row of another length, or infinity."""
    array = column.combine_chunks()
    lengths = array.value_lengths().to_numpy(zero_copy_only=False)
    if column.null_count or (lengths != classes).any():
        raise ValueError(f"a row that has not {classes} numbers")
    values = array.flatten().to_numpy(zero_copy_only=False).astype(np.float64)
    if np.isinf(values).any() or (np.abs(values[~np.isnan(values)]) > 3.1e38).any():
        raise ValueError("a number that float32 cannot hold")
    return Values(values.reshape(-1, classes))


def blank(count: int, classes: int, size: Sequence[int]) -> npt.NDArray[np.float64]:
    return np.zeros((count, classes))


def scale(
    numbers: Mapping[str, tuple[float, ...]], name: str, classes: int
) -> npt.NDArray[np.float64]:
    """The means or the standard deviations of so many numbers, float64 [K].

    Raises:
        CorruptArtifact: the record lacks them. A file may be a stranger's.
    """
    values = numbers.get(name, ())
    if len(values) != classes or (name == "std" and min(values, default=1.0) <= 0):
        raise CorruptArtifact(
            f"the record of the task has no {name} for each number",
            seen=f"{values[:8]} for {classes} numbers",
            fix="train the network again",
        )
    return np.array(values, np.float64)
