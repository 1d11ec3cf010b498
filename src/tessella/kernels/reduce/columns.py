"""Sums and means over axes that are not the last in memory: a global average pool of NHWC.

A tensor is [outer, reduced, inner] in memory; a block adds up some rows of some inner places at a
time, in float32. In plain Triton. What is done element by element before a global average pool, and
after it, is done on the way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from tessella.core.dtype import FLOATS
from tessella.core.errors import CompileError, KernelError
from tessella.device.launch import launch
from tessella.device.overlap import await_earlier, overlapping
from tessella.kernels.catalog import Call, Config
from tessella.kernels.epilogue.triton_device import cast
from tessella.kernels.shared.instructions_device import steps
from tessella.kernels.shared.pooled_program import MAX_OPERANDS, PooledProgram, Steps, in_parts
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta

MAX_ELEMENTS = 2**31 - 1  # offsets have 32 bits
ALONE = Steps(COUNT=1, OPS=(), READS=(), NUMBERS=(), RESULT=0)  # no steps before or after


def fits(problem: Problem) -> str | None:
    if problem.op == "pointwise":
        try:
            _chained(problem)
        except (KernelError, CompileError) as reason:
            return str(reason)
        return None
    x, out = problem["input"], problem.output
    if x.dtype not in FLOATS or out.dtype not in FLOATS:
        return f"no sum of {x.dtype}"
    if x.format == "strided" or out.format == "strided":
        return "needs dense tensors"
    if 0 in x.shape:
        return "nothing to add up"
    if math.prod(x.shape) > MAX_ELEMENTS:
        return "indices have 32 bits"
    shape = _as_columns(problem)
    if shape is None:
        return "reduces axes that lie together in memory"
    return "reduces the last axes" if shape[2] == 1 else None


def configs(problem: Problem) -> tuple[Config, ...]:
    """Tiles of some inner places, with as many rows as make 2048 or 1024 elements."""
    _, reduced, inner = _sizes(problem)
    tall = triton.next_power_of_2(reduced)
    found = []
    for width, size, warps in ((64, 4096, 4), (32, 4096, 4), (128, 2048, 4), (8, 2048, 4)):
        width = min(width, triton.next_power_of_2(inner))
        rows = max(1, min(tall, size // width))
        found.append({"rows": rows, "columns": width, "warps": warps})
    return tuple(c for i, c in enumerate(found) if c not in found[:i])


def _repeated(given: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple(given) * MAX_OPERANDS


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: Any) -> Call:
    tile = config or configs(problem)[0]
    outer, reduced, inner = _sizes(problem)
    grid = (outer * triton.cdiv(inner, tile["columns"]),)
    settings: dict[str, Any] = {
        "REDUCED": reduced,
        "INNER": inner,
        "DIVISOR": 1 if problem.op == "sum" else reduced,
        "TILE_ROWS": tile["rows"],
        "TILE_COLUMNS": tile["columns"],
    }
    tensors: Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]
    if problem.op == "pointwise":
        made, strides = _chained(problem)
        settings |= {"FIRST": made.first, "THEN": made.then, "STRIDES": strides}
        tensors = made.binder(constants)
    else:
        settings |= {"FIRST": ALONE, "THEN": ALONE._replace(COUNT=0)}
        settings["STRIDES"] = ((reduced * inner, 1, inner),)
        tensors = _repeated

    def run(*inputs: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        operands = tensors(problem.tensors(constants, inputs))
        launch(
            columns_kernel,
            grid,
            operands,
            out,
            num_warps=tile["warps"],
            **overlapping(),
            **settings,
        )
        return out

    return run


def _sizes(problem: Problem) -> tuple[int, int, int]:
    """The sizes of the outer, reduced and inner axes."""
    if problem.op == "pointwise":
        images, channels, height, width = in_parts(problem).x.shape
        return images, height * width, channels
    return _as_columns(problem) or (1, 1, 1)


def _chained(problem: Problem) -> tuple[PooledProgram, tuple[tuple[int, ...], ...]]:
    """A global average pool of channels_last, and each operand's strides from image to image, from
    channel to channel and from pixel to pixel.

    Raises:
        KernelError: it is another chain.
        CompileError: no program.
    """
    made = in_parts(problem)
    x, out = made.x, problem.output
    width = x.shape[3]
    if made.pool.op != "adaptive_avg_pool2d" or made.y.shape[2:] != (1, 1):
        raise KernelError("needs a global average pool")
    if 0 in x.shape or math.prod(x.shape) > MAX_ELEMENTS:
        raise KernelError("empty, or more than indices of 32 bits reach")
    if not out.has("contiguous") or any(
        m is not None and m.format == "strided" and m.strides is None for m in problem.inputs
    ):
        raise KernelError("needs strides that are known, and makes dense rows")
    if any(s[2] != s[3] * width and max(s[2:]) for s in made.before.strides):
        raise KernelError("pixels lie apart")
    if not any(s[1] == 1 and s[3] > 1 for s in made.before.strides):
        raise KernelError("reduces the last axes")
    before = tuple((s[0], s[1], s[3]) for s in made.before.strides)
    return made, (*before, *((s[0], s[1], 0) for s in made.after.strides[1:]))


def _as_columns(problem: Problem) -> tuple[int, int, int] | None:
    """Sizes of the outer, reduced and inner axes; None if those do not lie together."""
    x = problem["input"]
    axes = len(x.shape)
    if problem.op == "adaptive_avg_pool2d":
        if tuple(problem.attrs["output_size"]) != (1, 1):
            return None
        dims = [axes - 2, axes - 1]
    else:
        dim = problem.attrs["dim"]
        dims = [d % axes for d in (range(axes) if dim is None else dim)]
    order = _in_memory(x)
    reduced = [order.index(d) for d in dims if x.shape[d] != 1]
    if not reduced or max(reduced) - min(reduced) + 1 != len(reduced):
        return None
    kept = [d for d in order if d not in dims]
    if not _keeps_order(problem.output, kept, axes):
        return None
    sizes = [x.shape[d] for d in order]
    first, last = min(reduced), max(reduced)
    return (
        math.prod(sizes[:first]),
        math.prod(sizes[first : last + 1]),
        math.prod(sizes[last + 1 :]),
    )


def _in_memory(meta: TensorMeta) -> list[int]:
    """The axes larger than 1, the slowest first."""
    strides = meta.dense_strides
    axes = [a for a, size in enumerate(meta.shape) if size != 1]
    return sorted(axes, key=lambda a: -strides[a])


def _keeps_order(out: TensorMeta, kept: list[int], axes: int) -> bool:
    """Whether the axes that stay lie in the result as they lie in the input."""
    if len(out.shape) == axes:
        return _in_memory(out) == kept
    return kept == sorted(kept)  # the result is contiguous


@triton.jit
def columns_kernel(
    pointers,  # what is read before the mean, then after it
    y_pointer,
    FIRST: tl.constexpr,
    THEN: tl.constexpr,
    STRIDES: tl.constexpr,  # of each along outer, inner and reduced places
    REDUCED: tl.constexpr,
    INNER: tl.constexpr,
    DIVISOR: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    BEFORE: tl.constexpr = FIRST.COUNT
    AFTER: tl.constexpr = THEN.COUNT
    await_earlier(OVERLAP)
    TILES: tl.constexpr = (INNER + TILE_COLUMNS - 1) // TILE_COLUMNS
    block = tl.program_id(0)
    outer = block // TILES
    columns = ((block % TILES) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS))[None, :]
    columns_in = columns < INNER
    rows = tl.arange(0, TILE_ROWS)[:, None]
    total = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    for first in range(0, REDUCED, TILE_ROWS):
        there = (first + rows < REDUCED) & columns_in
        values = ()
        for i in tl.static_range(BEFORE):
            x = _load(pointers[i], outer, columns, first + rows, there, columns_in, STRIDES, i)
            values = values + (x,)  # noqa: RUF005
        x = steps(values, FIRST)
        if len(FIRST.OPS) > 0:
            x = tl.where(there, x, 0.0)
        total += x
    values = ((tl.sum(total, 0) / DIVISOR)[None, :],)
    for i in tl.static_range(AFTER):
        x = _load(pointers[BEFORE + i], outer, columns, 0, 0, columns_in, STRIDES, BEFORE + i)
        values = values + (x,)  # noqa: RUF005
    y = steps(values, THEN)
    y = tl.broadcast_to(cast(y, y_pointer.dtype.element_ty), [1, TILE_COLUMNS])
    tl.store(y_pointer + outer * INNER + columns, y, mask=columns_in)


@triton.jit
def _load(
    pointer, outer, columns, rows, there, columns_in, ALL_STRIDES: tl.constexpr, I: tl.constexpr
):
    """[rows, columns] in float32, or [1, columns] where all rows have the same."""
    STRIDES: tl.constexpr = ALL_STRIDES[I]
    start = pointer + outer * STRIDES[0] + columns * STRIDES[1]
    if STRIDES[2] == 0:
        x = tl.load(start, mask=columns_in, other=0.0)
    else:
        x = tl.load(start + rows * STRIDES[2], mask=there, other=0.0)
    return x.to(tl.float32)
