"""The classes in a volume, largest first, each with its share and its number of voxels.

The labels themselves are as large as the volume: ``tessella run --out`` writes them into a file.
"""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from tessella.core.pictures import Pixels
from tessella.core.task import TaskRecord
from tessella.core.volumes import IGNORED
from tessella.tasks.segmentation import answers as pixelwise
from tessella.tasks.segmentation.answers import drawn, marked, things
from tessella.tasks.task import Outputs, Query
from tessella.tasks.volumes.examples import decoded

__all__ = [
    "HEADER", "SLOW", "VERB", "answer", "changes", "drawn", "lines", "marked", "said", "same",
    "taught", "things", "truth",
]  # fmt: skip

VERB = "segment"
SLOW = True
HEADER: tuple[str, ...] = ("class", "voxels", "share of the volume")

same = pixelwise.same
changes = pixelwise.changes


def answer(
    outputs: Outputs, labels: tuple[str, ...], record: TaskRecord, query: Query
) -> list[Any]:
    """Of scores [B, K, D, H, W] the classes that win a voxel."""
    classes = outputs.shape[1]
    return [counted(found, labels, classes, query.top) for found in outputs.argmax(axis=1)]


def counted(
    found: npt.NDArray[Any], labels: tuple[str, ...], classes: int, top: int | None
) -> list[dict[str, Any]]:
    """Of numbers of classes [D, H, W] how many voxels each has."""
    voxels = np.bincount(found.ravel(), minlength=classes)
    order = np.argsort(-voxels, kind="stable")[:top]
    named = len(labels) == classes
    return [
        {
            "index": k,
            "label": labels[k] if named else None,
            "voxels": int(voxels[k]),
            "share": float(voxels[k] / found.size),
        }
        for k in order.tolist()
        if voxels[k]
    ]


def lines(answer: Any) -> list[tuple[str, ...]]:
    return [(str(a["label"]), f"{a['voxels']:,}", f"{100 * a['share']:.1f} %") for a in answer]


def said(output: Outputs, labels: tuple[str, ...], record: TaskRecord) -> str:
    return _described(output.argmax(0), labels)


def truth(target: dict[str, Any], labels: tuple[str, ...]) -> str:
    return _described(decoded(target["mask"]), labels)


def _described(found: npt.NDArray[Any], labels: tuple[str, ...]) -> str:
    voxels = np.bincount(found[found != IGNORED], minlength=len(labels))
    return ", ".join(
        f"{labels[k]} {_percent(voxels[k] / max(1, voxels.sum()))}"
        for k in pixelwise.of_interest(voxels, behind=True)
    )


def _percent(share: float) -> str:
    """A share; of a thing that is small beside its volume with two digits."""
    return f"{100 * share:.2g} %" if share < 0.01 else f"{100 * share:.0f} %"


def taught(picture: Pixels, target: Any, labels: tuple[str, ...]) -> Pixels:
    """A slice, with the middle slice of its labels over it."""
    middle = target[len(target) // 2] if target.ndim == 3 else target
    if middle.shape != picture.shape[:2]:
        size = picture.shape[1], picture.shape[0]
        middle = np.asarray(cv2.resize(middle, size, interpolation=cv2.INTER_NEAREST))
    return pixelwise.taught(picture, middle, labels)
