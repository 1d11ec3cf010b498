"""Depthwise convolutions on a CPU with AVX-512 or AVX2, row by row, in float32 or bfloat16, with
bias and activation.

A thread takes one vector of channels of some rows of the result. A tile is a part of a row: its
sums wait in registers, with the weights of one row of the filter, and each pixel of the image is
loaded once for all sums of the tile that it is a part of. Where a tile reads is known when the code
is written, so that there is no table of places: at the row's ends what lies beside the image is
left out, above and below it rows of the filter are. Sums are float32.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tessella.device.x86 import code
from tessella.device.x86.assembler import Assembler, At, InstructionSet
from tessella.kernels.catalog import Call, Config
from tessella.kernels.conv import x86_depthwise
from tessella.kernels.epilogue.x86 import TEMPORARIES, Constants, activate
from tessella.kernels.shared.x86_shares import edges
from tessella.kernels.shared.x86_tiles import WORD, Panels, pixel_bytes
from tessella.operations.problem import Problem

VECTORS = (1, 2, 4)  # of a panel
LEAST_PIXELS = 3  # of a tile
FAR_BYTES = 2**20  # of all images: more do not stay in the second cache with their results
MOST_PRODUCTS = 2000  # in the code, of some 6 bytes: half of the cache for instructions
BLOCK_PIXELS = 1024  # of a vector of channels: what a thread reads of them stays in its first cache
ITEM = range(0, 48, code.NUMBER)
IMAGE, RESULT, WEIGHT, BIAS, LINES, COUNT = ITEM
LINE = range(0, 24, code.NUMBER)  # of a row of the result: what it reads
FIRST, OWN_WEIGHT, TAPS = LINE


def fits(problem: Problem) -> str | None:
    if why := x86_depthwise.fits(problem):
        return why
    if not _lines(problem, 1)[:, 2].any():
        return "reads nothing of the image"
    if not configs(problem):
        return "too many different tiles for the cache of instructions"
    return None


def configs(problem: Problem) -> tuple[Config, ...]:
    """Panels of one vector, whose rows stay in the first cache, or of more, which are read as they
    lie: first where images come from far, as a search tries no others of what begins far behind."""
    isa, is_far = code.require_instructions(), problem["input"].nbytes > FAR_BYTES
    return tuple(
        {"vectors": vectors}
        for vectors in (reversed(VECTORS) if is_far else VECTORS)
        if vectors * isa.lanes <= problem.output.shape[1]
        and _most_pixels(problem, vectors) >= LEAST_PIXELS
        and _products(problem, vectors) <= MOST_PRODUCTS
    )


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], *, vectors: int = 1) -> Call:
    problem.require_constants(constants)
    x, y, isa = problem["input"], problem.output, code.require_instructions()
    panels = Panels(channels=y.shape[1], vectors=vectors, lanes=isa.lanes)
    weight = x86_depthwise.weight_of(constants[1], panels)
    bias = None
    if 2 in constants:
        bias = panels.laid_out(constants[2].float()).reshape(len(panels.begins), -1)
    lines = code.Table(_lines(problem, vectors))
    items = _items(problem, panels, weight, bias, lines.address)
    _require_inside(problem, panels, items, weight, bias, lines.address)
    made = _machine_code(
        _Rows(
            isa=isa,
            columns=panels.columns,
            tiles=_tiles(problem, vectors),
            size=x.itemsize,
            pitches=(pixel_bytes(x), pixel_bytes(y)),
            line=problem.attrs["dilation"][0] * x.shape[3] * pixel_bytes(x),
            stride=problem.attrs["stride"][1],
            taps=problem["weight"].shape[3],
            has_bias=bias is not None,
            activation=problem.epilogue.activation,
            floor=float(problem.epilogue.floor),
        )
    )

    def numbers(x: torch.Tensor, out: torch.Tensor) -> tuple[int, ...]:
        return x.data_ptr(), out.data_ptr()

    return code.Launch(made, code.Table(items, weight, bias, lines), numbers)


Product = tuple[int, int, int]  # of which pixel, which tap, which pixel of the image
Tile = tuple[int, tuple[Product, ...]]  # how many pixels, and what is added to their sums


def _most_pixels(problem: Problem, vectors: int) -> int:
    """How many pixels' sums registers hold beside the weights and one vector of the image."""
    others = max(vectors * problem["weight"].shape[3] + 1, TEMPORARIES)
    return (code.require_instructions().vectors - others) // vectors


def _products(problem: Problem, vectors: int) -> int:
    """How many the code has."""
    return vectors * sum(len(products) for (_, products), _ in _tiles(problem, vectors))


