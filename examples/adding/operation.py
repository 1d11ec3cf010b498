"""An operation: log(exp(a) + exp(b)), which torch calls logaddexp.

docs/add-an-operation.md explains it; tests/examples/test_adding.py adds it and compiles a network.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tessella.operations.operation import Attributes, Shape, Shapes, row


def logaddexp(input: Tensor, other: Tensor) -> Tensor:
    """``log(exp(input) + exp(other))``, without overflow."""
    return torch.logaddexp(input, other)


def _broadcasts(shapes: Shapes, result: Shape, attrs: Attributes) -> str | None:
    """Both operands broadcast to the result."""
    pairs = zip(reversed(shapes["input"]), reversed(shapes["other"]), strict=False)
    if all(a == b or 1 in (a, b) for a, b in pairs):
        return None
    return f"operands {shapes['input']} and {shapes['other']} do not broadcast"


ROW = row(logaddexp, "input other", aten="logaddexp.default", elementwise=True, rule=_broadcasts)
