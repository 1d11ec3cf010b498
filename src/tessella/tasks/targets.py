"""The targets of a split, checked by its task once, and what they mean for a recipe's defaults."""

from __future__ import annotations

import weakref
from typing import Any

from tessella.artifacts.dataset import Dataset, Split
from tessella.artifacts.shards import Column
from tessella.core.errors import DataError
from tessella.tasks.folders import of
from tessella.tasks.task import Targets, Task

_CHECKED: weakref.WeakKeyDictionary[Split, Targets] = weakref.WeakKeyDictionary()


def targets_of(split: Split) -> Targets:
    """The targets in a split's column.

    Raises:
        DataError: one of them is none that the task knows.
    """
    if split not in _CHECKED:
        try:
            examples = of(split.task).examples
            if split.column.type != examples.column():
                raise ValueError(f"a column of {split.column.type}")
            _CHECKED[split] = examples.targets(split.column, len(split.info.class_counts))
        except ValueError as error:
            raise DataError(
                f"the {split.name} split has a target that its task, {split.task.name}, does not "
                "know",
                seen=error,
                fix="import the dataset again",
            ) from error
    return _CHECKED[split]


def column_of(task: Task, classes: tuple[str, ...]) -> Column:
    """The column of a task's targets, for a writer."""
    examples = task.examples
    return Column(
        type=examples.column(),
        feature=examples.feature(classes),
        classes=len(classes),
        occurs=examples.occurs,
    )


def for_defaults(dataset: Dataset) -> dict[str, Any]:
    """What ``artifacts.defaults.completed`` asks about a dataset."""
    examples = of(dataset.info.task).examples
    sides = dataset.preprocess.input_shape[1:]
    return {
        "smoothed": examples.SMOOTHED,
        "sides": sides if examples.PLACED else None,
        "images": dataset.info.splits["train"].count,
    }
