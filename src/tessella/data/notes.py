"""Notes about a dataset's problems, for a person who is about to train on it."""

from __future__ import annotations

from tessella.artifacts.shards import SplitInfo
from tessella.core.count import counted
from tessella.data.duplicates import Duplicates

IMBALANCE = 3  # times as many images in the largest class as in the smallest: worth a note
TINY = 20  # training images that a class should have
NAMES_SHOWN = 10


def notes_on(
    classes: tuple[str, ...],
    splits: dict[str, SplitInfo],
    *,
    names: str,
    std: tuple[float, ...],
    skipped: int,
    duplicates: Duplicates,
    odd_sizes: list[str],
    deeper: int,
    enlarged: list[str],
    already: tuple[str, ...],
) -> tuple[str, ...]:
    """Notes, the most pressing first: no validation, lost classes, imbalance, leaks, bad files.

    Args:
        names: what ``classes`` are for the dataset's task: ``NAMES`` of its examples.
        std: the measured standard deviation of each channel.
        skipped: how many files are bad.
        duplicates: the images that are equal.
        odd_sizes: the files whose pictures have another size than most.
        deeper: how many files have more bits than are stored.
        enlarged: the files whose pictures are much smaller than they are stored.
        already: notes of the listing, which go last.
    """
    counts = splits["train"].class_counts
    notes = []
    if "val" not in splits:
        notes.append("there is no validation split: training cannot tell how good the network is")
    if untrained := [name for name, count in zip(classes, counts, strict=True) if not count]:
        notes.append(f"no training image of {_some(untrained)}")
    if "val" in splits:
        held = splits["val"].class_counts
        if unseen := [name for name, count in zip(classes, held, strict=True) if not count]:
            notes.append(f"no validation image of {_some(unseen)}")
    few, most = min((c for c in counts if c), default=0), max(counts, default=0)
    if names == "classes" and few and most >= IMBALANCE * few:
        notes.append(
            f"class imbalance: {classes[counts.index(most)]!r} has {most:,} training images, "
            f"{classes[counts.index(few)]!r} has {few:,}; class_weights='balanced' in the recipe "
            "evens it out"
        )
    if names == "classes":
        tiny = [(name, n) for name, n in zip(classes, counts, strict=True) if 0 < n < TINY]
        if tiny and len(tiny) < len(classes):  # of a toy all are: no news
            few_of = _listed([f"{name!r} ({n})" for name, n in tiny])
            notes.append(f"fewer than {TINY} training images have: {few_of}")
    notes += _of_duplicates(duplicates)
    if odd_sizes:
        odd = counted(len(odd_sizes), "picture")
        notes.append(f"{odd} of an unusual size or shape: {_some(odd_sizes)}")
    notes += [f"channel {c} has the same value everywhere" for c, s in enumerate(std) if s == 0]
    if deeper:
        notes.append(
            f"{counted(deeper, 'file')} of 16 bits a sample stored with 8: depth=16 keeps them"
        )
    if enlarged:
        small = counted(len(enlarged), "picture")
        notes.append(f"{small} less than half as large as stored: {_some(enlarged)}")
    if skipped:
        cannot = "it cannot be used" if skipped == 1 else "they cannot be used"
        notes.append(f"{counted(skipped, 'file')} skipped: {cannot}")
    return (*notes, *already)


def _of_duplicates(found: Duplicates) -> list[str]:
    told = [
        (found.contradictions, "with an equal one in another class: a network cannot learn both"),
        (found.count, "in two splits, pixel for pixel: results flatter"),
        (found.copies, "twice or more in one class, pixel for pixel"),
    ]
    return [f"{counted(count, 'image')} {what}" for count, what in told if count]


def _some(names: list[str]) -> str:
    return _listed([repr(name) for name in names])


def _listed(words: list[str]) -> str:
    more = f" and {len(words) - NAMES_SHOWN:,} more" if len(words) > NAMES_SHOWN else ""
    return ", ".join(words[:NAMES_SHOWN]) + more
