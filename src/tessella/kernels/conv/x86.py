"""Convolutions on a CPU with AVX-512, in float32 or bfloat16, with all around them.

A tile of the result waits in registers, so many pixels by so many vectors of 16 channels, while one
channel of the image after another is multiplied in; bias, residual and ReLU are done to it there.
Of bfloat16 two channels at a time are multiplied, and sums are float32. Where the pixels lie that a
tile reads, a table says for each place of the filter, so that any stride, padding and dilation is
the same code; beside the image it points to zeros. What is read of the residual is asked for when
the tile begins, and is there when it ends; oneDNN waits for it.

Source: the table is the indirection buffer of Dukhan, "The Indirect Convolution Algorithm" (2019).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from tessella.device.packing import packed
from tessella.device.x86 import code
from tessella.device.x86.assembler import Assembler, At
from tessella.kernels.catalog import Call, Config
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta

LANES = 16  # float32 in a vector
VECTOR = 64  # bytes
WORD = 4  # bytes: one channel of float32, two of bfloat16
UNROLLED = 4  # words of a pixel
PIXELS = {4: 6, 3: 8, 2: 9, 1: 9}  # of a tile, by its vectors: as many as registers allow
BLOCK_PIXELS = 96  # that one thread takes at a time
BLOCK_WEIGHT_BYTES = 2**18  # of the weight: they stay in a core's second cache
FEW_ITEMS = 8
MAX_BYTES = 2**31 - 1  # distances have 32 bits


def fits(problem: Problem) -> str | None:
    x, weight, y = problem["input"], problem["weight"], problem.output
    epilogue, residual = problem.epilogue, problem.epilogue.residual
    if why := code.refusal():
        return why
    vectors = () if epilogue.bias is None else ("bias",)
    if not all(map(problem.is_constant, ("weight", *vectors))):
        return "weight and bias must be constants"
    if problem.plain:
        return problem.plain
    if {t.dtype for t in (*problem.inputs, y) if t is not None} not in ({"float32"}, {"bfloat16"}):
        return "float32 or bfloat16 throughout"
    if x.dtype == "bfloat16" and not code.has_bfloat16():
        return "this CPU has no bfloat16 instructions"
    if problem.attrs["groups"] != 1:
        return "one group"
    if epilogue.activation not in (None, "relu"):
        return f"activation {epilogue.activation} is not fused"
    if residual is not None and residual.shape != y.shape:
        return "the residual is not like the result"
    images = [m for m in (x, y, residual) if m is not None]
    if any(m.pixel_pitch is None for m in images):
        return "a pixel's channels must lie together"
    if weight.shape[0] % LANES or weight.shape[1] * x.itemsize % (UNROLLED * WORD):
        return f"channels by {LANES}, of the input by {UNROLLED * WORD} bytes"
    if 0 in y.shape:
        return "nothing to make"
    if max(math.prod(m.shape[2:]) * _pitch(m) for m in images) > MAX_BYTES:
        return "distances have 32 bits"
    return None


def configs(problem: Problem) -> tuple[Config, ...]:
    """Tiles of 64 channels and fewer pixels, or the other way around."""
    channels = problem["weight"].shape[0] // LANES
    wide = [vectors for vectors in PIXELS if channels % vectors == 0]
    return tuple({"vectors": vectors} for vectors in wide[:2])


def bind(
    problem: Problem, constants: Mapping[int, torch.Tensor], *, vectors: int | None = None
) -> Call:
    vectors = configs(problem)[0]["vectors"] if vectors is None else vectors
    problem.require_constants(constants)
    x, y, residual = problem["input"], problem.output, problem.epilogue.residual
    weight = _panels(constants[1], vectors)
    bias = constants[2].float() if 2 in constants else None
    tiles = _Tiles(
        vectors=vectors,
        pixels=PIXELS[vectors],
        rest=math.prod(y.shape[2:]) % PIXELS[vectors],
        size=x.itemsize,
        words=x.shape[1] * x.itemsize // WORD,
        taps=math.prod(problem["weight"].shape[2:]),
        pitches=(_pitch(y), None if residual is None else _pitch(residual)),
        has_bias=bias is not None,
        relu=problem.epilogue.activation == "relu",
    )
    places, zeros = _places(problem, tiles.pixels), torch.zeros(tiles.words)
    items = list(_items(problem, tiles, weight, bias, places))
    _require_inside(problem, tiles, items, weight, bias, places)
    table = code.table(items)
    written = tiles.written(ctypes.addressof(table), len(items))
    made = code.MachineCode(written.code(), table, places, zeros, weight, bias)
    beside = zeros.data_ptr()

    def run(
        x: torch.Tensor, residual: torch.Tensor | None = None, *, out: torch.Tensor
    ) -> torch.Tensor:
        added = 0 if residual is None else residual.data_ptr()
        threads = torch.get_num_threads()
        made.run(x.data_ptr(), out.data_ptr(), added, beside, threads=threads)
        return out

    return run


def _panels(weight: torch.Tensor, vectors: int) -> torch.Tensor:
    """[K, C, R, S] → [K / width, R·S, words of C, width, in a word]: as a tile reads it."""
    width, inside = vectors * LANES, WORD // weight.itemsize
    taps = math.prod(weight.shape[2:])

    def pack(w: torch.Tensor) -> torch.Tensor:
        parts = w.reshape(len(w) // width, width, -1, inside, taps)
        return parts.permute(0, 4, 2, 1, 3).contiguous()

    return packed(weight, ("conv2d.avx512", width), pack)


def _places(problem: Problem, pixels: int) -> torch.Tensor:
    """Where the pixels lie that each tile reads: distances in an image, -1 beside it.

    int32 [tiles, R·S, pixels], and [R·S, rest] for what makes no whole tile, in one row.
    """
    x, (_, _, rows, columns) = problem["input"], problem.output.shape
    (_, _, height, width), pitch = x.shape, _pitch(x)
    a = problem.attrs

    def line(axis: int, length: int, kernel: int) -> torch.Tensor:
        """Places along an axis that each result reads under each tap: [length, kernel]."""
        stride, padding, dilation = (int(a[n][axis]) for n in ("stride", "padding", "dilation"))
        first = torch.arange(length)[:, None] * stride - padding
        return first + torch.arange(kernel) * dilation

    r, s = problem["weight"].shape[2:]
    down, along = line(0, rows, r)[:, None, :, None], line(1, columns, s)[None, :, None, :]
    inside = (down >= 0) & (down < height) & (along >= 0) & (along < width)
    found = torch.where(inside, (down * width + along) * pitch, -1).to(torch.int32)
    found = found.reshape(rows * columns, r * s)
    whole = rows * columns // pixels * pixels
    tiles = found[:whole].reshape(-1, pixels, r * s).transpose(1, 2)
    return torch.cat((tiles.reshape(-1), found[whole:].t().reshape(-1)))


def _items(
    problem: Problem,
    tiles: _Tiles,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    places: torch.Tensor,
) -> Iterator[tuple[int, ...]]:
    """What threads take one by one: some pixels of an image and some panels of the weight.

    Distances of the image, the result and the residual, addresses of the weight, the bias and the
    places, how many tiles and panels, and whether the pixels that make no whole tile follow.
    """
    x, y = problem["input"], problem.output
    pixels, image = math.prod(y.shape[2:]), math.prod(x.shape[2:]) * _pitch(x)
    result, residual = tiles.pitches
    panels, panel_bytes = len(weight), weight[0].nbytes
    some_tiles = BLOCK_PIXELS // tiles.pixels
    blocks = math.ceil(pixels / (some_tiles * tiles.pixels))
    together = max(1, min(panels, BLOCK_WEIGHT_BYTES // panel_bytes))
    while together > 1 and y.shape[0] * blocks * math.ceil(panels / together) < FEW_ITEMS:
        together = math.ceil(together / 2)
    for panel in range(0, panels, together):
        column = panel * tiles.vectors * LANES * tiles.size
        for n in range(y.shape[0]):
            for block in range(blocks):
                begin = block * some_tiles * tiles.pixels
                count = min(some_tiles, (pixels - begin) // tiles.pixels)
                yield (
                    n * image,
                    (n * pixels + begin) * result + column,
                    (n * pixels + begin) * (residual or 0) + column,
                    weight.data_ptr() + panel * panel_bytes,
                    0 if bias is None else bias.data_ptr() + panel * tiles.vectors * VECTOR,
                    places.data_ptr() + begin * tiles.taps * places.itemsize,
                    count,
                    min(together, panels - panel),
                    int(begin + count * tiles.pixels < pixels and block == blocks - 1),
                )


def _require_inside(
    problem: Problem,
    tiles: _Tiles,
    items: list[tuple[int, ...]],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    places: torch.Tensor,
) -> None:
    """Refuse a table that leads out of a tensor, whoever wrote it."""
    image, result, residual, panel, begin, place, count, panels, rest = torch.tensor(items).T
    x, y, added = problem["input"], problem.output, problem.epilogue.residual
    pixels = count * tiles.pixels + rest * tiles.rest
    written = panels * tiles.vectors * LANES * tiles.size
    reach = int(places.max()) + x.shape[1] * x.itemsize
    code.require_inside("image", image, torch.full_like(image, reach), x.extent)
    code.require_inside("result", result, (pixels - 1) * _pitch(y) + written, y.extent)
    if added is not None:
        spans = (pixels - 1) * _pitch(added) + written
        code.require_inside("residual", residual, spans, added.extent)
    first = weight.data_ptr()
    code.require_inside("weight", panel - first, panels * weight[0].nbytes, weight.nbytes)
    if bias is not None:
        spans = panels * tiles.vectors * VECTOR
        code.require_inside("bias", begin - bias.data_ptr(), spans, bias.nbytes)
    spans = pixels * tiles.taps * places.itemsize
    code.require_inside("places", place - places.data_ptr(), spans, places.nbytes)


# where things lie: the numbers of a call, of an item, and what a thread keeps on its stack
CALL = range(0, 40, code.NUMBER)
_, CALL_IMAGE, CALL_RESULT, CALL_RESIDUAL, CALL_ZEROS = CALL
ITEM = range(0, 72, code.NUMBER)
IMAGE, RESULT, RESIDUAL, WEIGHT, BIAS, PLACES, COUNT, PANELS, HAS_REST = ITEM
STACK = range(0, 64, code.NUMBER)
BASE, ZEROS, LEFT, LEFT_PANELS, COLUMN, PANEL, TAPS, OWN_ITEM = STACK
POINTERS = ("rax", "rsi", "r8", "r9", "r10", "r11", "r14", "r15", "rbx")  # to a tile's pixels
TAKEN = 24  # vectors, behind the sums: those of the weight, two of the image, a zero
SPREAD = 28
ZERO = 30


def _kept(place: int) -> At:
    return At(base="rsp", distance=place)


@dataclass(frozen=True, kw_only=True)
class _Tiles:
    """Machine code for tiles of ``pixels`` by ``vectors``.

    Attributes:
        rest: pixels of an image that make no whole tile.
        size: of a number, in bytes.
        words: of a pixel of the image.
        taps: places of the filter.
        pitches: bytes from a pixel to the next: result, residual (None if there is none).
    """

    vectors: int
    pixels: int
    rest: int
    size: int
    words: int
    taps: int
    pitches: tuple[int, int | None]
    has_bias: bool
    relu: bool

    def written(self, items: int, count: int) -> Assembler:
        """The code, for a table of so many items at this address.

        rdi: the call; rbp: the tile's places; r13, r12: the tile in the result and the residual;
        rcx, rdx: where the weight is read, and how far the pixels.
        """
        a = Assembler()
        a.enter()
        a.subtract("rsp", len(STACK) * code.NUMBER)
        a.vector("vpxord", ZERO, ZERO, ZERO)
        code.take_item(a, "rbx", items, count, len(ITEM))
        a.store(_kept(OWN_ITEM), "rbx")
        a.load("rax", At(base="rdi", distance=CALL_IMAGE))
        a.add_stored("rax", At(base="rbx", distance=IMAGE))
        a.store(_kept(BASE), "rax")
        a.load("rcx", At(base="rdi", distance=CALL_ZEROS))
        a.subtract("rcx", "rax")
        a.store(_kept(ZEROS), "rcx")
        for place, source in ((PANEL, WEIGHT), (LEFT_PANELS, PANELS)):
            a.load("rax", At(base="rbx", distance=source))
            a.store(_kept(place), "rax")
        a.store_number(_kept(COLUMN), 0)
        a.label("panel")
        a.load("rbx", _kept(OWN_ITEM))
        for register, base, place in (
            ("r13", CALL_RESULT, RESULT),
            ("r12", CALL_RESIDUAL, RESIDUAL),
        ):
            a.load(register, At(base="rdi", distance=base))
            a.add_stored(register, At(base="rbx", distance=place))
            a.add_stored(register, _kept(COLUMN))
        a.load("rbp", At(base="rbx", distance=PLACES))
        a.load("rax", At(base="rbx", distance=COUNT))
        a.store(_kept(LEFT), "rax")
        a.compare("rax", 0)
        a.jump_if("je", "rest")
        a.label("tile")
        self._tile(a, "tile", self.pixels)
        result, residual = self.pitches
        a.add("r13", self.pixels * result)
        a.add("r12", self.pixels * (residual or 0))
        a.add_to_stored(_kept(LEFT), -1)
        a.jump_if("jne", "tile")
        a.label("rest")
        if self.rest:
            a.load("rbx", _kept(OWN_ITEM))
            a.load("rax", At(base="rbx", distance=HAS_REST))
            a.compare("rax", 0)
            a.jump_if("je", "panel's end")
            self._tile(a, "rest", self.rest)
        a.label("panel's end")
        a.add_to_stored(_kept(PANEL), self.taps * self.words * self.vectors * VECTOR)
        a.add_to_stored(_kept(COLUMN), self.vectors * LANES * self.size)
        a.add_to_stored(_kept(LEFT_PANELS), -1)
        a.jump_if("jne", "panel")
        a.jump("next")
        a.label("done")
        a.add("rsp", len(STACK) * code.NUMBER)
        a.leave()
        return a

    def _tile(self, a: Assembler, name: str, pixels: int) -> None:
        _, residual = self.pitches
        places = [(p, v) for p in range(pixels) for v in range(self.vectors)]
        self._begin(a, places)
        for p, v in places:
            if residual is not None and v * LANES * self.size % VECTOR == 0:
                a.prefetch(At(base="r12", distance=p * residual + v * LANES * self.size))
        a.load("rcx", _kept(PANEL))
        a.store_number(_kept(TAPS), self.taps)
        a.label(f"{name} tap")
        for p in range(pixels):
            pointer = POINTERS[p]
            a.load_short(pointer, At(base="rbp", distance=4 * p))
            a.load_if_negative(pointer, _kept(ZEROS))
            a.add_stored(pointer, _kept(BASE))
        a.add("rbp", 4 * pixels)
        a.set("rdx", 0)
        a.label(f"{name} channel")
        multiply = "vfmadd231ps" if self.size == WORD else "vdpbf16ps"
        for word in range(UNROLLED):
            for v in range(self.vectors):
                distance = (word * self.vectors + v) * VECTOR
                a.load_vector(TAKEN + v, At(base="rcx", distance=distance))
            for p in range(pixels):
                spread = SPREAD + p % 2
                a.broadcast(spread, At(base=POINTERS[p], index="rdx", distance=word * WORD))
                for v in range(self.vectors):
                    a.vector(multiply, p * self.vectors + v, TAKEN + v, spread)
        a.add("rcx", UNROLLED * self.vectors * VECTOR)
        a.add("rdx", UNROLLED * WORD)
        a.compare("rdx", self.words * WORD)
        a.jump_if("jne", f"{name} channel")
        a.add_to_stored(_kept(TAPS), -1)
        a.jump_if("jne", f"{name} tap")
        for i, (p, v) in enumerate(places):
            self._finish(a, i, p, v)

    def _begin(self, a: Assembler, places: list[tuple[int, int]]) -> None:
        """Sums start as the bias."""
        if self.has_bias:
            a.load("rbx", _kept(OWN_ITEM))
            a.load("rax", At(base="rbx", distance=BIAS))
            for _ in range(WORD // self.size):  # the column's distance in float32
                a.add_stored("rax", _kept(COLUMN))
        for i, (p, v) in enumerate(places):
            if p:
                a.copy_vector(i, v)
            elif self.has_bias:
                a.load_vector(i, At(base="rax", distance=v * VECTOR))
            else:
                a.vector("vpxord", i, i, i)

    def _finish(self, a: Assembler, sums: int, pixel: int, vector: int) -> None:
        result, residual = self.pitches
        column = vector * LANES * self.size
        if residual is not None:
            added = At(base="r12", distance=pixel * residual + column)
            if self.size == WORD:
                a.vector("vaddps", sums, sums, added)
            else:
                a.load_bfloat16(TAKEN, added)
                a.vector("vaddps", sums, sums, TAKEN)
        if self.relu:
            a.vector("vmaxps", sums, ZERO, sums)  # of a NaN the second
        to = At(base="r13", distance=pixel * result + column)
        if self.size == WORD:
            a.store_vector(to, sums)
        else:
            a.store_bfloat16(to, sums)


def _pitch(meta: TensorMeta) -> int:
    """Bytes from a pixel to the next."""
    assert meta.pixel_pitch is not None
    return meta.pixel_pitch * meta.itemsize
