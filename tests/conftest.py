"""Without a GPU, Triton's kernels are interpreted; it must know before any of them is decorated."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
