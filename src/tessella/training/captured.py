"""A forward and backward pass as one CUDA graph: a step costs the host one launch.

A ResNet-50's launches take 45 to 60 ms of a slow core, beside 39 ms of an H100 (FP16, 256 images).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tessella.artifacts.run import Recipe
from tessella.core.errors import TrainError, first_line
from tessella.core.memory import is_out_of_memory
from tessella.nn.fused import interruptions
from tessella.training.feed import gpu_asked
from tessella.training.parallel import World

MOST = 4  # graphs, of targets of several shapes: batches of boxes have few
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
        self._images: tuple[torch.Size, torch.dtype] = (torch.Size([0]), torch.float32)
        self._seen: dict[tuple[object, ...], int] = {}  # passes of a shape of targets
        self._recorded: dict[tuple[object, ...], _Recorded] = {}
        self._pool: Any = None  # memory of all graphs: one runs at a time
        self.refused: str | None = None

    def __call__(self, images: Tensor, targets: Tensor) -> Tensor:
        """One pass forward and backward, whose gradients replace those of the pass before."""
        sizes, shape = (images.shape, images.dtype), (targets.shape, targets.dtype)
        if sizes != self._images and self.refused is None:
            if self._recorded and images.shape[0] < self._images[0][0]:
                return self._eagerly(images, targets)  # the last batch of an epoch
            self._images = sizes
            self._seen, self._recorded, self._pool = {}, {}, None
        seen = self._seen[shape] = self._seen.get(shape, 0) + 1
        if (recorded := self._recorded.get(shape)) is not None:
            return recorded.replay(images, targets)
        if seen <= WARM or self.refused is not None or len(self._recorded) == MOST:
            before = interruptions()
            measured = self._eagerly(images, targets)
            if interruptions() > before:
                self.refused = "the network is not one graph of tensor operations"
            return measured
        recorded = self._record(images, targets)
        if recorded is None:
            return self._eagerly(images, targets)
        self._recorded[shape] = recorded
        return recorded.replay(images, targets)

    def _eagerly(self, images: Tensor, targets: Tensor) -> Tensor:
        for parameter in self._parameters:
            parameter.grad = None
        return self._work(images, targets)

    def _record(self, images: Tensor, targets: Tensor) -> _Recorded | None:
        """Record the pass; nothing of it is computed yet. None where it cannot be recorded.

        Raises:
            TrainError: torch is not what it was afterwards.
        """
        given = torch.empty_like(images), torch.empty_like(targets)
        for parameter in self._parameters:
            parameter.grad = None  # the graph makes gradients of its own
        graph = torch.cuda.CUDAGraph()
        try:
            # other threads may pin memory meanwhile
            with (
                gpu_asked,
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
            ):
                measured = self._work(*given)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            self.refused = first_line(error)
            _forget_recording(images.device, self.refused)
            return None
        self._pool = graph.pool()
        gradients = [(p, p.grad) for p in self._parameters]
        return _Recorded(graph=graph, given=given, measured=measured, gradients=gradients)


@dataclass(frozen=True, kw_only=True)
class _Recorded:
    """A pass as a graph.

    Attributes:
        given: the images and targets that it reads.
        measured: what it writes, beside the gradients of parameters.
    """

    graph: torch.cuda.CUDAGraph
    given: tuple[Tensor, Tensor]
    measured: Tensor
    gradients: list[tuple[nn.Parameter, Tensor | None]]

    def replay(self, images: Tensor, targets: Tensor) -> Tensor:
        for into, tensor in zip(self.given, (images, targets), strict=True):
            into.copy_(tensor)
        self.graph.replay()
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        return self.measured.clone()


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
