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
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")
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
    """The annotations of a folder that holds ``Annotations``, of several such folders in one, or of
    XML files beside pictures.

    A thing that is marked difficult is a crowd: VOC counts no answer there as wrong.

    Args:
        labels: the classes in their order; by default all that occur, by the alphabet.

    Raises:
        DataError: there is no XML file, or one of CVAT's own form.
    """
    roots = roots_of(folder) or [folder]
    files = {root: _files(root) for root in roots}
    if not any(files.values()):
        raise DataError("there are no XML files", seen=folder, fix="give VOC's folder")
    problems: list[Problem] = []
    classes = labels or _names([file for some in files.values() for file in some])
    numbers = {name: label for label, name in enumerate(classes)}
    pictures: dict[str, Picture] = {}
    for root, some in files.items():
        splits, placed = _splits(root), set[Path]()
        for file in some:  # read again: trees of a hundred thousand files take gigabytes
            tree = _tree(file, problems)
            if tree is not None and tree.tag == "annotations":
                raise DataError(
                    "this is CVAT's own XML, which is not read",
                    seen=file,
                    fix="export the task as COCO, Pascal VOC or YOLO",
                )
            place = _place(file, tree, root, problems) if tree is not None else None
            if tree is None or place is None:
                continue
            placed.add(root / place)
            name = (root / place).relative_to(folder).as_posix()
            if name in pictures:
                what = f"its picture has another XML already: {name}"
                problems.append(Problem(path=file.name, what=what))
            elif picture := _picture(
                root / place, name, tree, numbers, splits.get(file.stem, ""), problems
            ):
                pictures[name] = picture
        for file in _without_xml(root, some, placed):
            name = file.relative_to(folder).as_posix()
            problems.append(
                Problem(path=name, what="there is no XML for the picture: it is left out")
            )
    difficult = sum(thing.crowd for picture in pictures.values() for thing in picture.things)
    note = f"{difficult:,} things are marked difficult: no answer counts there as wrong"
    return Annotations(
        classes=classes,
        pictures=tuple(pictures.values()),
        problems=tuple(problems),
        notes=(note,) if difficult else (),
    )


def roots_of(folder: Path) -> list[Path]:
    """The folders that hold ``Annotations``: ``folder`` itself, or the years in it, as VOC2007."""
    if (folder / "Annotations").is_dir():
        return [folder]
    return sorted(p.parent for p in folder.glob("*/Annotations") if p.is_dir())


def _files(root: Path) -> list[Path]:
    if (root / "Annotations").is_dir():
        return sorted((root / "Annotations").rglob("*.xml"))
    return sorted(root.glob("*.xml"))


def _without_xml(root: Path, files: list[Path], placed: set[Path]) -> list[Path]:
    """The pictures of a root that no XML file names or has the name of."""
    own = root / "Annotations" if (root / "Annotations").is_dir() else root
    named = {file.relative_to(own).with_suffix("") for file in files}
    bare: set[Path] = set()
    for place in PICTURES:
        below = (root / place).rglob("*") if place else root.glob("*")
        bare |= {
            file for file in below
            if file.suffix.lower() in SUFFIXES and file not in placed
            and file.relative_to(root / place).with_suffix("") not in named and file.is_file()
        }  # fmt: skip
    return sorted(bare)


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
            splits |= dict.fromkeys(map(str.strip, read_text(file).splitlines()), name)
    return splits


def _place(
    file: Path, tree: ElementTree.Element, root: Path, problems: list[Problem]
) -> str | None:
    """Where the picture of an XML file lies: as it says, or else the one of the file's own name."""
    name = (tree.findtext("filename") or file.with_suffix(".jpg").name).strip()
    below = file.relative_to(root)
    own = Path(*below.parts[1:]) if below.parts[0] == "Annotations" else below
    for said in (name, (own.parent / name).as_posix(), *map(own.with_suffix, SUFFIXES)):
        for place in PICTURES:
            found = inside(f"{place}/{said}" if place else str(said), root)
            if found is not None and (root / found).is_file():
                return found
    problems.append(Problem(path=file.name, what=f"there is no picture {name[:100]!r}"))
    return None


def _picture(
    file: Path,
    found: str,
    tree: ElementTree.Element,
    numbers: dict[str, int],
    split: str,
    problems: list[Problem],
) -> Picture | None:
    size = size_of(str(file))
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
        file=str(file),
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
    box = [left - 1, top - 1, right - left + 1, bottom - top + 1]
    difficult = (entry.findtext("difficult") or "").strip() == "1"
    checker.add(numbers[name], box, crowd=difficult)
