"""What an import will read: every file with its class and its split, before a pixel is decoded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tessella.artifacts.dataset import SkippedFile
from tessella.core.errors import DataError
from tessella.data.sources import Found, Source, find
from tessella.data.splitting import TEST, TRAIN, VAL, hold_out


@dataclass(frozen=True, kw_only=True)
class Listing:
    """``splits[i]`` is the split of ``sources[i]``: ``TRAIN``, ``VAL`` or ``TEST``."""

    classes: tuple[str, ...]
    sources: tuple[Source, ...]
    splits: npt.NDArray[np.int8]
    skipped: tuple[SkippedFile, ...]
    notes: tuple[str, ...]


def list_images(
    source: Path,
    *,
    labels: tuple[str, ...] | None,
    image_root: Path | None,
    val: float | Path,
    test: float | Path,
    seed: int,
) -> Listing:
    """Find the images and decide which are held out.

    Args:
        val, test: a fraction of ``source``, or a folder or list of its own.

    Raises:
        DataError: nothing to read, one class only, or a held-out folder with classes of its own.
    """
    found = find(source, labels=labels, image_root=image_root)
    if len(found.classes) < 2:
        raise DataError(
            "a classifier needs at least two classes",
            seen=f"only {found.classes[0]!r} in {source}",
            fix="give a folder with a subfolder for each class",
        )
    fractions = [0.0 if isinstance(part, Path) else part for part in (val, test)]
    of_class = np.array([s.label for s in found.sources], np.int64)
    splits = hold_out(of_class, val=fractions[0], test=fractions[1], seed=seed)
    sources, skipped, notes = list(found.sources), list(found.skipped), list(found.notes)
    parts = [splits]
    for split, part in ((VAL, val), (TEST, test)):
        if isinstance(part, Path):
            own = find(part, labels=labels, image_root=image_root)
            sources += _in_classes(own, found.classes, part)
            skipped += own.skipped
            notes += [f"{part.name}: {note}" for note in own.notes]
            parts.append(np.full(len(own.sources), split, np.int8))
    singles = np.flatnonzero(np.bincount(of_class, minlength=len(found.classes)) == 1)
    if any(fractions) and len(singles):
        names = ", ".join(repr(found.classes[c]) for c in singles[:10])
        notes.append(f"{len(singles):,} classes have one image, which goes to training: {names}")
    return Listing(
        classes=found.classes,
        sources=tuple(sources),
        splits=np.concatenate(parts),
        skipped=tuple(skipped),
        notes=tuple(notes),
    )


def _in_classes(found: Found, classes: tuple[str, ...], where: Path) -> list[Source]:
    """The sources with their labels as indices into ``classes``."""
    if unknown := sorted(set(found.classes) - set(classes)):
        raise DataError(
            "the held-out images have a class that training has not",
            seen=f"{', '.join(map(repr, unknown[:5]))} in {where}",
            fix="use the same class names in every folder",
        )
    number = {name: label for label, name in enumerate(classes)}
    return [Source(s.file, s.path, number[found.classes[s.label]]) for s in found.sources]


def fingerprint(listing: Listing, settings_hash: str) -> str:
    """SHA-256 over an import's settings and its files' paths, labels, splits, sizes and times."""
    hashed = sha256(settings_hash.encode())
    for name in listing.classes:
        hashed.update(f"{name}\n".encode())
    for source, split in zip(listing.sources, listing.splits, strict=True):
        try:
            status = os.stat(source.file)
            state = f"{status.st_size} {status.st_mtime_ns}"
        except (OSError, ValueError):
            state = "unreadable"
        hashed.update(f"{source.path}\t{source.label}\t{split}\t{state}\n".encode())
    return hashed.hexdigest()


SPLIT_NAMES = {TRAIN: "train", VAL: "val", TEST: "test"}
