"""``pointwise``: a program in one pass over memory, by a kernel that Triton makes of the program.

Also single operations, as programs of one instruction: element by element, or along the last axes
(softmax, norms, means; a global average pool of NCHW).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tessella.core.errors import CompileError
from tessella.kernels.catalog import Call, Config
from tessella.kernels.launch import launch
from tessella.kernels.pointwise.axes import Axes, walk
from tessella.kernels.pointwise.lowering import FLOATS, ChannelAffine, Lowered, Unsupported, lower
from tessella.kernels.pointwise.program import ELEMENTWISE, ROWS
from tessella.kernels.problem import Problem, TensorMeta

WRITES_OUT = True
SLICED_OUT = True

MAX_ELEMENTS = 2**31 - 1  # offsets have 32 bits
MAX_OPERANDS, MAX_OUTPUTS = 10, 4  # of the kernel's parameters
MAX_TILE = 16384
WIDEST = 16  # elements: what is known to divide the columns makes loads of up to 16 bytes


@dataclass(frozen=True, kw_only=True)
class Walk:
    """A program and the tensors it walks over: what the kernel is compiled for."""

    lowered: Lowered
    axes: Axes
    inputs: int

    @property
    def forms(self) -> tuple[str, ...]:
        """Of each tensor, whether its numbers change with the row, the column, or both."""
        names = {(True, True): "tile", (False, True): "row", (True, False): "column"}
        made = [names.get((any(s[:-1]), s[-1] != 0), "one") for s in self.axes.strides]
        whole = "column" if self.axes.columns == 1 else "tile"
        outputs = ["column" if f == "column" else whole for f in made[self.inputs :]]
        return (*made[: self.inputs], *outputs)


def fits(problem: Problem) -> str | None:
    try:
        _walk(problem)
    except (Unsupported, CompileError) as reason:
        return str(reason)
    return None


def configs(problem: Problem) -> tuple[Config, ...]:
    """Tiles of 2048 elements by 4 warps, and both sides of it."""
    walk = _walk(problem)
    columns = walk.axes.columns
    if walk.lowered.rows:
        width = _power_of_two(columns)
        shapes = [(max(1, 2048 // width), width, 4), (1, width, max(1, min(16, width // 1024)))]
        shapes.append((max(1, 4096 // width), width, 8))
    else:
        shapes = [_tile(columns, size, warps) for size, warps in ((2048, 4), (4096, 8), (1024, 4))]
    kept = [s for s in dict.fromkeys(shapes) if s[0] * s[1] <= MAX_TILE]
    return tuple({"tile_rows": r, "tile_columns": c, "warps": w} for r, c, w in kept)


def bind(
    problem: Problem,
    constants: Mapping[int, torch.Tensor],
    *,
    tile_rows: int,
    tile_columns: int,
    warps: int,
) -> Call:
    from tessella.kernels.pointwise.generated_device import program_kernel

    walk = _walk(problem)
    lowered, axes = walk.lowered, walk.axes
    single = len(problem.outputs) == 1
    made = {
        i: o.tensor(constants)
        for i, o in enumerate(lowered.operands)
        if isinstance(o, ChannelAffine)
    }
    unit = math.gcd(axes.columns, WIDEST)
    sizes = axes.rows, axes.columns // unit
    grid = (-(-axes.rows // tile_rows) * -(-axes.columns // tile_columns),)
    program = {
        "INPUTS": len(lowered.operands),
        "OUTPUTS": len(problem.outputs),
        "UNIT": unit,
        "OPS": tuple(lowered.ops),
        "READS": tuple(lowered.reads),
        "NUMBERS": tuple(lowered.numbers),
        "RESULTS": lowered.results,
        "SIZES": axes.sizes[1:-1],
        "STRIDES": tuple((0, *s) if len(axes.sizes) == 1 else s for s in axes.strides),
        "FORMS": walk.forms,
        "TILE_ROWS": tile_rows,
        "TILE_COLUMNS": tile_columns,
    }

    def run(*inputs: torch.Tensor, out: Any) -> Any:
        operands = problem.operands(constants, inputs)
        tensors = tuple(
            made[i] if isinstance(o, ChannelAffine) else operands[o]
            for i, o in enumerate(lowered.operands)
        )
        pointers = _padded(tensors, MAX_OPERANDS) + _padded((out,) if single else out, MAX_OUTPUTS)
        launch(program_kernel, grid, *pointers, *sizes, num_warps=warps, **program)
        return out

    return run


def _padded(tensors: Sequence[torch.Tensor], count: int) -> tuple[torch.Tensor, ...]:
    return (*tensors, *[tensors[0]] * (count - len(tensors)))


def _walk(problem: Problem) -> Walk:
    """The problem as the kernel sees it; raises ``Unsupported`` where it cannot."""
    problem = as_program(problem)
    metas = [m for m in (*problem.inputs, *problem.outputs) if m is not None]
    if any(m.format == "strided" and m.strides is None for m in metas):
        raise Unsupported("strides must be known when the plan is built")
    if any(m.dtype not in FLOATS for m in problem.outputs):
        raise Unsupported("makes floating numbers of 16 or 32 bits")
    lowered = lower(problem)
    tensors = [
        o.meta if isinstance(o, ChannelAffine) else problem.inputs[o] for o in lowered.operands
    ] + list(problem.outputs)
    if len(lowered.operands) > MAX_OPERANDS or len(problem.outputs) > MAX_OUTPUTS:
        raise Unsupported(f"reads at most {MAX_OPERANDS} tensors and makes at most {MAX_OUTPUTS}")
    if max(math.prod(m.shape) for m in tensors) > MAX_ELEMENTS:
        raise Unsupported("indices have 32 bits")
    full = [i for i, m in enumerate(tensors) if m.shape == lowered.shape]
    lead = max((i for i in full if i >= len(lowered.operands)), default=full[0] if full else 0)
    axes = walk(lowered.shape, tensors, lead=lead, keep_last=lowered.rows)
    return Walk(lowered=lowered, axes=axes, inputs=len(lowered.operands))


def as_program(problem: Problem) -> Problem:
    """A single operation as a problem ``pointwise`` on the same memory.

    Raises:
        Unsupported: it does not work element by element or along the last axes.
    """
    if problem.op == "pointwise":
        return problem
    given = [i for i, m in enumerate(problem.inputs) if m is not None]
    reads = tuple(None if m is None else given.index(i) for i, m in enumerate(problem.inputs))
    inputs = tuple(problem.inputs[i] for i in given)
    op, attrs, outputs = problem.op, dict(problem.attrs), problem.outputs
    if op not in ELEMENTWISE:
        op, attrs, inputs, outputs = _along_rows(problem, inputs)
    program = ((op, reads, attrs),)
    return replace(
        problem,
        op="pointwise",
        inputs=inputs,
        outputs=outputs,
        attrs={"program": program, "results": (len(inputs),)},
        constant=tuple(given.index(i) for i in problem.constant),
    )


Rows = tuple[str, dict[str, Any], tuple[TensorMeta, ...], tuple[TensorMeta, ...]]


def _along_rows(problem: Problem, inputs: tuple[TensorMeta, ...]) -> Rows:
    """An operation over the last axes of contiguous tensors, with these axes as one."""
    op, attrs = problem.op, dict(problem.attrs)
    x, out = problem.inputs[0], problem.output
    axes = len(x.shape)
    if op == "adaptive_avg_pool2d" and tuple(attrs["output_size"]) == (1, 1):
        op, first, attrs = "mean", axes - 2, {"dtype": None}
    elif op in ("softmax", "log_softmax"):
        first, attrs["dim"] = attrs["dim"] % axes if axes else 0, -1
        if first != axes - 1:
            raise Unsupported("works along the last axis")
    elif op in ("layer_norm", "rms_norm"):
        first = axes - len(attrs["normalized_shape"])
    elif op in ROWS:
        first = _first_reduced(attrs["dim"], axes)
    else:
        raise Unsupported(f"no program for {op}")
    if not x.has("contiguous") or not out.has("contiguous"):
        raise Unsupported("rows must be contiguous")
    rows, columns = math.prod(x.shape[:first]), math.prod(x.shape[first:])
    if op in ("layer_norm", "rms_norm"):
        attrs["normalized_shape"] = (columns,)
    reduces = op in ("mean", "sum", "amax", "amin")
    if reduces:
        attrs = {"dim": (-1,), "keepdim": True} | {k: attrs[k] for k in ("dtype",) if k in attrs}
    vectors = tuple(replace(m, shape=(columns,), format="contiguous") for m in inputs[1:])
    read = replace(x, shape=(rows, columns), format="contiguous")
    made = replace(out, shape=(rows, 1 if reduces else columns), format="contiguous")
    return op, attrs, (read, *vectors), (made,)


def _first_reduced(dim: Any, axes: int) -> int:
    """The first of the axes of a reduction, which must be the last ones."""
    dims = sorted(d % axes for d in (range(axes) if dim is None else dim)) if axes else []
    if not dims or dims != list(range(dims[0], axes)):
        raise Unsupported("reduces the last axes")
    return dims[0]


def _tile(columns: int, size: int, warps: int) -> tuple[int, int, int]:
    """Rows, columns and warps of a tile: as wide as can be while little hangs over the edge."""
    width = min(size, _power_of_two(columns))
    while width > 64 and -(-columns // width) * width > 1.1 * columns:
        width //= 2
    return size // width, width, warps


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
