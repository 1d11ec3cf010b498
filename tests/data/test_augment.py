"""Augmentation against torchvision and statistics, for any depth and number of channels."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import kstest
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as tv

from tessella.artifacts.run import Augment
from tessella.core.preprocess import Pixels, Preprocess
from tessella.data.augment import (
    IMAGE_STREAM,
    ORDER_STREAM,
    augmented,
    drawn_moves,
    generator,
    normal,
    words_of,
)
from tessella.data.cuts import Cuts, cuts_of
from tessella.tasks import still


def changed(*arguments):
    """The pixels alone."""
    return augmented(*arguments)[0]


def smooth(channels: int, dtype: type = np.uint8, size: int = 32) -> Pixels:
    y, x = np.mgrid[:size, :size] / size
    planes = [0.5 + 0.4 * np.sin(3 * x + c) * np.cos(2 * y - c) for c in range(channels)]
    return (np.stack(planes, axis=2) * np.iinfo(dtype).max).astype(dtype)


def record(channels: int, dtype: type = np.uint8, size: int = 32) -> Preprocess:
    return Preprocess(
        height=size, width=size, channels=channels, depth=8 * np.dtype(dtype).itemsize
    )


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5, 9])
def test_any_number_of_channels_and_each_alike(channels: int, dtype: type) -> None:
    pixels = smooth(channels, dtype)
    for settings in (
        Augment(rotation=40, scale=0.3),
        Augment(flip=True, flip_vertical=True),
        Augment(noise=0.1),
        Augment(color=0.5),
    ):
        out = changed(pixels, settings, record(channels, dtype), generator(1, 2, IMAGE_STREAM, 3))
        assert out.shape == pixels.shape
        assert out.dtype == dtype
    turned = changed(
        pixels, Augment(rotation=40, scale=0.3), record(channels, dtype), generator(1, 2, 1, 3)
    )
    for c in range(channels):  # together or alone: one geometry for all channels
        alone = changed(
            pixels[:, :, c : c + 1],
            Augment(rotation=40, scale=0.3),
            record(1, dtype),
            generator(1, 2, 1, 3),
        )
        assert (
            np.abs(alone[:, :, 0].astype(int) - turned[:, :, c]).max() <= np.iinfo(dtype).max // 200
        )


def test_rotation_and_zoom_are_those_of_torchvision() -> None:
    pixels = smooth(3, size=48)
    settings = Augment(rotation=45, scale=0.2)
    for index in range(10):
        rng = generator(0, 0, IMAGE_STREAM, index)
        angle, zoom = rng.uniform(-45, 45), rng.uniform(0.8, 1.2)
        got = changed(pixels, settings, record(3, size=48), generator(0, 0, IMAGE_STREAM, index))
        expected = tv.affine(
            torch.from_numpy(pixels).permute(2, 0, 1).double(),
            angle=-angle,  # torchvision turns clockwise
            translate=[0, 0],
            scale=zoom,
            shear=[0, 0],
            interpolation=InterpolationMode.BILINEAR,
        ).permute(1, 2, 0)
        middle = slice(17, 31)  # away from the border, which each fills in its own way
        difference = got[middle, middle].astype(float) - expected[middle, middle].numpy()
        assert np.abs(difference).max() < 3


def test_noise_has_the_asked_deviation() -> None:
    for dtype in (np.uint8, np.uint16):
        full = np.iinfo(dtype).max
        grey = np.full((200, 200, 3), full // 2, dtype)
        out = changed(grey, Augment(noise=0.05), record(3, dtype, 200), generator(0, 0, 1, 0))
        difference = (out.astype(float) - full // 2) / full
        assert difference.std() == pytest.approx(0.05, rel=0.02)
        assert abs(difference.mean()) < 1e-3


def test_color_keeps_black_in_brightness_and_grey_without_hue() -> None:
    """A grey picture has no saturation to change: it stays grey."""
    grey = np.repeat(smooth(1), 3, axis=2)
    seen = set()
    for index in range(20):
        out = changed(grey, Augment(color=0.4), record(3), generator(0, 0, 1, index)).astype(int)
        assert np.abs(out - out[:, :, :1]).max() <= 1
        seen.add(round(float(out.mean())))
    assert len(seen) > 10
    assert 0.5 * grey.mean() < min(seen) < grey.mean() < max(seen) < 1.5 * grey.mean()


def test_noise_is_of_the_published_generator() -> None:
    """Random123's known answers for Philox4x32-10; and no more than chance from a normal one."""
    ones = 2**64 - 1
    assert words_of(0, 1)[:, 0].tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert len({tuple(words.tolist()) for words in words_of(ones, 500).T}) == 500
    made = normal(12345, 200_001)
    assert kstest(made, "norm").pvalue > 0.001
    assert np.abs(np.corrcoef(made[:200_000].reshape(-1, 4).T) - np.eye(4)).max() < 0.02
    assert not np.array_equal(made, normal(12346, 200_001))


def test_hue_is_that_of_torchvision() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    settings = Augment(hue=0.5)
    for index in range(8):
        made = changed(pixels, settings, record(3), generator(0, 0, IMAGE_STREAM, index))
        hue = generator(0, 0, IMAGE_STREAM, index).uniform(-0.5, 0.5)
        wanted = tv.adjust_hue(torch.from_numpy(pixels).permute(2, 0, 1).float() / 255, hue) * 255
        assert np.abs(made - wanted.permute(1, 2, 0).numpy()).max() < 0.51
    grey = smooth(1)
    assert np.array_equal(changed(grey, settings, record(1), generator(0, 0, 1, 0)), grey)


def test_values_are_clipped_not_wrapped() -> None:
    white = np.full((64, 64, 3), 255, np.uint8)
    out = changed(white, Augment(noise=0.5), record(3, size=64), generator(0, 0, 1, 0))
    assert (out == 255).mean() == pytest.approx(0.5, abs=0.05)


def test_nothing_on_changes_nothing() -> None:
    pixels = smooth(3)
    assert np.array_equal(changed(pixels, Augment(), record(3), generator(0, 0, 1, 0)), pixels)


def test_random_streams_do_not_overlap() -> None:
    keys = [
        (s, e, k, i)
        for s in (0, 1)
        for e in (0, 1)
        for k in (ORDER_STREAM, IMAGE_STREAM)
        for i in (0, 1)
    ]
    drawn = [generator(*key).integers(2**63, size=64).tolist() for key in keys]
    assert len({value for values in drawn for value in values}) == 64 * len(keys)
    assert generator(-1, 0, 0).random() == generator(2**64 - 1, 0, 0).random()


@pytest.mark.parametrize("crop", [None, (48, 40), (64, 40), (48, 64)], ids=str)
def test_cuts_of_many_are_those_that_each_draws_alone(crop: tuple[int, int] | None) -> None:
    shown, indices = record(3, size=64), np.array([0, 1, 5, 2**20, 3, 3, *range(100, 200)])
    shown = replace(shown, crop=crop)
    for flip, below in itertools.product([False, True], repeat=2):
        settings = Augment(flip=flip, flip_vertical=below)
        made = Cuts(cuts_of(settings, shown, (3, 11), indices), still(shown))
        rngs = (generator(3, 11, IMAGE_STREAM, index) for index in indices.tolist())
        assert list(made) == [drawn_moves(settings, shown, rng) for rng in rngs]
