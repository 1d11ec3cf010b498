"""A folder or a list of images becomes a dataset: list, hold out, read, count, write.

The dataset is the same for any number of workers, and complete or absent.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

from tessella.annotations.opening import SPLITS
from tessella.artifacts.dataset import (
    Dataset,
    DatasetInfo,
    SkippedFile,
    content_hash,
    unfinished_of,
    write_info,
)
from tessella.artifacts.files import Member, require_place, write_folder
from tessella.artifacts.shards import HASH_BYTES, Example, Rows, SplitInfo, SplitWriter
from tessella.core.errors import DataError, UsageError
from tessella.core.events import Emit, phase, progress, silent, warning
from tessella.core.legible import legible
from tessella.core.preprocess import Preprocess, ResizeMode, Store, Storing, Volume, full_scale
from tessella.core.record import digest
from tessella.core.reporter import reported
from tessella.data import reading
from tessella.data.duplicates import Duplicates
from tessella.data.few import read_all
from tessella.data.listing import SPLIT_NAMES, Listing, fingerprint, list_images
from tessella.data.moments import Moments
from tessella.data.notes import notes_on
from tessella.data.odd_sizes import MAX_ODD, OddSizes, Sides
from tessella.data.part import Part
from tessella.data.parts import Plan, planned, write_parts
from tessella.data.reading import ENLARGED, Picture
from tessella.data.sources import read_labels
from tessella.data.split_folders import split_folders, told_of
from tessella.data.splitting import TRAIN
from tessella.data.storing import storing_of
from tessella.data.unfinished import Unfinished, discard, left_of, shard_of
from tessella.tasks import Task, column_of, counted_examples, counted_names, named

MAX_SKIPPED = 1000
PROGRESS_SECONDS = 0.1
SIDE, SIDE_OF_VOLUMES = 256, 128  # of what is stored of a picture, and seen of a volume
VOLUMES_AT_ONCE = 4  # that are read: each may take gigabytes
# what tools call a file of labels, whatever is in it: of flowers/data.yaml the folder names the set
_PLAIN_NAMES = {
    "_annotations.coco", "annotations", "data", "dataset", "instances_default", "labels", "result",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ImportSettings:
    """How images become a dataset.

    Attributes:
        size: height and width to store, or one number for both; 256 if None. Of volumes slices,
            height and width of the parts that the network sees, or one number; 128 if None.
        channels, depth, resize: see ``core.preprocess.Preprocess``.
        crop: size that the network sees, if smaller than ``size``.
        holdout, test: fractions of each class that are held out for validation and for testing.
        val_folder, test_folder: folders (or lists) to take these splits from instead.
        labels: a list's class names, or a text file with one a line.
        image_root: what a list's paths are relative to; the list's folder if None.
        task: what a network is to learn: a name that ``tasks.names()`` lists.
        seed: decides which images are held out.
        store: ``png``; ``pixels``: about twice as large, and a training reads them without
            decoding; ``original``: a JPEG of up to nine times the pixels stays as it is (the
            quickest import, and the smallest dataset; a training decodes and resizes it each time),
            all else is PNG; or ``auto``: as ``original``, but none that is progressive, and of up
            to 1.3 times the pixels, nearly always read sooner than a PNG; or of up to nine times
            where this machine's GPU decodes them, of more pictures than a training keeps decoded.
            Equal pixels, but other files: who wants one ``content_hash`` on every machine names the
            store. Where nine times the pixels stay, mean and std are those of about a thousand
            pictures, evenly spread.
        name: of the dataset; the source's if None, or its folder's, where it is called data.yaml,
            labels.csv or the like.
        window: of volumes: see ``core.preprocess.Volume``.
        workers: processes that read images; one a core if None. The dataset does not depend on it.
    """

    size: int | tuple[int, ...] | None = None
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
    store: Store = "auto"
    name: str | None = None
    window: tuple[float, float] | None = None
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
                "images are stored as png, as pixels or in their original files",
                seen=self.store,
                fix="auto, png, pixels or original",
            )
        if self.window is not None and not named(self.task).volumes:
            raise UsageError(
                "a window is for volumes",
                seen=f"window={self.window}, task={self.task}",
                fix="import volumes with --task volumes (in Python task=), or leave it out",
            )
        self.record()

    def record(self) -> Preprocess:
        """The preprocessing record, with mean and std still to be measured."""
        if named(self.task).volumes:
            return self._record_of_volumes()
        height, width = _pair(SIDE if self.size is None else self.size)
        return Preprocess(
            height=height,
            width=width,
            channels=self.channels,
            depth=self.depth,
            resize=self.resize,
            crop=None if self.crop is None else _pair(self.crop),
        )

    def _record_of_volumes(self) -> Preprocess:
        size = SIDE_OF_VOLUMES if self.size is None else self.size
        sides = (size,) * 3 if isinstance(size, int) else tuple(size)
        if len(sides) != 3 or self.crop is not None or self.store == "original":
            raise UsageError(
                "volumes are stored whole, and a network sees slices x height x width of them",
                seen=f"size={size}, crop={self.crop}, store={self.store}",
                fix="give size three numbers or one, and leave out crop and store",
            )
        slices, height, width = sides
        volume = Volume(slices=slices, window=self.window)
        return Preprocess(height=height, width=width, channels=1, depth=16, volume=volume)


def _pair(size: int | tuple[int, ...]) -> tuple[int, int]:
    sides = (size, size) if isinstance(size, int) else tuple(size)
    if len(sides) != 2:
        raise UsageError(
            "a picture has a height and a width",
            seen=size,
            fix="give two numbers, or import volumes with --task volumes (in Python task=)",
        )
    return sides[0], sides[1]


def import_images(
    source: str | Path, out: str | Path, settings: ImportSettings, *, emit: Emit = silent
) -> Dataset:
    """Make a dataset of a folder (class = subfolder) or of a text list (lines ``path label``).

    What else is found, such as masks, boxes or volumes, the task says (docs/tasks.md).

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
    size: int | tuple[int, ...] | None = None,
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
    # "png" was the default once, and its pixels are equal: who asks for no other gets it
    usual: tuple[Storing, ...] = ("auto", "decoders", "png")
    will_do = usual if chosen.store == "auto" else (chosen.store,)
    hashes = (_settings_hash(chosen, storing) for storing in will_do)
    if all(there.info.import_hash != fingerprint(listing, known) for known in hashes):
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


