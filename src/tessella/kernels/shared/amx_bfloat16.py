"""Convolutions of bfloat16 by the tiles of AMX, with bias, residual and activation around them.

A block of 32 pixels by 32 channels waits in four tiles while 32 channels of the image after another
are multiplied in: the product of a matrix of pixels with one of weights. A pixel's row is what all
places of the filter see of the image, one behind the other: for 1×1 filters of stride 1 the image
itself, whose rows tiles read where they lie. For others some pixels' rows are copied to the
workspace first, from where a table says; beside the image it points to zeros. Sums leave the tiles
through the first cache, where bias, residual and activation are done to them.

Weights are packed as tiles read them: two channels of the image side by side for each channel of
the result. Where the last pixels or channels are less than a block, it begins earlier, and some of
them are computed twice, to the same numbers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tessella.core.errors import KernelError
from tessella.device.packing import packed
from tessella.device.x86 import code
from tessella.device.x86.assembler import AVX512, At
from tessella.device.x86.tiles import CONFIGURATION_BYTES, TileAssembler, configuration
from tessella.kernels.catalog import Call, Config
from tessella.kernels.epilogue.x86 import Constants, activate
from tessella.kernels.shared import x86_convolution as x86
from tessella.kernels.shared.x86_tiles import CACHE_LINE, MAX_BYTES, Panels, kept, pixel_bytes
from tessella.operations.problem import Problem

ROWS, WIDTH = 32, 32  # pixels and channels of a block: two tiles by two
SIZE, WORD = 2, 4  # bytes of a number, and of a sum
STEP = 32  # channels of the image that a product of tiles takes: 64 bytes
TILE_BYTES = 1024
BLOCK_BYTES = ROWS * WIDTH * WORD
PANEL_STEP_BYTES = 2 * TILE_BYTES  # of a panel's weights in a step
MOST_ROWS = 256  # of an item
# of an item's rows: of half the first and the second cache of a processor that has tiles
PART_BYTES = (2**14, 2**18, 2**20)
FEW_ITEMS = 4
MOST_THREADS = 64
UNROLLED = 4  # rows of a block whose sums are finished in a round


def fits(problem: Problem) -> str | None:
    if why := x86.refusal(problem):
        return why
    x, weight, y = problem["input"], problem["weight"], problem.output
    if x.dtype != "bfloat16":
        return "bfloat16"
    if problem.attrs["groups"] != 1:
        return "one group"
    if weight.shape[0] < WIDTH:
        return f"{WIDTH} channels at least"
    if y.shape[0] * math.prod(y.shape[2:]) < ROWS:
        return f"{ROWS} pixels at least"
    images = (x, y, problem.epilogue.residual)
    if max(m.extent for m in images if m is not None) > MAX_BYTES:
        return "distances have 32 bits"
    if ROWS * _row_bytes(problem) > MAX_BYTES:
        return "distances have 32 bits"
    return None


def configs(problem: Problem) -> tuple[Config, ...]:
    """By the rows that a thread takes at a time; they are copied where tiles cannot read them."""
    bytes_of = _row_bytes(problem)
    rows = [max(1, min(MOST_ROWS, part // bytes_of) // ROWS) * ROWS for part in PART_BYTES]
    ways = (0, 1) if may_be_direct(problem) else (1,)
    return tuple({"rows": n, "copied": way} for way in ways for n in dict.fromkeys(reversed(rows)))


def may_be_direct(problem: Problem) -> bool:
    """Whether tiles can read an image's rows where they lie."""
    x, a = problem["input"], problem.attrs
    moved = tuple(a["stride"]) != (1, 1) or tuple(a["padding"]) != (0, 0)
    return not moved and problem["weight"].shape[2:] == (1, 1) and x.shape[1] % STEP == 0


def _row_bytes(problem: Problem) -> int:
    """Of a pixel's row, filled up with zeros to whole steps."""
    return math.ceil(math.prod(problem["weight"].shape[1:]) / STEP) * STEP * SIZE


