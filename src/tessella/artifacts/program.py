"""A plan's program as data: buffers, steps and buckets, and the checks that need no kernel.

A program is a straight line of steps over named buffers. ``wrong`` says why a program from a file
cannot run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tessella.core.architectures import is_gpu
from tessella.core.dtype import DTYPES
from tessella.core.record import canonical_json, same_json
from tessella.core.spec import TensorSpec

ALIGNMENT = 64  # bytes: of buffers in the arena, and of members in the file
MAX_ARENA_BYTES = 1 << 40
MAX_BATCH = 1 << 13  # the runtime tabulates how each batch up to the largest is cut
MAX_AXES = 16
SLICE_ALIGNMENT = 16  # bytes on a GPU: what Hopper's bulk copies ask of every address
# Inside a program there may also be what torch's operators hand to each other (an FFT).
ITEMSIZES = {name: d.itemsize for name, d in DTYPES.items()} | {"complex64": 8, "complex128": 16}
Format = Literal["contiguous", "channels_last", "strided"]


@dataclass(frozen=True, kw_only=True)
class Slice:
    """The place of a buffer in another, dense buffer ``of``: from ``start`` on along ``axis``.

    Parts of a concatenation are such slices: kernels write them into the whole directly.
    """

    of: str
    axis: int
    start: int


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """A value of the program.

    Attributes:
        shape: concrete shape, for the bucket's batch.
        format: memory format, which gives the strides; ``strided`` is a view with any strides.
        offset: byte offset in the arena, or None if a kernel allocates the buffer.
        slice: the place in another buffer, for a buffer without memory of its own; the strides are
            then those of the other buffer.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    format: Format = "contiguous"
    offset: int | None = None
    slice: Slice | None = None


@dataclass(frozen=True, kw_only=True)
class Step:
    """One kernel launch.

    Attributes:
        kernel: id in ``kernels.catalog``, for example ``conv2d.onednn``.
        op: the operation, for example ``conv2d``.
        inputs: names of buffers or constants, in the operation's order; None where one is left out.
        outputs: names of buffers.
        attrs: the operation's attributes, JSON values.
        config: the kernel's configuration (tile sizes and the like), as the search chose it.
        workspace: the buffer that is scratch memory for this step only, if the kernel needs one.
        frees: buffers that are not read again after this step.
        layer: path of the module that the step came from (``layer1.0.conv1``), for people.
    """

    kernel: str
    op: str
    inputs: tuple[str | None, ...]
    outputs: tuple[str, ...]
    attrs: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)
    workspace: str | None = None
    frees: tuple[str, ...] = ()
    layer: str = ""

    @property
    def title(self) -> str:
        """The kernel for people, with the operators that the kernel's name does not say."""
        if self.op == "pointwise":
            return f"{self.kernel} {', '.join(i[0] for i in self.attrs['program'])}"
        by_name = self.op in ("fallback", "user")
        return f"{self.kernel} {self.attrs['target']}" if by_name else self.kernel


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """The program for one batch size.

    Attributes:
        arena_bytes: size of the arena that the buffers with an offset share.
        held_bytes: the arena, and the most that kernels hold besides in tensors of their own.
        peak_bytes: the most that all live buffers take together, a lower bound for every layout.
    """

    batch: int
    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]
    arena_bytes: int
    held_bytes: int
    peak_bytes: int

    @property
    def packing(self) -> float:
        """Memory of the buffers over its lower bound; 1.0 is perfect."""
        return self.held_bytes / self.peak_bytes if self.peak_bytes else 1.0


