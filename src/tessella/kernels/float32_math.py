"""How torch's GPU kernels may round float32 products: set around a run, and put back after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tessella.kernels.problem import Math


@contextmanager
def float32_math(math: Math) -> Iterator[None]:
    """``ieee`` or ``tf32`` for cuBLAS and cuDNN, without cuDNN's own search for algorithms.

    Process-wide while it lasts: a CUDA graph keeps what held when it was captured.
    """
    conv, matmul = torch.backends.cudnn.conv, torch.backends.cuda.matmul
    before = (conv.fp32_precision, matmul.fp32_precision, torch.backends.cudnn.benchmark)
    conv.fp32_precision = matmul.fp32_precision = math
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        conv.fp32_precision, matmul.fp32_precision = before[:2]
        torch.backends.cudnn.benchmark = before[2]
