"""Activation checkpointing: a block's inner values are computed again instead of kept.

A third more computing, and memory for the inputs of the blocks alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from tessella.core.errors import TrainError
from tessella.nn.zoo import stages


def recompute_blocks(module: nn.Module) -> int:
    """Let every block of a network but its head forget its inner values; how many there are.

    Losses and gradients stay the same to the bit: random numbers are drawn again as they were, and
    batch norms count each batch once.

    Raises:
        TrainError: the network has no block of several layers.
    """
    blocks = [
        part
        for stage in stages(module)[:-1]
        for part in stage.modules.values()
        if any(True for _ in part.children())
    ]
    if not blocks:
        raise TrainError(
            "the network has no blocks to compute again",
            seen=type(module).__name__,
            fix="leave recompute out, and use accumulate=2 or a smaller batch",
        )
    for block in blocks:
        block.forward = _forgetting(block, block.forward)
    return len(blocks)


def _forgetting(block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    norms = [m for m in block.modules() if isinstance(m, _BatchNorm)]

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _counted_already(norms)

    def forgetting(*arguments: Any, **named: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return forward(*arguments, **named)
        return checkpoint(forward, *arguments, use_reentrant=False, context_fn=contexts, **named)

    return forgetting


@contextmanager
def _counted_already(norms: list[_BatchNorm]) -> Iterator[None]:
    """Batch norms that leave their running statistics as they are."""
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count
