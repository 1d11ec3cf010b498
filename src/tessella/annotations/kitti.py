"""KITTI, as DIGITS takes it: a folder of pictures, and one of text files of the same names.

A ``classes.txt`` in the folder, or with the text files, gives the order of the classes.

A line has a class, three numbers of no use here, the left, upper, right and lower edge of the box,
and seven numbers about space.
"""

from __future__ import annotations

from pathlib import Path

from tessella.annotations.check import Checker
from tessella.annotations.files import read_text, size_of
from tessella.annotations.record import Annotations, Picture, Problem
from tessella.core.errors import DataError

LABELS = ("labels", "label_2", "label")
IMAGES = ("images", "image_2", "image")
SUFFIXES = (".png", ".jpg", ".jpeg")
IGNORED = "dontcare"  # regions that nobody looked at
NAMES = "classes.txt"
FIELDS, MOST = 8, 16  # of a line: up to the box, and with a score behind all
MAX_LINES = 1 << 16
LOOKED_AT = 16  # files whose first line tells KITTI's from YOLO's


def is_folder(folder: Path) -> bool:
    """Whether a folder has one of labels and one of pictures."""
    return all(any((folder / n).is_dir() for n in names) for names in (LABELS, IMAGES))


def begins_with_names(folder: Path) -> bool:
    """Whether each of the first files of labels begins with a word, where YOLO's have a number."""
    if not is_folder(folder):
        return False
    texts, found = _folder(folder, LABELS), []
    for file in sorted(texts.glob("*.txt")):
        try:
            first = read_text(file).lstrip()[:200].split(maxsplit=2)
        except DataError:
            continue
        if len(first) > 1:  # a classes.txt may lie there, too: a word a line
            found.append(not _is_number(first[0]))
        if len(found) == LOOKED_AT:
            break
    return bool(found) and all(found)


def read(folder: Path, *, labels: tuple[str, ...] | None = None) -> Annotations:
    """The annotations of a folder with ``labels`` (or ``label_2``) and ``images`` (or ``image_2``).

    Args:
        labels: the classes in their order; by default those that ``classes.txt`` lists, or else
            all that occur, by the alphabet.

    Raises:
        DataError: one of the folders is not there, or ``classes.txt`` names a class twice.
    """
    texts, pictures = _folder(folder, LABELS), _folder(folder, IMAGES)
    problems: list[Problem] = []
    stems = {f.stem for f in texts.glob("*.txt")}
    listed = folder / NAMES if (folder / NAMES).is_file() else None
    labels_of = (texts / NAMES).stem  # unless a picture has this name, its file lists the classes
    if labels_of in stems and not any((pictures / (labels_of + s)).is_file() for s in SUFFIXES):
        stems.remove(labels_of)
        listed = listed or texts / NAMES
    classes = labels or (() if listed is None else _listed(listed)) or _names(texts, stems)
    numbers = {name: label for label, name in enumerate(classes)}
    found, ignored = [], 0
    files = sorted(p for p in pictures.iterdir() if p.suffix.lower() in SUFFIXES)
    lost = sorted(stems - {f.stem for f in files})
    problems += [Problem(path=f"{s}.txt", what="there is no picture of this name") for s in lost]
    for file in files:
        size = size_of(str(file))
        path = f"{pictures.name}/{file.name}"
        if isinstance(size, str):
            problems.append(Problem(path=path, what=size))
            continue
        checker = Checker(path, *size, problems)
        if file.stem not in stems:
            checker.tell("there are no labels for the picture: it is left out")
            continue
        for line in _lines(texts, file.stem):
            ignored += _add(line, checker, numbers)
        things = tuple(checker.things)
        found.append(
            Picture(file=str(file), path=path, height=size[0], width=size[1], things=things)
        )
    note = f"{ignored:,} regions are called DontCare and were left out"
    return Annotations(
        classes=classes,
        pictures=tuple(found),
        problems=tuple(problems),
        notes=(note,) if ignored else (),
    )


def _folder(folder: Path, names: tuple[str, ...]) -> Path:
    for name in names:
        if (folder / name).is_dir():
            return folder / name
    raise DataError(
        "this is not KITTI's folder", seen=folder, fix=f"it has a folder {' or '.join(names)}"
    )


def _lines(texts: Path, stem: str) -> list[str]:
    return read_text(texts / f"{stem}.txt").splitlines()[:MAX_LINES]


def _listed(file: Path) -> tuple[str, ...]:
    """The classes that a file names, a line each."""
    names = [line.strip() for line in read_text(file).splitlines() if line.strip()]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(
            "a class is named twice", seen=f"{twice[0][:80]!r} in {file}", fix="name each once"
        )
    return tuple(name for name in names if name.lower() != IGNORED)


def _names(texts: Path, stems: set[str]) -> tuple[str, ...]:
    """The classes that occur, by the alphabet."""
    names = {ln.split()[0] for stem in stems for ln in _lines(texts, stem) if ln.split()}
    return tuple(sorted(n for n in names if n.lower() != IGNORED and not _is_number(n)))


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _add(line: str, checker: Checker, numbers: dict[str, int]) -> bool:
    """Add the thing of a line; returns whether it is a region to be ignored."""
    words = line.split()
    if not words:
        return False
    if words[0].lower() == IGNORED:
        return True
    if _is_number(words[0]):
        checker.tell(
            f"a line begins with a number, as YOLO's do, which want a data.yaml or a classes.txt: "
            f"{line[:80]}"
        )
        return False
    if words[0] not in numbers:
        checker.tell(f"a thing's class is unknown: {words[0][:40]!r}")
        return False
    try:
        if len(words) < FIELDS:
            raise ValueError
        left, top, right, bottom = (float(w) for w in words[4:FIELDS])
    except ValueError:
        checker.tell(f"a line is not a class and at least seven numbers: {line[:80]}")
        return False
    if len(words) > MOST:
        checker.tell(f"of {len(words)} words in a line the first {MOST} are read: {line[:80]}")
    checker.add(numbers[words[0]], [left, top, right - left, bottom - top])
    return False
