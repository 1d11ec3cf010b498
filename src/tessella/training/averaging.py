"""A running average of the weights, which is validated and saved in place of the last ones.

Averages of the last steps generalize better than any one of them (Polyak and Juditsky 1992), and
make the choice of the last learning rates matter less.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

_LATE = 10  # steps; before, a long memory would mostly remember the first weights


class Average:
    """The exponential moving average of a module's weights and running statistics.

    Args:
        decay: the share of the average that a step keeps, 0 to 1. In the first steps it is smaller:
            (1 + step) / (10 + step), as in TensorFlow's averages.

    Attributes:
        module: a network with the averaged weights, in evaluation mode.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._decay = decay
        self.module = copy.deepcopy(module).requires_grad_(False).eval()

    @torch.no_grad()
    def update(self, module: nn.Module, done: int) -> None:
        """Take in the weights after step ``done``, counted from 0."""
        decay = min(self._decay, (1 + done) / (_LATE + done))
        own, now = self.module.state_dict(), module.state_dict()
        for name, value in now.items():
            if value.is_floating_point():
                own[name].lerp_(value, 1 - decay)
            else:
                own[name].copy_(value)
