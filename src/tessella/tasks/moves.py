"""How augmentation moved the pixels of a picture, so that masks can follow."""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np
import numpy.typing as npt

from tessella.core.preprocess import Preprocess


@dataclass(frozen=True, kw_only=True)
class Moves:
    """The moves of a fitted picture, in this order.

    Attributes:
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

    def mask(self, mask: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """A mask [H, W] moved with its picture; every pixel keeps a class that was there."""
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


def turn(height: int, width: int, angle: float, zoom: float) -> npt.NDArray[np.float64]:
    """The matrix [2, 3] of a rotation by ``angle`` degrees and a zoom about the centre."""
    matrix = cv2.getRotationMatrix2D(((width - 1) / 2, (height - 1) / 2), angle, zoom)
    return np.asarray(matrix, np.float64)


def still(record: Preprocess) -> Moves:
    """The moves of a picture that is evaluated: the centre crop, if the record has one."""
    height, width = record.crop or (record.height, record.width)
    top, left = (record.height - height) // 2, (record.width - width) // 2
    return Moves(top=top, left=left, height=height, width=width)
