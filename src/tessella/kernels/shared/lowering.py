"""From a program to what the generated kernel knows: fewer operations, plain numbers, float32.

Layers become rows of primitive steps (a layer norm is standardize, mul, add; quantize is a quotient
and a rounding); a batch norm's constants become one factor and one summand a channel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tessella.core.dtype import FLOATS, dtype_name
from tessella.core.errors import KernelError
from tessella.operations.epilogue import ACTIVATIONS
from tessella.operations.operation import broadcast
from tessella.operations.pointwise_program import QUANTIZATION, ROWS, Instruction, evaluate, parse
from tessella.operations.problem import Problem
from tessella.operations.shapes import ShapeRules
from tessella.operations.table import operation
from tessella.operations.tensor_meta import TensorMeta

Numbers = tuple[float, float, float]

POWERS = (-1.0, -0.5, 0.5, 2.0, 3.0, 4.0)
SMALL = ("int8", "float8_e4m3fn")  # what quantize makes
LOADS = (*FLOATS, *SMALL, "uint8", "int32", "int64")
MAX_COLUMNS = 16384  # of a row that is reduced: it lies in registers
_MAKES = {"quantize": SMALL, "max_pool2d": (*FLOATS, "int8")}  # the others make floating numbers
_RANGES = {"int8": (-128, 127), "float8_e4m3fn": (-448, 448)}
_FAR = 1e6  # rounding to whole numbers is exact up to here, and a zero point does not bring it back
_DIGITS = {"float16": 11.0, "bfloat16": 8.0}
_SAME = ("exp log sqrt rsqrt reciprocal neg abs erf sin cos mish " + " ".join(ACTIVATIONS)).split()


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
        """The vector [C, 1, …] in float32, computed in float64."""
        mean, variance = (constants[i].double() for i in self.sources[:2])
        weight, bias = (None if i is None else constants[i].double() for i in self.sources[2:])
        factor = torch.rsqrt(variance + self.eps) * (1.0 if weight is None else weight)
        summand = (0.0 if bias is None else bias) - mean * factor
        made = factor if self.part == "factor" else summand
        return made.float().reshape(self.meta.shape).contiguous()


@dataclass(frozen=True, kw_only=True)
class AlongAxis:
    """A constant scale or zero point: one number, or one for each position on an axis.

    Attributes:
        source: its position among the inputs.
    """

    source: int
    meta: TensorMeta

    def tensor(self, constants: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The vector [1] or [C, 1, …] in float32."""
        return constants[self.source].float().reshape(self.meta.shape).contiguous()


Prepared = ChannelAffine | AlongAxis


@dataclass
class Lowered:
    """A program as the generated kernel takes it.

    Attributes:
        operands: what the kernel loads: numbers of inputs, and what is computed from constants.
        ops, reads, numbers: one entry a step; ``reads`` number operands, then steps.
        results: numbers of operands and steps, one an output.
        shape: what all values broadcast to.
        rows: a step needs whole rows.
    """

    shape: tuple[int, ...]
    operands: list[int | Prepared]
    ops: list[str] = field(default_factory=list)
    reads: list[tuple[int, int]] = field(default_factory=list)
    numbers: list[Numbers] = field(default_factory=list)
    results: tuple[int, ...] = ()
    rows: bool = False

    def metas(self, inputs: Sequence[TensorMeta]) -> list[TensorMeta]:
        """The descriptions of the operands; ``inputs`` are the problem's."""
        return [inputs[o] if isinstance(o, int) else o.meta for o in self.operands]

    def binder(
        self, constants: Mapping[int, torch.Tensor]
    ) -> Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]:
        """A function from the problem's operands to the kernel's."""
        made = {o: o.tensor(constants) for o in self.operands if not isinstance(o, int)}
        return lambda given: tuple(
            given[o] if isinstance(o, int) else made[o] for o in self.operands
        )

    def emit(self, op: str, x: int, y: int = 0, *numbers: float) -> int:
        """Add a step; returns its number."""
        self.ops.append(op)
        self.reads.append((x, y))
        a, b, c = (*map(float, numbers), 0.0, 0.0, 0.0)[:3]
        self.numbers.append((a, b, c))
        return len(self.operands) + len(self.ops) - 1


