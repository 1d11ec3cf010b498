"""The quick start of a segmentation: scattered digits, from run lengths to served masks.

Everything here goes through the public API and the public HTTP protocol, as in ``classification``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tessella.annotations import rle
from tessella.artifacts.dataset import Dataset
from tessella.core.events import Emit
from tessella.quickstart.annotated import HELD_OUT, Answers, Measured, go
from tessella.quickstart.workspace import save
from tessella.tasks.segmentation.examples import decoded

NETWORK = "unet"
# Digits are told apart late and all at once, after some 1,500 steps: batches are small, pictures
# many, and the rate is the default's. Mean IoU on 300 pictures and seconds of a core (in brackets:
# that other work shared): with three levels 1,500 pictures 8 times 0.76, 49 s, and 0.74, 44 s, 12
# times 0.84 (169 s); with four 8 times 0.76, 0.73 and, of a third seed, 0.35, 65 s each, and 10
# times, rate 8e-3, 0.83, 83 s; with five 0.63, 90 s. 500 pictures 30 times in batches of 4 with
# five levels and half the rate: 0.67, 169 s. The whole way as it is: 0.84, 125 s of a core.
RECIPE: dict[str, Any] = {"network_options": {"width": 16, "levels": 3}, "batch_size": 8}
EPOCHS = 12
PICTURES, SIZE, SIDES = 1500, 48, (12, 24)  # sides that a digit is drawn with


@dataclass(frozen=True, kw_only=True)
class Report(Measured):
    """What the quick start measured; ``report.json`` in the workspace.

    Attributes:
        miou, dice: of the checkpoint on the pictures for validation; ``plan_miou`` of the plan;
            ``http_miou`` of the masks that a server told.
    """

    miou: float
    dice: float
    plan_miou: float
    http_miou: float


def quickstart(
    workspace: Path,
    *,
    emit: Emit,
    pictures: int = PICTURES,
    held_out: int = HELD_OUT,
    epochs: int = EPOCHS,
) -> Report:
    """Run the whole way in ``workspace``; an earlier quick start there is replaced."""
    gone = go(
        workspace, task="segmentation", network=NETWORK, recipe=RECIPE, epochs=epochs,
        pictures=pictures, held_out=held_out, size=SIZE, sides=SIDES, query="?top=11", emit=emit,
    )  # fmt: skip
    metrics = gone.checkpoint.info.metrics
    report = Report(
        miou=metrics["val/miou"],
        dice=metrics["val/dice"],
        plan_miou=gone.plan_score,
        http_miou=mean_iou(gone.told, gone.dataset),
        **vars(gone.measured),
    )
    save(workspace / "report.json", report)
    return report


def mean_iou(told: Answers, dataset: Dataset) -> float:
    """The mean over classes of what masks and truth share, in all pictures for validation."""
    classes = len(dataset.classes)
    counts = np.zeros((classes, classes), np.int64)
    for answer, example in zip(told, dataset.val, strict=True):
        truth = decoded(example.label["mask"])
        seen = np.zeros_like(truth)
        for one in answer:
            mask = rle.mask_of(rle.expanded(one["mask"]["counts"].encode()), *one["mask"]["size"])
            seen[mask > 0] = one["index"]
        known = truth < classes
        pairs = truth[known].astype(np.int64) * classes + seen[known]
        counts += np.bincount(pairs, minlength=classes**2).reshape(counts.shape)
    common = counts.diagonal()
    either = counts.sum(0) + counts.sum(1) - common
    return float((common[either > 0] / either[either > 0]).mean())
