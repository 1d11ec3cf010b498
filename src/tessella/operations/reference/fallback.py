"""The operation ``fallback``: torch's own operator is its meaning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tessella.operations.operation import row
from tessella.operations.torch_operators.arguments import arguments
from tessella.operations.torch_operators.operators import resolve


def fallback(
    *inputs: torch.Tensor, target: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call ``target`` with the templates filled from ``inputs``: a tensor or several."""
    function = resolve(target, args, kwargs, inputs)
    filled_args, filled_kwargs = arguments(args, kwargs, inputs)
    return function(*filled_args, **filled_kwargs)


# args and kwargs are templates, see ``operations.torch_operators.arguments``
ROWS = (row(fallback, "", "target args kwargs", variadic=True, many=True),)
