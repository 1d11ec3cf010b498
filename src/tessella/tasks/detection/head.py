"""The best boxes of a picture, each with a score for every class."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tessella.artifacts.checkpoint import Answering
from tessella.tasks.task import Numbers

OUTPUT = "boxes"
ANSWERS: Answering = "boxes"
FINISHES = True
TAUGHT = True
MOST = 100  # boxes of a picture, as COCO counts them
OTHERS = 5  # of them may be others where scores, or what suppresses boxes, are a tie
TIE = 0.02  # of the score of the last box that is told: below, the order is one of rounding
ANOTHER = 0.02  # in fractions of the input: boxes that differ by more are not the same


def width(classes: int) -> int:
    return classes


def shape(classes: int, size: Sequence[int]) -> tuple[int, ...]:
    return (MOST, 4 + classes)


def finish(outputs: Tensor, numbers: Numbers) -> Tensor:
    """The ``MOST`` boxes of [B, P, 4 + K] with the highest scores; all of fewer, and zeros.

    They stand in no order. Of more, a box of no score is all zeros: which of many such ones is told
    depends on who sorts.
    """
    return surest(outputs, outputs[..., 4:].amax(2))


def surest(outputs: Tensor, scores_BP: Tensor) -> Tensor:
    """The ``MOST`` rows of [B, P, …] with the highest scores; all of fewer, and zeros."""
    places = outputs.shape[1]
    if places <= MOST:
        return F.pad(outputs, (0, 0, 0, MOST - places)) if places < MOST else outputs
    best = scores_BP.topk(MOST)
    told = outputs.gather(1, best.indices[:, :, None].expand(-1, -1, outputs.shape[2]))
    return told * (best.values[:, :, None] > 0)


def aligned(made: Tensor, right: Tensor) -> Tensor:
    """The boxes of ``made`` beside those of ``right`` that are most like them.

    A few boxes may be others: where the next score is a tie with the last, or two boxes of which
    one suppresses the other.
    """
    return paired(made, right, right.shape[-1])


def paired(made: Tensor, right: Tensor, columns_told: int) -> Tensor:
    """As ``aligned``, of rows whose first so many columns are a box and its scores."""
    if right.dim() != 3 or made.shape != right.shape or right.shape[1] != MOST:
        return made  # those of somebody else's plan
    # 1 s of the processor to import, and every process that builds a network imports this file
    from scipy.optimize import linear_sum_assignment

    out = right.clone().to(made)
    for one, wanted, into in zip(made.detach().cpu().double(), right.cpu().double(), out):
        if not (one.isfinite().all() and wanted.isfinite().all()):
            into.copy_(one)
            continue
        told = wanted[:, :columns_told]
        cost = torch.cdist(one[:, :columns_told], told, p=torch.inf)
        rows, columns = map(torch.from_numpy, linear_sum_assignment(cost.numpy()))
        score = told[:, 4:].amax(1)
        apart = cost[rows, columns] > ANOTHER
        tied = score[columns] <= score.min() + TIE * score.max()
        if int((apart & ~tied).sum()) <= OTHERS:
            rows, columns = rows[~apart], columns[~apart]
        into[columns.to(out.device)] = one[rows].to(out)
    return out
