"""Pictures from planes to pixels: what threads of machine code take in turn."""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np
import numpy.typing as npt
import torch

from tessella.device.x86 import code
from tessella.device.x86.code import MAX_BYTES
from tessella.operations.problem import Problem

BLOCK_PIXELS = 2**12  # that one thread takes at a time
ROW = 3  # numbers of an item: where its pixels and its results begin, how many vectors it has


def refusal(problem: Problem, lanes: int, channels: Collection[int]) -> str | None:
    """Why the problem does not move pictures of so many channels, or None."""
    x, y = problem["input"], problem.output
    if len(x.shape) != 4 or x.shape[1] not in channels:
        return f"pictures of {', '.join(map(str, channels))} channels"
    if (x.format, y.format) != ("contiguous", "channels_last"):
        return "from planes to channels_last"
    if 0 in x.shape:
        return "nothing to move"
    if math.prod(x.shape[2:]) < lanes or math.prod(x.shape) > MAX_BYTES // x.itemsize:
        return f"{lanes} pixels at least, and distances have 32 bits"
    return None


def items(problem: Problem, lanes: int) -> npt.NDArray[np.int64]:
    """Some pixels of a picture each, in vectors; all are inside of the two tensors."""
    x, y = problem["input"], problem.output
    channels, pixels = x.shape[1], math.prod(x.shape[2:])
    first = np.arange(0, pixels // lanes * lanes, BLOCK_PIXELS)
    times = np.minimum(BLOCK_PIXELS, pixels - first) // lanes
    if pixels % lanes:  # the last ones begin earlier: some are made twice
        first, times = np.append(first, pixels - lanes), np.append(times, 1)
    image = np.arange(x.shape[0])[:, None] * channels * pixels
    begins = (x.itemsize * (image + first), y.itemsize * (image + channels * first))
    made = np.stack((*begins, times + 0 * image), -1).reshape(-1, ROW)
    reads, writes, count = torch.from_numpy(made).T
    planes = x.itemsize * (channels - 1) * pixels
    code.require_inside("image", reads, planes + x.itemsize * lanes * count, x.extent)
    code.require_inside("result", writes, y.itemsize * channels * lanes * count, y.extent)
    return made
