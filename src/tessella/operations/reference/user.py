"""The operation ``user``: what an operator of a user's own means is what its author says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tessella.operations.operation import row
from tessella.operations.torch_operators.arguments import arguments
from tessella.operations.user_operators import Tensors, as_tuple, named


def user(*inputs: torch.Tensor, target: str, args: Sequence[Any]) -> Tensors:
    """The reference of the operator ``target``; on the meta device, its shape function."""
    operator = named(target)
    filled, _ = arguments(args, {}, inputs)
    if any(tensor.is_meta for tensor in inputs):
        return operator.empty(*filled)
    assert operator.reference is not None  # the graph's author made sure
    made = operator.reference(*filled)
    return tuple(tensor.contiguous() for tensor in as_tuple(made))


ROWS = (row(user, "", "target args", variadic=True, many=True),)
