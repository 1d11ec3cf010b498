"""run/: one training, from its recipe to its checkpoints.

``run.json`` holds the whole recipe, ``events.jsonl`` what happened, ``checkpoints/step-NNNNNNNN/``
the checkpoints. The trainer writes; the studio, the CLI and the API read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from tessella.artifacts.checkpoint import Checkpoint, Network
from tessella.artifacts.files import read_document, to_document, write_atomic
from tessella.core.errors import ArtifactError, UsageError
from tessella.core.events import Event, read_events
from tessella.core.policies import Policy
from tessella.core.preprocess import Preprocess
from tessella.core.task import CLASSIFICATION, TaskRecord

VERSION = 1

SolverName = Literal["sgd", "nesterov", "adagrad", "adadelta", "adam", "adamw", "rmsprop"]
Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
Backend = Literal["torch", "tessella"]


@dataclass(frozen=True, kw_only=True)
class Solver:
    """An optimizer with the settings that people change.

    Attributes:
        centralize: the gradient of each filter of a convolution without bias loses its mean, and so
            do filters that are drawn at random (gradient centralization, Yong et al. 2020). ResNets
            learned glyphs sooner by it, and textures later (``artifacts.defaults``).
    """

    name: SolverName = "nesterov"
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 1e-4
    centralize: bool = False

    def __post_init__(self) -> None:
        if not (self.lr > 0 and 0 <= self.momentum < 1 and self.weight_decay >= 0):
            raise UsageError(
                "a solver needs lr > 0, 0 ≤ momentum < 1 and weight decay ≥ 0",
                seen=f"lr={self.lr}, momentum={self.momentum}, weight_decay={self.weight_decay}",
            )


@dataclass(frozen=True, kw_only=True)
class Augment:
    """Random changes to the training images. Everything is off by default but the random crop,
    which follows from the preprocessing record.

    Attributes:
        flip, flip_vertical: mirror with probability one half.
        rotation: up to this many degrees either way.
        scale: zoom by a factor from 1 − scale to 1 + scale.
        noise: standard deviation of added Gaussian noise, as a fraction of full scale.
        color: strength of random brightness, contrast and saturation, 0 to 1.
        hue: turn the colours of RGB by up to this share of their circle either way, 0 to 0.5.
        mixup: blend each image and its label with another's, by a share from Beta(mixup, mixup);
            0.2 is usual.
        cutmix: put a window of another image into each, and blend the labels likewise; 1 is usual.
        mosaic: the share of the images that are joined of four, of boxes and of masks; 0.5 to 1 is
            usual.
        paste: the share of the images that get things of another image, cut out with their boxes;
            of boxes.
        join_until: the share of the training, 0 to 1, in which images are joined or pasted into:
            the last epochs are to show images as they are.
    """

    flip: bool = False
    flip_vertical: bool = False
    rotation: float = 0.0
    scale: float = 0.0
    noise: float = 0.0
    color: float = 0.0
    hue: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    mosaic: float = 0.0
    paste: float = 0.0
    join_until: float = 0.85

    def __post_init__(self) -> None:
        if not (0 <= self.rotation <= 180 and 0 <= self.scale < 1):
            raise UsageError(
                "rotation is 0 to 180 degrees and scale 0 to 1",
                seen=f"{self.rotation}, {self.scale}",
            )
        if not (0 <= self.noise <= 1 and 0 <= self.color <= 1 and 0 <= self.hue <= 0.5):
            raise UsageError(
                "noise and color are 0 to 1, hue 0 to 0.5",
                seen=f"{self.noise}, {self.color}, {self.hue}",
            )
        shares = self.mosaic, self.paste, self.join_until
        if not all(0 <= share <= 1 for share in shares):
            raise UsageError(
                "mosaic, paste and join_until are shares, 0 to 1",
                seen=", ".join(f"{share}" for share in shares),
            )
        if min(self.mixup, self.cutmix) < 0:
            raise UsageError(
                "mixup and cutmix are not negative", seen=f"{self.mixup}, {self.cutmix}"
            )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides a training. The same recipe and dataset give the same run, and where
    times choose the way of a step (see ``fuse``) to the bit only if ``fuse`` or ``compile`` is set.

    Attributes:
        network: a zoo name, ``timm/NAME``, ``file.py:Class`` or ``net.prototxt``.
        dataset: path of the dataset's folder.
        epochs: passes over the training split; may be a fraction.
        batch_size: images a step, over all processes together.
        precision: of products, with weights and solver in float32: ``fp32``, ``tf32``, ``bf16``,
            ``fp16`` (with loss scaling) or ``fp8``: bf16 whose large linear layers multiply 8-bit
            numbers (``nn.fp8``).
        backend: whose convolutions and linear layers run: torch's, or for each shape the fastest of
            our catalog. A checkpoint does not depend on it.
        fuse: batch norms, sums and activations in one pass, depthwise convolutions by our kernels,
            and a step as a CUDA graph, with its exchange of gradients. By default on a GPU, unless
            times say that another way of a step is faster: those remembered from earlier races on
            this machine, or those of a race in the first minutes where it may save more than it
            costs. Numbers differ from torch's by rounding; true or false is the same way each time.
        compile: torch.compile makes code of the steps, with the same kernels of ours in it, which
            takes half a minute or more at the start; ``tessella train --explain --race 60`` tells
            whether that is faster here.
        gpus: processes on a machine, each on a GPU of its own; with all GPUs hidden (an empty
            CUDA_VISIBLE_DEVICES) each with a share of the cores.
        nodes: machines, with so many processes on each.
        sync_norms: batch norms take the statistics of all processes' images instead of each one's
            own; a step then runs call by call.
        compress: exchange gradients between processes as products of two matrices of so many
            columns (PowerSGD, Vogels et al. 2019), where links are slow; 1 to 4 are usual, 0 is
            whole gradients. What a product lacks is added to the next one, and is not kept in
            checkpoints: a training that goes on has other numbers. Not in fp16.
        shard: each process keeps a part of the weights, the gradients and the solver's state, and
            gathers a block's weights while it computes (torch's FSDP2): for networks that do not
            fit. The numbers are those of whole weights but for rounding, and checkpoints the same
            files; a step runs call by call.
        val_interval, snapshot_interval: epochs between validations and checkpoints; may be
            fractions.
        patience: stop after this many validations without a better score.
        keep_last: how many of the newest checkpoints stay, besides the best.
        label_smoothing: the share of the target, 0 to 1, that all classes have alike in training.
        class_weights: ``balanced`` weighs the loss by the inverse class frequency.
        sparsity: ``2:4``: the two smallest of each four weights that ``init`` gives become zero,
            and stay so. The same training once more brings a checkpoint's accuracy back.
        quantize: ``int8``: train the checkpoint or the run of ``init`` on with the roundings of its
            INT8 plan, which evaluation computes as the plan will (docs/precision.md).
        init: ``random``, ``pretrained`` (the network's library, online) or a checkpoint's path.
        freeze: how many of the first stages keep the weights that ``init`` gives; −1: all but the
            head. A stage is a block, or a layer outside of any.
        probe_epochs: so many epochs the head learns alone, before all that is not frozen does.
        layer_decay: the rate of each stage as a factor of the next one's, for fine-tuning; 0.65 to
            0.9 are usual, 1 is the same rate everywhere.
        clip: the longest that a step's gradients, all together, may be as a vector: longer ones are
            shortened to it. 1 is usual for transformers, 0 is no limit.
        ema: validate and save an average of the weights, of which each step keeps this share; 0.999
            is usual, 0 is none.
        grow_from: begin with images of this share of their side, which grow in five steps and are
            whole for the last quarter; 0.5 to 0.75 are usual, 1 is whole images from the start.
        accumulate: cut each batch into so many parts, whose gradients are added up: less memory.
            Batch norms then see the parts.
        deterministic: add numbers up in the same order each time, so that also on a GPU a training
            that is killed and goes on has the losses, to the bit, of one that was not. Its ways are
            not raced, ``compile`` is none of them, and an operation that has no such kernel ends
            the training.
        recompute: compute a block's inner values again in the backward pass instead of keeping
            them: less memory, a third more computing, the same numbers.
        decode: where JPEG files are decoded that a dataset keeps as they are (``original``), if
            they are more than 256 MB decoded: on the ``host``, or, where they are only cut and
            mirrored, by the ``gpu``. By default by a GPU that has decoders of its own (A100, H100
            and later of that class), since these give the bits of the host; others round a cosine
            transform otherwise.
        workers: how many load images for each process that trains; 0: none beside it. By default
            as many as cores where a GPU computes, else none. They are processes where images are
            decoded that take more than 256 MB decoded, or changed in other ways than by cuts;
            else threads.
    """

    network: str
    dataset: str
    epochs: float = 30.0
    batch_size: int = 64
    solver: Solver = field(default_factory=Solver)
    policy: Policy = field(default_factory=Policy)
    augment: Augment = field(default_factory=Augment)
    precision: Precision = "fp32"
    backend: Backend = "torch"
    fuse: bool | None = None
    compile: bool = False
    decode: Literal["host", "gpu"] | None = None
    gpus: int = 1
    nodes: int = 1
    sync_norms: bool = False
    compress: int = 0
    shard: bool = False
    seed: int = 0
    val_interval: float = 1.0
    snapshot_interval: float = 1.0
    patience: int | None = None
    keep_last: int = 2
    label_smoothing: float = 0.0
    class_weights: Literal["none", "balanced"] = "none"
    sparsity: Literal["none", "2:4"] = "none"
    quantize: Literal["none", "int8"] = "none"
    init: str = "random"
    freeze: int = 0
    probe_epochs: float = 0.0
    layer_decay: float = 1.0
    clip: float = 0.0
    ema: float = 0.0
    grow_from: float = 1.0
    accumulate: int = 1
    recompute: bool = False
    deterministic: bool = False
    workers: int | None = None
    network_options: dict[str, str | int | float | bool | None] | None = None

    def __post_init__(self) -> None:
        positive = {
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "gpus": self.gpus,
            "nodes": self.nodes,
            "val_interval": self.val_interval,
            "snapshot_interval": self.snapshot_interval,
            "keep_last": self.keep_last,
            "accumulate": self.accumulate,
        }
        for name, value in positive.items():
            if value <= 0:
                raise UsageError(f"{name} must be positive", seen=value)
        if self.batch_size % self.processes:
            several = "" if self.nodes == 1 else f", nodes={self.nodes}"
            count = self.processes
            raise UsageError(
                "the batch size must be a multiple of the number of GPUs",
                seen=f"batch_size={self.batch_size}, gpus={self.gpus}{several}",
                fix=f"use batch_size={math.ceil(self.batch_size / count) * count}",
            )
        if self.batch_size % (self.processes * self.accumulate):
            parts = self.processes * self.accumulate
            raise UsageError(
                "the batch size must be a multiple of GPUs times parts",
                seen=f"batch_size={self.batch_size}, gpus={self.gpus}, "
                f"accumulate={self.accumulate}",
                fix=f"use batch_size={math.ceil(self.batch_size / parts) * parts}",
            )
        self._check_tuning()
        self._check_processes()
        if self.precision == "fp8" and self.backend != "torch":
            raise UsageError(
                "layers of 8-bit products are torch's",
                seen=f"precision='fp8', backend={self.backend!r}",
                fix="leave backend out, or train with precision bf16",
            )
        self._check_quantize()
        if not 0 <= self.label_smoothing < 1:
            raise UsageError("label_smoothing is 0 to 1", seen=self.label_smoothing)
        if self.patience is not None and self.patience < 1:
            raise UsageError("patience counts validations, at least 1", seen=self.patience)

    @property
    def processes(self) -> int:
        """How many train together, on all machines."""
        return self.nodes * self.gpus

    def _check_tuning(self) -> None:
        if (self.freeze or self.probe_epochs) and self.init == "random":
            raise UsageError(
                "only weights that have learned something can be frozen",
                seen=f"freeze={self.freeze}, probe_epochs={self.probe_epochs:g}, init='random'",
                fix="give init='pretrained' or the path of a checkpoint",
            )
        if self.decode not in (None, "host", "gpu"):
            raise UsageError("JPEG files are decoded on the host or the gpu", seen=self.decode)
        if self.fuse and (self.backend != "torch" or self.recompute):
            raise UsageError(
                "norms are fused in torch's steps that keep all values",
                seen=f"fuse=True, backend={self.backend!r}, recompute={self.recompute}",
                fix="leave fuse out, or backend and recompute",
            )
        if self.compile and (self.fuse or self.backend != "torch"):
            raise UsageError(
                "torch.compile makes code of torch's own steps",
                seen=f"compile=True, fuse={self.fuse}, backend={self.backend!r}",
                fix="leave compile out, or fuse and backend",
            )
        if self.compile and self.deterministic:
            raise UsageError(
                "the order of sums in torch.compile's code is chosen by measuring",
                seen="compile=True, deterministic=True",
                fix="leave one of them out",
            )
        if self.sync_norms and (self.fuse or self.compile):
            raise UsageError(
                "norms of all processes exchange their statistics in the middle of a step",
                seen=f"sync_norms=True, fuse={self.fuse}, compile={self.compile}",
                fix="leave fuse and compile out, or sync_norms",
            )
        if not 0 <= self.probe_epochs < self.epochs:
            raise UsageError(
                "probe_epochs is a part of epochs",
                seen=f"{self.probe_epochs:g} of {self.epochs:g}",
                fix="for a head that learns alone to the end use freeze=-1",
            )
        if not 0 <= self.clip < math.inf:
            raise UsageError("clip is a length, 0 or more", seen=self.clip)
        if not (0 < self.layer_decay <= 1 and 0 < self.grow_from <= 1 and 0 <= self.ema < 1):
            raise UsageError(
                "layer_decay and grow_from are above 0 to 1, ema 0 to below 1",
                seen=f"layer_decay={self.layer_decay}, grow_from={self.grow_from}, ema={self.ema}",
            )

    def _check_processes(self) -> None:
        if self.compress < 0:
            raise UsageError("compress counts columns, 0 or more", seen=self.compress)
        if self.processes == 1 and (self.compress or self.sync_norms):
            raise UsageError(
                "one process has nothing to exchange with others",
                seen=f"gpus=1, compress={self.compress}, sync_norms={self.sync_norms}",
                fix="leave compress and sync_norms out, or train with more gpus",
            )
        if self.shard:
            self._check_shard()
        if self.compress and self.precision == "fp16":
            raise UsageError(
                "what compressed gradients lack is added to the next ones, and an infinite one of "
                "fp16, whose step is skipped, would never leave that sum",
                seen=f"compress={self.compress}, precision='fp16'",
                fix="train with precision bf16, or leave compress out",
            )

    def _check_shard(self) -> None:
        if self.processes == 1:
            raise UsageError(
                "one process has nobody to share its weights with",
                seen="shard=True, gpus=1",
                fix="train with more gpus, or recompute, which needs less memory, too",
            )
        usual = {
            "backend": "torch", "compile": False, "compress": 0, "sparsity": "none", "ema": 0.0,
            "probe_epochs": 0.0,
        }  # fmt: skip
        other = [f"{n}={getattr(self, n)!r}" for n, v in usual.items() if getattr(self, n) != v]
        other += ["fuse=True"] if self.fuse else []
        other += ["precision='fp16'"] if self.precision == "fp16" else []
        if other:
            raise UsageError(
                "these settings cannot be had with shard",
                seen=", ".join(other),
                fix="leave them out, or shard; in place of fp16 take bf16",
            )

    def _check_quantize(self) -> None:
        if self.quantize not in ("none", "int8"):
            raise UsageError("training can round to int8 alone", seen=self.quantize)
        if self.quantize == "none":
            return
        if self.init in ("random", "pretrained"):
            raise UsageError(
                "quantization-aware training goes on from a trained network",
                seen=f"quantize={self.quantize!r}, init={self.init!r}",
                fix="give the path of a run or of a checkpoint: init=PATH (--init PATH)",
            )
        usual = {
            "precision": "fp32", "backend": "torch", "fuse": None, "compile": False, "gpus": 1,
            "nodes": 1, "freeze": 0, "probe_epochs": 0.0, "grow_from": 1.0, "recompute": False,
        }  # fmt: skip
        other = [f"{n}={getattr(self, n)!r}" for n, v in usual.items() if getattr(self, n) != v]
        if other:
            raise UsageError(
                "these settings cannot be had with quantize",
                seen=", ".join(other),
                fix="leave them out: a network with its roundings is trained whole, in float32 and "
                "in one process",
            )


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """The content of ``run.json``: the recipe, and the network and dataset of the run."""

    recipe: Recipe
    network: Network
    preprocess: Preprocess
    labels: tuple[str, ...]
    dataset_hash: str
    created: str
    task: TaskRecord = CLASSIFICATION

    def __post_init__(self) -> None:
        self.task.check(self.labels)


