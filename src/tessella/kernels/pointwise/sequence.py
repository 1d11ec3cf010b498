"""``pointwise`` by torch: one operation after another, in as little memory as they need.

A value goes into a result's buffer, or into an operand's that nothing reads any more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tessella.core.dtype import dtype_name
from tessella.core.errors import CompileError
from tessella.kernels.catalog import Call
from tessella.kernels.pointwise import elementwise
from tessella.operations.epilogue import OUT
from tessella.operations.pointwise_program import ELEMENTWISE, Instruction, evaluate, parse
from tessella.operations.problem import Problem
from tessella.operations.shapes import ShapeRules
from tessella.operations.table import operation
from tessella.operations.tensor_meta import TensorMeta

_UNARY = frozenset((*OUT, "leaky_relu", "elu", "clamp")) - {"gelu_tanh"}
_BINARY = frozenset(elementwise.BINARY)


@dataclass(frozen=True, kw_only=True)
class _TorchCall:
    """An instruction by torch.

    Attributes:
        call: operands in; with ``out=`` if it has a buffer.
        buffer: the number of the buffer it writes into, outputs first; None: torch makes one.
    """

    call: Callable[..., torch.Tensor]
    reads: tuple[int | None, ...]
    buffer: int | None


def fits(problem: Problem) -> str | None:
    if len(problem.outputs) != 1:
        return "makes one result"
    try:
        parse(problem.attrs["program"], len(problem.inputs), problem.attrs["results"])
    except CompileError as error:
        return str(error)
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    results = tuple(problem.attrs["results"])
    instructions = parse(problem.attrs["program"], len(problem.inputs), results)
    steps, scratch = _planned(problem, instructions, results)
    single = len(results) == 1

    def run(*inputs: torch.Tensor, out: Any) -> Any:
        outs = (out,) if single else tuple(out)
        buffers = [*outs, *(meta.empty(outs[0].device) for meta in scratch)]
        values = list(problem.operands(constants, inputs))
        for step in steps:
            operands = [None if r is None else values[r] for r in step.reads]
            if step.buffer is None:
                values.append(step.call(*operands))
            else:
                values.append(step.call(*operands, out=buffers[step.buffer]))
        for buffer, result in zip(outs, results, strict=True):
            if values[result] is not buffer:
                buffer.copy_(values[result])
        return out

    return run


def _planned(
    problem: Problem, instructions: Sequence[Instruction], results: Sequence[int]
) -> tuple[list[_TorchCall], list[TensorMeta]]:
    """The steps, and the buffers that they need beside the outputs."""
    inputs = len(problem.inputs)
    metas = _metas(problem, instructions)
    # the step after which a value's memory may be written: softmax does not work in place
    last = {
        r: n + (i.op not in ELEMENTWISE) / 2
        for n, i in enumerate(instructions)
        for r in i.reads
        if r is not None
    }
    last |= dict.fromkeys(results, len(instructions))
    # each buffer's meta, and the value that lies in it; an output's is its own from its step on
    buffers: list[TensorMeta] = list(problem.outputs)
    holds: list[int | None] = [None] * len(buffers)
    steps = []
    for number, step in enumerate(instructions):
        value = inputs + number
        call = _into(step)
        if call is None:
            steps.append(_TorchCall(call=_anew(step), reads=step.reads, buffer=None))
            continue
        if value in results:
            chosen = results.index(value)
        else:
            until = last.get(value, number)
            free = [
                b
                for b, (meta, held) in enumerate(zip(buffers, holds))
                if meta == metas[value]
                and (held is None or last.get(held, -1) <= number)
                and (b >= len(results) or until <= results[b] - inputs)
            ]
            chosen = free[0] if free else len(buffers)
        if chosen == len(buffers):
            buffers.append(metas[value])
            holds.append(None)
        holds[chosen] = value
        steps.append(_TorchCall(call=call, reads=step.reads, buffer=chosen))
    return steps, buffers[len(results) :]


def _metas(problem: Problem, instructions: Sequence[Instruction]) -> list[TensorMeta]:
    """Every value as a buffer: those of the first output's shape have its format."""
    meta, like = torch.device("meta"), problem.outputs[0]
    inputs = [m.empty(meta) for m in problem.given]
    with ShapeRules():
        values = evaluate(instructions, inputs, lambda op, *given: operation(op).call(*given)[0])
    return [
        TensorMeta(
            shape=tuple(v.shape),
            dtype=dtype_name(v.dtype),
            format=like.format if tuple(v.shape) == like.shape else "contiguous",
            strides=like.strides if tuple(v.shape) == like.shape else None,
        )
        for v in values
    ]


def _into(step: Instruction) -> Callable[..., torch.Tensor] | None:
    """The instruction as ``call(*operands, out=buffer)``, if torch has it so."""
    if step.op == "to":
        return lambda x, *, out: out.copy_(x)
    if step.op in ("softmax", "log_softmax"):
        function = {"softmax": torch.softmax, "log_softmax": torch.log_softmax}[step.op]
        dim = step.attrs["dim"]
        return lambda x, *, out: function(x, dim, dtype=out.dtype, out=out)
    if step.op not in _UNARY | _BINARY:
        return None
    count = sum(r is not None for r in step.reads)
    metas = tuple(TensorMeta(shape=(), dtype="float32") for _ in range(count))
    inputs = metas if step.op in _UNARY or count == 2 else (*metas, None)
    call = elementwise.bind(
        Problem(op=step.op, inputs=inputs, outputs=metas[:1], attrs=dict(step.attrs)), {}
    )
    return call if count == len(step.reads) else lambda x, _, *, out: call(x, out=out)


def _anew(step: Instruction) -> Callable[..., torch.Tensor]:
    return lambda *operands: operation(step.op).call(operands, step.attrs)[0]