def _settings_hash(settings: ImportSettings, storing: Storing) -> str:
    """Hash of what decides the dataset's content; ``fingerprint`` adds the files."""
    words = [digest(settings.record())]
    if settings.task != "classification":
        words.insert(0, settings.task)
    if storing != "png":
        words.append(storing)
    return " ".join(words)


def _name(source: Path, settings: ImportSettings) -> str:
    if settings.name:
        return settings.name
    there = source.resolve()
    if there.is_file() and there.stem.lower() in _PLAIN_NAMES:
        there = there.parent
        there = there.parent if there.name.lower() == "annotations" else there
    if there.stem.lower() in SPLITS["train"]:  # flowers/train holds flowers
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

    def add(self, number: int, listing: Listing, sha256: bytes, sides: Sides | None) -> None:
        """A picture of the dataset by its number in the listing."""
        label = listing.sources[number].label
        of_class = label if isinstance(label, int) else None
        self.duplicates.add(sha256, int(listing.splits[number]), number, of_class)
        if sides is not None:
            self.odd_sizes.add(number, sides)

    def add_part(self, plan: Plan, part: Part, listing: Listing) -> None:
        hashes, kept = part.hashes, (n for i, n in enumerate(plan.files) if i not in part.skipped)
        for row, (number, sides) in enumerate(zip(kept, part.sides, strict=True)):
            self.add(number, listing, hashes[HASH_BYTES * row : HASH_BYTES * (row + 1)], sides)
        for place, reason in part.skipped.items():
            path = listing.sources[plan.files[place]].path
            self.skip(SkippedFile(path=path, reason=reason))
        self.deeper += part.deeper
        self.enlarged += [listing.sources[plan.files[place]].path for place in part.enlarged]
        if plan.split == TRAIN:
            self.moments.add(part.sums)


