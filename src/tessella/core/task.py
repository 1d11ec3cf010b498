"""The record of a task, which travels from dataset to run, checkpoint and plan.

The record is data: a reader needs it to say what a file is about. What a task does lies in the room
``tasks``, in a folder of the record's name.
"""

from __future__ import annotations

import math
from collections.abc import Sized
from dataclasses import dataclass, field

from tessella.core.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class TaskRecord:
    """What a network is asked about a picture.

    Attributes:
        name: the task, which is a folder of ``tessella.tasks``.
        score: the measure of which a better network has more. Training writes it as ``metric``.
        numbers: what the outputs need beside their names, one number for each output: the means and
            standard deviations of regression, the thresholds of multilabel.
    """

    name: str = "classification"
    score: str = "accuracy"
    numbers: dict[str, tuple[float, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or not self.score.isidentifier():
            raise UsageError("a task and its score are names", seen=f"{self.name}, {self.score}")
        if not all(math.isfinite(v) for values in self.numbers.values() for v in values):
            raise UsageError("the numbers of a task are finite", seen=self.numbers)

    def check(self, labels: Sized) -> None:
        """Refuse numbers that are not one for each label."""
        if wrong := [name for name, values in self.numbers.items() if len(values) != len(labels)]:
            raise UsageError(
                "the numbers of a task are one for each label",
                seen=f"{len(self.numbers[wrong[0]])} of {wrong[0]!r}, {len(labels)} labels",
            )

    @property
    def metric(self) -> str:
        """The name of the score on the validation split, as checkpoints have it."""
        return f"val/{self.score}"


CLASSIFICATION = TaskRecord()  # that of files which were written before there were others