def lower(problem: Problem) -> Lowered:
    """The program of a problem ``pointwise``.

    Raises:
        KernelError: an operation, a type or a shape that the kernel does not know.
        CompileError: no program.
    """
    inputs = problem.given
    instructions = parse(problem.attrs["program"], len(inputs), problem.attrs["results"])
    if len(inputs) != len(problem.inputs):
        raise KernelError("no input may be left out")
    if wrong := {m.dtype for m in inputs} - set(LOADS):
        raise KernelError(f"does not read {', '.join(sorted(wrong))}")
    shapes = [meta.shape for meta in metas_of(instructions, inputs)]
    shape = _domain(instructions, shapes, len(inputs))
    lowered = Lowered(shape=shape, operands=_operands(instructions, problem, shapes))
    places: list[int | None] = [
        lowered.operands.index(i) if i in lowered.operands else None for i in range(len(inputs))
    ]
    for number, step in enumerate(instructions):
        if any(_is_fp8(instructions, r, len(inputs)) for r in step.reads):
            raise KernelError("fp8 values that are read where they are quantized")
        if step.op in ROWS:
            _require_row(step, shapes, shape)
            lowered.rows = True
        made = [lowered.operands.index(p) for p in _prepared(step, problem, shapes)]
        places.append(_step(lowered, step, places, made))
        own = shapes[len(inputs) + number]
        if (
            own not in (shape, (*shape[:-1], 1))
            and len(inputs) + number in problem.attrs["results"]
        ):
            raise KernelError("every result has the shape that all values broadcast to")
    lowered.results = tuple(places[r] or 0 for r in problem.attrs["results"])
    return lowered


def metas_of(instructions: Sequence[Instruction], inputs: Sequence[TensorMeta]) -> list[TensorMeta]:
    """Every value of a program, the inputs first; the formats of those made are not known.

    Raises:
        KernelError: an instruction makes what the kernel does not know.
    """

    def call(op: str, operands: Sequence[Any], attrs: Mapping[str, Any]) -> torch.Tensor:
        made = operation(op).call(operands, attrs)[0]
        if dtype_name(made.dtype) not in _MAKES.get(op, FLOATS):
            raise KernelError(f"{op} makes {made.dtype}")
        return made

    meta = torch.device("meta")
    operands = [torch.empty(m.shape, dtype=getattr(torch, m.dtype), device=meta) for m in inputs]
    with ShapeRules():
        values = evaluate(instructions, operands, call)
    return [TensorMeta(shape=tuple(v.shape), dtype=dtype_name(v.dtype)) for v in values]


def _is_fp8(instructions: Sequence[Instruction], value: int | None, inputs: int) -> bool:
    """Whether a value is quantized to fp8 by the program, so that only the store rounds it."""
    maker = None if value is None or value < inputs else instructions[value - inputs]
    return maker is not None and maker.op == "quantize" and maker.attrs["dtype"] != "int8"


def _domain(
    instructions: Sequence[Instruction], shapes: Sequence[tuple[int, ...]], inputs: int
) -> tuple[int, ...]:
    """The shape to which all made values, and all rows that are reduced, broadcast."""
    reduced = [shapes[step.x] for step in instructions if step.op in ROWS]
    if (made := broadcast(*shapes[inputs:], *reduced)) is None:
        raise KernelError("values that do not broadcast together")
    return made


def _operands(
    instructions: Sequence[Instruction], problem: Problem, shapes: Sequence[tuple[int, ...]]
) -> list[int | Prepared]:
    """The operands: inputs that are read as they are, then vectors that are made of constants."""
    plain: set[int] = set()
    prepared: list[Prepared] = []
    for step in instructions:
        made = _prepared(step, problem, shapes)
        reads = step.reads[:1] if made else step.reads
        plain |= {r for r in reads if r is not None and r < len(problem.inputs)}
        prepared += made
    return [*sorted(plain), *dict.fromkeys(prepared)]


