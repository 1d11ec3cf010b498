"""YOLO's ``data.yaml``: folders of pictures, and beside them one text file a picture.

A line is a class and four numbers, the middle and the size of a box, or a class and an outline; all
as fractions of the picture.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tessella.annotations.check import Checker
from tessella.annotations.files import inside, read_text, size_of
from tessella.annotations.record import Annotations, Picture, Problem
from tessella.core.errors import DataError

SPLITS = ("train", "val", "test")
MAX_YAML = 1 << 20
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")
MAX_LINES = 1 << 16


def read(path: Path) -> Annotations:
    """The annotations that a ``data.yaml`` leads to.

    Raises:
        DataError: no such file, or it names no classes or no pictures.
    """
    text = read_text(path)
    try:
        if len(text) > MAX_YAML or text.count("&") > 100:  # anchors: they can stand for more
            raise yaml.YAMLError("too long, or too many anchors")
        data = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise DataError(
            "this is no YAML that can be read", seen=f"{path}: {str(error)[:200]}", fix="mend it"
        ) from error
    if not isinstance(data, dict):
        raise DataError("this is no data.yaml", seen=path, fix="give names, train and val")
    classes = _names(data.get("names"), path)
    base = path.parent
    if isinstance(data.get("path"), str) and inside(data["path"], base):
        base = base / str(inside(data["path"], base))
    problems: list[Problem] = []
    pictures: list[Picture] = []
    for split in SPLITS:
        for place in _places(data.get(split), base, path.parent, problems):
            for file in _files(place, base, problems):
                picture = _picture(file, base, len(classes), split, problems)
                pictures += [] if picture is None else [picture]
    if not pictures:
        raise DataError(
            "the data.yaml leads to no pictures",
            seen=f"{[data.get(s) for s in SPLITS]} in {base}"[:200],
            fix="let train and val name folders of pictures below it",
        )
    pictures.sort(key=lambda p: (SPLITS.index(p.split), p.path))
    return Annotations(classes=classes, pictures=tuple(pictures), problems=tuple(problems))


def _names(names: Any, path: Path) -> tuple[str, ...]:
    if isinstance(names, dict) and sorted(names, key=str) == sorted(range(len(names)), key=str):
        names = [names[k] for k in range(len(names))]
    if not isinstance(names, list) or not names or len(set(map(str, names))) != len(names):
        raise DataError(
            "the data.yaml does not name its classes",
            seen=f"names: {str(names)[:100]} in {path}",
            fix="write names: [cat, dog], or names: with a line for each number from 0",
        )
    return tuple(str(name) for name in names)


def _places(entry: Any, base: Path, here: Path, problems: list[Problem]) -> list[Path]:
    """The folders or lists of a split; exports write ``../train/images`` for ``train/images``."""
    places = []
    for name in entry if isinstance(entry, list) else [] if entry is None else [entry]:
        text = str(name)
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
        if name is None:
            if line.strip():
                what = "the path leads out of the folder"
                problems.append(Problem(path=line[:200], what=what))
        else:
            files.append(base / name)
    return files


def _label_file(file: Path) -> Path:
    """``…/labels/x.txt`` of ``…/images/x.png``: the last folder ``images`` on the way."""
    parts = list(file.parts)
    places = [i for i, part in enumerate(parts[:-1]) if part == "images"]
    if places:
        parts[places[-1]] = "labels"
    return Path(*parts).with_suffix(".txt")


def _picture(
    file: Path, base: Path, classes: int, split: str, problems: list[Problem]
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
        for line in read_text(labels).splitlines()[:MAX_LINES]:
            _add(line, checker, classes)
    return Picture(
        file=str(file),
        path=name,
        height=height,
        width=width,
        things=tuple(checker.things),
        split=split,
    )


def _add(line: str, checker: Checker, classes: int) -> None:
    words = line.split()
    if not words:
        return
    try:
        label, numbers = float(words[0]), [float(w) for w in words[1:]]
    except ValueError:
        checker.tell(f"a line is not numbers: {line[:80]}")
        return
    if not (label.is_integer() and 0 <= label < classes):
        checker.tell(f"a thing's class is unknown: {words[0][:40]}")
        return
    height, width = checker.height, checker.width
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
