"""sweep: the best settings of a training, found by many trials."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast, get_args

from tessella.artifacts.dataset import Dataset
from tessella.artifacts.defaults import completed
from tessella.artifacts.files import read_document, to_document, write_atomic
from tessella.artifacts.run import Recipe
from tessella.artifacts.settings import recipe_from, spelled_out, with_value
from tessella.artifacts.sweep import (
    INFO,
    VERSION,
    Axis,
    Pruner,
    Sampler,
    Scalar,
    Sweep,
    SweepInfo,
    axis_of,
)
from tessella.core.errors import DataError, UsageError
from tessella.core.events import Emit
from tessella.core.record import to_plain
from tessella.core.reporter import reported
from tessella.tasks import for_defaults
from tessella.training.prepare import check, validates
from tessella.training.study import require_optuna
from tessella.training.sweep import Search

TRIALS = 30


def sweep(
    network: str,
    dataset: Dataset | str | Path,
    *,
    vary: Mapping[str, Any],
    out: str | Path,
    trials: int | None = None,
    sampler: Sampler = "tpe",
    pruner: Pruner = "asha",
    parallel: int | None = None,
    resume: bool = False,
    emit: Emit | None = None,
    **settings: Any,
) -> Sweep:
    """Search for the settings with which a network learns a dataset best. Needs Optuna.

    Args:
        vary: settings by name, each with a range or choices:
            ``{"lr": "1e-4..1e-2 log", "batch_size": [32, 64], "augment.rotation": "0..15"}``.
            ``network`` may vary, too.
        out: the sweep's folder; its ``best.json`` is the best recipe so far.
        trials: how many trainings; 30, or of a grid all.
        sampler: ``tpe``, ``random`` or ``grid``.
        pruner: ``asha`` or ``hyperband`` end trials that fall behind; ``none``.
        parallel: trials at once: as many as there are GPUs for, on a CPU one.
        resume: go on with the sweep in ``out``, perhaps with more ``trials``.
        emit: told what happens; by default bars show it on a terminal and in a notebook.
        settings: as of ``train``; those that vary win over them.

    Returns:
        The trials, the best first; ``sweep.run()`` is the best one's run.

    Raises:
        UsageError: a setting or its values cannot work, or Optuna is not installed.
        DataError: the dataset has no validation split.
    """
    require_optuna()
    out = Path(out)
    dataset = dataset if isinstance(dataset, Dataset) else Dataset(dataset)
    base = {"network": network, "dataset": str(dataset.path), **spelled_out(settings)}
    axes = tuple(axis_of(name, given) for name, given in vary.items())
    _check_choice("sampler", sampler, get_args(Sampler))
    _check_choice("pruner", pruner, get_args(Pruner))
    if not validates(dataset):
        raise DataError(
            "a sweep compares trials by their validation, and the dataset has no split for it",
            seen=", ".join(dataset.info.splits),
            fix="import again with holdout=0.1",
        )

    asked = for_defaults(dataset)

    def recipe_of(values: Mapping[str, Scalar]) -> Recipe:
        given = base
        for path, value in values.items():
            given = with_value(given, path, value)
        return completed(recipe_from(given), given, **asked)

    usual = to_plain(recipe_of({}))
    usual_trials = _grid_size(axes) if sampler == "grid" else TRIALS
    info = SweepInfo(
        settings=json.dumps(base, sort_keys=True),
        axes=axes,
        trials=trials if trials is not None else usual_trials,
        sampler=sampler,
        pruner=pruner,
        seed=usual["seed"],
        score=dataset.info.task.metric,
        dataset_hash=dataset.info.content_hash,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    _try_ends(axes, recipe_of)
    info = _begun(out, info, resume=resume)
    first = {axis.path: value for axis in axes if axis.has(value := _at(usual, axis.path))}
    with reported(emit) as told:
        return Search(out, info, recipe_of, parallel=parallel, first=first, emit=told).go()


def _check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"unknown {name}", seen=value, fix=f"use {', '.join(known)}")


def _grid_size(axes: tuple[Axis, ...]) -> int:
    count = 1
    for axis in axes:
        count *= max(1, len(axis.choices))
    return count


def _try_ends(axes: tuple[Axis, ...], recipe_of: Any) -> None:
    """Check a recipe of each end of each axis: what cannot work is told before anything starts."""
    for axis in axes:
        for value in axis.ends:
            check(recipe_of({axis.path: value}))


def _at(plain: Mapping[str, Any], path: str) -> Scalar:
    group, dot, inner = path.partition(".")
    return cast(Scalar, (plain[group] or {}).get(inner) if dot else plain[group])


def _begun(out: Path, info: SweepInfo, *, resume: bool) -> SweepInfo:
    """Write ``sweep.json``, or compare it with what is there."""
    path = out / INFO
    if not path.exists():
        write_atomic(path, to_document("sweep", VERSION, info))
        return info
    if not resume:
        raise UsageError(
            "this folder already holds a sweep",
            seen=out,
            fix="choose another folder, or go on with resume=True (--resume)",
        )
    there = read_document(path, SweepInfo, kind="sweep", version=VERSION)
    same = replace(info, trials=there.trials, created=there.created)
    if same != there:
        changed = [k for k, v in to_plain(same).items() if v != to_plain(there)[k]]
        raise UsageError(
            "the sweep was begun with other settings",
            seen=f"other {', '.join(changed)}",
            fix=f"resume with those in {path}, of which trials alone may grow, or choose another "
            "folder",
        )
    if info.trials > there.trials:
        write_atomic(path, to_document("sweep", VERSION, replace(there, trials=info.trials)))
        return replace(there, trials=info.trials)
    return there
