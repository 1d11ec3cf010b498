"""Kernels for the CPU that go wrong, each in its own way, by the operation that they are for.

Importing this module puts them into the catalog, as a user's are; ``registered()`` does so for a
while.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from tessella.kernels import catalog
from tessella.operations.problem import Problem

SECRET = "hunter2-quite-long"


def _crashes(x: Tensor, out: Tensor) -> None:
    os.kill(os.getpid(), signal.SIGILL)


def _hangs(x: Tensor, out: Tensor) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.1)  # as the limit of its process would, but sooner
    while True:
        time.sleep(1)


def _talks(x: Tensor, out: Tensor) -> None:
    home, user, host = (os.environ[name] for name in ("HOME", "USER", "HOSTNAME"))
    token = os.environ["API_TOKEN"]
    raise RuntimeError(f"{user}@{host}: {home}/my work/x.py: no {Path(__file__)} with {token}")


def _takes_all(x: Tensor, out: Tensor) -> None:
    torch.empty(1 << 45)


KINDS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "neg": lambda x, out: torch.neg(x, out=out),  # this one is right
    "relu": lambda x, out: out.fill_(3.0),
    "sigmoid": _crashes,
    "tanh": _hangs,
    "exp": _talks,
    "abs": _takes_all,
}
IDS = tuple(f"{op}.planted" for op in KINDS)


def fits(problem: Problem) -> str | None:
    return None


def configs(problem: Problem) -> tuple[catalog.Config, ...]:
    return ({"tile": 1}, {"tile": 2})


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], *, tile: int = 1) -> catalog.Call:
    def call(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        KINDS[problem.op](x, out)
        return out

    return call


def register() -> None:
    for op, id in zip(KINDS, IDS, strict=True):
        catalog.register(
            catalog.Kernel(id=id, op=op, module=__name__, targets=("cpu",), source="user")
        )


def unregister() -> None:
    for id in IDS:
        catalog.unregister(id)


@contextmanager
def registered() -> Iterator[None]:
    register()
    try:
        yield
    finally:
        unregister()


register()
