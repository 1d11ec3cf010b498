"""What an annotation file says: pictures with things in them, in the pictures' own pixels."""

from __future__ import annotations

from dataclasses import dataclass

from tessella.core.count import counted


@dataclass(frozen=True, kw_only=True, slots=True)
class Thing:
    """An object in a picture.

    Coordinates are continuous: a pixel at column c and row r covers c to c + 1 and r to r + 1.

    Attributes:
        label: index into the classes.
        x, y, width, height: left and upper edge of the box, and its size.
        crowd: a region of many things, in which no answer counts as wrong.
        polygons: outlines x0 y0 x1 y1 …, whose union is the thing's mask.
        rle: run lengths of the mask in the size of the picture, as ``rle.compressed``.
    """

    label: int
    x: float
    y: float
    width: float
    height: float
    crowd: bool = False
    polygons: tuple[tuple[float, ...], ...] = ()
    rle: bytes = b""


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A picture with its things.

    Attributes:
        file: path to open; ``path``: the name in the annotation file.
        split: ``train``, ``val`` or ``test`` where the files say so, else empty.
    """

    file: str
    path: str
    height: int
    width: int
    things: tuple[Thing, ...]
    split: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Something that is wrong in a file; what it said is left out, or cut as the text says."""

    path: str
    what: str


@dataclass(frozen=True, kw_only=True)
class Annotations:
    """All that was read: classes by their labels, pictures by their path, and what was wrong.

    Attributes:
        bare: nobody has annotated the pictures yet, on purpose.
    """

    classes: tuple[str, ...]
    pictures: tuple[Picture, ...]
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    bare: bool = False

    def said(self) -> tuple[str, ...]:
        """The notes, and how many problems there are, for a person."""
        told = self.told()
        return (*self.notes, *(f"{t}; tessella data annotations lists all of them" for t in told))

    def told(self, shown: int = 1) -> tuple[str, ...]:
        """How many problems there are, with the first of them; nothing where there are none."""
        if not self.problems:
            return ()
        first = "; ".join(f"{p.path}: {p.what}" for p in self.problems[:shown])
        number = counted(len(self.problems), "problem")
        return (f"{number} in the annotations; the first: {first}",)
