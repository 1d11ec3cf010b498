"""train and forecast: a recipe from keyword settings, and what is made of it."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tessella import api
from tessella.artifacts.dataset import Dataset
from tessella.artifacts.defaults import completed, describe_defaults
from tessella.artifacts.run import Recipe, Run
from tessella.artifacts.settings import recipe_from, spelled_out
from tessella.core.errors import UsageError
from tessella.core.events import Emit, phase, silent
from tessella.core.record import to_plain
from tessella.core.reporter import reported
from tessella.tasks import for_defaults
from tessella.training import forecast as forecasting
from tessella.training import loop
from tessella.training.forecast import Forecast
from tessella.training.machines import Started, place_of, settings_of, started
from tessella.training.prepare import check
from tessella.training.quantizing import Quantizer

AUTO = "auto"


def train(
    network: str,
    dataset: Dataset | str | Path,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    node_rank: int | None = None,
    rendezvous: str | None = None,
    emit: Emit | None = None,
    **settings: Any,
) -> Run:
    """Train a network on a dataset.

    Args:
        network: a zoo name, ``timm/NAME``, ``file.py:Class`` or ``net.prototxt``.
        dataset: a dataset or its folder.
        out: the run's folder; by default ``runs/NETWORK-DATE``.
        resume: go on where the run in ``out`` stopped; the loss curve is that of an unbroken run.
        node_rank, rendezvous: with ``nodes``, which machine this is, from 0, and ``"HOST:PORT"``
            where they meet: the first one's address, with a free port, in a network that you trust.
            Processes that torchrun has started need neither, nor ``gpus`` and ``nodes``.
        emit: told what happens; by default bars show it on a terminal and in a notebook.
        settings: fields of ``Recipe`` (epochs, batch_size, solver, precision, backend, gpus, …),
            and as on the command line ``lr`` and the name of a solver or policy alone;
            ``batch_size="auto"`` is the largest one that fits. What is left out of ``solver``,
            ``policy``, ``augment`` and ``label_smoothing`` is the default for this network
            (``artifacts.defaults``), or when resuming as it was.

    Returns:
        The run; ``run.best("val/accuracy")`` is its best checkpoint. Its folder is on the first
        machine.
    """
    process = started()
    if process is not None:
        return _train_started(
            process, network, dataset, out, settings, resume=resume, emit=emit,
            place=(node_rank, rendezvous),
        )  # fmt: skip
    with reported(emit) as told:
        there = Path(out) if resume and out is not None else None
        recipe = _recipe(network, dataset, settings, there=there, emit=told)
        place = place_of(recipe.nodes, node_rank, rendezvous)
        if place is not None and out is None:
            raise UsageError(
                "a training on several machines needs the name of a folder", fix="give out"
            )
        if out is None:
            stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
            out = Path("runs") / f"{network.replace('/', '-')}-{stamp}"
        return loop.train(
            recipe,
            Path(out),
            resume=resume,
            quantizer=_quantizer(told),
            place=place,
            over=_over(network, dataset, settings, there if place and place.rank else None),
            emit=told,
        )


def _train_started(
    process: Started,
    network: str,
    dataset: Dataset | str | Path,
    out: str | Path | None,
    settings: Mapping[str, Any],
    *,
    resume: bool,
    emit: Emit | None,
    place: tuple[int | None, str | None],
) -> Run:
    """``train`` in one of several processes, of which the first alone tells what happens."""
    if place != (None, None) or out is None:
        raise UsageError(
            "torchrun has said where this process trains, and the run needs a folder",
            seen=f"node_rank={place[0]}, rendezvous={place[1]}, out={out}",
            fix="leave node_rank and rendezvous out, and give out",
        )
    with reported(silent if process.rank else emit) as told:
        there = Path(out) if resume else None
        settings = settings_of(process, settings)
        recipe = _recipe(network, dataset, settings, there=there, emit=told)
        over = _over(network, dataset, settings, there if process.rank else None)
        return loop.train_started(recipe, Path(out), resume=resume, over=over, emit=told)


def forecast(
    network: str,
    dataset: Dataset | str | Path,
    *,
    race_s: float | None = None,
    emit: Emit | None = None,
    **settings: Any,
) -> Forecast:
    """What a training will be like here: memory, time, and every setting with its defaults.

    Args:
        race_s: seconds in which all ways of a step are tried; None: 300 on a GPU, on a CPU 0.
        settings: as of ``train``.
    """
    with reported(emit) as told:
        recipe = _recipe(network, dataset, settings, there=None, emit=told)
        return forecasting.forecast(recipe, race_s=race_s, quantizer=_quantizer(told))


def _over(
    network: str, dataset: Dataset | str | Path, settings: Mapping[str, Any], there: Path | None
) -> Callable[[Recipe], Recipe] | None:
    """The first process's recipe with these settings over it, for one that resumes without having
    the run; None for all others."""
    if there is None or (there / "run.json").exists():
        return None
    given = _given(network, dataset, settings)
    if given.get("batch_size") == AUTO:
        del given["batch_size"]
    return lambda recipe: recipe_from(_merged(to_plain(recipe), given))


def _given(
    network: str, dataset: Dataset | str | Path, settings: Mapping[str, Any]
) -> dict[str, Any]:
    folder = dataset.path if isinstance(dataset, Dataset) else Path(dataset)
    return {"network": network, "dataset": str(folder), **spelled_out(settings)}


def _recipe(
    network: str,
    dataset: Dataset | str | Path,
    settings: Mapping[str, Any],
    *,
    there: Path | None,
    emit: Emit,
) -> Recipe:
    """The recipe of settings; what they leave out is as in the run ``there``, or a default."""
    given = _given(network, dataset, settings)
    going_on = there is not None and (there / "run.json").exists()
    if given.get("batch_size") == AUTO:
        nodes, gpus = given.get("nodes", 1), given.get("gpus", 1)
        if not going_on and (nodes > 1 or started() is not None):
            raise UsageError(
                "what fits is found by one process, and all need the same batch_size",
                seen=f"batch_size='auto', nodes={nodes}, gpus={gpus}",
                fix="ask tessella train --explain --batch-size auto on one machine, and give its "
                "number times the machines",
            )
        del given["batch_size"]
        if not going_on:
            given["batch_size"] = _fitting(given)
            emit(phase("batch", f"{given['batch_size']} images a step"))
    if going_on and there is not None:  # what is not said stays, whatever is default by now
        return recipe_from(_merged(to_plain(Run(there).recipe), given))
    recipe = recipe_from(given)
    recipe = completed(recipe, given, **for_defaults(Dataset(recipe.dataset)))
    check(recipe)
    if line := describe_defaults(recipe, given):
        emit(phase("recipe", line))
    return recipe


def _fitting(given: Mapping[str, Any]) -> int:
    unit = given.get("gpus", 1) * given.get("accumulate", 1)
    recipe = recipe_from({**given, "batch_size": unit})
    return forecasting.fitting_batch(recipe, quantizer=_quantizer(silent))


def _quantizer(emit: Emit) -> Quantizer:
    """Who trains without roundings waits for no compiler: it is imported with the first of them."""
    return lambda info, start: api.quantizer(emit=emit)(info, start)


def _merged(settings: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``settings`` with those of ``over`` in their place, one by one also in nested records."""
    nested = {
        name: {**settings[name], **value}
        for name, value in over.items()
        if isinstance(value, dict) and isinstance(settings.get(name), dict)
    }
    return {**settings, **over, **nested}