def _import_listing(
    source: Path, out: Path, settings: ImportSettings, listing: Listing, emit: Emit
) -> Dataset:
    examples = counted_examples(settings.task, len(listing.sources))
    emit(phase("import", f"{examples} of {counted_names(settings.task, len(listing.classes))}"))
    storing = storing_of(settings.store, settings.record(), len(listing.sources))
    if storing == "decoders":
        emit(phase("store", "JPEG files stay as they are: this machine's GPU decodes them"))
    known_by = fingerprint(listing, _settings_hash(settings, storing))

    def fill(folder: Path) -> None:
        if unfinished is None:
            written = _write_pictures(folder, listing, settings, storing, emit)
        else:
            written = _write_parts(unfinished, listing, settings, storing, emit)
        _check_enough(written, listing, named(settings.task))
        write_info(folder, _describe(source, settings, listing, written, known_by))

    unfinished: Unfinished | None = None
    if len(listing.sources) <= reading.FEW or settings.record().volume is not None:
        if left_of(out) is not None:  # of another import: so few are never left half done
            discard(out)
        write_folder(out, fill)
    else:
        with Unfinished(unfinished_of(out), known_by) as unfinished:
            write_folder(out, fill, unfinished=unfinished.folder)
    dataset = Dataset(out)
    for note in dataset.info.notes:
        emit(warning(note))
    return dataset


@dataclass(frozen=True, kw_only=True)
class _Written:
    """What an import wrote: by name each split, the hash of its rows, and what was counted."""

    splits: dict[str, SplitInfo]
    hashes: dict[str, str]
    tally: _Tally


def _write_pictures(
    folder: Path, listing: Listing, settings: ImportSettings, storing: Storing, emit: Emit
) -> _Written:
    """Few files, or volumes, read by threads of this process."""
    record, workers = settings.record(), _workers(settings)
    tally, told = _begun(listing, settings), _Told(len(listing.sources), emit)
    column = column_of(named(settings.task), listing.classes)
    writers = {
        split: SplitWriter(folder, name, column)
        for split, name in SPLIT_NAMES.items()
        if (listing.splits == split).any()
    }
    pictures = read_all(
        listing.sources,
        record,
        workers=workers if record.volume is None else min(workers, VOLUMES_AT_ONCE),
        store=storing,
        stored=named(settings.task).examples.stored,
    )
    try:
        for number, picture in enumerate(pictures):
            if isinstance(picture, Picture):
                _write_picture(writers, picture, number, listing, tally, record.depth)
            else:
                tally.skip(picture)
            told(number + 1)
    except BaseException:
        for writer in writers.values():
            writer.abandon()
        raise
    return _Written(
        splits={SPLIT_NAMES[split]: writer.close() for split, writer in writers.items()},
        hashes={SPLIT_NAMES[split]: w.row_hashes.hexdigest() for split, w in writers.items()},
        tally=tally,
    )


def _write_picture(
    writers: dict[int, SplitWriter], picture: Picture, number: int, listing: Listing,
    tally: _Tally, depth: int,
) -> None:  # fmt: skip
    facts, split = picture.facts, int(listing.splits[number])
    example = Example(content=picture.content, label=picture.label, path=picture.path)
    writers[split].add(example, facts.sha256)
    tally.add(number, listing, facts.sha256, facts.sides)
    tally.deeper += facts.bits > depth
    tally.enlarged += [picture.path] if facts.enlarged > ENLARGED else []
    if split == TRAIN and facts.sums is not None:
        tally.moments.add(facts.sums)


