"""Files to stored pictures, in parallel: decode, fit, encode, in the order of the listing.

Many files are read by confined processes, each of which makes whole pictures: threads of one
interpreter read 424 JPEGs a second on 16 cores. Few files are not worth starting those; threads
read them, and hand on what is not plain from its header. Either way a file that takes all memory
or never ends is one bad file, and a script needs no ``__main__`` guard.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import stat
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any

from tessella.artifacts.dataset import SkippedFile
from tessella.core.confined import Budget, Confined
from tessella.core.decoding import Decoder, why_it_ended
from tessella.core.errors import DataError
from tessella.core.headers import bits_of, sides_of
from tessella.core.pictures import MAX_PIXELS, Pixels
from tessella.core.preprocess import Preprocess, Store, encode
from tessella.core.record import canonical_json
from tessella.data.moments import sums_of
from tessella.tasks import Source

MAX_FILE_BYTES = 1 << 30
CHUNK_BYTES = 1 << 20  # of pixels: what a task reads, so that many small files cost few tasks
MAX_CHUNK = 32
FEW = 64  # files for each process: a start costs as much as reading 50 JPEGs of 500 × 375
# Scientific pictures are larger than what a server takes: 2²⁸ pixels of 16-bit RGB, some copies.
BUDGET = Budget(pixels=MAX_PIXELS, nbytes=8 << 30, seconds=120.0)
Decode = Callable[[bytes], Pixels]
Stored = Callable[[Any, str, Preprocess], Any]  # ``stored`` of a task's examples


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A file as the dataset stores it.

    Attributes:
        content: lossless file bytes in the record's size.
        sha256: of the content.
        label: the target as the dataset holds it; None until it is known.
        digest: 16 bytes of a hash of the pixels.
        count, sums, squares: see ``moments.sums_of``.
        bits: of a sample in the file, as far as its header tells.
        enlarged: by what factor, at most of both sides; 1 where the header does not tell.
    """

    content: bytes
    sha256: bytes
    digest: bytes
    count: int
    sums: list[int]
    squares: list[int]
    bits: int = 8
    enlarged: float = 1.0
    label: Any = None


Read = Picture | SkippedFile


