"""How augmentation moved the pixels of a picture, so that masks and boxes can follow."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tessella.core.preprocess import Preprocess
from tessella.tasks.pieces import Piece

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Moves:
    """The moves of a fitted picture, in this order.

    Attributes:
        pieces: the pictures that were joined to it; none: it is one picture as it was.
        angle, zoom: a rotation about the centre in degrees, and a scale; the border is mirrored.
        top, left, height, width: the part of it that the network sees.
        mirror, flip: left and right changed places, and above and below.
    """

    top: int
    left: int
    height: int
    width: int
    angle: float = 0.0
    zoom: float = 1.0
    mirror: bool = False
    flip: bool = False
    pieces: tuple[Piece, ...] = ()

    def mask(self, mask: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """A mask [H, W] moved with its picture; every pixel keeps a class that was there."""
        import cv2  # not above: a plan is loaded without OpenCV, which holds 15 MB

        if self.angle or self.zoom != 1.0:
            height, width = mask.shape
            turned = cv2.warpAffine(
                mask, turn(height, width, self.angle, self.zoom), (width, height),
                flags=cv2.INTER_NEAREST, borderMode=cv2.BORDER_REFLECT,
            )  # fmt: skip
            mask = np.asarray(turned, np.uint8)
        mask = mask[self.top : self.top + self.height, self.left : self.left + self.width]
        mask = mask[:, ::-1] if self.mirror else mask
        return np.ascontiguousarray(mask[::-1] if self.flip else mask)

    def boxes(
        self, boxes_N4: Floats, size: tuple[int, int]
    ) -> tuple[Floats, npt.NDArray[np.int64]]:
        """Boxes x0 y0 x1 y1 moved with their picture of a height and width; they may lie outside.

        A box that is turned becomes the box around it, as torchvision's ``v2.RandomAffine`` has it.
        A border that is mirrored outwards shows things again: these are boxes of their own.

        Returns:
            The boxes [M, 4] in pixels of what the network sees, and of which box each was made.
        """
        boxes, made_of = boxes_N4, np.arange(len(boxes_N4))
        if self.angle or self.zoom != 1.0:
            boxes, made_of = _mirrored_outwards(boxes_N4, size)
            matrix = turn(*size, self.angle, self.zoom)
            # OpenCV's pixels have their centres at whole numbers, boxes theirs at halves
            corners = boxes[:, [0, 1, 2, 1, 2, 3, 0, 3]].reshape(-1, 4, 2) - 0.5
            corners = corners @ matrix[:, :2].T + matrix[:, 2] + 0.5
            boxes = np.concatenate([corners.min(axis=1), corners.max(axis=1)], axis=1)
        boxes = boxes - [self.left, self.top, self.left, self.top]
        if self.mirror:
            boxes[:, [0, 2]] = self.width - boxes[:, [2, 0]]
        if self.flip:
            boxes[:, [1, 3]] = self.height - boxes[:, [3, 1]]
        return boxes, made_of


def _mirrored_outwards(
    boxes_N4: Floats, size: tuple[int, int]
) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Boxes, and those that a picture shows again in the mirrors at its four edges and corners."""
    height, width = size
    copies = []
    for x in (None, 0.0, 2.0 * width):
        for y in (None, 0.0, 2.0 * height):
            copy = boxes_N4.copy()
            if x is not None:
                copy[:, [0, 2]] = x - copy[:, [2, 0]]
            if y is not None:
                copy[:, [1, 3]] = y - copy[:, [3, 1]]
            copies.append(copy)
    return np.concatenate(copies), np.tile(np.arange(len(boxes_N4)), len(copies))


def turn(height: int, width: int, angle: float, zoom: float) -> npt.NDArray[np.float64]:
    """The matrix [2, 3] of a rotation by ``angle`` degrees and a zoom about the centre."""
    import cv2  # not above: a plan is loaded without OpenCV, which holds 15 MB

    matrix = cv2.getRotationMatrix2D(((width - 1) / 2, (height - 1) / 2), angle, zoom)
    return np.asarray(matrix, np.float64)


def still(record: Preprocess) -> Moves:
    """The moves of a picture that is evaluated: the centre crop, if the record has one."""
    height, width = record.crop or (record.height, record.width)
    top, left = (record.height - height) // 2, (record.width - width) // 2
    return Moves(top=top, left=left, height=height, width=width)
