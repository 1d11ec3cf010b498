"""dataset/: ``dataset.json`` beside the shards of its splits (``shards``).

The images lie in the shards already brought to the record's size (the ``fit`` stage), so that
training only decodes, crops and normalizes.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tessella.artifacts.files import check_member, read_document, to_document
from tessella.artifacts.shards import SCHEMA, Example, ShardFile, SplitInfo, offsets_in, read_shard
from tessella.core.count import counted
from tessella.core.errors import ArtifactError, CorruptArtifact, DataError, UsageError
from tessella.core.preprocess import Preprocess
from tessella.core.task import CLASSIFICATION, TaskRecord

VERSION = 1
MOST_FILES = 512  # that a split holds open: a process may often have 1,024


@dataclass(frozen=True, kw_only=True)
class SkippedFile:
    path: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """What ``dataset.json`` says.

    Attributes:
        classes: class names; a label is an index into them. Of regression: names of the numbers.
        preprocess: how a file becomes an input; its mean and std are those of the training split.
        source: where the images came from: a folder or a list.
        content_hash: SHA-256 over the rows of all splits, in order: equal hashes, equal examples.
        skipped: files that could not be read, with the reason (the first 1,000).
        skipped_count: how many there were in all.
        duplicates: pairs of ``split:path`` with equal pixels in different splits (the first 1,000).
        duplicate_count: how many there were in all.
        odd_sizes: ``split:path`` and sides (height×width) of files whose pictures have another size
            or shape than most (the first 1,000).
        odd_size_count: how many there were in all.
        notes: what a person should know: class imbalance, tiny classes.
        import_hash: SHA-256 over the import's settings and what it found: paths, sizes, times.
        task: what a network learns from the dataset.
        settings: how it was split, as options of the import: holdout, test, val_folder,
            test_folder, seed; empty of a dataset that was made in another way.
    """

    name: str
    classes: tuple[str, ...]
    preprocess: Preprocess
    splits: dict[str, SplitInfo]
    source: str
    content_hash: str
    created: str
    skipped: tuple[SkippedFile, ...] = ()
    skipped_count: int = 0
    duplicates: tuple[tuple[str, str], ...] = ()
    duplicate_count: int = 0
    odd_sizes: tuple[tuple[str, str], ...] = ()
    odd_size_count: int = 0
    notes: tuple[str, ...] = ()
    import_hash: str = ""
    task: TaskRecord = CLASSIFICATION
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.task.check(self.classes)
        for name, split in self.splits.items():
            if len(split.class_counts) != len(self.classes):
                raise UsageError(
                    "each split of a dataset counts each class",
                    seen=f"{len(split.class_counts)} counts in {name}, {len(self.classes)} classes",
                )


class Split:
    """A split, memory-mapped: ``len``, ``split[i]``, ``column``; processes may share it.

    Attributes:
        column: the column ``label`` of all shards, whose meaning is the task's.
        labels: the column of a classification as int64 [N]; other tasks have none.

    Raises:
        CorruptArtifact: a shard is missing, has another size or (if ``deep``) other bytes, or its
            labels are not those that ``info`` counts.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        info: SplitInfo,
        *,
        deep: bool,
        task: TaskRecord = CLASSIFICATION,
    ) -> None:
        self.name, self.info, self.task, self._folder = name, info, task, folder
        for shard, expected in info.shards.items():
            check_member(folder / shard, expected, deep=deep)
        self.labels: npt.NDArray[np.int64]
        shards = [read_shard(folder / shard) for shard in info.shards]
        tables = [table for table, _ in shards]
        table = pa.concat_tables(tables) if tables else SCHEMA.empty_table()
        image = table.column("image")
        self._content = [chunk.field("bytes") for chunk in image.chunks]
        self._paths = [chunk.field("path") for chunk in image.chunks]
        self._starts = np.cumsum([0, *(len(c) for c in self._content)]).tolist()
        self._files: list[ShardFile] = []
        self._shards: list[tuple[str, int, int]] = []  # of each chunk: path, device and inode
        places: list[npt.NDArray[np.int64]] = []  # of each chunk, see _where
        for shard, (chunks, mapped) in zip(info.shards, shards, strict=True):
            descriptor = -1
            if len(shards) <= MOST_FILES:
                self._files.append(ShardFile(folder / shard))
                descriptor = self._files[-1].descriptor
            found = (folder / shard).stat()
            known = str((folder / shard).resolve()), found.st_dev, found.st_ino
            self._shards += [known] * chunks.column("image").num_chunks
            places += [_where(chunk, mapped, descriptor) for chunk in chunks.column("image").chunks]
        # of each image: the file's descriptor or -1, where its bytes begin there, and how many
        self._where_3N = np.concatenate([np.zeros((3, 0), np.int64), *places], axis=1)
        self.column: pa.ChunkedArray = table.column("label")
        if len(self.column) != info.count:
            raise _other_labels(folder / name)
        if task.name == CLASSIFICATION.name:
            if self.column.type != pa.int64():
                raise _other_labels(folder / name)
            self.labels = self.column.to_numpy()
            _check_labels(self.labels, info, folder / name)

    def __len__(self) -> int:
        return len(self.column)

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(index)
        chunk, row = self._place(index)
        return Example(
            content=self._content[chunk][row].as_py(),
            label=self.column[index].as_py(),
            path=self._paths[chunk][row].as_py(),
        )

    def content(self, index: int) -> bytes:
        """The stored file bytes of an image, read as ``read`` does."""
        descriptor, begin, nbytes = self._where_3N[:, index].tolist()
        made = b"" if descriptor < 0 else os.pread(descriptor, nbytes, begin)
        if made and len(made) == nbytes:
            return made
        chunk, row = self._place(index)
        return self._content[chunk][row].as_py() or b""  # nothing, in a shard of a stranger

    def view(self, index: int) -> memoryview:
        """The stored bytes of an example in the mapped shard: a page is read when it is touched."""
        chunk, row = self._place(index)
        return memoryview(self._content[chunk][row].as_buffer())

    def read(self, index: int, *parts: bytearray | memoryview) -> bool:
        """Read the stored bytes of an image into memory; False if that cannot hold just them.

        A read copies from the system's cache at once. Pages of the mapped shard come one by one,
        under a lock that all threads share: four of them read 9,283 images of 197 kB a second that
        way, one 24,934; reads alone are 45,000 to 115,000.
        """
        descriptor, begin, nbytes = self._where_3N[:, index].tolist()
        if descriptor < 0 or nbytes != sum(map(len, parts)):
            return False
        return bool(os.preadv(descriptor, parts, begin) == nbytes)

    def where(self, index: int) -> tuple[str, int, int, int, int]:
        """The shard of an image, as path, device and inode, since another dataset may lie there by
        now; where its stored bytes begin, and how many they are: 0 where they do not lie at one
        place.
        """
        _, begin, nbytes = self._where_3N[:, index].tolist()
        return *self._shards[self._place(index)[0]], begin, nbytes

    def read_each(
        self, indices: npt.NDArray[np.int64], head: bytes, rests: Sequence[memoryview]
    ) -> list[int]:
        """Read images of which each begins with the same bytes into the memory for their rest.

        Returns:
            the places in ``indices`` of those that are not of this kind.
        """
        others, seen, front = [], bytearray(len(head)), len(head)
        where = self._where_3N[:, indices].T.tolist()
        for place, ((descriptor, begin, nbytes), rest) in enumerate(zip(where, rests, strict=True)):
            fits = descriptor >= 0 and nbytes == front + len(rest)
            if not fits or os.preadv(descriptor, (seen, rest), begin) != nbytes or seen != head:
                others.append(place)
        return others

    def _place(self, index: int) -> tuple[int, int]:
        """The number of an image's chunk, and of its row there."""
        chunk = bisect_right(self._starts, index) - 1
        return chunk, index - self._starts[chunk]

    def __iter__(self) -> Iterator[Example]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        classes = counted(len(self.info.class_counts), "class", "classes")
        images = counted(len(self), "image")
        return f"<Split {self.name!r} of {self._folder}: {images}, {classes}>"

    def __getstate__(self) -> tuple[Path, str, SplitInfo, TaskRecord]:
        return self._folder, self.name, self.info, self.task  # a worker maps the shards itself

    def __setstate__(self, state: tuple[Path, str, SplitInfo, TaskRecord]) -> None:
        *where, task = state
        self.__init__(*where, deep=False, task=task)  # type: ignore[misc]


