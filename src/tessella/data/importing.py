"""A folder or a list of images becomes a dataset: list, hold out, read, count, write.

The dataset is the same for any number of workers, and complete or absent.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

from tessella.artifacts.dataset import (
    Dataset,
    DatasetInfo,
    SkippedFile,
    content_hash,
    unfinished_of,
    write_info,
)
from tessella.artifacts.files import require_place, write_folder
from tessella.artifacts.shards import Example, SplitInfo, SplitWriter
from tessella.core.errors import DataError, UsageError
from tessella.core.events import Emit, phase, progress, silent, warning
from tessella.core.preprocess import Preprocess, ResizeMode, Store, full_scale
from tessella.core.record import digest
from tessella.core.reporter import reported
from tessella.data import reading
from tessella.data.duplicates import Duplicates
from tessella.data.listing import SPLIT_NAMES, Listing, fingerprint, list_images
from tessella.data.moments import Moments
from tessella.data.notes import notes_on
from tessella.data.odd_sizes import MAX_ODD, OddSizes
from tessella.data.parts import write_parts
from tessella.data.reading import Facts, Picture, read_all
from tessella.data.sources import read_labels
from tessella.data.split_folders import SPLIT_FOLDERS, split_folders, told_of
from tessella.data.splitting import TRAIN
from tessella.data.unfinished import Unfinished, discard, left_of
from tessella.tasks import Source, Task, column_of, named

MAX_SKIPPED = 1000
PROGRESS_SECONDS = 0.1
ENLARGED = 2.0  # a picture that is stored so many times larger than it is, is told


@dataclass(frozen=True, kw_only=True)
class ImportSettings:
    """How images become a dataset.

    Attributes:
        size: height and width to store, or one number for both.
        channels, depth, resize: see ``core.preprocess.Preprocess``.
        crop: size that the network sees, if smaller than ``size``.
        holdout, test: fractions of each class that are held out for validation and for testing.
        val_folder, test_folder: folders (or lists) to take these splits from instead.
        labels: a list's class names, or a text file with one a line.
        image_root: what a list's paths are relative to; the list's folder if None.
        task: what a network is to learn: a name that ``tasks.names()`` lists.
        seed: decides which images are held out.
        store: ``png``, or ``pixels``: about twice as large, and a training reads them without
            decoding. Equal pixels either way.
        name: of the dataset; the source's if None.
        workers: processes that read images; one a core if None. The dataset does not depend on it.
    """

    size: int | tuple[int, int] = 256
    channels: int = 3
    depth: int = 8
    resize: ResizeMode = "squash"
    crop: int | tuple[int, int] | None = None
    holdout: float = 0.1
    test: float = 0.0
    val_folder: str | Path | None = None
    test_folder: str | Path | None = None
    labels: tuple[str, ...] | str | Path | None = None
    image_root: str | Path | None = None
    task: str = "classification"
    seed: int = 0
    store: Store = "png"
    name: str | None = None
    workers: int | None = None

    def __post_init__(self) -> None:
        if not (min(self.holdout, self.test) >= 0 and self.holdout + self.test < 1):
            raise UsageError(
                "holdout and test are fractions that leave something to train on",
                seen=f"holdout={self.holdout}, test={self.test}",
                fix="for example holdout=0.1, test=0.1",
            )
        if self.workers is not None and self.workers < 1:
            raise UsageError("an import needs at least one worker", seen=self.workers)
        if self.resize not in ("squash", "crop", "fill", "half_crop"):
            raise UsageError(
                "unknown resize mode", seen=self.resize, fix="squash, crop, fill or half_crop"
            )
        if self.store not in get_args(Store):
            raise UsageError(
                "images are stored as png or as pixels", seen=self.store, fix="png or pixels"
            )
        named(self.task)
        self.record()

    def record(self) -> Preprocess:
        """The preprocessing record, with mean and std still to be measured."""
        height, width = _pair(self.size)
        return Preprocess(
            height=height,
            width=width,
            channels=self.channels,
            depth=self.depth,
            resize=self.resize,
            crop=None if self.crop is None else _pair(self.crop),
        )


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def import_images(
    source: str | Path, out: str | Path, settings: ImportSettings, *, emit: Emit = silent
) -> Dataset:
    """Make a dataset of a folder (class = subfolder) or of a text list (lines ``path label``).

    Bad files are listed in the dataset's ``info.skipped``. Notes are emitted as warnings, too. An
    import of many files that was killed goes on when it is called again with the same settings.

    Args:
        out: the dataset's folder, which must not exist yet.

    Raises:
        DataError: no source, no images, one class only, or none that can be read.
        UsageError: ``out`` is there already.
    """
    source, out = Path(source), Path(out)
    _refuse_existing(out)
    require_place(out)
    emit(phase("find", f"looking for images in {source}"))
    return _import_listing(source, out, settings, _list(source, settings), emit)


def images(
    source: str | Path,
    *,
    size: int | tuple[int, int] = 256,
    holdout: float = 0.1,
    out: str | Path | None = None,
    emit: Emit | None = None,
    **settings: Any,
) -> Dataset:
    """``import_images`` in one line: the same call gives the dataset that is there already.

    Args:
        out: the dataset's folder; ``datasets/NAME`` if None.
        emit: told what happens; by default bars show it on a terminal and in a notebook.
        settings: further fields of ``ImportSettings``.

    Raises:
        UsageError: ``out`` is there, but was made from other settings or files; and as
            ``import_images``.
    """
    chosen = ImportSettings(size=size, holdout=holdout, **settings)
    source = Path(source)
    out = Path("datasets") / _file_name(_name(source, chosen)) if out is None else Path(out)
    if not (out / "dataset.json").exists():
        with reported(emit) as told:
            return import_images(source, out, chosen, emit=told)
    there, listing = Dataset(out), _list(source, chosen)
    if there.info.import_hash != fingerprint(listing, _settings_hash(chosen)):
        raise UsageError(
            "this dataset was made from other files or settings",
            seen=out,
            fix="choose another out=, or remove that folder to import again",
        )
    return there


def _refuse_existing(out: Path) -> None:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UsageError(
            "the dataset's folder exists already",
            seen=out,
            fix="choose another folder, or remove that one to import again",
        )


def _list(source: Path, settings: ImportSettings) -> Listing:
    """The files of the import; the folders train, val and test of a source are its splits."""
    val, test = settings.val_folder, settings.test_folder
    by_folder = settings.task == "classification" and val is None and test is None
    if by_folder and (parts := split_folders(source)):
        val, test = parts.get("val"), parts.get("test")
        listing = _listed(parts["train"], settings, val, test)
        return replace(listing, notes=(*listing.notes, told_of(parts)))
    return _listed(source, settings, val, test)


def _listed(
    source: Path, settings: ImportSettings, val: str | Path | None, test: str | Path | None
) -> Listing:
    labels = settings.labels
    return list_images(
        source,
        task=named(settings.task),
        labels=read_labels(Path(labels)) if isinstance(labels, str | Path) else labels,
        image_root=None if settings.image_root is None else Path(settings.image_root),
        val=settings.holdout if val is None else Path(val),
        test=settings.test if test is None else Path(test),
        seed=settings.seed,
    )


def _settings_hash(settings: ImportSettings) -> str:
    """Hash of the settings that decide the dataset's content; ``fingerprint`` adds the files."""
    words = [digest(settings.record())]
    if settings.task != "classification":
        words.insert(0, settings.task)
    if settings.store != "png":
        words.append(settings.store)
    return " ".join(words)


