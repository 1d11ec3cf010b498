"""What a calibration looks at, and what a plan is judged by: images as the network gets them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import psutil
import torch

from tessella.artifacts.dataset import Split
from tessella.compiler.budget.by_task import TaskScore
from tessella.compiler.budget.judging import Labelled
from tessella.compiler.calibration import METHOD, Tensors
from tessella.core.errors import UsageError
from tessella.core.preprocess import Preprocess
from tessella.core.task import TaskRecord
from tessella.data.loading import batches, in_torch
from tessella.tasks import of, targets_of

COUNT = 512  # NVIDIA's reference for ImageNet takes 500
BATCH_SIZE = 32
ANSWER_BYTES = 1 << 30  # of one plan's answers, unless the fewest samples have more
LEAST_SAMPLES = 64
HELD = 4  # float32's answers by two programs, and a plan's in batches and joined
KEPT_BYTES = 1 << 30  # of decoded images, which a search looks at some twenty times


@dataclass(frozen=True, kw_only=True)
class CalibrationSet:
    """Images of a dataset to calibrate with, and how.

    Attributes:
        dataset: its folder.
        split, samples: about so many of this split, drawn evenly.
        method: ``min-max``, ``percentile``, ``entropy`` or ``mse``.
    """

    dataset: Path
    split: str = "train"
    samples: int = COUNT
    method: str = METHOD

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise UsageError("a calibration needs samples", seen=self.samples, fix="give 1 or more")


def of_split(
    split: Split,
    record: Preprocess,
    name: str,
    *,
    device: torch.device,
    count: int = COUNT,
) -> list[Tensors]:
    """About ``count`` images, drawn evenly whatever their order, in batches, as input ``name``."""
    size = min(BATCH_SIZE, len(split))
    limit = max(1, min(count, len(split)) // size)
    drawn = batches(split, record, batch_size=size, augment=None, training=True)
    return [{name: batch.images.to(device)} for batch in islice(drawn, limit)]


class _Targets:
    """The targets of a split as a metric of the user's gets them: read when they are asked for."""

    def __init__(self, split: Split) -> None:
        self._targets = targets_of(split)

    def __getitem__(self, places: list[int]) -> torch.Tensor:
        made: torch.Tensor = in_torch(self._targets.batch(np.array(places, np.int64)))
        return made

    def __len__(self) -> int:
        return len(self._targets)


def labelled(
    split: Split, record: Preprocess, name: str, classes: Sequence[str], task: TaskRecord
) -> Labelled:
    """A split as samples with labels; images become input ``name`` when they are looked at.

    Of large answers, as one score for each class and pixel, ``ANSWER_BYTES`` are kept: so many
    samples judge, at even distances.

    Args:
        task: that of the network whose answers they judge.

    Raises:
        UsageError: there is not enough memory for the answers of ``LEAST_SAMPLES``.
    """
    kept: dict[int, torch.Tensor] = {}
    most = KEPT_BYTES // (4 * int(np.prod(record.input_shape)))

    def image(place: int) -> torch.Tensor:
        if place in kept:
            return kept[place]
        made = torch.from_numpy(record(split[place].content, name=split[place].path))
        if len(kept) < most:
            kept[place] = made
        return made

    counted = of(task).metrics.COUNTED
    head = of(task).head
    answer = head.shape(len(split.info.class_counts), record.input_shape[1:])
    nbytes = 4 * math.prod(answer)
    _require_memory(min(LEAST_SAMPLES, len(split)), nbytes)
    samples = Labelled(
        read=lambda places: {name: torch.stack([image(p) for p in places])},
        labels=_Targets(split),
        places=tuple(range(len(split))),
        paths=tuple(example.path for example in split),
        classes=tuple(classes),
        score=None if counted else TaskScore(split, task, classes),
    )
    return samples.spread(max(LEAST_SAMPLES, ANSWER_BYTES // nbytes))


def _require_memory(count: int, nbytes: int) -> None:
    """Refuse answers of so many bytes each for which the machine has no memory."""
    needed, there = HELD * count * nbytes, psutil.virtual_memory().available
    if needed > there:
        raise UsageError(
            "the answers of the fewest samples that can judge do not fit in memory",
            seen=f"{count} samples need {needed / 2**30:.1f} GiB, {there / 2**30:.1f} are free",
            fix="train with smaller inputs, or judge on a machine with more memory",
        )
