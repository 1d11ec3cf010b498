"""A network with the last step of its task: what a plan is compiled of."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tessella.core.task import TaskRecord
from tessella.tasks.folders import names, of
from tessella.tasks.task import Head, Numbers

Align = Callable[[str, Tensor, Tensor], Tensor]


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


def as_it_is(name: str, made: Tensor, right: Tensor) -> Tensor:
    """``made``: for networks whose outputs have an order of their own."""
    return made


def alignment(task: TaskRecord) -> Align:
    """What brings the output of a name into the order of another, where a task's heads sort."""
    if task.name not in names():  # a plan of another machine: it says itself what it answers
        return as_it_is
    head = of(task).head
    return lambda name, made, right: head.aligned(made, right) if name == head.OUTPUT else made