@dataclass(frozen=True, kw_only=True)
class Metric:
    """Values measured at one step."""

    step: int
    epoch: float
    values: dict[str, float]
    time: float


class Run:
    """A training on disk, finished or not, read-only.

    Args:
        info: what ``run.json`` holds, where that is on another machine.
    """

    def __init__(self, path: str | Path, *, info: RunInfo | None = None) -> None:
        self.path = Path(path)
        if info is None:
            info = read_document(self.path / "run.json", RunInfo, kind="run", version=VERSION)
        self.info = info

    @property
    def recipe(self) -> Recipe:
        return self.info.recipe

    def events(self) -> list[Event]:
        return read_events(self.path / "events.jsonl")[0]

    def metrics(self) -> list[Metric]:
        """The loss curve: one entry a step, in order; steps that a resume repeats count once."""
        return metrics_of(self.events())

    def checkpoints(self) -> list[Checkpoint]:
        """Complete checkpoints, oldest first."""
        folder = self.path / "checkpoints"
        return [
            Checkpoint(p) for p in sorted(folder.glob("step-*")) if (p / "checkpoint.json").exists()
        ]

    def latest(self) -> Checkpoint:
        if not (found := self.checkpoints()):
            raise ArtifactError(
                "the run has no checkpoint yet",
                seen=self.path,
                fix="wait for the first one, or train with a shorter snapshot interval",
            )
        return found[-1]

    def best(self, metric: str | None = None) -> Checkpoint:
        """The checkpoint with the highest ``metric`` (lowest where its name ends in ``loss``).

        Args:
            metric: by default the score of the run's task: ``val/accuracy`` of a classification.
        """
        metric = metric or self.info.task.metric
        scored = [c for c in self.checkpoints() if metric in c.info.metrics]
        if not scored:
            known = sorted({name for c in self.checkpoints() for name in c.info.metrics})
            raise ArtifactError(
                f"no checkpoint of the run has {metric!r}",
                seen=", ".join(known) or "no metrics",
                fix="choose one of these, or use run.latest()",
            )
        sign = -1.0 if metric.endswith("loss") else 1.0
        return max(scored, key=lambda c: (sign * c.info.metrics[metric], c.info.position.step))

    def __repr__(self) -> str:
        return f"<Run {self.recipe.network} on {self.recipe.dataset}: {self.path}>"


