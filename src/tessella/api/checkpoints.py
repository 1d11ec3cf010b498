"""Checkpoints, and their networks, without a compiler: it is imported for one that rounds."""

from __future__ import annotations

from pathlib import Path

import torch

from tessella import api
from tessella.artifacts.checkpoint import Checkpoint
from tessella.artifacts.run import Run
from tessella.core.errors import UsageError
from tessella.nn import zoo


def module_of(checkpoint: Checkpoint, *, trust_code: bool = False) -> torch.nn.Module:
    """The checkpoint's network in evaluation mode: where it rounds, as its plan will compute it."""
    if checkpoint.is_quantized:
        return api.read_quantized(checkpoint.quantized()).eval()
    return zoo.load(checkpoint, trust_code=trust_code)


def open_checkpoint(source: Checkpoint | Run | str | Path) -> Checkpoint:
    """A checkpoint from itself, from a run (its best, else its latest), or from their path."""
    if isinstance(source, Checkpoint):
        return source
    if isinstance(source, str | Path):
        if Path(source).is_file():
            raise UsageError(
                "this is a file, and a checkpoint or a run is a folder",
                seen=source,
                fix="give the folder of a run or of a checkpoint; a .plan is compiled already",
            )
        if not (Path(source) / "run.json").exists():
            return Checkpoint(source)
        source = Run(source)
    scored = any(source.info.task.metric in c.info.metrics for c in source.checkpoints())
    return source.best() if scored else source.latest()
