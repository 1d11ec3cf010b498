"""A network's answers on a split, measured alike for a training, a checkpoint and a plan."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from tessella.artifacts.dataset import Split
from tessella.core.errors import DataError, TrainError
from tessella.core.events import Emit, progress, silent
from tessella.core.preprocess import Preprocess
from tessella.data.filling import Fillers
from tessella.data.loading import Batch, batches
from tessella.tasks import Report, of, targets_of


def predict_split(
    predict: Callable[[Batch], Tensor],
    split: Split,
    preprocess: Preprocess,
    classes: int,
    *,
    batch_size: int,
    rank: int = 0,
    world: int = 1,
    workers: int = 0,
    decodes: bool = False,
    fillers: Fillers | None = None,
    emit: Emit = silent,
) -> npt.NDArray[np.float32]:
    """What the task measures of each image's answer, N×R in the split's order.

    Rows of images that belong to another rank are 0.

    Args:
        decodes: ``predict`` takes batches whose JPEG files a GPU decodes.
    """
    require_images(split)
    task = of(split.task)
    metrics = task.metrics
    rows_NR = np.zeros((len(split), metrics.width(classes)), np.float32)
    stream = batches(
        split,
        preprocess,
        batch_size=batch_size,
        seed=0,
        epoch=0,
        start=0,
        rank=rank,
        world=world,
        augment=None,
        training=False,
        workers=workers,
        for_gpu=decodes,
        decodes=decodes,
        fillers=fillers,
    )
    for number, batch in enumerate(stream, start=1):
        outputs = predict(batch)
        count = len(batch.indices)
        sides = preprocess.sides if preprocess.volume is None else batch.pixels.shape[1:-1]
        wanted = [count, *task.head.shape(classes, sides)]
        if list(outputs.shape) != wanted:
            raise TrainError(
                f"the network's answers are not of shape {wanted}, as {task.name} has them",
                seen=f"shape {list(outputs.shape)} for {count} images",
                fix="end it with a layer of that many outputs",
            )
        rows_BR = metrics.rows(outputs.detach(), batch.labels, classes)
        rows_NR[batch.indices.numpy()] = rows_BR.float().cpu().numpy()
        emit(progress("validate", min(number * batch_size, len(split)), len(split)))
    return rows_NR


def require_images(split: Split) -> None:
    """Refuse a split on which nothing can be measured."""
    if len(split) == 0:
        raise DataError(
            f"the {split.name} split is empty",
            seen="0 images",
            fix="import again with a holdout for it",
        )


def measure(rows_NR: npt.NDArray[np.float32], split: Split, labels: tuple[str, ...]) -> Report:
    """The task's report of rows N×R that lie in the split's order."""
    bad_N = ~np.isfinite(rows_NR).all(axis=1)
    if bad_N.any():
        raise TrainError(
            f"the network gives a score that is no number for {int(bad_N.sum())} of {bad_N.size} "
            f"images of the {split.name} split",
            seen=f"first for {split[int(bad_N.argmax())].path}",
            fix="use precision fp32 or bf16, or train with a lower learning rate",
        )
    return of(split.task).metrics.measure(rows_NR, targets_of(split), labels)
