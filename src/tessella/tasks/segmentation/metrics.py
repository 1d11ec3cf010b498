"""Intersection over union and Dice of each class, over all pixels of a split together."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from tessella.core.record import to_plain
from tessella.core.task import TaskRecord
from tessella.tasks.known import Floats, mean_known
from tessella.tasks.segmentation.examples import IGNORED
from tessella.tasks.task import Resampled, Rows, Targets

COUNTED = False


@dataclass(frozen=True, kw_only=True)
class ClassReport:
    """One class: pixels in common / pixels of either, and 2 · common / (of one + of the other).

    Attributes:
        support: pixels of the class. A class that is neither there nor predicted has no iou.
    """

    label: str
    iou: float | None
    dice: float | None
    support: int


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The measures on a split: means over the classes that have one."""

    count: int
    miou: float
    dice: float
    pixel_accuracy: float
    loss: float
    classes: tuple[ClassReport, ...]
    resampled: Resampled = field(repr=False, compare=False)

    @property
    def values(self) -> dict[str, float]:
        return {n: getattr(self, n) for n in ("miou", "dice", "pixel_accuracy", "loss")}

    @property
    def numbers(self) -> dict[str, tuple[float, ...]]:
        return {}

    def to_json(self) -> dict[str, Any]:
        return {k: to_plain(v) for k, v in vars(self).items() if k != "resampled"}

    def table(self) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
        return ("class", "pixels", "IoU", "Dice"), [
            (c.label, c.support, c.iou, c.dice) for c in self.classes
        ]


def width(classes: int) -> int:
    return 3 * classes + 1


def rows(outputs: Tensor, targets: Tensor, classes: int) -> Tensor:
    """Of each image and class the pixels in common, predicted and true; and the mean loss.

    float32 holds counts of up to 2²⁴ pixels exactly, and larger ones to 6 · 10⁻⁸ of them.
    """
    truth_BP = targets.flatten(1).long().to(outputs.device)
    logits = outputs.float()
    losses = F.cross_entropy(
        logits, truth_BP.view(targets.shape), reduction="none", ignore_index=IGNORED
    )
    known_BP = truth_BP != IGNORED
    mean_B = losses.flatten(1).sum(1) / known_BP.sum(1).clamp(min=1)
    # A pixel that is no number in any class must not pass for class 0.
    mean_B = torch.where(logits.flatten(1).isfinite().all(1), mean_B, torch.nan)
    said_BP = logits.argmax(1).flatten(1)
    common = _counted(said_BP, known_BP & (said_BP == truth_BP), classes)
    said = _counted(said_BP, known_BP, classes)
    truth = _counted(torch.where(known_BP, truth_BP, 0), known_BP, classes)
    return torch.cat([common, said, truth, mean_B[:, None]], 1)


def _counted(numbers_BP: Tensor, chosen_BP: Tensor, classes: int) -> Tensor:
    pairs = zip(numbers_BP, chosen_BP, strict=True)
    counts = [torch.bincount(n[chosen], minlength=classes) for n, chosen in pairs]
    return torch.stack(counts).float()


def measure(rows_NR: Rows, targets: Targets, labels: tuple[str, ...]) -> Evaluation:
    """The ``Evaluation`` of rows N×(3·K + 1)."""
    return evaluation(rows_NR, labels, first=0)


def evaluation(rows_NR: Rows, labels: tuple[str, ...], *, first: int) -> Evaluation:
    """The ``Evaluation``, whose means are over the classes from ``first`` on."""
    sums_R1 = rows_NR.sum(axis=0, dtype=np.float64)[:, None]
    found = [value_K1[:, 0].tolist() for value_K1 in _shares(sums_R1[:-1])]
    support = sums_R1[-1 - len(labels) : -1, 0].tolist()
    reports = tuple(
        ClassReport(
            label=label,
            iou=None if np.isnan(iou) else iou,
            dice=None if np.isnan(dice) else dice,
            support=int(pixels),
        )
        for label, iou, dice, pixels in zip(labels, *found, support, strict=True)
    )
    again = functools.partial(_drawn, rows_NR, first)
    whole = again(np.ones((len(rows_NR), 1)))
    values = {name: float(value[0]) for name, value in whole.items()}
    return Evaluation(count=len(rows_NR), classes=reports, resampled=again, **values)


def _drawn(rows_NR: Rows, first: int, drawn_NS: Floats) -> dict[str, Floats]:
    """The measures of draws."""
    sums_RS = rows_NR.T.astype(np.float64) @ drawn_NS
    common_KS, _, truth_KS = np.split(sums_RS[:-1], 3)
    iou_KS, dice_KS = _shares(sums_RS[:-1])
    return {
        "miou": np.nan_to_num(mean_known(iou_KS[first:])),
        "dice": np.nan_to_num(mean_known(dice_KS[first:])),
        "pixel_accuracy": common_KS.sum(0) / np.maximum(truth_KS.sum(0), 1),
        "loss": sums_RS[-1] / drawn_NS.sum(0),
    }


def _shares(sums_RS: Floats) -> tuple[Floats, Floats]:
    """Intersection over union and Dice [K, S] of pixels in common, said and true, [3·K, S]; NaN of
    a class that is neither there nor said."""
    common_KS, said_KS, truth_KS = np.split(sums_RS, 3)
    both_KS = said_KS + truth_KS
    none_KS = np.where(both_KS > 0, 0.0, np.nan)
    iou_KS = common_KS / np.maximum(both_KS - common_KS, 1) + none_KS
    return iou_KS, 2 * common_KS / np.maximum(both_KS, 1) + none_KS


def losses(
    rows_NR: Rows, targets: Targets, record: TaskRecord, classes: int
) -> npt.NDArray[np.float64]:
    """The mean cross entropy of each image's pixels."""
    return rows_NR[:, -1].astype(np.float64)
