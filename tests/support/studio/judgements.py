"""Reports of ``tessella evaluate`` made of scores, where the studio keeps them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tessella.api.evaluating import Calibration, Comparison, Judgement, Mistake
from tessella.artifacts.checkpoint import Checkpoint
from tessella.artifacts.dataset import Split
from tessella.core.record import digest
from tessella.tasks.classification.metrics import measured
from tessella.tasks.task import Rows
from tessella.training.confidence import (
    Measure,
    bootstrapped,
    calibration,
    curve_of,
    exact_share,
    mcnemar,
    softmax,
)
from tests.support.studio.workspaces import write_report

LEVEL = 0.95


def scores_of(truth_N: np.ndarray, classes: int, *, sharp: float, seed: int) -> Rows:
    """Scores N×K that prefer the truth; the larger ``sharp``, the more often they are right."""
    noise = np.random.default_rng(seed).normal(size=(len(truth_N), classes))
    noise[np.arange(len(truth_N)), truth_N] += sharp
    return (2 * noise).astype(np.float32)


def judgement_of(
    scores_NK: Rows,
    truth_N: np.ndarray,
    labels: tuple[str, ...],
    *,
    split: str,
    paths: list[str],
    rival_NK: Rows | None = None,
    listed: int = 48,
) -> Judgement:
    """What ``evaluate`` would say of these scores."""
    probabilities_NK = softmax(scores_NK)
    losses_N = -np.log(probabilities_NK[np.arange(len(truth_N)), truth_N])
    said_N = scores_NK.argmax(1)
    error, bins = calibration(probabilities_NK, truth_N)
    (loss,) = bootstrapped(
        lambda drawn: losses_N[None] @ drawn / len(truth_N),
        len(truth_N),
        level=LEVEL,
        resamples=50,
        seed=0,
    )
    comparison = None
    if rival_NK is not None:
        right_2N = [s.argmax(1) == truth_N for s in (scores_NK, rival_NK)]
        one, two, p = mcnemar(*right_2N)
        gap = float(right_2N[0].mean() - right_2N[1].mean())
        comparison = Comparison(
            other="runs/second", other_value=float(right_2N[1].mean()),
            difference=Measure(value=gap, low=gap - 0.05, high=gap + 0.05), only_this=one,
            only_other=two, p_value=p,
        )  # fmt: skip
    return Judgement(
        model="runs/first", split=split, task="classification", count=len(truth_N),
        score="accuracy", level=LEVEL,
        measures={
            "accuracy": exact_share(int((said_N == truth_N).sum()), len(truth_N), LEVEL),
            "loss": loss,
        },
        report=measured(scores_NK, truth_N, labels),
        calibration=Calibration(error=error, temperature=1.7, scaled_error=error / 3, bins=bins),
        curves=tuple(
            curve_of(label, probabilities_NK[:, k], truth_N == k) for k, label in enumerate(labels)
        ),
        mistakes=tuple(
            Mistake(index=int(i), path=paths[i], truth=labels[truth_N[i]], said=labels[said_N[i]],
                    loss=float(losses_N[i]), wrong=bool(said_N[i] != truth_N[i]))
            for i in np.argsort(-losses_N)[:listed]
        ),
        comparison=comparison,
    )  # fmt: skip


def write_judgement(
    root: Path,
    checkpoint: Checkpoint,
    split: Split,
    found: Judgement,
    *,
    rival: Checkpoint | None = None,
) -> None:
    """A judgement, where the studio keeps that of these checkpoints on this split."""
    weights = [
        (c.path.relative_to(root.resolve()).as_posix(), c.info.files["model.safetensors"].sha256)
        for c in (checkpoint, rival) if c is not None
    ]  # fmt: skip
    key = digest([weights, split.name, checkpoint.info.dataset_hash])[:24]
    write_report(root, "judgements", key, found.to_json())
