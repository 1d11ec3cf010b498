"""The quick start of a detection: digits scattered on textures, from COCO's JSON to served boxes.

Everything here goes through the public API and the public HTTP protocol, as in ``classification``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tessella.artifacts.dataset import Dataset
from tessella.core.events import Emit
from tessella.quickstart.annotated import HELD_OUT, Answers, Measured, go
from tessella.quickstart.workspace import save
from tessella.tasks import targets_of
from tessella.tasks.detection.examples import BoxSets, overlap

NETWORK = "centernet"
# mosaics in half of the pictures: mAP@50 0.91 instead of 0.83 after these 40 epochs
AUGMENT = {"scale": 0.15, "rotation": 8.0, "mosaic": 0.5}
RECIPE: dict[str, Any] = {
    "network_options": {"backbone": "test_resnet", "width": 32},  # 0.3 million parameters
    "batch_size": 16, "augment": AUGMENT,
}  # fmt: skip
EPOCHS = 40
PICTURES, SIZE, SIDES = 300, 96, (16, 32)  # sides that a digit is drawn with
HIT = 0.5  # the overlap from which a box is the digit's


@dataclass(frozen=True, kw_only=True)
class Report(Measured):
    """What the quick start measured; ``report.json`` in the workspace.

    Attributes:
        map, map50: of the checkpoint on the pictures for validation; ``plan_map`` of the plan.
        found: fraction of the digits that were told over HTTP, at their place and by their name;
            ``right``: of what was told, the fraction that is a digit.
    """

    map: float
    map50: float
    plan_map: float
    found: float
    right: float


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
        workspace, task="detection", network=NETWORK, recipe=RECIPE, epochs=epochs,
        pictures=pictures, held_out=held_out, size=SIZE, sides=SIDES, emit=emit,
    )  # fmt: skip
    metrics = gone.checkpoint.info.metrics
    found, right = hits(gone.told, gone.dataset)
    report = Report(
        map=metrics["val/map"],
        map50=metrics["val/map50"],
        plan_map=gone.plan_score,
        found=found,
        right=right,
        **vars(gone.measured),
    )
    save(workspace / "report.json", report)
    return report


def hits(told: Answers, dataset: Dataset) -> tuple[float, float]:
    """The fraction of the things that was found, and the fraction of what was told that is one.

    Each thing counts once: for the surest box of its class that covers ``HIT`` of it.
    """
    targets = targets_of(dataset.val)
    assert isinstance(targets, BoxSets)
    found = things = boxes = 0
    for index, answer in enumerate(told):
        truth = targets.evaluated(index)
        left = np.ones(len(truth), bool)
        for one in answer:  # the surest first
            common = overlap(np.array([one["box"]]), truth[:, :4] * SIZE)[0]
            common *= left & (truth[:, 4] == one["index"])
            if len(common) and common.max() >= HIT:
                left[common.argmax()] = False
        found, things = found + int((~left).sum()), things + len(truth)
        boxes += len(answer)
    return found / max(1, things), found / max(1, boxes)
