"""What a group norm multiplies each channel by and adds to it, from its statistics.

Instance norm is a group norm of one channel a group. Applying the two is element by element, so
that it joins what comes after it in one pass over memory. Numbers are read once: in one launch
where an image's groups are small, else in chunks that a second, small launch puts together, in a
fixed order. In plain Triton, of channels_last and contiguous tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from tessella.core.dtype import FLOATS
from tessella.core.integers import ceil_div, power_of_two, round_up
from tessella.device.launch import launch
from tessella.device.machine import multiprocessors
from tessella.device.overlap import overlapping
from tessella.kernels.catalog import Call, Config
from tessella.kernels.norm.group_device import Groups, group_factors_kernel, group_moments_kernel
from tessella.operations.problem import Problem

LARGEST_GROUP = 1024  # channels that a tile takes
WIDEST = 64  # channels of a tile whose groups are smaller
NARROW = 8  # the same where chunks are put together
FEW = 64  # tiles that one block reads after another before it is worth a second launch
MOST_CHUNKS = 2048
PARTS_TILE = 4096  # numbers of chunks that are put together at a time


def fits(problem: Problem) -> str | None:
    x = problem["input"]
    if x.dtype not in FLOATS:
        return f"no statistics of {x.dtype}"
    if x.format == "strided":
        return "needs a dense tensor"
    if 0 in x.shape:
        return "nothing to normalize"
    if x.shape[1] // problem.attrs["num_groups"] > LARGEST_GROUP:
        return f"at most {LARGEST_GROUP} channels a group"
    return None


def configs(problem: Problem) -> tuple[Config, ...]:
    """Elements of a tile, warps that take it, and into how many chunks pixels are cut."""
    _, _, pixels = _sizes(problem)
    found: list[Config] = []
    form = _form(problem)
    for elements, warps, resident in ((4096, 4, 4), (2048, 4, 8), (8192, 8, 4), (2048, 2, 12)):
        rows = max(1, min(elements // (form.GROUPS * form.PADDED), power_of_two(pixels)))
        blocks = problem["input"].shape[0] * ceil_div(form.ALL, form.GROUPS)
        tiles = ceil_div(pixels, rows)
        wanted = ceil_div(resident * multiprocessors(), blocks)
        chunks = max(1, min(wanted, tiles, MOST_CHUNKS))
        cuts = {_exact(pixels, rows, chunks): None} | ({1: None} if tiles <= FEW else {})
        found += [{"rows": rows, "warps": warps, "chunks": cut} for cut in cuts]
    return tuple(c for i, c in enumerate(found) if c not in found[:i])


def _exact(pixels: int, rows: int, chunks: int) -> int:
    """So many chunks of whole tiles that none is empty."""
    return ceil_div(pixels, round_up(ceil_div(pixels, chunks), rows))


def workspace_bytes(problem: Problem, **config: Any) -> int:
    """Mean and squares of each channel of each chunk."""
    chunks = (config or configs(problem)[0])["chunks"]
    images, channels, _ = _sizes(problem)
    return 0 if chunks == 1 else 2 * 4 * images * channels * chunks


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: Any) -> Call:
    tile = config or configs(problem)[0]
    images, _, pixels = _sizes(problem)
    form, chunks, rows = _form(problem), tile["chunks"], tile["rows"]
    per_chunk = round_up(ceil_div(pixels, chunks), rows)
    blocks = images * ceil_div(form.ALL, form.GROUPS)
    after = form._replace(GROUPS=min(form.GROUPS, max(1, NARROW // form.PADDED)))
    parts_rows = max(1, min(power_of_two(chunks), PARTS_TILE // (after.GROUPS * after.PADDED)))
    eps = float(problem.attrs["eps"])

    def run(
        *inputs: torch.Tensor, workspace: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        out = tuple(meta.empty(inputs[0].device) for meta in problem.outputs)
        x, weight, bias = (*problem.operands(constants, inputs), None, None)[:3]
        parts = None if workspace is None or chunks == 1 else workspace.view(torch.float32)
        launch(
            group_moments_kernel, (blocks * chunks,),
            x, parts, *out, weight, bias, pixels, per_chunk, eps,
            FORM=form, ROWS=rows, CHUNKS=chunks, num_warps=tile["warps"], **overlapping(),
        )  # fmt: skip
        if chunks > 1:
            launch(
                group_factors_kernel, (images * ceil_div(after.ALL, after.GROUPS),),
                parts, *out, weight, bias, pixels, per_chunk, eps,
                FORM=after, ROWS=parts_rows, CHUNKS=chunks, num_warps=4, **overlapping(),
            )  # fmt: skip
        return out

    return run


def _sizes(problem: Problem) -> tuple[int, int, int]:
    """Images, channels, and pixels of an image."""
    images, channels, *sides = problem["input"].shape
    return images, channels, math.prod(sides)


def _form(problem: Problem) -> Groups:
    _, channels, pixels = _sizes(problem)
    groups = problem.attrs["num_groups"]
    each = channels // groups
    padded = power_of_two(each)
    last = problem["input"].format == "channels_last"
    # contiguous: the pixels of a channel lie together, so that few channels make a tile
    together = max(1, WIDEST // padded) if last else 1
    return Groups(
        CHANNELS=each,
        PADDED=padded,
        GROUPS=min(together, power_of_two(groups)),
        ALL=groups,
        STRIDES=(channels * pixels, *((1, channels) if last else (pixels, 1))),
    )
