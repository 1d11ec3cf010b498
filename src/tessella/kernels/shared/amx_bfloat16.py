"""Convolutions of bfloat16 by the tiles of AMX, with bias, residual and activation around them.

A block of 32 pixels by 32 channels waits in four tiles while 32 channels of the image after another
are multiplied in. Tiles read a pixel's channels in one of four ways: where they lie in the image
(1×1); from a copy in a frame of zeros, in which what a place of the filter sees of neighbouring
results lies one behind the other (stride 1: some results beside the image's right edge are computed
too, and go to a place that nobody reads); or from a copy of all that the filter sees of each
result. Of an image of a few channels, as a network's first layer has, lines are copied with four
channels each, and a tile's rows overlap: one reads what a line of the filter sees. Copies are in
the workspace, of the rows that a thread takes at a time. Sums leave the tiles through the first
cache, where residual and activation are done to them; they begin as the bias.

Weights are packed as tiles read them: two channels of the image side by side for each channel of
the result. Where the last pixels or channels are less than a block, it begins earlier, and some of
them are computed twice, to the same numbers; of less than 32 channels the second tile's begin
earlier, down to 16 channels in all. A panel is of one group; groups of less than 32 channels are
multiplied some together, with weights of zero for what is another's: a number that is not finite
reaches the groups beside its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from tessella.core.errors import KernelError
from tessella.device.packing import packed
from tessella.device.x86 import code
from tessella.device.x86.code import CACHE_LINE, MAX_BYTES
from tessella.kernels.catalog import Config
from tessella.kernels.shared import x86_convolution as x86
from tessella.kernels.shared.amx_blocks import (
    CHUNKS,
    COPIED,
    DIRECT,
    FRAMED,
    LANES,
    LEAST_CHUNKED,
    PANEL_STEP_BYTES,
    PLACE,
    ROWS,
    SIZE,
    SPREAD,
    STEP,
    WIDTH,
    WORD,
    Blocks,
    Lines,
    machine_code,
)
from tessella.kernels.shared.x86_shares import edges
from tessella.kernels.shared.x86_tiles import Panels, pixel_bytes
from tessella.operations.problem import Problem

MOST_ROWS = 512  # of an item
SOME_ROWS = (256, 64)
# of all weights, which few rows read more often: more come from memory, where a search's do not
FEW_WEIGHT_BYTES = 2**18
PART_BYTES = 2**20  # of an item's rows: half of the second cache where tiles are
# of a layer: for so many threads at least, and two are done together. One thread takes as long for
# them as for four (BERT's products 0.96 to 1.00 of the time)
ITEMS, FORMER_ITEMS = 16, 4
FEW_CHANNELS = 16  # of the image: copies fill them up to 32 with zeros
MOST_SPREAD, MOST_LINES = 4, 16  # channels, and lines of a filter, which are spread
SOME_THREADS = 16  # have a part of the workspace in any case; more if it stays so small
MOST_BYTES = 2**24
MOST_TOGETHER = 8  # narrow groups


def fits(problem: Problem) -> str | None:
    if why := x86.refusal(problem):
        return why
    x, weight, y = problem["input"], problem["weight"], problem.output
    if x.dtype != "bfloat16":
        return "bfloat16"
    some = _together(problem)
    groups, read = problem.attrs["groups"] // some, some * weight.shape[1]
    few = read < FEW_CHANNELS and not may_be_spread(problem)
    if weight.shape[0] // groups < LANES or few:
        return f"{LANES} channels at least, {FEW_CHANNELS} of the input"
    if _pixels(problem) < ROWS:
        return f"{ROWS} pixels at least"
    images = (x, y, problem.epilogue.residual)
    if max(m.extent for m in images if m is not None) > MAX_BYTES:
        return "distances have 32 bits"
    return None


def _together(problem: Problem) -> int:
    """How many groups are multiplied together: so many that they fill a block, where they can."""
    groups = int(problem.attrs["groups"])
    own = problem["weight"].shape[0] // groups
    some = math.ceil(WIDTH / own) if groups > 1 else 1
    return some if some <= MOST_TOGETHER and groups % some == 0 else 1


def _read(problem: Problem) -> int:
    """The channels of the image that a group of blocks reads."""
    return _together(problem) * problem["weight"].shape[1]


def configs(problem: Problem) -> tuple[Config, ...]:
    """By the rows that a thread takes at a time, and how tiles reach them."""
    if may_be_spread(problem):
        rows = math.ceil(problem.output.shape[3] / ROWS) * ROWS
        return ({"rows": rows, "way": SPREAD, "chunks": 1, "items": ITEMS},)
    flat = problem["weight"].shape[2:] == (1, 1)
    if not flat and may_be_framed(problem):
        return ({"rows": MOST_ROWS, "way": FRAMED, "chunks": 1, "items": ITEMS},)
    most = max(1, PART_BYTES // _row_bytes(problem) // ROWS) * ROWS
    way = DIRECT if may_be_direct(problem) else COPIED
    is_small = problem["weight"].nbytes <= FEW_WEIGHT_BYTES
    counts = dict.fromkeys(min(n, most) for n in SOME_ROWS[: 1 + is_small])
    return tuple({"rows": n, "way": way, "chunks": 1, "items": ITEMS} for n in counts)


def former_configs(problem: Problem) -> tuple[Config, ...]:
    """Plans from before have no "items", and those before them no "chunks", which ask for more of
    the workspace: parts for more threads, and sums of all blocks of an item."""
    return tuple(
        {name: n for name, n in config.items() if name not in added}
        for config in configs(problem)
        for added in (("items",), ("items", "chunks"))
    )


def may_be_direct(problem: Problem) -> bool:
    """Whether a result sees one pixel of whole steps, and the next result the next one."""
    a = problem.attrs
    still = tuple(a["stride"]) == (1, 1) and tuple(a["padding"]) == (0, 0)
    return still and problem["weight"].shape[2:] == (1, 1) and _read(problem) % STEP == 0


def may_be_framed(problem: Problem) -> bool:
    """Whether neighbouring results see neighbouring pixels of a framed image."""
    y, stride = problem.output, tuple(problem.attrs["stride"])
    enough = math.prod((y.shape[2], _line(problem))) >= ROWS
    if stride != (1, 1) or _line(problem) < y.shape[3] or not enough:
        return False
    # Beside its own rows an item copies those that its last one sees: no more than are its own, or
    # than the other way copies, and few enough for the second cache
    filters, dilation = problem["weight"].shape[2:], problem.attrs["dilation"]
    down, along = ((n - 1) * int(d) for n, d in zip(filters, dilation, strict=True))
    more = down * _line(problem) + along
    if more <= MOST_ROWS:
        return True
    row_bytes, taps = _row_bytes(problem) // math.prod(filters), math.prod(filters)
    is_less = MOST_ROWS + more < MOST_ROWS * taps
    return is_less and (MOST_ROWS + more) * row_bytes <= PART_BYTES


def may_be_spread(problem: Problem) -> bool:
    """Whether a line of the filter sees at most 64 bytes of four channels, and a line of results
    is a few blocks: as the first layer of a network has it."""
    x, a = problem["input"], problem.attrs
    (_, channels, down, along), width = problem["weight"].shape, problem.output.shape[3]
    fits = channels <= MOST_SPREAD and along <= Lines.TOGETHER and down <= MOST_LINES
    still = tuple(a["dilation"]) == (1, 1) and a["stride"][1] in (1, 2, 4)
    return (
        fits
        and still
        and pixel_bytes(x) == channels * SIZE
        and a["padding"][1] <= Lines.TOGETHER
        and ROWS <= width <= MOST_ROWS
    )


def _spread(problem: Problem) -> Lines:
    """The lines of which a line of results is made."""
    (_, channels, down, along), a = problem["weight"].shape, problem.attrs
    width, before, vector = problem["input"].shape[3], int(a["padding"][1]), Lines.TOGETHER
    seen = (problem.output.shape[3] - 1) * int(a["stride"][1]) + along
    pixels = max(seen, before + math.ceil(width / vector) * vector)
    nbytes = math.ceil(pixels / vector) * vector * Lines.PIXEL
    return Lines(channels=channels, width=width, before=before, count=down, nbytes=nbytes)


def _line(problem: Problem) -> int:
    """Pixels of a framed image's line: what pads it on the right pads the next one on the left."""
    return problem["input"].shape[3] + int(problem.attrs["padding"][1])


