"""What a checkpoint holds beyond the weights, so that a resumed training goes on exactly.

That is the optimizer's tensors, the loss scale and the ``TrainState``. The data, the learning rate
and the random numbers of a step are functions of the recipe and the step: there is nothing to save.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn, optim

from tessella.artifacts.checkpoint import Checkpoint
from tessella.artifacts.run import Run
from tessella.core.errors import CorruptArtifact
from tessella.core.record import from_plain, to_plain
from tessella.training.averaging import Average
from tessella.training.precision import MixedPrecision
from tessella.training.sharding import laid_as, placed, whole

LAST = "raw"  # weights as the last step left them, where the checkpoint's are an average


@dataclass(kw_only=True)
class TrainState:
    """The progress of a training.

    Attributes:
        step: finished steps.
        best_accuracy: the highest score on the validation split so far: the accuracy of a
            classification, else the score of the run's task.
        stale: validations since the best one.
        loss_sum, accuracy_sum, loss_count: sums over the steps since the last validation, of the
            loss and of what the task measures at a step.
    """

    step: int = 0
    best_accuracy: float | None = None
    stale: int = 0
    loss_sum: float = 0.0
    accuracy_sum: float = 0.0
    loss_count: int = 0


@dataclass(frozen=True, kw_only=True)
class _Saved:
    standing: TrainState
    scaler: dict[str, int | float]
    scalars: dict[str, int | float | bool | None]


def seed_step(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Seed the random numbers (such as dropout's) of a step, with a stream for each process."""
    text = f"{seed}/{step}/{rank}".encode()
    number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
    # The generators themselves: torch.manual_seed takes 0.1 ms to look for every kind of device.
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(number)


def pack(
    module: nn.Module,
    optimizer: optim.Optimizer,
    mixed: MixedPrecision,
    state: TrainState,
    *,
    average: Average | None,
    keep: bool = True,
) -> tuple[dict[str, Tensor], bytes]:
    """``state_tensors`` and ``state_values`` of ``save_checkpoint``.

    Args:
        keep: as of ``sharding.whole``.

    A value of the optimizer is called ``PARAMETER/NAME``, as in ``conv1.weight/momentum_buffer``.
    The module's own weights are among them, as ``NAME/raw``, where the checkpoint's are those of
    ``average``.
    """
    tensors: dict[str, Tensor] = {}
    if average is not None:
        tensors |= {f"{name}/{LAST}": value for name, value in module.state_dict().items()}
    scalars: dict[str, int | float | bool | None] = {}
    for name, parameter in module.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{name}/{key}"] = whole(value, keep=keep)
            else:
                scalars[f"{name}/{key}"] = value
    saved = _Saved(standing=state, scaler=mixed.scaler.state_dict(), scalars=scalars)
    return tensors, json.dumps(to_plain(saved)).encode()


def unpack(
    checkpoint: Checkpoint,
    module: nn.Module,
    optimizer: optim.Optimizer,
    mixed: MixedPrecision,
    *,
    average: Average | None,
) -> TrainState:
    """Restore module, average, optimizer and scaler from a checkpoint.

    Raises:
        CorruptArtifact: the checkpoint holds no training state, or one of another network.
    """
    tensors, plain = checkpoint.training_state()
    saved = from_plain(_Saved, plain, where=str(checkpoint.path / "training_state"))
    last = {name: tensors.pop(name) for name in list(tensors) if name.endswith(f"/{LAST}")}
    module.load_state_dict(placed(checkpoint.weights(), module))
    if average is not None:
        average.module.load_state_dict(checkpoint.weights())
        _load_last(module, last, checkpoint.path)
    name_of = {parameter: name for name, parameter in module.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    index_of = {name_of[p]: index for index, p in enumerate(parameters)}
    state: dict[int, dict[str, object]] = {}
    for path, value in {**tensors, **saved.scalars}.items():
        name, _, key = path.rpartition("/")
        if name not in index_of:
            raise CorruptArtifact(
                "the training state is of another network",
                seen=f"optimizer state of {name!r} in {checkpoint.path}",
                fix="resume from a checkpoint of this run",
            )
        parameter = parameters[index_of[name]]
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            value = laid_as(value, parameter)  # as fused optimizers want it
        state.setdefault(index_of[name], {})[key] = value
    # The settings come from the recipe, which is the same; only what was accumulated is loaded.
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    if mixed.scaler.is_enabled():
        mixed.scaler.load_state_dict(saved.scaler)
    return saved.standing


def _load_last(module: nn.Module, last: dict[str, Tensor], path: Path) -> None:
    weights = {name.removesuffix(f"/{LAST}"): value for name, value in last.items()}
    if weights.keys() != module.state_dict().keys():
        raise CorruptArtifact(
            "the training state has not the weights of the last step",
            seen=f"{len(weights)} of {len(module.state_dict())} in {path}",
            fix="resume from a checkpoint of this run",
        )
    module.load_state_dict(weights)


def prune(run: Run, *, keep_last: int) -> None:
    """Remove all checkpoints but the newest ``keep_last`` and the one with the best score."""
    found = run.checkpoints()
    keep = {checkpoint.path for checkpoint in found[-keep_last:]}
    if any(run.info.task.metric in checkpoint.info.metrics for checkpoint in found):
        keep.add(run.best().path)
    for checkpoint in found:
        if checkpoint.path not in keep:
            _remove(checkpoint.path)


def sweep_unfinished(checkpoints: Path) -> None:
    """Remove the rests of checkpoints that a killed process was writing or removing."""
    for path in checkpoints.glob(".step-*"):
        shutil.rmtree(path)


def _remove(checkpoint: Path) -> None:
    """Rename and remove a folder: a kill in between leaves none that looks complete."""
    hidden = checkpoint.with_name(f".{checkpoint.name}.old")
    os.replace(checkpoint, hidden)
    shutil.rmtree(hidden)
