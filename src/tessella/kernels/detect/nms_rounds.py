"""``nms`` on a GPU: one block for a class of an image, which holds all scores in registers.

Each round takes the surest box that is left and suppresses those like it: nothing is sorted. In
plain Triton; all comparisons are in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from tessella.core.dtype import FLOATS
from tessella.device.launch import launch
from tessella.device.overlap import await_earlier, overlapping
from tessella.kernels.catalog import Call, Config
from tessella.operations.problem import Problem

MOST_BOXES = 8192  # 8 a thread: 1,024 threads have 64 registers each
MOST_ROUNDS = 1024
NONE = float("-inf")


@triton.jit
def rounds_kernel(
    boxes,
    scores,
    groups,
    out,
    places,
    classes,
    least,
    limit,
    MOST: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    await_earlier(OVERLAP)
    kind, image = tl.program_id(0), tl.program_id(1)
    lanes = tl.arange(0, BLOCK)
    known = lanes < places
    first = image * places
    row = image * classes + kind

    corner = boxes + (first + lanes) * 4
    score = tl.load(scores + row * places + lanes, mask=known, other=0).to(tl.float32)
    score = tl.where(score == score, score, float("inf"))
    score = tl.where(known & (score > least), score, float("-inf"))

    for turn in range(MOST):  # boxes come from the cache: they would not fit beside their scores
        best, place = tl.max(score, 0, return_indices=True)  # the first of equal ones
        one = boxes + (first + place) * 4
        left, top = tl.load(one).to(tl.float32), tl.load(one + 1).to(tl.float32)
        right, bottom = tl.load(one + 2).to(tl.float32), tl.load(one + 3).to(tl.float32)
        x0 = tl.load(corner, mask=known, other=0).to(tl.float32)
        y0 = tl.load(corner + 1, mask=known, other=0).to(tl.float32)
        x1 = tl.load(corner + 2, mask=known, other=0).to(tl.float32)
        y1 = tl.load(corner + 3, mask=known, other=0).to(tl.float32)
        across = tl.maximum(tl.minimum(right, x1) - tl.maximum(left, x0), 0)
        along = tl.maximum(tl.minimum(bottom, y1) - tl.maximum(top, y0), 0)
        common = across * along
        union = (right - left) * (bottom - top) + (x1 - x0) * (y1 - y0) - common
        gone = tl.div_rn(common, union) > limit
        if GROUPED:
            group = tl.load(groups + first + lanes, mask=known, other=0)
            gone = gone & (group == tl.load(groups + first + place))
        score = tl.where(gone | (lanes == place), float("-inf"), score)
        told = tl.where(best > float("-inf"), place, -1)
        tl.store(out + row * MOST + turn, told.to(tl.int64))


def fits(problem: Problem) -> str | None:
    if problem.constant:
        return "takes no constants"
    if odd := [m.dtype for m in (problem["boxes"], problem["scores"]) if m.dtype not in FLOATS]:
        return f"floating numbers of 16 and 32 bits, not {odd[0]}"
    if {m.format for m in (*problem.given, problem.output)} != {"contiguous"}:
        return "needs dense rows"
    images, classes, places = problem["scores"].shape
    if not 0 < places <= MOST_BOXES or problem.attrs["most"] > MOST_ROUNDS:
        return f"{places} boxes of which {problem.attrs['most']} are wanted"
    if 0 in (images, classes) or images > 65535:
        return "no images or classes, or more than 65,535 images"
    return None


def configs(problem: Problem) -> tuple[Config, ...]:
    """More threads for more boxes: each holds 8 at most."""
    block = triton.next_power_of_2(problem["boxes"].shape[1])
    needed = max(1, block // (32 * 8))
    return tuple({"warps": warps} for warps in (4, 8, 16, 32, 2, 1) if warps >= needed)


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: Any) -> Call:
    warps = (config or configs(problem)[0])["warps"]
    images, classes, places = problem["scores"].shape
    least, limit = problem.attrs["score_threshold"], problem.attrs["iou_threshold"]
    least = NONE if least is None else least
    settings: dict[str, Any] = {
        "MOST": problem.attrs["most"], "GROUPED": len(problem.given) == 3,
        "BLOCK": triton.next_power_of_2(places), "num_warps": warps,
    }  # fmt: skip

    def run(
        boxes: torch.Tensor,
        scores: torch.Tensor,
        groups: torch.Tensor | None = None,
        *,
        out: torch.Tensor,
    ) -> torch.Tensor:
        marks = boxes if groups is None else groups  # nobody reads those that are not there
        launch(
            rounds_kernel, (classes, images), boxes, scores, marks, out, places, classes, least,
            limit, **overlapping(), **settings,
        )  # fmt: skip
        return out

    return run
