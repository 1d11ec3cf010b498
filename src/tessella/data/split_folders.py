"""Folders that are splits: many datasets come as train/CLASS/… beside val/CLASS/… and test/."""

from __future__ import annotations

import os
from pathlib import Path

from tessella.annotations.opening import SPLITS


def split_folders(source: Path) -> dict[str, Path]:
    """The folder of each split, where ``source`` holds a training folder and nothing but splits.

    Empty where its folders are classes: where one has another name, where there is one folder
    alone, or where one has no folders, which would be its classes.
    """
    if not source.is_dir():
        return {}
    with os.scandir(source) as entries:
        folders = sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
    split_of = {name: split for split, names in SPLITS.items() for name in names}
    found = {split_of[f.lower()]: source / f for f in folders if f.lower() in split_of}
    if len(found) != len(folders) or len(found) < 2 or "train" not in found:
        return {}
    return found if all(map(_has_folders, found.values())) else {}


def told_of(folders: dict[str, Path]) -> str:
    """A note: which folders were taken for splits."""
    names = ", ".join(f"{path.name}/ ({split})" for split, path in folders.items())
    return f"these folders are splits, not classes: {names}"


def _has_folders(path: Path) -> bool:
    with os.scandir(path) as entries:
        return any(e.is_dir() for e in entries)
