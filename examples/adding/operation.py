"""An operation: log(exp(a) + exp(b)), which torch calls logaddexp.

docs/add-an-operation.md explains it; tests/examples/test_adding.py adds it and compiles a network.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tessella.operations.operands import Shape, Shapes
from tessella.operations.operation import Op

# The row in operations/operation.py.
ROW = Op(
    name="logaddexp",
    inputs=("input", "other"),
    aten=("logaddexp.default",),
    elementwise=True,
)


# The rule in operations/operands.py.
def logaddexp_operands(shapes: Shapes, result: Shape, attrs: Mapping[str, Any]) -> str | None:
    """Both operands broadcast to the result."""
    pairs = zip(reversed(shapes["input"]), reversed(shapes["other"]), strict=False)
    if all(a == b or 1 in (a, b) for a, b in pairs):
        return None
    return f"operands {shapes['input']} and {shapes['other']} do not broadcast"


# The reference in operations/reference/pointwise.py.
def logaddexp(input: Tensor, other: Tensor) -> Tensor:
    """``log(exp(input) + exp(other))``, without overflow."""
    return torch.logaddexp(input, other)
