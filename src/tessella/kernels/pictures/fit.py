"""From the planes of JPEG files to the pixels that a preprocessing record wants, on a GPU.

The stages ``decode`` and ``fit`` of ``core.preprocess`` after the entropy code and the cosine
transform, which nvJPEG does: chroma between its samples, colours, size. To the bit what libjpeg and
Pillow make, in two passes over the pixels.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tessella.core.integers import ceil_div, power_of_two
from tessella.core.jpeg import Frame
from tessella.core.preprocess import Preprocess, full_scale, placement
from tessella.device.launch import launch
from tessella.device.nvjpeg import Planes
from tessella.kernels.pictures.fit_device import colour_kernel, fit_kernel

BLOCK, _WARPS = 256, 2
_BITS = 22  # of Pillow's weights after the point
MOST_KEPT = 16.0  # times that a side shrinks, for which its weights are remembered
Taps = npt.NDArray[np.int32]


class Tables(NamedTuple):
    """What the kernels have to know of some pictures.

    Attributes:
        rows: int64 [N, 14], as ``fit_device`` reads them.
        taps: int32, of all pictures.
        pixels: of all pictures together.
        blocks: that the first kernel needs for the largest picture.
    """

    rows: np.ndarray[Any, np.dtype[np.int64]]
    taps: Taps
    pixels: int
    blocks: int


def tables(
    starts: np.ndarray[Any, np.dtype[np.int64]],
    pitches: np.ndarray[Any, np.dtype[np.int64]],
    frames: Sequence[Frame],
    record: Preprocess,
    *,
    cuts: bool = False,
) -> Tables:
    """The tables of pictures whose planes lie so (``device.nvjpeg.Planes``).

    Args:
        cuts: whether the record's crop is all that is made of them.
    """
    sides, taps = _sides(frames, record, record.crop if cuts else None)
    sizes = np.array(frames, np.int64)
    ends = np.cumsum(sizes[:, 0] * sizes[:, 1])
    firsts = np.concatenate([[0], ends[:-1]])[:, None]
    rows = np.concatenate([starts, pitches, firsts, sizes, sides], axis=1)
    blocks = int((sizes[:, 0] * -(-sizes[:, 1] // BLOCK)).max())
    return Tables(rows, taps, int(ends[-1]), blocks)


def fitted(
    planes: Planes, frames: Sequence[Frame], record: Preprocess, *, cuts: bool = False
) -> Tensor:
    """Pixels of the record's height × width, uint8 [N, H, W, C]; of 8 bits, grey or RGB.

    Args:
        cuts: make the record's crop, if it has one.
    """
    made = tables(planes.starts, planes.pitches, frames, record, cuts=cuts)
    count, device = len(frames), planes.memory.device
    there, weights = (_moved(torch.from_numpy(t), device) for t in (made.rows, made.taps))
    pixels = torch.empty(made.pixels, dtype=torch.int32, device=device)
    launch(
        colour_kernel, (made.blocks, count), planes.memory, there, pixels,
        LUMA=record.channels == 1, BLOCK=BLOCK, num_warps=_WARPS,
    )  # fmt: skip
    height, width = (cuts and record.crop) or (record.height, record.width)
    out = torch.empty((count, height, width, record.channels), dtype=torch.uint8, device=device)
    block = fit_block(width)
    launch(
        fit_kernel, (height * ceil_div(width, block), count),
        pixels, there, weights, out, height, width,
        CHANNELS=record.channels, GREY=(full_scale(record.depth) + 1) // 2,
        BLOCK=block, num_warps=_WARPS,
    )  # fmt: skip
    return out


def fit_block(width: int) -> int:
    """Places of a row that a block of ``fit_kernel`` makes."""
    return min(BLOCK, power_of_two(width))


def _moved(data: Tensor, device: torch.device) -> Tensor:
    return data.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else data


def _sides(
    frames: Sequence[Frame], record: Preprocess, crop: tuple[int, int] | None
) -> tuple[Any, Taps]:
    """How ``fit_kernel`` brings each picture to its size, int64 [N, 4]; and all taps.

    The four: where the taps of its columns and of its rows begin, and how many each place has.
    """
    ways: dict[tuple[int, int], tuple[int, ...]] = {}
    parts: list[Taps] = []
    end = 0
    for size in {frame[:2]: None for frame in frames}:
        across, down = _passes(*size, record)
        if crop is not None:
            top, left = (record.height - crop[0]) // 2, (record.width - crop[1]) // 2
            across, down = across[left : left + crop[1]], down[top : top + crop[0]]
        ways[size] = end, end + across.size, across.shape[1] - 1, down.shape[1] - 1
        parts += (across.reshape(-1), down.reshape(-1))
        end += across.size + down.size
    return np.array([ways[frame[:2]] for frame in frames], np.int64), np.concatenate(parts)


def _passes(height: int, width: int, record: Preprocess) -> tuple[Taps, Taps]:
    """The taps along a picture's rows, and then along its columns."""
    # 10 KB a size where sides shrink to half, 1 MB where 65,535 pixels come to 224: of sizes that a
    # stranger chooses, a thousand must not stay
    rare = max(height / record.height, width / record.width) > MOST_KEPT
    return (_kept_passes.__wrapped__ if rare else _kept_passes)(height, width, record)


@functools.lru_cache(maxsize=1024)
def _kept_passes(height: int, width: int, record: Preprocess) -> tuple[Taps, Taps]:
    place = placement(height, width, record)
    low, top, high, bottom = place.box
    return (
        taps(width, low, high, place.width, place.left, record.width),
        taps(height, top, bottom, place.height, place.top, record.height),
    )


def taps(size: int, low: float, high: float, shown: int, before: int, wanted: int) -> Taps:
    """Pillow's bilinear weights for one side, int32 [wanted, 1 + K]: first pixel, then K weights.

    Args:
        size: pixels of the picture.
        low, high: the part that is shown, in these pixels.
        shown, before, wanted: places that it gets, of padding before it, and in all; a place of
            padding has the first pixel −1.
    """
    # Pillow takes the part as float32; all else is float64
    begin, length = np.float32(low), np.float64(np.float32(min(high, size)) - np.float32(low))
    scale = length / shown
    stretch = max(scale, 1.0)
    centres = np.float64(begin) + (np.arange(shown) + 0.5) * scale
    first = np.maximum((centres - stretch + 0.5).astype(np.int64), 0)
    last = np.minimum((centres + stretch + 0.5).astype(np.int64), size)
    most = int((last - first).max())
    begins = np.minimum(first, size - most)  # so that all of them lie inside
    places = begins[:, None] + np.arange(most)
    distances = np.abs((places - centres[:, None] + 0.5) * (1.0 / stretch))
    within = (places >= first[:, None]) & (places < last[:, None]) & (distances < 1.0)
    weights = np.where(within, 1.0 - distances, 0.0)
    total = np.zeros(shown)
    for column in weights.T:  # in Pillow's order: a sum in pairs may round otherwise
        total += column
    weights /= total[:, None]
    made = np.zeros((wanted, 1 + weights.shape[1]), np.int32)
    made[:, 0] = -1
    made[before : before + shown, 0] = begins
    made[before : before + shown, 1:] = (weights * (1 << _BITS) + 0.5).astype(np.int32)
    return made
