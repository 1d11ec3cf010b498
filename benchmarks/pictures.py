"""Three sets of pictures for measuring trainings, drawn by rule: glyphs, textures and digits.

A set is a folder with one subfolder a class, the same bytes for the same seed and library versions.
Nothing is downloaded: the fonts are OpenCV's strokes and Pillow's own, the digits scikit-learn's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont
from sklearn.datasets import load_digits

from tessella.core.preprocess import encode
from tessella.data.importing import ImportSettings

Pixels = npt.NDArray[np.uint8]
Field = npt.NDArray[np.floating[Any]]  # a number a pixel
Random = np.random.Generator

SIDE = 64
GLYPHS = "ABEFGKNRSZbdpq234579"  # mirror images among them: b, d, p and q
GLYPH_NAMES = tuple(f"{ord(character):03d}" for character in GLYPHS)  # B and b differ on every disk
STROKES = (
    cv2.FONT_HERSHEY_SIMPLEX,
    cv2.FONT_HERSHEY_DUPLEX,
    cv2.FONT_HERSHEY_COMPLEX,
    cv2.FONT_HERSHEY_TRIPLEX,
)


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """A set: a function that writes pictures into a folder, their number, import settings."""

    write: Callable[[Path, int], None]
    count: int
    settings: ImportSettings


def glyph(label: int, random: Random) -> Pixels:
    """A coloured character of class ``label`` on a coloured, cluttered ground, SIDE×SIDE×3."""
    ground, ink = _two_colours(random)
    shade = random.uniform(-30, 30, 3) * np.linspace(-1, 1, SIDE)[:, None, None]
    picture = np.broadcast_to(ground + shade, (SIDE, SIDE, 3)).clip(0, 255).astype(np.uint8).copy()
    for _ in range(random.integers(0, 4)):
        _clutter(picture, random)
    mask = _turned(_character(GLYPHS[label], random), random) / np.float32(255)
    mixed = picture * (1 - mask[:, :, None]) + ink * mask[:, :, None]
    return (mixed + random.normal(0, 5, mixed.shape)).clip(0, 255).astype(np.uint8)


def _two_colours(random: Random) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Colours of ground and ink that differ by at least 90 grey levels in some channel."""
    while True:
        ground, ink = random.uniform(20, 235, (2, 3))
        if np.abs(ground - ink).max() > 90:
            return ground, ink


def _clutter(picture: Pixels, random: Random) -> None:
    """Draw a thin line or a small disc into the picture."""
    colour = random.integers(0, 256, 3).tolist()
    a, b = random.integers(0, SIDE, (2, 2)).tolist()
    if random.random() < 0.6:
        cv2.line(picture, a, b, colour, 1, cv2.LINE_AA)
    else:
        cv2.circle(picture, a, int(random.integers(2, 6)), colour, -1, cv2.LINE_AA)


def _character(character: str, random: Random) -> Pixels:
    """A white character on black, SIDE×SIDE, in a stroke font or Pillow's outline font."""
    mask = np.zeros((SIDE, SIDE), np.uint8)
    if random.random() < 0.7:
        font, scale = int(random.choice(STROKES)), random.uniform(1.3, 1.85)
        thick = int(random.integers(2, 6))
        (width, height), _ = cv2.getTextSize(character, font, scale, thick)
        corner = (SIDE - width) // 2, (SIDE + height) // 2
        cv2.putText(mask, character, corner, font, scale, 255, thick, cv2.LINE_AA)
        return mask
    image = Image.fromarray(mask)
    outlines = ImageFont.load_default(int(random.integers(39, 57)))
    ImageDraw.Draw(image).text((SIDE / 2, SIDE / 2), character, 255, outlines, anchor="mm")
    return np.asarray(image)


def _turned(mask: Pixels, random: Random) -> Pixels:
    """The mask rotated by at most 10°, sheared, and shifted by at most a fourteenth."""
    angle, shear = np.deg2rad(random.uniform(-10, 10)), random.uniform(-0.12, 0.12)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    turn = turn @ np.array([[1, shear], [0, 1]])
    middle = np.full(2, SIDE / 2)
    shift = middle - turn @ middle + random.uniform(-SIDE / 14, SIDE / 14, 2)
    turned: Pixels = cv2.warpAffine(mask, np.column_stack([turn, shift]), (SIDE, SIDE))
    return turned


