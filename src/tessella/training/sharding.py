"""Weights, gradients and the solver's state cut over the processes (torch's FSDP2).

Each process keeps its part of every tensor, and gathers the weights of a block while that computes.
Checkpoints hold whole tensors, as those of other trainings do.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tessella.core.errors import UsageError
from tessella.nn.zoo import stages


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
    mesh = init_device_mesh(device.type, (processes,))
    for block in blocks(module):
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)


def whole(value: Tensor, *, keep: bool = True) -> Tensor:
    """A tensor with all its parts, on the CPU if it had parts; all processes call this together.

    Args:
        keep: False: this process only gives its part, and gets nothing.
    """
    if not isinstance(value, DTensor):
        return value
    found = value.full_tensor()
    return found.cpu() if keep else found.new_empty(0)


def laid_as(value: Tensor, parameter: Tensor) -> Tensor:
    """A copy of a whole tensor which lies as the parameter of its shape does, or is cut as it is."""
    if isinstance(parameter, DTensor):
        mesh, places = parameter.device_mesh, parameter.placements
        return distribute_tensor(value.to(parameter.device), mesh, places, src_data_rank=None)
    return torch.empty_like(parameter).copy_(value)


def placed(weights: Mapping[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """Whole weights as ``module.load_state_dict`` takes them."""
    own = module.state_dict()
    cut = {n for n, value in own.items() if isinstance(value, DTensor)}
    return {n: laid_as(v, own[n]) if n in cut else v for n, v in weights.items()}