@dataclass(frozen=True, kw_only=True)
class Program:
    """``program.json``: straight-line steps, one list a bucket; buckets share the constants."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    buckets: tuple[Bucket, ...]


def wrong(
    program: Program,
    bucket: Bucket,
    specs: Sequence[TensorSpec],
    weights: Mapping[str, object],
    target: str,
) -> str | None:
    """Why one bucket of a program cannot be run on a target, or None.

    Args:
        specs: descriptions of the program's inputs and outputs.
        weights: the constants by name.
    """
    return (
        _sizes(bucket)
        or _slices(bucket, target)
        or _names(program, bucket, specs, weights)
        or _steps(program, bucket, weights)
        or _programs(bucket)
        or _difference(program.buckets[0], bucket)
    )


def _sizes(bucket: Bucket) -> str | None:
    """Why the size of the arena or of a buffer is impossible, or None."""
    if not 1 <= bucket.batch <= MAX_BATCH or not 0 <= bucket.arena_bytes <= MAX_ARENA_BYTES:
        return f"an arena of {bucket.arena_bytes} bytes, batches to {MAX_BATCH} can be"
    for buffer in bucket.buffers:
        if buffer.dtype not in ITEMSIZES:
            return f"element type {buffer.dtype!r} of {buffer.name}"
        if len(buffer.shape) > MAX_AXES or any(not 0 <= d <= MAX_ARENA_BYTES for d in buffer.shape):
            return f"shape of {buffer.name}: {str(buffer.shape)[:120]}"
        size = ITEMSIZES[buffer.dtype] * math.prod(buffer.shape)
        if size > MAX_ARENA_BYTES:
            return f"buffer {buffer.name} of {size} bytes"
        offset = buffer.offset
        if offset is None:
            continue
        if offset % ALIGNMENT or not 0 <= offset <= bucket.arena_bytes - size:
            return f"buffer {buffer.name} lies outside the arena"
        if buffer.format == "strided" or (
            buffer.format == "channels_last" and len(buffer.shape) not in (4, 5)
        ):
            return f"buffer {buffer.name} has no place as {buffer.format}"
    return None


def begins_aligned(nbytes: int, target: str) -> bool:
    """Whether every kernel of a target can read and write what begins so many bytes behind a
    buffer's begin.

    >>> begins_aligned(12, "cpu"), begins_aligned(12, "sm_90"), begins_aligned(32, "sm_90")
    (True, False, True)
    """
    return not is_gpu(target) or nbytes % SLICE_ALIGNMENT == 0


def _slices(bucket: Bucket, target: str) -> str | None:
    """Why a buffer's slice of another buffer is impossible, or None."""
    buffers = {b.name: b for b in bucket.buffers}
    for buffer in bucket.buffers:
        if (place := buffer.slice) is None:
            continue
        whole = buffers.get(place.of)
        if whole is None or whole.slice is not None or whole.format == "strided":
            return f"{buffer.name} is a slice of {place.of}, which is not a dense buffer"
        if buffer.offset is not None or buffer.dtype != whole.dtype:
            return f"{buffer.name} is no slice: it has a place, or an element type, of its own"
        axis = place.axis
        if len(buffer.shape) != len(whole.shape) or not 0 <= axis < len(whole.shape):
            return f"{buffer.name} is a slice on axis {axis} of {whole.shape}"
        size = buffer.shape[axis]
        if buffer.shape != (*whole.shape[:axis], size, *whole.shape[axis + 1 :]):
            return f"{buffer.name} with shape {buffer.shape} is no slice of {whole.shape}"
        if not 0 <= place.start <= whole.shape[axis] - size:
            return f"{buffer.name} reaches out of {place.of}"
        if not begins_aligned(place.start * inner_bytes(whole, axis), target):
            return f"{buffer.name} begins at no multiple of {SLICE_ALIGNMENT} bytes"
    return None


def inner_bytes(whole: Buffer, axis: int) -> int:
    """Bytes from one index of an axis to the next, in a dense buffer."""
    order = list(range(len(whole.shape)))
    if whole.format == "channels_last":
        order.append(order.pop(1))
    inside = order[order.index(axis) + 1 :]
    return ITEMSIZES[whole.dtype] * math.prod(whole.shape[i] for i in inside)