def _write_parts(
    unfinished: Unfinished,
    listing: Listing,
    settings: ImportSettings,
    storing: Storing,
    emit: Emit,
) -> _Written:
    """Many files, read and written by processes; behind the parts that are there already."""
    tally, told = _begun(listing, settings), _Told(len(listing.sources), emit)
    task, record = named(settings.task), settings.record()
    column = column_of(task, listing.classes)
    plans = planned(listing.splits, record)
    rows = {plan.split: Rows(SPLIT_NAMES[plan.split], column) for plan in plans}
    shards: dict[int, dict[str, Member]] = {split: {} for split in rows}
    number = 0

    def count(plan: Plan, part: Part, labels: list[Any]) -> None:
        nonlocal number
        tally.add_part(plan, part, listing)
        rows[plan.split].add(part.hashes, labels)
        if part.shard is not None:
            shards[plan.split][shard_of(plan)] = part.shard
        number += len(plan.files)
        told(number)

    if unfinished.is_of_another:
        emit(phase("import", "other files or settings than those of the import that stopped here: "
                   "begins anew"))  # fmt: skip
    done = unfinished.go_on(plans)
    for plan, (part, labels) in zip(plans, done, strict=False):
        count(plan, part, labels)
    if done:
        emit(phase("import", f"goes on behind {number:,} images"))
    left = plans[len(done) :]
    made = write_parts(
        listing.sources,
        left,
        record,
        stored=task.examples.stored,
        column=column,
        folder=unfinished.folder,
        workers=_workers(settings),
        store=storing,
    )
    with closing(made):  # at once where somebody stops it: its processes end then
        for plan, (part, labels, file) in zip(left, made, strict=True):
            unfinished.append(part, file, plan)
            count(plan, part, labels)
    unfinished.remove()
    return _Written(
        splits={SPLIT_NAMES[split]: r.info(shards[split]) for split, r in rows.items()},
        hashes={SPLIT_NAMES[split]: r.hash.hexdigest() for split, r in rows.items()},
        tally=tally,
    )


def _begun(listing: Listing, settings: ImportSettings) -> _Tally:
    tally = _Tally(moments=Moments(settings.record().channels))
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


def _check_enough(written: _Written, listing: Listing, task: Task) -> None:
    splits, tally = written.splits, written.tally
    first = (
        f"; the first: {tally.skipped[0].path}: {tally.skipped[0].reason}" if tally.skipped else ""
    )
    if "train" not in splits or not splits["train"].count:
        raise DataError(
            "no image is left to train on",
            seen=f"{tally.skipped_count} of {len(listing.sources)} files are bad{first}",
            fix="check the files, copy them again, or say where the paths of a list, a table or "
            "COCO's JSON start: --image-root",
        )
    counts = splits["train"].class_counts
    readable = [n for n, k in zip(listing.classes, counts, strict=True) if k]
    if (why := task.examples.lacking(readable)) and not listing.bare:
        raise DataError(
            f"too few images can be read: {why}",
            seen=f"{', '.join(map(repr, readable[:10]))}; "
            f"{tally.skipped_count} of {len(listing.sources)} files are bad{first}",
            fix=f"check the files of the other {task.examples.NAMES}",
        )


def _describe(
    source: Path, settings: ImportSettings, listing: Listing, written: _Written, known_by: str
) -> DatasetInfo:
    """The ``dataset.json`` record; ``known_by`` is the fingerprint of settings and files."""
    tally = written.tally
    mean, std = tally.moments.mean_std(full_scale(settings.record().depth))
    splits = {name: split for name, split in written.splits.items() if split.count}
    hashes = {name: written.hashes[name] for name in splits}

    def place(number: int) -> str:
        return f"{SPLIT_NAMES[int(listing.splits[number])]}:{listing.sources[number].path}"

    odd = [(n, f"{height}×{width}") for n, (height, width) in tally.odd_sizes.found()]
    return DatasetInfo(
        name=_name(source, settings),
        classes=listing.classes,
        # A constant channel has nothing to scale by.
        preprocess=replace(settings.record(), mean=mean, std=tuple(s or 1.0 for s in std)),
        splits=splits,
        source=legible(source),
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
        import_hash=known_by,
        settings=_made_by(settings),
    )


def _made_by(settings: ImportSettings) -> dict[str, Any]:
    """The settings that decide splits and classes, as strict JSON, for those who make it again."""
    val, test, labels = settings.val_folder, settings.test_folder, settings.labels
    return {
        **({"holdout": settings.holdout} if val is None else {"val_folder": legible(val)}),
        **({"test": settings.test} if test is None else {"test_folder": legible(test)}),
        "seed": settings.seed,
        **({"labels": legible(labels)} if isinstance(labels, str | Path) else {}),
    }
