"""verify and evaluate: models on the samples of a split."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tessella.api.checkpoints import open_checkpoint
from tessella.api.loading import load
from tessella.api.predicting import (
    Model,
    eager_predictor,
    engine_predictor,
    predictor,
    task_of,
    whole,
)
from tessella.api.samples import Data, split_of
from tessella.artifacts.checkpoint import Checkpoint, CheckpointInfo
from tessella.artifacts.dataset import Split
from tessella.artifacts.files import write_atomic
from tessella.artifacts.plan import Plan
from tessella.artifacts.run import Run
from tessella.core.errors import ArtifactError
from tessella.core.events import Emit, progress, silent
from tessella.data.loading import Batch, batches
from tessella.runtime.engine import Engine
from tessella.tasks import Report, of
from tessella.training.evaluate import measure, predict_split, require_images

Predictor = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Flip:
    """A sample for which plan and checkpoint disagree."""

    path: str
    truth: str
    checkpoint: str
    plan: str


@dataclass(frozen=True, kw_only=True)
class Verification:
    """A plan beside its checkpoint, on the same samples.

    Attributes:
        target: of the plan's program that ran, the one for this machine.
        score: the measure of the task: ``accuracy`` of a classification.
        checkpoint_score, plan_score: the score of each.
        agreement: fraction of samples with the same answer.
        max_abs_diff: largest difference between two numbers of an answer.
        flips: samples with another answer.
    """

    target: str
    samples: int
    score: str
    checkpoint_score: float
    plan_score: float
    agreement: float
    max_abs_diff: float
    preprocess_hash: str
    flips: tuple[Flip, ...]


def verify(
    plan: Plan | Engine | str | Path,
    *,
    against: Checkpoint | Run | str | Path,
    data: Data,
    split: str = "val",
    batch_size: int = 32,
    trust_code: bool = False,
    emit: Emit = silent,
) -> Verification:
    """Run a plan and the checkpoint that it came from on a split, and compare sample by sample.

    Raises:
        ArtifactError: the plan was made from another checkpoint, or the two do not prepare their
            inputs in the same way.
    """
    engine = plan if isinstance(plan, Engine) else load(plan)
    checkpoint = open_checkpoint(against)
    record = checkpoint.info.preprocess
    if engine.preprocess is None or engine.preprocess.hash != record.hash:
        raise ArtifactError(
            "plan and checkpoint prepare their inputs differently",
            seen=f"{engine.preprocess} and {record}",
            fix="compile the plan from this checkpoint",
        )
    made_from, here = engine.manifest.weights_sha256, checkpoint.weights_sha256
    if made_from is not None and made_from != here:
        raise ArtifactError(
            "the plan was made from another checkpoint",
            seen=f"weights {made_from[:12]} in the plan of {engine.manifest.built_from},"
            f" {str(here)[:12]} in {checkpoint.path}",
            fix="verify it against the checkpoint that it was made from, or compile this one",
        )
    labels, task = checkpoint.info.labels, of(checkpoint.info.task)
    samples = split_of(data, split, labels, checkpoint.info.task)
    require_images(samples)
    predictors = _predictors(checkpoint, engine, trust_code)
    rows: tuple[list[Tensor], list[Tensor]] = ([], [])
    flips: list[Flip] = []
    largest = 0.0
    for batch in batches(samples, record, batch_size=batch_size, augment=None, training=False):
        answers = [predict(batch.images) for predict in predictors]
        if answers[0].shape != answers[1].shape:
            raise ArtifactError(
                "plan and checkpoint give answers of different shapes",
                seen=" and ".join(str(list(a.shape)) for a in answers),
                fix="compile the plan from this checkpoint",
            )
        for kept, outputs in zip(rows, answers, strict=True):
            kept.append(task.metrics.rows(outputs, batch.labels, len(labels)))
        apart = task.head.aligned(answers[1], answers[0]) - answers[0]
        largest = max(largest, float(apart.abs().max()))
        flips += _flips(answers, batch, samples, checkpoint.info)
        emit(progress("verify", int(batch.indices[-1]) + 1, len(samples)))
    one, other = (measure(torch.cat(kept).numpy(), samples, labels) for kept in rows)
    return Verification(
        target=engine.manifest.fingerprint.target,
        samples=len(samples),
        score=task.score,
        checkpoint_score=one.values[task.score],
        plan_score=other.values[task.score],
        agreement=1.0 - len(flips) / len(samples),
        max_abs_diff=largest,
        preprocess_hash=record.hash,
        flips=tuple(flips),
    )


def _predictors(checkpoint: Checkpoint, engine: Engine, trust_code: bool) -> list[Predictor]:
    both = eager_predictor(checkpoint, trust_code=trust_code), engine_predictor(engine)
    return [whole(predict, checkpoint.info.preprocess) for predict in both]


def _flips(
    answers: Sequence[Tensor], batch: Batch, samples: Split, info: CheckpointInfo
) -> Iterator[Flip]:
    """The samples of a batch about which the checkpoint says something else than the plan."""
    task = of(info.task)
    right, made = arrays = [answer.numpy() for answer in answers]
    alike = task.answers.same(right, made, info.task)
    for place in np.flatnonzero(~alike):
        example = samples[int(batch.indices[place])]
        checkpoint, plan = (task.answers.said(a[place], info.labels, info.task) for a in arrays)
        truth = task.answers.truth(example.label, info.labels)
        yield Flip(path=example.path, truth=truth, checkpoint=checkpoint, plan=plan)


def evaluate_split(
    model: Model,
    data: Data,
    *,
    split: str = "val",
    batch_size: int = 32,
    rows: Path | None = None,
    trust_code: bool = False,
    emit: Emit = silent,
) -> Report:
    """What the model's task measures on a split: of a classification the accuracy, the confusion
    matrix and figures of each class.

    Args:
        rows: a file for what is measured of each image, float32 N×R in NumPy's form.
    """
    predict, record, labels = predictor(model, trust_code=trust_code)
    samples = split_of(data, split, labels, task_of(model)[1])
    rows_NR = predict_split(
        lambda batch: predict(batch.images), samples, record, len(labels), batch_size=batch_size,
        emit=emit,
    )  # fmt: skip
    report = measure(rows_NR, samples, labels)
    if rows is not None:
        written = io.BytesIO()
        np.save(written, rows_NR, allow_pickle=False)
        write_atomic(rows, written.getvalue())
    return report