class Dataset:
    """An imported dataset, read-only.

    Args:
        path: the dataset's folder.
        deep: check the hash of a split's shards when it is opened, and not only their sizes. It
            reads every byte once; leave it out to look at a few examples.
    """

    def __init__(self, path: str | Path, *, deep: bool = True) -> None:
        self.path = Path(path)
        if not self.path.exists() and unfinished_of(self.path).is_dir():
            raise ArtifactError(
                "the import into this folder has not come to its end",
                seen=unfinished_of(self.path),
                fix="run it again, it goes on where it stopped; or remove what is there: "
                f"tessella data discard {shlex.quote(str(self.path))}",
            )
        if self.path.is_dir() and not (self.path / "dataset.json").exists():
            raise ArtifactError(
                "there is no dataset here",
                seen=f"no dataset.json in {self.path}",
                fix="import its images first: "
                f"tessella data import {shlex.quote(str(self.path))} --out datasets/NAME",
            )
        self.info = read_document(
            self.path / "dataset.json", DatasetInfo, kind="dataset", version=VERSION
        )
        self._deep = deep
        self._splits: dict[str, Split] = {}

    @property
    def classes(self) -> tuple[str, ...]:
        return self.info.classes

    @property
    def preprocess(self) -> Preprocess:
        return self.info.preprocess

    def split(self, name: str) -> Split:
        if name not in self.info.splits:
            raise UsageError(
                f"the dataset has no split {name!r}",
                seen=", ".join(self.info.splits),
                fix="name one of these (--split val), or import again with a holdout for it "
                "(--test 0.1)",
            )
        if name not in self._splits:
            self._splits[name] = Split(
                self.path, name, self.info.splits[name], deep=self._deep, task=self.info.task
            )
        return self._splits[name]

    @property
    def train(self) -> Split:
        return self.split("train")

    @property
    def val(self) -> Split:
        return self.split("val")

    @property
    def test(self) -> Split:
        return self.split("test")

    def __repr__(self) -> str:
        counts = ", ".join(f"{name} {s.count:,}" for name, s in self.info.splits.items())
        classes = counted(len(self.classes), "class", "classes")
        return f"<Dataset {self.info.name!r}: {classes}, {counts}>"


