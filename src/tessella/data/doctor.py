"""The doctor of a dataset: copies, contradictions and leaks among its images, and lopsided classes.

Each image becomes a *look*: its colours at 16×16, without their means and of length one, so that
the product of two looks is their correlation. Brightness, contrast, size and JPEG's losses change
it little. Two images are nearly equal where it is high *and* far above what the image has with
others: drawings of one kind are alike without being copies. The details of such pairs decide
(``same_picture``).

Among 600 glyphs, 600 textures and 1,200 digits no two different glyphs or textures are taken for
copies, and 21 digits (8×8 pixels); of planted copies (JPEG at quality 40 and 75, half and double
size, a frame of 1 to 2 % cut off, 15 % brighter or darker, 20 % more contrast) all are found among
the glyphs. A copy of noise that JPEG has smoothed is not.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import cv2
import numpy as np
import numpy.typing as npt

from tessella.artifacts.dataset import Dataset, DatasetInfo, content_hash, write_info
from tessella.artifacts.files import write_folder
from tessella.artifacts.shards import Example, SplitWriter
from tessella.core.errors import UsageError
from tessella.core.events import Emit, phase, progress, silent
from tessella.core.preprocess import fitted, full_scale
from tessella.core.task import CLASSIFICATION
from tessella.data.notes import IMBALANCE, TINY
from tessella.data.same_picture import Small, is_same, small
from tessella.tasks import Task, column_of, of

Kind = Literal["conflicts", "leaks", "copies", "imbalance", "tiny", "sizes", "blank"]
FIXES: tuple[Kind, ...] = (
    "conflicts",
    "leaks",
    "copies",
    "tiny",
    "sizes",
    "blank",
)  # by leaving images out

SIDE = 16
ALIKE = 0.92  # correlation of two looks, at least
NEARER = 0.6  # of the distance to the eighth nearest, at most
NEIGHBOURS = 8
BLOCK = 1024  # looks that are compared with all others at a time
SMALL = 10_000  # of pictures that are compared closely, kept: 9 KB each
MOST_LOOKS = 200_000  # beyond, only equal pixels are found: the time grows with the square
FLAT = 2.0  # standard deviation of a blank image, of 255


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that a person should look at before training.

    Attributes:
        text: what was found, in one sentence.
        groups: the images, as ``split:path``; those that are copies of each other together.
    """

    kind: Kind
    text: str
    groups: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What the doctor found in a dataset, the most pressing first."""

    images: int
    findings: tuple[Finding, ...]

    def left_out(self, kinds: Collection[Kind]) -> frozenset[str]:
        """The images that would have to go so that these kinds of findings are gone.

        Of a contradiction all images, since nobody knows which class is right; of a leak all but
        those in the last of its splits, so that results stay comparable while training loses; of
        copies all but the first; of tiny classes and unusual sizes all.
        """
        out: set[str] = set()
        for finding in self.findings:
            if finding.kind not in kinds:
                continue
            for group in finding.groups:
                if finding.kind == "copies":
                    out.update(group[1:])
                elif finding.kind == "leaks":
                    last = max(map(_order, group))
                    out.update(place for place in group if _order(place) < last)
                else:
                    out.update(group)
        return frozenset(out)


@dataclass(frozen=True, kw_only=True)
class _Looks:
    """All images of a dataset, in order: place, target, split, hash of the pixels, and look."""

    places: list[str]
    labels: list[Any]
    splits: list[str]
    digests: list[bytes]
    looks: npt.NDArray[np.float32]
    blank: list[int]


def _order(place: str) -> int:
    """Whether an image is for training, validation or testing: 0, 1 or 2."""
    return ("train", "val", "test").index(place.partition(":")[0])


def examine(dataset: Dataset, *, workers: int = 1, emit: Emit = silent) -> Examination:
    """Look at every image of a dataset.

    Args:
        workers: threads that decode.

    Raises:
        UsageError: there are no images.
    """
    if dataset.preprocess.volume is not None:
        raise UsageError(
            "pictures are examined, and this is a dataset of volumes",
            seen=dataset.path,
            fix="equal volumes in two splits are told by the import",
        )
    emit(phase("examine", str(dataset.path)))
    if not any(len(dataset.split(name)) for name in dataset.info.splits):
        raise UsageError("the dataset has no images", seen=dataset.path, fix="import it again")
    seen = _looks(dataset, workers, emit)
    groups = _groups(seen, dataset)
    findings = [
        *_findings_of_groups(seen, groups, of(dataset.info.task)),
        *_findings_of_classes(dataset, seen),
    ]
    if odd := dataset.info.odd_sizes:
        count = dataset.info.odd_size_count
        text = f"{_images(odd, count)} of an unusual size or shape: resized, they look different"
        findings.append(
            Finding(kind="sizes", text=text, groups=tuple((place,) for place, _ in odd))
        )
    if seen.blank:
        places = tuple((seen.places[i],) for i in seen.blank)
        findings.append(Finding(kind="blank", text=f"{_images(places)} blank", groups=places))
    return Examination(images=len(seen.places), findings=tuple(findings))


def leave_out(dataset: Dataset, places: Collection[str], out: str | Path) -> Dataset:
    """A new dataset without some images; the old one stays as it is.

    A class that has no training image any more is none: its other images go, too.

    Args:
        places: images as ``split:path``.

    Raises:
        UsageError: ``out`` is there already, or no image would be left to train on.
    """
    out = Path(out)
    if out.exists():
        raise UsageError("the folder is there already", seen=out, fix="choose another --out")
    info = dataset.info
    classes = _classes_left(dataset, places)
    number = {info.classes.index(name): k for k, name in enumerate(classes)}

    def fill(folder: Path) -> None:
        splits, hashes = {}, {}
        for name in info.splits:
            kept = [e for e in dataset.split(name) if f"{name}:{e.path}" not in places]
            if len(classes) < len(info.classes):
                kept = [replace(e, label=number[e.label]) for e in kept if e.label in number]
            if not kept and name == "train":
                raise UsageError(
                    "no image would be left to train on", seen=dataset.path, fix="leave out less"
                )
            if kept:
                writer = SplitWriter(folder, name, column_of(of(info.task), classes))
                for example in kept:
                    writer.add(example)
                splits[name], hashes[name] = writer.close(), writer.row_hashes.hexdigest()
        note = f"the doctor left out {len(places):,} images of {dataset.path.name}"
        made = replace(
            info,
            classes=classes,
            splits=splits,
            content_hash=content_hash(hashes),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            duplicates=(),
            duplicate_count=0,
            odd_sizes=tuple(odd for odd in info.odd_sizes if odd[0] not in places),
            odd_size_count=max(0, info.odd_size_count - _odd_among(info, places)),
            settings={},
            notes=(*info.notes, note),
            import_hash="",
        )
        write_info(folder, made)

    write_folder(out, fill)
    return Dataset(out)


def _odd_among(info: DatasetInfo, places: Collection[str]) -> int:
    return sum(place in places for place, _ in info.odd_sizes)


def _classes_left(dataset: Dataset, places: Collection[str]) -> tuple[str, ...]:
    """The classes that training still has; of other tasks than classification all."""
    info = dataset.info
    if info.task != CLASSIFICATION or "train" not in info.splits:
        return info.classes
    had = info.splits["train"].class_counts
    left = Counter(e.label for e in dataset.split("train") if f"train:{e.path}" not in places)
    return tuple(name for k, name in enumerate(info.classes) if left[k] or not had[k])


def _looks(dataset: Dataset, workers: int, emit: Emit) -> _Looks:
    places: list[str] = []
    labels: list[Any] = []
    splits: list[str] = []
    digests: list[bytes] = []
    blank: list[int] = []
    rows: list[npt.NDArray[np.float32]] = []
    total = sum(s.count for s in dataset.info.splits.values())
    with ThreadPoolExecutor(workers, thread_name_prefix="examine") as pool:
        for name in dataset.info.splits:
            split = dataset.split(name)
            for start in range(0, len(split), BLOCK):
                examples = [split[i] for i in range(start, min(start + BLOCK, len(split)))]
                for example, (digest, flat, look) in zip(
                    examples, pool.map(lambda e: _look(e, dataset), examples), strict=True
                ):
                    if flat:
                        blank.append(len(places))
                    places.append(f"{name}:{example.path}")
                    labels.append(example.label)
                    splits.append(name)
                    digests.append(digest)
                    rows.append(look)
                emit(progress("examine", len(places), total))
    return _Looks(
        places=places, labels=labels, splits=splits, digests=digests, looks=np.stack(rows),
        blank=blank,
    )  # fmt: skip


def _look(example: Example, dataset: Dataset) -> tuple[bytes, bool, npt.NDArray[np.float32]]:
    """The hash of an image's pixels, whether it is blank, and its look."""
    record = dataset.preprocess
    pixels = fitted(example.content, record, name=example.path)
    digest = hashlib.blake2b(pixels.tobytes(), digest_size=16).digest()
    small = cv2.resize(
        pixels.astype(np.float32) * (1 if record.depth == 8 else 1 / 257), (SIDE, SIDE),
        interpolation=cv2.INTER_AREA,
    ).reshape(SIDE, SIDE, -1)  # fmt: skip
    small -= small.mean((0, 1))
    length = float(np.linalg.norm(small))
    flat = length < FLAT * SIDE * small.shape[2] ** 0.5
    look = (small / max(length, 1e-6)).astype(np.float32).ravel()
    return digest, flat, look if not flat else np.zeros_like(look)


