"""JPEG files by OpenCV: the pixels of the one reader, and nothing of what that refuses."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

from tessella.core.errors import DataError
from tessella.core.pictures import read_pixels
from tessella.data.quick_jpeg import QuickJpeg

MOST = 1 << 20


@pytest.fixture
def quick() -> Iterator[QuickJpeg]:
    """It takes standard error, which is given back."""
    kept = os.dup(2)
    yield QuickJpeg()
    os.dup2(kept, 2)
    os.close(kept)


def jpeg(mode: str = "RGB", **settings: Any) -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (45, 71, 3), np.uint8)
    image = Image.fromarray(cv2.GaussianBlur(noise, (0, 0), 2)).convert(mode)
    out = io.BytesIO()
    image.save(out, "JPEG", **settings)
    return out.getvalue()


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[274] = orientation
    return exif


SOUND = {
    "4:2:0": jpeg(quality=90),
    "4:4:4": jpeg(subsampling=0),
    "4:2:2": jpeg(subsampling=1, quality=30),
    "progressive": jpeg(progressive=True),
    "restarts": jpeg(restart_marker_rows=1),
    "RGB inside": jpeg(keep_rgb=True),
    "grey": jpeg("L"),
    **{f"turned {n}": jpeg(exif=turned(n)) for n in range(1, 9)},
}


@pytest.mark.parametrize("name", SOUND)
def test_the_pixels_are_those_of_the_one_reader(name: str, quick: QuickJpeg) -> None:
    pixels = quick(SOUND[name], MOST)
    assert pixels is not None
    assert np.array_equal(pixels, read_pixels(SOUND[name]))
    assert quick(SOUND[name], 45 * 71 - 1) is None


def test_what_is_damaged_or_of_another_kind_is_left_to_the_one_reader(quick: QuickJpeg) -> None:
    whole, random = SOUND["4:2:0"], np.random.default_rng(1)
    assert quick(jpeg("CMYK"), MOST) is None
    assert quick(b"no picture", MOST) is None
    refused = taken = 0
    for _ in range(200):
        damaged = bytearray(whole[: random.integers(200, len(whole) + 1)])
        for place in random.integers(160, len(damaged), 2):
            damaged[place] = random.integers(256)
        pixels = quick(bytes(damaged), MOST)
        try:
            expected = read_pixels(bytes(damaged), most_pixels=MOST)
        except DataError:
            refused, taken = refused + 1, taken + (pixels is not None)
        else:
            assert pixels is None or np.array_equal(pixels, expected)
    assert refused > 60
    assert taken < 4  # libjpeg ended in the midst of it, and OpenCV kept that to itself
    assert quick(whole, MOST) is not None  # what was said of others is forgotten
