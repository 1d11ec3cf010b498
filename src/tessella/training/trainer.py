"""A network in training on this process's device: steps, predictions, restored state."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from tessella.artifacts.checkpoint import Checkpoint
from tessella.artifacts.run import Recipe, RunInfo
from tessella.artifacts.shards import SplitInfo
from tessella.core.errors import OutOfMemory
from tessella.core.memory import is_out_of_memory
from tessella.core.preprocess import darkest
from tessella.data.loading import Batch, in_torch, steps_per_epoch
from tessella.nn import convert, fp8, zoo
from tessella.nn.windows import over_windows
from tessella.search.compile_ahead import end_compilers
from tessella.tasks import LossSettings, of
from tessella.training import sparsity
from tessella.training.averaging import Average
from tessella.training.captured import Captured, captures
from tessella.training.exchange import Exchange
from tessella.training.feed import Fed, Feed, decodes_on_gpu
from tessella.training.freezing import Freezing
from tessella.training.growing import require_any_size, resized, share_of_side
from tessella.training.loss import first_not_finite, gradient_not_finite
from tessella.training.memory import largest_that_runs, out_of_memory
from tessella.training.mixing import Mix, drawn_mix, mixed
from tessella.training.parallel import World
from tessella.training.precision import MixedPrecision
from tessella.training.profiling import LayerTime, layer_times
from tessella.training.recomputing import recompute_blocks
from tessella.training.schedule import Schedule
from tessella.training.sharding import shard, whole
from tessella.training.solver import center, filters_of, optimizer_for, set_rate
from tessella.training.state import TrainState, pack, seed_step, unpack
from tessella.training.synchronized import synchronized
from tessella.training.ways import Choice, called, called_loss, usual_way


def _converted(module: nn.Module, recipe: Recipe, device: torch.device) -> nn.Module:
    """The module with the layers of the recipe's backend and precision."""
    if recipe.precision == "fp8":
        fp8.require_products(device)
        fp8.to_fp8(module)
        return module
    return convert(module, backend=recipe.backend)


def _loss_settings(info: RunInfo, trained: SplitInfo, world: World) -> LossSettings:
    weights_K = None
    if info.recipe.class_weights == "balanced":
        weights_K = of(info.task).loss.balanced(trained.class_counts, trained.count)
    if weights_K is not None:
        weights_K = weights_K.to(world.device)
    return LossSettings(
        numbers=info.task.numbers, weights_K=weights_K, smoothing=info.recipe.label_smoothing
    )


