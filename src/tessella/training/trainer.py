"""A network in training on this process's device: steps, predictions, restored state."""

from __future__ import annotations

import torch
from torch import Tensor

from tessella.artifacts.checkpoint import Checkpoint
from tessella.artifacts.run import RunInfo
from tessella.core.errors import OutOfMemory
from tessella.core.memory import is_out_of_memory
from tessella.nn import convert, zoo
from tessella.training import sparsity
from tessella.training.loss import balanced_weights, classification_loss
from tessella.training.memory import largest_that_runs, out_of_memory
from tessella.training.parallel import World
from tessella.training.precision import MixedPrecision
from tessella.training.solver import optimizer_for, set_rate
from tessella.training.state import TrainState, seed_step, unpack


class Trainer:
    """The module with its optimizer, loss and precision.

    Args:
        info: the run.
        class_counts: training images of each class.
        start: the checkpoint to resume from; without one the recipe's ``init`` decides.

    Attributes:
        module: the network, without the wrapper of data-parallel training.
        state: progress of the checkpoint ``start``, or of a new training.
        kept: weights that ``init`` did not set, with the reason (``zoo.init_from``).
    """

    def __init__(
        self,
        info: RunInfo,
        class_counts: tuple[int, ...],
        world: World,
        *,
        start: Checkpoint | None = None,
    ) -> None:
        self._info, self._class_counts, self._world = info, class_counts, world
        recipe = info.recipe
        torch.manual_seed(recipe.seed)  # the same initial weights in every process
        fetch = recipe.init == "pretrained" and start is None
        module = zoo.build(info.network, pretrained=fetch)
        self.kept: dict[str, str] = {}
        if recipe.init not in ("random", "pretrained") and start is None:
            self.kept = zoo.init_from(module, Checkpoint(recipe.init))
        on_gpu = world.device.type == "cuda"
        self._layout = torch.channels_last if on_gpu else torch.contiguous_format
        module = convert(module, backend=recipe.backend)
        self.module = module.to(world.device).to(memory_format=self._layout)
        if recipe.sparsity == "2:4" and start is None:
            sparsity.prune(self.module)
        self._parallel = world.wrap(self.module)
        self.optimizer = optimizer_for(self.module, recipe.solver)
        if recipe.sparsity == "2:4":
            sparsity.keep_zeros(self.module, self.optimizer)
        self.mixed = MixedPrecision(recipe.precision, world.device)
        self._weights_K = None
        if recipe.class_weights == "balanced":
            self._weights_K = balanced_weights(class_counts).to(world.device)
        self.state = TrainState()
        if start is not None:
            self.state = unpack(start, self.module, self.optimizer, self.mixed)

    def step(
        self, images: Tensor, labels: Tensor, *, done: int, rate: float, momentum: float
    ) -> Tensor:
        """One step after ``done`` finished ones.

        Returns:
            Loss and accuracy over this process's images, on its device.

        Raises:
            OutOfMemory: with the batch size that a smaller step was seen to run with.
        """
        seed_step(self._info.recipe.seed, done, self._world.rank, self._world.device)
        set_rate(self.optimizer, rate, momentum)
        try:
            return self._update(images, labels)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            seen = str(error)
        # Out here the exception is gone, and with it the frames that held the step's tensors.
        raise self._out_of_memory(seen, len(images))

    def predict(self, images: Tensor) -> Tensor:
        """Logits float32 N×K of images N×C×H×W, in evaluation mode."""
        self.module.eval()
        with torch.inference_mode(), self.mixed.autocast():
            logits: Tensor = self.module(self._move(images)).float()
        self.module.train()
        return logits

    def _update(self, images: Tensor, labels: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        with self.mixed.autocast():
            logits = self._parallel(self._move(images))
        labels = self._move(labels)
        smoothing = self._info.recipe.label_smoothing
        loss = classification_loss(logits, labels, self._weights_K, smoothing=smoothing)
        self.mixed.update(loss, self.optimizer)
        right = (logits.detach().argmax(1) == labels).float().mean()
        return torch.stack([loss.detach(), right])

    def _move(self, tensor: Tensor) -> Tensor:
        """The tensor on the device, images in its layout; asynchronous from page-locked memory."""
        tensor = tensor.to(self._world.device, non_blocking=True)
        return tensor.contiguous(memory_format=self._layout) if tensor.ndim == 4 else tensor

    def _out_of_memory(self, seen: str, failed: int) -> OutOfMemory:
        """The error with a batch size that fits, tried out after this trainer is freed."""
        world, info = self._world, self._info
        del self.module, self._parallel, self.optimizer
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
        trainer = Trainer(self._info, self._class_counts, alone)
        images = torch.zeros(batch, *self._info.preprocess.input_shape)
        trainer._update(images, torch.zeros(batch, dtype=torch.int64))
