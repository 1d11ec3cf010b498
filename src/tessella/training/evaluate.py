"""A network's accuracy on a split, measured alike for a training, a checkpoint and a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tessella.artifacts.dataset import Split
from tessella.core.errors import DataError, TrainError
from tessella.core.events import Emit, progress, silent
from tessella.core.preprocess import Preprocess
from tessella.core.record import to_plain
from tessella.data.loading import batches

Outputs = Literal["logits", "probabilities"]


@dataclass(frozen=True, kw_only=True)
class ClassReport:
    """The measures of one class; 0 where one is undefined, as the precision without predictions."""

    label: str
    precision: float
    recall: float
    f1: float
    support: int


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The measures on a split of N images and K classes.

    Attributes:
        count: N.
        accuracy, top5: share of images whose class is the first, or among the first five.
        loss: mean cross entropy, without class weights.
        confusion: K rows (true class) of K counts (predicted class).
        classes: precision, recall, F1 and support of each class.
        scores: float32 N×K, the network's outputs in the split's order.
        predictions: int64 N, the class with the highest score (the first of equal ones).
    """

    count: int
    accuracy: float
    top5: float
    loss: float
    confusion: tuple[tuple[int, ...], ...]
    classes: tuple[ClassReport, ...]
    scores: npt.NDArray[np.float32]
    predictions: npt.NDArray[np.int64]

    def to_json(self) -> dict[str, Any]:
        """All but the two arrays, ready for ``json.dumps``."""
        arrays = ("scores", "predictions")
        return {k: to_plain(v) for k, v in vars(self).items() if k not in arrays}


def evaluate(
    predict: Callable[[Tensor], Tensor],
    split: Split,
    preprocess: Preprocess,
    labels: tuple[str, ...],
    *,
    batch_size: int = 64,
    outputs: Outputs = "logits",
    workers: int = 0,
    emit: Emit = silent,
) -> Evaluation:
    """Run ``predict`` over the whole split, in its order, and measure.

    Args:
        predict: images float32 N×C×H×W on the CPU to outputs N×K, on any device.
        labels: the K class names.
        outputs: whether ``predict`` returns ``logits`` or ``probabilities`` that sum to 1.
        workers: processes that load images.

    Raises:
        DataError: the split is empty.
        TrainError: the outputs have the wrong shape, or one of them is NaN.
    """
    scores_NK = predict_split(
        predict, split, preprocess, len(labels), batch_size=batch_size, workers=workers, emit=emit
    )
    return measure(scores_NK, split, labels, outputs=outputs)


def predict_split(
    predict: Callable[[Tensor], Tensor],
    split: Split,
    preprocess: Preprocess,
    classes: int,
    *,
    batch_size: int,
    rank: int = 0,
    world: int = 1,
    workers: int = 0,
    emit: Emit = silent,
) -> npt.NDArray[np.float32]:
    """Outputs N×K in the split's order. Rows of images that belong to another rank are 0."""
    if len(split) == 0:
        raise DataError(
            f"the {split.name} split is empty",
            seen="0 images",
            fix="import again with a holdout for it",
        )
    scores_NK = np.zeros((len(split), classes), np.float32)
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
    )
    for number, batch in enumerate(stream, start=1):
        outputs_BK = predict(batch.images)
        if outputs_BK.shape != (len(batch.images), classes):
            raise TrainError(
                f"the network must give one score a class, {classes} in all",
                seen=f"shape {list(outputs_BK.shape)} for {len(batch.images)} images",
                fix="end it with a layer of that many outputs",
            )
        scores_NK[batch.indices.numpy()] = outputs_BK.detach().float().cpu().numpy()
        emit(progress("validate", min(number * batch_size, len(split)), len(split)))
    return scores_NK


def measure(
    scores_NK: npt.NDArray[np.float32],
    split: Split,
    labels: tuple[str, ...],
    *,
    outputs: Outputs = "logits",
) -> Evaluation:
    """The ``Evaluation`` of outputs N×K that lie in the split's order."""
    truth_N = split.labels
    bad_N = ~np.isfinite(scores_NK).all(axis=1)
    if bad_N.any():
        raise TrainError(
            f"the network gives a score that is no number for {int(bad_N.sum())} of {bad_N.size} "
            f"images of the {split.name} split",
            seen=f"first for {split[int(bad_N.argmax())].path}",
            fix="use precision fp32 or bf16, or train with a lower learning rate",
        )
    predicted_N = scores_NK.argmax(axis=1)
    # An image is among the first five when fewer than five classes are ahead of its own. Of equal
    # scores the first is ahead, as in argmax.
    own_N1 = np.take_along_axis(scores_NK, truth_N[:, None], axis=1)
    earlier_NK = np.arange(scores_NK.shape[1]) < truth_N[:, None]
    ahead_N = ((scores_NK > own_N1) | ((scores_NK == own_N1) & earlier_NK)).sum(axis=1)
    confusion_KK = np.zeros((len(labels), len(labels)), np.int64)
    np.add.at(confusion_KK, (truth_N, predicted_N), 1)
    return Evaluation(
        count=len(truth_N),
        accuracy=float((ahead_N < 1).mean()),
        top5=float((ahead_N < 5).mean()),
        loss=_mean_loss(scores_NK, truth_N, outputs),
        confusion=tuple(tuple(int(n) for n in row) for row in confusion_KK),
        classes=_class_reports(confusion_KK, labels),
        scores=scores_NK,
        predictions=predicted_N,
    )


def _mean_loss(
    scores_NK: npt.NDArray[np.float32], truth_N: npt.NDArray[np.int64], outputs: Outputs
) -> float:
    own = torch.from_numpy(scores_NK).double()
    truth = torch.from_numpy(truth_N.copy())
    if outputs == "logits":
        return float(torch.nn.functional.cross_entropy(own, truth))
    # A probability that was rounded to 0 in float32 costs what the smallest float32 costs.
    return float(-own.gather(1, truth[:, None]).clamp_min(2.0**-149).log().mean())


def _class_reports(
    confusion_KK: npt.NDArray[np.int64], labels: tuple[str, ...]
) -> tuple[ClassReport, ...]:
    hits_K = confusion_KK.diagonal()
    predicted_K, support_K = confusion_KK.sum(axis=0), confusion_KK.sum(axis=1)
    precision_K = hits_K / np.maximum(predicted_K, 1)
    recall_K = hits_K / np.maximum(support_K, 1)
    # F1 is the harmonic mean of the two: 2·hits / (predicted + support)
    f1_K = 2 * hits_K / np.maximum(predicted_K + support_K, 1)
    return tuple(
        ClassReport(
            label=label,
            precision=float(precision_K[k]),
            recall=float(recall_K[k]),
            f1=float(f1_K[k]),
            support=int(support_K[k]),
        )
        for k, label in enumerate(labels)
    )
