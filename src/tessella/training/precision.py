"""The arithmetic of training: fp32, tf32, or autocast to bf16 or (with loss scaling) to fp16.

Weights and optimizer state are float32 in every mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, optim

from tessella.artifacts.run import Precision

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def width_of(precision: Precision) -> torch.dtype:
    """The element type of most values in a forward pass."""
    return _AUTOCAST.get(precision, torch.float32)


@contextmanager
def arithmetic(precision: Precision) -> Iterator[None]:
    """Set torch's process-wide arithmetic for a training, and restore it afterwards.

    TF32 is on in ``tf32`` only: in ``fp32`` products are IEEE. cuDNN measures its algorithms for
    the shapes at hand, which is fast and lets two runs on a GPU differ in the last bits.
    """
    settings = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn)
    before = [s.fp32_precision for s in settings]
    benchmark = torch.backends.cudnn.benchmark
    try:
        for s in settings:
            s.fp32_precision = "tf32" if precision == "tf32" else "ieee"
        torch.backends.cudnn.benchmark = True
        yield
    finally:
        for s, value in zip(settings, before, strict=True):
            s.fp32_precision = value
        torch.backends.cudnn.benchmark = benchmark


class MixedPrecision:
    """Autocast for the forward pass and, for fp16, a scaled loss for the backward pass.

    ``scaler`` doubles the scale after 2,000 good steps and halves it after one with an infinite
    gradient, which it skips. Its state belongs to the checkpoint.
    """

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self._device = device
        self._dtype = _AUTOCAST.get(precision)
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")

    def autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, dtype=self._dtype, enabled=self._dtype is not None)

    def update(self, loss: Tensor, optimizer: optim.Optimizer) -> None:
        """One backward pass of ``loss`` and one step of ``optimizer``."""
        self.backward(loss)
        self.step(optimizer)

    def backward(self, loss: Tensor) -> None:
        """The backward pass of a loss, whose gradients join those that are there."""
        torch.autograd.backward(self.scaler.scale(loss))

    def step(self, optimizer: optim.Optimizer) -> None:
        """One step of ``optimizer`` by the gradients that are there."""
        self.scaler.step(optimizer)
        self.scaler.update()
