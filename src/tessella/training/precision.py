"""The arithmetic of training: fp32, tf32, or autocast to bf16 or (with loss scaling) to fp16; fp8
is bf16 whose large linear layers multiply 8-bit numbers (``nn.fp8``).

Weights and optimizer state are float32 in every mode.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn, optim

from tessella.artifacts.run import Precision
from tessella.core.errors import TrainError

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def width_of(precision: Precision) -> torch.dtype:
    """The element type of most values in a forward pass."""
    return _AUTOCAST.get(precision, torch.float32)


@contextmanager
def arithmetic(precision: Precision, *, deterministic: bool = False) -> Iterator[None]:
    """Set torch's process-wide arithmetic for a training, and restore it afterwards.

    TF32 is on in ``tf32`` only: in ``fp32`` products are IEEE. cuDNN measures its algorithms for
    the shapes at hand, which is fast and lets two runs on a GPU differ in the last bits.

    Args:
        deterministic: two runs do not differ, and what only has kernels of which they would fails.

    Raises:
        TrainError: something inside has none but such.
    """
    settings = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn)
    before = [s.fp32_precision for s in settings]
    benchmark = torch.backends.cudnn.benchmark
    strict = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    try:
        if deterministic:
            # cuBLAS reads it when it is first used, and torch asks for it
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # a help for searches alone
        for s in settings:
            s.fp32_precision = "tf32" if precision == "tf32" else "ieee"
        torch.backends.cudnn.benchmark = not deterministic
        yield
    except RuntimeError as error:
        if not deterministic or "deterministic" not in str(error):
            raise
        raise TrainError(
            "an operation has no kernel that adds numbers up in the same order each time",
            seen=str(error).split(",")[0][:200],
            fix="train without deterministic, or with another operation",
        ) from error
    finally:
        torch.use_deterministic_algorithms(strict, warn_only=warns)
        torch.utils.deterministic.fill_uninitialized_memory = fills
        for s, value in zip(settings, before, strict=True):
            s.fp32_precision = value
        torch.backends.cudnn.benchmark = benchmark


class MixedPrecision:
    """Autocast for the forward pass and, for fp16, a scaled loss for the backward pass.

    ``scaler`` doubles the scale after 2,000 good steps and halves it after one with an infinite
    gradient, which it skips. Its state belongs to the checkpoint.

    Attributes:
        skipped: how many steps were skipped here, on the device; None but for fp16.
        in_a_row: how many of the last steps were skipped, likewise.
    """

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self._device = device
        self._dtype = _AUTOCAST.get(precision)
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
        self.skipped: Tensor | None = None
        self.in_a_row: Tensor | None = None

    def autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, dtype=self._dtype, enabled=self._dtype is not None)

    def update(self, loss: Tensor, optimizer: optim.Optimizer) -> None:
        """One backward pass of ``loss`` and one step of ``optimizer``."""
        self.backward(loss)
        self.step(optimizer)

    def backward(self, loss: Tensor) -> None:
        """The backward pass of a loss, whose gradients join those that are there."""
        torch.autograd.backward(self.scaler.scale(loss))

    def step(self, optimizer: optim.Optimizer, *, clip: float = 0.0) -> None:
        """One step of ``optimizer`` by the gradients that are there.

        Args:
            clip: as in ``Recipe``.
        """
        if clip:
            self.scaler.unscale_(optimizer)
            learn = [p for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(learn, clip)
        self.scaler.step(optimizer)
        if not self.scaler.is_enabled():
            return
        scale: Tensor = self.scaler._scale  # type: ignore[assignment]  # get_scale waits for the GPU
        before = scale.clone()
        self.scaler.update()
        if self.skipped is None or self.in_a_row is None:
            self.skipped, self.in_a_row = torch.zeros_like(scale), torch.zeros_like(scale)
        skips = scale < before
        self.skipped += skips
        self.in_a_row = (self.in_a_row + 1) * skips
