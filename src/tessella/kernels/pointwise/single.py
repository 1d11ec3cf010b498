"""Single operations as programs of one instruction, on the same memory.

Operations element by element, quantization and its inverse, and operations along the last axes:
softmax, norms, means, and a global average pool of NCHW.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from tessella.core.errors import KernelError
from tessella.operations.pointwise_program import ELEMENTWISE, QUANTIZATION, ROWS
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta


def as_program(problem: Problem) -> Problem:
    """A single operation as a problem ``pointwise`` on the same memory.

    Raises:
        KernelError: it does not work element by element or along the last axes.
    """
    if problem.op == "pointwise":
        return problem
    given = [i for i, m in enumerate(problem.inputs) if m is not None]
    reads = tuple(None if m is None else given.index(i) for i, m in enumerate(problem.inputs))
    inputs = problem.given
    op, attrs, outputs = problem.op, dict(problem.attrs), problem.outputs
    if op not in ELEMENTWISE | QUANTIZATION:
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
    (x, *others), out = inputs, problem.output
    axes = len(x.shape)
    if op == "adaptive_avg_pool2d" and tuple(attrs["output_size"]) == (1, 1):
        op, first, attrs = "mean", axes - 2, {"dtype": None}
    elif op in ("softmax", "log_softmax"):
        first, attrs["dim"] = attrs["dim"] % axes if axes else 0, -1
        if first != axes - 1:
            raise KernelError("works along the last axis")
    elif op in ("layer_norm", "rms_norm"):
        first = axes - len(attrs["normalized_shape"])
    elif op in ROWS:
        first = _first_reduced(attrs["dim"], axes)
    else:
        raise KernelError(f"no program for {op}")
    pitch = _pitch(x, first)
    if pitch is None or not out.has("contiguous"):
        raise KernelError("rows must be contiguous")
    rows, columns = math.prod(x.shape[:first]), math.prod(x.shape[first:])
    if op in ("layer_norm", "rms_norm"):
        attrs["normalized_shape"] = (columns,)
    reduces = op in ("mean", "sum", "amax", "amin")
    if reduces:
        attrs = {"dim": (-1,), "keepdim": True} | {k: attrs[k] for k in ("dtype",) if k in attrs}
    vectors = tuple(replace(m, shape=(columns,), format="contiguous") for m in others)
    read = replace(x, shape=(rows, columns), format="contiguous", strides=None)
    if pitch != columns:
        read = replace(read, format="strided", strides=(pitch, 1))
    made = replace(out, shape=(rows, 1 if reduces else columns), format="contiguous")
    return op, attrs, (read, *vectors), (made,)


def _pitch(x: TensorMeta, first: int) -> int | None:
    """Elements from a row to the next, of rows of all axes from ``first`` on; None where rows have
    gaps, or do not lie in equal distances.
    """
    if x.has("contiguous"):
        return math.prod(x.shape[first:])
    if x.strides is None:
        return None
    axes = [(size, step) for size, step in zip(x.shape, x.strides, strict=True)]
    step = 1
    for size, known in reversed(axes[first:]):
        if size != 1 and known != step:
            return None
        step *= size
    leading = [axis for axis in axes[:first] if axis[0] != 1]
    pitch = step = leading[-1][1] if leading else step
    for size, known in reversed(leading):
        if known != step:
            return None
        step *= size
    return pitch


def _first_reduced(dim: Any, axes: int) -> int:
    """The first of the axes of a reduction, which must be the last ones."""
    dims: list[int] = (
        sorted(d % axes for d in (range(axes) if dim is None else dim)) if axes else []
    )
    if not dims or dims != list(range(dims[0], axes)):
        raise KernelError("reduces the last axes")
    return dims[0]