def _where(images: pa.Array, mapped: pa.Buffer, descriptor: int) -> npt.NDArray[np.int64]:
    """Descriptor, begin and length of the content of each image of a chunk, [3, N]."""
    content = images.field("bytes")
    offsets = offsets_in(content, mapped)
    where_3N = np.full((3, len(content)), -1, np.int64)
    if offsets is None:
        where_3N[1:] = 0
    else:
        where_3N[0], where_3N[1], where_3N[2] = descriptor, offsets[:-1], np.diff(offsets)
    return where_3N


def _check_labels(labels: npt.NDArray[np.int64], info: SplitInfo, where: Path) -> None:
    classes = len(info.class_counts)
    inside = len(labels) == 0 or (labels.min() >= 0 and labels.max() < classes)
    if not inside or np.bincount(labels, minlength=classes).tolist() != list(info.class_counts):
        raise _other_labels(where)


def _other_labels(where: Path) -> CorruptArtifact:
    return CorruptArtifact(
        "the labels in the shards are not those that dataset.json counts",
        seen=where,
        fix="restore the dataset or import again",
    )


def unfinished_of(path: Path) -> Path:
    """Where the import into a folder is kept until it is complete."""
    return path.with_name(f".{path.name}.import")


def content_hash(splits: Mapping[str, str]) -> str:
    """The hash of a dataset's examples, from the hash of each split's rows."""
    rows = "\n".join(f"{name} {value}" for name, value in splits.items())
    return hashlib.sha256(rows.encode()).hexdigest()


def write_info(folder: Path, info: DatasetInfo) -> None:
    """Write ``dataset.json`` last: a folder without this file is no dataset."""
    if not info.classes:
        raise DataError("a dataset needs at least one class")
    (folder / "dataset.json").write_bytes(to_document("dataset", VERSION, info))
