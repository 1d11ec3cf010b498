"""2:4 sparse training: weights are pruned once, and pruned weights stay zero at every step.

Recipe (Mishra et al. 2021): train a network dense, prune it by magnitude, train it again with the
same settings. No mask is kept: a weight that is zero is held, so that a resumed training goes on
exactly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn, optim

from tessella.core.errors import TrainError
from tessella.graph.quantization_aware import QuantizationAware
from tessella.kernels.sparse.two_four import prune_two_four

CHANNELS = 16  # input channels that tensor cores take at once: a layer must have a multiple
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def sparse_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """The weights that become sparse, by name: those of linear layers and ungrouped convolutions.

    Raises:
        TrainError: the network has none.
    """
    if isinstance(module, QuantizationAware):
        candidates: dict[str, torch.Tensor] = dict(module.layers())
    else:
        candidates = {
            f"{name}.weight".removeprefix("."): layer.weight
            for name, layer in module.named_modules()
            if isinstance(layer, _LAYERS) and getattr(layer, "groups", 1) == 1
        }
    found = {name: w for name, w in candidates.items() if w.shape[1] % CHANNELS == 0}
    if not found:
        raise TrainError(
            "the network has no layer whose weight can be 2:4 sparse",
            seen=type(module).__name__,
            fix=f"train it dense; a layer needs a multiple of {CHANNELS} input channels, one group",
        )
    return found


@torch.no_grad()
def prune(module: nn.Module) -> None:
    """Keep the two largest magnitudes of each four weights along the input channels."""
    for weight in sparse_weights(module).values():
        weight.copy_(prune_two_four(weight))


def keep_zeros(module: nn.Module, optimizer: optim.Optimizer) -> None:
    """Make the optimizer keep the zeros of the sparse weights at zero, in its own state, too.

    Before a step the gradients of these zeros are cleared, so that momentum does not accumulate
    there; after the step the zeros are restored.
    """
    weights = tuple(sparse_weights(module).values())
    zeros: list[torch.Tensor] = []

    @torch.no_grad()
    def before(*_: Any) -> None:
        zeros[:] = [weight == 0 for weight in weights]
        for weight, zero in zip(weights, zeros, strict=True):
            if weight.grad is not None:
                weight.grad.masked_fill_(zero, 0)

    @torch.no_grad()
    def after(*_: Any) -> None:
        for weight, zero in zip(weights, zeros, strict=True):
            weight.masked_fill_(zero, 0)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