def in_place(
    slices: Mapping[str, Slice], output: str, axis: int, parts: Sequence[tuple[str | None, int]]
) -> tuple[int, ...]:
    """Positions of the parts of a concatenation that lie in its output already.

    Args:
        slices: the slice of each buffer that is one, by name.
        parts: name of each part and its size on the axis, in order.
    """
    base = slices.get(output, Slice(of=output, axis=axis, start=0))
    found, start = [], base.start
    for position, (name, size) in enumerate(parts):
        if base.axis == axis and slices.get(str(name)) == Slice(of=base.of, axis=axis, start=start):
            found.append(position)
        start += size
    return tuple(found)


def _names(
    program: Program,
    bucket: Bucket,
    specs: Sequence[TensorSpec],
    weights: Mapping[str, object],
) -> str | None:
    """Why a name is missing or ambiguous, or None."""
    buffers = {b.name: b for b in bucket.buffers}
    inputs = set(program.inputs)
    if len(buffers) != len(bucket.buffers) or (set(buffers) | inputs) & set(weights):
        return "a buffer's name is used twice"
    for spec in specs:
        buffer = buffers.get(spec.name)
        if buffer and (buffer.shape, buffer.dtype) != (spec.at(bucket.batch), spec.dtype):
            return f"buffer {spec.name} is not {spec}"
        if buffer and spec.name in inputs and buffer.offset is not None:
            return f"input {spec.name} lies in the arena"
    return None


def _steps(program: Program, bucket: Bucket, weights: Mapping[str, object]) -> str | None:
    """Why the steps are not a straight line that makes the outputs, or None."""
    buffers = {b.name: b for b in bucket.buffers}
    live, made = set(program.inputs), set(program.inputs)
    spaces = {s.workspace for s in bucket.steps if s.workspace is not None}
    for step in bucket.steps:
        if not step.outputs:
            return f"{step.kernel} makes nothing"
        read = {n for n in step.inputs if n is not None}
        if missing := read - live - set(weights):
            return f"{step.kernel} reads {sorted(missing)} before it is made"
        if unknown := set(step.outputs) - set(buffers):
            return f"{step.kernel} writes {sorted(unknown)}, not a buffer"
        if len(set(step.outputs)) != len(step.outputs) or made & set(step.outputs):
            return f"{step.kernel} writes {step.outputs}, made before"
        if spaces & set(step.outputs):
            return f"{step.outputs} is also a workspace"
        if step.workspace is not None:
            scratch = buffers.get(step.workspace)
            if (
                scratch is None
                or scratch.offset is None
                or (scratch.dtype, scratch.format, len(scratch.shape)) != ("uint8", "contiguous", 1)
            ):
                return f"{step.kernel} works in {step.workspace}, not a buffer for it"
        live |= set(step.outputs)
        made |= set(step.outputs)
        if unknown := set(step.frees) - live:
            return f"{step.kernel} frees {sorted(unknown)}, which are not there"
        live -= set(step.frees)
    if spaces & set(program.inputs):
        return "an input is also a workspace"
    if missing := set(program.outputs) - live:
        return f"outputs {sorted(missing)} are never made"
    return None


def _programs(bucket: Bucket) -> str | None:
    """Why a step names no operator, or its program is no list of instructions, or None.

    Kernels check what the operator and the instructions say.
    """
    for step in bucket.steps:
        if step.op in ("fallback", "user") and not _is_call(step.attrs):
            return f"the operator of {step.outputs} is {str(step.attrs)[:120]}"
        if step.op != "pointwise":
            continue
        program = step.attrs.get("program")
        if not isinstance(program, list) or not all(map(_is_instruction, program)):
            return f"the program of {step.outputs} is {str(program)[:120]}"
    return None


def _is_call(attrs: Mapping[str, Any]) -> bool:
    """Whether attributes name an operator and its arguments."""
    return (
        isinstance(attrs.get("target"), str)
        and isinstance(attrs.get("args"), list)
        and isinstance(attrs.get("kwargs", {}), dict)
    )


