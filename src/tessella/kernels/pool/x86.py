"""Pooling on a CPU with AVX-512 or AVX2, channels last: each image is read once, and nothing
between.

A thread takes one row of the result after another. Of its pixels a vector of channels at a time,
four of them together, are the maxima of what the window reads, or the sums, which are scaled; a
table says which rows and columns of each window lie inside of the image, and how its sum is scaled.
Adaptive means whose windows are all of one size are plain ones; a global mean is, and that of all
pixels.

NaNs spread, as in torch: of float32 a mask remembers where all numbers were ordered (in AVX2 a
vector, where one was not), since ``vmaxps`` forgets. 16-bit floats that are 0 or more
(``non_negative``) are ordered as the integers of their bits, NaNs above all. Of other numbers in
bfloat16, and of means, float32 is made between memory and registers (AVX-512 with BF16).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from tessella.device.x86 import code
from tessella.device.x86.assembler import AVX2, AVX512, Assembler, At, InstructionSet
from tessella.device.x86.code import MAX_BYTES
from tessella.kernels.catalog import Call
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta

TOGETHER = 4  # vectors
LEAST_VECTORS = 2  # of a row's part
ALONE_BYTES = 2**15  # so little is not worth waking a thread
SMALLEST, TAKEN, NAN = 13, 14, 15  # vectors; the first ones are the results
SCALE = NAN  # of a sum, which needs no mark of what is no number
SEEN = TOGETHER  # AVX2's vectors of where a NaN was, behind the maxima
SUMS = TOGETHER  # a window's, where each of its rows has its own
ITEM = 4  # numbers: where windows begin, their rows, where the result's row is, its columns' table
COLUMN = 3  # numbers of that: where a window begins, its columns, the factor of its sum
ANY = 0  # rows of a window, where the table of its columns is the same for all
ALL, REST = 5, 6  # masks; the first ones are of float32's numbers that were ordered

# the instruction for a type, and 32 bits of the number that all others are at least
MAXIMUM = {
    "float32": ("vmaxps", 0xFF800000),
    "float16": ("vpmaxsw", 0x80008000),
    "bfloat16": ("vpmaxsw", 0x80008000),
    "int8": ("vpmaxsb", 0x80808080),
    "uint8": ("vpmaxub", 0),
}


SUM = ("vaddps", 0)
# numbers of a mean, one after another, of which each rounds; of more, each row has its own sum
MOST_ADDED = 2**10


def fits(problem: Problem) -> str | None:
    if problem.is_constant("input"):
        return "its input is a constant"
    if (problem := _as_adaptive(problem)).op == "mean":
        return "means of an image's pixels, made dense"
    if why := _adaptive_refusal(problem):
        return why
    problem = _with_windows(problem)
    x, y = problem["input"], problem.output
    isa = code.require_instructions()
    if len(x.shape) != 4:
        return f"images have four axes, not {len(x.shape)}"
    if x.dtype not in MAXIMUM or x.dtype != y.dtype:
        return f"cannot make {y.dtype} of {x.dtype}"
    is_mean = problem.op == "avg_pool2d"
    if is_mean and x.dtype not in ("float32", "bfloat16"):
        return "sums are float32, of float32 or bfloat16"
    if _is_widened(problem) and not code.has_bfloat16():
        return "this processor does not round to bfloat16"
    if x.dtype == "float16" and not problem.attr("non_negative"):
        return "float16 is compared as integers, which numbers below 0 forbid"
    if any(m.format == "strided" and m.strides is None for m in (x, y)):
        return "strides must be known when the plan is built"
    if x.pixel_pitch is None or y.pixel_pitch is None:
        return "a pixel's channels must lie together"
    if isa == AVX2 and x.shape[1] * x.itemsize < isa.vector_bytes:
        return f"a pixel's channels have fewer than {isa.vector_bytes} bytes"
    if 0 in x.shape or 0 in y.shape:
        return "nothing to pool"
    counts = [{count for _, count in _spans(problem, axis)} for axis in (0, 1)]
    if 0 in {*counts[0], *counts[1]}:
        return "a window without a pixel"
    if is_mean and not _counts_inside(problem) and _reaches_behind(problem, counts):
        return "a window that reaches over the padding"
    steps = [d * s for d, s in zip(_dilation(problem), _strides(x)[2:], strict=True)]
    if max(*steps, *(_bytes(m) for m in (x, y))) > MAX_BYTES:
        return "distances have 32 bits"
    return None


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    problem = _with_windows(_as_adaptive(problem))
    x, y = problem["input"], problem.output
    lines, columns = _lines(problem), _columns(problem)
    down, along = _dilation(problem)
    pool = _Pool(
        isa=code.require_instructions(),
        dtype=x.dtype,
        is_widened=_is_widened(problem),
        is_mean=problem.op == "avg_pool2d",
        by_rows=math.prod(problem.attrs["kernel_size"]) > MOST_ADDED,
        channel_bytes=x.shape[1] * x.itemsize,
        row=_strides(x)[2] * down,
        pixel=_strides(x)[3] * along,
        out_pixel=_strides(y)[3],
        columns=y.shape[3],
    )
    few = x.nbytes <= ALONE_BYTES
    parts = 1 if few else _parts(pool, math.ceil(torch.get_num_threads() / len(lines)))
    pool = replace(pool, channel_bytes=pool.channel_bytes // parts)
    lines = [
        (begin + part * pool.channel_bytes, rows, written + part * pool.channel_bytes)
        for part in range(parts)
        for begin, rows, written in lines
    ]
    places = [place for some in columns.values() for place in some]
    _require_inside(problem, lines, places, pool.channel_bytes)
    spans = code.Table(places)
    starts = {rows: i * pool.table_bytes for i, rows in enumerate(columns)}
    items = code.Table([(*line, spans.address + starts.get(line[1], 0)) for line in lines])
    made = code.MachineCode(pool.written().code(), spans)

    def numbers(x: torch.Tensor, out: torch.Tensor) -> tuple[int, ...]:
        return x.data_ptr(), out.data_ptr()

    return code.Launch(made, items, numbers, few=few)


def _parts(pool: _Pool, wanted: int) -> int:
    """Into how many equal parts a row's channels are cut, where rows are fewer than threads."""
    vectors, rest = divmod(pool.channel_bytes, pool.vector)
    if wanted == 1 or rest:
        return 1
    parts = range(wanted, vectors // LEAST_VECTORS + 1)
    return next((part for part in parts if vectors % part == 0), 1)


def _as_adaptive(problem: Problem) -> Problem:
    """A mean over the pixels of an image as a pooling to one of them; others as they are."""
    x, y, dim = problem["input"], problem.output, problem.attr("dim")
    if problem.op != "mean" or len(x.shape) != 4 or y.format == "strided":
        return problem
    if not isinstance(dim, list | tuple) or [*dim] not in ([2, 3], [3, 2], [-2, -1], [-1, -2]):
        return problem
    made = replace(y, shape=(*x.shape[:2], 1, 1), format="channels_last")
    attrs = {"output_size": (1, 1)}
    return replace(problem, op="adaptive_avg_pool2d", outputs=(made,), attrs=attrs)


def _adaptive_refusal(problem: Problem) -> str | None:
    """Why the windows of an adaptive pooling are not those of a plain one."""
    if problem.op != "adaptive_avg_pool2d" or len(problem["input"].shape) != 4:
        return None
    sizes, made = problem["input"].shape[2:], problem.output.shape[2:]
    if 0 in made or any(size % count for size, count in zip(sizes, made, strict=True)):
        return "windows of different sizes"
    if max(_window(problem)) > MOST_ADDED:
        return f"adds at most {MOST_ADDED} numbers of a row, and rows"
    return None


def _window(problem: Problem) -> tuple[int, ...]:
    """The size of each window of an adaptive pooling, which is its step too."""
    sizes, made = problem["input"].shape[2:], problem.output.shape[2:]
    return tuple(size // count for size, count in zip(sizes, made, strict=True))


def _with_windows(problem: Problem) -> Problem:
    """An adaptive pooling of equal windows as a plain one; others as they are."""
    if problem.op != "adaptive_avg_pool2d" or len(problem["input"].shape) != 4:
        return problem
    window = _window(problem)
    attrs = {
        "kernel_size": window, "stride": window, "padding": (0, 0), "ceil_mode": False,
        "count_include_pad": True, "divisor_override": None,
    }  # fmt: skip
    return replace(problem, op="avg_pool2d", attrs=attrs)


def _require_inside(
    problem: Problem,
    lines: list[tuple[int, int, int]],
    columns: list[tuple[int, int, int]],
    channels: int,
) -> None:
    """Refuse tables that lead out of the image or the result, whoever wrote them; of a pixel so
    many bytes of channels are read.
    """
    x, y = problem["input"], problem.output
    (_, _, row, pixel), out_pixel = _strides(x), _strides(y)[3]
    down, along = _dilation(problem)
    begin, rows, written = torch.tensor(lines).T
    column, count, _ = torch.tensor(columns).T
    right = int((column + (count - 1) * pixel * along).max()) + channels
    code.require_inside("image", begin + int(column.min()), torch.zeros_like(begin), x.extent)
    code.require_inside("image", begin, (rows - 1) * row * down + right, x.extent)
    spans = torch.full_like(written, (y.shape[3] - 1) * out_pixel + channels)
    code.require_inside("result", written, spans, y.extent)


@dataclass(frozen=True, kw_only=True)
class _Pool:
    """All sizes in bytes.

    Attributes:
        is_widened: float32 is made of bfloat16.
        is_mean: the sum, scaled, of each window; else the maximum.
        by_rows: of a window's sum, each row is summed first.
        channel_bytes: of a pixel, or of the part of its channels that an item has.
        row, pixel: from one to the next of a window; ``out_pixel`` of the result.
        columns: of a row of results.
    """

    isa: InstructionSet
    dtype: str
    is_widened: bool
    is_mean: bool
    by_rows: bool
    channel_bytes: int
    row: int
    pixel: int
    out_pixel: int
    columns: int

    @property
    def table_bytes(self) -> int:
        """Of the table of a row's columns."""
        return COLUMN * code.NUMBER * self.columns

    def written(self) -> Assembler:
        """The code.

        rdi: the call, with image and result; r8, r9: image, result; r10, r12: where the row's
        windows begin and where their maxima go; r11: rows of a window; r13, rbp: its column's place
        in the table, and the table's end; r14, r15: where the window begins, and its columns; rsi,
        rdx and rax, rcx: the row and the pixel that are read, and how many are left.
        """
        a, vector = Assembler(self.isa), self.vector
        vectors, rest = divmod(self.channel_bytes, vector)
        many, some = divmod(vectors, TOGETHER)
        with a.function():
            a.load("r8", code.given(0))
            a.load("r9", code.given(1))
            a.set("rax", self._instruction[1])
            a.broadcast_bits(SMALLEST, "rax")
            if not self.is_mean:
                a.set("rax", 0x7FC00000)
                a.broadcast_bits(NAN, "rax")
            if self.isa == AVX512:
                a.set("rax", -1)
                a.mask(ALL, "rax")
            if rest and self.isa == AVX512:
                a.set("rax", (1 << (rest // 2 if self.is_widened else rest)) - 1)
                a.mask(REST, "rax")
            with code.each_item(a, "rcx", ITEM):
                a.load("r10", At(base="rcx"))
                a.add("r10", "r8")
                a.load("r11", At(base="rcx", distance=8))
                a.load("r12", At(base="rcx", distance=16))
                a.add("r12", "r9")
                a.load("r13", At(base="rcx", distance=24))
                a.move("rbp", "r13")
                a.add("rbp", self.table_bytes)
                with a.stepped("column", "r13", COLUMN * code.NUMBER, "rbp"):
                    a.load("r14", At(base="r13"))
                    a.add("r14", "r10")
                    a.load("r15", At(base="r13", distance=8))
                    if self.is_mean:
                        a.broadcast(SCALE, At(base="r13", distance=16))
                    if many:
                        a.set("rbx", many)
                        with a.counted("channels", "rbx"):
                            self._pooled(a, "many", TOGETHER)
                            a.add("r14", TOGETHER * vector)
                            a.add("r12", TOGETHER * vector)
                    if some or rest:
                        self._pooled(a, "some", some + bool(rest), rest=rest)
                    a.add("r12", self.out_pixel - many * TOGETHER * vector)
        return a

    @property
    def _instruction(self) -> tuple[str, int]:
        """What puts a number to the others, and the bits of what it begins with."""
        if self.is_mean:
            return SUM
        return MAXIMUM["float32" if self.is_widened else self.dtype]

    @property
    def vector(self) -> int:
        """Bytes of a vector in memory."""
        return self.isa.vector_bytes // (2 if self.is_widened else 1)

    def _pooled(self, a: Assembler, name: str, vectors: int, *, rest: int = 0) -> None:
        """Of one window, so many vectors of channels from where r14 is. If only some bytes are left
        for the last, it is masked, or without masks begins so much earlier, and is made again.
        """
        instruction, _ = self._instruction
        vector, has_masks = self.vector, self.isa == AVX512
        has_nan = (self.dtype == "float32" or self.is_widened) and not self.is_mean
        load = a.load_bfloat16 if self.is_widened else a.load_vector
        store = a.store_bfloat16 if self.is_widened else a.store_vector
        masks, places = [0] * vectors, [i * vector for i in range(vectors)]
        if rest and has_masks:
            masks[-1] = REST
        elif rest:
            places[-1] -= vector - rest
        is_summed_twice = self.by_rows and self.is_mean
        for i in range(vectors):
            a.copy_vector(i, SMALLEST)
            if is_summed_twice:
                a.copy_vector(SUMS + i, SMALLEST)
            if has_nan and has_masks:
                a.copy_mask(1 + i, ALL)
            elif has_nan:
                a.vector("vxorps", SEEN + i, SEEN + i, SEEN + i)
        a.move("rsi", "r14")
        a.move("rdx", "r11")
        with a.counted(f"{name} row", "rdx"):
            a.move("rax", "rsi")
            a.move("rcx", "r15")
            with a.counted(f"{name} pixel", "rcx"):
                for i, (place, mask) in enumerate(zip(places, masks, strict=True)):
                    load(TAKEN, At(base="rax", distance=place), mask)
                    a.vector(instruction, i, i, TAKEN)
                    if has_nan and has_masks:
                        a.compare_lanes("vcmpordps", 1 + i, TAKEN, TAKEN, mask=1 + i)
                    elif has_nan:
                        a.compare_lanes("vcmpunordps", TAKEN, TAKEN, TAKEN)
                        a.vector("vorps", SEEN + i, SEEN + i, TAKEN)
                a.add("rax", self.pixel)
            for i in range(vectors if is_summed_twice else 0):
                a.vector("vaddps", SUMS + i, SUMS + i, i)
                a.copy_vector(i, SMALLEST)
            a.add("rsi", self.row)
        for i, (place, mask) in enumerate(zip(places, masks, strict=True)):
            made = i
            if has_nan and has_masks:
                a.copy_vector(TAKEN, NAN)
                a.copy_vector(TAKEN, i, 1 + i)
                made = TAKEN
            elif has_nan:
                a.vector("vorps", i, i, SEEN + i)  # all bits set are a NaN
            elif self.is_mean:
                a.vector("vmulps", i, SUMS + i if is_summed_twice else i, SCALE)
            store(At(base="r12", distance=place), made, mask)


def _spans(problem: Problem, axis: int) -> list[tuple[int, int]]:
    """For each window along an axis, its first byte inside of the image, and its length."""
    kernel, stride, padding = (
        problem.attrs[name][axis] for name in ("kernel_size", "stride", "padding")
    )
    dilation = _dilation(problem)[axis]
    x, y = problem["input"], problem.output
    size, step = x.shape[2 + axis], _strides(x)[2 + axis]
    spans = []
    for i in range(y.shape[2 + axis]):
        begin = i * stride - padding
        first = max(0, -(begin // dilation))  # of the window's places, however many there are
        count = min(kernel, -((begin - size) // dilation)) - first
        spans.append(((begin + first * dilation) * step, max(0, count)))
    return spans


def _reaches_behind(problem: Problem, counts: list[set[int]]) -> bool:
    """Whether a window, of which so many pixels lie inside along each axis, ends behind the
    padding.
    """
    sizes, made = problem["input"].shape[2:], problem.output.shape[2:]
    windows = zip(
        *(problem.attrs[name] for name in ("kernel_size", "stride", "padding")), strict=True
    )
    return any(
        {kernel} != count and (out - 1) * stride - padding + kernel - size > padding
        for (kernel, stride, padding), count, size, out in zip(
            windows, counts, sizes, made, strict=True
        )
    )


def _is_widened(problem: Problem) -> bool:
    """Whether numbers become float32 between memory and registers."""
    is_ordered = problem.op == "max_pool2d" and problem.attr("non_negative")
    return problem["input"].dtype == "bfloat16" and not is_ordered


def _dilation(problem: Problem) -> tuple[int, int]:
    down, along = problem.attrs.get("dilation", (1, 1))
    return down, along


def _counts_inside(problem: Problem) -> bool:
    """Whether a mean is that of the numbers inside of the image, fewer at the edge."""
    attrs = problem.attrs
    return problem.op == "avg_pool2d" and not (
        attrs["count_include_pad"] or attrs["divisor_override"]
    )


def _columns(problem: Problem) -> dict[int, list[tuple[int, int, int]]]:
    """By the rows of a window that lie inside of the image, or ``ANY`` where these do not matter:
    for each column of the result, where the window begins, its columns inside, and the bits of the
    factor of its sum.
    """
    spans = _spans(problem, 1)
    if problem.op == "max_pool2d":
        return {ANY: [(begin, count, 0) for begin, count in spans]}
    if not _counts_inside(problem):
        size = problem.attrs["divisor_override"] or math.prod(problem.attrs["kernel_size"])
        return {ANY: [(begin, count, _bits(1 / size)) for begin, count in spans]}
    return {
        rows: [(begin, count, _bits(1 / (rows * count))) for begin, count in spans]
        for rows in sorted({rows for _, rows in _spans(problem, 0)})
    }


def _bits(number: float) -> int:
    """A float32's bits as an integer."""
    return int(torch.tensor(number, dtype=torch.float32).view(torch.int32))


def _lines(problem: Problem) -> list[tuple[int, int, int]]:
    """For each row of the result, where its windows begin, their rows, and its own place."""
    x, y, spans = _strides(problem["input"]), _strides(problem.output), _spans(problem, 0)
    return [
        (image * x[0] + begin, rows, image * y[0] + row * y[2])
        for image in range(problem.output.shape[0])
        for row, (begin, rows) in enumerate(spans)
    ]


def _strides(meta: TensorMeta) -> tuple[int, ...]:
    """The strides of a tensor in bytes."""
    return tuple(n * meta.itemsize for n in meta.strides or meta.dense_strides)


def _bytes(meta: TensorMeta) -> int:
    return sum((n - 1) * s for n, s in zip(meta.shape, _strides(meta), strict=True))
