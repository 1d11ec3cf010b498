"""The program of a process that decodes images of a split into memory that its parent shares.

Starts without torch, Arrow and OpenCV, which it takes only where an image asks for them: in 0.3 s,
35 MB.
"""

from __future__ import annotations

import functools
import importlib
import mmap
import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from tessella.core.confined import Budget, Order, serve
from tessella.core.decoding import record_of
from tessella.core.pictures import Pixels
from tessella.core.preprocess import Preprocess, centre_crop, fitted, stored_pixels

MOST_FILES = 64  # that it holds open
Moved = dict[str, Any] | None


def _answer(order: Order, _: bytes, __: Budget) -> tuple[Order, None]:
    """Fill the images of an order; tells which ones it leaves, and how the others were moved."""
    record, shape = record_of(order["record"]), tuple(order["shape"])
    kind = np.uint8 if record.depth == 8 else np.uint16
    memory = _memory(order["memory"], order["nbytes"])
    out: npt.NDArray[Any] = np.ndarray(shape, kind, memory)
    change = _change(order, record)
    left: list[int] = []
    moves: list[Moved] = []
    for place, (index, path, device, inode, begin, nbytes) in enumerate(order["images"]):
        moved: Moved = None
        try:
            content = os.pread(_file(path, device, inode), nbytes, begin)
            pixels = stored_pixels(content, record)
            out[place], moved = change(fitted(content, record) if pixels is None else pixels, index)
        except Exception:  # the parent tries it itself, and says what is wrong
            left.append(place)
        moves.append(moved)
    return {"left": left, "moves": moves}, None


Change = Callable[[Pixels, int], tuple[Pixels, Moved]]


def _change(order: Order, record: Preprocess) -> Change:
    """What is done to fitted pixels, given the image's number."""
    if order["whole"]:
        return lambda pixels, _: (pixels, None)
    if order["changes"] is None:
        return lambda pixels, _: (centre_crop(pixels, record), None)
    augment, settings = _augment(), _settings(**order["changes"])
    seed, epoch = order["drawn_from"]

    def changed(pixels: Pixels, index: int) -> tuple[Pixels, Moved]:
        rng = augment.generator(seed, epoch, augment.IMAGE_STREAM, index)
        made, moves = augment.augmented(pixels, settings, record, rng)
        return made, asdict(moves)

    return changed


@functools.cache
def _augment() -> Any:
    """The module of changes, with OpenCV in one thread."""
    importlib.import_module("cv2").setNumThreads(1)
    return importlib.import_module("tessella.data.augment")


def _settings(**changes: Any) -> Any:
    return importlib.import_module("tessella.artifacts.run").Augment(**changes)


@functools.lru_cache(maxsize=1)
def _memory(descriptor: int, nbytes: int) -> mmap.mmap:
    return mmap.mmap(descriptor, nbytes)


class _File:
    """A shard open to be read, closed when it is forgotten.

    Raises:
        OSError: the path leads to another file by now.
    """

    descriptor = -1

    def __init__(self, path: str, device: int, inode: int) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        found = os.fstat(self.descriptor)
        if (found.st_dev, found.st_ino) != (device, inode):
            raise OSError("another file")

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


_opened = functools.lru_cache(maxsize=MOST_FILES)(_File)


def _file(path: str, device: int, inode: int) -> int:
    return _opened(path, device, inode).descriptor


if __name__ == "__main__":
    serve(_answer)
