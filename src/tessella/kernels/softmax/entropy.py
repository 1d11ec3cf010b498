"""Cross entropy in training: scores are read once forward and once back, in their own element type.

Torch widens them to float32 first, and stores that; its compiler does not, but takes twice the
exponentials. In plain Triton, of contiguous rows of scores.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from tessella.core.integers import ceil_div
from tessella.device.launch import launch
from tessella.kernels.softmax.entropy_device import entropy_gradient_kernel, entropy_kernel

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_COLUMNS, _WARPS = 8192, 8
_GRADIENT_COLUMNS, _GRADIENT_WARPS = 4096, 4


def runs(scores: Tensor, targets: Tensor) -> bool:
    """Whether scores [N, K] with targets int64 [N] can be taken here, where Triton runs."""
    return (
        scores.dim() == 2
        and scores.dtype in _DTYPES
        and scores.numel() > 0
        and scores.is_contiguous()
        and targets.shape == scores.shape[:1]
        and targets.dtype == torch.int64
        and targets.is_contiguous()
        and (scores.is_cuda or triton.knobs.runtime.interpret)
    )


def losses(scores: Tensor, targets: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """The losses of rows, and what ``gradient`` needs of them; float32 [N] both.

    Args:
        ignored: the target of rows without a loss; all others lie in [0, K).
    """
    rows, classes = scores.shape
    made, norms = (torch.empty(rows, dtype=torch.float32, device=scores.device) for _ in range(2))
    columns = min(_COLUMNS, triton.next_power_of_2(classes))
    launch(
        entropy_kernel, (rows,), scores, targets, made, norms, classes, ignored,
        COLUMNS=columns, num_warps=_WARPS,
    )  # fmt: skip
    return made, norms


def gradient(
    scores: Tensor, targets: Tensor, norms: Tensor, factor: Tensor, ignored: int
) -> Tensor:
    """The gradient of the scores; ``factor``, float32 of one element, is that of a row's loss."""
    rows, classes = scores.shape
    out = torch.empty_like(scores)
    columns = min(_GRADIENT_COLUMNS, triton.next_power_of_2(classes))
    launch(
        entropy_gradient_kernel, (rows, ceil_div(classes, columns)),
        scores, targets, norms, factor, out, classes, ignored,
        COLUMNS=columns, num_warps=_GRADIENT_WARPS,
    )  # fmt: skip
    return out
