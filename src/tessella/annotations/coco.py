"""COCO's JSON: ``images``, ``categories`` and ``annotations``, read and written.

CVAT and Label Studio export the same form.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np

from tessella.annotations import rle
from tessella.annotations.check import Checker, sides_of
from tessella.annotations.files import NOWHERE, inside, no_collection, read_json, size_of
from tessella.annotations.record import Annotations, Picture, Problem, Thing
from tessella.core.errors import DataError

Key = int | str  # of a picture or a category

MAX_CLASSES = 1 << 16
FOLDERS = ("", "images", "train", "val", "train2017", "val2017", "test2017", "data")


def read(path: Path, *, image_root: Path | None = None, split: str = "") -> Annotations:
    """The annotations of a file.

    Args:
        image_root: what the names of pictures are relative to; by default the file's folder, or
            the one of the usual folders beside it that has the first picture.

    Raises:
        DataError: no JSON, or not COCO's.
    """
    with no_collection():
        return _read(path, image_root, split)


def _read(path: Path, image_root: Path | None, split: str) -> Annotations:
    data = read_json(path)
    if not isinstance(data, dict) or not all(
        isinstance(data.get(k), list) for k in ("images", "categories", "annotations")
    ):
        raise DataError(
            "this is not COCO's JSON",
            seen=f"{sorted(data)[:10] if isinstance(data, dict) else str(data)[:40]} in {path}",
            fix="give a file with the lists images, categories and annotations; labelling tools "
            "call it COCO when they export",
        )
    problems: list[Problem] = []
    numbers, classes = _classes(data["categories"], path, problems)
    images, notes = data["images"], []
    root = _root(path, images, image_root)
    if root is None and (root := _root(path, shorter := _by_last_part(images), image_root)):
        images = shorter
        notes.append(f"the pictures were found in {root} by the last part of their names")
    root = root or image_root or path.parent
    checkers, files = _pictures(images, root, path, problems)
    for entry in data["annotations"]:
        _add(entry, checkers, numbers, path, problems)
    if drawn := sum(_drawn_in_cvat(entry) for entry in data["annotations"]):
        what = (
            "masks that CVAT calls a crowd, as it does all that a brush has drawn: each is a thing"
        )
        notes.append(f"{drawn:,} {what}")
    pictures = [
        Picture(
            file=files[key],
            path=checker.path,
            height=checker.height,
            width=checker.width,
            things=tuple(checker.things),
            split=split,
        )
        for key, checker in checkers.items()
    ]
    lost = [p.path for p in pictures if not os.path.isfile(p.file)]
    if lost:
        note = f"{len(lost):,} of {len(pictures):,} pictures are not in {root}, the first "
        notes.append(f"{note}{lost[0][:80]!r}: --image-root names another folder")
    return Annotations(
        classes=classes,
        pictures=tuple(pictures),
        problems=tuple(problems),
        notes=tuple(notes),
    )


def _classes(
    entries: list[Any], path: Path, problems: list[Problem]
) -> tuple[dict[Key, int], tuple[str, ...]]:
    """The label of each category's id, and the names; in the order of the ids."""
    known: dict[Key, str] = {}
    names: set[str] = set()
    for entry in entries[:MAX_CLASSES]:
        number, name = (entry.get("id"), entry.get("name")) if isinstance(entry, dict) else (0, 0)
        number = _key(number)
        if number is None or not isinstance(name, str):
            problems.append(Problem(path=path.name, what=f"no category: {str(entry)[:80]}"))
        elif number in known or name in names:
            problems.append(
                Problem(path=path.name, what=f"category {str(number)[:40]} is there twice")
            )
        else:
            known[number] = name
            names.add(name)
    if len(entries) > MAX_CLASSES:
        what = f"{len(entries):,} categories, of which the first {MAX_CLASSES:,} are read"
        problems.append(Problem(path=path.name, what=what))
    ids = sorted(known, key=lambda number: (isinstance(number, str), number))
    return {number: label for label, number in enumerate(ids)}, tuple(known[i] for i in ids)


