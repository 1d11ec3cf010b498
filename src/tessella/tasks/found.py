"""Labelled pictures as a task finds them in a folder, a list or an annotation file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tessella.core.errors import UsageError

if TYPE_CHECKING:
    from tessella.artifacts.dataset import SkippedFile


@dataclass(frozen=True, slots=True)
class Source:
    """One image file: path to open, name in the dataset, and its target.

    Attributes:
        label: what the task's ``examples.py`` says: the number of a class, or more than that.
        split: ``train``, ``val`` or ``test`` where the files say so, else empty.
    """

    file: str
    path: str
    label: Any
    split: str = ""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The images of a source, in an order independent of the file system.

    Attributes:
        groups: by path: pictures of one group stay in one split; others are each their own.
        written: how the targets are written, where that decides what they mean: images held out
            elsewhere must have the same, or nothing that tells it.
        bare: nobody has labelled the pictures yet, on purpose.
    """

    classes: tuple[str, ...]
    sources: tuple[Source, ...]
    skipped: tuple[SkippedFile, ...] = ()
    notes: tuple[str, ...] = ()
    groups: Mapping[str, str] = field(default_factory=dict)
    written: str = ""
    bare: bool = False


@dataclass(frozen=True, kw_only=True)
class Request:
    """What an import asks a task to find.

    Attributes:
        source: a folder or a file.
        labels: the names of classes (or of numbers) where the user gives them, in their order.
        image_root: what the paths in a file are relative to; None: the file's folder.
        by_folder: finds pictures whose class is a folder or stands in a text list.
    """

    source: Path
    labels: tuple[str, ...] | None
    image_root: Path | None
    by_folder: Callable[[Path], Found]

    def __post_init__(self) -> None:
        names = self.labels or ()
        if twice := sorted({n for n in names if names.count(n) > 1}):
            raise UsageError(
                "a label is named twice", seen=", ".join(twice[:10]), fix="name each label once"
            )
