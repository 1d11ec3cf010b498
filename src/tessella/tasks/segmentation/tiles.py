"""The classes of a large picture's pixels: each is told by the tile in whose middle it is most."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from tessella.core.preprocess import placement
from tessella.core.tiles import Tiles
from tessella.tasks.segmentation.answers import answer_of
from tessella.tasks.task import Query, TileOutputs
from tessella.tasks.view import View


def joined(
    outputs: TileOutputs, tiles: Tiles, size: tuple[int, int], view: View,
    about: tuple[Any, ...], query: Query,
) -> Any:  # fmt: skip
    """The answer to a picture of this height and width, with masks of its own size."""
    height, width = size
    labels, _ = about
    told = np.zeros(size, np.uint8)
    nearest = np.full(size, -1.0, np.float32)
    classes = 0
    for top, left, output in outputs:
        classes = output.shape[1]
        made = _told(output[0], tiles, view)
        rows, columns = slice(top, top + tiles.height), slice(left, left + tiles.width)
        inner = np.minimum(
            _inner(top, tiles.height, height)[:, None], _inner(left, tiles.width, width)
        )
        better = inner > nearest[rows, columns]
        told[rows, columns][better] = made[: len(inner), : inner.shape[1]][better]
        nearest[rows, columns][better] = inner[better]
    place = {"box": [0.0, 0.0, float(width), float(height)]}
    return answer_of(told, classes, labels, query.top, place)


def _inner(begin: int, side: int, length: int) -> npt.NDArray[np.float32]:
    """How far each pixel of a tile's side is from an end at which the picture goes on."""
    shown = min(side, length)
    at = np.arange(shown, dtype=np.float32)
    before = at if begin > 0 else np.full(shown, length, np.float32)
    behind = at[::-1] if begin + side < length else np.full(shown, length, np.float32)
    return np.minimum(before, behind)


def _told(scores_KHW: npt.NDArray[Any], tiles: Tiles, view: View) -> npt.NDArray[np.uint8]:
    """The class of each pixel of a tile; scores change bilinearly between those of the network."""
    place = placement(tiles.height, tiles.width, view.record)
    rows = slice(place.top, place.top + place.height)
    columns = slice(place.left, place.left + place.width)
    shown_KHW = scores_KHW[:, rows, columns]  # without the padding
    if shown_KHW.shape[1:] != (tiles.height, tiles.width):
        size = (tiles.width, tiles.height)
        shown_KHW = np.stack([cv2.resize(p.astype(np.float32), size) for p in shown_KHW])
    return np.asarray(shown_KHW.argmax(axis=0), np.uint8)
