"""The score, of which only the order means anything."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tessella.core.pictures import Pixels
from tessella.core.task import TaskRecord
from tessella.tasks.task import Outputs, Query
from tessella.tasks.thing import Thing

VERB = "rank"
SLOW = False
HEADER: tuple[str, ...] = ("score",)


def answer(
    outputs: Outputs, labels: tuple[str, ...], record: TaskRecord, query: Query
) -> list[Any]:
    return [{"score": float(np.float64(row[0]))} for row in outputs]


def lines(answer: Any) -> list[tuple[str, ...]]:
    return [(f"{answer['score']:.4f}",)]


def same(one: Outputs, other: Outputs, record: TaskRecord) -> npt.NDArray[np.bool_]:
    return np.abs(one - other).max(axis=1) < 1e-3


def said(output: Outputs, labels: tuple[str, ...], record: TaskRecord) -> str:
    return f"{float(output[0]):.4f}"


def changes(one: Outputs, other: Outputs, labels: tuple[str, ...], record: TaskRecord) -> str:
    return " → ".join(said(output, labels, record) for output in (one, other))


def truth(target: Any, labels: tuple[str, ...]) -> str:
    return f"{target[0]:g}"


def drawn(picture: Pixels, answer: Any) -> None:
    return None


def things(answer: Any) -> tuple[Thing, ...]:
    return ()


def marked(target: Any, labels: tuple[str, ...]) -> tuple[Thing, ...]:
    return ()


def taught(picture: Pixels, target: Any, labels: tuple[str, ...]) -> Pixels:
    return picture
