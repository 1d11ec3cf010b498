"""Targets of classification: the number of a class, an int64 in the dataset."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tessella.artifacts.dataset import SkippedFile
from tessella.core.errors import DataError
from tessella.core.preprocess import Preprocess
from tessella.tasks import tables
from tessella.tasks.found import Found, Request, Source
from tessella.tasks.moves import Moves

NAMES = "classes"
SMOOTHED = True
PLACED = False
JOINED: tuple[str, ...] = ()


def find(request: Request) -> Found:
    """A folder with a subfolder a class, a text list, or a table with a column ``label``."""
    if not tables.is_table(request.source):
        return request.by_folder(request.source)
    table = tables.read(request.source, image_root=request.image_root)
    column = table.only_column("label", "class")
    texts = table.texts(column)
    classes = request.labels or tables.ordered(name for name in texts if name)
    index = {name: number for number, name in enumerate(classes)}
    sources, skipped = [], list(table.skipped)
    for row, name in enumerate(texts):
        if not name:
            skipped.append(SkippedFile(path=table.paths[row], reason="the table has no label"))
            continue
        if name not in index:
            raise DataError(
                f"row {row + 1} of the table has an unknown label",
                seen=f"{name[:80]!r}; {len(classes)} labels are known",
                fix="correct the row, or name the class among the labels",
            )
        sources.append(Source(table.files[row], table.paths[row], index[name]))
    return replace(table.found(classes, sources, skipped), notes=_several(classes))


def _several(classes: Sequence[str]) -> tuple[str, ...]:
    """What to say where a class is called as several of the others together."""
    known = set(classes)
    for name in classes:
        parts = [part.strip() for part in re.split(r"[|;,]", name)]
        if len(parts) > 1 and known.issuperset(parts):
            return (f"{name[:80]!r} is taken for one class; pictures with several labels are "
                    "imported with --task multilabel",)  # fmt: skip
    return ()


def stored(target: int, file: str, record: Preprocess) -> int:
    return target


def lacking(classes: Sequence[str]) -> str | None:
    return None if len(classes) > 1 else "a classifier needs at least two classes"


def column() -> pa.DataType:
    return pa.int64()


def feature(classes: tuple[str, ...]) -> dict[str, Any]:
    return {"_type": "ClassLabel", "names": list(classes)}


def occurs(target: int) -> Iterable[int]:
    return (target,)


def renumbered(target: int, numbers: Sequence[int], classes: int) -> int:
    return numbers[target]


def contradiction(targets: Sequence[int]) -> Callable[[Sequence[int]], bool]:
    return lambda places: len({targets[i] for i in places}) > 1


def strata(targets: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.array(targets, np.int64)


class Labels:
    """The labels of a split, int64 [N]."""

    def __init__(self, labels_N: npt.NDArray[np.int64]) -> None:
        self.labels_N = labels_N

    def __len__(self) -> int:
        return len(self.labels_N)

    def having(self, label: int) -> npt.NDArray[np.int64]:
        return np.flatnonzero(self.labels_N == label)

    def batch(
        self, indices: npt.NDArray[np.int64], moves: Sequence[Moves] | None = None
    ) -> npt.NDArray[np.int64]:
        return self.labels_N[indices]


def targets(column: pa.ChunkedArray, classes: int) -> Labels:
    """The labels of a column; raises ``ValueError`` where one names no class."""
    labels = column.to_numpy()
    outside = (labels < 0) | (labels >= classes)
    if outside.any():
        row = int(outside.argmax())
        raise ValueError(f"row {row} has the label {labels[row]}, {classes} classes")
    return Labels(labels)


def blank(count: int, classes: int, size: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.zeros(count, np.int64)
