"""How pixels lie in tiles of AMX: in lines of an image, or in rows of what each pixel reads.

A tile's rows lie equally far apart, so that it may hold what one place of a filter reads for pixels
of one line of the result. They are read from the image, or from a copy of some of its lines with
the padding around them. In a copy what a line of the filter reads lies in one piece.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from tessella.device.x86.assembler import Assembler, At
from tessella.device.x86.tiles import ROW_BYTES, ROWS
from tessella.kernels.shared.x86_tiles import BASE, ZEROS, indirection, kept, pixel_bytes
from tessella.operations.problem import Problem

WINDOW_BYTES = 2**17  # of lines that are copied
LARGEST_WINDOW = 40  # steps: all are written out
LEAST_ROWS = 8  # of a tile of pixels in one line: fewer leave too much of a tile empty
MOST_BUFFER_BYTES = 2**18  # of copies: a thread's part of the workspace
MOST_COPIES = 512  # vectors of a pixel, which are written out


@dataclass(frozen=True, kw_only=True)
class Window:
    """Tiles of pixels in lines of the result, which read what lies under the filter step by step.

    Attributes:
        tiles: of a block.
        rows: of a tile.
        lines: of the result.
        width: of a line, in pixels.
        pitch: bytes from a pixel of the image or of its copy to the next.
        image: pixels of a line of the same, and how many lines.
        stride: of the filter, down and along.
        places: distances in bytes of what each step reads.
        reach: lines that a line of the result reads, from the first to the last.
        copied: the image is copied with its padding.
        before: pixels of padding in front of a line of the image, and behind it, where lines of the
            image lie in one piece; else None, and each pixel is copied.
    """

    tiles: int
    rows: int
    lines: int
    width: int
    pitch: int
    image: tuple[int, int]
    stride: tuple[int, int]
    places: tuple[int, ...]
    reach: int
    copied: bool
    before: int | None

    @property
    def pixels(self) -> int:
        """Of a block, which lie one after another in the result."""
        return self.tiles * self.rows

    @property
    def together(self) -> int:
        """Lines of a block."""
        return 2 if self.width < self.pixels else 1

    @property
    def blocks(self) -> int:
        """In so many lines as ``together`` says; the last of a line may begin earlier."""
        return math.ceil(self.width / self.pixels)

    @property
    def is_exact(self) -> bool:
        """Whether no pixel is computed twice."""
        return self.together * self.width == self.blocks * self.pixels

    @property
    def line_bytes(self) -> int:
        """From a line of the image to the next."""
        return self.image[0] * self.pitch

    @property
    def along(self) -> int:
        """Bytes from what a pixel of the result reads to what the next one does."""
        return self.stride[1] * self.pitch

    @property
    def second(self) -> int:
        """From the first tile of a block to its second."""
        return self.stride[0] * self.line_bytes if self.together == 2 else self.rows * self.along

    def read(self, lines: int) -> int:
        """Lines of the image that so many of the result read."""
        return (lines - 1) * self.stride[0] + self.reach

    @property
    def most_lines(self) -> int:
        """Lines of the result whose copy an item holds."""
        most = self.lines
        while (
            self.copied
            and most > self.together
            and self.read(most) * self.line_bytes > WINDOW_BYTES
        ):
            most -= self.together
        return most


def window_of(problem: Problem, tiles: int) -> Window | None:
    """How the tiles of a problem lie in lines, or None where they do not.

    What a line of the filter reads lies in one piece in the copy of an image, so that its channels
    need not fill the rows of tiles: zeros are multiplied by what is behind.
    """
    x, weight, y, a = problem["input"], problem["weight"], problem.output, problem.attrs
    (lines, width), (_, channels, r, s) = y.shape[2:], weight.shape
    stride, padding, dilation = (tuple(map(int, a[n])) for n in ("stride", "padding", "dilation"))
    fills = channels % ROW_BYTES == 0
    if not fills and dilation[1] != 1:
        return None
    rows = _rows_of_lines(lines, width, tiles)
    if rows is None or steps_of(problem) > LARGEST_WINDOW:
        return None
    copied = any(padding) or not fills
    pitch = channels if copied else pixel_bytes(x)
    height, along = (n + 2 * p for n, p in zip(x.shape[2:], padding, strict=True))
    of_place = (
        [j * dilation[1] * pitch + k for j in range(s) for k in range(0, channels, ROW_BYTES)]
        if fills
        else list(range(0, s * channels, ROW_BYTES))
    )
    made = Window(
        tiles=tiles,
        rows=rows,
        lines=lines,
        width=width,
        pitch=pitch,
        image=(along, height),
        stride=(stride[0], stride[1]),
        places=tuple(i * dilation[0] * along * pitch + k for i in range(r) for k in of_place),
        reach=(r - 1) * dilation[0] + 1,
        copied=copied,
        before=padding[1] if pixel_bytes(x) == channels else None,
    )
    size = made.read(made.most_lines) * made.line_bytes
    return None if copied and size > MOST_BUFFER_BYTES else made


def is_direct(problem: Problem) -> bool:
    """Whether a pixel's numbers lie as tiles read them."""
    weight, a = problem["weight"], problem.attrs
    plain = tuple(a["stride"]) == (1, 1) and tuple(a["padding"]) == (0, 0)
    return plain and weight.shape[2:] == (1, 1) and weight.shape[1] % ROW_BYTES == 0


def copies_refusal(problem: Problem) -> str | None:
    """Why what each pixel reads cannot be copied, or None."""
    taps = math.prod(problem["weight"].shape[2:])
    if taps * math.ceil(problem["input"].shape[1] / ROW_BYTES) > MOST_COPIES:
        return f"at most {MOST_COPIES} vectors of 64 numbers for each result"
    if 2 * ROWS * row_bytes(problem) > MOST_BUFFER_BYTES:
        return "32 pixels are more than a part of the workspace should hold"
    return None