def metrics_of(events: list[Event]) -> list[Metric]:
    """Metrics of an event log, merged by step; a ``resume`` drops what came after its step."""
    merged: dict[int, Metric] = {}
    for event in events:
        if event.kind == "phase" and event.name == "resume" and event.step is not None:
            merged = {step: m for step, m in merged.items() if step <= event.step}
        if event.kind == "metric" and event.step is not None:
            before = merged[event.step].values if event.step in merged else {}
            merged[event.step] = Metric(
                step=event.step,
                epoch=event.epoch or 0.0,
                values={**before, **event.values},
                time=event.time,
            )
    return [merged[step] for step in sorted(merged)]


def write_run(path: Path, info: RunInfo) -> None:
    """Begin a run: write ``run.json``. Refuses a folder that already holds a run."""
    if (path / "run.json").exists():
        raise UsageError(
            "this folder already holds a run",
            seen=path,
            fix="choose another folder, or go on with resume=True (--resume)",
        )
    write_atomic(path / "run.json", to_document("run", VERSION, info))


def change_run(run: Run, recipe: Recipe) -> Run:
    """The run with what a resumed one may change of its recipe, as ``run.json`` has it then."""
    info = replace(run.info, recipe=recipe)
    write_atomic(run.path / "run.json", to_document("run", VERSION, info))
    return Run(run.path)
