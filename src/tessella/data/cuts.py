"""The cuts and mirrors of many images at once: the numbers that ``augment.drawn_moves`` draws.

A generator of NumPy for each image takes 25 µs of Python, more than it takes to read the image; the
same Philox on arrays takes 2. Equal to the bit, so that a host and a GPU see the same pictures.

Source: J. K. Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011), Philox4x64-10;
D. Lemire, Fast Random Integer Generation in an Interval (2019), as NumPy's ``Generator`` has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tessella.artifacts.run import Augment
from tessella.core.preprocess import Preprocess
from tessella.data.augment import IMAGE_STREAM, drawn_moves, generator
from tessella.tasks import Moves

Words = npt.NDArray[np.uint64]

_ROUNDS = 10
_MULTIPLIERS = np.array([0xD2E7470EE14C6C93, 0xCA5A826395121157], np.uint64)
_STEPS = np.array([0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B], np.uint64)  # of the keys
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


class Cuts(Sequence[Moves]):
    """The moves of a batch as an array, [N, 4]: top, left, mirror and flip of each image.

    Args:
        still: the moves of an image that nothing changes, for the sizes.
    """

    def __init__(self, array_N4: npt.NDArray[np.int64], still: Moves) -> None:
        self.array_N4, self._still = array_N4, still

    def __len__(self) -> int:
        return len(self.array_N4)

    def __getitem__(self, place: Any) -> Any:
        top, left, mirror, flip = self.array_N4[place].tolist()
        moved = {"top": top, "left": left, "mirror": bool(mirror), "flip": bool(flip)}
        return replace(self._still, **moved)


def cuts_of(
    settings: Augment, record: Preprocess, drawn_from: tuple[int, int], indices_N: npt.ArrayLike
) -> npt.NDArray[np.int64]:
    """Top, left, mirror and flip of each image, [N, 4], where nothing else changes it.

    Args:
        drawn_from: seed and epoch.
    """
    indices_N = np.asarray(indices_N, np.int64)
    words_4N = _words(*drawn_from, indices_N.astype(np.uint64))
    cuts_N4, again_N = np.zeros((len(indices_N), 4), np.int64), np.zeros(len(indices_N), np.bool_)
    height, width = record.crop or (record.height, record.width)
    halves = [words_4N[0] & _LOW, words_4N[0] >> _HALF]  # of the first word: the low one is first
    for column, count in enumerate((record.height - height + 1, record.width - width + 1)):
        if count > 1:
            product = halves.pop(0) * np.uint64(count)
            cuts_N4[:, column] = product >> _HALF
            again_N |= (product & _LOW) < count  # may have to be drawn once more
    words = list(words_4N[1 if len(halves) < 2 else 0 :])
    for column, wanted in ((2, settings.flip), (3, settings.flip_vertical)):
        if wanted:
            cuts_N4[:, column] = words.pop(0) >> np.uint64(63) == 0  # below a half
    for row in np.flatnonzero(again_N).tolist():
        rng = generator(*drawn_from, IMAGE_STREAM, int(indices_N[row]))
        moves = drawn_moves(settings, record, rng)
        cuts_N4[row] = moves.top, moves.left, moves.mirror, moves.flip
    return cuts_N4


def _words(seed: int, epoch: int, indices_N: Words) -> Words:
    """The first four words of each image's ``generator``, [4, N]."""
    ones = np.ones_like(indices_N)
    # NumPy counts before it draws
    even_2N = np.stack([ones, ones * np.uint64(IMAGE_STREAM)])
    odd_2N = np.stack([ones * np.uint64(0), indices_N])
    keys = np.array([seed % 2**64, epoch], np.uint64)
    for _ in range(_ROUNDS):
        high_2N, low_2N = _products(even_2N, _MULTIPLIERS[:, None])
        even_2N, odd_2N = high_2N[::-1] ^ odd_2N ^ keys[:, None], low_2N[::-1]
        keys = keys + _STEPS
    return np.stack([even_2N[0], odd_2N[0], even_2N[1], odd_2N[1]])


def _products(a: Words, b: Words) -> tuple[Words, Words]:
    """The upper and the lower halves of products of 128 bits."""
    a_high, a_low, b_high, b_low = a >> _HALF, a & _LOW, b >> _HALF, b & _LOW
    middle = a_high * b_low + (a_low * b_low >> _HALF)
    other = a_low * b_high + (middle & _LOW)
    return a_high * b_high + (middle >> _HALF) + (other >> _HALF), a * b
