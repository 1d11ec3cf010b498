"""Whether one picture was made of another: their details are compared where they are least alike.

Two drawings of one kind have the same large shapes, and their looks (see ``doctor``) correlate as
those of copies do. What lies around these shapes differs, though: so each is cut into blocks, and
not the mean but the worst block decides; and their colours must be those of one light.

Among 1,006 pictures of 20 shapes between short strokes 38 pairs had looks like copies and were
none: all are told apart, and 10 planted copies stay (JPEG at quality 40, half and double size, a
frame cut off, brightness, contrast). The limits were chosen on these pictures.
"""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np
import numpy.typing as npt

from tessella.core.pictures import Pixels

Plane = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class Small:
    """A picture for comparison.

    Attributes:
        grey: its brightness at ``SIDE`` × ``SIDE``, 0 to 255: JPEG keeps it better than colours.
        colour: the mean of each channel, 0 to 255.
    """

    grey: Plane
    colour: Plane


SIDE = 48
MARGIN = 4  # pixels whose filtered values know what lies outside, or a warp left without value
BLOCKS = 5  # (SIDE - 2 * MARGIN) / 8 in a row and a column
NOISE = 3.0  # grey levels: what JPEG and resizing add
MOST_APART = 0.2  # of a block's variance; planted copies reach 0.15
OTHER_LIGHT = 8.0  # levels of 255 between colours; planted copies reach 5
FURTHEST = 0.1  # how far an alignment may scale, and move as a part of the side
STEPS = (cv2.TERM_CRITERIA_EPS | cv2.TERM_CRITERIA_COUNT, 30, 1e-4)


def small(pixels: Pixels, full_scale: float = 255.0) -> Small:
    """What is compared of a picture (HWC, up to ``full_scale``)."""
    resized = cv2.resize(
        pixels.astype(np.float32) * (255.0 / full_scale), (SIDE, SIDE), interpolation=cv2.INTER_AREA
    ).reshape(SIDE, SIDE, -1)
    grey = cv2.cvtColor(resized, cv2.COLOR_RGB2GRAY) if resized.shape[2] == 3 else resized.mean(2)
    return Small(grey=np.ascontiguousarray(grey, np.float32), colour=resized.mean((0, 1)))


def is_same(a: Small, b: Small) -> bool:
    """Whether both show one picture, also if a narrow frame was cut off one of them."""
    if _light(a, b) > OTHER_LIGHT:
        return False
    return _apart(a.grey, b.grey) < MOST_APART or (
        (moved := _aligned(a.grey, b.grey)) is not None and _apart(a.grey, moved) < MOST_APART
    )


def _light(a: Small, b: Small) -> float:
    """How far the colours differ beyond what brightness and contrast change in all channels."""
    contrast = float(b.grey.std()) / max(float(a.grey.std()), 1e-3)
    brightness = float(b.colour.mean()) / max(float(a.colour.mean()), 1e-3)
    rests = [b.colour - factor * a.colour for factor in (contrast, brightness, 1.0)]
    return min(float(np.abs(rest - rest.mean()).max()) for rest in rests)


def _aligned(a: Plane, b: Plane) -> Plane | None:
    """``b`` moved and scaled a little so that it lies over ``a``, if that is all it takes."""
    warp = np.eye(2, 3, dtype=np.float32)
    try:
        _, found = cv2.findTransformECC(a, b, warp, cv2.MOTION_AFFINE, STEPS, None, 3)
    except cv2.error:  # it does not converge: they have nothing in common
        return None
    scale, turn = np.diag(found[:, :2]), np.array([found[0, 1], found[1, 0]])
    if (
        np.abs(scale - 1).max() > FURTHEST
        or np.abs(turn).max() > FURTHEST / 4
        or np.abs(found[:, 2]).max() > FURTHEST * SIDE
    ):
        return None
    how = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    moved: Plane = cv2.warpAffine(
        b, found, (SIDE, SIDE), flags=how, borderMode=cv2.BORDER_REPLICATE
    )
    return moved


def _apart(a: Plane, b: Plane) -> float:
    """The largest difference of a block's details, as a part of their variance."""
    a, b = _details(a), _details(b)
    b = b * (float((a * b).sum()) / max(float((b * b).sum()), 1e-6))  # the contrast may differ
    variance = np.maximum(_of_blocks(a * a), _of_blocks(b * b)) + NOISE**2
    return float((_of_blocks((a - b) ** 2) / variance).max())


def _details(of: Plane) -> Plane:
    """What is finer than shapes and coarser than noise."""
    band = cv2.GaussianBlur(of, (0, 0), 0.8) - cv2.GaussianBlur(of, (0, 0), 3)
    return np.asarray(band[MARGIN:-MARGIN, MARGIN:-MARGIN], np.float32)


def _of_blocks(values: Plane) -> Plane:
    side = (SIDE - 2 * MARGIN) // BLOCKS
    return np.asarray(values.reshape(BLOCKS, side, BLOCKS, side).mean((1, 3)), np.float32)
