"""The catalog: which kernels exist. A static table that imports none of them.

A kernel is a module with two functions and a flag::

    def fits(problem: Problem) -> str | None: ...        # None, or why it is refused
    def bind(problem: Problem, constants: Mapping[int, Tensor]) -> Call: ...
    WRITES_OUT = False                                   # True: call(*inputs, out=buffer)

``bind`` packs the constants (by their position among the inputs) once and returns the function
that runs the kernel on the remaining inputs, in order. ``fits`` must be cheap and must not touch a
GPU.
Ids are never reused: plans name them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from tessella.kernels.problem import Problem

Call = Callable[..., Any]  # tensors in, a tensor or a tuple of tensors out


class KernelModule(Protocol):
    WRITES_OUT: bool

    def fits(self, problem: Problem) -> str | None: ...

    def bind(self, problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call: ...


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One entry.

    Attributes:
        id: ``operation.algorithm[.target]``, the name in plans.
        op: the operation, ``*`` for any.
        module: where its code lies; imported only when it is used.
        targets: where it can run.
        source: who wrote it: ``tessella``, ``onednn``, ``cudnn``, ``cublaslt``, ``aten``.
    """

    id: str
    op: str
    module: str
    targets: tuple[str, ...]
    source: str

    def load(self) -> KernelModule:
        return cast(KernelModule, importlib.import_module(self.module))
