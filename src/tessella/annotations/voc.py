"""Pascal VOC: a folder ``Annotations`` of XML files, beside it the pictures.

Corners count pixels from 1 and belong to the box: its left edge is ``xmin`` − 1, its right one
``xmax``.
"""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from tessella.annotations.check import Checker, sides_of
from tessella.annotations.files import inside, read_bytes, read_text, size_of
from tessella.annotations.record import Annotations, Picture, Problem
from tessella.core.errors import DataError

PICTURES = ("JPEGImages", "images", "")
SPLITS = {"train": "train", "val": "val", "test": "test"}
MAX_XML = 4 << 20
MAX_DEPTH = 16


class _Builder(ElementTree.TreeBuilder):
    """Builds a tree that is not deeper than those of VOC are by far."""

    depth = 0

    def start(self, tag: str, attrs: dict[str, str]) -> ElementTree.Element:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ValueError(f"elements lie deeper in each other than {MAX_DEPTH}")
        return super().start(tag, attrs)

    def end(self, tag: str) -> ElementTree.Element:
        self.depth -= 1
        return super().end(tag)


def read(folder: Path, *, labels: tuple[str, ...] | None = None) -> Annotations:
    """The annotations of a folder that holds ``Annotations``, or XML files beside pictures.

    Args:
        labels: the classes in their order; by default all that occur, by the alphabet.

    Raises:
        DataError: there is no XML file.
    """
    place = folder / "Annotations" if (folder / "Annotations").is_dir() else folder
    files = sorted(place.glob("*.xml"))
    if not files:
        raise DataError("there are no XML files", seen=place, fix="give VOC's folder")
    problems: list[Problem] = []
    classes = labels or _names(files)
    numbers = {name: label for label, name in enumerate(classes)}
    splits = _splits(folder)
    pictures = []
    for file in files:  # read again: trees of a hundred thousand files take gigabytes
        tree = _tree(file, problems)
        if tree is not None:
            picture = _picture(file, tree, folder, numbers, splits.get(file.stem, ""), problems)
            pictures += [] if picture is None else [picture]
    return Annotations(classes=classes, pictures=tuple(pictures), problems=tuple(problems))


def _names(files: list[Path]) -> tuple[str, ...]:
    """The classes that occur, by the alphabet."""
    names: set[str] = set()
    for file in files:
        tree = _tree(file, [])
        if tree is not None:
            names |= {(entry.findtext("name") or "").strip() for entry in tree.iter("object")}
    return tuple(sorted(names - {""}))


def _tree(file: Path, problems: list[Problem]) -> ElementTree.Element | None:
    """The root of a file's XML. VOC declares no entities: a file that does is not read at all."""
    try:
        content = read_bytes(file, MAX_XML)
        if b"<!" in content.replace(b"<!--", b"").replace(b"<![CDATA[", b""):
            raise ValueError("it declares entities or a document type")
        if b"\0" in content:  # UTF-16, in which a declaration would not be seen
            raise ValueError("it is not UTF-8")
        return ElementTree.fromstring(content, ElementTree.XMLParser(target=_Builder()))
    except (ElementTree.ParseError, ValueError, LookupError, DataError) as error:
        problems.append(Problem(path=file.name, what=f"no XML that can be read: {error}"[:300]))
        return None


def _splits(folder: Path) -> dict[str, str]:
    """The split of each picture by its name, where ``ImageSets/Main`` says so."""
    splits: dict[str, str] = {}
    for name in SPLITS:
        file = folder / "ImageSets" / "Main" / f"{name}.txt"
        if file.is_file():
            splits |= {
                line.split()[0]: name for line in read_text(file).splitlines() if line.split()
            }
    return splits


def _picture(
    file: Path,
    tree: ElementTree.Element,
    folder: Path,
    numbers: dict[str, int],
    split: str,
    problems: list[Problem],
) -> Picture | None:
    name = (tree.findtext("filename") or file.with_suffix(".jpg").name).strip()
    found = None
    for place in PICTURES:
        below = inside(f"{place}/{name}" if place else name, folder)
        if below is not None and (folder / below).is_file():
            found = below
            break
    if found is None:
        problems.append(Problem(path=file.name, what=f"there is no picture {name[:100]!r}"))
        return None
    size = size_of(str(folder / found))
    if isinstance(size, str):
        problems.append(Problem(path=found, what=size))
        return None
    height, width = size
    said = tuple(_whole(tree.findtext(f"size/{side}")) for side in ("height", "width"))
    if None not in said and (0, 0) != said != size:
        what = sides_of(*said) or f"it is {height} × {width} pixels, its XML says {said}"
        problems.append(Problem(path=found, what=what))
        return None
    checker = Checker(found, height, width, problems)
    for entry in tree.iter("object"):
        _add(entry, checker, numbers)
    return Picture(
        file=str(folder / found),
        path=found,
        height=height,
        width=width,
        things=tuple(checker.things),
        split=split,
    )


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.strip().isdecimal() and len(text) < 12 else None


def _add(entry: ElementTree.Element, checker: Checker, numbers: dict[str, int]) -> None:
    name = (entry.findtext("name") or "").strip()
    if name not in numbers:
        checker.tell(f"a thing's class is unknown: {name[:40]!r}")
        return
    texts = [entry.findtext(f"bndbox/{corner}") for corner in ("xmin", "ymin", "xmax", "ymax")]
    try:
        left, top, right, bottom = (float(t or "none") for t in texts)
    except ValueError:
        checker.tell(f"a box is not four numbers: {texts}"[:120])
        return
    checker.add(numbers[name], [left - 1, top - 1, right - left + 1, bottom - top + 1])
