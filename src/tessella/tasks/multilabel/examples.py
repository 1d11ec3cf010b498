"""Targets of multilabel: the numbers of a picture's classes, a list of int64 in the dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tessella.annotations import is_annotated, read_annotations
from tessella.artifacts.dataset import SkippedFile
from tessella.core.errors import DataError, UsageError
from tessella.core.preprocess import Preprocess
from tessella.tasks import tables
from tessella.tasks.found import Found, Request, Source
from tessella.tasks.moves import Moves

NAMES = "classes"
SMOOTHED = True
PLACED = False
JOINED: tuple[str, ...] = ()
Target = tuple[int, ...]
SEPARATORS = "|;,"  # between labels in a cell
BETWEEN = "+"  # between labels in a folder's name
NOTHING = "none"  # a folder of pictures without any label
YES, NO = frozenset({"1", "1.0", "true", "yes"}), frozenset({"0", "0.0", "", "false", "no", "-1"})


def find(request: Request) -> Found:
    """Pictures with their labels, in one of four forms.

    - a table with the columns path and labels, a cell ``cat|dog``;
    - a table with a column for each class, cells 1 and 0;
    - annotations of boxes or masks (COCO, YOLO, Pascal VOC, KITTI): the classes in each picture;
    - a folder whose subfolders are called ``cat``, ``dog``, ``cat+dog`` and ``none``.
    """
    if tables.is_table(request.source):
        return _in_table(request)
    if is_annotated(request.source):
        return _in_annotations(request)
    found = request.by_folder(request.source)
    named = [_names(name, BETWEEN) for name in found.classes]
    classes = tables.ordered({n for names in named for n in names} - {NOTHING})
    index = {name: number for number, name in enumerate(classes)}
    numbers = [tuple(sorted(index[n] for n in names if n != NOTHING)) for names in named]
    return Found(
        classes=classes,
        sources=tuple(Source(s.file, s.path, numbers[s.label]) for s in found.sources),
        skipped=found.skipped,
        notes=found.notes,
    )


def _names(text: str, separators: str) -> list[str]:
    for separator in separators[1:]:
        text = text.replace(separator, separators[0])
    return [name.strip() for name in text.split(separators[0]) if name.strip()]


def _in_table(request: Request) -> Found:
    table = tables.read(request.source, image_root=request.image_root)
    lists = {"labels", "label", "classes", "tags"} & {n.strip().lower() for n in table.columns}
    if lists or len(table.columns) == 1:
        return _in_one_column(request, table)
    classes = request.labels or tuple(table.columns)
    if unknown := [name for name in classes if name not in table.columns]:
        raise UsageError(
            "the table has no column for a label", seen=repr(unknown[0]), fix="add the column"
        )
    hot_NK = np.stack([_yes(table, name) for name in classes], axis=1)
    sources = tuple(
        Source(file, path, tuple(np.flatnonzero(hot_K).tolist()))
        for file, path, hot_K in zip(table.files, table.paths, hot_NK, strict=True)
    )
    return table.found(classes, sources, table.skipped)


def _yes(table: tables.Table, name: str) -> npt.NDArray[np.bool_]:
    """Whether each row says yes for a class."""
    cells = [text.lower() for text in table.texts(name)]
    for row, cell in enumerate(cells, start=1):
        if cell not in YES and cell not in NO:
            raise DataError(
                f"row {row} of the table says neither yes nor no for {name[:80]!r}",
                seen=f"{cell[:80]!r} in {table.where}",
                fix="write 1 or 0; or one column 'labels' with cells like cat|dog",
            )
    return np.array([cell in YES for cell in cells])


def _in_one_column(request: Request, table: tables.Table) -> Found:
    texts = table.texts(table.only_column("labels", "label", "classes", "tags"))
    every = (name for text in texts for name in _names(text, SEPARATORS))
    classes = request.labels or tables.ordered(every)
    index = {name: number for number, name in enumerate(classes)}
    sources, skipped = [], list(table.skipped)
    told = 0
    for text, file, path in zip(texts, table.files, table.paths, strict=True):
        names = _names(text, SEPARATORS)
        told += len(names)
        if told > tables.MAX_CELLS:
            raise DataError("the table has too many labels", seen=table.where, fix="split it")
        unknown = [name for name in names if name not in index]
        if unknown:
            reason = f"the label {unknown[0][:80]!r} is not among the labels"
            skipped.append(SkippedFile(path=path, reason=reason))
            continue
        sources.append(Source(file, path, tuple(sorted({index[name] for name in names}))))
    return table.found(classes, sources, skipped)


def _in_annotations(request: Request) -> Found:
    read = read_annotations(request.source, labels=request.labels, image_root=request.image_root)
    sources = [
        Source(p.file, p.path, tuple(sorted({t.label for t in p.things})), p.split)
        for p in read.pictures
    ]
    return Found(classes=read.classes, sources=tuple(sources), notes=read.said())


def stored(target: Target, file: str, record: Preprocess) -> Target:
    return target


def lacking(classes: Sequence[str]) -> str | None:
    return None if classes else "no picture has a label"


def column() -> pa.DataType:
    return pa.list_(pa.int64())


def feature(classes: tuple[str, ...]) -> dict[str, Any]:
    return {"_type": "List", "feature": {"_type": "ClassLabel", "names": list(classes)}}


def occurs(target: Target) -> Iterable[int]:
    return target


def renumbered(target: Target, numbers: Sequence[int], classes: int) -> Target:
    return tuple(sorted(numbers[k] for k in target))


def contradiction(targets: Sequence[Target]) -> Callable[[Sequence[int]], bool]:
    return lambda places: len({tuple(targets[i]) for i in places}) > 1


def strata(targets: Sequence[Target]) -> npt.NDArray[np.int64]:
    """The rarest of a picture's classes: so a holdout has a share of every class.

    Sechidis et al. 2011 hold out by the rarest label, too.
    """
    counts = np.bincount([k for target in targets for k in target] or [0])
    rarest = [min(target, key=lambda k: (counts[k], k)) + 1 if target else 0 for target in targets]
    return np.array(rarest, np.int64)


class LabelSets:
    """The sets of labels of a split: the labels of image i are values[starts[i]:starts[i + 1]]."""

    def __init__(
        self, values: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], classes: int
    ) -> None:
        self._values, self._starts, self._classes = values, starts, classes

    def __len__(self) -> int:
        return len(self._starts) - 1

    def having(self, label: int) -> npt.NDArray[np.int64]:
        places = np.flatnonzero(self._values == label)
        return np.unique(np.searchsorted(self._starts, places, side="right") - 1)

    def batch(
        self, indices: npt.NDArray[np.int64], moves: Sequence[Moves] | None = None
    ) -> npt.NDArray[np.float32]:
        """1 where an image has the class, float32 [B, K]."""
        hot_BK = np.zeros((len(indices), self._classes), np.float32)
        for row, index in enumerate(indices.tolist()):
            hot_BK[row, self._values[self._starts[index] : self._starts[index + 1]]] = 1.0
        return hot_BK


def targets(column: pa.ChunkedArray, classes: int) -> LabelSets:
    """The sets of a column; raises ``ValueError`` where a label names no class."""
    array = column.combine_chunks()
    if column.null_count or array.flatten().null_count:
        raise ValueError("a row without a list of labels")
    values = array.flatten().to_numpy(zero_copy_only=False)
    lengths = array.value_lengths().to_numpy(zero_copy_only=False)
    if len(values) and (values.min() < 0 or values.max() >= classes):
        raise ValueError(f"a label of {values.min()} to {values.max()}, {classes} classes")
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return LabelSets(values.astype(np.int64), starts, classes)


def blank(count: int, classes: int, size: Sequence[int]) -> npt.NDArray[np.float32]:
    return np.zeros((count, classes), np.float32)
