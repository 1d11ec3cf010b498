"""Before the first step: the dataset is checked, and ``run.json`` written or compared."""

from __future__ import annotations

import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tessella.artifacts.checkpoint import Network
from tessella.artifacts.dataset import Dataset
from tessella.artifacts.run import Recipe, Run, RunInfo, change_run, write_run
from tessella.core.errors import DataError, UsageError
from tessella.core.record import digest, to_plain
from tessella.data.joining import check_joins
from tessella.nn import zoo
from tessella.tasks import of, targets_of
from tessella.tasks.segmentation.examples import is_ground
from tessella.training.parallel import check_devices
from tessella.training.state import sweep_unfinished


def begin(recipe: Recipe, out: Path, *, resume: bool) -> tuple[Run, bool]:
    """The run in ``out``, new or to be resumed, and whether it is resumed.

    With ``resume``, a folder without a run gets a new one, since a training may be killed that
    early; and a run may get more epochs, and its dataset another place, which ``run.json`` has from
    then on. A run that failed before its first checkpoint is replaced: it holds nothing to lose.

    Raises:
        UsageError: the folder holds a run (without ``resume``), or one of another recipe; or the
            recipe cannot work with this dataset or machine.
        DataError: the dataset cannot be trained on.
    """
    check_devices(recipe.gpus)
    if not (resume and (out / "run.json").exists()):
        check(recipe)
        _require_start(recipe)
    info = describe_run(recipe)
    if (out / "run.json").exists():
        run = Run(out)
        sweep_unfinished(out / "checkpoints")
        if not run.checkpoints() and any(e.kind == "error" for e in run.events()):
            _remove(out)
        elif resume:
            _require_same(run.info, info, out)
            epochs = max(recipe.epochs, run.recipe.epochs)
            now = replace(run.recipe, epochs=epochs, dataset=recipe.dataset)
            return run if now == run.recipe else change_run(run, now), True
    write_run(out, info)
    return Run(out), False


def _remove(out: Path) -> None:
    """Remove the recipe, the events and the charts of a run that failed before a checkpoint."""
    for name in ("run.json", "events.jsonl", "error.json", "workers.log", "way.json"):
        (out / name).unlink(missing_ok=True)
    for name in ("checkpoints", "tensorboard"):
        shutil.rmtree(out / name, ignore_errors=True)


def check(recipe: Recipe) -> None:
    """Refuse a recipe by what is known before any of the dataset's images is read.

    Raises:
        UsageError: no such network, one that does not suit the dataset, too few GPUs, or a setting
            that the dataset's task has no use for.
    """
    check_devices(recipe.gpus)
    dataset = Dataset(recipe.dataset)
    _network(dataset, recipe)
    task = of(dataset.info.task)
    if recipe.shard and (task.head.TAUGHT or dataset.preprocess.volume is not None):
        raise UsageError(
            "the weights of this network cannot be cut over processes: each process calls its "
            "blocks as often as its pictures need",
            seen=f"shard=True, {task.name}",
            fix="leave shard out; recompute and accumulate need less memory, too",
        )
    if recipe.label_smoothing and not task.examples.SMOOTHED:
        raise UsageError(
            f"the targets of {task.name} are not smoothed",
            seen=f"label_smoothing={recipe.label_smoothing:g}",
            fix="leave label_smoothing out",
        )


def _require_start(recipe: Recipe) -> None:
    """Refuse an ``init`` that is no word for a start and no checkpoint."""
    start = Path(recipe.init)
    if recipe.quantize != "none":  # its quantizer takes runs, too
        return
    if recipe.init in ("random", "pretrained") or (start / "checkpoint.json").exists():
        return
    fix = "say random, pretrained, or the path of a checkpoint: runs/NAME/checkpoints/step-…"
    if (start / "run.json").exists() and (saved := Run(start).checkpoints()):
        fix = f"give one of its checkpoints: {saved[-1].path}"
    raise UsageError("a training cannot start from this", seen=f"init={recipe.init}", fix=fix)


def _network(dataset: Dataset, recipe: Recipe) -> Network:
    channels, *sides = dataset.preprocess.input_shape
    head = of(dataset.info.task).head
    return zoo.network(
        recipe.network,
        classes=head.width(len(dataset.classes)),
        channels=channels,
        size=tuple(sides),
        options=recipe.network_options,
        answers=head.ANSWERS,
    )


