"""One launch of a user's kernel, as data: what its author says, before it runs."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, replace
from typing import Any

from tessella.device import launch
from tessella.device.cuda import CudaKernel
from tessella.device.launch import Launched


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch: what ``kernel[grid](*args, **constants)`` says in Triton.

    Attributes:
        kernel: decorated by ``triton.jit`` or ``gluon.jit``, or made by ``cuda``.
        grid: blocks, one to three numbers.
        args: tensors, descriptors and numbers.
        warps: of 32 threads in a block (Triton, Gluon).
        block: threads of a block along x, y and z (CUDA C++).
        shared_bytes: dynamic shared memory of a block (CUDA C++).
        constants: constexpr parameters, and options such as ``num_stages`` (Triton, Gluon).
    """

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    warps: int = 4
    block: tuple[int, ...] | None = None
    shared_bytes: int = 0
    constants: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        if isinstance(self.kernel, CudaKernel):
            return self.kernel.name
        return str(_undecorated(self.kernel).__name__)

    @property
    def threads(self) -> tuple[int, ...]:
        """Threads of a block, along each axis."""
        return self.block or (32 * self.warps,)

    @property
    def interpreted(self) -> bool:
        """Whether the launch runs on the CPU, in Triton's interpreter."""
        return type(_layers(self.kernel)[-1]).__name__ == "InterpretedFunction"

    def start(self, target: str | None = None) -> Launched | None:
        """Launch the kernel; with a ``target`` only compile it. None if there is nothing to do."""
        if 0 in self.grid:
            return None
        if isinstance(self.kernel, CudaKernel):
            made = self.kernel.launch(
                *self._geometry, self.args, shared_bytes=self.shared_bytes, target=target
            )
            launch.record(made)
            return made
        with launch.watching() as launches:
            launch.launch(
                self.kernel, self.grid, *self.args, num_warps=self.warps, **self.constants
            )
        launch.record(launches[0])
        return launches[0]

    def compiled(self, target: str) -> Launched:
        """The launch as it would be on a GPU, not run; Triton's kernels say nothing here."""
        if not isinstance(self.kernel, CudaKernel) or 0 in self.grid:
            return Launched(grid=self.grid, compiled=None)
        return self.kernel.compiled(*self._geometry, shared_bytes=self.shared_bytes, target=target)

    def without_arguments(self) -> Launch:
        """The same launch without its tensors, which would stay in memory if it is remembered."""
        return replace(self, args=())

    @property
    def _geometry(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Grid and block in three dimensions."""
        (x, y, z), (i, j, k) = (*self.grid, 1, 1)[:3], (*self.threads, 1, 1)[:3]
        return (x, y, z), (i, j, k)


def _layers(kernel: Any) -> list[Any]:
    """A kernel and what it wraps (autotuning, heuristics), down to Triton's own object."""
    layers = [kernel]
    while hasattr(layers[-1], "fn") and not inspect.isfunction(layers[-1].fn):
        layers.append(layers[-1].fn)
    return layers


def _undecorated(kernel: Any) -> Any:
    return _layers(kernel)[-1].fn
