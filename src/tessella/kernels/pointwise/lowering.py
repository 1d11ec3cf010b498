"""From a program to what the generated kernel knows: fewer operations, plain numbers, float32.

Layers become rows of primitive steps (a layer norm is standardize, mul, add); a batch norm's
constants become one factor and one summand a channel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tessella.core.errors import KernelError
from tessella.kernels import reference
from tessella.kernels.epilogue import ACTIVATIONS
from tessella.kernels.pointwise.program import ROWS, Instruction, evaluate, parse
from tessella.kernels.problem import Problem, TensorMeta
from tessella.kernels.shapes import ShapeRules, broadcast

Numbers = tuple[float, float, float]

POWERS = (-1.0, -0.5, 0.5, 2.0, 3.0, 4.0)
FLOATS = ("float32", "float16", "bfloat16")
LOADS = (*FLOATS, "int8", "uint8", "int32", "int64")
MAX_COLUMNS = 16384  # of a row that is reduced: it lies in registers
_DIGITS = {"float16": 11.0, "bfloat16": 8.0}
_SAME = ("exp log sqrt rsqrt reciprocal neg abs erf mish " + " ".join(ACTIVATIONS)).split()


@dataclass(frozen=True, kw_only=True)
class ChannelAffine:
    """What a batch norm does to a channel, from its constants: a factor, or a summand.

    Attributes:
        sources: positions of running_mean, running_var, weight and bias among the inputs.
    """

    part: str
    sources: tuple[int, int, int | None, int | None]
    eps: float
    meta: TensorMeta

    def tensor(self, constants: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """[C, 1, …] in float32, computed in float64."""
        mean, variance, weight, bias = (
            None if i is None else constants[i].double() for i in self.sources
        )
        factor = torch.rsqrt(variance + self.eps) * (1.0 if weight is None else weight)
        summand = (0.0 if bias is None else bias) - mean * factor
        made = factor if self.part == "factor" else summand
        return made.float().reshape(self.meta.shape).contiguous()


@dataclass
class Lowered:
    """A program in the kernel's words.

    Attributes:
        operands: what the kernel loads: numbers of inputs, and what is computed from constants.
        ops, reads, numbers: one entry a step; ``reads`` number operands, then steps.
        results: numbers of operands and steps, one an output.
        shape: what all values broadcast to.
        rows: a step needs whole rows.
    """

    shape: tuple[int, ...]
    operands: list[int | ChannelAffine]
    ops: list[str] = field(default_factory=list)
    reads: list[tuple[int, int]] = field(default_factory=list)
    numbers: list[Numbers] = field(default_factory=list)
    results: tuple[int, ...] = ()
    rows: bool = False

    def emit(self, op: str, x: int, y: int = 0, *numbers: float) -> int:
        """Add a step; returns its number."""
        self.ops.append(op)
        self.reads.append((x, y))
        self.numbers.append((*map(float, numbers), 0.0, 0.0, 0.0)[:3])
        return len(self.operands) + len(self.ops) - 1


def lower(problem: Problem) -> Lowered:
    """The program of a problem ``pointwise``.

    Raises:
        KernelError: an operation, a type or a shape that the kernel does not know.
        CompileError: no program.
    """
    inputs = [meta for meta in problem.inputs if meta is not None]
    instructions = parse(problem.attrs["program"], len(inputs), problem.attrs["results"])
    if len(inputs) != len(problem.inputs):
        raise KernelError("no input may be left out")
    if wrong := {m.dtype for m in inputs} - set(LOADS):
        raise KernelError(f"does not read {', '.join(sorted(wrong))}")
    shapes = _shapes(instructions, inputs)
    shape = _domain(instructions, shapes, len(inputs))
    lowered = Lowered(shape=shape, operands=_operands(instructions, problem, shapes))
    places: list[int | None] = [
        lowered.operands.index(i) if i in lowered.operands else None for i in range(len(inputs))
    ]
    for number, step in enumerate(instructions):
        if step.op in ROWS:
            _require_row(step, shapes, shape)
            lowered.rows = True
        affine = [p for p, o in enumerate(lowered.operands) if _is_of(o, step)]
        places.append(_step(lowered, step, places, affine))
        made = shapes[len(inputs) + number]
        if (
            made not in (shape, (*shape[:-1], 1))
            and len(inputs) + number in problem.attrs["results"]
        ):
            raise KernelError("every result has the shape that all values broadcast to")
    lowered.results = tuple(places[r] or 0 for r in problem.attrs["results"])
    return lowered


def _shapes(
    instructions: Sequence[Instruction], inputs: Sequence[TensorMeta]
) -> list[tuple[int, ...]]:
    """The shape of every value; every one that an instruction makes must float."""

    def call(op: str, operands: Sequence[Any], attrs: Mapping[str, Any]) -> torch.Tensor:
        made = reference.call(op, operands, attrs)[0]
        if str(made.dtype).removeprefix("torch.") not in FLOATS:
            raise KernelError(f"{op} makes {made.dtype}")
        return made

    meta = torch.device("meta")
    operands = [torch.empty(m.shape, dtype=getattr(torch, m.dtype), device=meta) for m in inputs]
    with ShapeRules():
        values = evaluate(instructions, operands, call)
    return [tuple(v.shape) for v in values]


def _domain(
    instructions: Sequence[Instruction], shapes: Sequence[tuple[int, ...]], inputs: int
) -> tuple[int, ...]:
    """What all values that are made, and all rows that are reduced, broadcast to."""
    reduced = [shapes[step.reads[0]] for step in instructions if step.op in ROWS]
    if (made := broadcast(*shapes[inputs:], *reduced)) is None:
        raise KernelError("values that do not broadcast together")
    return made


def _operands(
    instructions: Sequence[Instruction], problem: Problem, shapes: Sequence[tuple[int, ...]]
) -> list[int | ChannelAffine]:
    """The inputs that are read as they are, then the factors and summands of batch norms."""
    plain: set[int] = set()
    affine: list[ChannelAffine] = []
    for step in instructions:
        if step.op != "batch_norm":
            plain |= {r for r in step.reads if r is not None and r < len(problem.inputs)}
            continue
        plain |= {step.reads[0]} & set(range(len(problem.inputs)))
        sources = (*step.reads[1:], None, None, None, None)[:4]
        if any(s is not None and s not in problem.constant for s in sources):
            raise KernelError("the statistics of a batch norm must be constants")
        axes = len(shapes[step.reads[0]])
        channels = shapes[sources[0]][0]
        meta = TensorMeta(shape=(channels, *[1] * (axes - 2)), dtype="float32")
        affine += [
            ChannelAffine(part=part, sources=sources, eps=step.attrs["eps"], meta=meta)
            for part in ("factor", "summand")
        ]
    return [*sorted(plain), *dict.fromkeys(affine)]


def _is_of(operand: int | ChannelAffine, step: Instruction) -> bool:
    """Whether an operand was made from the constants of this batch norm."""
    return (
        step.op == "batch_norm"
        and isinstance(operand, ChannelAffine)
        and operand.sources == (*step.reads[1:], None, None, None, None)[:4]
        and operand.eps == step.attrs["eps"]
    )


def _require_row(
    step: Instruction, shapes: Sequence[tuple[int, ...]], shape: tuple[int, ...]
) -> None:
    """Refuse what does not work along the last axis of the whole shape."""
    attrs, read = step.attrs, shapes[step.reads[0]]
    if read != shape or not shape:
        raise KernelError(f"{step.op} of a value that is broadcast later")
    if shape[-1] > MAX_COLUMNS or shape[-1] == 0:
        raise KernelError(f"a row has 1 to {MAX_COLUMNS} elements, not {shape[-1]}")
    last = len(shape) - 1
    if step.op in ("softmax", "log_softmax"):
        along = attrs["dim"] % len(shape) == last
    elif step.op in ("layer_norm", "rms_norm"):
        along = len(attrs["normalized_shape"]) == 1
    else:
        dims = range(len(shape)) if attrs["dim"] is None else attrs["dim"]
        along = [d % len(shape) for d in dims] == [last] and attrs["keepdim"]
    if not along:
        raise KernelError(f"{step.op} works along the last axis, and keeps it")


def _step(
    lowered: Lowered, step: Instruction, places: Sequence[int | None], affine: Sequence[int]
) -> int:
    """Emit the steps of an instruction; returns the number of the last one."""
    emit, op, attrs = lowered.emit, step.op, step.attrs
    reads = [None if r is None else places[r] for r in step.reads]
    x = reads[0]
    y = reads[1] if len(reads) > 1 else None
    if op == "batch_norm":
        return emit("add", emit("mul", x, affine[0]), affine[1])
    if op in ("add", "sub", "mul", "div", "pow", "maximum", "minimum"):
        return _binary(lowered, step, x, y)
    if op in ("layer_norm", "rms_norm"):
        if attrs["eps"] is None:
            raise KernelError("an epsilon that follows the element type")
        made = emit("standardize" if op == "layer_norm" else "normalize", x, 0, attrs["eps"])
        for following, operand in zip(("mul", "add"), reads[1:]):
            made = made if operand is None else emit(following, made, operand)
        return made
    if op in ROWS:
        return emit(op, x)
    if op == "clamp":
        low, high = attrs["min"], attrs["max"]
        made = x if low is None else emit("at_least", x, 0, low)
        return made if high is None else emit("at_most", made, 0, high)
    if op == "to":
        digits = _DIGITS.get(attrs["dtype"])
        return x if digits is None else emit("round", x, 0, digits)
    if op == "gelu" and attrs.get("approximate", "none") == "tanh":
        return emit("gelu_tanh", x)
    if op == "leaky_relu":
        return emit(op, x, 0, attrs["negative_slope"])
    if op == "elu":
        return emit(op, x, 0, attrs["alpha"], attrs.get("scale", 1), attrs.get("input_scale", 1))
    if op == "softplus":
        return emit(op, x, 0, attrs["beta"], attrs["threshold"])
    if op not in _SAME:
        raise KernelError(f"no kernel for {op}")
    return emit(op, x)


_WITH_NUMBER = {"mul": "times", "div": "over", "maximum": "at_least", "minimum": "at_most"}


def _binary(lowered: Lowered, step: Instruction, x: int, y: int | None) -> int:
    """``x op y``, or the number ``scalar`` on the right."""
    emit, op, attrs = lowered.emit, step.op, step.attrs
    alpha = attrs.get("alpha", 1)
    if op == "pow":
        exponent = None if y is not None else float(attrs["scalar"])
        if exponent == 1:
            return x
        if exponent not in POWERS:
            raise KernelError("a power that is not a small whole number, a root or a reciprocal")
        return emit("power", x, 0, exponent)
    if y is not None:
        return emit(op, x, y if alpha == 1 else emit("times", y, 0, alpha))
    number = attrs["scalar"]
    if op in ("add", "sub"):
        return emit("plus", x, 0, number * alpha if op == "add" else -number * alpha)
    return emit(_WITH_NUMBER[op], x, 0, number)
