"""The program of a confined process that reads the files of a part, and writes their images."""

from __future__ import annotations

from pathlib import Path

import cv2  # before the limit and the first alarm
import pyarrow as pa
import tifffile  # noqa: F401

from tessella.artifacts.dataset import SkippedFile
from tessella.artifacts.shards import record_batch, target_array, write_batch
from tessella.core.confined import Budget, Order, serve
from tessella.core.decoding import record_of, told
from tessella.core.errors import DataError
from tessella.core.pictures import Pixels
from tessella.core.preprocess import fitted
from tessella.data.reading import Picture, Read, read

_MADE: list[tuple[str, Read]] = []  # of the part at hand, with their names


def _answer(order: Order, content: bytes, budget: Budget) -> tuple[Order, None]:
    return (_read(order, budget) if "file" in order else _write(order, content)), None


def _read(order: Order, budget: Budget) -> Order:
    def decode(content: bytes) -> Pixels:
        record = record_of(order["record"])
        try:
            return fitted(content, record, name="the file", most_pixels=budget.pixels)
        except DataError as error:
            told(error, "the file", budget)
            raise

    made = read(order["file"], order["path"], decode, order["store"])
    _MADE.append((order["path"], made))
    return {"reason": made.reason} if isinstance(made, SkippedFile) else made.facts.to_json()


def _write(order: Order, content: bytes) -> Order:
    """A record batch for each split with the images that were read and their targets."""
    labels = pa.ipc.open_stream(content).read_all().column(0).combine_chunks()
    written = []
    for split, file in order["files"].items():
        chosen = [
            (i, path, made.content)
            for i, (path, made) in enumerate(_MADE)
            if isinstance(made, Picture) and order["splits"][i] == int(split)
        ]
        if not chosen:
            continue
        numbers, paths, contents = map(list, zip(*chosen, strict=True))
        own = labels.take(target_array(numbers, pa.int64()))
        try:
            write_batch(Path(file), record_batch(contents, paths, own))
        except OSError as error:
            return {"errno": error.errno, "failed": error.strerror}
        written.append(int(split))
    _MADE.clear()
    return {"written": written}


if __name__ == "__main__":
    cv2.setNumThreads(1)
    pa.set_memory_pool(pa.system_memory_pool())  # others take address space ahead, which is limited
    serve(_answer)