def _groups(seen: _Looks, dataset: Dataset) -> list[list[int]]:
    """Images that are equal or nearly so, together; each group in order."""
    parent = list(range(len(seen.places)))

    @lru_cache(SMALL)
    def small_of(i: int) -> Small:
        split, number = seen.splits[i], i - seen.splits.index(seen.splits[i])
        example, record = dataset.split(split)[number], dataset.preprocess
        pixels = fitted(example.content, record, name=example.path)
        return small(pixels, full_scale(record.depth))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    first: dict[bytes, int] = {}
    for i, digest in enumerate(seen.digests):
        parent[root(i)] = root(first.setdefault(digest, i))
    for i, j in _alike(seen.looks):
        if root(i) != root(j) and is_same(small_of(i), small_of(j)):
            parent[root(i)] = root(j)
    groups: dict[int, list[int]] = defaultdict(list)
    for i in range(len(parent)):
        groups[root(i)].append(i)
    return [group for group in groups.values() if len(group) > 1]


def _alike(looks: npt.NDArray[np.float32]) -> Iterator[tuple[int, int]]:
    """Pairs of images so alike that one seems to be a copy of the other."""
    if not 1 < len(looks) <= MOST_LOOKS:
        return
    for start in range(0, len(looks), BLOCK):
        block = looks[start : start + BLOCK] @ looks.T
        block[np.arange(len(block)), np.arange(start, start + len(block))] = -1
        kth = max(0, block.shape[1] - NEIGHBOURS)
        usual = np.partition(block, kth, axis=1)[:, kth]
        near = (block > ALIKE) & (1 - block < NEARER * (1 - usual)[:, None])
        near |= block > 1 - 1e-5  # also where there are many copies
        for i, j in zip(*np.nonzero(near), strict=True):
            yield start + int(i), int(j)


