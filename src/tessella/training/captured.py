"""A forward and backward pass as one CUDA graph: a step costs the host one launch.

A ResNet-50's launches take 45 to 60 ms of a slow core, beside 39 ms of an H100 (FP16, 256 images).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from tessella.artifacts.run import Recipe
from tessella.core.errors import TrainError
from tessella.core.memory import is_out_of_memory
from tessella.nn.fused import interruptions
from tessella.training.feed import gpu_asked
from tessella.training.parallel import World

WARM = 3  # steps of a shape before its graph: libraries choose algorithms, and Dynamo captures


def captures(recipe: Recipe, world: World, module: nn.Module) -> bool:
    """Whether fused or compiled passes may become a graph: one pass is a whole step's, on a GPU.

    Of several processes only those of a network whose buffers are norms' running statistics: each
    gathers its own, and rank 0's are kept.
    """
    compressed = recipe.compress > 0 and world.size > 1  # the hook of a wrapper, which torch has
    if recipe.accumulate != 1 or compressed or world.device.type != "cuda":
        return False
    norms = (m for m in module.modules() if isinstance(m, nn.modules.batchnorm._NormBase))
    of_norms = sum(len(list(norm.buffers(recurse=False))) for norm in norms)
    return world.size == 1 or of_norms == len(list(module.buffers()))


class Captured:
    """Runs passes of images and targets, from some steps of the same shape on as a graph.

    A network that asks the GPU for a number in the middle cannot be one: Dynamo, which captures it
    first, breaks there.

    Args:
        work: the pass: from images and targets to what is measured; leaves gradients in parameters.
        parameters: whose gradients the pass makes.

    Attributes:
        refused: why there is no graph, once that is known.
    """

    def __init__(
        self, work: Callable[[Tensor, Tensor], Tensor], parameters: Iterable[nn.Parameter]
    ) -> None:
        self._work = work
        self._parameters = [p for p in parameters if p.requires_grad]
        self._shape: tuple[object, ...] | None = None
        self._seen = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self.refused: str | None = None

    def __call__(self, images: Tensor, targets: Tensor) -> Tensor:
        """One pass; its gradients replace those of the one before."""
        shape = (images.shape, images.dtype, targets.shape, targets.dtype)
        if shape != self._shape and self.refused is None:
            if self._graph is not None and images.shape[0] < self._images.shape[0]:
                return self._eagerly(images, targets)  # the last batch of an epoch
            self._shape, self._seen, self._graph = shape, 0, None
        self._seen += 1
        if self._graph is None and (self._seen <= WARM or self.refused is not None):
            before = interruptions()
            measured = self._eagerly(images, targets)
            if interruptions() > before:
                self.refused = "the network is not one graph of tensor operations"
            return measured
        if self._graph is None:
            self._graph = self._capture(images, targets)
        if self._graph is None:
            return self._eagerly(images, targets)
        self._images.copy_(images)
        self._targets.copy_(targets)
        self._graph.replay()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        return self._measured.clone()

    def _eagerly(self, images: Tensor, targets: Tensor) -> Tensor:
        for parameter in self._parameters:
            parameter.grad = None
        return self._work(images, targets)

    def _capture(self, images: Tensor, targets: Tensor) -> torch.cuda.CUDAGraph | None:
        """Record the pass; nothing of it is computed yet. None where it cannot be recorded.

        Raises:
            TrainError: torch is not what it was afterwards.
        """
        self._images, self._targets = torch.empty_like(images), torch.empty_like(targets)
        for parameter in self._parameters:
            parameter.grad = None  # the graph makes gradients of its own
        graph = torch.cuda.CUDAGraph()
        try:
            # other threads may pin memory meanwhile
            with gpu_asked, torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._measured = self._work(self._images, self._targets)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            self.refused = str(error).splitlines()[0][:200]
            _forget_recording(images.device, self.refused)
            return None
        self._gradients = [parameter.grad for parameter in self._parameters]
        return graph


def _forget_recording(device: torch.device, seen: str) -> None:
    """Give torch's random numbers a new state: the old one waits for the end of a recording.

    Its seed is lost, which each step sets.
    """
    try:
        generator = torch.cuda.default_generators[device.index or 0]
        generator.graphsafe_set_state(torch.Generator(device).graphsafe_get_state())
        torch.rand(1, device=device)
    except RuntimeError as error:
        raise TrainError(
            "a step could not be recorded as a CUDA graph", seen=seen, fix="train with fuse=False"
        ) from error
