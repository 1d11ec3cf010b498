"""train: a recipe from keyword settings, and the loop."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tessella.artifacts.dataset import Dataset
from tessella.artifacts.defaults import completed, describe_defaults
from tessella.artifacts.run import Run
from tessella.artifacts.settings import recipe_from, spelled_out
from tessella.core.events import Emit, phase
from tessella.core.record import to_plain
from tessella.core.reporter import reported
from tessella.training import loop


def train(
    network: str,
    dataset: Dataset | str | Path,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    emit: Emit | None = None,
    **settings: Any,
) -> Run:
    """Train a network on a dataset.

    Args:
        network: a zoo name, ``timm/NAME``, ``file.py:Class`` or ``net.prototxt``.
        dataset: a dataset or its folder.
        out: the run's folder; by default ``runs/NETWORK-DATE``.
        resume: go on where the run in ``out`` stopped; the loss curve is that of an unbroken run.
        emit: told what happens; by default bars show it on a terminal and in a notebook.
        settings: fields of ``Recipe`` (epochs, batch_size, solver, precision, backend, gpus, …),
            and as on the command line ``lr`` and the name of a solver or policy alone. What is
            left out of ``solver``, ``policy``, ``augment`` and ``label_smoothing`` is the default
            for this network (``artifacts.defaults``), or when resuming as it was.

    Returns:
        The run; ``run.best("val/accuracy")`` is its best checkpoint.
    """
    with reported(emit) as told:
        return _train(network, dataset, out, resume, told, settings)


def _train(
    network: str,
    dataset: Dataset | str | Path,
    out: str | Path | None,
    resume: bool,
    emit: Emit,
    settings: Mapping[str, Any],
) -> Run:
    folder = dataset.path if isinstance(dataset, Dataset) else Path(dataset)
    given = {"network": network, "dataset": str(folder), **spelled_out(settings)}
    going_on = resume and out is not None and (Path(out) / "run.json").exists()
    if going_on and out is not None:  # what is not said stays as it was, whatever is default by now
        recipe = recipe_from(_merged(to_plain(Run(out).recipe), given))
    else:
        recipe = completed(recipe_from(given), given)
        if line := describe_defaults(recipe, given):
            emit(phase("recipe", line))
    if out is None:
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        out = Path("runs") / f"{network.replace('/', '-')}-{stamp}"
    return loop.train(recipe, Path(out), resume=resume, emit=emit)


def _merged(settings: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``settings`` with those of ``over`` in their place, one by one also in nested records."""
    nested = {
        name: {**settings[name], **value}
        for name, value in over.items()
        if isinstance(value, dict) and isinstance(settings.get(name), dict)
    }
    return {**settings, **over, **nested}
