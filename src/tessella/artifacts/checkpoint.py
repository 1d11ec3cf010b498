"""checkpoint/: a network, its weights, how its inputs are made, and the state to train on.

``checkpoint.json`` is written last in a folder that is renamed into place, so a checkpoint is
complete or absent. Weights and optimizer state are safetensors; nothing is pickled. Torch is
imported where tensors are: the studio lists checkpoints without its 500 MB.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from safetensors import SafetensorError

from tessella.artifacts.files import (
    Member,
    check_member,
    member,
    read_document,
    to_document,
    write_folder,
)
from tessella.core.errors import CorruptArtifact
from tessella.core.preprocess import Preprocess
from tessella.core.record import LATE, parse_json
from tessella.core.task import CLASSIFICATION, TaskRecord

if TYPE_CHECKING:
    import torch

VERSION = 1
WEIGHTS = "model.safetensors"
QUANTIZED = "quantized.onnx"  # of a network that was trained with the roundings of its plan

Answering = Literal["picture", "pixels", "boxes", "masks", "voxels"]


@dataclass(frozen=True, kw_only=True)
class Network:
    """The description of a network that ``nn.zoo.build`` takes.

    Attributes:
        name: a zoo name (``resnet50``), ``timm/NAME``, ``file.py:Class``, or ``net.prototxt``.
        classes: number of outputs.
        channels, height, width: size of the input.
        options: further keyword arguments of the network, JSON scalars.
        source: the text of the user's own file (Python or prototxt), so that the checkpoint is
            whole.
        dense: the outputs are for each pixel, [N, classes, height, width], not for a picture.
        boxes: the outputs are P boxes, [N, P, 4 + classes]: x0 y0 x1 y1 in fractions of the input,
            and a probability of each class, 0 where another box says the same.
        masks: the outputs are such boxes with a mask each, [N, P, 4 + classes + M · M]: how sure
            each cell of the box, cut into M · M, is part of the thing (``tasks.instances``).
        slices: of an input of volumes, [N, channels, slices, height, width], whose outputs are for
            each voxel; None: the input is a picture.
    """

    name: str
    classes: int
    channels: int
    height: int
    width: int
    options: dict[str, str | int | float | bool | None]
    source: str | None = None
    dense: bool = False
    boxes: bool = False
    masks: bool = False
    slices: int | None = field(default=None, metadata=LATE)

    @property
    def sides(self) -> tuple[int, ...]:
        """Height and width of the input; of volumes slices, height and width."""
        front = () if self.slices is None else (self.slices,)
        return (*front, self.height, self.width)

    @property
    def answers(self) -> Answering:
        """What the outputs are for."""
        if self.slices is not None:
            return "voxels"
        if self.masks:
            return "masks"
        return "boxes" if self.boxes else "pixels" if self.dense else "picture"


@dataclass(frozen=True, kw_only=True)
class Position:
    """How far training had come: finished steps, and epochs as a fraction."""

    step: int
    epoch: float


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """What ``checkpoint.json`` says. ``preprocess_hash`` must equal ``preprocess.hash``."""

    network: Network
    preprocess: Preprocess
    preprocess_hash: str
    labels: tuple[str, ...]
    metrics: dict[str, float]
    position: Position
    precision: str
    dataset_hash: str
    files: dict[str, Member]
    task: TaskRecord = CLASSIFICATION

    def __post_init__(self) -> None:
        self.task.check(self.labels)


class Checkpoint:
    """A checkpoint on disk, read-only; every file is checked against its hash when it is read."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.info = read_document(
            self.path / "checkpoint.json", CheckpointInfo, kind="checkpoint", version=VERSION
        )
        if self.info.preprocess.hash != self.info.preprocess_hash:
            raise CorruptArtifact(
                "the preprocessing record does not match its hash",
                seen=self.path,
                fix="restore the checkpoint; a changed record would change every answer",
            )

    @property
    def weights_sha256(self) -> str | None:
        """The hash of the file of weights, by which a plan knows its checkpoint."""
        weights = self.info.files.get(WEIGHTS)
        return None if weights is None else weights.sha256

    def weights(self) -> dict[str, torch.Tensor]:
        """The network's state dict, on the CPU."""
        return self._tensors(WEIGHTS)

    @property
    def is_quantized(self) -> bool:
        """Whether the network rounds as an INT8 plan does: then it is that of ``quantized``."""
        return QUANTIZED in self.info.files

    def quantized(self) -> bytes:
        """The network with its roundings, as the content of an ONNX file."""
        return self._checked(QUANTIZED).read_bytes()

    def training_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Tensors and JSON values for resuming the training (see ``training.state``)."""
        values = self._checked("training_state/state.json").read_bytes()
        return (
            self._tensors("training_state/tensors.safetensors"),
            parse_json(values, where=str(self.path / "training_state/state.json")),
        )

    def _checked(self, name: str) -> Path:
        if name not in self.info.files:
            raise CorruptArtifact(
                f"the checkpoint has no {name}", seen=self.path, fix="use another checkpoint"
            )
        check_member(self.path / name, self.info.files[name])
        return self.path / name

    def _tensors(self, name: str) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        path = self._checked(name)
        try:
            return load_file(path)
        except SafetensorError as error:
            raise CorruptArtifact(f"{name} is not valid safetensors", seen=path) from error

    def __repr__(self) -> str:
        metrics = ", ".join(f"{k} {v:.4g}" for k, v in self.info.metrics.items())
        return f"<Checkpoint {self.info.network.name} @ step {self.info.position.step}: {metrics}>"


def save_checkpoint(
    path: Path,
    *,
    network: Network,
    preprocess: Preprocess,
    labels: tuple[str, ...],
    weights: Mapping[str, torch.Tensor],
    metrics: Mapping[str, float],
    position: Position,
    precision: str = "fp32",
    dataset_hash: str = "",
    task: TaskRecord = CLASSIFICATION,
    state_tensors: Mapping[str, torch.Tensor] | None = None,
    state_values: bytes | None = None,
    quantized: bytes | None = None,
) -> Checkpoint:
    """Write a checkpoint folder, atomically and durably.

    Args:
        metrics: those that are not finite (a diverged loss) are left out: JSON has no NaN.
        state_tensors, state_values: the trainer's state (JSON text in bytes); without them the
            checkpoint can be used but not resumed.
        quantized: the network with its roundings, where it has such; ``weights`` are then those
            that are trained on, which are not rounded.

    Raises:
        OSError: it cannot be written.
    """

    from safetensors.torch import save_file

    def fill(folder: Path) -> None:
        names = ["model.safetensors"]
        save_file(_plain_tensors(weights), folder / names[0])
        if state_tensors is not None and state_values is not None:
            (folder / "training_state").mkdir()
            names += ["training_state/tensors.safetensors", "training_state/state.json"]
            save_file(_plain_tensors(state_tensors), folder / names[1])
            (folder / names[2]).write_bytes(state_values)
        if quantized is not None:
            names.append(QUANTIZED)
            (folder / QUANTIZED).write_bytes(quantized)
        info = CheckpointInfo(
            network=network,
            preprocess=preprocess,
            preprocess_hash=preprocess.hash,
            labels=labels,
            metrics={name: v for name, v in metrics.items() if math.isfinite(v)},
            position=position,
            precision=precision,
            dataset_hash=dataset_hash,
            files={name: member(folder / name) for name in names},
            task=task,
        )
        (folder / "checkpoint.json").write_bytes(to_document("checkpoint", VERSION, info))

    try:
        write_folder(path, fill)
    except SafetensorError as error:  # a full disk, which files of ours tell by an OSError
        raise OSError(f"{path}: {error}") from error
    return Checkpoint(path)


def _plain_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors on the CPU, contiguous and without shared storage, as safetensors requires."""
    return {k: v.detach().to("cpu", copy=True).contiguous() for k, v in tensors.items()}