def _findings_of_groups(
    seen: _Looks, groups: Sequence[Sequence[int]], task: Task
) -> Iterator[Finding]:
    """Each group under the worst that it is: a contradiction, of two splits, or copies."""
    contradict = task.examples.contradiction(seen.labels)
    found: dict[Kind, list[tuple[str, ...]]] = {"conflicts": [], "leaks": [], "copies": []}
    for group in groups:
        kind: Kind = "copies"
        if contradict(group):
            kind = "conflicts"
        elif len({seen.splits[i] for i in group}) > 1:
            kind = "leaks"
        found[kind].append(tuple(seen.places[i] for i in group))
    texts = {
        "conflicts": f"have different {task.examples.NAMES}: a network cannot learn both",
        "leaks": "lie in more than one split: results flatter",
        "copies": "are copies of each other",
    }
    for kind, alike in found.items():
        if alike:
            text = f"{_images(alike)} equal or nearly so, and {texts[kind]}"
            yield Finding(kind=kind, text=text, groups=tuple(alike))


def _findings_of_classes(dataset: Dataset, seen: _Looks) -> Iterator[Finding]:
    if "train" not in dataset.info.splits:
        return
    counts = dict(zip(dataset.classes, dataset.info.splits["train"].class_counts, strict=True))
    classes = of(dataset.info.task).examples.NAMES == "classes"
    few, most = min(counts, key=lambda c: counts[c]), max(counts, key=lambda c: counts[c])
    if classes and counts[most] >= IMBALANCE * max(1, counts[few]):
        text = (
            f"{most!r} has {counts[most]:,} training images, {few!r} has {counts[few]:,}:"
            " class_weights='balanced' in the recipe evens it out"
        )
        yield Finding(kind="imbalance", text=text)
    if small_ones := [name for name, count in counts.items() if count < TINY]:
        names = ", ".join(f"{name!r} {counts[name]}" for name in small_ones[:10])
        more = ", …" if len(small_ones) > 10 else ""
        text = f"fewer than {TINY} training images have: {names}{more}"
        classified = dataset.info.task == CLASSIFICATION
        numbers = [dataset.classes.index(name) for name in small_ones] if classified else []
        groups = tuple(
            tuple(p for p, label in zip(seen.places, seen.labels, strict=True) if label == number)
            for number in numbers
        )
        yield Finding(kind="tiny", text=text, groups=tuple(filter(None, groups)))


def _images(groups: Sequence[Sequence[str]], count: int | None = None) -> str:
    count = sum(map(len, groups)) if count is None else count
    return f"{count:,} images are" if count != 1 else "1 image is"
