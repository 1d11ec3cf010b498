"""The best boxes of a picture, each with a score for every class and a mask in the box.

A mask is ``SIDE`` · ``SIDE`` cells of its box, row by row: how sure each is part of the thing.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tessella.artifacts.checkpoint import Answering
from tessella.tasks.detection.head import MOST, paired, surest
from tessella.tasks.instances.cells import CELLS, SIDE
from tessella.tasks.task import Numbers

OUTPUT = "instances"
ANSWERS: Answering = "masks"
FINISHES = True
TAUGHT = True

__all__ = [
    "ANSWERS", "CELLS", "FINISHES", "OUTPUT", "SIDE", "TAUGHT", "aligned", "finish", "shape",
    "width",
]  # fmt: skip


def width(classes: int) -> int:
    return classes


def shape(classes: int, size: Sequence[int]) -> tuple[int, ...]:
    return (MOST, 4 + classes + CELLS)


def finish(outputs: Tensor, numbers: Numbers) -> Tensor:
    """The ``MOST`` boxes of [B, P, 4 + K + CELLS] with the highest scores, as detection's."""
    return surest(outputs, outputs[..., 4:-CELLS].amax(2))


def aligned(made: Tensor, right: Tensor) -> Tensor:
    """The boxes of ``made`` beside those of ``right`` that are most like them, with their masks."""
    return paired(made, right, right.shape[-1] - CELLS)
