"""YOLO's ``data.yaml``: folders of pictures, and beside them one text file a picture.

A line is a class and four numbers, the middle and the size of a box, or a class and an outline; all
as fractions of the picture. Of a class, a box and key points (``kpt_shape``) the box is read.

Instead of a ``data.yaml`` Label Studio writes ``classes.txt`` beside ``images`` and ``labels``, and
CVAT ``obj.names`` beside lists of pictures.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tessella.annotations.check import Checker
from tessella.annotations.files import NOWHERE, inside, read_text, size_of
from tessella.annotations.record import Annotations, Picture, Problem
from tessella.core.errors import DataError

SPLITS = ("train", "val", "test")
MAX_YAML = 1 << 20
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")
MAX_LINES = 1 << 16
NAMES = ("classes.txt", "obj.names")  # of a folder without a data.yaml
EMPTY = ("", "~", "null", "Null", "NULL")  # YAML's ways of writing nothing
OTHER_NAMES = {"valid": "val", "validation": "val"}  # CVAT's, and older ones, of a split
MAX_DEPTH = 32  # of lists in lists
# What looks like a number or a date stays a text, as it is written. libyaml reads 180 kB in 0.2 s,
# Python's own loader in 1.7.
LOADER = getattr(yaml, "CBaseLoader", yaml.BaseLoader)


@dataclass(frozen=True, kw_only=True)
class Names:
    """What the lines of a dataset mean: how many classes, and whether key points follow a box."""

    classes: int
    points: bool = False


def is_folder(folder: Path) -> bool:
    """Whether a folder without a ``data.yaml`` names its classes."""
    named = any((folder / name).is_file() for name in NAMES)
    lists = any((folder / f"{split}.txt").is_file() for split in (*SPLITS, *OTHER_NAMES))
    return named and (lists or ((folder / "images").is_dir() and (folder / "labels").is_dir()))


def read_folder(folder: Path) -> Annotations:
    """The annotations of such a folder.

    Raises:
        DataError: it names no classes, or no pictures.
    """
    file = next(folder / name for name in NAMES if (folder / name).is_file())
    names = [line.strip() for line in read_text(file).splitlines() if line.strip()]
    classes = _names(names, file)
    lists = {split: f"{split}.txt" for split in (*SPLITS, *OTHER_NAMES)}
    lists = {split: name for split, name in lists.items() if (folder / name).is_file()}
    return _read(folder, folder, lists or {"": "images"}, classes, Names(classes=len(classes)))


def read(path: Path) -> Annotations:
    """The annotations that a ``data.yaml`` leads to.

    Raises:
        DataError: no such file, or it names no classes or no pictures.
    """
    text = read_text(path)
    try:
        data = _parsed(text)
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:
        raise DataError(
            "this is no YAML that can be read", seen=f"{path}: {str(error)[:200]}", fix="mend it"
        ) from error
    if not isinstance(data, dict):
        raise DataError("this is no data.yaml", seen=path, fix="give names, train and val")
    classes = _names(data.get("names"), path)
    base = path.parent
    above = data.get("path")
    if isinstance(above, str) and above not in EMPTY and inside(above, base):
        base = base / str(inside(above, base))
    places = {split: data[split] for split in (*SPLITS, *OTHER_NAMES) if split in data}
    known = Names(classes=len(classes), points="kpt_shape" in data)
    return _read(base, path.parent, places, classes, known)


def _parsed(text: str) -> Any:
    """Lists and mappings of texts.

    Aliases are refused: each can double what the file stands for.

    Raises:
        yaml.YAMLError: too long, too deep, with an alias, or no YAML.
    """
    if len(text) > MAX_YAML:
        raise yaml.YAMLError(f"{len(text):,} characters")
    depth = 0
    for event in yaml.parse(text, LOADER):
        if isinstance(event, yaml.AliasEvent):
            line = event.start_mark.line + 1
            raise yaml.YAMLError(f"an alias (*) is not read, as in line {line}")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise yaml.YAMLError(f"lists lie deeper in each other than {MAX_DEPTH}")
    return yaml.load(text, LOADER)


def _read(
    base: Path, here: Path, entries: dict[str, Any], classes: tuple[str, ...], known: Names
) -> Annotations:
    problems: list[Problem] = []
    pictures: dict[Path, Picture] = {}
    labels: set[Path] = set()
    for name, entry in entries.items():
        split = OTHER_NAMES.get(name, name)
        for place in _places(entry, base, here, problems):
            for file in _files(place, base, problems):
                if (where := Path(os.path.normpath(file))) in pictures:
                    twice = pictures[where]
                    what = f"the picture is there twice: in {twice.split} and {split}"
                    problems.append(Problem(path=twice.path, what=what))
                    continue
                labels.add(_label_file(file))
                if (picture := _picture(file, base, known, split, problems)) is not None:
                    pictures[where] = picture
    if not pictures:
        raise DataError(
            "the annotations lead to no pictures",
            seen=f"{list(entries.values())} in {base}"[:200],
            fix="let train and val name folders of pictures below it; an export without pictures, "
            "as Label Studio's YOLO, needs them in its folder images",
        )
    folders = {file.parent for file in labels if file.parent.name == "labels"}
    for folder in sorted(folders):
        for lost in sorted(set(folder.glob("*.txt")) - labels):
            if lost.name not in NAMES:
                name = inside(str(lost), base) or lost.name
                problems.append(Problem(path=name, what="there is no picture of this name"))
    bare = sum(not file.is_file() for file in labels)
    note = f"{bare:,} pictures have no file of labels: they show nothing"
    order = sorted(pictures.values(), key=lambda p: ([*SPLITS, ""].index(p.split), p.path))
    return Annotations(
        classes=classes,
        pictures=tuple(order),
        problems=tuple(problems),
        notes=(note,) if bare else (),
    )


def _names(names: Any, path: Path) -> tuple[str, ...]:
    if isinstance(names, dict):
        numbers = [str(number) for number in range(len(names))]
        names = [names[n] for n in numbers] if set(names) == set(numbers) else names
    texts = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not texts or not names or len(set(names)) != len(names):
        raise DataError(
            "the data.yaml does not name its classes",
            seen=f"names: {str(names)[:100]} in {path}",
            fix="write names: [cat, dog], or names: with a line for each number from 0",
        )
    return tuple(names)


def _places(entry: Any, base: Path, here: Path, problems: list[Problem]) -> list[Path]:
    """The folders or lists of a split; exports write ``../train/images`` for ``train/images``."""
    places = []
    for text in entry if isinstance(entry, list) else [] if entry in EMPTY else [entry]:
        if not isinstance(text, str):
            problems.append(Problem(path=str(text)[:200], what="this is no folder and no list"))
            continue
        candidates = (inside(text, base), inside(text.removeprefix("../"), here))
        found = [p for p, root in zip(candidates, (base, here), strict=True) if p is not None]
        roots = [r for p, r in zip(candidates, (base, here), strict=True) if p is not None]
        there = [r / p for p, r in zip(found, roots, strict=True) if (r / p).exists()]
        if there:
            places.append(there[0])
        else:
            problems.append(Problem(path=text[:200], what="there is no such folder or list"))
    return places


def _files(place: Path, base: Path, problems: list[Problem]) -> list[Path]:
    if place.is_dir():
        return sorted(p for p in place.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
    files = []
    for line in read_text(place).splitlines():
        name = inside(line, base)
        if name is not None and not (base / name).is_file():
            below = name.removeprefix("data/")  # where CVAT says its pictures would lie
            name = below if (base / below).is_file() else name
        if name is None:
            if line.strip():
                problems.append(Problem(path=line[:200], what=NOWHERE))
        else:
            files.append(base / name)
    return files


def _label_file(file: Path) -> Path:
    """``…/labels/x.txt`` of ``…/images/x.png``: the last folder ``images`` on the way; or else the
    file beside the picture, if there is one."""
    parts = list(file.parts)
    places = [i for i, part in enumerate(parts[:-1]) if part == "images"]
    if places:
        parts[places[-1]] = "labels"
    made, beside = Path(*parts).with_suffix(".txt"), file.with_suffix(".txt")
    return beside if not made.is_file() and beside.is_file() else made


def _picture(
    file: Path, base: Path, known: Names, split: str, problems: list[Problem]
) -> Picture | None:
    name = inside(str(file), base) or file.name
    size = size_of(str(file))
    if isinstance(size, str):
        problems.append(Problem(path=name, what=size))
        return None
    height, width = size
    checker = Checker(name, height, width, problems)
    labels = _label_file(file)
    if labels.is_file():  # without one the picture shows nothing
        try:
            lines = read_text(labels).splitlines()
        except DataError as error:
            problems.append(Problem(path=name, what=str(error)[:200]))
            return None
        for line in lines[:MAX_LINES]:
            _add(line, checker, known)
    return Picture(
        file=str(file),
        path=name,
        height=height,
        width=width,
        things=tuple(checker.things),
        split=split,
    )


def _add(line: str, checker: Checker, known: Names) -> None:
    words = line.split()
    if not words:
        return
    try:
        label, numbers = float(words[0]), [float(w) for w in words[1:]]
    except ValueError:
        checker.tell(f"a line is not numbers: {line[:80]}")
        return
    if not (label.is_integer() and 0 <= label < known.classes):
        checker.tell(f"a thing's class is unknown: {words[0][:40]}")
        return
    height, width = checker.height, checker.width
    numbers = numbers[:4] if known.points else numbers
    if len(numbers) == 4:
        x, y, w, h = numbers
        checker.add(int(label), [(x - w / 2) * width, (y - h / 2) * height, w * width, h * height])
    elif len(numbers) >= 6 and len(numbers) % 2 == 0:
        outline = [v * (height if i % 2 else width) for i, v in enumerate(numbers)]
        xs, ys = outline[0::2], outline[1::2]
        box = [min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)]
        checker.add(int(label), box, polygons=[outline])
    else:
        checker.tell(f"a line is neither a box nor an outline: {line[:80]}")
