"""Targets of volumes: a class number for each voxel, in the dataset an array of the volume's shape.

Voxels of the number 255 have no class: nothing is learned from them, and nothing measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute

from tessella.annotations.files import read_text
from tessella.artifacts.dataset import SkippedFile
from tessella.core.errors import DataError
from tessella.core.preprocess import Preprocess
from tessella.core.record import parse_json
from tessella.core.volumes import (
    IGNORED,
    SUFFIXES,
    array_in,
    encoded,
    read_header,
    read_labels,
    read_values,
    suffix_of,
)
from tessella.tasks import by_place
from tessella.tasks.block import Block, Sides
from tessella.tasks.found import Found, Request, Source

Labels = npt.NDArray[np.uint8]

NAMES = "classes"
SMOOTHED = False
PLACED = True
JOINED: tuple[str, ...] = ()
IMAGES, LABELS = ("imagesTr", "images", "image"), ("labelsTr", "labels", "label", "masks")
LIST, DESCRIPTION = "classes.txt", "dataset.json"
MODALITY = "_0000"  # behind the names of nnU-Net's images, and not of their labels
PLACES = 256  # voxels of each class that are kept, around which crops may be laid


@dataclass(frozen=True)
class LabelFile:
    """A volume's labels: numbers of so many classes.

    Attributes:
        state: size and time of the file: an import knows again whether it has changed.
    """

    file: str
    classes: int
    state: str


def find(request: Request) -> Found:
    """Volumes with their labels: a folder with ``images`` and ``labels`` (``imagesTr`` and
    ``labelsTr``), whose files have the same names, behind which nnU-Net's images have ``_0000``.

    ``dataset.json`` of MSD or nnU-Net names the classes, or ``classes.txt``, a line each.
    """
    root = request.source
    images, labels = (
        next((root / n for n in names if (root / n).is_dir()), None) for names in (IMAGES, LABELS)
    )
    if images is None or labels is None:
        raise DataError(
            "there are no volumes with labels here",
            seen=root,
            fix="give a folder with images and labels (or imagesTr and labelsTr) of equal names: "
            + ", ".join(SUFFIXES),
        )
    by_name = dict(_files(labels))
    found, skipped = [], []
    for name, file in _files(images):
        path = file.relative_to(images).as_posix()
        label = by_name.get(name) or by_name.get(name.removesuffix(MODALITY))
        if label is not None:
            found.append((file, path, label))
        elif name[:-5] in by_name and name[-5:-4] == "_" and name[-4:].isdigit():
            skipped.append(SkippedFile(path=path, reason="a further modality is not read"))
        else:
            skipped.append(SkippedFile(path=path, reason="there are no labels of this name"))
    if not found:
        raise DataError("no volume has labels", seen=root, fix="give both one name")
    classes = request.labels or _named(root) or _counted([label for _, _, label in found])
    sources = tuple(
        Source(str(file), path, LabelFile(str(label), len(classes), by_place.state_of(label)))
        for file, path, label in found
    )
    return Found(classes=classes, sources=sources, skipped=tuple(skipped))


def _files(folder: Path) -> list[tuple[str, Path]]:
    """The volumes in a folder with their names below it, without the endings, in order."""
    files = sorted(p for p in folder.rglob("*") if suffix_of(p) and not p.name.startswith("."))
    return [
        (p.relative_to(folder).as_posix()[: -len(suffix_of(p) or "")], p)
        for p in files
        if p.is_file()
    ]


def _named(root: Path) -> tuple[str, ...]:
    """The classes that a file beside the volumes names."""
    if (root / LIST).is_file():
        return by_place.listed(root / LIST)
    if not (root / DESCRIPTION).is_file():
        return ()
    where = str(root / DESCRIPTION)
    plain = parse_json(read_text(root / DESCRIPTION), where=where)
    labels = plain.get("labels") if isinstance(plain, dict) else None
    if not isinstance(labels, dict):
        return ()
    pairs = [(_number(k), v) if _number(k) is not None else (_number(v), k) for k, v in
             labels.items()]  # fmt: skip
    numbers = sorted(number for number, _ in pairs if number is not None)
    if len(numbers) < len(pairs) or numbers != list(range(len(numbers))):
        raise DataError(
            "the labels in dataset.json are not the numbers from 0 on",
            seen=f"{str(labels)[:200]} in {where}",
            fix="give each class one number; regions of several classes are not read",
        )
    names = tuple(str(name) for _, name in sorted(pairs, key=lambda pair: pair[0] or 0))
    if "ignore" in names:
        raise DataError(
            "dataset.json has the label 'ignore', which would be learned as a class",
            seen=f"{str(labels)[:200]} in {where}",
            fix=f"write {IGNORED} for voxels without a class, and leave the label out",
        )
    return names


def _number(value: Any) -> int | None:
    """A class number, as nnU-Net has it (1) or MSD ("1")."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 6 else None


def _counted(files: Sequence[Path]) -> tuple[str, ...]:
    """A name for each number up to the largest that occurs. Files that cannot be read wait."""
    highest = 0
    for file in files:
        try:
            values, _ = read_values(file)
        except DataError:
            continue
        known = values[(values >= 0) & (values < IGNORED)]
        highest = max(highest, int(known.max()) if known.size else 0)
    return tuple(f"class {k}" for k in range(highest + 1))


