"""Problems of deformable attention, and what their results are by loops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta

SPREAD = 0.5


def asked(
    *,
    images: int,
    queries: int,
    heads: int,
    depth: int,
    sizes: tuple[int, ...],
    points: tuple[int, ...],
    dtype: str = "float32",
    replaced: Mapping[int, tuple[int, ...]] | None = None,
    attrs: Mapping[str, Any] | None = None,
) -> Problem:
    """A problem, of which some operands may have other shapes, and some attributes other values."""
    pixels = sum(h * w for h, w in zip(sizes[::2], sizes[1::2], strict=True))
    each, channels = heads * sum(points), heads * depth
    shapes = [(images, pixels, channels), (images, queries, 4),
              (images, queries, 2 * each), (images, queries, each)]  # fmt: skip
    shapes = [(replaced or {}).get(i, shape) for i, shape in enumerate(shapes)]
    return Problem(
        op="deformable_attention",
        inputs=tuple(TensorMeta(shape=shape, dtype=dtype) for shape in shapes),
        outputs=(TensorMeta(shape=(images, queries, channels), dtype=dtype),),
        attrs={
            "heads": heads, "sizes": sizes, "points": points, "spread": SPREAD, **(attrs or {})
        },
    )  # fmt: skip


def drawn(problem: Problem, device: str = "cpu") -> list[torch.Tensor]:
    """Numbers for it: boxes in the picture, over its edge and outside."""
    generator = torch.Generator().manual_seed(5)
    made = [
        torch.randn(meta.shape, generator=generator) for meta in problem.inputs if meta is not None
    ]
    made[1] = torch.rand(made[1].shape, generator=generator) * 1.4 - 0.2
    made[1][..., 2:] = made[1][..., 2:].abs()
    made[2] *= 2
    return [tensor.to(device, getattr(torch, problem.output.dtype)) for tensor in made]


def by_loops(
    tensors: Sequence[np.ndarray[Any, Any]], attrs: Mapping[str, Any]
) -> np.ndarray[Any, Any]:
    """One point after another, as the pages of a book would have it."""
    value, boxes, offsets, scores = tensors
    heads, points = attrs["heads"], attrs["points"]
    sizes = list(zip(attrs["sizes"][::2], attrs["sizes"][1::2], strict=True))
    images, queries, _ = boxes.shape
    depth, total = value.shape[2] // heads, sum(points)
    out = np.zeros((images, queries, heads, depth))
    for image, query, head in np.ndindex(images, queries, heads):
        x, y, wide, tall = boxes[image, query]
        told = scores[image, query].reshape(heads, total)[head]
        weights = np.exp(told - told.max()) / np.exp(told - told.max()).sum()
        moves = offsets[image, query].reshape(heads, total, 2)[head]
        point = start = 0
        for (height, width), count in zip(sizes, points, strict=True):
            pixels = value[image, start : start + height * width].reshape(
                height, width, heads, depth
            )
            for _ in range(count):
                at_x = (x + moves[point, 0] / count * wide * SPREAD) * width - 0.5
                at_y = (y + moves[point, 1] / count * tall * SPREAD) * height - 0.5
                for row in (int(np.floor(at_y)), int(np.floor(at_y)) + 1):
                    for column in (int(np.floor(at_x)), int(np.floor(at_x)) + 1):
                        if 0 <= row < height and 0 <= column < width:
                            near = (1 - abs(at_x - column)) * (1 - abs(at_y - row))
                            out[image, query, head] += (
                                weights[point] * near * pixels[row, column, head]
                            )
                point += 1
            start += height * width
    return out.reshape(images, queries, heads * depth)
