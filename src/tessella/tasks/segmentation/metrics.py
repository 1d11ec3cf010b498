"""Intersection over union and Dice of each class, over all pixels of a split together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from tessella.core.record import to_plain
from tessella.tasks.segmentation.examples import IGNORED
from tessella.tasks.task import Rows, Targets

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

    @property
    def values(self) -> dict[str, float]:
        return {n: getattr(self, n) for n in ("miou", "dice", "pixel_accuracy", "loss")}

    @property
    def numbers(self) -> dict[str, tuple[float, ...]]:
        return {}

    def to_json(self) -> dict[str, Any]:
        return {k: to_plain(v) for k, v in vars(self).items()}

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
    classes = len(labels)
    sums = rows_NR[:, :-1].sum(axis=0, dtype=np.float64).reshape(3, classes)
    common, said, truth = sums
    either, both = said + truth - common, said + truth
    reports = tuple(
        ClassReport(
            label=label,
            iou=float(common[k] / either[k]) if either[k] else None,
            dice=float(2 * common[k] / both[k]) if both[k] else None,
            support=int(truth[k]),
        )
        for k, label in enumerate(labels)
    )
    known = [r for r in reports if r.iou is not None]
    return Evaluation(
        count=len(rows_NR),
        miou=float(np.mean([r.iou for r in known])) if known else 0.0,
        dice=float(np.mean([r.dice for r in known])) if known else 0.0,
        pixel_accuracy=float(common.sum() / max(truth.sum(), 1)),
        loss=float(rows_NR[:, -1].mean(dtype=np.float64)),
        classes=reports,
    )


def losses(rows_NR: Rows, targets: Targets) -> npt.NDArray[np.float64]:
    """The mean cross entropy of each image's pixels."""
    return rows_NR[:, -1].astype(np.float64)