def _pixels(problem: Problem) -> int:
    """Of all images' results."""
    return problem.output.shape[0] * math.prod(problem.output.shape[2:])


def workspace_bytes(problem: Problem, **config: int) -> int:
    blocks = _Blocks.of(problem, config)
    return _threads(problem, blocks) * blocks.part_bytes + CACHE_LINE


def _threads(problem: Problem, blocks: _Blocks) -> int:
    """How many threads have a part of the workspace."""
    return min(MOST_THREADS, len(blocks.begins(_pixels(problem))) * len(blocks.groups))


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: int) -> Call:
    problem.require_constants(constants)
    blocks = _Blocks.of(problem, config)
    weight, bias = _weight(constants[1], blocks.panels), constants.get(2)
    if bias is None:
        bias = torch.zeros(problem.output.shape[1], dtype=torch.float32)
    bias = blocks.panels.laid_out(bias.float()).contiguous()
    places = _places(problem, constants[1]) if blocks.taps else None
    zeros = torch.zeros(problem["input"].shape[1] + STEP, dtype=torch.float32)
    items = _items(problem, blocks, weight, bias, places)
    _require_inside(problem, blocks, items, weight, bias, places)
    table = code.Table(items, weight, bias, places, zeros)
    made, most = _machine_code(blocks), _threads(problem, blocks)
    needed = workspace_bytes(problem, **config)
    beside = zeros.data_ptr()

    def convolve(
        x: torch.Tensor, *added: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor
    ) -> torch.Tensor:
        if workspace.nbytes < needed:
            raise KernelError(
                "the workspace is too small",
                seen=f"{workspace.nbytes} bytes",
                fix=f"{needed} bytes",
            )
        part = workspace.data_ptr() + -workspace.data_ptr() % CACHE_LINE
        residual = added[0].data_ptr() if added else 0
        made.run(
            table, x.data_ptr(), out.data_ptr(), residual, beside, part, 0,
            threads=min(most, torch.get_num_threads()),
        )  # fmt: skip
        return out

    return convolve


