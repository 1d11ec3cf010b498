"""dataset/: ``dataset.json`` and memory-mapped Arrow shards, which HF ``datasets`` open too.

The images lie in the shards as lossless file bytes, already brought to the record's size (the
``fit`` stage), so that training only decodes, crops and normalizes.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tessella.artifacts.files import Member, check_member, member, read_document, to_document
from tessella.core.errors import ArtifactError, CorruptArtifact, DataError, UsageError
from tessella.core.preprocess import Preprocess

VERSION = 1
ROWS_PER_BATCH = 256
BYTES_PER_BATCH = 16 << 20  # what a writer holds in memory, and less than Arrow's 2 GiB
BYTES_PER_SHARD = 256 << 20

SplitName = Literal["train", "val", "test"]


@dataclass(frozen=True, kw_only=True)
class SplitInfo:
    """One split: its shards in order, and how many images of each class it has."""

    count: int
    class_counts: tuple[int, ...]
    shards: dict[str, Member]


@dataclass(frozen=True, kw_only=True)
class SkippedFile:
    path: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """What ``dataset.json`` says.

    Attributes:
        classes: class names; a label is an index into them.
        preprocess: how a file becomes an input; its mean and std are those of the training split.
        source: where the images came from: a folder or a list.
        content_hash: SHA-256 over the rows of all splits, in order: equal hashes, equal examples.
        skipped: files that could not be read, with the reason (the first 1,000).
        skipped_count: how many there were in all.
        duplicates: pairs of ``split:path`` with equal pixels in different splits (the first 1,000).
        duplicate_count: how many there were in all.
        notes: what a person should know: class imbalance, tiny classes.
        import_hash: SHA-256 over the import's settings and what it found: paths, sizes, times.
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
    notes: tuple[str, ...] = ()
    import_hash: str = ""

    @property
    def total_counts(self) -> list[int]:
        """Number of images of each class over all splits."""
        return [
            sum(s.class_counts[c] for s in self.splits.values()) for c in range(len(self.classes))
        ]


@dataclass(frozen=True, kw_only=True)
class Example:
    """One image of a split: its stored file bytes, the label, and the path it came from."""

    content: bytes
    label: int
    path: str


class Split:
    """A split, memory-mapped: ``len``, ``split[i]``, ``labels``; processes may share it.

    Raises:
        CorruptArtifact: a shard is missing, has another size or (if ``deep``) other bytes, or its
            labels are not those that ``info`` counts.
    """

    def __init__(self, folder: Path, name: str, info: SplitInfo, *, deep: bool) -> None:
        self.name, self.info, self._folder = name, info, folder
        for shard, expected in info.shards.items():
            check_member(folder / shard, expected, deep=deep)
        self.labels: npt.NDArray[np.int64]
        tables = [_read_shard(folder / shard) for shard in info.shards]
        table = pa.concat_tables(tables) if tables else SCHEMA.empty_table()
        image = table.column("image")
        self._content = [chunk.field("bytes") for chunk in image.chunks]
        self._paths = [chunk.field("path") for chunk in image.chunks]
        self._starts = np.cumsum([0, *(len(c) for c in self._content)])
        self.labels = table.column("label").to_numpy()
        _check_labels(self.labels, info, folder / name)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(index)
        chunk = int(np.searchsorted(self._starts, index, side="right")) - 1
        row = index - int(self._starts[chunk])
        return Example(
            content=self._content[chunk][row].as_py(),
            label=int(self.labels[index]),
            path=self._paths[chunk][row].as_py(),
        )

    def __iter__(self) -> Iterator[Example]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        classes = len(self.info.class_counts)
        return f"<Split {self.name!r} of {self._folder}: {len(self):,} images, {classes} classes>"

    def __getstate__(self) -> tuple[Path, str, SplitInfo]:
        return self._folder, self.name, self.info  # a worker process maps the shards itself

    def __setstate__(self, state: tuple[Path, str, SplitInfo]) -> None:
        self.__init__(*state, deep=False)  # type: ignore[misc]


