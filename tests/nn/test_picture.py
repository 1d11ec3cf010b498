"""Tensors as pictures: where each value goes, and what is out of the ordinary."""

import numpy as np
import pytest
import torch
from PIL import Image

from tessella.core.errors import UsageError
from tessella.nn.picture import GAP, LEVELS, PALETTE, picture, write_png


@pytest.mark.parametrize(
    "shape",
    [
        (), (1,), (1000,), (4096 * 25,), (10, 500), (2, 2000), (1000, 2048), (3, 7, 9),
        (96, 55, 55), (2048, 7, 7), (512, 1, 1), (1, 700, 900), (20, 1, 5, 5), (64, 3, 7, 7),
        (96, 3, 11, 11), (512, 512, 3, 3), (256, 64, 1, 1), (8, 4, 3, 3, 3), (5000, 3, 3, 3),
        (1, 3000, 2), (2, 3, 600, 800),
    ],
)  # fmt: skip
def test_every_shape_fits(shape):
    pixels = picture(torch.randn(shape))
    assert pixels.dtype == np.uint8
    assert pixels.shape[2] == 3
    assert min(pixels.shape[:2]) >= 1
    assert max(pixels.shape[:2]) <= 512


def test_channels_are_tiles_with_gaps():
    maps = torch.zeros(4, 8, 8)
    maps[1] = 1.0  # first row, right
    maps[2, :, 4:] = 1.0  # second row, left, its right half
    pixels = picture(maps)
    side = (pixels.shape[0] - 3) // 2
    dark, bright = PALETTE[0], PALETTE[LEVELS - 1]
    assert pixels.shape[0] == pixels.shape[1] == 2 * side + 3
    assert (pixels[side : side + 3] == PALETTE[GAP]).all()
    assert (pixels[:, side : side + 3] == PALETTE[GAP]).all()
    assert (pixels[:side, :side] == dark).all()
    assert (pixels[:side, side + 3 :] == bright).all()
    assert (pixels[side + 3 :, : side // 2] == dark).all()
    assert (pixels[side + 3 :, side // 2 : side] == bright).all()


def test_kernels_over_three_channels_are_coloured():
    weights = torch.full((2, 3, 5, 5), -1.0)
    weights[0, 0] = 1.0  # red
    weights[1, 2] = 1.0  # blue
    pixels = picture(weights)
    colours = {tuple(int(v) for v in c) for c in pixels.reshape(-1, 3)}
    assert colours == {(255, 0, 0), (0, 0, 255), (128, 128, 128)}


def test_one_by_one_kernels_are_a_matrix_of_outputs_and_inputs():
    weights = torch.arange(6.0).view(2, 3, 1, 1).repeat(1, 2, 1, 1)
    np.testing.assert_array_equal(picture(weights), picture(weights[:, :, 0, 0]))


def test_outliers_do_not_hide_the_rest():
    values = torch.linspace(0, 1, 10_000).view(100, 100)
    values[0, 0] = 1e6
    pixels = picture(values)
    assert len({tuple(c) for c in pixels.reshape(-1, 3)}) > 100


def test_what_is_not_finite_is_seen():
    values = torch.randn(1, 16, 16)
    values[0, 3, 4], values[0, 5, 6] = torch.nan, torch.inf
    marked = (picture(values) == (255, 0, 255)).all(2)
    assert marked.mean() == 2 / 256
    assert (picture(torch.full((3, 3), torch.nan)) == (255, 0, 255)).all()


def test_large_maps_are_averaged():
    values = torch.zeros(1, 1024, 1024)
    values[:, ::2] = 1.0  # every second row: the mean is one half
    values[:, :, 512:] = 0.0
    values[:, :, 768:] = 1.0
    pixels = picture(values)
    assert (pixels[100:400, 50:200] == PALETTE[[126, 127]].mean(0).astype(int)).mean() > 0.3
    assert (pixels[100:400, 300:350] == PALETTE[0]).all()
    assert (pixels[100:400, 450:500] == PALETTE[LEVELS - 1]).all()


def test_nothing_has_no_picture():
    with pytest.raises(UsageError, match="empty tensor"):
        picture(torch.zeros(0, 3))


def test_kernels_over_one_channel_fill_a_square():
    pixels = picture(torch.randn(20, 1, 5, 5))
    assert 0.6 < pixels.shape[0] / pixels.shape[1] < 1.6


@pytest.mark.parametrize("shape", [(5, 8, 8), (4, 3, 5, 5)])
def test_the_file_shows_the_same_pixels(shape, tmp_path):
    values = torch.randn(shape)
    values.view(-1)[3] = torch.nan
    write_png(values, tmp_path / "picture.png")
    with Image.open(tmp_path / "picture.png") as image:
        shown = np.asarray(image.convert("RGB"))
    np.testing.assert_array_equal(shown, picture(values))
