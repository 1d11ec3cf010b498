"""Boxes in a table: a row a box, with its picture, its class and its edges in pixels."""

from __future__ import annotations

from dataclasses import replace

from tessella.annotations.check import Checker
from tessella.annotations.files import size_of
from tessella.annotations.record import Annotations, Picture, Problem
from tessella.core.errors import DataError
from tessella.tasks import tables
from tessella.tasks.found import Found, Request, Source

EDGES = (("xmin", "ymin", "xmax", "ymax"), ("x0", "y0", "x1", "y1"),
         ("left", "top", "right", "bottom"))  # fmt: skip
CLASS = ("class", "label", "name", "category")
PROBLEMS_SHOWN = 5  # no command lists those of a table


def find(request: Request) -> Found:
    """The pictures of a table, each with the boxes of its rows.

    Edges are where a pixel at column c covers c to c + 1. A row whose edges are all empty says that
    its picture has no box.

    Raises:
        DataError: no such table, or no row of it is a box.
    """
    table = tables.read(request.source, image_root=request.image_root)
    known = {name.strip().lower(): name for name in table.columns}
    edges = next((four for four in EDGES if set(four) <= set(known)), None)
    named = next((known[name] for name in CLASS if name in known), None)
    if edges is None or named is None:
        raise DataError(
            "the table has no columns of boxes",
            seen=f"{', '.join(table.columns)[:200]} in {request.source}",
            fix=f"call them {', '.join(EDGES[0])} and {CLASS[0]}: a row a box, edges in pixels",
        )
    names, cells = table.texts(named), [table.numbers(known[edge]) for edge in edges]
    classes = request.labels or tables.ordered(filter(None, names))
    number = {name: k for k, name in enumerate(classes)}
    problems: list[Problem] = []
    checkers: dict[str, Checker] = {}
    files = dict(zip(table.paths, table.files, strict=True))
    for path, file in files.items():
        size = size_of(file)
        if isinstance(size, str):
            problems.append(Problem(path=path, what=size))
        else:
            checkers[path] = Checker(path, *size, problems)
    for path, name, *texts in zip(table.paths, names, *cells, strict=True):
        checker = checkers.get(path)
        if checker is not None and any(texts):
            _add(checker, number.get(name), name, texts)
    pictures = [
        Picture(file=files[path], path=path, height=c.height, width=c.width, things=tuple(c.things))
        for path, c in checkers.items()
    ]
    read = Annotations(classes=classes, pictures=tuple(pictures), problems=tuple(problems))
    if not any(picture.things for picture in pictures):
        raise DataError(
            "the table names no things",
            seen=f"{len(pictures):,} pictures in {request.source}; {' '.join(read.told())}",
            fix="give edges in pixels of the pictures",
        )
    sources = [Source(p.file, p.path, p) for p in pictures]
    return replace(table.found(classes, sources, table.skipped), notes=read.told(PROBLEMS_SHOWN))


def _add(checker: Checker, label: int | None, name: str, texts: list[str]) -> None:
    numbers = [v for text in texts if (v := tables.number_in(text)) is not None]
    if label is None:
        checker.tell(f"a thing's class is unknown: {name[:40]!r}")
    elif len(numbers) < len(texts):
        checker.tell(f"a box is not four numbers: {', '.join(texts)[:80]}")
    else:
        x0, y0, x1, y1 = numbers
        checker.add(label, [x0, y0, x1 - x0, y1 - y0])
