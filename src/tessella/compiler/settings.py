"""What a build is told besides the network: of its plan, and of how to measure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tessella.core.errors import UsageError
from tessella.core.preprocess import Preprocess
from tessella.core.task import CLASSIFICATION, TaskRecord


@dataclass(frozen=True, kw_only=True)
class About:
    """What a plan says of itself to its user.

    Attributes:
        built_from: name of the source.
        rebuild: the command that builds this plan elsewhere.
        preprocess: how images become the input.
        labels: what the outputs are called.
        accuracy: what the source was measured at, by metric.
        weights_sha256: the hash of the checkpoint's file of weights.
        task: what the outputs mean.
    """

    built_from: str
    rebuild: str
    preprocess: Preprocess | None = None
    labels: tuple[str, ...] = ()
    accuracy: Mapping[str, float] = field(default_factory=dict)
    weights_sha256: str | None = None
    task: TaskRecord = CLASSIFICATION


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """How kernels are measured, and what is known before.

    Attributes:
        cache: file of timings that were measured before; read, and added to.
        lock: ``Plan.lock`` of another build of this network on this device. It decides, nothing is
            measured, and the plan has the same bytes.
        budget_s: about how long to measure the kernels of one step.
        time_limit_s: how long to measure in all, from the first look at a kernel on.
        untuned: nothing is measured, the cost model chooses: for a machine that is not here.
    """

    cache: Path | None = None
    lock: str | None = None
    budget_s: float = 0.02
    time_limit_s: float | None = None
    untuned: bool = False

    def __post_init__(self) -> None:
        if self.time_limit_s is not None and not self.time_limit_s >= 0:
            raise UsageError("a time limit is seconds", seen=self.time_limit_s, fix="say 60")
