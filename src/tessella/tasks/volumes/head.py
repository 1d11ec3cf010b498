"""One score for each class at each voxel, in the size of the network's input."""

from __future__ import annotations

from tessella.artifacts.checkpoint import Answering
from tessella.tasks.segmentation.head import (
    FINISHES,
    OUTPUT,
    TAUGHT,
    aligned,
    finish,
    shape,
    width,
)

ANSWERS: Answering = "voxels"

__all__ = ["ANSWERS", "FINISHES", "OUTPUT", "TAUGHT", "aligned", "finish", "shape", "width"]