class Dataset:
    """An imported dataset, read-only.

    Args:
        path: the dataset's folder.
        deep: check the hash of a split's shards when it is opened, and not only their sizes. It
            reads every byte once; leave it out to look at a few examples.
    """

    def __init__(self, path: str | Path, *, deep: bool = True) -> None:
        self.path = Path(path)
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
                fix="use one of these, or import again with a holdout for it",
            )
        if name not in self._splits:
            self._splits[name] = Split(self.path, name, self.info.splits[name], deep=self._deep)
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
        return f"<Dataset {self.info.name!r}: {len(self.classes)} classes, {counts}>"


# --- shards ---------------------------------------------------------------------------------------

SCHEMA = pa.schema(
    [
        ("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
        ("label", pa.int64()),
    ]
)


def _schema_for(classes: tuple[str, ...]) -> pa.Schema:
    """The Arrow schema with the metadata that Hugging Face ``datasets`` reads features from."""
    features = {
        "image": {"_type": "Image"},
        "label": {"_type": "ClassLabel", "names": list(classes)},
    }
    return SCHEMA.with_metadata({"huggingface": json.dumps({"info": {"features": features}})})


def _read_shard(path: Path) -> pa.Table:
    try:
        table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
        if not table.schema.equals(SCHEMA):
            raise pa.ArrowInvalid("other columns than image and label")
        table.validate(full=True)  # offsets inside their buffers: else reading could crash
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise CorruptArtifact(
            f"{path.name} is not a shard of a dataset",
            seen=f"{str(error)[:100]} in {path}",
            fix="restore it or import again",
        ) from error
    return table


def _check_labels(labels: npt.NDArray[np.int64], info: SplitInfo, where: Path) -> None:
    classes = len(info.class_counts)
    inside = len(labels) == 0 or (labels.min() >= 0 and labels.max() < classes)
    if not inside or np.bincount(labels, minlength=classes).tolist() != list(info.class_counts):
        raise CorruptArtifact(
            "the labels in the shards are not those that dataset.json counts",
            seen=where,
            fix="restore the dataset or import again",
        )


class SplitWriter:
    """Writes one split in shards; holds one record batch in memory."""

    def __init__(self, folder: Path, name: str, classes: tuple[str, ...]) -> None:
        self._folder, self._name, self._classes = folder, name, classes
        self._rows: list[Example] = []
        self._pending = 0
        self._counts = [0] * len(classes)
        self._shards: list[str] = []
        self._writer: pa.ipc.RecordBatchStreamWriter | None = None
        self._written = 0
        self.row_hashes = hashlib.sha256(name.encode())

    def add(self, example: Example) -> None:
        self._rows.append(example)
        self._counts[example.label] += 1
        row = hashlib.sha256(example.content).digest() + example.label.to_bytes(8, "little")
        self.row_hashes.update(row)
        self._pending += len(example.content)
        if len(self._rows) == ROWS_PER_BATCH or self._pending >= BYTES_PER_BATCH:
            self._write_rows()

    def close(self) -> SplitInfo:
        self._write_rows()
        self._close_shard()
        return SplitInfo(
            count=sum(self._counts),
            class_counts=tuple(self._counts),
            shards={name: member(self._folder / name) for name in self._shards},
        )

    def _write_rows(self) -> None:
        if not self._rows:
            return
        if self._writer is None:
            shard = f"{self._name}-{len(self._shards):05d}.arrow"
            self._shards.append(shard)
            self._writer = pa.ipc.new_stream(str(self._folder / shard), _schema_for(self._classes))
        images = [{"bytes": e.content, "path": e.path} for e in self._rows]
        batch = pa.record_batch(
            [pa.array(images, SCHEMA.field("image").type), pa.array([e.label for e in self._rows])],
            schema=_schema_for(self._classes),
        )
        self._writer.write_batch(batch)
        self._written += self._pending
        self._rows, self._pending = [], 0
        if self._written >= BYTES_PER_SHARD:
            self._close_shard()

    def _close_shard(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer, self._written = None, 0


def content_hash(splits: Mapping[str, str]) -> str:
    """The hash of a dataset's examples, from the hash of each split's rows."""
    rows = "\n".join(f"{name} {value}" for name, value in splits.items())
    return hashlib.sha256(rows.encode()).hexdigest()


def write_info(folder: Path, info: DatasetInfo) -> None:
    """Write ``dataset.json`` last: a folder without this file is no dataset."""
    if not info.classes:
        raise DataError("a dataset needs at least one class")
    (folder / "dataset.json").write_bytes(to_document("dataset", VERSION, info))