def _name(source: Path, settings: ImportSettings) -> str:
    if settings.name:
        return settings.name
    there = source.resolve()
    if there.name.lower() in SPLIT_FOLDERS["train"]:  # flowers/train holds flowers
        there = there.parent
    return (there.name if there.is_dir() else there.stem) or "images"


def _file_name(name: str) -> str:
    """The name with all but letters, digits, dot, dash and underscore replaced."""
    return re.sub(r"[^\w.-]+", "-", name).strip(".-") or "images"


# --- the pipeline -------------------------------------------------------------------------------


@dataclass
class _Tally:
    """Counts and sums that are collected while the pictures are read."""

    moments: Moments
    duplicates: Duplicates = field(default_factory=Duplicates)
    skipped: list[SkippedFile] = field(default_factory=list)
    skipped_count: int = 0
    odd_sizes: OddSizes = field(default_factory=OddSizes)
    deeper: int = 0
    enlarged: list[str] = field(default_factory=list)

    def skip(self, file: SkippedFile) -> None:
        self.skipped_count += 1
        if len(self.skipped) < MAX_SKIPPED:
            self.skipped.append(file)

    def add(self, facts: Facts, source: Source, split: int, number: int, depth: int) -> None:
        """A picture of a dataset that stores so many bits; ``number``: its source's."""
        of_class = source.label if isinstance(source.label, int) else None
        self.duplicates.add(facts.digest, split, number, of_class)
        if facts.sides is not None:
            self.odd_sizes.add(number, facts.sides)
        self.deeper += facts.bits > depth
        if facts.enlarged > ENLARGED:
            self.enlarged.append(source.path)
        if split == TRAIN:
            self.moments.add(facts.count, facts.sums, facts.squares)


