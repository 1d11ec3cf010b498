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
    for place, image in enumerate(order["images"]):
        moved: Moved = None
        try:
            out[place], moved = change(image)
        except Exception:  # the parent tries it itself, and says what is wrong
            left.append(place)
        moves.append(moved)
    return {"left": left, "moves": moves}, None


Change = Callable[[dict[str, Any]], tuple[Pixels, Moved]]


def _change(order: Order, record: Preprocess) -> Change:
    """What is made of an image of the order, and how it was moved."""

    def pixels_of(image: dict[str, Any], index: int) -> Pixels:
        path, device, inode, begin, nbytes = image["files"][str(index)]
        content = os.pread(_file(path, device, inode), nbytes, begin)
        pixels = stored_pixels(content, record)
        return fitted(content, record) if pixels is None else pixels

    if order["whole"]:
        return lambda image: (pixels_of(image, image["index"]), None)
    if order["changes"] is None:
        return lambda image: (centre_crop(pixels_of(image, image["index"]), record), None)
    joining, settings = _joining(), _settings(**order["changes"])
    seed, epoch = order["drawn_from"]

    def changed(image: dict[str, Any]) -> tuple[Pixels, Moved]:
        pieces = tuple(joining.Piece(**piece) for piece in image["pieces"])
        pixels = functools.cache(functools.partial(pixels_of, image))
        drawn_from = seed, epoch
        made, moves = joining.made_of(image["index"], pieces, pixels, settings, record, drawn_from)
        return made, {name: v for name, v in asdict(moves).items() if name != "pieces"}

    return changed


@functools.cache
def _joining() -> Any:
    """The module of changes, with OpenCV in one thread."""
    importlib.import_module("cv2").setNumThreads(1)
    return importlib.import_module("tessella.data.joining")


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
