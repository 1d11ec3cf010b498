"""Files to stored pictures, in parallel: decode, fit, encode, in the order of the listing.

Threads are enough: Pillow and OpenCV release the interpreter lock while they work. Files whose cost
is not plain from their header go through processes with a budget, so that a file that takes all
memory or never ends is one bad file. A script needs no ``__main__`` guard for either.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import stat
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from tessella.artifacts.dataset import SkippedFile
from tessella.core.decoding import Budget, Decoder
from tessella.core.errors import DataError
from tessella.core.pictures import MAX_PIXELS
from tessella.core.preprocess import Preprocess, encode
from tessella.data.moments import sums_of
from tessella.data.sources import Source

MAX_FILE_BYTES = 1 << 30
CHUNK_BYTES = 1 << 20  # of pixels: what a task reads, so that many small files cost few tasks
MAX_CHUNK = 32
# Scientific pictures are larger than what a server takes: 2²⁸ pixels of 16-bit RGB, some copies.
BUDGET = Budget(pixels=MAX_PIXELS, nbytes=8 << 30, seconds=120.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A file as the dataset stores it.

    Attributes:
        content: lossless file bytes in the record's size.
        digest: 16 bytes of a hash of the pixels.
        count, sums, squares: see ``moments.sums_of``.
    """

    content: bytes
    digest: bytes
    count: int
    sums: list[int]
    squares: list[int]


def read_all(
    sources: Sequence[Source], record: Preprocess, *, workers: int, budget: Budget = BUDGET
) -> Iterator[Picture | SkippedFile]:
    """Each source's picture, or why there is none, in order; holds a few pictures a worker."""
    nbytes = record.height * record.width * record.channels * record.depth // 8
    size = min(MAX_CHUNK, max(1, CHUNK_BYTES // nbytes))
    starts = iter(range(0, len(sources), size))
    pending: deque[Future[list[Picture | SkippedFile]]] = deque()
    decoder = Decoder(budget, processes=workers)
    with (
        contextlib.closing(decoder),
        ThreadPoolExecutor(workers, thread_name_prefix="import") as pool,
    ):

        def submit(count: int) -> None:
            for start in itertools.islice(starts, count):
                chunk = sources[start : start + size]
                pending.append(pool.submit(_read_chunk, chunk, record, decoder))

        try:
            submit(2 * workers)
            while pending:
                yield from pending.popleft().result()
                submit(1)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _read_chunk(
    sources: Sequence[Source], record: Preprocess, decoder: Decoder
) -> list[Picture | SkippedFile]:
    return [read(source, record, decoder) for source in sources]


def read(source: Source, record: Preprocess, decoder: Decoder) -> Picture | SkippedFile:
    """One file decoded, fitted and encoded, or a ``SkippedFile`` with the reason."""
    try:
        found = os.stat(source.file)
        if not stat.S_ISREG(found.st_mode):  # before it is opened: a pipe would wait, a device
            raise DataError("it is no plain file")  # would never end
        if found.st_size > MAX_FILE_BYTES:
            raise DataError("the file is too large", seen=f"{found.st_size:,} bytes")
        with open(source.file, "rb") as file:
            content = file.read(found.st_size)  # 0 of a file of the system, which could wait, too
        pixels = decoder(content, record, name="the file")
    except DataError as error:
        seen = "" if error.seen is None else f" ({error.seen})"
        return SkippedFile(path=source.path, reason=f"{error.wrong}{seen}")
    except (OSError, ValueError) as error:  # ValueError: a NUL in a listed path
        reason = getattr(error, "strerror", None) or str(error)
        return SkippedFile(path=source.path, reason=f"the file cannot be opened: {reason}")
    shape = f"{pixels.dtype}{pixels.shape}".encode()
    digest = hashlib.blake2b(pixels.tobytes(), digest_size=16, key=shape).digest()
    count, sums, squares = sums_of(pixels)
    return Picture(content=encode(pixels), digest=digest, count=count, sums=sums, squares=squares)
