"""The GPU that kernels are asked about: this machine's, or the one that code is compiled for."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from tessella.core import device
from tessella.core.architectures import ARCHITECTURES, Architecture, is_gpu, is_own

# bytes: bulk tensor copies (TMA) read and write at multiples of it, and Triton compiles other code
# for a pointer or a number that is none
ALIGNMENT = 16
HOPPER = ARCHITECTURES["sm_90"]

_aim: ContextVar[str | None] = ContextVar("gpu_target", default=None)


@contextmanager
def aimed_at(target: str) -> Iterator[None]:
    """Inside, kernels for GPUs are asked what they do on ``target``, whatever GPU this machine has.

    Nothing changes for a target that is no GPU's.
    """
    token = _aim.set(target if is_gpu(target) else _aim.get())
    try:
        yield
    finally:
        _aim.reset(token)


def gpu_target() -> str:
    """The target that kernels for GPUs are asked about; where there is no GPU, ``sm_90``."""
    return _aim.get() or _target_here() or "sm_90"


def gpu() -> Architecture:
    """What the GPU has that kernels are asked about."""
    return ARCHITECTURES[gpu_target()]


def stages_that_fit(stages: int, stage_bytes: int) -> int:
    """How many stages of a loop's loads a block's shared memory holds, up to so many.

    0 where not even two fit: such a tile is too large for the GPU. A GPU that copies nothing on the
    way to shared memory holds one there, and the next in registers.
    """
    fitting = gpu().shared_bytes_of_block() // max(stage_bytes, 1)
    if "cp_async" not in gpu().has:
        return min(stages, 2) if fitting >= 1 else 0
    return min(stages, fitting) if fitting >= 2 else 0


def multiprocessors() -> int:
    """Multiprocessors of this machine's GPU; of another one, those of its largest chip."""
    target = gpu_target()
    return _units_here() if target == _target_here() else ARCHITECTURES[target].multiprocessors


def runs_code_of(target: str) -> bool:
    """Whether this machine may start machine code for a target: not where its GPU is another."""
    if not torch.cuda.is_available():
        return True
    return is_own(target, *torch.cuda.get_device_capability())


def _target_here() -> str | None:
    """The target of the current GPU: a machine may have GPUs of several kinds."""
    return _target_of(torch.cuda.current_device()) if torch.cuda.is_available() else None


def _units_here() -> int:
    return _units_of(torch.cuda.current_device())


@functools.cache
def _target_of(index: int) -> str | None:
    return device.gpu_target(torch.device("cuda", index))


@functools.cache
def _units_of(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count