class Trainer:
    """The module with its optimizer, loss and precision.

    Args:
        info: the run.
        trained: the training split: its images, and in how many of them each class occurs.
        start: the checkpoint to resume from; without one the recipe's ``init`` decides.
        network: with its roundings, for a recipe with ``quantize``; else the recipe's is built.
        way: of the steps; None: the usual one of the recipe.

    Attributes:
        module: the network, without the wrapper of data-parallel training.
        state: progress of the checkpoint ``start``, or of a new training.
        kept: weights that ``init`` did not set, with the reason (``zoo.init_from``).
        feed: brings batches to the device.
        average: of the weights, where the recipe asks for one.
        numbers: of the task's record, as the checkpoint ``start`` or the run has them.
        way: how its steps run, and why so.
    """

    def __init__(
        self,
        info: RunInfo,
        trained: SplitInfo,
        world: World,
        *,
        start: Checkpoint | None = None,
        network: nn.Module | None = None,
        way: Choice | None = None,
    ) -> None:
        self._spare = copy.deepcopy(network)  # for trials, after this one's memory is freed
        self._info, self._trained, self._world = info, trained, world
        self._task = of(info.task)
        self.numbers = info.task.numbers if start is None else start.info.task.numbers
        recipe = info.recipe
        torch.manual_seed(recipe.seed)  # the same initial weights in every process
        self.kept: dict[str, str] = {}
        module = self._built(start) if network is None else network
        on_gpu = world.device.type == "cuda"
        last = torch.channels_last if info.preprocess.volume is None else torch.channels_last_3d
        layout = last if on_gpu else torch.contiguous_format
        decodes = decodes_on_gpu(recipe, info.preprocess, world.device)
        self.feed = Feed(info.preprocess, world.device, layout, decodes=decodes)
        module = _converted(module, recipe, world.device)
        if recipe.sync_norms and world.size > 1:
            module = synchronized(module)
        self._sharded = recipe.shard and world.size > 1  # parts alone go to the device, below
        if not self._sharded:
            module = module.to(world.device).to(memory_format=layout)
        self.module = module
        if recipe.sparsity == "2:4" and start is None:
            sparsity.prune(self.module)
        in_epoch = steps_per_epoch(trained.count, recipe.batch_size)
        self._steps = Schedule(recipe=recipe, steps_per_epoch=in_epoch).total
        if recipe.grow_from < 1:
            require_any_size(self.module, info.preprocess.input_shape, recipe.grow_from)
        self._freezing = Freezing(self.module, recipe, in_epoch)
        self.average = Average(self.module, recipe.ema) if recipe.ema else None
        if recipe.recompute:  # behind the average, whose copies would call this module's blocks
            recompute_blocks(self.module)
        if self._sharded:
            shard(self.module, world.device, world.size)
        self.way = way or usual_way(recipe, world.device)
        self._called = called(self.module, self.way.way)
        self._loss_of = called_loss(self._task.loss.loss, self.way.way, self._task.head.ANSWERS)
        self._parallel: nn.Module = self._called
        self._captured: Captured | None = None
        self._exchange: Exchange | None = None
        self.optimizer = optimizer_for(self.module, recipe.solver, layer_decay=recipe.layer_decay)
        if recipe.sparsity == "2:4":
            sparsity.keep_zeros(self.module, self.optimizer)
        self.mixed = MixedPrecision(recipe.precision, world.device)
        self._loss = _loss_settings(info, trained, world)
        self.state = TrainState()
        if start is not None:
            self.state = unpack(
                start, self.module, self.optimizer, self.mixed, average=self.average
            )

    def _built(self, start: Checkpoint | None) -> nn.Module:
        """The network on the CPU, as the recipe's ``init`` wants it."""
        recipe = self._info.recipe
        fetch = recipe.init == "pretrained" and start is None
        module = zoo.build(self._info.network, pretrained=fetch)
        if recipe.init not in ("random", "pretrained") and start is None:
            self.kept = zoo.init_from(module, Checkpoint(recipe.init))
        if recipe.init == "random" and recipe.solver.centralize and start is None:
            center(filters_of(module))
        return module

    @property
    def evaluated(self) -> nn.Module:
        """The module that is validated and saved: the average, or the one that is trained."""
        return self.module if self.average is None else self.average.module

    def step(
        self, images: Tensor, labels: Any, *, done: int, rate: float, momentum: float
    ) -> Tensor:
        """One step after ``done`` finished ones, with images and labels that are on the device.

        Returns:
            The loss, and what the task measures at a step (the accuracy of a classification), over
            this process's images, on its device.

        Raises:
            OutOfMemory: with the batch size that a smaller step was seen to run with.
        """
        try:
            return self.plain_step(images, labels, done=done, rate=rate, momentum=momentum)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            seen = str(error)
        if self._sharded:  # one process alone cannot try a smaller batch
            raise OutOfMemory(
                f"a step of {self._info.recipe.batch_size} images does not fit",
                seen=seen.splitlines()[0],
                fix="use a smaller batch_size, recompute, or more processes",
            )
        # Out here the exception is gone, and with it the frames that held the step's tensors.
        raise self._out_of_memory(seen, len(images))

    def plain_step(
        self, images: Tensor, labels: Any, *, done: int, rate: float, momentum: float
    ) -> Tensor:
        """``step``, of which what torch raises comes out as it is: no smaller one is tried."""
        seed_step(self._info.recipe.seed, done, self._world.rank, self._world.device)
        set_rate(self.optimizer, rate, momentum)
        self._thaw(done)
        measured = self._update(images, labels, done)
        if self.way.way != "eager":
            end_compilers()  # of what the step had captured
        if self.average is not None:
            self.average.update(done)
        return measured

    def packed(self) -> tuple[dict[str, Tensor], dict[str, Tensor], bytes]:
        """What a checkpoint holds: the weights, and the tensors and values of the training's state.

        All processes call this together where each has a part, and rank 0 gets them whole.
        """
        keep = self._world.rank == 0
        weights = {n: whole(v, keep=keep) for n, v in self.evaluated.state_dict().items()}
        tensors, values = pack(
            self.module, self.optimizer, self.mixed, self.state, average=self.average, keep=keep
        )
        return weights, tensors, values

    def where_not_finite(self, batch: Batch) -> str | None:
        """Where numbers that are not finite begin, in a pass of these images."""

        def call() -> None:
            fed = self.feed(batch)
            with self.mixed.autocast():
                self.module(fed.images, *((fed.labels,) if self._task.head.TAUGHT else ()))

        return first_not_finite(self.module, call)

    def gradient_not_finite(self) -> str | None:
        """The first gradient of the last step that is not finite."""
        return gradient_not_finite(self.module)

    def layers(self, count: int) -> tuple[LayerTime, ...]:
        """The times of the module's layers in a step with so many blank images."""
        fed = self.blank(count)

        def loss() -> Tensor:
            with self.mixed.autocast():
                taught = (fed.labels,) if self._task.head.TAUGHT else ()
                outputs = self.module(fed.images, *taught)
            return self._measured(outputs, fed.labels)[0]

        return layer_times(self.module, loss, self._world.device)

    def predict(self, batch: Batch) -> Tensor:
        """The answers float32 [N, …] to a batch's images, in evaluation mode."""
        module = self.evaluated.eval()
        with torch.inference_mode(), self.mixed.autocast():
            images = self.feed(batch).images
            if self._info.preprocess.volume is None:
                outputs: Tensor = module(images).float()
            else:
                record = self._info.preprocess
                outputs = over_windows(module, images, record.sides, outside=darkest(record))
            answers = self._task.head.finish(outputs, self._info.task.numbers)
        self._freezing.train()
        return answers

    def answer_blank(self) -> None:
        """The network's answer to a black image, which nobody wants: it changes nothing."""
        self.answer(self.blank(1).images)

    def answer(self, images: Tensor) -> None:
        """The network's answer to images on the device, which nobody wants: it changes nothing."""
        module = self.evaluated.eval()
        # what a network keeps of its first pass takes part in a backward pass later
        with torch.no_grad(), self.mixed.autocast():
            module(images)
        self._freezing.train()

    def try_step(self, count: int) -> None:
        """One step with blank images of full size, in which all learns that ever will.

        What torch raises comes out as it is: nothing is tried again.
        """
        fed = self.blank(count)
        self._thaw(sys.maxsize)
        self._update(fed.images, fed.labels, sys.maxsize)

    def blank(self, count: int) -> Fed:
        """A batch of black images on the device."""
        record, classes = self._info.preprocess, len(self._info.labels)
        dtype = torch.uint8 if record.depth == 8 else torch.uint16
        labels = self._task.examples.blank(count, classes, record.sides)
        return self.feed(
            Batch(
                pixels=torch.zeros(count, *record.pixel_shape, dtype=dtype),
                record=record,
                labels=in_torch(labels),
                indices=torch.arange(count),
            )
        )

    def _thaw(self, done: int) -> None:
        """Let those stages learn that do in the step after ``done`` finished ones."""
        if self._freezing.apply(done):
            self._parallel = self._called  # the old wrapper lets go before there is a new one
            if self._exchange is not None:
                self._exchange.close()
            self._exchange = self._captured = None
            alone = self._world.size == 1 or not self._task.head.TAUGHT
            graph = self.way.way != "eager" and alone
            if not (graph and captures(self._info.recipe, self._world, self.module)):
                if not self._sharded:
                    compress = self._info.recipe.compress
                    self._parallel = self._world.wrap(self._called, compress=compress)
                return
            if self._world.size > 1:
                self._exchange = Exchange(self.module, bucket_bytes=self._world.bucket_bytes)
            self._captured = Captured(self._averaged(self._pass), self.module.parameters())

    def _averaged(self, work: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A pass whose gradients are those of all processes, where no wrapper sees to it."""
        return work if self._exchange is None else self._exchange.around(work)

    def _update(self, images: Tensor, labels: Any, done: int) -> Tensor:
        recipe = self._info.recipe
        progress = done / self._steps
        images = resized(images, share_of_side(recipe.grow_from, progress))
        mix = drawn_mix(recipe.augment, seed=recipe.seed, step=done)
        if self._captured is not None and mix is None and isinstance(labels, Tensor):
            measured = self._captured(images, labels)
        else:
            self.optimizer.zero_grad()
            measured = self._averaged(self._in_parts)(images, labels, mix)
        self.mixed.step(self.optimizer, clip=recipe.clip)
        return measured

    def _in_parts(self, images: Tensor, labels: Any, mix: Mix | None) -> Tensor:
        """Passes of a batch's parts, whose gradients are added up."""
        others, share = None, 1.0
        if mix is not None:
            images, share = mixed(images, mix)
            others = labels.roll(1, 0)
        count, accumulate = len(images), self._info.recipe.accumulate
        ends = [count * n // accumulate for n in range(accumulate + 1)]
        parts = [slice(a, b) for a, b in pairwise(ends) if b > a]
        measured = []
        for part in parts:
            weight = (part.stop - part.start) / count
            other = None if others is None else others[part]
            with nullcontext() if part is parts[-1] else self._world.alone_for_now(self._parallel):
                made = self._pass(images[part], labels[part], other, share=share, weight=weight)
            measured.append(made * weight)
        return measured[0] if len(parts) == 1 else torch.stack(measured).sum(0)

    def _pass(
        self,
        images: Tensor,
        labels: Any,
        others: Any = None,
        *,
        share: float = 1,
        weight: float = 1,
    ) -> Tensor:
        """Forward and backward: gradients join those that are there; the loss and its measure."""
        with self.mixed.autocast():
            taught = (labels,) if self._task.head.TAUGHT else ()
            outputs = self._parallel(images, *taught)
        loss, measure = self._measured(outputs, labels)
        if others is not None:
            other = self._measured(outputs, others)
            loss = share * loss + (1 - share) * other[0]
            measure = share * measure + (1 - share) * other[1]
        self.mixed.backward(loss if weight == 1 else loss * weight)
        return torch.stack([loss.detach(), measure])

    def _measured(self, outputs: Tensor, labels: Any) -> tuple[Tensor, Tensor]:
        """The loss, and what the task measures at a step."""
        loss = self._loss_of(outputs, labels, self._loss)
        return loss, self._task.loss.step_measure(outputs.detach(), labels, self._loss.numbers)

    def _out_of_memory(self, seen: str, failed: int) -> OutOfMemory:
        """The error with a batch size that fits, tried out after this trainer is freed."""
        world, info = self._world, self._info
        del self.module, self._called, self._parallel, self._captured, self.optimizer
        del self._exchange
        del self._freezing
        self.average = None
        fits = largest_that_runs(self._trial, failed)
        return out_of_memory(
            seen,
            batch_size=info.recipe.batch_size,
            fits=None if fits is None else fits * world.size,
            device=world.device,
        )

    def _trial(self, batch: int) -> None:
        """One step of a new single-process trainer with ``batch`` images."""
        alone = World(device=self._world.device)
        network = copy.deepcopy(self._spare)
        trainer = Trainer(self._info, self._trained, alone, network=network, way=self.way)
        trainer.try_step(batch)
