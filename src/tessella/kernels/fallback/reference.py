"""The operation ``fallback``: torch's own operator is its meaning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tessella.kernels.fallback.aten import arguments, resolve


def fallback(
    *inputs: torch.Tensor, target: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call ``target`` with the templates filled from ``inputs``: a tensor or several."""
    filled_args, filled_kwargs = arguments(args, kwargs, inputs)
    return resolve(target)(*filled_args, **filled_kwargs)
