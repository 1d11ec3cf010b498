"""One score for each class at each pixel, in the size of the network's input."""

from __future__ import annotations

from collections.abc import Sequence

from tessella.artifacts.checkpoint import Answering
from tessella.tasks.classification.head import FINISHES, OUTPUT, TAUGHT, aligned, finish, width

ANSWERS: Answering = "pixels"

__all__ = ["ANSWERS", "FINISHES", "OUTPUT", "TAUGHT", "aligned", "finish", "shape", "width"]


def shape(classes: int, size: Sequence[int]) -> tuple[int, ...]:
    return (classes, *size)