def _weight(weight: torch.Tensor, panels: Panels) -> torch.Tensor:
    """[K, C, R, S] → [panels, steps, 2 tiles, 16, 16, 2]: pairs of a row's numbers, of which there
    are whole steps, for 16 channels each."""

    def pack(w: torch.Tensor) -> torch.Tensor:
        rows = panels.laid_out(w.permute(0, 2, 3, 1).flatten(1))
        steps = math.ceil(rows.shape[1] / STEP)
        rows = torch.nn.functional.pad(rows, (0, steps * STEP - rows.shape[1]))
        shape = (len(panels.begins), 2, WIDTH // 2, steps, STEP // 2, 2)
        return rows.reshape(shape).permute(0, 3, 1, 4, 2, 5).contiguous()

    return packed(weight, ("conv2d.amx_bf16", panels), pack)


def _places(problem: Problem, weight: torch.Tensor) -> torch.Tensor:
    """int32 [pixels, taps]: where what a place of the filter sees begins, -1 beside the image."""
    x, y, a = problem["input"], problem.output, problem.attrs
    moved = [tuple(a[name]) for name in ("stride", "padding", "dilation")]
    (images, _, height, width), pitch = x.shape, pixel_bytes(x)

    def line(axis: int, length: int) -> torch.Tensor:
        """Places along an axis that each result sees: [length, places of the filter]."""
        stride, padding, dilation = (int(m[axis]) for m in moved)
        first = torch.arange(length)[:, None] * stride - padding
        return first + torch.arange(weight.shape[2 + axis]) * dilation

    def make(_: torch.Tensor) -> torch.Tensor:
        down = line(0, y.shape[2])[None, :, None, :, None]
        along = line(1, y.shape[3])[None, None, :, None, :]
        inside = (down >= 0) & (down < height) & (along >= 0) & (along < width)
        n = torch.arange(images)[:, None, None, None, None]
        at = ((n * height + down) * width + along) * pitch
        return torch.where(inside, at, -1).to(torch.int32).reshape(_pixels(problem), -1)

    key = ("conv2d.amx_bf16 places", x.shape, pitch, y.shape, *moved)
    return packed(weight, key, make)


def _items(
    problem: Problem,
    blocks: _Blocks,
    weight: torch.Tensor,
    bias: torch.Tensor,
    places: torch.Tensor | None,
) -> npt.NDArray[np.int64]:
    """The table of the items that threads take one by one: some rows by some panels.

    A row: distance of the image, or the address of the rows' places; distances of result and
    residual; addresses of weight and bias; how many panels and blocks of rows; how many rows the
    last block begins earlier; how many rows are copied.
    """
    table = []
    total = _pixels(problem)
    for begin, count in blocks.begins(total):
        many = math.ceil(count / ROWS)
        source = begin * blocks.pitch
        if places is not None:
            source = places.data_ptr() + begin * blocks.taps * places.itemsize
        for first, some in blocks.groups:
            column = blocks.panels.begins[first] * SIZE
            table.append((
                source,
                begin * blocks.result + column,
                begin * (blocks.residual or 0) + column,
                weight[first].data_ptr(),
                bias.data_ptr() + first * WIDTH * WORD,
                some,
                many,
                many * ROWS - count,
                count,
            ))  # fmt: skip
    return np.array(table, np.int64)


def _require_inside(
    problem: Problem,
    blocks: _Blocks,
    items: npt.NDArray[np.int64],
    weight: torch.Tensor,
    bias: torch.Tensor,
    places: torch.Tensor | None,
) -> None:
    """Refuse a table that leads out of a tensor, whoever wrote it."""
    source, result, residual, panel, begin, panels, many, less, count = torch.from_numpy(items).T
    x, y, added = problem["input"], problem.output, problem.epilogue.residual
    written = panels * WIDTH * SIZE
    if bool((many * ROWS - less != count).any()) or int(count.min()) < ROWS:
        raise KernelError(
            "a table's blocks are not its rows",
            seen=f"{count.tolist()[:4]} rows",
            fix="report the problem that it was asked for",
        )
    if places is None:
        spans = (count - 1) * blocks.pitch + blocks.row_bytes
        code.require_inside("image", source, spans, x.extent)
    else:
        at = places.flatten().long().clamp(min=0)
        code.require_inside("image", at, torch.full_like(at, blocks.seen), x.extent)
        spans = count * blocks.taps * places.itemsize
        code.require_inside("places", source - places.data_ptr(), spans, places.nbytes)
        rows = torch.full_like(count, blocks.most_rows)
        code.require_inside("workspace", 0 * count, count, int(rows.max()))
    code.require_inside("result", result, (count - 1) * pixel_bytes(y) + written, y.extent)
    if added is not None:
        spans = (count - 1) * pixel_bytes(added) + written
        code.require_inside("residual", residual, spans, added.extent)
    first = weight.data_ptr()
    code.require_inside("weight", panel - first, panels * weight[0].nbytes, weight.nbytes)
    spans = panels * WIDTH * WORD
    code.require_inside("bias", begin - bias.data_ptr(), spans, bias.nbytes)


IMAGE, RESULT, RESIDUAL, ZEROS, PART, TAKEN = map(code.given, range(6))
ITEM = range(0, 72, code.NUMBER)
(OF_IMAGE, OF_RESULT, OF_RESIDUAL, OF_WEIGHT, OF_BIAS, OF_PANELS, OF_BLOCKS, OF_EARLIER,
 OF_COUNT) = ITEM  # fmt: skip
STACK = range(0, 72, code.NUMBER)
(LEFT_PANELS, LEFT_BLOCKS, LEFT_ROWS, ROWS_AT, RESULT_AT, RESIDUAL_AT, BIAS_AT, BESIDE,
 COPIED) = STACK  # fmt: skip
# vectors: bias, and of a row of the block its sums and what is added
BIASES, SUMS, SPARE = (0, 1), 2, 16


@dataclass(frozen=True, kw_only=True)
class _Blocks:
    """Machine code for blocks of pixels by channels.

    Attributes:
        row_bytes: of a pixel's row; ``pitch``: from a row to the next in the image, 0 where rows
            are copied: then some bytes of all rows of a block follow each other as tiles take them.
        taps, seen: places of the filter, and the bytes that each sees; 0 where nothing is copied.
        most_rows: of an item.
        together: panels of an item, at most.
        result, residual: bytes from a pixel to the next.
    """

    panels: Panels
    row_bytes: int
    pitch: int
    taps: int
    seen: int
    most_rows: int
    together: int
    result: int
    residual: int | None
    activation: str | None

    @classmethod
    def of(cls, problem: Problem, config: Mapping[str, int]) -> _Blocks:
        x, y, residual = problem["input"], problem.output, problem.epilogue.residual
        config = config or configs(problem)[0]
        direct, row_bytes = not config["copied"], _row_bytes(problem)
        panels = Panels(channels=y.shape[1], vectors=2, lanes=AVX512.lanes)
        most = config["rows"]
        items = math.ceil(_pixels(problem) / most)
        return cls(
            panels=panels,
            row_bytes=row_bytes,
            pitch=pixel_bytes(x) if direct else 0,
            taps=0 if direct else math.prod(problem["weight"].shape[2:]),
            seen=0 if direct else x.shape[1] * SIZE,
            most_rows=most,
            together=math.ceil(len(panels.begins) / math.ceil(FEW_ITEMS / items)),
            result=pixel_bytes(y),
            residual=None if residual is None else pixel_bytes(residual),
            activation=problem.epilogue.activation,
        )

    def begins(self, total: int) -> list[tuple[int, int]]:
        """The first row of each item and how many it has, at least a block's."""
        begins = range(0, total, self.most_rows)
        return [
            (min(begin, total - ROWS), min(self.most_rows, total - min(begin, total - ROWS)))
            for begin in begins
        ]

    @property
    def groups(self) -> list[tuple[int, int]]:
        """The first panel of each item and how many it has."""
        return list(self.panels.together(self.together))

    @property
    def part_bytes(self) -> int:
        """Of a thread: a block's sums, how tiles were configured, and rows that are copied."""
        copied = self.most_rows * self.row_bytes if self.taps else 0
        return BLOCK_BYTES + CONFIGURATION_BYTES + copied

    @property
    def panel_bytes(self) -> int:
        return self.row_bytes // (STEP * SIZE) * PANEL_STEP_BYTES

    def written(self, constants: Constants, tiles: torch.Tensor) -> TileAssembler:
        """The code.

        rdi: the call; rbx: the item; r13: the thread's part; rbp: the item's rows; r12: a panel of
        the weight; r14, r15, r11: a block's rows, its result and its residual.
        """
        a = TileAssembler(AVX512)
        with a.function(len(STACK) * code.NUMBER):
            a.set("r13", 1)
            a.fetch_add(TAKEN, "r13")
            a.multiply("r13", self.part_bytes)
            a.add_stored("r13", PART)
            a.store_number(kept(COPIED), 0)
            a.set("r8", tiles.data_ptr())
            with a.configured(At(base="r8"), At(base="r13", distance=BLOCK_BYTES)):
                with code.each_item(a, "rbx", len(ITEM)):
                    self._item(a, constants)
        return a

    def _item(self, a: TileAssembler, constants: Constants) -> None:
        if self.taps:
            self._copy(a)
        else:
            a.load("rbp", IMAGE)
            a.add_stored("rbp", At(base="rbx", distance=OF_IMAGE))
        for to, base, distance in (
            (RESULT_AT, RESULT, OF_RESULT),
            (RESIDUAL_AT, RESIDUAL, OF_RESIDUAL),
        ):
            a.load("rax", base)
            a.add_stored("rax", At(base="rbx", distance=distance))
            a.store(kept(to), "rax")
        for to, distance in ((BIAS_AT, OF_BIAS), (LEFT_PANELS, OF_PANELS)):
            a.load("rax", At(base="rbx", distance=distance))
            a.store(kept(to), "rax")
        a.load("r12", At(base="rbx", distance=OF_WEIGHT))
        with a.counted("panel", kept(LEFT_PANELS)):
            a.load("rax", kept(BIAS_AT))
            for v in BIASES:
                a.load_vector(v, At(base="rax", distance=v * AVX512.vector_bytes))
            a.move("r14", "rbp")
            a.load("r15", kept(RESULT_AT))
            a.load("r11", kept(RESIDUAL_AT))
            a.load("rax", At(base="rbx", distance=OF_BLOCKS))
            a.store(kept(LEFT_BLOCKS), "rax")
            with a.counted("block", kept(LEFT_BLOCKS)):
                self._begin_earlier(a)
                self._multiply(a)
                self._finish(a, constants)
                a.add("r14", ROWS * (self.pitch or self.row_bytes))
            a.add("r12", self.panel_bytes)
            a.add_to_stored(kept(BIAS_AT), WIDTH * WORD)
            for place in (RESULT_AT, RESIDUAL_AT):
                a.add_to_stored(kept(place), WIDTH * SIZE)

    def _copy(self, a: TileAssembler) -> None:
        """The item's rows to the workspace, unless they are those of the item before.

        rsi: a pixel's places; rdx: its row, and rcx in it; r8: the image; r9: rows of a block that
        are left; r10: rows that are left.
        """
        a.load("rsi", At(base="rbx", distance=OF_IMAGE))
        a.move("rbp", "r13")
        a.add("rbp", BLOCK_BYTES + CONFIGURATION_BYTES)
        a.load("rax", kept(COPIED))
        a.compare("rax", "rsi")
        a.jump_if("je", "copied")
        a.store(kept(COPIED), "rsi")
        a.load("r8", IMAGE)
        a.load("r9", ZEROS)
        a.subtract("r9", "r8")
        a.store(kept(BESIDE), "r9")
        a.load("r10", At(base="rbx", distance=OF_BLOCKS))
        a.move("rdx", "rbp")
        # the last block has all its rows, of which the first are those of the block before
        with a.counted("copied block", "r10"):
            a.compare("r10", 1)
            a.jump_if("jne", "copied whole")
            a.load("rax", At(base="rbx", distance=OF_EARLIER))
            a.multiply("rax", self.taps * WORD)
            a.subtract("rsi", "rax")
            a.label("copied whole")
            a.set("r9", ROWS)
            with a.counted("row", "r9"):
                a.move("rcx", "rdx")
                self._copy_row(a)
                a.add("rdx", CACHE_LINE)
            a.add("rdx", ROWS * (self.row_bytes - CACHE_LINE))
        a.label("copied")

    def _copy_row(self, a: TileAssembler) -> None:
        """What the places of the filter see, one behind the other."""
        lines = self.seen // CACHE_LINE
        a.set("r11", self.taps)
        with a.counted("tap", "r11"):
            a.load_short("rax", At(base="rsi"))
            a.load_if_negative("rax", kept(BESIDE))
            a.add("rax", "r8")
            a.add("rsi", WORD)
            for i in range(lines):
                a.load_vector(2 + i % 8, At(base="rax", distance=i * CACHE_LINE))
                a.store_vector(At(base="rcx", distance=i * ROWS * CACHE_LINE), 2 + i % 8)
            a.add("rcx", lines * ROWS * CACHE_LINE)

    def _begin_earlier(self, a: TileAssembler) -> None:
        """Move the last block's rows back, where less than a block is left."""
        a.load("rax", kept(LEFT_BLOCKS))
        a.compare("rax", 1)
        a.jump_if("jne", "whole")
        a.load("rax", At(base="rbx", distance=OF_EARLIER))
        pitches = (("r14", self.pitch), ("r15", self.result), ("r11", self.residual or 0))
        for register, pitch in pitches:
            a.move("rcx", "rax")
            a.multiply("rcx", pitch)
            a.subtract(register, "rcx")
        a.label("whole")

    def _multiply(self, a: TileAssembler) -> None:
        """The block's rows by the panel: sums in tiles 0 to 3.

        rsi, r10: its upper and lower rows; rax: from one to the next; rcx, rdx: the panel.
        """
        for tile in range(4):
            a.zero_tile(tile)
        a.move("rsi", "r14")
        a.move("r10", "r14")
        a.add("r10", ROWS // 2 * (self.pitch or CACHE_LINE))
        a.set("rax", self.pitch or CACHE_LINE)
        a.move("rcx", "r12")
        a.set("rdx", CACHE_LINE)
        a.move("r9", "r12")
        a.add("r9", self.panel_bytes)
        with a.stepped("step", "rcx", PANEL_STEP_BYTES, "r9"):
            a.load_tile(4, At(base="rsi", index="rax"))
            a.load_tile(6, At(base="rcx", index="rdx"))
            a.multiply_tiles("tdpbf16ps", 0, 4, 6)
            a.load_tile(7, At(base="rcx", index="rdx", distance=TILE_BYTES))
            a.multiply_tiles("tdpbf16ps", 1, 4, 7)
            a.load_tile(5, At(base="r10", index="rax"))
            a.multiply_tiles("tdpbf16ps", 2, 5, 6)
            a.multiply_tiles("tdpbf16ps", 3, 5, 7)
            for register in ("rsi", "r10"):
                a.add(register, CACHE_LINE if self.pitch else ROWS * CACHE_LINE)

    def _finish(self, a: TileAssembler, constants: Constants) -> None:
        """Bias, residual, activation and rounding of the block's sums.

        rcx: a row of them; rax: constants.
        """
        a.set("rdx", WIDTH * WORD)
        for tile in range(4):
            down, along = divmod(tile, 2)
            distance = down * ROWS // 2 * WIDTH * WORD + along * CACHE_LINE
            a.store_tile(At(base="r13", index="rdx", distance=distance), tile)
        constants.begin(a)
        a.move("rcx", "r13")
        a.store_number(kept(LEFT_ROWS), ROWS // UNROLLED)
        with a.counted("rows", kept(LEFT_ROWS)):
            for row in range(UNROLLED):
                for v in BIASES:
                    x = SUMS + 2 * row + v
                    distance = row * WIDTH * WORD + v * CACHE_LINE
                    a.vector("vaddps", x, v, At(base="rcx", distance=distance))
                    if self.residual is not None:
                        at = row * self.residual + v * CACHE_LINE // 2
                        a.load_bfloat16(SPARE, At(base="r11", distance=at))
                        a.vector("vaddps", x, x, SPARE)
                    activate(a, self.activation, constants, x, SPARE)
                    at = row * self.result + v * CACHE_LINE // 2
                    a.store_bfloat16(At(base="r15", distance=at), x)
            a.add("rcx", UNROLLED * WIDTH * WORD)
            a.add("r15", UNROLLED * self.result)
            a.add("r11", UNROLLED * (self.residual or 0))


@functools.lru_cache(256)
def _machine_code(blocks: _Blocks) -> code.MachineCode:
    constants, tiles = Constants(AVX512), configuration([16] * 8, [CACHE_LINE] * 8)
    return code.MachineCode(blocks.written(constants, tiles).code(), constants, tiles)