def _root(path: Path, images: list[Any], told: Path | None) -> Path | None:
    """The folder of the pictures, which has the first one: the one that was told, or else the
    file's own or its parent, or a usual one inside these."""
    first = next((i.get("file_name") for i in images if isinstance(i, dict)), None)
    if not isinstance(first, str):
        return None
    parents = (path.parent, path.parent.parent)
    own = path.stem.removeprefix("instances_")
    usual = (own, *FOLDERS, f"images/{own}")
    places = [parent / folder for parent in parents for folder in usual]
    for place in [told] if told else places:
        name = inside(first, place)
        if name is not None and (place / name).is_file():
            return place
    return None


def _by_last_part(images: list[Any]) -> list[Any]:
    """The pictures by the last part of their names, as Label Studio's ``/data/upload/3/cat.jpg``
    and addresses lie beside no file; none where two would have one name."""
    named = [i for i in images if isinstance(i, dict) and isinstance(i.get("file_name"), str)]
    parts = [_last_part(i["file_name"]) for i in named]
    if len(set(parts)) < len(parts):
        return []
    return [{**image, "file_name": part} for image, part in zip(named, parts, strict=True)]


def _last_part(name: str) -> str:
    """Of a path or an address; Label Studio names its own disk's files by ``?d=photos/cat.jpg``."""
    path, _, query = name.replace("\\", "/").partition("?")
    if query.startswith("d="):
        path = query[2:].partition("&")[0]
    return unquote(path.rsplit("/", 1)[-1])


def _pictures(
    entries: list[Any], root: Path, path: Path, problems: list[Problem]
) -> tuple[dict[Key, Checker], dict[Key, str]]:
    checkers: dict[Key, Checker] = {}
    files: dict[Key, str] = {}
    names: set[str] = set()
    for entry in entries:
        key = _key(entry.get("id")) if isinstance(entry, dict) else None
        name = entry.get("file_name") if isinstance(entry, dict) else None
        if key is None or not isinstance(name, str):
            problems.append(Problem(path=path.name, what=f"no picture: {str(entry)[:80]}"))
            continue
        below = inside(name, root)
        height, width = (_whole(entry.get(side)) for side in ("height", "width"))
        wrong = sides_of(height, width)
        if below is not None and height is width is None:  # the picture's file says it, too
            told = size_of(os.path.join(root, below))
            wrong = told if isinstance(told, str) else None
            height, width = (0, 0) if isinstance(told, str) else told
        if below is None:
            wrong = NOWHERE
        elif key in checkers or below in names:
            wrong = "the picture is there twice"
        if wrong or below is None:
            problems.append(Problem(path=name[:200], what=wrong or ""))
            continue
        names.add(below)
        checkers[key] = Checker(below, height, width, problems)
        files[key] = os.path.join(root, below)
    return checkers, files


def _key(value: Any) -> Key | None:
    """An id: a number or a text; None for anything else."""
    if isinstance(value, str):
        return value
    number = _whole(value)
    return number if type(number) is int else None


def _whole(value: Any) -> Any:
    """640 for 640.0, as exports of tables write it; all else as it is."""
    return int(value) if type(value) is float and value.is_integer() else value


def _add(
    entry: Any,
    checkers: dict[Key, Checker],
    numbers: dict[Key, int],
    path: Path,
    problems: list[Problem],
) -> None:
    if not isinstance(entry, dict):
        problems.append(Problem(path=path.name, what=f"no annotation: {str(entry)[:80]}"))
        return
    image, category = _key(entry.get("image_id")), _key(entry.get("category_id"))
    checker = None if image is None else checkers.get(image)
    if checker is None:
        said = str(entry.get("image_id"))[:40]
        what = f"annotation {str(entry.get('id'))[:20]} is of no picture: {said}"
        problems.append(Problem(path=path.name, what=what))
        return
    if category is None or category not in numbers:
        checker.tell(f"a thing's class is unknown: {str(entry.get('category_id'))[:40]}")
        return
    shape, box = entry.get("segmentation"), entry.get("bbox")
    polygons = shape if isinstance(shape, list) else ()
    counts = None
    if isinstance(shape, dict):
        counts = _counts(shape, checker)
        if counts is None and not isinstance(box, list):
            return
    if not isinstance(box, list):
        box = _box_around(polygons, counts, checker)
        if box is None:
            return
    crowd = entry.get("iscrowd") == 1 and not _drawn_in_cvat(entry)
    checker.add(numbers[category], box, crowd=crowd, polygons=polygons, counts=counts)


