"""The program of a confined process that reads files for an import, one after another."""

from __future__ import annotations

import cv2  # before the limit and the first alarm
import tifffile  # noqa: F401

from tessella.artifacts.dataset import SkippedFile
from tessella.core.confined import Budget, Order, serve
from tessella.core.decoding import record_of, told
from tessella.core.errors import DataError
from tessella.core.pictures import Pixels
from tessella.core.preprocess import fitted
from tessella.data.reading import read


def _answer(order: Order, _: bytes, budget: Budget) -> tuple[Order, bytes | None]:
    def decode(content: bytes) -> Pixels:
        record = record_of(order["record"])
        try:
            return fitted(content, record, name="the file", most_pixels=budget.pixels)
        except DataError as error:
            told(error, "the file", budget)
            raise

    made = read(order["file"], order["path"], decode, order["store"])
    if isinstance(made, SkippedFile):
        return {"path": made.path, "reason": made.reason}, None
    numbers = {
        "count": made.count, "sums": made.sums, "squares": made.squares, "bits": made.bits,
        "enlarged": made.enlarged,
    }  # fmt: skip
    hashes = {"digest": made.digest.hex(), "sha256": made.sha256.hex()}
    return {**hashes, **numbers}, made.content


if __name__ == "__main__":
    cv2.setNumThreads(1)
    serve(_answer)
