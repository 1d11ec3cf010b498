"""Any operation by its reference in plain torch: taken only where nothing else fits."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tessella.core.dtype import FP8
from tessella.kernels.catalog import Call
from tessella.operations.epilogue import store
from tessella.operations.problem import Problem
from tessella.operations.table import operation
from tessella.operations.tensor_meta import memory_format

SMALL = ("int8", *FP8)


def fits(problem: Problem) -> str | None:
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    op, attrs, outputs = problem.op, dict(problem.attrs), problem.outputs
    small = any(m is not None and m.dtype in SMALL for m in problem.inputs)

    def run(*inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        operands = problem.operands(constants, inputs)
        made = tuple(
            tensor
            if meta.format == "strided"
            else tensor.contiguous(memory_format=memory_format(meta.format, tensor.dim()))
            for tensor, meta in zip(operation(op).call(operands, attrs), outputs, strict=True)
        )
        if small:  # references of small types answer in float64
            made = tuple(
                store(t, getattr(torch, m.dtype)) for t, m in zip(made, outputs, strict=True)
            )
        return made if len(made) > 1 else made[0]

    return run
