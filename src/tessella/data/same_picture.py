"""Whether one picture was made of another: their details are compared where they are least alike.

Two drawings of one kind have the same large shapes, and their looks (see ``doctor``) correlate as
those of copies do. What lies around these shapes differs, though: so each is cut into blocks, and
not the mean but nearly the worst block decides.

Among 1,006 pictures of 20 shapes between short strokes 38 pairs have looks like copies and are
none; the details of 36 say so, and of 6 such pairs among 600 digits all six. The planted copies
of both sets stay: JPEG at quality 40, half and double size, a frame cut off, brightness, contrast.
"""

from __future__ import annotations

import cv2
import numpy as np
import numpy.typing as npt

from tessella.core.pictures import Pixels

Plane = npt.NDArray[np.float32]

SIDE = 48
MARGIN = 4  # pixels whose filtered values know what lies outside, or a warp left without value
BLOCKS = 5  # (SIDE - 2 * MARGIN) / 8 in a row and a column
NOISE = 3.0  # grey levels: what JPEG and resizing add
MOST_APART = 0.1  # of a block's variance; planted copies reach 0.09
SKIPPED = 2  # the worst blocks, in which a copy may have a stamp
FURTHEST = 0.1  # how far an alignment may scale, and move as a part of the side
STEPS = (cv2.TERM_CRITERIA_EPS | cv2.TERM_CRITERIA_COUNT, 30, 1e-4)


def plane(pixels: Pixels, full_scale: float = 255.0) -> Plane:
    """The brightness of a picture (HWC) at ``SIDE`` × ``SIDE``, 0 to 255.

    JPEG keeps brightness far better than colours.
    """
    small = cv2.resize(
        pixels.astype(np.float32) * (255.0 / full_scale), (SIDE, SIDE), interpolation=cv2.INTER_AREA
    ).reshape(SIDE, SIDE, -1)
    if small.shape[2] != 3:
        return np.ascontiguousarray(small.mean(2), np.float32)
    grey: Plane = cv2.cvtColor(small, cv2.COLOR_RGB2GRAY)
    return grey


def is_same(a: Plane, b: Plane) -> bool:
    """Whether two planes show one picture, also if a narrow frame was cut off one of them."""
    return _apart(a, b) < MOST_APART or (
        (moved := _aligned(a, b)) is not None and _apart(a, moved) < MOST_APART
    )


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
    moved: Plane = cv2.warpAffine(b, found, (SIDE, SIDE), flags=how, borderMode=cv2.BORDER_REPLICATE)
    return moved


def _apart(a: Plane, b: Plane) -> float:
    """The third largest difference of a block's details, as a part of their variance."""
    a, b = _details(a), _details(b)
    b = b * (float((a * b).sum()) / max(float((b * b).sum()), 1e-6))  # the contrast may differ
    variance = np.maximum(_of_blocks(a * a), _of_blocks(b * b)) + NOISE**2
    apart = np.sort((_of_blocks((a - b) ** 2) / variance).ravel())
    return float(apart[-1 - SKIPPED])


def _details(of: Plane) -> Plane:
    """What is finer than shapes and coarser than noise."""
    band = cv2.GaussianBlur(of, (0, 0), 0.8) - cv2.GaussianBlur(of, (0, 0), 3)
    return np.asarray(band[MARGIN:-MARGIN, MARGIN:-MARGIN], np.float32)


def _of_blocks(values: Plane) -> Plane:
    side = (SIDE - 2 * MARGIN) // BLOCKS
    return values.reshape(BLOCKS, side, BLOCKS, side).mean((1, 3))
