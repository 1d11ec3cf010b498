"""``nms`` on a CPU by NumPy: the surest boxes a block at a time, until enough are taken.

A block is compared with what was taken before, then with itself. torch's own form goes through all
boxes, also where the hundred surest are wanted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tessella.kernels.catalog import Call
from tessella.operations.problem import Problem

BLOCK = 128  # boxes that are compared with each other at once

Floats = npt.NDArray[np.float32]
Places = npt.NDArray[np.intp]


def fits(problem: Problem) -> str | None:
    if {problem["boxes"].dtype, problem["scores"].dtype} != {"float32"} or problem.constant:
        return "float32 alone"
    if {m.format for m in (*problem.given, problem.output)} != {"contiguous"}:
        return "needs dense rows"
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    least = problem.attrs["score_threshold"]
    above = np.float32(-np.inf if least is None else least)
    limit, most = np.float32(problem.attrs["iou_threshold"]), problem.attrs["most"]

    def surest(boxes_P4: Floats, scores_P: Floats, groups_P: Any) -> Places:
        heights = np.where(np.isnan(scores_P), np.float32(np.inf), scores_P)
        found = (heights > above).nonzero()[0]
        order = found[np.argsort(-heights[found], kind="stable")]
        # the sides, the area and the group of each, along the rows
        sides = boxes_P4[order].T
        area = (sides[2] - sides[0]) * (sides[3] - sides[1])
        marks = None if groups_P is None else groups_P[order]
        taken = np.empty(0, np.intp)  # of the order
        for begin in range(0, len(order), BLOCK):
            block = np.arange(begin, min(begin + BLOCK, len(order)))
            if len(taken):
                block = block[~_over(sides, area, marks, block, taken, limit).any(1)]
            over, alive = _over(sides, area, marks, block, block, limit), np.ones(len(block), bool)
            for row in range(len(block)):
                if alive[row]:
                    alive[row + 1 :] &= ~over[row, row + 1 :]
            taken = np.concatenate([taken, block[alive]])
            if len(taken) >= most:
                break
        return order[taken[:most]]

    def run(
        boxes: torch.Tensor,
        scores: torch.Tensor,
        groups: torch.Tensor | None = None,
        *,
        out: torch.Tensor,
    ) -> torch.Tensor:
        marks = [None] * len(boxes) if groups is None else list(groups.numpy())
        into = out.numpy()
        into.fill(-1)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            for image in zip(boxes.numpy(), scores.numpy(), marks, into, strict=True):
                boxes_P4, scores_KP, groups_P, into_KM = image
                for scores_P, into_M in zip(scores_KP, into_KM, strict=True):
                    found = surest(boxes_P4, scores_P, groups_P)
                    into_M[: len(found)] = found
        return out

    return run


def _over(
    sides_4P: Floats, area_P: Floats, groups_P: Any, one: Places, other: Places, limit: np.float32
) -> npt.NDArray[np.bool_]:
    """Whether one box and another are the same thing, of each pair of these two lists."""
    x0, y0, x1, y1 = sides_4P[:, one, None]
    left, top, right, bottom = sides_4P[:, other]
    common = np.maximum(np.minimum(x1, right) - np.maximum(x0, left), np.float32(0))
    common *= np.maximum(np.minimum(y1, bottom) - np.maximum(y0, top), np.float32(0))
    over = common / (area_P[one, None] + area_P[other] - common) > limit
    if groups_P is not None:
        over &= groups_P[one, None] == groups_P[other]
    return np.asarray(over)
