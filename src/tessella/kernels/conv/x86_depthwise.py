"""Depthwise convolutions on a CPU with AVX-512 or AVX2, in float32 or bfloat16, with bias and
activation.

A thread takes some pixels of an image. For a tile of them it looks the places up that each tap of
the filter reads, once for all channels; then, panel by panel of channels, the sums of the tile wait
in registers while tap after tap is multiplied in, straight from memory. Sums are float32.

Source: the table of places is that of ``shared.x86_convolution``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from tessella.device.packing import packed
from tessella.device.x86 import code
from tessella.device.x86.assembler import Assembler, At, InstructionSet
from tessella.kernels.catalog import Call, Config
from tessella.kernels.epilogue.x86 import Constants, activate
from tessella.kernels.shared import x86_convolution as x86
from tessella.operations.problem import Problem

WORD = 4  # bytes: of a weight and a sum
BLOCK_PIXELS = 96  # that one thread takes at a time
FEW_ITEMS = 8
MAX_TAPS = 225  # each has an address for each pixel of a tile on the stack


def fits(problem: Problem) -> str | None:
    if why := x86.refusal(problem):
        return why
    isa, groups = code.require_instructions(), problem.attrs["groups"]
    if not problem["input"].shape[1] == problem["weight"].shape[0] == groups:
        return "one channel a group"
    if groups < isa.lanes:
        return f"{isa.lanes} channels at least"
    if problem.epilogue.residual is not None:
        return "adds no residual"
    if math.prod(problem["weight"].shape[2:]) > MAX_TAPS:
        return f"a filter of at most {MAX_TAPS} places"
    return None


def configs(problem: Problem) -> tuple[Config, ...]:
    """Tiles of many channels and fewer pixels, or the other way around."""
    wide = x86.widths(problem["weight"].shape[0], code.require_instructions())
    return tuple({"vectors": vectors} for vectors in wide)


def bind(
    problem: Problem, constants: Mapping[int, torch.Tensor], *, vectors: int | None = None
) -> Call:
    vectors = configs(problem)[0]["vectors"] if vectors is None else vectors
    problem.require_constants(constants)
    isa, y = code.require_instructions(), problem.output
    pixels = x86.PIXELS[isa][vectors]
    panels = x86.Panels(channels=y.shape[1], vectors=vectors, lanes=isa.lanes)
    weight = _weight(constants[1], panels)
    bias = panels.laid_out(constants[2].float()) if 2 in constants else None
    tiles = _Tiles(
        isa=isa,
        panels=panels,
        pixels=pixels,
        rest=math.prod(y.shape[2:]) % pixels,
        size=y.itemsize,
        taps=weight.shape[1],
        pitch=x86.pixel_bytes(y),
        has_bias=bias is not None,
        activation=problem.epilogue.activation,
    )
    places, zeros = (
        x86.indirection(problem, constants[1], pixels),
        torch.zeros(problem["input"].shape[1]),
    )
    items = list(_items(problem, tiles, weight, bias, places))
    _require_inside(problem, tiles, items, weight, bias, places)
    table, made = code.Table(items, weight, bias, places, zeros), _machine_code(tiles)
    beside = zeros.data_ptr()

    def numbers(x: torch.Tensor, out: torch.Tensor) -> tuple[int, ...]:
        return x.data_ptr(), out.data_ptr(), beside

    return code.Launch(made, table, numbers)


def _weight(weight: torch.Tensor, panels: x86.Panels) -> torch.Tensor:
    """[C, 1, R, S] → float32 [panels, R·S, width]: as a tile reads it."""

    def pack(w: torch.Tensor) -> torch.Tensor:
        taps = w.shape[2:].numel()
        parts = panels.laid_out(w.float()).reshape(len(panels.begins), -1, taps)
        return parts.transpose(1, 2).contiguous()

    return packed(weight, ("conv2d.x86_depthwise", panels), pack)


def _items(
    problem: Problem,
    tiles: _Tiles,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    places: torch.Tensor,
) -> Iterator[tuple[int, ...]]:
    """What threads take one by one: some pixels of an image and some panels of channels.

    Distances of the image and the result, addresses of the weight, the bias and the places, how
    many tiles and panels, and whether the pixels that make no whole tile follow.
    """
    x, y = problem["input"], problem.output
    pixels, image = math.prod(y.shape[2:]), math.prod(x.shape[2:]) * x86.pixel_bytes(x)
    some_tiles = BLOCK_PIXELS // tiles.pixels
    blocks = math.ceil(pixels / (some_tiles * tiles.pixels))
    together = len(weight)
    while together > 1 and y.shape[0] * blocks * math.ceil(len(weight) / together) < FEW_ITEMS:
        together = math.ceil(together / 2)
    for n in range(y.shape[0]):
        for block in range(blocks):
            begin = block * some_tiles * tiles.pixels
            count = min(some_tiles, (pixels - begin) // tiles.pixels)
            for panel, some in tiles.panels.together(together):
                channel = tiles.panels.begins[panel]
                yield (
                    n * image + channel * tiles.size,
                    (n * pixels + begin) * tiles.pitch + channel * tiles.size,
                    weight.data_ptr() + panel * weight[0].nbytes,
                    0 if bias is None else bias.data_ptr() + panel * tiles.width * WORD,
                    places.data_ptr() + begin * tiles.taps * places.itemsize,
                    count,
                    some,
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
    image, result, panel, begin, place, count, panels, rest = torch.tensor(items).T
    x, y = problem["input"], problem.output
    pixels = count * tiles.pixels + rest * tiles.rest
    channels = (panels - 1) * tiles.width + tiles.panels.span
    code.require_inside("image", image, int(places.max()) + channels * tiles.size, x.extent)
    spans = (pixels - 1) * tiles.pitch + channels * tiles.size
    code.require_inside("result", result, spans, y.extent)
    spans = panels * weight[0].nbytes
    code.require_inside("weight", panel - weight.data_ptr(), spans, weight.nbytes)
    if bias is not None:
        spans = panels * tiles.width * WORD
        code.require_inside("bias", begin - bias.data_ptr(), spans, bias.nbytes)
    spans = pixels * tiles.taps * places.itemsize
    code.require_inside("places", place - places.data_ptr(), spans, places.nbytes)


# where things lie: the numbers of a call, of an item, and what a thread keeps on its stack
CALL_IMAGE, CALL_RESULT, CALL_ZEROS = map(code.given, range(3))
ITEM = range(0, 64, code.NUMBER)
IMAGE, RESULT, WEIGHT, BIAS, PLACES, COUNT, PANELS, HAS_REST = ITEM
BASE, ZEROS, LEFT, ADDRESSES = range(0, 32, code.NUMBER)  # from ADDRESSES on: a tile's


@dataclass(frozen=True, kw_only=True)
class _Tiles:
    """Machine code for tiles of ``pixels`` by ``vectors``.

    Sums are the first vectors; behind them are those of the weight, and one of the image.

    Attributes:
        rest: pixels of an image that make no whole tile.
        size: of a number, in bytes.
        taps: places of the filter.
        pitch: bytes from a pixel of the result to the next.
    """

    isa: InstructionSet
    panels: x86.Panels
    pixels: int
    rest: int
    size: int
    taps: int
    pitch: int
    has_bias: bool
    activation: str | None

    @property
    def vectors(self) -> int:
        return self.panels.vectors

    @property
    def width(self) -> int:
        """The channels of a tile, those counted twice that are computed twice."""
        return self.vectors * self.isa.lanes

    def written(self, constants: Constants) -> Assembler:
        """The code.

        rdi: the call; rbx: the item; rbp: the tile's places; r13, r14: the tile in the result, and
        its panel there; rcx, r9: the panel's weight and bias; rdx: how far its channels begin; rsi:
        the tap's addresses; r8: one of them; r10, r11: how many taps and panels are left.
        """
        a = Assembler(self.isa)
        kept = ADDRESSES + self.taps * self.pixels * code.NUMBER
        a.enter()
        a.subtract("rsp", kept)
        code.take_item(a, "rbx", len(ITEM))
        a.load("rax", CALL_IMAGE)
        a.add_stored("rax", At(base="rbx", distance=IMAGE))
        a.store(_kept(BASE), "rax")
        a.load("rcx", CALL_ZEROS)
        a.subtract("rcx", "rax")
        a.store(_kept(ZEROS), "rcx")
        a.load("r13", CALL_RESULT)
        a.add_stored("r13", At(base="rbx", distance=RESULT))
        a.load("rbp", At(base="rbx", distance=PLACES))
        a.load("rax", At(base="rbx", distance=COUNT))
        a.store(_kept(LEFT), "rax")
        a.compare("rax", 0)
        a.jump_if("je", "rest")
        a.label("tile")
        self._tile(a, "tile", self.pixels, constants)
        a.add("r13", self.pixels * self.pitch)
        a.add_to_stored(_kept(LEFT), -1)
        a.jump_if("jne", "tile")
        a.label("rest")
        if self.rest:
            a.load("rax", At(base="rbx", distance=HAS_REST))
            a.compare("rax", 0)
            a.jump_if("je", "next")
            self._tile(a, "rest", self.rest, constants)
        a.jump("next")
        a.label("done")
        a.add("rsp", kept)
        a.leave()
        return a

    def _tile(self, a: Assembler, name: str, pixels: int, constants: Constants) -> None:
        self._addresses(a, name, pixels)
        for register, place in (("rcx", WEIGHT), ("r9", BIAS), ("r11", PANELS)):
            a.load(register, At(base="rbx", distance=place))
        a.move("r14", "r13")
        a.set("rdx", 0)
        constants.begin(a)
        a.label(f"{name} panel")
        vector = self.isa.vector_bytes
        columns = [column * self.size for column in self.panels.columns]
        places = [(p, v) for p in range(pixels) for v in range(self.vectors)]
        taken = self.vectors * self.pixels
        for i, (p, v) in enumerate(places):  # sums start as the bias
            if p:
                a.copy_vector(i, v)
            elif self.has_bias:
                a.load_vector(i, At(base="r9", distance=v * vector))
            else:
                a.vector("vxorps", i, i, i)
        self._begin_taps(a)
        a.label(f"{name} tap")
        for v in range(self.vectors):
            a.load_vector(taken + v, At(base="rcx", distance=v * vector))
        for i, (p, v) in enumerate(places):
            if v == 0:
                a.load("r8", At(base="rsi", distance=p * code.NUMBER))
            read = At(base="r8", index="rdx", distance=columns[v])
            if self.size == WORD:
                a.vector("vfmadd231ps", i, taken + v, read)
            else:
                a.load_bfloat16(taken + self.vectors, read)
                a.vector("vfmadd231ps", i, taken + v, taken + self.vectors)
        a.add("rcx", self.vectors * vector)
        self._next_tap(a, f"{name} tap", pixels)
        for i, (p, v) in enumerate(places):
            activate(a, self.activation, constants, i, taken)
            to = At(base="r14", distance=p * self.pitch + columns[v])
            if self.size == WORD:
                a.store_vector(to, i)
            else:
                a.store_bfloat16(to, i)
        a.add("r9", self.width * WORD)
        for register in ("rdx", "r14"):
            a.add(register, self.width * self.size)
        a.subtract("r11", 1)
        a.jump_if("jne", f"{name} panel")

    def _addresses(self, a: Assembler, name: str, pixels: int) -> None:
        """Of what each tap reads for each pixel of the tile: on the stack, in this order."""
        self._begin_taps(a)
        a.label(f"{name} address")
        for p in range(pixels):
            a.load_short("r8", At(base="rbp", distance=4 * p))
            a.load_if_negative("r8", _kept(ZEROS))
            a.add_stored("r8", _kept(BASE))
            a.store(At(base="rsi", distance=p * code.NUMBER), "r8")
        a.add("rbp", 4 * pixels)
        self._next_tap(a, f"{name} address", pixels)

    def _begin_taps(self, a: Assembler) -> None:
        a.move("rsi", "rsp")
        a.add("rsi", ADDRESSES)
        a.set("r10", self.taps)

    def _next_tap(self, a: Assembler, label: str, pixels: int) -> None:
        a.add("rsi", pixels * code.NUMBER)
        a.subtract("r10", 1)
        a.jump_if("jne", label)


@functools.lru_cache(256)
def _machine_code(tiles: _Tiles) -> code.MachineCode:
    """Code is the same for all batch sizes, and for layers that differ in their weights alone."""
    constants = Constants(tiles.isa)
    return code.MachineCode(tiles.written(constants).code(), constants)


def _kept(place: int) -> At:
    return At(base="rsp", distance=place)
