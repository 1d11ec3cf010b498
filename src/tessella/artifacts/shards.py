"""A split's shards: memory-mapped Arrow files, which HF ``datasets`` open too.

A row is an image, as lossless file bytes that are already brought to the record's size (the ``fit``
stage), with its target.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tessella.artifacts.files import Member
from tessella.core.errors import CorruptArtifact

ROWS_PER_BATCH = 256
BYTES_PER_BATCH = 16 << 20  # what a writer holds in memory, and less than Arrow's 2 GiB
BYTES_PER_SHARD = 256 << 20
HASH_BYTES = 32  # of a SHA-256
IMAGE = pa.field("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
SCHEMA = pa.schema([IMAGE, ("label", pa.int64())])  # of a classification
DEEPEST = 4  # lists and records in each other, in the column of a task


@dataclass(frozen=True, kw_only=True)
class SplitInfo:
    """A split of a dataset: its shards in order, and the number of images in which each class
    occurs.
    """

    count: int
    class_counts: tuple[int, ...]
    shards: dict[str, Member]


@dataclass(frozen=True, kw_only=True)
class Example:
    """One image of a split: its stored file bytes, the label, and the path it came from.

    Attributes:
        label: the number of the class, or what the dataset's task has in its place.
    """

    content: bytes
    label: Any
    path: str


@dataclass(frozen=True, kw_only=True)
class Column:
    """The column ``label`` as a task has it.

    Attributes:
        type: its Arrow type.
        feature: the same for Hugging Face ``datasets``.
        classes: how many classes there are.
        occurs: the classes that a target counts for.
    """

    type: pa.DataType
    feature: dict[str, Any]
    classes: int
    occurs: Callable[[Any], Iterable[int]]


class Rows:
    """The account of a split's rows: how many, of which classes, and the hash of them all."""

    def __init__(self, name: str, column: Column) -> None:
        self._occurs, self._counts = column.occurs, [0] * column.classes
        self._count = 0
        self.hash = hashlib.sha256(name.encode())

    def add(self, hashes: bytes, labels: Sequence[Any]) -> None:
        """Add rows by the SHA-256 of each content, one behind the other, and their targets."""
        self._count += len(labels)
        for label in labels:
            for number in self._occurs(label):
                self._counts[number] += 1
        of_content = (hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES))
        rows = zip(of_content, map(_bytes, labels), strict=True)
        self.hash.update(b"".join(itertools.chain.from_iterable(rows)))

    def info(self, shards: dict[str, Member]) -> SplitInfo:
        return SplitInfo(count=self._count, class_counts=tuple(self._counts), shards=shards)


class SplitWriter:
    """Writes one split in shards, in a thread; holds two record batches in memory."""

    def __init__(self, folder: Path, name: str, column: Column) -> None:
        self._folder, self._name, self._schema = folder, name, schema_of(column)
        self._pending: list[Example] = []
        self._nbytes = 0
        self._shard: ShardWriter | None = None  # the one that grows
        self._shards: dict[str, Member] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shards")
        self._being_written: Future[None] | None = None
        self._rows = Rows(name, column)
        self.row_hashes = self._rows.hash

    def add(self, example: Example, sha256: bytes | None = None) -> None:
        """Add an image; ``sha256`` is that of its content, where it is known already."""
        self._pending.append(example)
        self._rows.add(sha256 or hashlib.sha256(example.content).digest(), [example.label])
        self._nbytes += len(example.content)
        if len(self._pending) == ROWS_PER_BATCH or self._nbytes >= BYTES_PER_BATCH:
            self._hand_over()

    def close(self) -> SplitInfo:
        self._hand_over()
        self._wait()
        self._thread.shutdown()
        self._close_shard()
        return self._rows.info(self._shards)

    def abandon(self) -> None:
        """Let go of the files: the split will not be complete."""
        self._thread.shutdown(cancel_futures=True)
        if self._shard is not None:
            self._shard.abandon()

    def _hand_over(self) -> None:
        """Have the rows written as one record batch, while the next are collected."""
        rows, self._pending, self._nbytes = self._pending, [], 0
        if rows:
            self._wait()  # a full disk is told where images are added
            self._being_written = self._thread.submit(self._write, rows)

    def _wait(self) -> None:
        if self._being_written is not None:
            self._being_written.result()

    def _write(self, rows: list[Example]) -> None:
        if self._shard is None:
            name = shard_name(self._name, len(self._shards))
            self._shard = ShardWriter(self._folder / name, self._schema)
        self._shard.write(rows)
        if self._shard.nbytes >= BYTES_PER_SHARD:
            self._close_shard()

    def _close_shard(self) -> None:
        if self._shard is not None:
            self._shards[self._shard.path.name] = self._shard.close()
        self._shard = None


