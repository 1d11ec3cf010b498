"""Random changes to a training image, drawn from its place in training alone.

The draws depend on seed, epoch and the image's index: not on the process, the worker, or on where a
run was resumed. Works on HWC uint8 or uint16 with any number of channels, before ``normalize``.

Source of the noise: J. K. Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011),
Philox4x32-10, which a GPU draws pixel by pixel; G. E. P. Box, M. E. Muller (1958).
"""

from __future__ import annotations

from typing import NamedTuple

import cv2
import numpy as np
import numpy.typing as npt

from tessella.artifacts.run import Augment
from tessella.core.pictures import Pixels
from tessella.core.preprocess import Preprocess, full_scale
from tessella.tasks import Moves, turn

_LUMA = np.array([0.299, 0.587, 0.114], np.float32)  # ITU-R 601
ORDER_STREAM, IMAGE_STREAM, MIX_STREAM, JOIN_STREAM = 0, 1, 2, 3


def generator(seed: int, epoch: int, stream: int, index: int = 0) -> np.random.Generator:
    """Random numbers for one image of one epoch (or for an epoch's order); none overlap.

    Philox counts to 2**256: the image's index is the highest word, its draws count in the lowest.
    """
    key = np.array([seed % 2**64, epoch], np.uint64)
    counter = np.array([0, 0, stream, index], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def only_cuts(settings: Augment) -> bool:
    """Whether images are cut and mirrored only, which the GPU can do."""
    return not (
        settings.rotation or settings.scale or recolors(settings) or settings.noise
        or joins(settings)
    )  # fmt: skip


def recolors(settings: Augment) -> bool:
    """Whether colours change."""
    return bool(settings.color or settings.hue)


def joins(settings: Augment) -> bool:
    """Whether some images are made of several."""
    return bool(settings.join_until and (settings.mosaic or settings.paste))


class Change(NamedTuple):
    """How an image is changed.

    Attributes:
        colors: the factors of brightness, contrast and saturation.
        hue: the share of the circle of colours by which these turn.
        key: of its noise's random numbers, 64 bits.
    """

    moves: Moves
    colors: tuple[float, float, float] = (1.0, 1.0, 1.0)
    hue: float = 0.0
    key: int = 0


def drawn_change(settings: Augment, record: Preprocess, rng: np.random.Generator) -> Change:
    """How an image is changed, by the first draws of its random numbers."""
    made = Change(drawn_moves(settings, record, rng))
    if settings.color:
        low, high = 1 - settings.color, 1 + settings.color
        brightness, contrast, saturation = rng.uniform(low, high, 3).tolist()
        made = made._replace(colors=(brightness, contrast, saturation))
    if settings.hue:
        made = made._replace(hue=rng.uniform(-settings.hue, settings.hue))
    if settings.noise:
        made = made._replace(key=int(rng.integers(2**64, dtype=np.uint64)))
    return made


def drawn_moves(settings: Augment, record: Preprocess, rng: np.random.Generator) -> Moves:
    """How an image is moved, by the first draws of its random numbers."""
    angle, zoom, top, left = 0.0, 1.0, 0, 0
    if settings.rotation or settings.scale:
        angle = rng.uniform(-settings.rotation, settings.rotation)
        zoom = rng.uniform(1 - settings.scale, 1 + settings.scale)
    height, width = record.crop or (record.height, record.width)
    if record.crop is not None:
        top = int(rng.integers(record.height - height + 1))
        left = int(rng.integers(record.width - width + 1))
    mirror = settings.flip and rng.random() < 0.5
    flip = settings.flip_vertical and rng.random() < 0.5
    return Moves(
        angle=angle, zoom=zoom, top=top, left=left, height=height, width=width,
        mirror=mirror, flip=flip,
    )  # fmt: skip


def augmented(
    pixels: Pixels, settings: Augment, record: Preprocess, rng: np.random.Generator
) -> tuple[Pixels, Moves]:
    """A changed copy of a fitted image, in the size that the network takes; and how it was moved.

    Rotation and zoom first, on the whole image, then the random crop, mirrors, colour and noise.
    """
    change = drawn_change(settings, record, rng)
    return applied(pixels, change, settings, record), change.moves


def applied(pixels: Pixels, change: Change, settings: Augment, record: Preprocess) -> Pixels:
    """The changed copy of a fitted image; ``kernels.pictures.change`` makes the same on a GPU."""
    moves = change.moves
    if settings.rotation or settings.scale:
        pixels = _turn(pixels, moves.angle, moves.zoom)
    bottom, right = moves.top + moves.height, moves.left + moves.width
    pixels = pixels[moves.top : bottom, moves.left : right]
    if moves.mirror:
        pixels = _mirrored(pixels)
    if moves.flip:
        pixels = pixels[::-1]
    if recolors(settings) or settings.noise:
        most = np.float32(full_scale(record.depth))
        changed = pixels.astype(np.float32)
        if settings.color:
            changed = _recolor(changed, change.colors)
        if settings.hue and record.channels == 3:
            changed = _hue(changed.clip(0, most) / most, change.hue) * most
        if settings.noise:
            sigma = np.float32(settings.noise) * most
            changed += sigma * normal(change.key, changed.size).reshape(changed.shape)
        pixels = np.rint(changed.clip(0, most)).astype(pixels.dtype)
    return pixels


def _mirrored(pixels: Pixels) -> Pixels:
    """Left is right. OpenCV takes 5 µs for 224 × 224 RGB, a copy of NumPy's reversed view 180."""
    if pixels.shape[2] > 4:
        return pixels[:, ::-1]
    mirrored: Pixels = cv2.flip(pixels, 1).reshape(pixels.shape)
    return mirrored


def _turn(pixels: Pixels, angle: float, zoom: float) -> Pixels:
    """Rotated by ``angle`` degrees and zoomed about the centre; the border is mirrored outwards."""
    height, width, channels = pixels.shape
    matrix = turn(height, width, angle, zoom)
    out = np.empty_like(pixels)
    for first in range(0, channels, 4):  # OpenCV takes four channels at most
        part = np.ascontiguousarray(pixels[:, :, first : first + 4])
        turned = cv2.warpAffine(
            part, matrix, (width, height), flags=cv2.INTER_LINEAR, borderMode=cv2.BORDER_REFLECT
        )
        out[:, :, first : first + 4] = turned.reshape(part.shape)
    return out


def _recolor(pixels: Pixels, factors: tuple[float, float, float]) -> Pixels:
    """Brightness, contrast and (of RGB) saturation, each times its factor."""
    brightness, contrast, saturation = np.array(factors, np.float32)
    pixels = pixels * brightness
    middle = pixels.mean(axis=(0, 1), dtype=np.float32)
    pixels = middle + (pixels - middle) * contrast
    if pixels.shape[2] == 3:
        grey = (pixels * _LUMA).sum(axis=2, keepdims=True)
        pixels = grey + (pixels - grey) * saturation
    return pixels


def _hue(pixels: Pixels, share: float) -> Pixels:
    """RGB of 0 to 1, whose colours are turned by a share of their circle."""
    hsv = cv2.cvtColor(pixels, cv2.COLOR_RGB2HSV)
    hsv[:, :, 0] = (hsv[:, :, 0] + np.float32(360 * share)) % np.float32(360)
    return np.asarray(cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB), np.float32)


