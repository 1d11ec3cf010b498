"""Pictures of tensors: heat maps with a tile for each channel, kernel or matrix."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from tessella.core.errors import UsageError

MAX_PX = 512
SMALLEST_TILE_PX = 4  # of maps that are shrunk; a smaller kernel keeps its own size
FEW_TILES = 16  # up to so many in a row, the gaps between them are wider

# From dark violet over red and orange to pale yellow, evenly rising in lightness. The last two
# colours are no levels: the gaps, visible on light and on dark pages, and what is not finite.
_ANCHORS = ((13, 8, 35), (84, 18, 104), (182, 47, 93), (240, 124, 40), (252, 252, 190))
LEVELS = 254
GAP, NOT_FINITE = LEVELS, LEVELS + 1
PALETTE: npt.NDArray[np.uint8] = np.concatenate(
    [
        np.stack(
            [
                np.interp(np.linspace(0, len(_ANCHORS) - 1, LEVELS), range(len(_ANCHORS)), channel)
                for channel in zip(*_ANCHORS, strict=True)
            ],
            axis=1,
        ),
        [(128, 128, 128), (255, 0, 255)],
    ]
).astype(np.uint8)


def picture(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """A tensor as RGB pixels ``[height, width, 3]``, at most 512×512.

    The 1st percentile of the values is darkest, the 99th brightest; NaN and infinite values are
    magenta. Tiles at the end that do not fit are left out.

    Args:
        tensor: ``[O, 3, kh, kw]`` weights become O tiles in colour; ``[O, I, kh, kw]`` a grid of
            O rows and I columns (a matrix if kernels are 1×1); ``[C, H, W]`` C tiles; ``[H, W]``
            one tile; ``[N]`` a square of N pixels. Further leading dimensions are tiles too.
    """
    canvas = _draw(tensor)
    return canvas if canvas.ndim == 3 else PALETTE[canvas]


def write_png(tensor: Tensor, path: Path) -> None:
    """Write ``picture`` as a PNG.

    A heat map is stored with a palette: half the bytes of RGB, and for ResNet-50 0.7 s instead of
    10 s.
    """
    canvas = _draw(tensor)
    image = Image.fromarray(canvas)
    if canvas.ndim == 2:
        image.putpalette(PALETTE.tobytes())
    image.save(path, compress_level=3)


def _draw(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """The picture as indices into the palette ``[H, W]``, or in colour ``[H, W, 3]``."""
    if tensor.numel() == 0:
        raise UsageError("an empty tensor has no picture", seen=list(tensor.shape))
    values = tensor.detach().float().cpu()
    tiles_THWC, columns = _tiles(torch.where(values.isfinite(), values, torch.nan))
    rows = math.ceil(len(tiles_THWC) / columns)
    gap_px = 3 if max(rows, columns) <= FEW_TILES else 1
    tiles_THWC, factor = _fitted(tiles_THWC, rows, columns, gap_px)
    coloured = _colour(tiles_THWC.numpy())  # before they are enlarged: the same levels, less work
    return _canvas(coloured.repeat(factor, 1).repeat(factor, 2), columns, gap_px)


def _tiles(values: Tensor) -> tuple[Tensor, int]:
    """The tiles ``[T, H, W, 1 or 3]`` that fit, and how many of them make a row."""
    if values.ndim <= 1:
        side = math.ceil(math.sqrt(values.numel()))
        padding = values.new_full((side * side - values.numel(),), float(values.nanmean()))
        values = torch.cat([values.reshape(-1), padding]).view(side, side)
    if values.ndim == 4 and values.shape[1] == 3:
        return _arranged(values.permute(0, 2, 3, 1))
    if values.ndim >= 3 and values.shape[-2:] == (1, 1):
        values = values.flatten(1) if values.ndim > 3 else values.reshape(1, -1)
    if values.ndim == 4 and values.shape[1] > 1:
        height, width = values.shape[2:]
        values = values[: _most(height), : _most(width)]
        return values.reshape(-1, height, width, 1), values.shape[1]
    return _arranged(values.reshape(-1, *values.shape[-2:], 1))


def _arranged(tiles_THWC: Tensor) -> tuple[Tensor, int]:
    """The tiles that fit, and the length of a row for which the picture is nearly square."""
    count, height, width = tiles_THWC.shape[:3]
    columns = round(math.sqrt(count * height / width)) or 1
    columns = min(columns, count, _most(width))
    rows = min(math.ceil(count / columns), _most(height))
    return tiles_THWC[: rows * columns], columns


def _most(side: int) -> int:
    """How many tiles with this side fit beside each other."""
    return (MAX_PX + 1) // (min(side, SMALLEST_TILE_PX) + 1)


def _fitted(tiles_THWC: Tensor, rows: int, columns: int, gap_px: int) -> tuple[Tensor, int]:
    """The tiles, averaged down if they are large, and the whole factor that enlarges small ones."""
    height, width = tiles_THWC.shape[1:3]
    room_h, room_w = ((MAX_PX + gap_px) // n - gap_px for n in (rows, columns))
    scale = min(room_h / height, room_w / width)
    if scale >= 1:
        return tiles_THWC, min(int(scale), 32)
    size = (max(1, min(room_h, int(height * scale))), max(1, min(room_w, int(width * scale))))
    shrunk = F.interpolate(tiles_THWC.permute(0, 3, 1, 2), size, mode="area")
    return shrunk.permute(0, 2, 3, 1), 1


def _colour(tiles_THWC: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Values as indices into the palette ``[T, H, W]``, or as colours ``[T, H, W, 3]``."""
    finite = np.isfinite(tiles_THWC)
    low, high = np.percentile(tiles_THWC[finite], (1, 99)) if finite.any() else (0.0, 0.0)
    if high > low:
        level = np.clip((np.where(finite, tiles_THWC, low) - low) / (high - low), 0, 1)
    else:
        level = np.full_like(tiles_THWC, 0.5)
    if tiles_THWC.shape[3] == 3:
        pixels = np.round(level * 255).astype(np.uint8)
        pixels[~finite.all(3)] = PALETTE[NOT_FINITE]
        return pixels
    index = np.round(level[..., 0] * (LEVELS - 1)).astype(np.uint8)
    index[~finite[..., 0]] = NOT_FINITE
    return index


def _canvas(tiles: npt.NDArray[np.uint8], columns: int, gap_px: int) -> npt.NDArray[np.uint8]:
    count, height, width = tiles.shape[:3]
    rows = math.ceil(count / columns)
    step_h, step_w = height + gap_px, width + gap_px
    shape = (rows * step_h - gap_px, columns * step_w - gap_px)
    if tiles.ndim == 4:
        canvas = np.full((*shape, 3), PALETTE[GAP], np.uint8)
    else:
        canvas = np.full(shape, GAP, np.uint8)
    for index in range(count):
        top, left = (index // columns) * step_h, (index % columns) * step_w
        canvas[top : top + height, left : left + width] = tiles[index]
    return canvas
