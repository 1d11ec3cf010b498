"""verify and evaluate: models on the samples of a split."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tessella.api.loading import load
from tessella.api.predicting import Model, eager_predictor, engine_predictor, predictor
from tessella.api.samples import Data, split_of
from tessella.api.sources import open_checkpoint
from tessella.artifacts.checkpoint import Checkpoint
from tessella.artifacts.plan import Plan
from tessella.artifacts.run import Run
from tessella.core.errors import ArtifactError
from tessella.core.events import Emit, silent
from tessella.runtime.engine import Engine
from tessella.training.evaluate import Evaluation, evaluate


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
        agreement: fraction of samples with the same answer.
        max_abs_diff: largest difference between two scores.
        flips: samples with another answer.
    """

    samples: int
    checkpoint_accuracy: float
    plan_accuracy: float
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
    labels = checkpoint.info.labels
    samples = split_of(data, split, labels)
    eager = eager_predictor(checkpoint, trust_code=trust_code)
    planned = engine_predictor(engine)
    a = evaluate(eager, samples, record, labels, batch_size=batch_size, emit=emit)
    b = evaluate(planned, samples, record, labels, batch_size=batch_size, emit=emit)
    first, second = a.predictions, b.predictions
    differ = np.flatnonzero(first != second)
    return Verification(
        samples=len(samples),
        checkpoint_accuracy=a.accuracy,
        plan_accuracy=b.accuracy,
        agreement=1.0 - len(differ) / len(samples),
        max_abs_diff=float(np.abs(a.scores - b.scores).max()),
        preprocess_hash=record.hash,
        flips=tuple(
            Flip(
                path=samples[int(i)].path,
                truth=labels[samples[int(i)].label],
                checkpoint=labels[int(first[i])],
                plan=labels[int(second[i])],
            )
            for i in differ
        ),
    )


def evaluate_split(
    model: Model,
    data: Data,
    *,
    split: str = "val",
    batch_size: int = 32,
    trust_code: bool = False,
    emit: Emit = silent,
) -> Evaluation:
    """Accuracy, confusion matrix and per-class figures of a checkpoint or a plan on a split."""
    predict, record, labels = predictor(model, trust_code=trust_code)
    samples = split_of(data, split, labels)
    return evaluate(predict, samples, record, labels, batch_size=batch_size, emit=emit)
