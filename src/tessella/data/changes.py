"""The changes of a batch as numbers that a GPU makes them by (``kernels.pictures.change``)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tessella.artifacts.run import Augment
from tessella.core.preprocess import Preprocess
from tessella.data.augment import IMAGE_STREAM, Change, drawn_change, generator
from tessella.data.cuts import Cuts
from tessella.tasks import still, turn


class Changes(NamedTuple):
    """Changes that are still to be made.

    Attributes:
        words: int32 [N, 12]: as float32, six of the matrix that takes a place of the changed
            picture to one of the stored, then the factors of brightness, contrast and saturation,
            and the turn of the hue; and the key of the noise, low word first.
        settings: what of them is on, and the noise's strength.
        each: the same, for a host.
    """

    words: torch.Tensor
    settings: Augment
    each: list[Change]


class Drawn(Cuts):
    """How each image of a batch is changed: as a sequence of moves, and in full."""

    def __init__(
        self, settings: Augment, record: Preprocess, drawn_from: tuple[int, int],
        indices_N: npt.NDArray[np.int64],
    ) -> None:  # fmt: skip
        self.settings, self._record = settings, record
        rngs = (generator(*drawn_from, IMAGE_STREAM, index) for index in indices_N.tolist())
        self.each = [drawn_change(settings, record, rng) for rng in rngs]
        moves = [change.moves for change in self.each]
        cuts = [(m.top, m.left, m.mirror, m.flip) for m in moves]
        super().__init__(np.array(cuts, np.int64).reshape(-1, 4), still(record))

    def __getitem__(self, place: Any) -> Any:
        return self.each[place].moves

    def numbers(self) -> Changes:
        """As a GPU gets them."""
        sides = self._record.height, self._record.width
        rows = np.empty((len(self.each), 12), np.int32)
        floats, words = rows.view(np.float32), rows.view(np.uint32)
        for row, change in enumerate(self.each):
            floats[row, :6] = _backwards(change, sides)
            floats[row, 6:10] = *change.colors, change.hue
            words[row, 10:] = change.key & 0xFFFFFFFF, change.key >> 32
        return Changes(torch.from_numpy(rows), self.settings, self.each)


def _backwards(change: Change, sides: tuple[int, int]) -> npt.NDArray[np.float64]:
    """The matrix of a turn and zoom, inverted as OpenCV does it."""
    (a, b, c), (d, e, f) = turn(*sides, change.moves.angle, change.moves.zoom).tolist()
    scale = 1 / (a * e - b * d)
    a, b, d, e = e * scale, -b * scale, -d * scale, a * scale
    return np.array([a, b, -a * c - b * f, d, e, -d * c - e * f])
