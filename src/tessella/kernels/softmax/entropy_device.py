"""Device code of the cross entropy of rows of scores, and of its gradient: a block a row."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def entropy_kernel(
    scores_pointer, targets_pointer, losses_pointer, norms_pointer, classes, ignored,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Each row's loss, 0 where the target is ``ignored``, and its logarithm of summed exponentials
    to the base of two."""
    row = tl.program_id(0)
    own = scores_pointer + row.to(tl.int64) * classes
    columns = tl.arange(0, COLUMNS)
    largest = -float("inf")
    sums = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, classes, COLUMNS):
        mask = first + columns < classes
        x = tl.load(own + first + columns, mask=mask, other=-float("inf")).to(tl.float32) * LOG2_E
        higher = tl.maximum(largest, tl.max(x, 0))
        base = tl.where(higher == -float("inf"), 0.0, higher)  # nothing but −∞ until now
        sums = sums * tl.exp2(largest - base) + tl.exp2(x - base)
        largest = higher
    norm = tl.log2(tl.sum(sums, 0)) + largest
    target = tl.load(targets_pointer + row)
    counts = target != ignored
    is_there = (target >= 0) & (target < classes)
    score = tl.load(own + tl.where(is_there, target, 0)).to(tl.float32)
    score = tl.where(is_there, score, float("nan"))  # of no class: a training stops at the loss
    tl.store(losses_pointer + row, tl.where(counts, norm * LN_2 - score, 0.0))
    tl.store(norms_pointer + row, norm)


@triton.jit
def entropy_gradient_kernel(
    scores_pointer, targets_pointer, norms_pointer, factor_pointer, out_pointer, classes, ignored,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """(softmax − one at the target) · factor; zero in rows whose target is ``ignored``."""
    row = tl.program_id(0)
    start = row.to(tl.int64) * classes
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < classes
    target = tl.load(targets_pointer + row)
    norm = tl.load(norms_pointer + row)
    factor = tl.where(target != ignored, tl.load(factor_pointer), 0.0)
    x = tl.load(scores_pointer + start + column, mask=mask, other=0.0).to(tl.float32) * LOG2_E
    made = (tl.exp2(x - norm) - tl.where(column == target, 1.0, 0.0)) * factor
    tl.store(out_pointer + start + column, made.to(out_pointer.dtype.element_ty), mask=mask)