def _rows_of_lines(lines: int, width: int, tiles: int) -> int | None:
    """The rows of a tile by which blocks of them fill lines best."""
    if tiles == 2 and LEAST_ROWS <= width <= ROWS and lines % 2 == 0:
        return width
    most = min(ROWS, width // tiles)
    if most < LEAST_ROWS:
        return None
    return min(
        range(most, LEAST_ROWS - 1, -1), key=lambda r: math.ceil(width / (tiles * r)) * (r + 2)
    )


def steps_of(problem: Problem) -> int:
    """Steps of a block in lines, where each line of the filter begins with one."""
    _, channels, r, s = problem["weight"].shape
    return r * math.ceil(s * channels / ROW_BYTES)


def steps_in_a_row(problem: Problem) -> int:
    """Steps of a block of pixels whose numbers lie in one piece."""
    return math.ceil(math.prod(problem["weight"].shape[1:]) / ROW_BYTES)


def row_bytes(problem: Problem) -> int:
    """Of a pixel that was copied: rows that lie a power of two apart take each other's place in the
    first cache.
    """
    made = steps_in_a_row(problem) * ROW_BYTES
    return made + ROW_BYTES if made % 1024 == 0 else made


def rows_of_pixels(pixels: int, tiles: int) -> tuple[int, int]:
    """The rows of a tile and the tiles of a block, so many at most, by which few pixels are
    computed twice.
    """
    if pixels <= ROWS:
        return pixels, 1
    most = min(ROWS, pixels // tiles)
    return min(
        range(most, most // 2, -1),
        key=lambda rows: (math.ceil(pixels / (tiles * rows)) * (rows + 2), -rows),
    ), tiles


def places_of_image(problem: Problem, weight: torch.Tensor, window: Window) -> torch.Tensor:
    """Where each pixel of the image with its padding lies, -1 beside it: a row for each line."""
    around, image = tuple(problem.attrs["padding"]), problem["input"]
    grid = replace(image, shape=(1, 1, *reversed(window.image)), strides=None)
    alone = {"stride": (1, 1), "padding": around, "dilation": (1, 1), "groups": 1}
    asked = replace(
        problem,
        inputs=(image, replace(problem["weight"], shape=(1, 1, 1, 1))),
        outputs=(grid,),
        attrs=alone,
        constant=(1,),
    )
    return indirection(asked, weight, 1)


def copy_lines(a: Assembler, window: Window, before: int) -> None:
    """Code that copies lines of the image with zeros around them.

    Stores that go too far are covered later. rbp: the places; r10: where to; r9: so many pixels.

    Args:
        before: ``window.before``.
    """
    zero, around, pixels = 0, before * window.pitch, window.image[0]
    whole, rest = divmod((pixels - 2 * before) * window.pitch, ROW_BYTES)
    a.vector("vxorps", zero, zero, zero)
    if rest:
        a.set("rax", (1 << rest) - 1)
        a.mask(2, "rax")
    a.label("line")
    a.move("rcx", "r10")
    a.load_short("rsi", At(base="rbp", distance=4 * before))
    a.compare("rsi", 0)
    a.jump_if("jl", "beside")
    a.add_stored("rsi", kept(BASE))
    for i in range(0, around, ROW_BYTES):
        a.store_vector(At(base="r10", distance=i), zero)
    a.add("rcx", around)
    if whole:
        a.set("rdx", whole)
        with a.counted("piece", "rdx"):
            a.load_vector(1, At(base="rsi"))
            a.store_vector(At(base="rcx"), 1)
            a.add("rsi", ROW_BYTES)
            a.add("rcx", ROW_BYTES)
    if rest:
        a.load_vector(1, At(base="rsi"), mask=2)
        a.store_vector(At(base="rcx"), 1)
        a.add("rcx", rest)
    for i in range(0, around, ROW_BYTES):
        a.store_vector(At(base="rcx", distance=i), zero)
    a.jump("line copied")
    a.label("beside")
    a.set("rdx", math.ceil(window.line_bytes / ROW_BYTES))
    with a.counted("zeros", "rdx"):
        a.store_vector(At(base="rcx"), zero)
        a.add("rcx", ROW_BYTES)
    a.label("line copied")
    a.add("rbp", 4 * pixels)
    a.add("r10", window.line_bytes)
    a.subtract("r9", pixels)
    a.jump_if("jne", "line")


def copy_pixels(a: Assembler, channels: int, places: int, step: int) -> None:
    """Code that copies pixels' numbers, under each place of a filter one place after another.

    Stores go as far as 63 bytes behind a pixel. rbp: the places; r10: where to; r9: so many pixels;
    mask 1: of a pixel's last numbers that fill no vector.

    Args:
        places: of a pixel.
        step: bytes from a pixel's copy to the next.
    """
    whole, rest = divmod(channels, ROW_BYTES)
    spread = 0
    with a.counted("copied", "r9"):
        for place in range(places):
            source = ("rax", "rcx", "rdx", "rsi")[place % 4]
            a.load_short(source, At(base="rbp", distance=4 * place))
            a.load_if_negative(source, kept(ZEROS))
            a.add_stored(source, kept(BASE))
            for i in range(whole + (rest > 0)):
                numbers = At(base=source, distance=i * ROW_BYTES)
                a.load_vector(spread, numbers, mask=1 if i == whole else 0)
                to = place * channels + i * ROW_BYTES  # the next place covers what is behind
                a.store_vector(At(base="r10", distance=to), spread)
                spread = (spread + 1) % 8
        a.add("rbp", 4 * places)
        a.add("r10", step)