def _drawn_in_cvat(entry: Any) -> bool:
    """Whether a thing is a mask of CVAT's brush, which exports all of them with ``iscrowd`` 1; that
    CVAT wrote it is seen from its own attribute."""
    if not isinstance(entry, dict) or entry.get("iscrowd") != 1:
        return False
    attributes = entry.get("attributes")
    return (
        isinstance(entry.get("segmentation"), dict)
        and isinstance(attributes, dict)
        and "occluded" in attributes
        and attributes.get("is_crowd") is not True
    )


def _counts(shape: dict[str, Any], checker: Checker) -> bytes | None:
    """The run lengths of a mask, compressed; None after saying what is wrong."""
    counts, size = shape.get("counts"), shape.get("size")
    if size != [checker.height, checker.width]:
        checker.tell(
            f"a mask of {str(size)[:40]} pixels in a picture of {checker.height} × {checker.width}"
        )
        return None
    if isinstance(counts, str) and counts.isascii():
        return counts.encode()
    most = checker.height * checker.width
    runs = counts if isinstance(counts, list) and len(counts) <= most + 1 else []
    if runs and all(type(n) is int and 0 <= n <= most for n in runs):
        return rle.compressed(np.array(runs, np.int64))
    checker.tell("a mask's run lengths cannot be read")
    return None


def _box_around(
    polygons: Sequence[Any], counts: bytes | None, checker: Checker
) -> list[float] | None:
    """The box of a thing that has only a mask; None after saying what is wrong with that."""
    if counts is not None:
        if rle.fits(counts, checker.height, checker.width):
            return list(rle.box_of(rle.expanded(counts), checker.height))
        checker.tell("a mask's run lengths cannot be read, or are not of its picture's size")
        return None
    try:
        points = [float(v) for polygon in polygons for v in polygon]
    except (TypeError, ValueError, OverflowError):  # of a whole number of 400 digits
        points = []
    if len(points) < 6:
        checker.tell("a thing has neither a box nor an outline that can be read")
        return None
    xs, ys = points[0::2], points[1::2]
    return [min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)]


def write(path: Path, annotations: Annotations) -> None:
    """Write annotations as COCO's JSON; reading it gives the same again."""
    images: list[dict[str, Any]] = []
    things: list[dict[str, Any]] = []
    for number, picture in enumerate(annotations.pictures, start=1):
        images.append(
            {
                "id": number,
                "file_name": picture.path,
                "height": picture.height,
                "width": picture.width,
            }
        )
        for thing in picture.things:
            things.append(_entry(thing, picture, number, len(things) + 1))
    categories = [{"id": k, "name": name} for k, name in enumerate(annotations.classes, start=1)]
    document = {"images": images, "categories": categories, "annotations": things}
    path.write_text(json.dumps(document, allow_nan=False))


def _entry(thing: Thing, picture: Picture, image: int, number: int) -> dict[str, Any]:
    shape: Any = [list(p) for p in thing.polygons]
    if thing.rle:
        shape = {"size": [picture.height, picture.width], "counts": thing.rle.decode()}
    return {
        "id": number,
        "image_id": image,
        "category_id": thing.label + 1,
        "bbox": [thing.x, thing.y, thing.width, thing.height],
        "area": area_of(thing, picture),
        "iscrowd": int(thing.crowd),
        "segmentation": shape,
    }


def area_of(thing: Thing, picture: Picture) -> float:
    """The pixels of a thing's mask; without a mask, those of its box."""
    counts = mask_counts(thing, picture)
    return thing.width * thing.height if counts is None else float(counts[1::2].sum())


def mask_counts(thing: Thing, picture: Picture) -> rle.Counts | None:
    """The run lengths of a thing's mask; None without one."""
    if thing.rle:
        return rle.expanded(thing.rle)
    if thing.polygons:
        return rle.of_polygons(thing.polygons, picture.height, picture.width)
    return None