TEXTURES = (
    "grating fine", "grating coarse", "grating crossed", "checks", "rings", "dots", "bricks",
    "cells", "noise white", "noise pink", "noise brown", "patches",
)  # fmt: skip


def texture(label: int, random: Random) -> Pixels:
    """A pattern of class ``label`` in two colours, turned, scaled and noisy, SIDE×SIDE×3."""
    angle, phase = random.uniform(0, np.pi), random.uniform(0, SIDE, 2)
    y, x = np.mgrid[:SIDE, :SIDE].astype(np.float64)
    u = x * np.cos(angle) + y * np.sin(angle) + phase[0]
    v = y * np.cos(angle) - x * np.sin(angle) + phase[1]
    value: Field = _pattern(TEXTURES[label], u, v, random)
    low, high = np.percentile(value, [2, 98])
    value = ((value - low) / (high - low + 1e-9)).clip(0, 1)[:, :, None]
    ground, ink = random.uniform(30, 225, (2, 3))
    mixed: Field = ground * (1 - value) + ink * value
    return (mixed + random.normal(0, 18, mixed.shape)).clip(0, 255).astype(np.uint8)


def _pattern(name: str, u: Field, v: Field, random: Random) -> Field:
    period = random.uniform(6, 10)
    value: Field
    if name.startswith("grating"):
        period *= 2 if name == "grating coarse" else 1
        value = np.sin(2 * np.pi * u / period)
        if name == "grating crossed":
            value = value + np.sin(2 * np.pi * v / period)
    elif name == "checks":
        value = ((u // period + v // period) % 2).astype(np.float64)
    elif name == "rings":
        value = np.sin(2 * np.pi * np.hypot(u - u.mean(), v - v.mean()) / period)
    elif name == "dots":
        value = (np.hypot(u % period - period / 2, v % period - period / 2) < period / 4) * 1.0
    elif name == "bricks":
        row = v // period
        value = ((v % period < 1.5) | ((u + row % 2 * period) % (2 * period) < 1.5)) * 1.0
    elif name in ("cells", "patches"):
        seeds = random.uniform(0, SIDE, (random.integers(20, 50), 2))
        y, x = np.mgrid[:SIDE, :SIDE]
        distance = np.hypot(x[..., None] - seeds[:, 0], y[..., None] - seeds[:, 1])
        if name == "cells":
            value = np.sort(distance, -1)[..., 0]
        else:
            value = random.uniform(0, 1, len(seeds))[distance.argmin(-1)]
    else:
        slope = {"noise white": 0.0, "noise pink": 1.0, "noise brown": 2.0}[name]
        frequency = np.hypot(*np.meshgrid(np.fft.fftfreq(SIDE), np.fft.fftfreq(SIDE)))
        spectrum = np.fft.fft2(random.normal(size=(SIDE, SIDE)))
        value = np.fft.ifft2(spectrum / np.maximum(frequency, 1 / SIDE) ** slope).real
    return value


def write(
    folder: Path,
    draw: Callable[[int, Random], Pixels],
    names: tuple[str, ...],
    count: int,
    seed: int = 0,
) -> None:
    """``count`` pictures, the classes in turn, as PNGs in one subfolder a class."""
    for index in range(count):
        label = index % len(names)
        path = folder / names[label] / f"{index:05d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(draw(label, np.random.default_rng([seed, index]))))


def write_digits(folder: Path, count: int) -> None:
    """The first ``count`` of scikit-learn's 1,797 handwritten digits, 8×8 in 17 greys."""
    digits = load_digits()
    for index, label in enumerate(digits.target[:count]):
        path = folder / str(label) / f"{index:05d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.rint(digits.images[index] * (255 / 16)).astype(np.uint8)
        path.write_bytes(encode(pixels[:, :, None]))


SETS = {
    "glyphs": Pictures(
        write=lambda folder, count: write(folder, glyph, GLYPH_NAMES, count),
        count=1213,
        settings=ImportSettings(size=SIDE, crop=56, holdout=0.2),
    ),
    "textures": Pictures(
        write=lambda folder, count: write(folder, texture, TEXTURES, count),
        count=1200,
        settings=ImportSettings(size=SIDE, crop=56, holdout=0.2),
    ),
    "digits": Pictures(  # a ConvNeXt halves its input five times: 32 is the least that it takes
        write=write_digits,
        count=1797,
        settings=ImportSettings(size=36, crop=32, channels=1, holdout=0.2),
    ),
}