def _tiles(problem: Problem, vectors: int) -> tuple[tuple[Tile, int], ...]:
    """A row of the result: tiles, and how many of each kind follow each other. Pixels of the image
    are counted from the one that stands over the tile's first.
    """
    a, (width, length) = problem.attrs, (problem["input"].shape[3], problem.output.shape[3])
    stride, padding, dilation = (int(a[name][1]) for name in ("stride", "padding", "dilation"))
    taps = problem["weight"].shape[3]
    most = _most_pixels(problem, vectors)
    pixels = math.ceil(length / math.ceil(length / most))
    made = []
    for begin in range(0, length, pixels):
        some = min(pixels, length - begin)
        products = (
            (p, tap, p * stride + tap * dilation - padding)
            for p in range(some)
            for tap in range(taps)
        )
        made.append((some, tuple(t for t in products if 0 <= begin * stride + t[2] < width)))
    return tuple((tile, len([*same])) for tile, same in itertools.groupby(made))


def _lines(problem: Problem, vectors: int) -> npt.NDArray[np.int64]:
    """For each row of the result where the first row that it reads begins in the image, and its
    weights in a panel, and how many rows it reads.
    """
    x, weight, a = problem["input"], problem["weight"], problem.attrs
    stride, padding, dilation = (int(a[name][0]) for name in ("stride", "padding", "dilation"))
    lanes = code.require_instructions().lanes
    rows = np.arange(problem.output.shape[2])[:, None] * stride - padding
    read = rows + np.arange(weight.shape[2]) * dilation
    inside = (read >= 0) & (read < x.shape[2])
    tap = inside.argmax(1)
    first = read[np.arange(len(read)), tap] * x.shape[3] * pixel_bytes(x)
    return np.stack((first, tap * weight.shape[3] * vectors * lanes * WORD, inside.sum(1)), 1)


def _items(
    problem: Problem,
    panels: Panels,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    lines: int,
) -> npt.NDArray[np.int64]:
    """The table of what threads take one by one: a panel's rows in an image."""
    x, y = problem["input"], problem.output
    blocks = math.ceil(y.shape[2] / math.ceil(BLOCK_PIXELS / y.shape[3]))
    first = np.array(edges(y.shape[2], blocks))
    image, panel, block = np.ix_(
        np.arange(y.shape[0]), np.arange(len(panels.begins)), np.arange(blocks)
    )
    begin = first[block]
    column = np.array(panels.begins, np.int64)[panel] * x.itemsize
    pixel = (image * y.shape[2] + begin) * y.shape[3]
    values = (
        image * math.prod(x.shape[2:]) * pixel_bytes(x) + column,
        pixel * pixel_bytes(y) + column,
        weight.data_ptr() + panel * weight[0].nbytes,
        0 if bias is None else bias.data_ptr() + panel * bias[0].nbytes,
        lines + begin * len(LINE) * code.NUMBER,
        first[block + 1] - begin,
    )
    return np.stack(np.broadcast_arrays(*values), -1).reshape(-1, len(values))


