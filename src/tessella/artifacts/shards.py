"""A split's shards: memory-mapped Arrow files, which HF ``datasets`` open too.

A row is an image, as lossless file bytes that are already brought to the record's size (the ``fit``
stage), with its target.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tessella.artifacts.files import Member, member
from tessella.core.errors import CorruptArtifact

ROWS_PER_BATCH = 256
BYTES_PER_BATCH = 16 << 20  # what a writer holds in memory, and less than Arrow's 2 GiB
BYTES_PER_SHARD = 256 << 20  # shards are hashed side by side while the next ones are written
HASHING, COPIED = 4, 16 << 20  # threads, and bytes at once
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"  # of Arrow's
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


class SplitWriter:
    """Writes one split in shards, in a thread; holds two record batches in memory."""

    def __init__(self, folder: Path, name: str, column: Column) -> None:
        self._folder, self._name, self._column = folder, name, column
        features = {"image": {"_type": "Image"}, "label": column.feature}
        facts = {"huggingface": json.dumps({"info": {"features": features}})}
        self._schema = pa.schema([IMAGE, ("label", column.type)], facts)
        self._rows: list[Example] = []
        self._count = 0
        self._pending = 0
        self._counts = [0] * column.classes
        self._shards: list[str] = []
        self._file: int | None = None  # of the shard that grows
        self._written = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shards")
        self._being_written: Future[None] | None = None
        self._hashing = ThreadPoolExecutor(HASHING, thread_name_prefix="hashes")
        self._hashed: dict[str, Future[Member]] = {}
        self.row_hashes = hashlib.sha256(name.encode())

    def add(self, example: Example, sha256: bytes | None = None) -> None:
        """Add an image; ``sha256`` is that of its content, where it is known already."""
        self._rows.append(example)
        self._note(sha256 or hashlib.sha256(example.content).digest(), example.label)
        self._pending += len(example.content)
        if len(self._rows) == ROWS_PER_BATCH or self._pending >= BYTES_PER_BATCH:
            self._hand_over()

    def append(self, part: Path, rows: Iterable[tuple[bytes, Any]]) -> None:
        """Add the images of a record batch that another process wrote (``write_batch``).

        Args:
            rows: SHA-256 of the content and target of each image.
        """
        self._hand_over()
        self._wait()
        for sha256, label in rows:
            self._note(sha256, label)
        head = self._schema.remove_metadata().serialize().to_pybytes()
        self._grow(lambda file: _copy(part, file, head=head), part.stat().st_size)

    def place(self) -> tuple[int, int]:
        """How many shards there are, and how far the last one is written; 0: it is complete."""
        file = self._file
        return len(self._shards), 0 if file is None else os.lseek(file, 0, os.SEEK_CUR)

    def go_on(self, shards: int, offset: int, rows: Iterable[tuple[bytes, Any]]) -> None:
        """Go on behind a ``place`` that an earlier writer had come to, with these images."""
        for sha256, label in rows:
            self._note(sha256, label)
        self._shards = [self._shard_name(number) for number in range(shards)]
        for name in self._shards[: shards - (offset > 0)]:
            self._hash(name)
        if offset:
            self._file = os.open(self._folder / self._shards[-1], os.O_RDWR | os.O_CLOEXEC)
            os.ftruncate(self._file, offset)
            os.lseek(self._file, 0, os.SEEK_END)
            self._written = offset

    def close(self) -> SplitInfo:
        self._hand_over()
        self._wait()
        self._thread.shutdown()
        self._close_shard()
        members = {name: self._hashed[name].result() for name in self._shards}
        self._hashing.shutdown()
        return SplitInfo(count=self._count, class_counts=tuple(self._counts), shards=members)

    def abandon(self) -> None:
        """Let go of the files: the split will not be complete."""
        self._thread.shutdown(cancel_futures=True)
        self._hashing.shutdown(cancel_futures=True)
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _note(self, sha256: bytes, label: Any) -> None:
        self._count += 1
        for number in self._column.occurs(label):
            self._counts[number] += 1
        self.row_hashes.update(sha256 + _bytes(label))

    def _hand_over(self) -> None:
        """Have the rows written as one record batch, while the next are collected."""
        rows, nbytes = self._rows, self._pending
        self._rows, self._pending = [], 0
        if not rows:
            return
        labels = target_array([e.label for e in rows], self._column.type)
        batch = record_batch([e.content for e in rows], [e.path for e in rows], labels)
        self._wait()  # a full disk is told where images are added
        self._being_written = self._thread.submit(self._write, batch, nbytes)

    def _wait(self) -> None:
        if self._being_written is not None:
            self._being_written.result()

    def _write(self, batch: pa.RecordBatch, nbytes: int) -> None:
        self._grow(lambda file: _put(file, batch.serialize()), nbytes)

    def _grow(self, write: Callable[[int], None], nbytes: int) -> None:
        """Have a record batch written into the shard that grows, or into a new one."""
        if self._file is None:
            self._shards.append(self._shard_name(len(self._shards)))
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            self._file = os.open(self._folder / self._shards[-1], flags, 0o666)
            _put(self._file, self._schema.serialize())
        write(self._file)
        self._written += nbytes
        if self._written >= BYTES_PER_SHARD:
            self._close_shard()

    def _close_shard(self) -> None:
        if self._file is not None:
            _put(self._file, END_OF_STREAM)
            os.close(self._file)
            self._hash(self._shards[-1])
        self._file, self._written = None, 0

    def _hash(self, name: str) -> None:
        self._hashed[name] = self._hashing.submit(member, self._folder / name)

    def _shard_name(self, number: int) -> str:
        return f"{self._name}-{number:05d}.arrow"


def target_array(labels: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Targets as an array of Arrow."""
    if kind == pa.int64():  # without pandas, which pa.array imports: 0.3 s in every process
        numbers = np.array(labels, np.int64)
        return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(numbers)])
    return pa.array(labels, kind)