def stored(target: LabelFile, file: str, record: Preprocess) -> dict[str, Any]:
    """The labels as the dataset holds them, with the spacing of the volume's voxels."""
    image = read_header(file)
    labels, _ = read_labels(target.file, image.shape, target.classes)
    return target_of(labels, image.spacing)


def target_of(labels: Labels, spacing: Sequence[float] = (1.0, 1.0, 1.0)) -> dict[str, Any]:
    """Labels as the dataset holds them: an array, its classes, and some voxels of each of these."""
    numbers = np.unique(labels)
    classes = numbers[numbers != IGNORED].tolist()
    flat = labels.reshape(-1)
    places = [_some(np.flatnonzero(flat == k)) if k else [] for k in classes]
    return {
        "mask": encoded(labels), "classes": classes, "spacing": [*spacing], "places": places
    }  # fmt: skip


def _some(places: npt.NDArray[np.int64]) -> list[int]:
    chosen = np.linspace(0, len(places) - 1, min(PLACES, len(places))).astype(np.int64)
    return list(places[chosen].tolist())


def decoded(content: bytes | memoryview) -> Labels:
    """The labels in a dataset, uint8 [D, H, W].

    Raises:
        DataError: they are none.
    """
    labels = array_in(content, "uint8")
    if labels.ndim != 3:
        raise DataError("labels are not one number for each voxel", seen=labels.shape)
    return labels


def lacking(classes: Sequence[str]) -> str | None:
    if len(classes) >= IGNORED:
        return f"labels of 8 bits have at most {IGNORED} classes"
    return None if len(classes) > 1 else "volumes need at least two classes"


def column() -> pa.DataType:
    whole = pa.list_(pa.int64())
    return pa.struct([
        ("mask", pa.binary()), ("classes", whole), ("spacing", pa.list_(pa.float64())),
        ("places", pa.list_(whole)),
    ])  # fmt: skip


def feature(classes: tuple[str, ...]) -> dict[str, Any]:
    def many(inner: dict[str, Any]) -> dict[str, Any]:
        return {"_type": "List", "feature": inner}

    def value(kind: str) -> dict[str, Any]:
        return {"_type": "Value", "dtype": kind}

    return {
        "mask": value("binary"),
        "classes": many({"_type": "ClassLabel", "names": list(classes)}),
        "spacing": many(value("float64")),
        "places": many(many(value("int64"))),
    }


occurs, renumbered, strata = by_place.occurs, by_place.renumbered, by_place.strata
contradiction = by_place.contradiction_of(decoded)


class Voxels:
    """The labels of a split, read from its mapped shards when they are asked for."""

    def __init__(self, column: pa.ChunkedArray, classes: int) -> None:
        self._masks = pa.compute.struct_field(column, "mask")
        self._places = pa.compute.struct_field(column, "places")
        self._labels = pa.compute.struct_field(column, "classes").combine_chunks()
        self._classes = classes

    def __len__(self) -> int:
        return len(self._masks)

    def having(self, label: int) -> npt.NDArray[np.int64]:
        return by_place.having(self._labels, label)

    def shape(self, index: int) -> Sides:
        """Slices, rows and columns of a volume."""
        return self._mask(index).shape

    def places(self, index: int) -> list[list[int]]:
        """Some voxels of each class of a volume that is not the first, by their number in it."""
        count = self._mask(index).size
        places = [some for some in self._places[index].as_py() if some]
        if any(not 0 <= place < count for some in places for place in some):
            raise DataError(
                f"volume {index} names a voxel that it has not", fix="import the dataset again"
            )
        return places

    def batch(self, indices: npt.NDArray[np.int64], moves: Sequence[Any] | None = None) -> Labels:
        """Class numbers uint8 [B, D, H, W], 255 where there is none; of ``moves``, each a block.

        Raises:
            DataError: the number of no class, or whole volumes of several sizes.
        """
        whole = [self._mask(index) for index in indices.tolist()]
        if moves is not None:
            blocks: Sequence[Block] = moves
            pairs = zip(whole, blocks, strict=True)
            whole = [block.of(labels, outside=IGNORED) for labels, block in pairs]
        if len({labels.shape for labels in whole}) > 1:
            raise DataError("volumes of several sizes are no batch", fix="take one at a time")
        made = np.stack(whole)
        wrong = made[(made >= self._classes) & (made != IGNORED)]
        if len(wrong):
            raise DataError(
                "a volume has the number of no class",
                seen=f"{int(wrong[0])}, {self._classes} classes",
                fix="name all classes, and import the dataset again",
            )
        return made

    def _mask(self, index: int) -> Labels:
        return decoded(memoryview(self._masks[index].as_buffer()))


def targets(column: pa.ChunkedArray, classes: int) -> Voxels:
    fields = [pa.compute.struct_field(column, field.name) for field in column.type]
    if any(field.null_count for field in fields):
        raise ValueError("a row without labels")
    return Voxels(column, classes)


def blank(count: int, classes: int, size: Sequence[int]) -> Labels:
    return np.zeros((count, *size), np.uint8)
