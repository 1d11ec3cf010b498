"""Max pooling on a CPU as maxima of shifted images, rows first and columns then.

torch walks a window's pixels one by one and keeps an index beside each maximum (of int8 in
channels_last it refuses images of more than 127 pixels for that). This is a few long vector
operations, and after the rows only 1/stride of the image is left. Tiles keep what is read again in
the cache.

16-bit floats that are known to be 0 or more (``non_negative``) are ordered as the integers of their
bits, whose maximum is an instruction: 10 µs instead of 38 for 2^18 numbers in the cache, on two
cores. A NaN then counts as less than 0; behind oneDNN's ReLU there is none, as it makes 0 of NaN.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from tessella.core.dtype import SIXTEEN_BIT
from tessella.kernels.catalog import Call, Config
from tessella.kernels.pool.spans import Level, levels, moves
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta

DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int16", "int32", "int64")
MAX_TAPS = 64  # of all levels: operations a tile
MAX_TILES = 256
TILES = (2**21, 2**20)  # bytes that one reads: of 2**19 the calls show, of 2**22 the cache's end
ALIGNED = 64  # bytes

View = tuple[tuple[int, ...], tuple[int, ...], int]  # shape, strides, offset
IMAGE, RESULT, *SCRATCH = range(4)


@dataclass(frozen=True, kw_only=True)
class _Maximum:
    """One operation of a call: the maximum of views of tensors, or a copy of a single view."""

    made: tuple[int, View]
    read: tuple[tuple[int, View], ...]


def fits(problem: Problem) -> str | None:
    x, y, a = problem["input"], problem.output, problem.attrs
    if len(x.shape) != 4:
        return f"images have four axes, not {len(x.shape)}"
    if x.dtype not in DTYPES or x.dtype != y.dtype:
        return f"cannot make {y.dtype} of {x.dtype}"
    if any(m.format == "strided" and m.strides is None for m in (x, y)):
        return "strides must be known when the plan is built"
    if len({_channels_last(m) for m in (x, y) if max(m.shape[2:]) > 1 < m.shape[1]}) > 1:
        return "needs images of one format, which it keeps"
    if 0 in x.shape or 0 in y.shape:
        return "nothing to pool"
    if tuple(a["dilation"]) != (1, 1):
        return f"windows without gaps, not dilated by {tuple(a['dilation'])}"
    taps = sum(len(level.taps) for axis in (0, 1) for level in _levels(problem, axis))
    if taps > MAX_TAPS:
        return f"{taps} passes over the image do not pay, at most {MAX_TAPS}"
    return None


def configs(problem: Problem) -> tuple[Config, ...]:
    """Tiles of some images, or of some of an image's rows, that fit a cache; and all at once."""
    x, (images, _, rows, _) = problem["input"], problem.output.shape
    image_bytes = x.nbytes // images
    tiles: dict[tuple[int, int], None] = {}
    for size in (TILES[0], x.nbytes, *TILES[1:]):
        some = max(1, min(images, size // image_bytes))
        lines = rows
        if image_bytes > size and _levels(problem, 0):
            lines = math.ceil(rows / math.ceil(image_bytes / size))
        if math.ceil(images / some) * math.ceil(rows / lines) <= MAX_TILES:
            tiles[some, lines] = None  # the order is kept
    return tuple({"images": some, "rows": lines} for some, lines in tiles)


def workspace_bytes(problem: Problem, *, images: int | None = None, rows: int | None = None) -> int:
    return sum(_halves(problem, images, rows))


def bind(
    problem: Problem,
    constants: Mapping[int, torch.Tensor],
    *,
    images: int | None = None,
    rows: int | None = None,
) -> Call:
    """The call; without a configuration the whole result is one tile."""
    as_bits = bool(problem.attr("non_negative")) and problem.output.dtype in SIXTEEN_BIT
    dtype = torch.int16 if as_bits else getattr(torch, problem.output.dtype)
    half = _halves(problem, images, rows)[0] // dtype.itemsize
    steps = list(_steps(problem, images, rows))
    seen = dict.fromkeys(place for step in steps for place in (*step.read, step.made))
    read = [view for tensor, view in seen if tensor == IMAGE]
    rest = [place for place in seen if place[0] != IMAGE]
    places = {place: i for i, place in enumerate([*((IMAGE, view) for view in read), *rest])}
    todo = [
        (places[step.made], places[step.read[0]], places[step.read[1]] if step.read[1:] else None)
        for step in steps
    ]
    maximum = torch.maximum

    def kept(out: torch.Tensor, workspace: torch.Tensor | None) -> list[torch.Tensor]:
        """The views of the result and of the scratch."""
        with torch.inference_mode(False):  # a view from inside could not be written to outside
            result = out.view(dtype)
            scratch = result if workspace is None else workspace.view(dtype)
            begin = scratch.storage_offset()
            bases = {
                RESULT: (result, result.storage_offset()),
                SCRATCH[0]: (scratch, begin),
                SCRATCH[1]: (scratch, begin + half),
            }
            made = []
            for tensor, (shape, strides, offset) in rest:
                base, begin = bases[tensor]
                made.append(base.as_strided(shape, strides, begin + offset))
            return made

    # An engine gives the same two tensors each time: their views, half of a small image's time,
    # are made once. The three are replaced together, so that threads see what belongs together.
    last: list[tuple[torch.Tensor, torch.Tensor | None, list[torch.Tensor]] | None] = [None]

    def run(
        x: torch.Tensor, *, out: torch.Tensor, workspace: torch.Tensor | None = None
    ) -> torch.Tensor:
        held = last[0]
        if held is None or held[0] is not out or held[1] is not workspace:
            held = last[0] = (out, workspace, kept(out, workspace))
        if as_bits:
            x = x.view(dtype)
        begin = x.storage_offset()
        views = [x.as_strided(shape, strides, begin + offset) for shape, strides, offset in read]
        views += held[2]
        for made, one, other in todo:
            if other is None:
                views[made].copy_(views[one])
            else:
                maximum(views[one], views[other], out=views[made])
        return out

    return run


def _channels_last(meta: TensorMeta) -> bool:
    return meta.pixel_pitch is not None


def _levels(problem: Problem, axis: int, begin: int = 0, count: int | None = None) -> list[Level]:
    """The levels along the rows (axis 0) or the columns (1) that make some places of the result."""
    kernel, stride, padding = (
        problem.attrs[name][axis] for name in ("kernel_size", "stride", "padding")
    )
    return levels(
        length=problem["input"].shape[2 + axis],
        kernel=kernel,
        stride=stride,
        first=begin * stride - padding,
        count=problem.output.shape[2 + axis] if count is None else count,
    )


def _tiles(
    problem: Problem, images: int | None, rows: int | None
) -> Iterator[tuple[int, int, int, int]]:
    """Each tile: its first image and their number, its first row of the result and their number."""
    batch, _, height, _ = problem.output.shape
    images, rows = images or batch, rows or height
    for image, row in itertools.product(range(0, batch, images), range(0, height, rows)):
        yield image, min(images, batch - image), row, min(rows, height - row)


def _tile(
    problem: Problem, images: int, row: int, rows: int
) -> list[tuple[int, Level, tuple[int, ...]]]:
    """The levels of a tile, each with its axis and the shape that the level makes."""
    _, channels, height, width = problem["input"].shape
    made, shape = [], [images, channels, height, width]
    whole = rows == problem.output.shape[2]
    by_axis = [_levels(problem, 0) if whole else _levels(problem, 0, row, rows)]
    for axis, found in enumerate([*by_axis, _levels(problem, 1)], 2):
        for level in found:
            shape[axis] = level.count
            made.append((axis, level, tuple(shape)))
    return made


def _halves(problem: Problem, images: int | None, rows: int | None) -> tuple[int, int]:
    """Bytes of the two scratch tensors between which levels go back and forth."""
    largest = [0, 0]
    for _, some, row, lines in _tiles(problem, images, rows):
        for i, (_, _, shape) in enumerate(_tile(problem, some, row, lines)[:-1]):
            largest[i % 2] = max(largest[i % 2], math.prod(shape))
    itemsize = problem.output.itemsize
    first, second = (math.ceil(n * itemsize / ALIGNED) * ALIGNED for n in largest)
    return first, second


def _steps(problem: Problem, images: int | None, rows: int | None) -> Iterator[_Maximum]:
    """The steps of all tiles, in order."""
    x, y = problem["input"], problem.output
    for image, some, row, lines in _tiles(problem, images, rows):
        result = _cut(_cut(_whole(y), 0, image, some), 2, row, lines)
        source = IMAGE, _cut(_whole(x), 0, image, some)
        found = _tile(problem, some, row, lines)
        if not found:
            yield _Maximum(made=(RESULT, result), read=(source,))
        for i, (axis, level, shape) in enumerate(found):
            target = SCRATCH[i % 2], _whole(_dense(x, y, shape))
            if i == len(found) - 1:
                target = RESULT, result
            for move in moves(level):
                made = target[0], _cut(target[1], axis, move.into, move.count)
                read = [
                    (source[0], _cut(source[1], axis, begin, move.count, level.step))
                    for begin in move.sources
                ]
                yield _Maximum(made=made, read=tuple([made, *read] if move.again else read))
            source = target


def _whole(meta: TensorMeta) -> View:
    return meta.shape, meta.strides or meta.dense_strides, 0


def _cut(view: View, axis: int, begin: int, count: int, step: int = 1) -> View:
    """A view of some places along one axis."""
    shape, strides, offset = view
    return (
        (*shape[:axis], count, *shape[axis + 1 :]),
        (*strides[:axis], strides[axis] * step, *strides[axis + 1 :]),
        offset + begin * strides[axis],
    )


def _dense(x: TensorMeta, y: TensorMeta, shape: tuple[int, ...]) -> TensorMeta:
    """Scratch in the images' order; a single pixel or channel tells none."""
    telling = next((m for m in (x, y) if max(m.shape[2:]) > 1 < m.shape[1]), y)
    last = _channels_last(telling)
    return TensorMeta(shape=shape, dtype=y.dtype, format="channels_last" if last else "contiguous")