# --- noise ----------------------------------------------------------------------------------------

_ROUNDS, _HALF, _LOW = 10, np.uint64(32), np.uint64(0xFFFFFFFF)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_STEPS = 0x9E3779B9, 0xBB67AE85  # of the keys
UNIT = np.float32(2.0**-24)  # random numbers are so far apart, from half of it on


def normal(key: int, count: int) -> npt.NDArray[np.float32]:
    """Normally distributed numbers, four of each block of Philox: two pairs of Box and Muller."""
    words = words_of(key, -(-count // 4))
    uniform = (words >> np.uint64(8)).astype(np.float32) * UNIT + UNIT / 2
    radius = np.sqrt(np.float32(-2) * np.log(uniform[0::2]))
    angle = np.float32(2 * np.pi) * uniform[1::2]
    pairs = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return pairs.reshape(4, -1).T.reshape(-1)[:count]


def words_of(key: int, blocks: int) -> npt.NDArray[np.uint64]:
    """The four words of 32 bits of the blocks 0 to ``blocks`` − 1 of a key, [4, blocks]."""
    one, two, three, four = (np.zeros(blocks, np.uint64) for _ in range(4))
    one += np.arange(blocks, dtype=np.uint64)
    low, high = key & 0xFFFFFFFF, key >> 32
    for _ in range(_ROUNDS):
        a, b = one * _MULTIPLIERS[0], three * _MULTIPLIERS[1]
        one, two = (b >> _HALF) ^ two ^ np.uint64(low), b & _LOW
        three, four = (a >> _HALF) ^ four ^ np.uint64(high), a & _LOW
        low, high = (low + _STEPS[0]) & 0xFFFFFFFF, (high + _STEPS[1]) & 0xFFFFFFFF
    return np.stack([one, two, three, four])
