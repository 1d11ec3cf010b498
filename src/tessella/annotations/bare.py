"""Pictures that nobody has annotated yet: a folder of them, and the classes that will be drawn."""

from __future__ import annotations

from pathlib import Path

from tessella.annotations.files import size_of
from tessella.annotations.record import Annotations, Picture, Problem
from tessella.annotations.yolo import SUFFIXES


def is_folder(folder: Path) -> bool:
    """Whether a folder holds pictures and no other files, whose labels would be lost."""
    files = _files(folder)
    return bool(files) and all(file.suffix.lower() in SUFFIXES for file in files)


def read(folder: Path, *, labels: tuple[str, ...]) -> Annotations:
    """The pictures of a folder, without a thing."""
    pictures, problems = [], []
    for file in _files(folder):
        path, size = file.relative_to(folder).as_posix(), size_of(str(file))
        if isinstance(size, str):
            problems.append(Problem(path=path, what=size))
            continue
        height, width = size
        pictures.append(Picture(file=str(file), path=path, height=height, width=width, things=()))
    return Annotations(
        classes=labels, pictures=tuple(pictures), problems=tuple(problems), bare=True,
        notes=("there are no annotations: nothing is learned before things are drawn",),
    )  # fmt: skip


def _files(folder: Path) -> list[Path]:
    """The files below a folder, in order; hidden ones are left out."""
    below = (p for p in folder.rglob("*") if p.is_file())
    return sorted(p for p in below if not any(n[0] == "." for n in p.relative_to(folder).parts))