def read_all(
    sources: Sequence[Source],
    record: Preprocess,
    *,
    stored: Stored,
    workers: int,
    budget: Budget = BUDGET,
    store: Store = "png",
) -> Iterator[Read]:
    """Each source's picture, or why there is none, in order; holds a few pictures a worker.

    Args:
        store: how ``encode`` stores them.
    """
    nbytes = record.height * record.width * record.channels * record.depth // 8
    size = min(MAX_CHUNK, max(1, CHUNK_BYTES // nbytes))
    starts = iter(range(0, len(sources), size))
    pending: deque[Future[list[Read]]] = deque()
    readers: _Processes | _Threads
    if len(sources) > FEW:
        workers, readers = min(workers, -(-len(sources) // FEW)), _Processes(record, budget, store)
    else:
        readers = _Threads(record, budget, store, workers)
    with (
        contextlib.closing(readers),
        ThreadPoolExecutor(workers, thread_name_prefix="import") as pool,
    ):

        def read_chunk(chunk: Sequence[Source]) -> list[Read]:
            made = zip(chunk, readers.read(chunk), strict=True)
            return [_labelled(source, one, record, stored) for source, one in made]

        def submit(count: int) -> None:
            for start in itertools.islice(starts, count):
                pending.append(pool.submit(read_chunk, sources[start : start + size]))

        try:
            submit(2 * workers)
            while pending:
                yield from pending.popleft().result()
                submit(1)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _labelled(source: Source, made: Read, record: Preprocess, stored: Stored) -> Read:
    """The picture with its target as the dataset holds it."""
    if isinstance(made, SkippedFile):
        return made
    try:
        return replace(made, label=stored(source.label, source.file, record))
    except DataError as error:
        return _skipped(source.path, error)


class _Threads:
    """Files read in the calling thread, but for the decoding of what is not plain."""

    def __init__(self, record: Preprocess, budget: Budget, store: Store, processes: int) -> None:
        self._decoder = Decoder(budget, processes=processes)
        self._record, self._store = record, store

    def read(self, sources: Sequence[Source]) -> list[Read]:
        def decode(content: bytes) -> Pixels:
            return self._decoder(content, self._record, name="the file")

        return [read(source.file, source.path, decode, self._store) for source in sources]

    def close(self) -> None:
        self._decoder.close()


class _Processes:
    """Files read by confined processes, one for each thread that asks."""

    def __init__(self, record: Preprocess, budget: Budget, store: Store) -> None:
        self._store = store
        self._record, self._budget = canonical_json(record), budget
        self._idle: SimpleQueue[Confined] = SimpleQueue()

    def read(self, sources: Sequence[Source]) -> list[Read]:
        """A few files at once, so that the process finds the next order when it is done."""
        made: list[Read] = []
        while len(made) < len(sources):
            process = self._take()
            try:
                left = sources[len(made) :]
                with contextlib.suppress(OSError):  # it has ended: its last answers are still there
                    for source in left:
                        order = {"file": source.file, "path": source.path}
                        process.send({**order, "record": self._record, "store": self._store})
                made.extend(_received(process) for _ in left)
            except (EOFError, OSError):  # it ended over the first file without an answer
                process.connection.close()
                source = sources[len(made)]
                nbytes = os.path.getsize(source.file) if os.path.exists(source.file) else 0
                why = why_it_ended(process, self._budget, "the file", nbytes)
                made.append(_skipped(source.path, why))
            else:
                self._idle.put(process)
        return made

    def _take(self) -> Confined:
        with contextlib.suppress(Empty):
            while True:
                process = self._idle.get_nowait()
                if process.is_alive:
                    return process
        return Confined("tessella.data.reading_process", self._budget)

    def close(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                self._idle.get_nowait().end()


def _received(process: Confined) -> Read:
    reply = process.reply()
    if "reason" in reply:
        return SkippedFile(path=str(reply["path"]), reason=str(reply["reason"]))
    return Picture(
        content=process.connection.recv_bytes(),
        sha256=bytes.fromhex(reply["sha256"]),
        digest=bytes.fromhex(reply["digest"]),
        count=int(reply["count"]),
        sums=list(map(int, reply["sums"])),
        squares=list(map(int, reply["squares"])),
        bits=int(reply["bits"]),
        enlarged=float(reply["enlarged"]),
    )


def read(file: str | os.PathLike[str], path: str, decode: Decode, store: Store) -> Read:
    """One file decoded, fitted and encoded, or a ``SkippedFile`` with the reason."""
    try:
        found = os.stat(file)
        if not stat.S_ISREG(found.st_mode):  # before it is opened: a pipe would wait, a device
            raise DataError("it is no plain file")  # would never end
        if found.st_size > MAX_FILE_BYTES:
            raise DataError("the file is too large", seen=f"{found.st_size:,} bytes")
        with open(file, "rb") as opened:
            content = opened.read(found.st_size)  # 0 of a file of the system, which could wait, too
        pixels = decode(content)
    except DataError as error:
        return _skipped(path, error)
    except (OSError, ValueError) as error:  # ValueError: a NUL in a listed path
        reason = getattr(error, "strerror", None) or str(error)
        return SkippedFile(path=path, reason=f"the file cannot be opened: {reason}")
    shape = f"{pixels.dtype}{pixels.shape}".encode()
    digest = hashlib.blake2b(pixels.tobytes(), digest_size=16, key=shape).digest()
    count, sums, squares = sums_of(pixels)
    stored = encode(pixels, store)
    return Picture(
        content=stored,
        sha256=hashlib.sha256(stored).digest(),
        digest=digest,
        count=count,
        sums=sums,
        squares=squares,
        bits=bits_of(content),
        enlarged=_enlarged(content, pixels),
    )


def _enlarged(content: bytes, pixels: Pixels) -> float:
    sides = sides_of(content)
    if sides is None or min(sides) < 1:
        return 1.0
    # either may be the height: EXIF may turn a picture
    stored: tuple[int, int] = pixels.shape[:2]
    return min(max(stored) / max(sides), min(stored) / min(sides))


def _skipped(path: str, error: DataError) -> SkippedFile:
    seen = "" if error.seen is None else f" ({error.seen})"
    return SkippedFile(path=path, reason=f"{error.wrong}{seen}")
