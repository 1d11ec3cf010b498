"""What an import will read: every file with its class and its split, before a pixel is decoded."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tessella.annotations import is_annotated
from tessella.annotations.files import read_text
from tessella.artifacts.dataset import SkippedFile
from tessella.core.errors import DataError
from tessella.core.legible import legible
from tessella.core.task import CLASSIFICATION
from tessella.data.sources import find
from tessella.data.splitting import TEST, TRAIN, VAL, hold_out, hold_out_groups
from tessella.tasks import Found, Request, Source, Task

HELD_OUT = {"val": VAL, "test": TEST}
# How folders are called that hold pictures and what is known of them, and are no classes.
PARTS_OF = {
    frozenset(("masks", "segmentationclass")): "segmentation",
    frozenset(("labelstr",)): "volumes",
}
PARTS = {
    "images", "labels", "annotations", "masks", "image_2", "label_2", "default", "jpegimages",
    "segmentationclass", "segmentationobject", "imagesets", "obj_train_data", "imagestr",
    "labelstr", "imagests", "train2017", "val2017", "test2017", "train", "training", "val", "valid",
    "validation", "test", "testing",
}  # fmt: skip
ANNOTATED = "detection, instances, segmentation or multilabel"
VOLUMES = (".nii", ".nii.gz", ".npy", ".npz")  # no picture is in such a file
LOOKED_AT = 100  # of a folder's files
JSON_OR_YAML = (".json", ".yaml", ".yml")
GROUPS, GROUPS_HEAD = "groups.csv", ("path", "group")


@dataclass(frozen=True, kw_only=True)
class Listing:
    """``splits[i]`` is the split of ``sources[i]``: ``TRAIN``, ``VAL`` or ``TEST``.

    Attributes:
        bare: nobody has labelled the images yet, on purpose.
    """

    classes: tuple[str, ...]
    sources: tuple[Source, ...]
    splits: npt.NDArray[np.int8]
    skipped: tuple[SkippedFile, ...]
    notes: tuple[str, ...]
    bare: bool = False


def list_images(
    source: Path,
    *,
    task: Task,
    labels: tuple[str, ...] | None,
    image_root: Path | None,
    val: float | Path,
    test: float | Path,
    seed: int,
) -> Listing:
    """Find the images and decide which are held out.

    Args:
        task: says what the labels are.
        val, test: a fraction of ``source``, or a folder or list of its own. Where the files
            themselves say which images are held out, they decide instead of a fraction.

    Raises:
        DataError: nothing to read, one class only, or a held-out folder with classes of its own.
    """

    def find_labelled(where: Path) -> Found:
        request = Request(
            source=where,
            labels=labels,
            image_root=image_root,
            by_folder=lambda path: find(path, labels=labels, image_root=image_root),
        )
        return _written(task.examples.find(request))

    if task.name == CLASSIFICATION.name:
        _refuse_other_tasks(source)
    found = find_labelled(source)
    if why := task.examples.lacking(found.classes):
        raise DataError(
            why,
            seen=f"only {', '.join(map(repr, found.classes)) or 'no name'} in {source}",
            fix="give a folder with a subfolder for each class, or a table of labels",
        )
    decided = any(s.split in HELD_OUT for s in found.sources)  # by the annotations
    fractions = [0.0 if decided or isinstance(part, Path) else part for part in (val, test)]
    groups, told = (found.groups, ()) if found.groups else _groups(source, found)
    splits = _splits(found, groups, task, fractions, seed)
    if decided:
        splits = np.array([HELD_OUT.get(s.split, TRAIN) for s in found.sources], np.int8)
    sources, skipped, notes = list(found.sources), list(found.skipped), [*found.notes, *told]
    parts, written = [splits], {found.written: source}
    for split, part in ((VAL, val), (TEST, test)):
        if isinstance(part, Path):
            own = find_labelled(part)
            sources += _in_classes(own, found.classes, part, task, written)
            skipped += own.skipped
            notes += [f"{part.name}: {note}" for note in own.notes]
            parts.append(np.full(len(own.sources), split, np.int8))
    of_all = [k for s in found.sources for k in task.examples.occurs(s.label)]
    counts = np.bincount(np.array(of_all, np.int64), minlength=len(found.classes))
    singles = np.flatnonzero(counts == 1)
    if any(fractions) and len(singles) and task.examples.NAMES == "classes":
        names = ", ".join(repr(found.classes[c]) for c in singles[:10])
        notes.append(f"one image alone, which goes to training: {names}")
    return Listing(
        classes=found.classes,
        sources=tuple(sources),
        splits=np.concatenate(parts),
        skipped=tuple(skipped),
        notes=tuple(notes),
        bare=found.bare,
    )


def _written(found: Found) -> Found:
    """What was found, with names that can be written."""

    def named(source: Source) -> Source:
        path = legible(source.path)
        return source if path == source.path else replace(source, path=path)

    return replace(
        found,
        classes=tuple(map(legible, found.classes)),
        sources=tuple(map(named, found.sources)),
        skipped=tuple(
            SkippedFile(path=legible(s.path), reason=legible(s.reason)) for s in found.skipped
        ),
        groups={legible(path): group for path, group in found.groups.items()},
    )


def _refuse_other_tasks(source: Path) -> None:
    """Refuse annotations, masks and volumes, whose folders would be taken for classes.

    Raises:
        DataError: all folders of ``source`` are called as the parts of these are.
    """
    folders = {p.name.lower() for p in source.iterdir() if p.is_dir()} if source.is_dir() else set()
    if not folders <= PARTS or (source.is_file() and source.suffix.lower() not in JSON_OR_YAML):
        return
    tasks = next((tasks for names, tasks in PARTS_OF.items() if names & folders), None)
    if tasks is None and "images" in folders and _holds_volumes(source):
        tasks = "volumes"
    if tasks is None and is_annotated(source):
        tasks = ANNOTATED
    if tasks is not None:
        raise DataError(
            "these are annotations, and no folder or list of classes",
            seen=f"{', '.join(sorted(folders)) or source.name} in {source}",
            fix=f"say what is to be learned by --task (in Python task=): {tasks}",
        )


def _holds_volumes(source: Path) -> bool:
    images = next(p for p in source.iterdir() if p.name.lower() == "images" and p.is_dir())
    return any(p.name.lower().endswith(VOLUMES) for p in islice(images.iterdir(), LOOKED_AT))


def _splits(
    found: Found, groups: Mapping[str, str], task: Task, fractions: Sequence[float], seed: int
) -> npt.NDArray[np.int8]:
    """The split of each image; ``fractions`` are those of validation and test."""
    of_class = task.examples.strata([s.label for s in found.sources])
    val, test = fractions
    if not groups:
        return hold_out(of_class, val=val, test=test, seed=seed)
    group_of = [groups.get(s.path, f"/{s.path}") for s in found.sources]
    return hold_out_groups(of_class, group_of, val=val, test=test, seed=seed)


def _groups(source: Path, found: Found) -> tuple[dict[str, str], tuple[str, ...]]:
    """The groups of what was found, and a note on those that are of nothing.

    Raises:
        DataError: as ``read_groups``, or no group is of a picture that was found.
    """
    groups = read_groups(source)
    paths = {s.path for s in found.sources}
    lost = [path for path in groups if path not in paths]
    if groups and len(lost) == len(groups):
        raise DataError(
            f"{GROUPS} names no picture",
            seen=f"{lost[0][:100]!r}, and a picture is called {min(paths, default='')[:100]!r}",
            fix="write the paths as the dataset calls the pictures",
        )
    note = f"{len(lost):,} of {len(groups):,} paths in {GROUPS} are of no picture here"
    return groups, (f"{note}, the first {lost[0][:100]!r}",) if lost else ()


def read_groups(source: Path) -> dict[str, str]:
    """The group of each picture by its path, of a ``groups.csv`` in a folder, or beside a file.

    Its lines are a picture's path, as the dataset calls it, and a group; the first names both. A
    picture whose group is empty is one of its own.

    Raises:
        DataError: the file cannot be read, has other columns, or a line with more or fewer cells.
    """
    file = (source if source.is_dir() else source.parent) / GROUPS
    if not file.is_file():
        return {}
    groups: dict[str, str] = {}
    rows = csv.reader(io.StringIO(read_text(file), newline=""))
    try:
        if next(rows, []) != list(GROUPS_HEAD):
            raise ValueError("it does not begin with its columns")
        for row in rows:
            if row and len(row) != 2:
                raise ValueError(f"line {rows.line_num} has {len(row)} cells")
            groups |= {row[0]: row[1]} if row and row[1] else {}
    except (csv.Error, ValueError) as error:
        raise DataError(
            f"{GROUPS} cannot be read", seen=f"{file}: {error}", fix=",".join(GROUPS_HEAD)
        ) from error
    return groups


def _check_written(known: dict[str, Path], written: str, where: Path) -> None:
    """Add how a part's labels are written to what is known of the parts before it.

    Raises:
        DataError: those were written in another way.
    """
    known.setdefault(written, where)
    if len(ways := [way for way in known if way]) > 1:
        raise DataError(
            "the labels of the parts are written in different ways",
            seen="; ".join(f"{way} in {known[way]}" for way in ways),
            fix="write those of all parts in the first of these ways",
        )


def _in_classes(
    found: Found, classes: tuple[str, ...], where: Path, task: Task, written: dict[str, Path]
) -> list[Source]:
    """The sources with their labels as indices into ``classes``.

    Args:
        written: how the labels of the parts before it are written, and where; gets this part's.
    """
    _check_written(written, found.written, where)
    if unknown := sorted(set(found.classes) - set(classes)):
        raise DataError(
            "the held-out images have a class that training has not",
            seen=f"{', '.join(map(repr, unknown[:5]))} in {where}",
            fix="use the same class names in every folder",
        )
    number = {name: label for label, name in enumerate(classes)}
    numbers = [number[name] for name in found.classes]
    renumbered = task.examples.renumbered
    return [
        Source(s.file, s.path, renumbered(s.label, numbers, len(classes))) for s in found.sources
    ]


def fingerprint(listing: Listing, settings_hash: str) -> str:
    """SHA-256 over an import's settings and its files' paths, labels, splits, sizes and times."""
    hashed = sha256(settings_hash.encode())
    for name in listing.classes:
        hashed.update(f"{name}\n".encode())
    for source, split in zip(listing.sources, listing.splits, strict=True):
        try:
            status = os.stat(source.file)
            state = f"{status.st_size} {status.st_mtime_ns}"
        except (OSError, ValueError):
            state = "unreadable"
        hashed.update(f"{source.path}\t{source.label}\t{split}\t{state}\n".encode())
    return hashed.hexdigest()


SPLIT_NAMES = {TRAIN: "train", VAL: "val", TEST: "test"}