def _row_bytes(problem: Problem) -> int:
    """What the filter sees, with zeros behind each pixel's channels."""
    filters = problem["weight"].shape[2:]
    return math.prod(filters) * math.ceil(_read(problem) / STEP) * CACHE_LINE


def _pixels(problem: Problem) -> int:
    """Of all images' results."""
    return problem.output.shape[0] * math.prod(problem.output.shape[2:])


def workspace_bytes(problem: Problem, **config: int) -> int:
    blocks = blocks_of(problem, config)
    return _threads(problem, blocks, config) * blocks.part_bytes + CACHE_LINE


def _threads(problem: Problem, blocks: Blocks, config: Mapping[str, int]) -> int:
    """How many threads have a part of the workspace."""
    more = not config or config.get("chunks")
    most = max(SOME_THREADS, MOST_BYTES // blocks.part_bytes if more else 0)
    return min(most, len(begins(problem, blocks)) * len(blocks.groups))


def blocks_of(problem: Problem, config: Mapping[str, int]) -> Blocks:
    x, y, residual = problem["input"], problem.output, problem.epilogue.residual
    config = config or configs(problem)[0]
    filters, dilation = problem["weight"].shape[2:], problem.attrs["dilation"]
    added = None if residual is None else pixel_bytes(residual)
    groups, way, line = problem.attrs["groups"] // _together(problem), config["way"], 0
    panels = Panels(channels=y.shape[1], vectors=2, lanes=LANES, groups=groups)
    offered = {
        FRAMED: may_be_framed(problem),
        DIRECT: may_be_direct(problem),
        COPIED: _read(problem) >= FEW_CHANNELS,
        SPREAD: may_be_spread(problem),
    }
    if (
        not offered.get(way)
        or config["rows"] % ROWS
        or not ROWS <= config["rows"] <= MOST_ROWS
        or config.get("items", ITEMS) not in (ITEMS, FORMER_ITEMS)
    ):
        raise KernelError(
            "no way of AMX's convolution",
            seen=dict(config),
            fix=f"take one of {configs(problem)}",
        )
    if way == FRAMED:
        line = _line(problem)
    down, along = (range(0, n * int(d), int(d)) for n, d in zip(filters, dilation, strict=True))
    rows = y.shape[2] * line if way == FRAMED else _pixels(problem)
    items = math.ceil(rows / config["rows"]) * (y.shape[0] if way == FRAMED else 1)
    seen, taps = _read(problem) * SIZE, tuple(r * line + s for r in down for s in along)
    spread = _spread(problem) if way == SPREAD else None
    step = int(problem.attrs["stride"][1])
    if spread is not None:
        seen = filters[1] * Lines.PIXEL
        taps = tuple(r * spread.nbytes // (step * Lines.PIXEL) for r in down)
        items = math.prod(y.shape[::2])
    wanted = config.get("items", FORMER_ITEMS)
    steps = len(taps) * math.ceil(seen / CACHE_LINE)
    chunk = next((n for n in CHUNKS if steps % n == 0), steps)
    few = way in (FRAMED, SPREAD) or steps < LEAST_CHUNKED or min(rows, config["rows"]) <= ROWS
    few |= not config.get("chunks")
    return Blocks(
        panels=panels,
        way=way,
        seen=seen,
        taps=taps,
        most_rows=config["rows"],
        chunk=steps if few else chunk,
        ahead=math.ceil(
            PANEL_STEP_BYTES / CACHE_LINE / math.ceil(min(rows, config["rows"]) / ROWS)
        ),
        together=math.ceil(len(panels.begins) / math.ceil(wanted / items)),
        pitches=(pixel_bytes(x), pixel_bytes(y), added),
        activation=problem.epilogue.activation,
        floor=float(problem.epilogue.floor),
        spread=spread,
        along=step,
    )


def begins(problem: Problem, blocks: Blocks) -> list[tuple[int, int, int]]:
    """Of each item: the image, the first row and how many it has, at least a block's."""
    images, _, height, width = problem.output.shape
    if blocks.way == SPREAD:
        return [(n, i * width, width) for n in range(images) for i in range(height)]
    total = _pixels(problem)
    if blocks.way == FRAMED:
        total = height * _line(problem)
    else:
        images = 1
    some = edges(math.ceil(total / ROWS), math.ceil(total / blocks.most_rows))
    return [
        (image, first := min(begin * ROWS, total - ROWS), min(end * ROWS, total) - first)
        for image in range(images)
        for begin, end in itertools.pairwise(some)
    ]


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: int) -> code.Launch:
    problem.require_constants(constants)
    blocks = blocks_of(problem, config)
    weight, bias = _weight(constants[1], blocks, _together(problem)), constants.get(2)
    if bias is None:
        bias = torch.zeros(problem.output.shape[1], dtype=torch.float32)
    bias = blocks.panels.laid_out(bias.float()).contiguous()
    places = _places(problem, blocks, constants[1])
    x = problem["input"]
    zeros = torch.zeros(x.shape[1] * (x.shape[3] if blocks.spread else 1), dtype=torch.float32)
    items = make_items(problem, blocks, weight, bias, places)
    _require_inside(problem, blocks, items, weight, bias, places)
    table = code.Table(items, weight, bias, *places, zeros)
    beside = zeros.data_ptr()

    def numbers(x: torch.Tensor, *more: torch.Tensor) -> tuple[int, ...]:
        *residual, out = more
        added = residual[0].data_ptr() if residual else 0
        return x.data_ptr(), out.data_ptr(), added, beside

    return code.Launch(
        machine_code(blocks),
        table,
        numbers,
        needed=workspace_bytes(problem, **config),
        parts=_threads(problem, blocks, config),
    )


def _weight(weight: torch.Tensor, blocks: Blocks, some: int) -> torch.Tensor:
    """[K, C, R, S] → [panels, steps, 2 tiles, 16, 16, 2]: pairs of what the filter sees, for 16
    channels each.

    Args:
        some: groups that are multiplied together.
    """
    panels, spread = blocks.panels, blocks.way == SPREAD

    def pack(w: torch.Tensor) -> torch.Tensor:
        filled, fill = x86.together(w, panels.own, some).permute(0, 2, 3, 1), functional.pad
        if spread:  # a line of the filter is a step
            filled = fill(filled, (0, MOST_SPREAD - w.shape[1])).flatten(2)
        filled = fill(filled, (0, -filled.shape[-1] % STEP))
        rows = panels.laid_out(filled.flatten(1))
        shape = (len(panels.begins), 2, WIDTH // 2, rows.shape[1] // STEP, STEP // 2, 2)
        return rows.reshape(shape).permute(0, 3, 1, 4, 2, 5).contiguous()

    return packed(weight, ("conv2d.amx_bf16", panels, spread, some), pack)


def _places(problem: Problem, blocks: Blocks, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What is read of the image, in bytes from its begin, -1 beside it; int32.

    Copied: [pixels of all images, places of the filter]. Spread: [lines, those beside the image as
    well]. Framed: [the framed pixels of one image], and [its results, those beside it as well, 2]:
    where one goes, -1 to nowhere, and its part of the residual.
    """
    if blocks.way == DIRECT:
        return ()
    x, y, a = problem["input"], problem.output, problem.attrs
    moved = [tuple(a[name]) for name in ("stride", "padding", "dilation")]
    (images, _, height, width), pitch = x.shape, blocks.pitches[0]

    def at(down: torch.Tensor, along: torch.Tensor) -> torch.Tensor:
        inside = (down >= 0) & (down < height) & (along >= 0) & (along < width)
        return torch.where(inside, (down * width + along) * pitch, -1)

    def line(axis: int, length: int) -> torch.Tensor:
        """Places along an axis that each result sees: [length, places of the filter]."""
        stride, padding, dilation = (int(m[axis]) for m in moved)
        first = torch.arange(length)[:, None] * stride - padding
        return first + torch.arange(weight.shape[2 + axis]) * dilation

    def copied(_: torch.Tensor) -> torch.Tensor:
        down, along = line(0, y.shape[2])[:, None, :, None], line(1, y.shape[3])[None, :, None]
        one = at(down, along).reshape(-1, len(blocks.taps))
        beyond = torch.arange(images)[:, None, None] * (height * width * pitch)
        return torch.where(one < 0, -1, one + beyond).to(torch.int32).flatten(0, 1)

    def framed(_: torch.Tensor) -> torch.Tensor:
        number = torch.arange(y.shape[2] * _line(problem) + max(blocks.taps))
        down, along = number // _line(problem), number % _line(problem)
        return at(down - moved[1][0], along - moved[1][1]).to(torch.int32)

    def results(_: torch.Tensor) -> torch.Tensor:
        number = torch.arange(y.shape[2] * _line(problem))
        down, along = number // _line(problem), number % _line(problem)
        pixel = down * y.shape[3] + along
        inside = along < y.shape[3]
        goes = torch.where(inside, pixel * blocks.pitches[1], -1)
        added = torch.where(inside, pixel * (blocks.pitches[2] or 0), 0)
        return torch.stack((goes, added), 1).to(torch.int32)

    def lines(_: torch.Tensor) -> torch.Tensor:
        number = torch.arange((y.shape[2] - 1) * moved[0][0] + weight.shape[2]) - moved[1][0]
        return at(number, 0 * number).to(torch.int32)

    key = (x.shape[blocks.way == FRAMED :], y.shape[2:], blocks.pitches, *moved)
    if blocks.way == SPREAD:
        return (packed(weight, ("conv2d.amx_bf16 lines", *key), lines),)
    if blocks.way == COPIED:
        return (packed(weight, ("conv2d.amx_bf16 copied", *key), copied),)
    return (
        packed(weight, ("conv2d.amx_bf16 framed", *key), framed),
        packed(weight, ("conv2d.amx_bf16 results", *key), results),
    )


def make_items(
    problem: Problem,
    blocks: Blocks,
    weight: torch.Tensor,
    bias: torch.Tensor,
    places: tuple[torch.Tensor, ...],
) -> npt.NDArray[np.int64]:
    """The table of the items that threads take one by one: some rows by some panels.

    A row: distances of image, result and residual; addresses of weight, bias and of the places of
    what is copied and of results; how many panels, and blocks of rows; how many rows the last block
    begins earlier; how many pixels are copied; and a number for the rows of a group, from 1.
    """
    groups = blocks.panels.groups
    each = len(blocks.panels.begins) // groups
    x, y = problem["input"], problem.output
    of_x, of_y, of_residual = blocks.pitches
    table = []
    for number, (image, begin, count) in enumerate(begins(problem, blocks)):
        first_x = image * math.prod(x.shape[2:]) * of_x
        first = image * math.prod(y.shape[2:])
        read = results = copies = 0
        if blocks.way == DIRECT:
            first_x, first = begin * of_x, begin
        elif blocks.way == COPIED:
            first, copies = begin, count
            read = places[0][begin].data_ptr()
        elif blocks.spread is not None:
            first, copies = first + begin, blocks.spread.count
            line = begin // y.shape[3] * int(problem.attrs["stride"][0])
            read = places[0][line].data_ptr()
        else:
            read, results = places[0][begin].data_ptr(), places[1][begin].data_ptr()
            copies = count + max(blocks.taps)
        many = math.ceil(count / ROWS)
        for panel, some in blocks.groups:
            column, group = blocks.panels.begins[panel] * SIZE, panel // each
            table.append((
                first_x + group * blocks.seen,
                first * of_y + column,
                first * (of_residual or 0) + column,
                weight[panel].data_ptr(),
                bias.data_ptr() + panel * WIDTH * WORD,
                read,
                results,
                some,
                many,
                many * ROWS - count,
                copies,
                number * groups + group + 1,
            ))  # fmt: skip
    return np.array(table, np.int64)


def _require_inside(
    problem: Problem,
    blocks: Blocks,
    items: npt.NDArray[np.int64],
    weight: torch.Tensor,
    bias: torch.Tensor,
    places: tuple[torch.Tensor, ...],
) -> None:
    """Refuse a table that leads out of a tensor, whoever wrote it."""
    (image, result, residual, panel, begin, read, goes, panels, many, earlier, copies,
     _) = torch.from_numpy(items).T  # fmt: skip
    x, y, added = problem["input"], problem.output, problem.epilogue.residual
    of_x, of_y, of_residual = blocks.pitches
    written = ((panels - 1) * WIDTH + blocks.panels.span) * SIZE
    count = many * ROWS - earlier
    code.require_inside("rows", earlier, 0 * earlier, ROWS - 1)
    code.require_inside("rows", count - ROWS, 0 * count, blocks.most_rows - ROWS)
    last = count - 1
    if blocks.way == DIRECT:
        code.require_inside("image", image, last * of_x + blocks.seen, x.extent)
    else:
        room = blocks.most_rows + (max(blocks.taps) if blocks.way == FRAMED else 0)
        read_bytes = blocks.seen
        if blocks.spread is not None:
            room, read_bytes = blocks.spread.count, x.shape[3] * of_x
        code.require_inside("workspace", 0 * copies, copies, room)
        furthest = torch.full_like(image, int(places[0].max()) + read_bytes)
        code.require_inside("image", image, furthest, x.extent)
        spans = copies * places[0][0].nbytes
        code.require_inside("places", read - places[0].data_ptr(), spans, places[0].nbytes)
    if blocks.way == FRAMED:
        spans = count * PLACE
        code.require_inside("results", goes - places[1].data_ptr(), spans, places[1].nbytes)
        furthest, of_added = (torch.full_like(image, int(n)) for n in places[1].amax(0))
    else:
        furthest, of_added = last * of_y, last * (of_residual or 0)
    code.require_inside("result", result, furthest + written, y.extent)
    if added is not None:
        code.require_inside("residual", residual, of_added + written, added.extent)
    first = weight.data_ptr()
    code.require_inside("weight", panel - first, panels * weight[0].nbytes, weight.nbytes)
    spans = panels * WIDTH * WORD
    code.require_inside("bias", begin - bias.data_ptr(), spans, bias.nbytes)
