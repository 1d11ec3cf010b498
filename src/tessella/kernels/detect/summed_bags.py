"""``deformable_attention`` on a CPU: where its points lie by NumPy, and what they see as sums of
rows, which torch's bags of embeddings add up with vector instructions.

A head's pixel is a row of the value as it lies in memory; a point is four rows with a weight each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tessella.kernels.catalog import Call
from tessella.operations.problem import Problem

CORNERS = 4


def fits(problem: Problem) -> str | None:
    if problem.constant:
        return "takes no constants"
    if {m.dtype for m in (*problem.given, problem.output)} != {"float32"}:
        return "float32 alone"
    if problem.output.format != "contiguous":
        return "makes dense rows"
    if 0 in problem.output.shape:
        return "nothing to see"
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    images, pixels, channels = problem["value"].shape
    queries, heads = problem["boxes"].shape[1], problem.attrs["heads"]
    points, sizes = problem.attrs["points"], problem.attrs["sizes"]
    depth, total = channels // heads, sum(points)
    grid = (images, queries, heads, CORNERS, total)

    def spread_out(values: list[int]) -> npt.NDArray[Any]:
        """One value a level becomes one a point."""
        return np.repeat(values, points)

    sides_P2 = np.stack([spread_out(sizes[1::2]), spread_out(sizes[::2])], 1).astype(np.float32)
    last_P2, width_P = sides_P2 - 1, sides_P2[:, 0].astype(np.int32)
    starts = np.cumsum([0, *(h * w for h, w in zip(sizes[::2], sizes[1::2], strict=True))])
    share_P2 = (problem.attrs["spread"] / spread_out(list(points))[:, None]).astype(np.float32)
    share_P2 = share_P2 * sides_P2
    # the first row of each image's, head's and level's map
    first = (np.arange(images) * pixels)[:, None, None, None] + spread_out(starts[:-1].tolist())
    first = (first * heads + np.arange(heads)[:, None]).astype(np.int32)
    # of the run that is under way: not for two threads at once
    rows, weights = np.empty(grid, np.int32), np.empty(grid, np.float32)
    bags = torch.from_numpy(rows).view(-1, CORNERS * total)
    shares = torch.from_numpy(weights).view(-1, CORNERS * total)

    def run(
        value: torch.Tensor,
        boxes: torch.Tensor,
        offsets: torch.Tensor,
        scores: torch.Tensor,
        *,
        out: torch.Tensor,
    ) -> torch.Tensor:
        value, offsets = value.contiguous(), offsets.contiguous()
        box = boxes.numpy()[:, :, None, None]
        at = offsets.numpy().reshape(images, queries, heads, total, 2) * share_P2
        at *= box[..., 2:]
        at += box[..., :2] * sides_P2 - np.float32(0.5)
        # outside by more than a pixel nothing is seen; a number that is none lies there, too
        np.fmin(np.fmax(at, -1, out=at), sides_P2, out=at)
        low = np.floor(at)
        at -= low
        near, far = 1 - at, at
        near *= low >= 0
        near *= low <= last_P2
        far *= low < last_P2
        told = torch.softmax(scores.reshape(images, queries, heads, total), 3).numpy()
        x0, y0 = near[..., 0], near[..., 1] * told
        x1, y1 = far[..., 0], far[..., 1] * told
        for corner, (x, y) in enumerate(((x0, y0), (x1, y0), (x0, y1), (x1, y1))):
            np.multiply(x, y, out=weights[:, :, :, corner])
        _pixels(low, last_P2, width_P, rows)
        np.multiply(rows, heads, out=rows)
        np.add(rows, first[:, :, :, None], out=rows)
        summed = torch.nn.functional.embedding_bag(
            bags, value.view(-1, depth), per_sample_weights=shares, mode="sum"
        )
        return out.copy_(summed.view(out.shape))

    return run


def _pixels(
    low: npt.NDArray[Any], last_P2: npt.NDArray[Any], width_P: npt.NDArray[Any],
    out: npt.NDArray[np.int32],
) -> None:  # fmt: skip
    """The pixel of a map at each corner around some places, the upper left ones first."""
    # a corner outside has no weight, and any row will do
    after = np.minimum(low + 1, last_P2).astype(np.int32)
    before = np.minimum(np.maximum(low, 0), last_P2).astype(np.int32)
    top, bottom = (y[..., 1] * width_P for y in (before, after))
    for corner, (x, y) in enumerate(
        ((before, top), (after, top), (before, bottom), (after, bottom))
    ):
        np.add(x[..., 0], y, out=out[:, :, :, corner])
