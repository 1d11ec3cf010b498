"""A network with the last step of its task: what a plan is compiled of."""

from __future__ import annotations

import torch
from torch import Tensor

from tessella.tasks.task import Head, Numbers


class Finished(torch.nn.Module):
    """A network whose outputs are finished as the task's plans answer them."""

    def __init__(self, network: torch.nn.Module, head: Head, numbers: Numbers) -> None:
        super().__init__()
        self.network, self._head, self._numbers = network, head, numbers

    def forward(self, images: Tensor) -> Tensor:
        return self._head.finish(self.network(images), self._numbers)


def finished(network: torch.nn.Module, head: Head, numbers: Numbers) -> torch.nn.Module:
    """The network itself where the task has nothing to finish."""
    return Finished(network, head, numbers) if head.FINISHES else network
