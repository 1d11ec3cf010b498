"""Many files to shards: confined processes read parts of the listing and write a shard of each.

Which files a part has decides the listing alone, so a dataset is the same for any number of
processes. A process does all that each picture costs; this one gives out lists of files, and takes
a few facts of each part. Threads of one interpreter read 424 JPEGs a second on 16 cores; joining
the record batches of processes into shards cost this one 0.42 to 0.6 ms a picture, so that no
number of cores came beyond 1,700.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tessella.artifacts.shards import BYTES_PER_SHARD, Column, schema_of, target_array
from tessella.core.confined import Budget, Confined, Order
from tessella.core.decoding import why_it_ended
from tessella.core.errors import DataError
from tessella.core.preprocess import Preprocess, Storing
from tessella.core.record import canonical_json
from tessella.data import reading
from tessella.data.in_order import in_order
from tessella.data.part import Part, part_in, place_in
from tessella.data.reading import Stored, skipped
from tessella.tasks import Source

PARTS = 128  # of a listing at least, that all processes end together
LEAST_FILES = 8  # of a part
MEASURED = (
    1024  # pictures whose mean and deviation stand for all, where files are stored as they are
)
MOST_FILES = 2048  # of a part: their reasons fit into one answer


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A part to be made: some files of one split, one after another.

    Attributes:
        number: of the part in its split, from 0.
        files: their numbers in the listing.
    """

    split: int
    number: int
    files: list[int]


def planned(splits: npt.NDArray[np.int8], record: Preprocess) -> list[Plan]:
    """The parts of an import, whose files belong to these splits."""
    nbytes = record.height * record.width * record.channels * record.depth // 8
    most = min(MOST_FILES, max(1, BYTES_PER_SHARD // nbytes))
    size = max(1, min(most, max(LEAST_FILES, len(splits) // PARTS)))
    plans = []
    for split in np.unique(splits).tolist():
        files = np.flatnonzero(splits == split).tolist()
        plans += [
            Plan(split=split, number=number, files=files[first : first + size])
            for number, first in enumerate(range(0, len(files), size))
        ]
    return plans


def write_parts(
    sources: Sequence[Source],
    plans: Sequence[Plan],
    record: Preprocess,
    *,
    stored: Stored,
    column: Column,
    folder: Path,
    workers: int,
    store: Storing,
) -> Generator[tuple[Part, list[Any], Path], None, None]:
    """Make parts, in parallel; they come in order, each with its targets and the shard's file.

    Args:
        stored: of the task's examples.
        folder: takes the files; who gets one gives it its name.

    Raises:
        OSError: a part cannot be written.
    """
    workers = min(workers, -(-sum(len(plan.files) for plan in plans) // reading.FEW)) or 1
    makers = _Makers(record, store, column, folder)
    kept = store in ("original", "decoders")
    every = max(1, len(sources) // MEASURED) if kept else 1

    def make(plan: Plan) -> tuple[Part, list[Any], Path]:
        chosen = [sources[number] for number in plan.files]
        labels, reasons = targets(chosen, stored, record)
        file = folder / f"part-{os.getpid()}-{plan.split}-{plan.number}"
        part = makers.make(file, chosen, labels, reasons, every)
        return part, [v for i, v in enumerate(labels) if i not in part.skipped], file

    with closing(makers), closing(in_order(make, plans, workers=workers, ahead=2)) as parts:
        yield from parts


def targets(
    sources: Sequence[Source], stored: Stored, record: Preprocess
) -> tuple[list[Any], dict[int, str]]:
    """The targets as the dataset holds them, and by place why a file has none."""
    labels: list[Any] = []
    reasons: dict[int, str] = {}
    for place, source in enumerate(sources):
        try:
            labels.append(stored(source.label, source.file, record))
        except DataError as error:
            labels.append(None)
            reasons[place] = skipped(source.path, error).reason
    return labels, reasons


class _Makers:
    """Confined processes, one for each thread that asks."""

    def __init__(self, record: Preprocess, store: Storing, column: Column, folder: Path) -> None:
        self._record, self._store, self._folder = canonical_json(record), store, folder
        self._schema = schema_of(column)
        self._budget: Budget = reading.BUDGET
        self._idle: SimpleQueue[Confined] = SimpleQueue()

    def make(
        self, file: Path, sources: Sequence[Source], labels: list[Any], reasons: dict[int, str],
        measure_every: int,
    ) -> Part:  # fmt: skip
        """Have a part written. A file over which the process ends is left out the next time."""
        reasons, at = dict(reasons), file.with_suffix(".at")
        while True:
            process = self._take()
            asked: Order = {
                "files": [source.file for source in sources],
                "paths": [source.path for source in sources],
                "skipped": reasons,
                "record": self._record,
                "store": self._store,
                "measure_every": measure_every,
                "shard": str(file),
                "at": str(at),
            }
            try:
                process.send(asked, self._targets([v for v in labels if v is not None]))
                reply = process.reply()
            except (EOFError, OSError):
                process.connection.close()
                where = place_in(at)
                if where in reasons or not 0 <= where < len(sources):  # over no file: in writing
                    code = process.exit_code()
                    raise OSError(f"a process of the import ended (exit code {code})") from None
                reasons[where], labels[where] = self._why(process, sources[where]), None
                continue
            finally:
                at.unlink(missing_ok=True)
            self._idle.put(process)
            if "errno" in reply:
                raise OSError(reply["errno"], reply["failed"], str(self._folder))
            return part_in(reply)

    def _why(self, process: Confined, source: Source) -> str:
        nbytes = os.path.getsize(source.file) if os.path.exists(source.file) else 0
        why = why_it_ended(process, self._budget, "the file", nbytes)
        return skipped(source.path, why).reason

    def _targets(self, labels: list[Any]) -> bytes:
        """Targets as a stream of Arrow, whose metadata is the shard's."""
        schema = pa.schema([self._schema.field("label")], self._schema.metadata)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, schema) as stream:
            values = target_array(labels, schema.field(0).type)
            stream.write_batch(pa.record_batch([values], schema=schema))
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
