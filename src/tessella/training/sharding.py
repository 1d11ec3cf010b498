"""Weights, gradients and the solver's state cut over the processes (torch's FSDP2).

Each process keeps its part of every tensor, and gathers the weights of a block while that computes.
Checkpoints hold whole tensors, as those of other trainings do. What imports torch's part of it, a
quarter of torch's own time, is in ``fully_sharded``.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from tessella.core.errors import UsageError
from tessella.nn.zoo import stages

_FULLY_SHARDED = "tessella.training.fully_sharded"


def blocks(module: nn.Module) -> list[nn.Module]:
    """The parts of a network whose weights are gathered together; the rest is the network's own."""
    parts = [part for stage in stages(module) for part in stage.modules.values()]
    return [p for p in parts if p is not module and any(w.ndim > 1 for w in p.parameters())]


def shard(module: nn.Module, device: torch.device, processes: int) -> None:
    """Cut a network's weights, in place, and move them to the device block by block.

    Every process has the same whole weights before.

    Raises:
        UsageError: layers share weights.
    """
    names = dict(module.named_parameters(remove_duplicate=False))
    if len({id(p) for p in names.values()}) < len(names):
        raise UsageError(
            "weights that layers share cannot be cut over processes",
            seen=type(module).__name__,
            fix="leave shard out",
        )
    importlib.import_module(_FULLY_SHARDED).shard(module, blocks(module), device, processes)


def unsent(module: nn.Module) -> AbstractContextManager[None]:
    """Within it the gradients of a cut network are added up here, and not exchanged."""
    made: AbstractContextManager[None] = importlib.import_module(_FULLY_SHARDED).unsent(module)
    return made


def is_cut(value: Any) -> bool:
    """Whether a tensor is a part of one, or a module has such."""
    if isinstance(value, Tensor):
        return hasattr(value, "full_tensor")
    return any(map(is_cut, value.parameters()))


def whole(value: Tensor, *, keep: bool = True) -> Tensor:
    """A tensor with all its parts, on the CPU if it had parts; all processes call this together.

    Args:
        keep: False: this process only gives its part, and gets nothing.
    """
    if not is_cut(value):
        return value
    found: Tensor = value.full_tensor()  # type: ignore[attr-defined]
    return found.cpu() if keep else found.new_empty(0)


def laid_as(value: Tensor, parameter: Tensor) -> Tensor:
    """A copy of a whole tensor which lies as the parameter of its shape does, or is cut like it."""
    if is_cut(parameter):
        made: Tensor = importlib.import_module(_FULLY_SHARDED).cut_as(value, parameter)
        return made
    return torch.empty_like(parameter).copy_(value)


def placed(weights: Mapping[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """Whole weights as ``module.load_state_dict`` takes them."""
    own = module.state_dict()
    return {n: laid_as(v, own[n]) if n in own and is_cut(own[n]) else v for n, v in weights.items()}
