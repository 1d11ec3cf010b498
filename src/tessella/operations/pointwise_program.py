"""Programs: what a node ``pointwise`` computes, as data.

A program is a list of instructions ``[operation, reads, attributes]``, with the names, operands
and attributes that the operation has in a graph. Values are numbered: first the node's inputs, then
each instruction's result; ``results`` are the numbers of the node's outputs. Most operations work
element by element, with broadcasting; those of ``ROWS`` work along the last axis. One operation of
``POOLS`` may stand among them: what comes before it is done to pixels, what follows to windows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tessella.core.errors import CompileError

# fmt: off
ELEMENTWISE = frozenset((
    "relu", "relu6", "sigmoid", "tanh", "silu", "gelu", "hardswish", "hardsigmoid", "mish",
    "leaky_relu", "elu", "softplus", "clamp", "exp", "log", "sqrt", "rsqrt", "reciprocal", "neg",
    "abs", "erf", "sin", "cos", "to", "add", "sub", "mul", "div", "pow", "maximum", "minimum",
    "batch_norm",
))
ROWS = frozenset((
    "softmax", "log_softmax", "layer_norm", "rms_norm", "mean", "sum", "amax", "amin",
))
QUANTIZATION = frozenset(("quantize", "dequantize"))
POOLS = frozenset(("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d"))
# fmt: on
MAX_INSTRUCTIONS = 64
MAX_INPUTS = 24

Data = Sequence[Sequence[Any]]  # as it stands in a node's attribute


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One operation.

    Attributes:
        reads: numbers of values, in the operation's order; None where one is left out.
    """

    op: str
    reads: tuple[int | None, ...]
    attrs: Mapping[str, Any]

    @property
    def x(self) -> int:
        """The number of its first operand, which ``parse`` lets nobody leave out."""
        value = self.reads[0]
        assert value is not None
        return value

    def data(self) -> tuple[Any, ...]:
        """The instruction as the plain tuple that stands in a node's attribute."""
        return (self.op, self.reads, dict(self.attrs))


def parse(program: Data, inputs: int, results: Sequence[int]) -> tuple[Instruction, ...]:
    """The instructions of an attribute, checked: it may come from a stranger.

    Attributes of instructions are left to the operations' references.

    Raises:
        CompileError: it is not a program of so many inputs that makes these results.
    """
    if not _is_list(program) or not 0 < len(program) <= MAX_INSTRUCTIONS:
        raise _wrong(f"1 to {MAX_INSTRUCTIONS} instructions", program)
    if not 0 < inputs <= MAX_INPUTS:
        raise _wrong(f"1 to {MAX_INPUTS} inputs", inputs)
    parsed = tuple(_instruction(i, inputs + n) for n, i in enumerate(program))
    made = range(inputs, inputs + len(parsed))
    if not _is_list(results) or not results or len(set(map(repr, results))) != len(results):
        raise _wrong("one or more results, each once", results)
    if not all(type(r) is int and r in made for r in results):
        raise _wrong("results that instructions make", results)
    return parsed


def _instruction(data: Any, known: int) -> Instruction:
    if not _is_list(data) or len(data) != 3:
        raise _wrong("instructions of an operation, reads and attributes", data)
    op, reads, attrs = data
    if not isinstance(op, str) or op not in ELEMENTWISE | ROWS | QUANTIZATION | POOLS:
        raise _wrong("operations that a program may hold", op)
    if not _is_list(reads) or not reads or reads[0] is None or len(reads) > 5:
        raise _wrong("one to five reads", reads)
    if any(r is not None and not (type(r) is int and 0 <= r < known) for r in reads):
        raise _wrong("reads of values that are there already", reads)
    if not isinstance(attrs, Mapping) or not all(isinstance(name, str) for name in attrs):
        raise _wrong("attributes by name", attrs)
    return Instruction(op=op, reads=tuple(reads), attrs=dict(attrs))


def _is_list(data: Any) -> bool:
    return isinstance(data, list | tuple)


def _wrong(rule: str, seen: Any) -> CompileError:
    return CompileError(f"a program of element-wise operations has {rule}", seen=str(seen)[:200])


def evaluate(
    instructions: Sequence[Instruction],
    inputs: Sequence[torch.Tensor],
    call: Callable[[str, Sequence[torch.Tensor | None], Mapping[str, Any]], torch.Tensor],
) -> list[torch.Tensor]:
    """Every value of a program, ``call(op, operands, attrs)`` being what an operation means."""
    values = list(inputs)
    for step in instructions:
        operands = [None if r is None else values[r] for r in step.reads]
        values.append(call(step.op, operands, step.attrs))
    return values


def has_rows(program: Data) -> bool:
    """Whether an instruction works along the last axis."""
    return any(op in ROWS for op, _, _ in program)


def has_pool(program: Data) -> bool:
    """Whether an instruction pools."""
    return any(op in POOLS for op, _, _ in program)


def text(program: Data, results: Sequence[int], names: Sequence[str]) -> str:
    """A program for people: ``relu(add(%x, mul(%y, w)))``; what is read twice has a number."""
    reads = [r for _, operands, _ in program for r in operands if r is not None]
    shown = list(names)
    steps = []
    for op, operands, attrs in program:
        number = len(shown)
        given = {k: v for k, v in attrs.items() if v is not None and (k, v) != ("alpha", 1)}
        arguments = [shown[r] for r in operands if r is not None]
        arguments += [str(given.pop("scalar"))] if "scalar" in given else []
        call = f"{op}({', '.join(arguments + [f'{k}={v}' for k, v in given.items()])})"
        if reads.count(number) == 1 and number not in results:
            shown.append(call)
        else:
            shown.append(f"${number - len(names)}")
            steps.append(f"${number - len(names)} = {call}")
    if len(steps) == 1:
        return steps[0].partition(" = ")[2]
    return "; ".join(steps)
