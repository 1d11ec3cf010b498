"""Images decoded into batches by processes, as threads of one interpreter cannot on many cores.

Pillow, NumPy and Python hold the interpreter's lock for a part of each image: 16 threads made 1,032
JPEG files of 500 × 375 a second on 16 cores, as many as they would with decoders that take no time.
So each thread that loads asks a process, which shares memory with it for some images. That memory
has no name: nothing is left of it when the processes end, however they do.
"""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import NamedTuple

import numpy as np

from tessella.artifacts.dataset import Split
from tessella.artifacts.run import Augment
from tessella.core.confined import Budget, Confined, Order, Pool
from tessella.core.decoding import text_of
from tessella.core.errors import TrainError
from tessella.core.pictures import MAX_PIXELS, Pixels
from tessella.core.preprocess import Preprocess
from tessella.tasks import Moves, Piece, still

Pieces = tuple[Piece, ...]

SHARED_BYTES = 8 << 20  # of a process, unless one image is larger
# of an order; no image of a dataset comes near it, but one that hangs must not hang the training
BUDGET = Budget(pixels=MAX_PIXELS, nbytes=8 << 30, seconds=1200.0)


class Wanted(NamedTuple):
    """What is to become of images.

    Attributes:
        whole: they are left in the record's whole size, for a GPU to cut.
        changes: None: the centre crop, as in an evaluation.
        drawn_from: seed and epoch of the random numbers.
    """

    record: Preprocess
    whole: bool
    changes: Augment | None
    drawn_from: tuple[int, int]


class Fillers:
    """Processes that fill batches, one for each thread that asks; to be closed.

    Args:
        most: processes at a time; whoever asks then waits: a validation begins while the training's
            next batches are filled.
    """

    def __init__(self, most: int) -> None:
        self._pool = Pool(_started, most=most)

    def __len__(self) -> int:
        """How many wait for work."""
        return len(self._pool.idle)

    def fill(
        self,
        split: Split,
        indices: Sequence[int],
        wanted: Wanted,
        out: Pixels,
        pieces: Sequence[Pieces] = (),
    ) -> dict[int, Moves]:
        """Put images of a split into ``out``, [N, H, W, C].

        Args:
            pieces: what each image is joined of, none of one picture; empty: each is one picture.

        Returns:
            by place how each was moved, without those that could not be read: who asks reads them
            itself, and sees what is wrong.

        Raises:
            TrainError: a process has ended, or does not start.
        """
        made = dict[int, Moves]()
        pieces = pieces or [()] * len(indices)
        most = max(1, SHARED_BYTES // out[0].nbytes)
        with self._pool.one() as filler:
            for first in range(0, len(indices), most):
                some = slice(first, first + most)
                found = filler.fill(split, indices[some], wanted, out[some], pieces[some])
                made |= {first + place: moves for place, moves in found.items()}
        return made

    def close(self) -> None:
        """End the idle processes now, and each busy one when its images are made."""
        self._pool.close()


def _started() -> _Filler:
    try:
        return _Filler()
    except (RuntimeError, OSError) as error:
        raise TrainError(
            "a process that decodes images does not start",
            seen=error,
            fix="give the training fewer workers, or workers=0",
        ) from error


class _Filler:
    """A process, and the memory that it shares."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("tessella", os.MFD_CLOEXEC)
        self._memory: mmap.mmap | None = None
        try:
            self._process = Confined(
                "tessella.data.filling_process", BUDGET, passed=(self._descriptor,)
            )
        except BaseException:
            os.close(self._descriptor)
            raise

    def fill(
        self,
        split: Split,
        indices: Sequence[int],
        wanted: Wanted,
        out: Pixels,
        pieces: Sequence[Pieces],
    ) -> dict[int, Moves]:
        """As that of ``Fillers``."""
        shared = self._shared(out)
        reply = self._answer(
            {
                "record": text_of(wanted.record),
                "whole": wanted.whole,
                "changes": None if wanted.changes is None else asdict(wanted.changes),
                "drawn_from": wanted.drawn_from,
                "shape": out.shape,
                "memory": self._descriptor,
                "nbytes": 0 if self._memory is None else len(self._memory),
                "images": [
                    {
                        "index": index,
                        "pieces": [asdict(piece) for piece in joined],
                        "files": {
                            str(i): split.where(i) for i in {index, *(p.index for p in joined)}
                        },
                    }
                    for index, joined in zip(indices, pieces, strict=True)
                ],
            }
        )
        out[:] = shared
        unmoved, left = still(wanted.record), set(reply["left"])
        return {
            place: unmoved if moved is None else Moves(**(moved | {"pieces": pieces[place]}))
            for place, moved in enumerate(reply["moves"])
            if place not in left
        }

    def _answer(self, order: Order) -> Order:
        try:
            self._process.send(order)
            return self._process.reply()
        except (EOFError, OSError) as error:
            code = self._process.exit_code()
            seen = f"exit code {code}"
            with suppress(ValueError):
                seen = signal.Signals(-code).name
            raise TrainError(
                "a process that decodes images has ended",
                seen=seen,
                fix="give the training fewer workers if memory is short, then resume it",
            ) from error

    def _shared(self, like: Pixels) -> Pixels:
        """The shared memory as an array of some shape, enlarged if need be."""
        if self._memory is None or len(self._memory) < like.nbytes:
            os.ftruncate(self._descriptor, like.nbytes)
            self._memory = mmap.mmap(self._descriptor, like.nbytes)
        return np.ndarray(like.shape, like.dtype, self._memory)

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive

    def end(self) -> None:
        self._process.end()
        os.close(self._descriptor)
