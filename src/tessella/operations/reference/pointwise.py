"""The operation ``pointwise``: a program of other operations (``operations.pointwise_program``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tessella.operations.operation import Operation, row
from tessella.operations.pointwise_program import Data, evaluate, parse
from tessella.operations.reference import elementwise, norm, pool, quant, reduce, softmax, transform

Tensor = torch.Tensor

_MODULES = (elementwise, norm, pool, quant, reduce, softmax, transform)
_CALLED: dict[str, Operation] = {row.name: row for module in _MODULES for row in module.ROWS}


def pointwise(
    *inputs: Tensor, program: Data, results: Sequence[int]
) -> Tensor | tuple[Tensor, ...]:
    """The instructions of a program, one after another.

    In float64, what a cast rounds stays float64: the other operands are, and norms take one type.
    """
    exact = any(x.dtype == torch.float64 for x in inputs)

    def call(op: str, operands: Sequence[Tensor | None], attrs: Mapping[str, Any]) -> Tensor:
        (made,) = _CALLED[op].call(operands, attrs)
        return made.double() if exact and made.is_floating_point() else made

    values = evaluate(parse(program, len(inputs), results), inputs, call)
    made = tuple(values[r] for r in results)
    return made if len(made) > 1 else made[0]


ROWS = (row(pointwise, "", "program results", variadic=True, many=True),)
