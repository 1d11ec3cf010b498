"""train: a recipe from keyword settings, and the loop."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tessella.artifacts.dataset import Dataset
from tessella.artifacts.run import Recipe, Run
from tessella.core.errors import ArtifactError, UsageError
from tessella.core.events import Emit, silent
from tessella.core.record import from_plain, to_plain
from tessella.training import loop


def train(
    network: str,
    dataset: Dataset | str | Path,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    emit: Emit = silent,
    **settings: Any,
) -> Run:
    """Train a network on a dataset.

    Args:
        network: a zoo name, ``timm/NAME``, ``file.py:Class`` or ``net.prototxt``.
        dataset: a dataset or its folder.
        out: the run's folder; by default ``runs/NETWORK-DATE``.
        resume: go on where the run in ``out`` stopped; the loss curve is that of an unbroken run.
        emit: told what happens.
        settings: fields of ``Recipe`` (epochs, batch_size, solver, precision, backend, gpus, …).

    Returns:
        The run; ``run.best("val/accuracy")`` is its best checkpoint.
    """
    folder = dataset.path if isinstance(dataset, Dataset) else Path(dataset)
    recipe = recipe_from({"network": network, "dataset": str(folder), **settings})
    if out is None:
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        out = Path("runs") / f"{network.replace('/', '-')}-{stamp}"
    return loop.train(recipe, Path(out), resume=resume, emit=emit)


def recipe_from(settings: Mapping[str, Any]) -> Recipe:
    """A recipe from keyword settings; nested records may be given as dicts."""
    known = Recipe.__dataclass_fields__
    if unknown := sorted(set(settings) - set(known)):
        raise UsageError(
            "unknown training setting", seen=", ".join(unknown), fix=f"use {', '.join(known)}"
        )
    plain = {name: to_plain(value) for name, value in settings.items()}
    for name in ("epochs", "val_interval", "snapshot_interval"):
        if isinstance(plain.get(name), int):
            plain[name] = float(plain[name])
    try:
        return from_plain(Recipe, plain, where="recipe")
    except ArtifactError as error:
        if isinstance(error.__cause__, UsageError):  # a record's own words are the clearest
            raise error.__cause__ from None
        raise UsageError(error.wrong, seen=error.seen, fix="correct the setting") from error
