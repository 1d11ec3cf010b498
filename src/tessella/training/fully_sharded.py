"""torch's FSDP2 for ``sharding``, which imports this where weights are cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def shard(
    module: nn.Module, blocks: Sequence[nn.Module], device: torch.device, processes: int
) -> None:
    """Cut the weights of the blocks, and of what is in none."""
    mesh = init_device_mesh(device.type, (processes,))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)


@contextmanager
def unsent(module: FSDPModule) -> Iterator[None]:
    """Within it gradients are not exchanged."""
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)


def cut_as(value: Tensor, parameter: DTensor) -> Tensor:
    """This process's part of a whole tensor, cut as the parameter is."""
    mesh, places = parameter.device_mesh, parameter.placements
    return distribute_tensor(value.to(parameter.device), mesh, places, src_data_rank=None)