def _require_inside(
    problem: Problem,
    panels: Panels,
    items: npt.NDArray[np.int64],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    lines: int,
) -> None:
    """Refuse tables that lead out of a tensor, whoever wrote them."""
    x, y = problem["input"], problem.output
    image, result, panel, begin, line, count = torch.from_numpy(items).T
    lines_read = torch.from_numpy(_lines(problem, panels.vectors))
    read = lines_read[lines_read[:, 2] > 0]
    down = problem.attrs["dilation"][0] * x.shape[3] * pixel_bytes(x)
    last = int((read[:, 0] + (read[:, 2] - 1) * down).max())
    width = (x.shape[3] - 1) * pixel_bytes(x) + panels.span * x.itemsize
    code.require_inside("image", image + int(read[:, 0].min()), torch.zeros_like(image), x.extent)
    code.require_inside("image", image, torch.full_like(image, last + width), x.extent)
    written = (count * y.shape[3] - 1) * pixel_bytes(y) + panels.span * y.itemsize
    code.require_inside("result", result, written, y.extent)
    panel_bytes = panels.vectors * panels.lanes * WORD
    row_bytes = problem["weight"].shape[3] * panel_bytes
    taken = torch.full_like(panel, int((read[:, 1] + read[:, 2] * row_bytes).max()))
    code.require_inside("weight", panel - weight.data_ptr(), taken, weight.nbytes)
    if bias is not None:
        spans = torch.full_like(begin, panel_bytes)
        code.require_inside("bias", begin - bias.data_ptr(), spans, bias.nbytes)
    row = len(LINE) * code.NUMBER
    code.require_inside("lines", line - lines, count * row, len(lines_read) * row)


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Machine code for the rows of one panel of channels.

    Attributes:
        columns: the first channel of each vector, from the panel's on.
        tiles: of a row.
        size: of a number, in bytes.
        pitches: bytes from a pixel to the next: image, result.
        line: from a row that a tile reads to the next, in bytes.
        stride: pixels of the image from one of the result to the next.
        taps: of a row of the filter.
    """

    isa: InstructionSet
    columns: tuple[int, ...]
    tiles: tuple[tuple[Tile, int], ...]
    size: int
    pitches: tuple[int, int]
    line: int
    stride: int
    taps: int
    has_bias: bool
    activation: str | None
    floor: float

    def written(self, constants: Constants) -> Assembler:
        """The code.

        rdi: the call; rbx: the item; r13, rsi, r9: its image, weight and bias; rbp: the row's line;
        rcx: rows that are left; r12, r14: the tile in the image and in the result; r11: tiles that
        are left; r8, rdx, r10: what it reads of the image and the weight, and how many rows more.
        """
        a = Assembler(self.isa)
        with a.function(), code.each_item(a, "rbx", len(ITEM)):
            for i, (register, place) in enumerate((("r13", IMAGE), ("r14", RESULT))):
                a.load(register, code.given(i))
                a.add_stored(register, At(base="rbx", distance=place))
            for register, place in (("rsi", WEIGHT), ("r9", BIAS), ("rbp", LINES), ("rcx", COUNT)):
                a.load(register, At(base="rbx", distance=place))
            constants.begin(a)
            with a.counted("row", "rcx"):
                a.move("r12", "r13")
                a.add_stored("r12", At(base="rbp", distance=FIRST))
                for number, (tile, count) in enumerate(self.tiles):
                    name = f"tile {number}"
                    if count == 1:
                        self._tile(a, name, tile, constants)
                        continue
                    a.set("r11", count)
                    with a.counted(name, "r11"):
                        self._tile(a, f"{name}, one", tile, constants)
                a.add("rbp", len(LINE) * code.NUMBER)
        return a

    def _tile(self, a: Assembler, name: str, tile: Tile, constants: Constants) -> None:
        vectors, vector = len(self.columns), self.isa.vector_bytes
        (pixels, products), (image, result) = tile, self.pitches
        sums = [(p, v) for p in range(pixels) for v in range(vectors)]
        for i, (p, v) in enumerate(sums):
            if p:
                a.copy_vector(i, v)
            elif self.has_bias:
                a.load_vector(i, At(base="r9", distance=v * vector))
            else:
                a.vector("vxorps", i, i, i)
        a.move("r8", "r12")
        a.move("rdx", "rsi")
        a.add_stored("rdx", At(base="rbp", distance=OWN_WEIGHT))
        a.load("r10", At(base="rbp", distance=TAPS))
        weight, weights = len(sums), self.taps * vectors
        taken = weight + weights
        a.compare("r10", 0)
        a.jump_if("je", f"{name}, made")  # above or below the image
        with a.counted(name, "r10"):
            for i in range(weights):
                a.load_vector(weight + i, At(base="rdx", distance=i * vector))
            for place, same in itertools.groupby(sorted(products, key=_read), key=_read):
                read_here = [*same]
                for v, column in enumerate(self.columns):
                    read = At(base="r8", distance=place * image + column * self.size)
                    if self.size == WORD:
                        a.load_vector(taken, read)
                    else:
                        a.load_bfloat16(taken, read)
                    for p, tap, _ in read_here:
                        a.vector("vfmadd231ps", p * vectors + v, weight + tap * vectors + v, taken)
            a.add("r8", self.line)
            a.add("rdx", weights * vector)
        a.label(f"{name}, made")
        for i, (p, v) in enumerate(sums):
            activate(a, self.activation, constants, i, weight, floor=self.floor)
            to = At(base="r14", distance=p * result + self.columns[v] * self.size)
            if self.size == WORD:
                a.store_vector(to, i)
            else:
                a.store_bfloat16(to, i)
        a.add("r12", pixels * self.stride * image)
        a.add("r14", pixels * result)


def _read(product: Product) -> int:
    """The pixel of the image that is multiplied."""
    return product[2]


@functools.lru_cache(256)
def _machine_code(rows: _Rows) -> code.MachineCode:
    """The machine code, which is the same for all batch sizes and all weights."""
    constants = Constants(rows.isa)
    return code.MachineCode(rows.written(constants).code(), constants)
