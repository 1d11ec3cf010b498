"""What a step will take, from shapes alone: the memory, and about how long.

Nothing is computed: a network's forward pass runs on tensors that have shapes and no numbers.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor, nn, optim
from torch.func import functional_call

from tessella.artifacts.run import Precision, Recipe, RunInfo
from tessella.core.errors import TessellaError
from tessella.core.integers import ceil_div
from tessella.nn import zoo
from tessella.training.freezing import Freezing
from tessella.training.precision import width_of
from tessella.training.recomputing import recompute_blocks
from tessella.training.sharding import blocks

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes that a step of one process holds when its backward pass begins, and its gradients.

    Attributes:
        kept: values that the backward pass needs, None where shapes alone do not tell.
    """

    weights: int
    gradients: int
    solver: int
    average: int
    kept: int | None

    @property
    def total(self) -> int | None:
        """All of it, without the workspace of libraries; None where a part is not known."""
        if self.kept is None:
            return None
        return self.weights + self.gradients + self.solver + self.average + self.kept


def memory_of(
    module: nn.Module, optimizer: optim.Optimizer, recipe: Recipe, info: RunInfo
) -> Memory:
    """The memory of one process's step."""
    weights = sum(_nbytes(t) for t in (*module.parameters(), *module.buffers()))
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = sum(map(_nbytes, trained))
    largest = 0
    if recipe.shard:  # a block's weights while it computes, the next one's, and what is in none
        sizes = [sum(map(_nbytes, block.parameters())) for block in blocks(module)]
        largest, learned = max(sizes, default=0), sum(map(_nbytes, module.parameters()))
        weights += ceil_div(learned, recipe.processes) - sum(sizes) + 2 * largest
        gradients = ceil_div(gradients, recipe.processes)
    part = recipe.batch_size // recipe.processes // recipe.accumulate
    shape = (max(part, 1), *info.preprocess.input_shape)
    return Memory(
        weights=weights,
        gradients=gradients + largest,
        solver=gradients * _STATES[recipe.solver.name],
        average=weights if recipe.ema else 0,
        kept=kept_bytes(module, shape, recipe.precision),
    )


def expected_memory(info: RunInfo, optimizer: optim.Optimizer) -> Memory | None:
    """The memory of a run's step, from a network without numbers of its own; None: not known."""
    recipe = info.recipe
    try:
        with torch.device("meta"):
            module = zoo.build(info.network)
            Freezing(module, recipe, 0)
            if recipe.recompute:
                recompute_blocks(module)
            return memory_of(module, optimizer, recipe, info)
    # a network of a user's, which wants numbers when it is made, says so in any of these
    except (TessellaError, RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        log.info("the memory of a step is not forecast: %s", error)
        return None


# Tensors of a weight's size that torch's optimizers keep, with momentum.
_STATES = {
    "sgd": 1, "nesterov": 1, "adagrad": 1, "adadelta": 2, "adam": 2, "adamw": 2, "rmsprop": 2
}  # fmt: skip


def kept_bytes(module: nn.Module, shape: tuple[int, ...], precision: Precision) -> int | None:
    """Bytes that a forward pass keeps for the backward pass, its input among them.

    The pass runs on tensors that have shapes alone. With autocast all values are taken to be of 16
    bits, which norms' statistics and the loss are not.

    Returns:
        None where an operator of the network does not work without numbers.
    """
    dtype = width_of(precision)

    def bare(value: Tensor) -> Tensor:
        kind = dtype if value.is_floating_point() else value.dtype
        made = torch.empty(value.shape, dtype=kind, device="meta")
        return made.requires_grad_(value.requires_grad)

    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    state = {name: bare(value) for name, value in own.items()}
    known = {value.untyped_storage()._cdata for value in state.values()}
    kept: dict[int, Tensor] = {}

    def keep(value: Tensor) -> Tensor:
        place = value.untyped_storage()._cdata
        if place not in known:
            kept[place] = value  # held: its place is not given to another
        return value

    image = torch.empty(shape, dtype=dtype, device="meta")
    was = module.training
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
            outputs = functional_call(module.train(), state, (image,))
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        log.info("what a forward pass keeps is not forecast: %s", error)
        return None
    finally:
        module.train(was)
    kept.setdefault(image.untyped_storage()._cdata, image)
    logits = sum(_nbytes(t) for t in (outputs,) if isinstance(t, Tensor))
    return sum(t.untyped_storage().nbytes() for t in kept.values()) + logits


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