def _import_listing(
    source: Path, out: Path, settings: ImportSettings, listing: Listing, emit: Emit
) -> Dataset:
    classes, task = len(listing.classes), named(settings.task)
    column = column_of(task, listing.classes)
    emit(phase("import", f"{len(listing.sources):,} images of {classes:,} classes"))

    def fill(folder: Path) -> None:
        writers = {
            split: SplitWriter(folder, name, column)
            for split, name in SPLIT_NAMES.items()
            if (listing.splits == split).any()
        }
        try:
            if unfinished is None:
                tally = _write_pictures(writers, listing, settings, emit)
            else:
                tally = _write_parts(unfinished, writers, listing, settings, emit)
        except BaseException:
            for writer in writers.values():
                writer.abandon()
            raise
        splits = {SPLIT_NAMES[split]: writer.close() for split, writer in writers.items()}
        _check_enough(splits, listing, tally, task)
        hashes = {SPLIT_NAMES[split]: w.row_hashes.hexdigest() for split, w in writers.items()}
        write_info(folder, _describe(source, settings, listing, splits, hashes, tally))

    unfinished: Unfinished | None = None
    if len(listing.sources) <= reading.FEW:
        if left_of(out) is not None:  # of another import: so few are never left half done
            discard(out)
        write_folder(out, fill)
    else:
        known_by = fingerprint(listing, _settings_hash(settings))
        with Unfinished(unfinished_of(out), known_by) as unfinished:
            write_folder(out, fill, unfinished=unfinished.folder)
    dataset = Dataset(out)
    for note in dataset.info.notes:
        emit(warning(note))
    return dataset


def _write_pictures(
    writers: dict[int, SplitWriter], listing: Listing, settings: ImportSettings, emit: Emit
) -> _Tally:
    """Few files, read by threads of this process."""
    tally, told = _begun(listing, settings), _Told(len(listing.sources), emit)
    pictures = read_all(
        listing.sources,
        settings.record(),
        workers=_workers(settings),
        store=settings.store,
        stored=named(settings.task).examples.stored,
    )
    for number, picture in enumerate(pictures):
        source, split = listing.sources[number], int(listing.splits[number])
        if isinstance(picture, Picture):
            example = Example(content=picture.content, label=picture.label, path=source.path)
            writers[split].add(example, picture.facts.sha256)
            tally.add(picture.facts, source, split, number, settings.depth)
        else:
            tally.skip(picture)
        told(number + 1)
    return tally


def _write_parts(
    unfinished: Unfinished, writers: dict[int, SplitWriter], listing: Listing,
    settings: ImportSettings, emit: Emit,
) -> _Tally:  # fmt: skip
    """Many files, read and written by processes; behind the parts that are there already."""
    tally, told = _begun(listing, settings), _Told(len(listing.sources), emit)
    splits, examples = listing.splits.tolist(), named(settings.task).examples
    number = 0

    def count(outcomes: Sequence[Facts | SkippedFile]) -> None:
        nonlocal number
        for outcome in outcomes:
            if isinstance(outcome, SkippedFile):
                tally.skip(outcome)
            else:
                source = listing.sources[number]
                tally.add(outcome, source, splits[number], number, settings.depth)
            number += 1
        told(number)

    if unfinished.is_of_another:
        emit(phase("import", "other files or settings than those of the import that stopped here: "
                   "begins anew"))  # fmt: skip
    done = unfinished.go_on(writers, splits)
    for outcomes in done:
        count(outcomes)
    if done:
        emit(phase("import", f"goes on behind {number:,} images"))
    for part in write_parts(
        listing.sources,
        splits,
        settings.record(),
        stored=examples.stored,
        column=examples.column(),
        folder=unfinished.folder,
        workers=_workers(settings),
        store=settings.store,
        done=len(done),
    ):
        unfinished.append(part, writers, splits[number : number + len(part.outcomes)])
        count(part.outcomes)
    unfinished.remove()
    return tally