def _prepared(
    step: Instruction, problem: Problem, shapes: Sequence[tuple[int, ...]]
) -> list[Prepared]:
    """A step's vectors that are made of constants: a batch norm's, or scale and zero point."""
    if step.op not in ("batch_norm", *QUANTIZATION):
        return []
    if any(r is not None and r not in problem.constant for r in step.reads[1:]):
        raise KernelError(f"what {step.op} reads besides must be constants")
    axes = len(shapes[step.x])
    if step.op == "batch_norm":
        mean, variance, weight, bias = (*step.reads[1:], None, None, None, None)[:4]
        assert mean is not None
        assert variance is not None
        sources = (mean, variance, weight, bias)
        meta = TensorMeta(shape=(shapes[mean][0], *[1] * (axes - 2)), dtype="float32")
        return [
            ChannelAffine(part=part, sources=sources, eps=step.attrs["eps"], meta=meta)
            for part in ("factor", "summand")
        ]
    after = (1,) * (axes - 1 - step.attrs["axis"] % max(axes, 1))
    return [
        AlongAxis(source=r, meta=TensorMeta(shape=_vector(shapes[r], after), dtype="float32"))
        for r in step.reads[1:]
        if r is not None
    ]


def _vector(shape: tuple[int, ...], after: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in which a vector broadcasts along an axis before ``after``; a number has [1]."""
    return (1,) if math.prod(shape) == 1 else (*shape, *after)


def _require_row(
    step: Instruction, shapes: Sequence[tuple[int, ...]], shape: tuple[int, ...]
) -> None:
    """Refuse what does not work along the last axis of the whole shape."""
    attrs, read = step.attrs, shapes[step.x]
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
    lowered: Lowered, step: Instruction, places: Sequence[int | None], made: Sequence[int]
) -> int:
    """Emit the steps of an instruction; returns the number of the last one.

    ``made`` are the operands that are made of its constants.
    """
    emit, op, attrs = lowered.emit, step.op, step.attrs
    reads = [None if r is None else places[r] for r in step.reads]
    x = reads[0]
    assert x is not None
    y = reads[1] if len(reads) > 1 else None
    if op == "batch_norm":
        return emit("add", emit("mul", x, made[0]), made[1])
    if op == "quantize":
        return _quantize(lowered, x, attrs["dtype"], *made)
    if op == "dequantize":
        return emit("mul", x if len(made) == 1 else emit("sub", x, made[1]), made[0])
    if op in ("add", "sub", "mul", "div", "pow", "maximum", "minimum"):
        return _binary(lowered, step, x, y)
    if op in ("layer_norm", "rms_norm"):
        if attrs["eps"] is None:
            raise KernelError("an epsilon that follows the element type")
        normed = emit("standardize" if op == "layer_norm" else "normalize", x, 0, attrs["eps"])
        for following, operand in zip(("mul", "add"), reads[1:]):
            normed = normed if operand is None else emit(following, normed, operand)
        return normed
    if op in ROWS:
        return emit(op, x)
    if op == "clamp":
        return _clamp(lowered, x, attrs["min"], attrs["max"])
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


def _clamp(lowered: Lowered, x: int, low: float | None, high: float | None) -> int:
    x = x if low is None else lowered.emit("at_least", x, 0, low)
    return x if high is None else lowered.emit("at_most", x, 0, high)


def _quantize(lowered: Lowered, x: int, dtype: str, scale: int, zero: int | None = None) -> int:
    """A quotient, rounded half to even before the zero point is added; fp8 is rounded by a cast."""
    scaled = lowered.emit("quotient", x, scale)
    if zero is not None:
        scaled = lowered.emit("whole", _clamp(lowered, scaled, -_FAR, _FAR))
        return _clamp(lowered, lowered.emit("add", scaled, zero), *_RANGES[dtype])
    scaled = _clamp(lowered, scaled, *_RANGES[dtype])
    return lowered.emit("whole", scaled) if dtype == "int8" else scaled


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
