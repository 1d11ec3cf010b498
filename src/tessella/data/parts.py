"""Many files to shards: confined processes read parts of the listing and write record batches.

A part is a few dozen files; which ones decides the listing alone, so a dataset is the same for any
number of processes. A process writes a part's images itself: this one only joins the files, within
the file system, and keeps the account. Threads of one interpreter read 424 JPEGs a second on 16
cores. Of processes that sent their pictures here each of 256 × 256 cost this one 0.7 to 0.9 ms.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import pyarrow as pa

from tessella.artifacts.dataset import SkippedFile
from tessella.artifacts.shards import target_array
from tessella.core.confined import Budget, Confined, Order
from tessella.core.decoding import why_it_ended
from tessella.core.errors import DataError
from tessella.core.preprocess import Preprocess, Store
from tessella.core.record import canonical_json
from tessella.data import reading
from tessella.data.in_order import in_order
from tessella.data.reading import Facts, Stored, facts_in, skipped
from tessella.tasks import Source

PART_BYTES = 16 << 20  # of pixels: what a process holds before it writes
MOST_FILES = 128  # of a part: their orders and answers wait in a socket's buffer
PARTS = 64  # of a listing at least, that all processes end together
LEAST_FILES = 8  # of a part


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some files of the listing, one after another, as they were read.

    Attributes:
        number: of the part, from 0.
        outcomes: of each file what was found, or why it is left out.
        labels: the targets as the dataset holds them; None of a file that is left out.
        files: by split, the file with the record batch of its images.
    """

    number: int
    outcomes: list[Facts | SkippedFile]
    labels: list[Any]
    files: dict[int, Path]


def part_size(sources: int, record: Preprocess) -> int:
    """How many files a part has."""
    nbytes = record.height * record.width * record.channels * record.depth // 8
    most = min(MOST_FILES, max(1, PART_BYTES // nbytes))
    return max(1, min(most, max(LEAST_FILES, sources // PARTS)))


def write_parts(
    sources: Sequence[Source],
    splits: Sequence[int],
    record: Preprocess,
    *,
    stored: Stored,
    column: pa.DataType,
    folder: Path,
    workers: int,
    store: Store,
    done: int = 0,
) -> Iterator[Part]:
    """Read all files, in parallel; parts come in order, from number ``done`` on.

    Args:
        splits: of each source.
        stored: of the task's examples.
        column: the type of the targets.
        folder: takes the parts' files; who gets a part removes them.

    Raises:
        OSError: a part cannot be written.
    """
    size = part_size(len(sources), record)
    starts = list(enumerate(range(0, len(sources), size)))[done:]
    workers = min(workers, -(-len(sources) // reading.FEW))
    readers = _Readers(record, store, column, folder)

    def make(start: tuple[int, int]) -> Part:
        number, first = start
        chosen = sources[first : first + size]
        labels: list[Any] = []
        for source in chosen:
            try:
                labels.append(stored(source.label, source.file, record))
            except DataError as error:
                labels.append(skipped(source.path, error))
        return readers.read(number, chosen, list(splits[first : first + size]), labels)

    with closing(readers), closing(in_order(make, starts, workers=workers, ahead=2)) as parts:
        yield from parts


class _Readers:
    """Confined processes, one for each thread that asks."""

    def __init__(self, record: Preprocess, store: Store, column: pa.DataType, folder: Path) -> None:
        self._record, self._store, self._folder = canonical_json(record), store, folder
        self._schema = pa.schema([("label", column)])
        self._budget: Budget = reading.BUDGET
        self._idle: SimpleQueue[Confined] = SimpleQueue()

    def read(
        self, number: int, sources: Sequence[Source], splits: list[int], labels: list[Any]
    ) -> Part:
        """Have a part written. A file over which the process ends is left out the next time."""
        outcomes: list[Facts | SkippedFile | None] = [
            label if isinstance(label, SkippedFile) else None for label in labels
        ]
        files = {split: self._folder / f"part-{number:06d}.{split}" for split in set(splits)}
        while True:
            process = self._take()
            found, reply = self._ask(process, sources, splits, labels, outcomes, files)
            if reply is not None:
                self._idle.put(process)
                break
            process.connection.close()
            where = next((i for i, o in enumerate(found) if o is None), None)
            if where is None:  # over no file, but in writing
                raise OSError(f"a process of the import ended (exit code {process.exit_code()})")
            file = sources[where].file
            nbytes = os.path.getsize(file) if os.path.exists(file) else 0
            why = why_it_ended(process, self._budget, "the file", nbytes)
            outcomes[where] = skipped(sources[where].path, why)
        if "errno" in reply:
            raise OSError(reply["errno"], reply["failed"], str(self._folder))
        made = [o for o in found if o is not None]
        return Part(
            number=number,
            outcomes=made,
            labels=[None if isinstance(o, SkippedFile) else v for o, v in zip(made, labels)],
            files={split: files[split] for split in map(int, reply["written"])},
        )

    def _ask(
        self,
        process: Confined,
        sources: Sequence[Source],
        splits: list[int],
        labels: list[Any],
        outcomes: list[Facts | SkippedFile | None],
        files: dict[int, Path],
    ) -> tuple[list[Facts | SkippedFile | None], Order | None]:
        """Outcomes so far, and the answer to the last order; None: the process has ended."""
        found = list(outcomes)
        asked = [i for i, outcome in enumerate(outcomes) if outcome is None]
        with contextlib.suppress(OSError):  # it has ended: its last answers are still there
            for i in asked:
                file: Order = {"file": sources[i].file, "path": sources[i].path}
                process.send({**file, "record": self._record, "store": self._store})
            write: Order = {
                "splits": [splits[i] for i in asked],
                "files": {split: str(path) for split, path in files.items()},
            }
            process.send(write, self._targets([labels[i] for i in asked]))
        try:
            for i in asked:
                reply = process.reply()
                if "reason" in reply:
                    reason = str(reply["reason"])
                    found[i] = SkippedFile(path=sources[i].path, reason=reason)
                else:
                    found[i] = facts_in(reply)
            return found, process.reply()
        except (EOFError, OSError):
            return found, None

    def _targets(self, labels: list[Any]) -> bytes:
        """Targets as a stream of Arrow."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self._schema) as stream:
            values = target_array(labels, self._schema.field(0).type)
            stream.write_batch(pa.record_batch([values], schema=self._schema))
        content: bytes = sink.getvalue().to_pybytes()
        return content

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
