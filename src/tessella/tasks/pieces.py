"""Pictures joined to one: which piece shows which picture where, for pixels, masks and boxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Pixels = npt.NDArray[Any]

CHANNELS = 4  # that OpenCV warps at once
SLIVER = 0.5  # pixels: an edge that stands out by less beside a later piece is not seen


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A window of a joined picture, in which one fitted picture of the split is seen.

    Attributes:
        index: which picture of the split.
        zoom: how many pixels of the joined picture one of its pixels takes, along a side.
        x, y: where its upper left corner comes to lie, often outside of the window.
        left, top, right, bottom: the window, in whole pixels. Later pieces lie over earlier ones.
    """

    index: int
    zoom: float
    x: float
    y: float
    left: int
    top: int
    right: int
    bottom: int

    @property
    def window(self) -> tuple[int, int, int, int]:
        return self.left, self.top, self.right, self.bottom


def joined(pieces: Sequence[Piece], pictures: Sequence[Pixels], *, nearest: bool = False) -> Pixels:
    """A picture, HWC, put together from pieces that cover it.

    Args:
        pictures: the fitted picture of each piece, HWC, all of one shape, which is the result's.
        nearest: each pixel is one that was there, as masks need it; otherwise it is interpolated.
    """
    import cv2  # not above: a plan is loaded without OpenCV, which holds 15 MB

    out = np.empty_like(pictures[0])
    flags = cv2.WARP_INVERSE_MAP | (cv2.INTER_NEAREST if nearest else cv2.INTER_LINEAR)
    for piece, picture in zip(pieces, pictures, strict=True):
        size = piece.right - piece.left, piece.bottom - piece.top
        # OpenCV's pixels have their centres at whole numbers: p of the window shows of the picture
        # (p + left + 0.5 − x) / zoom − 0.5
        shift = np.array([piece.left - piece.x, piece.top - piece.y])
        matrix = np.empty((2, 3))
        matrix[:, :2], matrix[:, 2] = np.eye(2) / piece.zoom, (shift + 0.5) / piece.zoom - 0.5
        for first in range(0, picture.shape[2], CHANNELS):
            part = np.ascontiguousarray(picture[:, :, first : first + CHANNELS])
            made = cv2.warpAffine(part, matrix, size, flags=flags, borderMode=cv2.BORDER_REPLICATE)
            window = out[piece.top : piece.bottom, piece.left : piece.right]
            window[:, :, first : first + CHANNELS] = made.reshape(*size[::-1], part.shape[2])
    return out


def seen_in(
    pieces: Sequence[Piece], place: int, boxes_N4: Floats
) -> tuple[Floats, npt.NDArray[np.float64]]:
    """Boxes x0 y0 x1 y1 of the picture of one piece, as the joined picture shows them.

    Returns:
        the box around what is seen of each, [N, 4], and which share of its area that is: 0 of what
        lies outside of the window, or under later pieces.
    """
    piece = pieces[place]
    whole = boxes_N4 * piece.zoom + [piece.x, piece.y, piece.x, piece.y]
    low, high = np.array(piece.window[:2] * 2), np.array(piece.window[2:] * 2)
    seen = np.clip(whole, low, high)
    area = np.maximum(_areas(whole), 1e-12)
    left = _areas(seen)
    over = np.array([p.window for p in pieces[place + 1 :]], np.float64).reshape(-1, 4)
    for row, box in enumerate(seen):
        sides = np.maximum(over[:, :2], box[:2]), np.minimum(over[:, 2:], box[2:])
        hiding = np.concatenate(sides, axis=1)
        hiding = hiding[(hiding[:, :2] < hiding[:, 2:]).all(1)]
        if len(hiding) and left[row] > 0:
            seen[row], left[row] = _uncovered(box, hiding)
    return seen, left / area


def _areas(boxes_N4: Floats) -> npt.NDArray[np.float64]:
    return np.asarray((boxes_N4[:, 2:] - boxes_N4[:, :2]).prod(axis=1))


def _uncovered(box: Floats, over_M4: Floats) -> tuple[Floats, float]:
    """The box around what others leave of a box, and its area: all edges cut it into cells."""
    xs, ys = (np.unique([*box[a::2], *over_M4[:, a::2].ravel()]) for a in (0, 1))
    free = np.ones((len(ys) - 1, len(xs) - 1), bool)
    for x0, y0, x1, y1 in over_M4:
        rows, columns = (ys >= y0) & (ys < y1), (xs >= x0) & (xs < x1)
        free[np.ix_(rows[:-1], columns[:-1])] = False
    if not free.any():
        return np.zeros(4), 0.0
    area = float(np.diff(ys) @ free @ np.diff(xs))
    visible = free & np.outer(np.diff(ys) >= SLIVER, np.diff(xs) >= SLIVER)
    visible = visible if visible.any() else free
    rows, columns = np.flatnonzero(visible.any(1)), np.flatnonzero(visible.any(0))
    return np.array([xs[columns[0]], ys[rows[0]], xs[columns[-1] + 1], ys[rows[-1] + 1]]), area