def describe_run(recipe: Recipe) -> RunInfo:
    """The record of a recipe's run, as ``run.json`` will have it."""
    dataset = Dataset(recipe.dataset)
    _check_splits(dataset, recipe)
    task, classes = of(dataset.info.task), len(dataset.classes)
    return RunInfo(
        recipe=recipe,
        network=_network(dataset, recipe),
        preprocess=dataset.preprocess,
        labels=dataset.classes,
        dataset_hash=dataset.info.content_hash,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        task=task.record(task.loss.numbers(targets_of(dataset.train), classes)),
    )


def _check_splits(dataset: Dataset, recipe: Recipe) -> None:
    task = of(dataset.info.task)
    if why := task.examples.lacking(dataset.classes):
        raise DataError(
            why,
            seen=", ".join(dataset.classes),
            fix="import a folder with one subfolder a class, or a table of labels",
        )
    if len(dataset.train) == 0:
        raise DataError(
            "the dataset has no training images", seen=dataset.path, fix="import it again"
        )
    targets_of(dataset.train)
    counts = dataset.train.info.class_counts
    behind = task.head.ANSWERS in ("pixels", "voxels") and is_ground(dataset.classes[0])
    if task.examples.PLACED and not any(counts[behind:]):  # pixels of no thing are no label
        raise DataError(
            "nothing is labelled in the images for training",
            seen=f"{len(dataset.train):,} images, {', '.join(dataset.classes)[:200]}",
            fix="draw on them on the studio's pages, export that, and import what was exported",
        )
    if (
        recipe.class_weights == "balanced"
        and task.loss.balanced(counts, len(dataset.train)) is None
    ):
        raise UsageError(
            f"{task.name} has no classes to balance",
            seen="class_weights='balanced'",
            fix="leave class_weights out",
        )
    if task.head.ANSWERS != "picture" and (recipe.augment.mixup or recipe.augment.cutmix):
        raise UsageError(
            f"images of {task.name} cannot be mixed: their targets belong to places",
            seen=f"mixup={recipe.augment.mixup}, cutmix={recipe.augment.cutmix}",
            fix="leave mixup and cutmix out",
        )
    check_joins(recipe.augment, task)
    if task.head.ANSWERS in ("pixels", "voxels") and recipe.grow_from < 1:
        raise UsageError(
            f"images of {task.name} cannot grow: each place has a class of its own",
            seen=f"grow_from={recipe.grow_from}",
            fix="leave grow_from out",
        )
    if validates(dataset):
        targets_of(dataset.val)
    elif recipe.patience is not None:
        raise UsageError(
            "early stopping needs a validation split",
            seen=", ".join(dataset.info.splits),
            fix="import again with a holdout for validation, or leave patience out",
        )


def validates(dataset: Dataset) -> bool:
    """Whether the dataset has images to validate on."""
    return "val" in dataset.info.splits and dataset.info.splits["val"].count > 0


def _require_same(before: RunInfo, now: RunInfo, out: Path) -> None:
    """Refuse to resume a run with another recipe or dataset; the error names the differences."""
    changed = differences(before, now)
    if changed and not (len(changed) == 1 and now.recipe.epochs > before.recipe.epochs):
        raise UsageError(
            "the run was begun with other settings",
            seen="; ".join(changed)[:1000],
            fix=f"resume with the settings in {out / 'run.json'}, of which epochs alone may grow, "
            "or train into another folder",
        )


def differences(before: RunInfo, now: RunInfo) -> list[str]:
    """What decides a run and is not the same in two of them, in words."""
    old, new = _decisive(before), _decisive(now)
    return [f"{k} was {old.get(k)!r}, is {new.get(k)!r}" for k in new if old.get(k) != new[k]]


def _decisive(info: RunInfo) -> dict[str, Any]:
    """The settings that decide the run. A dataset counts by its hash, as its folder may move, and
    processes are the same wherever they run."""
    recipe = to_plain(info.recipe)
    del recipe["dataset"], recipe["workers"], recipe["gpus"], recipe["nodes"]
    return {
        **recipe,
        "processes": info.recipe.processes,
        "network": {**to_plain(info.network), "source": digest(info.network.source)},
        "preprocess": info.preprocess.hash,
        "labels": info.labels,
        "task": to_plain(info.task),
        "dataset": info.dataset_hash,
    }