def record_batch(
    contents: Sequence[bytes], paths: Sequence[str], labels: pa.Array
) -> pa.RecordBatch:
    """Images with their targets, as a shard holds them."""
    columns = [
        _joined(contents, pa.binary()),
        _joined([path.encode() for path in paths], pa.string()),
    ]
    image = pa.StructArray.from_arrays(columns, fields=list(IMAGE.type))
    return pa.record_batch([image, labels], pa.schema([IMAGE, ("label", labels.type)]))


def _joined(values: Sequence[bytes], kind: pa.DataType) -> pa.Array:
    """Bytes or texts as an array of Arrow."""
    ends = np.cumsum([0, *map(len, values)], dtype=np.int32)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(values))]
    return pa.Array.from_buffers(kind, len(values), buffers)


def write_batch(path: Path, batch: pa.RecordBatch) -> None:
    """A record batch as a stream of its own: ``SplitWriter.append`` joins it to a shard."""
    # without a copy of the batch: 0.08 ms for 197 kB, where serialize() and a write take 0.22
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)


def _put(file: int, content: Any) -> None:
    view = memoryview(content).cast("B")
    while len(view):
        view = view[os.write(file, view) :]


def _copy(part: Path, file: int, *, head: bytes) -> None:
    """Append what a stream holds between its schema, which is ``head``, and its end.

    Where the file system can, the bytes do not pass through here.

    Raises:
        OSError: the stream is cut, or of another schema.
    """
    source = os.open(part, os.O_RDONLY | os.O_CLOEXEC)
    try:
        left = os.fstat(source).st_size - len(head) - len(END_OF_STREAM)
        if os.read(source, len(head)) != head or left < 0:
            raise OSError(errno.EIO, "this is no part of the shard", str(part))
        with contextlib.suppress(OSError):  # a file system that cannot
            while left and (done := os.copy_file_range(source, file, left)):
                left -= done
        while left and (content := os.read(source, min(left, COPIED))):  # the rest
            _put(file, content)
            left -= len(content)
    finally:
        os.close(source)


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
