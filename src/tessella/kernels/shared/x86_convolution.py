"""Convolutions on a CPU with AVX-512 or AVX2, in float32 or bfloat16, with all around them.

A tile of the result waits in registers, so many pixels by so many vectors of 16 or 8 channels,
while one channel of the image after another is multiplied in; bias, residual and activation are
done to it there. Of bfloat16 two channels at a time are multiplied, and sums are float32. Where the
pixels lie that a tile reads, a table says for each place of the filter, so that any stride, padding
and dilation is the same code; beside the image it points to zeros. What is read of the residual is
asked for when the tile begins, and is there when it ends; oneDNN waits for it. Where the weights of
a panel are more than the first cache holds, some channels of all pixels may be multiplied before
the next ones: sums then wait in the result. Where channels do not fill the last vectors, these
begin earlier, and some channels are computed twice, to the same numbers. Groups of fewer channels
than a vector has lanes are multiplied some together, with weights of zero for what is another's: a
number that is not finite reaches the groups beside its own.

Source: the table is the indirection buffer of Dukhan, "The Indirect Convolution Algorithm" (2019).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from tessella.core.errors import KernelError
from tessella.device.packing import packed
from tessella.device.x86 import code
from tessella.device.x86.assembler import AVX2, AVX512, Assembler, At, InstructionSet
from tessella.device.x86.code import CACHE_LINE, MAX_BYTES
from tessella.kernels.catalog import Config
from tessella.kernels.epilogue.x86 import (
    Constants,
    activate,
    activation_refusal,
    load_order,
    pack_int8,
    store_int8,
    store_packed,
    to_integers,
)
from tessella.kernels.shared.x86_ahead import Ahead
from tessella.kernels.shared.x86_tiles import (
    BIAS,
    COLUMN,
    LEFT_PANELS,
    OWN_ITEM,
    PANEL,
    PANELS,
    PIXELS,
    POINTERS,
    STACK,
    TAPS,
    WEIGHT,
    WORD,
    Panels,
    Tiles,
    kept,
    pixel_bytes,
)
from tessella.operations.problem import Problem

UNROLLED = 4  # words of a pixel, at most
MOST_HALVES = 2 * UNROLLED - 1  # channels of bfloat16 whose last word may be half a word
# products a cycle, of the best, by the vectors of a tile: one vector is as many loads as products
OF_BEST = {4: 1.0, 3: 1.0, 2: 0.95, 1: 0.75}
PASS_BYTES = (24 * 2**10, 128 * 2**10)  # of a panel's weights in a pass: first and second cache
# a register that tiles of two vectors or more leave, and the stack behind what all tiles keep
AHEAD = Ahead(
    pointer=POINTERS[7],
    step=kept(len(STACK) * code.NUMBER),
    end=kept((len(STACK) + 1) * code.NUMBER),
)
# of weights: twice as many and the second cache does not hold those of now as well
AHEAD_BYTES = {AVX512: 2**19, AVX2: 2**17}
AHEAD_LINES = {AVX512: 2, AVX2: 1}  # in a round, which reads 16 and 6 at most
KEPT_BYTES = (len(STACK) + 2) * code.NUMBER
MOST_TOGETHER = 4  # narrow groups
MIN_DEPTH = 32  # words of a pass; fewer are not worth reading and writing sums for


def fits(problem: Problem) -> str | None:
    x, weight, isa = problem["input"], problem["weight"], code.require_instructions()
    if rounds(problem):
        if problem.epilogue.residual is not None:
            return "adds no residual where it rounds to int8"
        problem = _not_rounded(problem)
    if why := refusal(problem):
        return why
    if (groups := _groups(problem)) is None:
        return f"groups by {isa.lanes} channels, or some together in a vector"
    depth = x.shape[1] // groups
    if weight.shape[0] // groups < isa.lanes or (depth * x.itemsize % WORD and depth > MOST_HALVES):
        return f"{isa.lanes} channels at least, those of the input by {WORD} bytes"
    return None


def _groups(problem: Problem) -> int | None:
    """How many groups tiles know: the problem's, or fewer where some are multiplied together to
    fill a vector; None where that multiplies more than ``MOST_TOGETHER`` times as much.
    """
    groups: int = problem.attrs["groups"]
    own = problem["weight"].shape[0] // groups
    some = math.ceil(code.require_instructions().lanes / own) if groups > 1 else 1
    return groups // some if some <= MOST_TOGETHER and groups % some == 0 else None


def rounds(problem: Problem) -> bool:
    """Whether the result of numbers in float32 is int8."""
    return (problem["input"].dtype, problem.output.dtype) == ("float32", "int8")


def _not_rounded(problem: Problem) -> Problem:
    """The problem whose result is what is rounded, before its factor."""
    attrs = {name: a for name, a in problem.attrs.items() if name not in ("dtype", "gamma")}
    return replace(problem, outputs=(replace(problem.output, dtype="float32"),), attrs=attrs)


def refusal(problem: Problem) -> str | None:
    """Why no convolution of ours in machine code takes a problem, whatever its groups."""
    x, y = problem["input"], problem.output
    epilogue, residual = problem.epilogue, problem.epilogue.residual
    if problem.is_constant("input"):
        return "its input is a constant"
    bias = () if epilogue.bias is None else ("bias",)
    if not all(map(problem.is_constant, ("weight", *bias))):
        return "weight and bias must be constants"
    if problem.plain:
        return problem.plain
    if why := activation_refusal(epilogue.activation):
        return why
    if {t.dtype for t in (*problem.inputs, y) if t is not None} not in ({"float32"}, {"bfloat16"}):
        return "float32 or bfloat16 throughout"
    if x.dtype == "bfloat16" and not code.has_bfloat16():
        return "this CPU has no bfloat16 instructions"
    if residual is not None and residual.shape != y.shape:
        return "the residual is not like the result"
    images = [m for m in (x, y, residual) if m is not None]
    if any(m.pixel_pitch is None for m in images):
        return "a pixel's channels must lie together"
    if 0 in y.shape:
        return "nothing to make"
    if max(math.prod(m.shape[2:]) * pixel_bytes(m) for m in images) > MAX_BYTES:
        return "distances have 32 bits"
    return None


def configs(problem: Problem) -> tuple[Config, ...]:
    """Tiles of many channels and fewer pixels, or the other way around; at once or in passes."""
    isa, channels = code.require_instructions(), own_channels(problem)
    wide = widths(channels, isa)
    depths = [
        (vectors, _depth(problem, vectors * isa.lanes))
        for vectors in wide
        if channels % (vectors * isa.lanes) == 0  # sums cannot wait where others are written
    ]
    return (
        *({"vectors": vectors} for vectors in wide),
        *({"vectors": vectors, "depth": depth} for vectors, depth in depths if depth),
    )


def own_channels(problem: Problem) -> int:
    """The channels that a group of tiles makes."""
    return problem["weight"].shape[0] // (_groups(problem) or 1)


def widths(channels: int, isa: InstructionSet) -> list[int]:
    """The vectors of a tile that are worth trying: those that compute the fewest channels twice."""
    worth = {
        vectors: Panels(channels=channels, vectors=vectors, lanes=isa.lanes).computed
        for vectors in PIXELS[isa]
        if (vectors - 1) * isa.lanes < channels
    }
    return sorted(worth, key=lambda vectors: (worth[vectors] / OF_BEST[vectors], -vectors))[:2]


def _depth(problem: Problem, width: int) -> int | None:
    """How many of a pixel's words a pass should take, None for all: sums are kept as float32."""
    x, taps = problem["input"], math.prod(problem["weight"].shape[2:])
    words = x.shape[1] // (_groups(problem) or 1)
    if x.itemsize != WORD or rounds(problem):
        return None
    for limit in PASS_BYTES:
        most = min(limit // (taps * width * WORD), words - 1)
        for depth in range(most // UNROLLED * UNROLLED, MIN_DEPTH - 1, -UNROLLED):
            if words % depth == 0:
                return depth
    return None


def bind(
    problem: Problem,
    constants: Mapping[int, torch.Tensor],
    *,
    vectors: int | None = None,
    depth: int | None = None,
) -> code.Launch:
    vectors = configs(problem)[0]["vectors"] if vectors is None else vectors
    problem.require_constants(constants)
    x = problem["input"]
    groups = _groups(problem) or 1
    of_pixel = x.shape[1] // groups * x.itemsize
    words = math.ceil(of_pixel / WORD)
    depth = words if depth is None else depth
    gamma = float(problem.epilogue.gamma) if rounds(problem) else None
    ends_half = of_pixel % WORD != 0
    tiles = _Tiles.of(
        problem, vectors, groups=groups, words=words, depth=depth, gamma=gamma, ends_half=ends_half
    )
    if (tiles.panels.overlap or gamma) and depth != words:
        raise KernelError(
            "sums of a pass cannot wait where another panel's are, or in int8",
            seen=f"{problem.output.shape[1]} channels by {vectors} vectors, {depth} words a pass",
            fix="leave out depth",
        )
    some = problem.attrs["groups"] // groups
    return tiles.bound(problem, constants, _weight(constants[1], tiles.panels, depth, some))


def _weight(weight: torch.Tensor, panels: Panels, depth: int, some: int) -> torch.Tensor:
    """[K, C, R, S] → [panels, passes, R·S, words of a pass, width, in a word]: as a tile reads
    it. The last of an odd number of channels in bfloat16 is read twice, with half its weight.

    Args:
        some: groups that are multiplied together.
    """
    inside = WORD // weight.itemsize
    taps = math.prod(weight.shape[2:])

    def pack(w: torch.Tensor) -> torch.Tensor:
        w = together(w, panels.own, some)
        if w.shape[1] % inside:
            w = torch.cat((w[:, :-1], w[:, -1:] / 2, w[:, -1:] / 2), 1)
        passes = w.shape[1] // (depth * inside)
        shape = (len(panels.begins), -1, passes, depth, inside, taps)
        parts = panels.laid_out(w).reshape(shape)
        return parts.permute(0, 2, 5, 3, 1, 4).contiguous()

    return packed(weight, ("conv2d.x86", panels, depth, some), pack)


def together(weight: torch.Tensor, own: int, some: int) -> torch.Tensor:
    """[K, C, R, S] of narrow groups → [K, some · C, R, S] of ``own`` channels, with zeros."""
    if some == 1:
        return weight
    channels, window = weight.shape[1], weight.shape[2:]
    parts = weight.detach().reshape(-1, some, own // some, channels, *window)
    made = parts.new_zeros(len(parts), some, own // some, some, channels, *window)
    for i in range(some):
        made[:, i, :, i] = parts[:, i]
    return made.reshape(-1, some * channels, *window)


@dataclass(frozen=True, kw_only=True)
class _Tiles(Tiles):
    """Tiles of sums over all channels of a pixel. Behind the sums are the vectors of the weight
    and, as many as are left up to two, of the image's numbers.

    Attributes:
        words: of a pixel of the image; ``depth`` of them in a pass.
        gamma: what an int8 result is multiplied by before it is rounded; None for others.
        ends_half: a pixel's last word is one number of bfloat16.
    """

    words: int
    depth: int
    ends_half: bool
    gamma: float | None

    @property
    def _pass_bytes(self) -> int:
        """Of a panel's weights."""
        return self.taps * self.depth * self.width * WORD

    @property
    def _asks_ahead(self) -> bool:
        """Whether the next pass's weights are asked for: tiles of few pixels do."""
        has_register = self.pixels <= POINTERS.index(AHEAD.pointer)
        return has_register and self._pass_bytes <= AHEAD_BYTES[self.isa]

    @property
    def _taken(self) -> int:
        """The first vector behind the sums."""
        return self.vectors * self.pixels

    def written(self, constants: Constants) -> Assembler:
        """The code.

        rdi: the call; rbp: the tile's places; r13, r12: the tile in the result and the residual;
        rcx, rdx: where the weight is read, and how far the pixels.
        """
        a = Assembler(self.isa)
        kept_bytes = KEPT_BYTES if self._asks_ahead else len(STACK) * code.NUMBER
        self._begin_item(a, kept_bytes)
        a.store(kept(OWN_ITEM), "rbx")
        for place, source in ((PANEL, WEIGHT), (LEFT_PANELS, PANELS)):
            a.load("rax", At(base="rbx", distance=source))
            a.store(kept(place), "rax")
        a.store_number(kept(COLUMN), 0)
        a.label("panel")
        for number in range(self.words // self.depth):
            self._pass(a, number, constants)
        a.add_to_stored(kept(COLUMN), self.width * self.size)
        a.add_to_stored(kept(LEFT_PANELS), -1)
        a.jump_if("jne", "panel")
        self._end_items(a, kept_bytes)
        return a

    def _pass(self, a: Assembler, number: int, constants: Constants) -> None:
        """All tiles of the item, and ``depth`` words of their pixels."""
        name = f"pass {number}"
        if self._asks_ahead:
            a.load(AHEAD.pointer, kept(PANEL))
            AHEAD.begin(a, self._pass_bytes)
        self._each_tile(a, name, lambda n, pixels: self._tile(a, n, pixels, number, constants))
        a.add_to_stored(kept(PANEL), self._pass_bytes)

    def _tile(
        self, a: Assembler, name: str, pixels: int, number: int, constants: Constants
    ) -> None:
        places = self._places(pixels)
        is_last = (number + 1) * self.depth == self.words
        if number == 0:
            self._begin(a, pixels)
        for i, (p, v) in enumerate(places if number else ()):
            a.load_vector(i, self._of_result(p, v))
        for p, v in places if is_last else ():
            added = self._of_residual(p, v)
            if added is not None and self._column(v) % CACHE_LINE == 0:
                a.prefetch(added)
        a.load("rcx", kept(PANEL))
        a.store_number(kept(TAPS), self.taps)
        a.label(f"{name} tap")
        a.once(("addresses", pixels), lambda: self._addresses(a, pixels))
        a.add("rbp", 4 * pixels)
        self._multiply(a, f"{name} channel", pixels, number)
        a.add_to_stored(kept(TAPS), -1)
        a.jump_if("jne", f"{name} tap")
        if is_last:
            constants.begin(a)
        for i, (p, v) in enumerate(places):
            if is_last:
                self._finish(a, i, p, v, constants)
            if self.gamma is None:
                self._store(a, self._of_result(p, v), i)
            else:
                a.vector("vmulps", i, i, constants.at(self.gamma))
                to_integers(a, constants, i)
                self._store_int8(a, self._of_result(p, v), i, constants)
        if self._asks_ahead:
            AHEAD.pace(a, f"{name} asked", "rax")

    def _store_int8(self, a: Assembler, to: At, x: int, constants: Constants) -> None:
        if self.isa == AVX2:
            store_int8(a, to, (x,), self._taken)
        else:
            load_order(a, constants, self._taken)
            store_packed(a, to, pack_int8(a, constants, (x,), self._taken), 1)

    def _multiply(self, a: Assembler, label: str, pixels: int, number: int) -> None:
        """The pass's words of the tile's pixels under one tap."""
        unrolled = next(n for n in range(UNROLLED, 0, -1) if self.depth % n == 0)
        a.set("rdx", number * self.depth * WORD)
        a.label(label)
        key = "multiply", self.size, self.vectors, self.pixels, pixels, unrolled, self.ends_half
        a.once(key, lambda: self._products(a, pixels, unrolled))
        for _ in range(AHEAD_LINES[self.isa] if self._asks_ahead else 0):
            AHEAD.line(a)
        a.add("rcx", unrolled * self.width * WORD)
        a.add("rdx", unrolled * WORD)
        a.compare("rdx", (number + 1) * self.depth * WORD)
        a.jump_if("jne", label)

    def _addresses(self, a: Assembler, pixels: int) -> None:
        for p in range(pixels):
            self._address(a, POINTERS[p], p)

    def _products(self, a: Assembler, pixels: int, words: int) -> None:
        multiply = "vdpbf16ps" if self.size == 2 else "vfmadd231ps"
        taken, spread = self._taken, self._taken + self.vectors
        spreads = min(2, self.isa.vectors - spread)
        for word in range(words):
            for v in range(self.vectors):
                distance = (word * self.vectors + v) * self.isa.vector_bytes
                a.load_vector(taken + v, At(base="rcx", distance=distance))
            for p in range(pixels):
                of_pixel = spread + p % spreads
                read = At(base=POINTERS[p], index="rdx", distance=word * WORD)
                if self.ends_half and word == words - 1:
                    a.broadcast_short(of_pixel, read)
                else:
                    a.broadcast(of_pixel, read)
                for v in range(self.vectors):
                    a.vector(multiply, p * self.vectors + v, taken + v, of_pixel)

    def _begin(self, a: Assembler, pixels: int) -> None:
        """The sums, which begin as the bias of the panel."""
        if self.has_bias:
            a.load("rbx", kept(OWN_ITEM))
            a.load("rax", At(base="rbx", distance=BIAS))
            for _ in range(WORD // self.size):  # the column's distance in float32
                a.add_stored("rax", kept(COLUMN))
        self._begin_sums(a, pixels, "rax")

    def _finish(
        self, a: Assembler, sums: int, pixel: int, vector: int, constants: Constants
    ) -> None:
        """Add the residual, and activate."""
        added = self._of_residual(pixel, vector)
        if added is not None and self.size == WORD:
            a.vector("vaddps", sums, sums, added)
        elif added is not None:
            a.load_bfloat16(self._taken + 1, added)
            a.vector("vaddps", sums, sums, self._taken + 1)
        activate(a, self.activation, constants, sums, self._taken, floor=self.floor)