def _is_instruction(data: Any) -> bool:
    return (
        isinstance(data, list)
        and len(data) == 3
        and isinstance(data[0], str)
        and isinstance(data[1], list)
        and isinstance(data[2], dict)
    )


def same_computation(one: Bucket, other: Bucket) -> bool:
    """Whether two buckets have the same steps with equal attributes, apart from shapes.

    Shapes follow the batch and are checked against the outputs. A self-test of one batch size says
    nothing of a bucket with another computation.
    """
    return len(one.steps) == len(other.steps) and all(
        a.op == b.op and (same_json(a.attrs, b.attrs) or _same_but_shapes(a, b))
        for a, b in zip(one.steps, other.steps, strict=True)
    )


def _same_but_shapes(one: Step, other: Step) -> bool:
    """Whether steps of one operation differ only in shapes that inputs and outputs decide."""
    if one.op != "rearrange":
        return one.op in ("reshape", "expand")
    rest = ({k: v for k, v in s.attrs.items() if k not in ("shape", "sizes")} for s in (one, other))
    if len({canonical_json(attrs) for attrs in rest}) > 1:
        return False
    a, b = one.attrs.get("sizes"), other.attrs.get("sizes")
    if not isinstance(a, list | tuple) or not isinstance(b, list | tuple) or len(a) != len(b):
        return False
    differ = [x for x, y in zip(a, b, strict=True) if x != y]
    return len(differ) <= 1  # the product tells that one


# Attributes that may hold a number that follows the batch.
_FOLLOW_BATCH = frozenset(
    {"shape", "size", "sizes", "start", "end", "input_size", "args", "groups"}
)

# Two steps in one, where that is faster: at some batch sizes it is, at others it is not (ResNet-18
# on an H200 has 25 steps for one image, and for 8 a chain of two and 24 in all). The rows
# of ``operations`` say which; the studio reads plans without torch, so the names are here, too.
PAIRS = frozenset({"conv2d_chain", "conv2d_pool", "linear_norm"})


def _difference(one: Bucket, other: Bucket) -> str | None:
    """Why the buckets of two batch sizes do not compute the same, or None.

    Two steps that only one of the buckets has as a pair (``PAIRS``) are left to the self-test,
    which then runs every batch size.
    """
    (count, pairs), (counted, others) = map(_layers, (one, other))
    if count != counted:
        return f"{counted} steps and parts of pairs, {count} at batch {one.batch}"
    made = {step.outputs[0]: step for step in one.steps}
    for b in other.steps:
        a = made.get(b.outputs[0])
        if a is None and pairs | others:
            continue  # between the two steps of a pair
        if a is not None and a.op != b.op and {a.op, b.op} & PAIRS:
            continue
        if a is None or (a.op, a.inputs, a.outputs) != (b.op, b.inputs, b.outputs):
            return f"{b.kernel} is another step than at batch {one.batch}"
        if set(a.attrs) != set(b.attrs):
            return f"{b.kernel} has other attributes than at batch {one.batch}"
        for name in a.attrs:
            x, y = a.attrs[name], b.attrs[name]
            if not same_json(x, y) and not (
                name in _FOLLOW_BATCH and _shifted(x, y, other.batch - one.batch)
            ):
                return f"{name} of {b.kernel} is another than at batch {one.batch}"
    return None


def _layers(bucket: Bucket) -> tuple[int, frozenset[str]]:
    """The number of steps if pairs were split, and the first outputs of the pairs."""
    pairs = frozenset(s.outputs[0] for s in bucket.steps if s.op in PAIRS)
    return len(bucket.steps) + len(pairs), pairs


def _shifted(x: Any, y: Any, batches: int) -> bool:
    """Whether attributes differ only in integers that grow by a whole number for each sample."""
    if isinstance(x, list) and isinstance(y, list):
        return len(x) == len(y) and all(_shifted(a, b, batches) for a, b in zip(x, y, strict=True))
    if type(x) is int and type(y) is int:
        return batches != 0 and (y - x) % batches == 0
    return type(x) is type(y) and same_json(x, y)
