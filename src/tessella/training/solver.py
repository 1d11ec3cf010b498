"""The optimizer that a recipe's ``Solver`` names, from ``torch.optim``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn, optim

from tessella.artifacts.run import Solver
from tessella.core.errors import TrainError, UsageError
from tessella.nn.zoo import stages

_FILTERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# What ``Solver.momentum`` means to each: the velocity's decay, Adam's first beta, AdaDelta's rho
# (as in Caffe). AdaGrad has nothing of the kind. A fused optimizer is one kernel over all weights,
# and with scaled losses the host does not wait to hear whether a gradient is infinite.
_OPTIMIZERS: dict[str, Callable[[Any, Solver, bool], optim.Optimizer]] = {
    "sgd": lambda p, s, fused: optim.SGD(p, lr=s.lr, momentum=s.momentum, fused=fused),
    "nesterov": lambda p, s, fused: optim.SGD(
        p, lr=s.lr, momentum=s.momentum, nesterov=True, fused=fused
    ),
    "adagrad": lambda p, s, _: optim.Adagrad(p, lr=s.lr),
    "adadelta": lambda p, s, _: optim.Adadelta(p, lr=s.lr, rho=s.momentum),
    "adam": lambda p, s, fused: optim.Adam(p, lr=s.lr, betas=(s.momentum, 0.999), fused=fused),
    "adamw": lambda p, s, fused: optim.AdamW(p, lr=s.lr, betas=(s.momentum, 0.999), fused=fused),
    "rmsprop": lambda p, s, _: optim.RMSprop(p, lr=s.lr, momentum=s.momentum),
}


def optimizer_for(
    module: nn.Module, solver: Solver, *, layer_decay: float = 1.0
) -> optim.Optimizer:
    """The optimizer over the parameters of ``module`` that require a gradient.

    Weight decay applies to weights only: biases and the scales and shifts of normalizations (every
    parameter of one dimension) have none. In ``adamw`` it is decoupled, elsewhere it joins the
    gradient.

    Args:
        layer_decay: the rate of each stage as a factor of the next one's; the head's is whole.

    Raises:
        UsageError: ``nesterov`` without momentum.
        TrainError: nothing to train.
    """
    if solver.name == "nesterov" and solver.momentum == 0:
        raise UsageError(
            "nesterov needs momentum", seen="momentum=0", fix="use sgd, or momentum=0.9"
        )
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not parameters:
        raise TrainError(
            "the network has no parameters to train",
            seen=type(module).__name__,
            fix="use a network with weights whose requires_grad is on",
        )
    factor = _factors(module, layer_decay)
    groups = [
        {
            "params": [p for p in parameters if factor[p] == own and (p.ndim > 1) is decays],
            "weight_decay": solver.weight_decay if decays else 0.0,
            "factor": own,
        }
        for own in dict.fromkeys(factor.values())
        for decays in (True, False)
    ]
    fused = all(p.is_cuda for p in parameters)
    optimizer = _OPTIMIZERS[solver.name]([g for g in groups if g["params"]], solver, fused)
    if fused and solver.name in ("sgd", "nesterov") and solver.momentum:
        # torch leaves them uninitialized where its fused kernel skips the first step for an
        # infinite gradient, as that of fp16 does: the second step then has NaN
        for parameter in parameters:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    if solver.centralize:
        filters = [f for f in filters_of(module) if f.requires_grad]
        optimizer.register_step_pre_hook(
            lambda *_: center(f.grad for f in filters if f.grad is not None)
        )
    return optimizer


def filters_of(module: nn.Module) -> list[Tensor]:
    """Weights of convolutions whose filters may sum to zero: the norm behind one, which has no bias
    therefore, takes no mean from it. Filters of a single channel may have to blur, and are left."""
    layers = [m for m in module.modules() if isinstance(m, _FILTERS) and m.bias is None]
    return [m.weight for m in layers if m.groups == 1 and m.weight[0].numel() > 1]


@torch.no_grad()
def center(tensors: Iterable[Tensor]) -> None:
    """Take its mean from each row of each tensor."""
    for tensor in tensors:
        tensor -= tensor.mean(dim=tuple(range(1, tensor.ndim)), keepdim=True)


def _factors(module: nn.Module, layer_decay: float) -> dict[nn.Parameter, float]:
    """The learning rate of each parameter as a factor of the recipe's."""
    if layer_decay == 1.0:
        return dict.fromkeys(module.parameters(), 1.0)
    parts, own = stages(module), dict(module.named_parameters(remove_duplicate=False))
    return {
        own[name]: layer_decay ** (len(parts) - 1 - number)
        for number, stage in enumerate(parts)
        for name in stage.parameters
    }


def set_rate(optimizer: optim.Optimizer, rate: float, momentum: float) -> None:
    """Use this learning rate and this momentum (see ``_OPTIMIZERS``) from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["factor"]
        if "betas" in group:
            group["betas"] = (momentum, group["betas"][1])
        for name in ("momentum", "rho"):
            if name in group:
                group[name] = momentum
