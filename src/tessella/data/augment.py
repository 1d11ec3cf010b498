"""Random changes to a training image, drawn from its place in training alone.

The draws depend on seed, epoch and the image's index: not on the process, the worker, or on where a
run was resumed. Works on HWC uint8 or uint16 with any number of channels, before ``normalize``.
"""

from __future__ import annotations

import cv2
import numpy as np

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
        settings.rotation or settings.scale or settings.color or settings.noise or joins(settings)
    )


def joins(settings: Augment) -> bool:
    """Whether some images are made of several."""
    return bool(settings.join_until and (settings.mosaic or settings.paste))


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
    moves = drawn_moves(settings, record, rng)
    if settings.rotation or settings.scale:
        pixels = _turn(pixels, moves.angle, moves.zoom)
    bottom, right = moves.top + moves.height, moves.left + moves.width
    pixels = pixels[moves.top : bottom, moves.left : right]
    if moves.mirror:
        pixels = _mirrored(pixels)
    if moves.flip:
        pixels = pixels[::-1]
    if settings.color or settings.noise:
        changed = pixels.astype(np.float32)
        if settings.color:
            changed = _recolor(changed, settings.color, rng)
        if settings.noise:
            sigma = np.float32(settings.noise * full_scale(record.depth))
            changed += sigma * rng.standard_normal(changed.shape, np.float32)
        limits = (0, full_scale(record.depth))
        pixels = np.rint(np.clip(changed, *limits)).astype(pixels.dtype)
    return pixels, moves


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


def _recolor(pixels: Pixels, strength: float, rng: np.random.Generator) -> Pixels:
    """Brightness, contrast and (of RGB) saturation, each times 1 − strength to 1 + strength."""
    brightness, contrast, saturation = rng.uniform(1 - strength, 1 + strength, 3).astype(np.float32)
    pixels = pixels * brightness
    middle = pixels.mean(axis=(0, 1), dtype=np.float32)
    pixels = middle + (pixels - middle) * contrast
    if pixels.shape[2] == 3:
        grey = (pixels * _LUMA).sum(axis=2, keepdims=True)
        pixels = grey + (pixels - grey) * saturation
    return pixels
