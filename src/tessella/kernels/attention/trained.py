"""Which of torch's kernels for attention is the fastest in training, forward and backward.

Torch takes its own flash kernel where that runs; cuDNN's is often faster on a Hopper GPU, but not
for every length. Each is measured once for a shape, in some milliseconds.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}  # the first is torch's own choice for 16-bit numbers
CLEARLY = 0.97  # of the first one's time
_CALLS, _ROUNDS = 4, 5
_AHEAD = 10_000_000  # of the GPU's cycles: the host begins all calls meanwhile


class Attention(NamedTuple):
    """Shapes and strides of queries, keys and values [N, heads, L, E], and what is asked of them.

    Attributes:
        shapes: three shapes, each with its strides.
    """

    shapes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    dtype: torch.dtype
    causal: bool
    scale: float | None = None


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, by: str) -> Tensor:
    """Attention by one of ``KERNELS``, or by torch's choice: ``""``."""
    chosen = sdpa_kernel(KERNELS[by]) if by else nullcontext()
    with cast(AbstractContextManager[None], chosen):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)


@functools.cache
def fastest(asked: Attention) -> str:
    """Which of ``KERNELS`` is clearly the fastest here; empty where it is torch's choice.

    Where sums must always come in the same order, torch chooses.
    """
    if asked.dtype not in (torch.float16, torch.bfloat16) or not torch.cuda.is_available():
        return ""
    if torch.are_deterministic_algorithms_enabled():
        return ""
    with _disable_current_modes(), torch.enable_grad(), torch.autocast("cuda", enabled=False):
        tensors = [_random(*shape, asked.dtype) for shape in asked.shapes]
        times = {name: _seconds(asked, tensors, name) for name in KERNELS}
    first = times[next(iter(KERNELS))]
    best = min(times, key=lambda name: times[name])
    return best if times[best] < CLEARLY * first else ""


def _random(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    made = torch.empty_strided(shape, strides, dtype=dtype, device="cuda").normal_()
    return made.requires_grad_()


def _seconds(asked: Attention, tensors: list[Tensor], by: str) -> float:
    """Of one forward and backward pass; infinite where the kernel does not run."""

    def work() -> None:
        made = attend(*tensors, asked.causal, asked.scale, by)
        torch.autograd.grad(made, tensors, made.detach())

    try:
        return statistics.median(_timed(work) for _ in range(_ROUNDS))
    except RuntimeError:  # it says so by a warning and "no available kernel"
        return float("inf")


def _timed(work: Callable[[], None]) -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_AHEAD)
    began.record()
    for _ in range(_CALLS):
        work()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / _CALLS / 1e3