class ShardWriter:
    """Writes one shard; its bytes are hashed on their way, so that nobody reads them again.

    Attributes:
        nbytes: of the images so far.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path, self.nbytes, self._schema = path, 0, schema
        self._file = path.open("wb", buffering=0)
        self._sink = _Hashed(self._file)
        self._stream = pa.ipc.new_stream(self._sink, schema)

    def write(self, rows: Sequence[Example]) -> None:
        """Add a record batch."""
        labels = target_array([row.label for row in rows], self._schema.field("label").type)
        columns = [
            _joined([row.content for row in rows], pa.binary()),
            _joined([row.path.encode() for row in rows], pa.string()),
        ]
        image = pa.StructArray.from_arrays(columns, fields=list(IMAGE.type))
        self._stream.write_batch(pa.record_batch([image, labels], self._schema))
        self.nbytes += sum(len(row.content) for row in rows)

    def close(self) -> Member:
        self._stream.close()
        self._file.close()
        return Member(sha256=self._sink.hash.hexdigest(), nbytes=self._sink.nbytes)

    def abandon(self) -> None:
        """Let go of the file: it will not be complete."""
        self._file.close()


class _Hashed:
    """A file for a stream of Arrow, which hands over its buffers without a copy."""

    def __init__(self, file: FileIO) -> None:
        self._file, self.hash, self.nbytes = file, hashlib.sha256(), 0

    @property
    def closed(self) -> bool:
        return self._file.closed

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        self.hash.update(view)
        self.nbytes += len(view)
        left = view
        while len(left):
            left = left[self._file.write(left) :]
        return len(view)

    def flush(self) -> None:
        """Nothing is held back."""


def shard_name(split: str, number: int) -> str:
    return f"{split}-{number:05d}.arrow"


def schema_of(column: Column) -> pa.Schema:
    """The columns of a shard, with what Hugging Face ``datasets`` wants to know of them."""
    features = {"image": {"_type": "Image"}, "label": column.feature}
    facts = {"huggingface": json.dumps({"info": {"features": features}})}
    return pa.schema([IMAGE, ("label", column.type)], facts)


def target_array(labels: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Targets as an array of Arrow."""
    if kind == pa.int64():  # without pandas, which pa.array imports: 0.3 s in every process
        numbers = np.array(labels, np.int64)
        return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(numbers)])
    return pa.array(labels, kind)


def _joined(values: Sequence[bytes], kind: pa.DataType) -> pa.Array:
    """Bytes or texts as an array of Arrow."""
    ends = np.cumsum([0, *map(len, values)], dtype=np.int32)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(values))]
    return pa.Array.from_buffers(kind, len(values), buffers)


def _bytes(label: Any) -> bytes:
    """A target's bytes in the hash of the rows."""
    if isinstance(label, int):
        return label.to_bytes(8, "little")
    same = list(label) if isinstance(label, tuple) else label  # as it is read from a shard again
    return hashlib.sha256(repr(same).encode()).digest()


# --- read again ----------------------------------------------------------------------------------


def read_shard(path: Path) -> tuple[pa.Table, pa.Buffer]:
    try:
        mapped = pa.memory_map(str(path)).read_buffer()
        table = pa.ipc.open_stream(mapped).read_all()
        fits = table.schema.names == SCHEMA.names and table.schema.field(0).equals(IMAGE)
        if not fits or not _plain(table.schema.field(1).type):
            raise pa.ArrowInvalid("other columns than image and label")
        table.validate(full=True)  # offsets inside their buffers: else reading could crash
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise CorruptArtifact(
            f"{path.name} is not a shard of a dataset",
            seen=f"{str(error)[:100]} in {path}",
            fix="restore it or import again",
        ) from error
    return table, mapped


def _plain(kind: pa.DataType, depth: int = 0) -> bool:
    """Whether a type is made of numbers, texts, bytes, lists and records."""
    if pa.types.is_list(kind):
        return depth < DEEPEST and _plain(kind.value_type, depth + 1)
    if pa.types.is_struct(kind):
        fields = [kind.field(i).type for i in range(kind.num_fields)]
        return depth < DEEPEST and all(_plain(f, depth + 1) for f in fields)
    return kind in (pa.int64(), pa.float64(), pa.bool_(), pa.string(), pa.binary())


def offsets_in(content: pa.Array, mapped: pa.Buffer) -> npt.NDArray[np.int64] | None:
    """Where each image of a chunk begins in the shard, and the last ends; None if it is compressed
    there.
    """
    _, starts, data = content.buffers()
    first = 0 if data is None else data.address - mapped.address
    if not 0 <= first <= mapped.size - (0 if data is None else data.size):
        return None
    in_chunk = np.frombuffer(starts, np.int32)[content.offset : content.offset + len(content) + 1]
    return in_chunk.astype(np.int64) + first


class ShardFile:
    """A shard open to be read, closed when nothing refers to it."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self.descriptor)
