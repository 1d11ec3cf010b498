"""How torch's GPU kernels may round float32 products: set around a run, and put back after it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tessella.core.dtype import Math


@contextmanager
def float32_math(math: Math) -> Iterator[None]:
    """``ieee`` or ``tf32`` for cuBLAS and cuDNN, without cuDNN's own search for algorithms.

    Process-wide while it lasts: a CUDA graph keeps what held when it was captured.
    """
    mine = object()
    with _lock:
        before = _settings()
        _set(math, math, math, False)
        _active.setdefault(None, before)
        _active[mine] = (math, math, math, False)
    try:
        yield
    finally:
        with _lock:  # threads may leave in any order: the last one out restores what was before
            del _active[mine]
            _set(*next(reversed(_active.values())))
            if len(_active) == 1:
                _active.clear()


_Settings = tuple[str, str, str, bool]
_lock = threading.Lock()
_active: dict[object, _Settings] = {}  # what was set before, then by whom, in order


def _settings() -> _Settings:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    return (
        cudnn.conv.fp32_precision,
        cudnn.rnn.fp32_precision,
        matmul.fp32_precision,
        cudnn.benchmark,
    )


def _set(conv: str, rnn: str, matmul: str, search: bool) -> None:
    torch.backends.cudnn.conv.fp32_precision = conv
    # recurrent layers have a flag of their own: without it their error was 2.5e-4, with it 1.1e-5
    torch.backends.cudnn.rnn.fp32_precision = rnn
    torch.backends.cuda.matmul.fp32_precision = matmul
    torch.backends.cudnn.benchmark = search
