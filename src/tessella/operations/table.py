"""The table of operations: a graph or a plan holds these, and no others."""

from __future__ import annotations

from tessella.core.errors import CompileError
from tessella.operations.operation import Operation
from tessella.operations.reference import (
    attention,
    conv,
    detect,
    elementwise,
    fallback,
    gemm,
    norm,
    pointwise,
    pool,
    quant,
    recurrent,
    reduce,
    softmax,
    transform,
    user,
)

OPERATIONS: dict[str, Operation] = {
    row.name: row
    for family in (
        conv, gemm, norm, pool, softmax, attention, reduce, elementwise, quant, transform,
        recurrent, detect, pointwise, fallback, user,
    )
    for row in family.ROWS
}  # fmt: skip

# torch's overload, as in ``conv2d.default`` → the row whose arguments it shares
BY_ATEN: dict[str, Operation] = {name: row for row in OPERATIONS.values() for name in row.aten}


def operation(name: str) -> Operation:
    """The row called ``name``; raises ``CompileError`` if there is none."""
    if name not in OPERATIONS:
        raise CompileError(
            "unknown operation", seen=name, fix=f"use one of {', '.join(OPERATIONS)}"
        )
    return OPERATIONS[name]
