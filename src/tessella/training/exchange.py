"""Gradients averaged over processes while the backward pass goes on, also inside a CUDA graph.

What DistributedDataParallel does, for passes that are recorded: its bookkeeping runs in Python and
C++ at each step, where a graph's replay runs none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tessella.core.integers import ceil_div

ALIGNED = 32  # elements: gradients begin where wide loads may
BUCKET_BYTES = 25 << 20  # as DistributedDataParallel's
LAST_BYTES = 1 << 20  # of the bucket whose exchange no backward pass hides: it has ended then


@dataclass
class _Bucket:
    """Parameters whose gradients travel together; ``views`` are their places in ``flat``."""

    parameters: list[nn.Parameter]
    flat: Tensor
    views: list[Tensor]
    missing: int = 0


class Exchange:
    """Averages the gradients of a module's parameters over all processes.

    Each parameter's gradient afterwards is a view of memory that stays. Parameters without one, in
    every process the same, stay so. At its beginning all processes get rank 0's weights.

    Args:
        module: whose parameters that learn are meant; no pass of it runs outside of ``around``.
        bucket_bytes: of gradients that travel together, ``LAST_BYTES`` of the last ones at most.
    """

    def __init__(self, module: nn.Module, *, bucket_bytes: int | None = None) -> None:
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), 0)
        learn = [p for p in module.parameters() if p.requires_grad]
        self._buckets = [_bucket(p) for p in [*_cut(learn, bucket_bytes or BUCKET_BYTES)][::-1]]
        self._of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self._hooks = [_heard(p, self._arrived) for p in learn]
        self._size = dist.get_world_size()
        self._averages = dist.get_backend() == "nccl"
        self._sent: list[dist.Work] = []
        self._begin()

    def close(self) -> None:
        """Let go of the module."""
        for hook in self._hooks:
            hook.remove()

    def around(self, work: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A pass, behind which all gradients are the averages."""

        def exchanged(*args: Any) -> Tensor:
            self._begin()
            measured = work(*args)
            while len(self._sent) < len(self._buckets):  # some have no gradient in this pass
                self._send()
            for sent in self._sent:
                sent.wait()
            if not self._averages:
                for bucket in self._buckets:
                    bucket.flat.div_(self._size)
            return measured

        return exchanged

    def _begin(self) -> None:
        self._sent.clear()
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)

    def _arrived(self, parameter: Tensor) -> None:
        self._of[parameter].missing -= 1  # type: ignore[index]
        # in one order everywhere: the next is sent where all before it are
        while len(self._sent) < len(self._buckets) and not self._buckets[len(self._sent)].missing:
            self._send()

    def _send(self) -> None:
        bucket = self._buckets[len(self._sent)]
        views, gradients = [], []
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad is not view:
                views.append(view)
                gradients.append(parameter.grad)
                parameter.grad = view
        if views:
            torch._foreach_copy_(views, gradients)
        how = dist.ReduceOp.AVG if self._averages else dist.ReduceOp.SUM
        self._sent.append(dist.all_reduce(bucket.flat, op=how, async_op=True))


def _heard(parameter: nn.Parameter, what: Callable[[Tensor], None]) -> Any:
    return parameter.register_post_accumulate_grad_hook(what)  # type: ignore[no-untyped-call]


def _cut(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> Iterator[list[nn.Parameter]]:
    """As many of one element type as fill a bucket, in the order in which a backward pass makes
    their gradients; the bucket that it fills last comes first."""
    some: list[nn.Parameter] = []
    nbytes, most = 0, min(LAST_BYTES, bucket_bytes)
    for parameter in parameters:
        own = parameter.numel() * parameter.element_size()
        if some and (nbytes + own > most or parameter.dtype != some[0].dtype):
            yield some[::-1]
            some, nbytes, most = [], 0, bucket_bytes
        some.append(parameter)
        nbytes += own
    if some:
        yield some[::-1]


def _bucket(parameters: list[nn.Parameter]) -> _Bucket:
    sizes = [ceil_div(p.numel(), ALIGNED) * ALIGNED for p in parameters]
    flat = parameters[0].detach().new_zeros(sum(sizes))
    # as the parameters lie in memory: torch's fused solvers want gradients that do, too
    views = [
        part.as_strided(p.shape, p.stride(), part.storage_offset())
        for part, p in zip(torch.split(flat, sizes), parameters, strict=True)
    ]
    return _Bucket(parameters, flat, views)
