"""Which pictures of a split are joined to one, and how: mosaics, and things that are pasted.

Like all augmentation this is a function of (seed, epoch, index): ``drawn_pieces``. A mosaic and
what is pasted are both ``tasks.Piece``s, of which ``tasks.joined`` makes the pixels, and the
targets of each task their own. The other changes then see one picture.

Source: mosaics, A. Bochkovskiy et al., YOLOv4 (2020); pasted things, G. Ghiasi et al., Simple
Copy-Paste (2021), here with their boxes, as a dataset of boxes has no outlines; an end of both
before the end of training, Z. Ge et al., YOLOX (2021).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import numpy as np
import numpy.typing as npt

from tessella.artifacts.run import Augment
from tessella.core.errors import UsageError
from tessella.core.pictures import Pixels
from tessella.core.preprocess import Preprocess
from tessella.data.augment import IMAGE_STREAM, JOIN_STREAM, augmented, generator, joins
from tessella.tasks import Moves, Piece, Targets, Task, joined
from tessella.tasks.task import Cuttable

CENTRE = 0.25, 0.75  # where the four pictures of a mosaic meet, in shares of its sides
ZOOM = 0.5, 1.0  # of a picture in a mosaic; what its part of the mosaic needs, if that is more
MOST_PASTED = 3  # things of one other picture
PASTED_ZOOM = 0.6, 1.4
MARGIN = 0.25  # of a thing's sides, at most, that is cut out around it: a seam is no edge of it
LARGEST = 0.6  # of the joined picture's sides, that a pasted thing may take


def settings_at(settings: Augment, *, epoch: int, epochs: float) -> Augment:
    """The changes of an epoch, counted from 0: the last ones join no pictures."""
    if epoch < settings.join_until * epochs:
        return settings
    return replace(settings, mosaic=0.0, paste=0.0)


def check_joins(settings: Augment, task: Task) -> None:
    """Refuse to join images of a task that has no use for it.

    Raises:
        UsageError: says which settings the task knows.
    """
    turned = [name for name in ("rotation", "scale") if getattr(settings, name)]
    if task.volumes and turned:
        raise UsageError(
            "volumes are mirrored and get other intensities, and are not turned or scaled",
            seen=", ".join(turned),
            fix="use flip, flip_vertical, color and noise only",
        )
    asked = [name for name in ("mosaic", "paste") if getattr(settings, name)]
    if set(asked) - set(task.examples.JOINED):
        can = " and ".join(task.examples.JOINED)
        raise UsageError(
            f"images of {task.name} cannot be joined so",
            seen=", ".join(f"{name}={getattr(settings, name):g}" for name in asked),
            fix=f"use {can} only" if can else "leave mosaic and paste out",
        )


def drawn_pieces(
    settings: Augment,
    record: Preprocess,
    drawn_from: tuple[int, int],
    index: int,
    targets: Targets,
) -> tuple[Piece, ...]:
    """The pieces of an image of an epoch; none where it stays one picture.

    Args:
        drawn_from: seed and epoch.
        index: which image of the split whose ``targets`` these are.
    """
    if not joins(settings):
        return ()
    rng = generator(*drawn_from, JOIN_STREAM, index)
    pieces: list[Piece] = []
    if rng.random() < settings.mosaic:
        pieces = _mosaic(rng, [index, *rng.integers(len(targets), size=3).tolist()], record)
    if rng.random() < settings.paste:
        other = int(rng.integers(len(targets)))
        over = _pasted(rng, other, cast(Cuttable, targets).things(other), record)
        whole = Piece(
            index=index, zoom=1.0, x=0.0, y=0.0,
            left=0, top=0, right=record.width, bottom=record.height,
        )  # fmt: skip
        pieces = [*(pieces or [whole]), *over] if over else pieces
    return tuple(pieces)


def made_of(
    index: int,
    pieces: tuple[Piece, ...],
    pixels_of: Callable[[int], Pixels],
    settings: Augment,
    record: Preprocess,
    drawn_from: tuple[int, int],
) -> tuple[Pixels, Moves]:
    """An image of an epoch as the network sees it, and how it was moved.

    Args:
        pieces: those of ``drawn_pieces``.
        pixels_of: gives the fitted pixels of an image of the split, HWC.
    """
    if pieces:
        pixels = joined(pieces, [pixels_of(piece.index) for piece in pieces])
    else:
        pixels = pixels_of(index)
    rng = generator(*drawn_from, IMAGE_STREAM, index)
    pixels, moves = augmented(pixels, settings, record, rng)
    return pixels, replace(moves, pieces=pieces)


def _mosaic(rng: np.random.Generator, indices: list[int], record: Preprocess) -> list[Piece]:
    """Four pictures around a point, each of which fills its part."""
    height, width = record.height, record.width
    x, y = (int(rng.uniform(*CENTRE) * side) for side in (width, height))
    windows = ((0, 0, x, y), (x, 0, width, y), (0, y, x, height), (x, y, width, height))
    pieces = []
    for index, (left, top, right, bottom) in zip(indices, windows, strict=True):
        least = max((right - left) / width, (bottom - top) / height)
        zoom = rng.uniform(max(least, ZOOM[0]), max(least, ZOOM[1]))
        # the picture reaches over its part at all sides
        shift_x = rng.uniform(right - zoom * width, left)
        shift_y = rng.uniform(bottom - zoom * height, top)
        pieces.append(
            Piece(
                index=index, zoom=zoom, x=shift_x, y=shift_y,
                left=left, top=top, right=right, bottom=bottom,
            )
        )  # fmt: skip
    return pieces


def _pasted(
    rng: np.random.Generator, index: int, boxes_N4: npt.NDArray[np.float64], record: Preprocess
) -> list[Piece]:
    """Some things of a picture, each with a little around it, at other places and sizes."""
    count = min(len(boxes_N4), int(rng.integers(1, MOST_PASTED + 1)))
    size = np.array([record.width, record.height])
    pieces = []
    for box in boxes_N4[rng.permutation(len(boxes_N4))[:count]]:
        margin = rng.uniform(0, MARGIN, 4) * np.tile(box[2:] - box[:2], 2)
        low = np.floor(np.maximum(box[:2] - margin[:2], 0))
        high = np.ceil(np.minimum(box[2:] + margin[2:], size))
        zoom = min(rng.uniform(*PASTED_ZOOM), *(LARGEST * size / (high - low)))
        wide, tall = np.maximum(1, np.floor((high - low) * zoom)).astype(int).tolist()
        left = int(rng.integers(record.width - wide + 1))
        top = int(rng.integers(record.height - tall + 1))
        pieces.append(
            Piece(
                index=index, zoom=float(zoom),
                x=left - float(low[0] * zoom), y=top - float(low[1] * zoom),
                left=left, top=top, right=left + wide, bottom=top + tall,
            )
        )  # fmt: skip
    return pieces
