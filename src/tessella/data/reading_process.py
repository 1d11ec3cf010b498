"""The program of a confined process that reads the files of a part, and writes their shard."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import cv2  # before the limit and the first alarm
import pyarrow as pa

from tessella.artifacts import shards
from tessella.artifacts.dataset import SkippedFile
from tessella.artifacts.shards import IMAGE, Example, ShardWriter
from tessella.core.confined import Budget, Order, limited, serve
from tessella.core.decoding import record_of, told
from tessella.core.errors import DataError
from tessella.core.pictures import Pixels
from tessella.core.preprocess import Preprocess, fitted
from tessella.data.moments import Moments
from tessella.data.part import Part, note_place
from tessella.data.quick_jpeg import QuickJpeg
from tessella.data.reading import ENLARGED, Facts, Read, Way, read


def _answer(order: Order, content: bytes, budget: Budget) -> tuple[Order, None]:
    labels = pa.ipc.open_stream(content).read_all()
    schema = pa.schema([IMAGE, labels.schema.field(0)], labels.schema.metadata)
    at = os.open(order["at"], os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC)
    made = _Making(order, schema, budget)
    try:
        for place, label in zip(made.places, labels.column(0).to_pylist(), strict=True):
            note_place(at, place)
            with limited(budget):
                found = made.read(order["files"][place], order["paths"][place])
            note_place(at, len(order["files"]))
            made.add(place, found, label)
        return made.part().to_json(), None
    except OSError as error:
        return {"errno": error.errno, "failed": error.strerror}, None
    finally:
        os.close(at)


_quick_jpeg = functools.cache(QuickJpeg)  # of the process, which has one standard error


class _Making:
    """A part that grows: the rows that are not written yet, and the facts so far."""

    def __init__(self, order: Order, schema: pa.Schema, budget: Budget) -> None:
        self._record: Preprocess = record_of(order["record"])
        self._budget, self._quick, self._measure_every = (
            budget,
            _quick_jpeg(),
            order["measure_every"],
        )
        self._way = Way(
            record=self._record,
            store=order["store"],
            decode=self._decode,
            is_sound=self._quick.is_sound,
        )
        self._skipped = {int(place): str(why) for place, why in order["skipped"].items()}
        self.places = [n for n in range(len(order["files"])) if n not in self._skipped]
        self._path, self._schema = Path(order["shard"]), schema
        self._writer: ShardWriter | None = None
        self._rows: list[Example] = []
        self._nbytes = 0
        self._facts: list[Facts] = []
        self._deeper, self._enlarged = 0, list[int]()
        self._moments = Moments(self._record.channels)

    def read(self, file: str, path: str) -> Read:
        return read(file, path, self._way, measured=len(self._facts) % self._measure_every == 0)

    def _decode(self, content: bytes) -> Pixels:
        try:
            return fitted(
                content,
                self._record,
                name="the file",
                most_pixels=self._budget.pixels,
                pixels=self._quick(content, self._budget.pixels),
            )
        except DataError as error:
            told(error, "the file", self._budget)
            raise

    def add(self, place: int, found: Read, label: object) -> None:
        if isinstance(found, SkippedFile):
            self._skipped[place] = found.reason
            return
        facts = found.facts
        self._facts.append(facts)
        if facts.sums is not None:
            self._moments.add(facts.sums)
        self._deeper += facts.bits > self._record.depth
        self._enlarged += [place] if facts.enlarged > ENLARGED else []
        self._rows.append(Example(content=found.content, label=label, path=found.path))
        self._nbytes += len(found.content)
        if len(self._rows) == shards.ROWS_PER_BATCH or self._nbytes >= shards.BYTES_PER_BATCH:
            self._write()

    def part(self) -> Part:
        """The facts about all examples of this part, after its shard is closed."""
        if self._rows:
            self._write()
        return Part(
            skipped=self._skipped,
            hashes=b"".join(facts.sha256 for facts in self._facts),
            sides=[facts.sides for facts in self._facts],
            sums=self._moments.sums,
            deeper=self._deeper,
            enlarged=self._enlarged,
            shard=None if self._writer is None else self._writer.close(),
        )

    def _write(self) -> None:
        if self._writer is None:
            self._writer = ShardWriter(self._path, self._schema)
        self._writer.write(self._rows)
        self._rows, self._nbytes = [], 0


if __name__ == "__main__":
    cv2.setNumThreads(1)
    pa.set_memory_pool(pa.system_memory_pool())  # others take address space ahead, which is limited
    serve(_answer)
