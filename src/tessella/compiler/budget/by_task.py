"""The samples of a split, judged as their task does: by its score, and by what its answers say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from tessella.artifacts.dataset import Split
from tessella.artifacts.receipt import Flip
from tessella.compiler.budget.judging import Rows, Tensors, first_of
from tessella.core.task import TaskRecord
from tessella.data.loading import in_torch
from tessella.tasks import of, targets_of

CHUNK = 64  # samples whose targets are read at once


class TaskScore:
    """The score of a task, such as ``map``, for finished outputs.

    Args:
        record: that of the network, with its thresholds and units.
        classes: names of its classes or numbers.
    """

    def __init__(self, split: Split, record: TaskRecord, classes: Sequence[str]) -> None:
        self._split, self._record, self._classes = split, record, tuple(classes)
        self._task, self._targets = of(record), targets_of(split)

    @property
    def name(self) -> str:
        return self._task.score

    def rows(self, outputs: Tensors, places: Sequence[int]) -> Rows:
        """What the task's metrics keep of each answer, [N, R]; ``places`` are in the split."""
        answers, parts = first_of(outputs), []
        for start in range(0, len(places), CHUNK):
            some = np.array(places[start : start + CHUNK], np.int64)
            targets = in_torch(self._targets.batch(some))
            made = answers[start : start + CHUNK].float()
            parts.append(self._task.metrics.rows(made, targets, len(self._classes)).numpy())
        return np.concatenate(parts)

    def score(self, rows_NR: Rows, places: Sequence[int]) -> float:
        """The score of some samples, of which one may be there several times."""
        column = self._split.column.take(pa.array(places, pa.int64()))
        targets = self._task.examples.targets(column, len(self._split.info.class_counts))
        return self._task.metrics.measure(rows_NR, targets, self._classes).values[self.name]

    def changed(self, before: Tensors, after: Tensors) -> list[int]:
        """The samples, in order, about which two networks say something else."""
        old, new = (first_of(outputs).numpy() for outputs in (before, after))
        return np.flatnonzero(~self._task.answers.same(old, new, self._record)).tolist()

    def aligned(self, before: Tensors, after: Tensors) -> dict[str, torch.Tensor]:
        """The outputs ``after`` in the order of those before, where the task sorts them."""
        name = next(iter(before))
        made = self._task.head.aligned(after[name].float(), before[name].float())
        return {**after, name: made}

    def flip(self, place: int, before: torch.Tensor, after: torch.Tensor) -> Flip:
        """What became of the answer to one sample of the split."""
        answers, example = self._task.answers, self._split[place]
        old, new = before.numpy(), after.numpy()
        said: list[Any] = [answers.said(one, self._classes, self._record) for one in (old, new)]
        return Flip(
            index=place,
            path=example.path,
            label=answers.truth(example.label, self._classes),
            before=said[0],
            after=said[1],
            change=answers.changes(old, new, self._classes, self._record),
        )