def _begun(listing: Listing, settings: ImportSettings) -> _Tally:
    tally = _Tally(moments=Moments(settings.channels))
    for file in listing.skipped:
        tally.skip(file)
    return tally


def _workers(settings: ImportSettings) -> int:
    return settings.workers or len(os.sched_getaffinity(0))


class _Told:
    """Tells the progress, but not too often."""

    def __init__(self, total: int, emit: Emit) -> None:
        self._total, self._emit, self._last = total, emit, 0.0

    def __call__(self, done: int) -> None:
        if time.monotonic() - self._last > PROGRESS_SECONDS or done == self._total:
            self._last = time.monotonic()
            self._emit(progress("import", done, self._total))


def _check_enough(
    splits: dict[str, SplitInfo], listing: Listing, tally: _Tally, task: Task
) -> None:
    first = (
        f"; the first: {tally.skipped[0].path}: {tally.skipped[0].reason}" if tally.skipped else ""
    )
    if "train" not in splits or not splits["train"].count:
        raise DataError(
            "no image is left to train on",
            seen=f"{tally.skipped_count} of {len(listing.sources)} files are bad{first}",
            fix="check the files, or copy them again",
        )
    counts = splits["train"].class_counts
    readable = [n for n, k in zip(listing.classes, counts, strict=True) if k]
    if why := task.examples.lacking(readable):
        raise DataError(
            f"too few images can be read: {why}",
            seen=f"{', '.join(map(repr, readable[:10]))}; "
            f"{tally.skipped_count} of {len(listing.sources)} files are bad{first}",
            fix=f"check the files of the other {task.examples.NAMES}",
        )


def _describe(
    source: Path,
    settings: ImportSettings,
    listing: Listing,
    splits: dict[str, SplitInfo],
    hashes: dict[str, str],
    tally: _Tally,
) -> DatasetInfo:
    """The ``dataset.json`` record; ``hashes`` are those of each split's rows."""
    mean, std = tally.moments.mean_std(full_scale(settings.depth))
    splits = {name: split for name, split in splits.items() if split.count}
    hashes = {name: value for name, value in hashes.items() if name in splits}

    def place(number: int) -> str:
        return f"{SPLIT_NAMES[int(listing.splits[number])]}:{listing.sources[number].path}"

    odd = [(n, f"{height}×{width}") for n, (height, width) in tally.odd_sizes.found()]
    return DatasetInfo(
        name=_name(source, settings),
        classes=listing.classes,
        # A constant channel has nothing to scale by.
        preprocess=replace(settings.record(), mean=mean, std=tuple(s or 1.0 for s in std)),
        splits=splits,
        source=_stored_path(source),
        content_hash=content_hash(hashes),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        skipped=tuple(tally.skipped),
        skipped_count=tally.skipped_count,
        duplicates=tuple((place(a), place(b)) for a, b in tally.duplicates.pairs),
        duplicate_count=tally.duplicates.count,
        odd_sizes=tuple((place(number), sides) for number, sides in odd[:MAX_ODD]),
        odd_size_count=len(odd),
        notes=notes_on(
            listing.classes,
            splits,
            names=named(settings.task).examples.NAMES,
            std=std,
            skipped=tally.skipped_count,
            duplicates=tally.duplicates,
            odd_sizes=[f"{listing.sources[number].path} {sides}" for number, sides in odd],
            deeper=tally.deeper,
            enlarged=tally.enlarged,
            already=listing.notes,
        ),
        task=named(settings.task).record(),
        import_hash=fingerprint(listing, _settings_hash(settings)),
        settings=_split_by(settings),
    )


def _split_by(settings: ImportSettings) -> dict[str, Any]:
    """The settings that decide the splits, as strict JSON, for those who make it once more."""
    val, test = settings.val_folder, settings.test_folder
    return {
        **({"holdout": settings.holdout} if val is None else {"val_folder": _stored_path(val)}),
        **({"test": settings.test} if test is None else {"test_folder": _stored_path(test)}),
        "seed": settings.seed,
    }


def _stored_path(path: str | Path) -> str:
    return os.fsencode(path).decode("utf-8", "backslashreplace")
