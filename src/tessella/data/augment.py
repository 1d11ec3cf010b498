"""Random changes to a training image, drawn from its place in training alone.

The draws depend on seed, epoch and the image's index: not on the process, the worker, or on where a
run was resumed. Works on HWC uint8 or uint16 with any number of channels, before ``normalize``.
"""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np

from tessella.artifacts.run import Augment
from tessella.core.pictures import Pixels
from tessella.core.preprocess import Preprocess, full_scale

_LUMA = np.array([0.299, 0.587, 0.114], np.float32)  # ITU-R 601
ORDER_STREAM, IMAGE_STREAM = 0, 1


def generator(seed: int, epoch: int, stream: int, index: int = 0) -> np.random.Generator:
    """Random numbers for one image of one epoch (or for an epoch's order); none overlap.

    Philox counts to 2**256: the image's index is the highest word, its draws count in the lowest.
    """
    key = np.array([seed % 2**64, epoch], np.uint64)
    counter = np.array([0, 0, stream, index], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a fitted image that the network sees, and how it is mirrored."""

    top: int
    left: int
    mirrored: bool
    upside_down: bool


def only_cuts(settings: Augment) -> bool:
    """Whether the changes are those of a ``Cut`` alone, which the GPU can make."""
    return not (settings.rotation or settings.scale or settings.color or settings.noise)


def drawn_cut(settings: Augment, record: Preprocess, rng: np.random.Generator) -> Cut:
    """A random one, from the draws that ``augmented`` makes for it."""
    top = left = 0
    if record.crop is not None:
        height, width = record.crop
        top = int(rng.integers(record.height - height + 1))
        left = int(rng.integers(record.width - width + 1))
    mirrored = settings.flip and rng.random() < 0.5
    return Cut(top, left, mirrored, settings.flip_vertical and rng.random() < 0.5)


def augmented(
    pixels: Pixels, settings: Augment, record: Preprocess, rng: np.random.Generator
) -> Pixels:
    """A changed copy of a fitted image, in the size that the network takes.

    Rotation and zoom first, on the whole image, then the random crop, mirrors, colour and noise.
    """
    if settings.rotation or settings.scale:
        angle = rng.uniform(-settings.rotation, settings.rotation)
        zoom = rng.uniform(1 - settings.scale, 1 + settings.scale)
        pixels = _turn(pixels, angle, zoom)
    cut = drawn_cut(settings, record, rng)
    height, width = record.crop or pixels.shape[:2]
    pixels = pixels[cut.top : cut.top + height, cut.left : cut.left + width]
    if cut.mirrored:
        pixels = _mirrored(pixels)
    if cut.upside_down:
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
    matrix = cv2.getRotationMatrix2D(((width - 1) / 2, (height - 1) / 2), angle, zoom)
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
