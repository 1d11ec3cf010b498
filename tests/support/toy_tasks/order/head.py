"""One score, higher for what comes later."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tessella.artifacts.checkpoint import Answering
from tessella.tasks.task import Numbers

OUTPUT = "score"
ANSWERS: Answering = "picture"
FINISHES = True
TAUGHT = False


def width(classes: int) -> int:
    return 2


def shape(classes: int, size: Sequence[int]) -> tuple[int, ...]:
    return (1,)


def finish(outputs: Tensor, numbers: Numbers) -> Tensor:
    return outputs[:, :1] - outputs[:, 1:]


def aligned(made: Tensor, right: Tensor) -> Tensor:
    return made
