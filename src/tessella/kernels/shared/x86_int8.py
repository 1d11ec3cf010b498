"""Convolutions of int8 on a CPU with AVX2 or VNNI, with scale, bias, residual, activation and
rounding.

A tile of the result waits in registers while words of four channels are multiplied in, uint8 by
int8 (``vpmaddubsw``), which leaves sums of two products in 16 bits. As many words as these hold,
by the weights that there are, are added before their sums are widened to 32 bits: of a trained
layer's weights four to eight, where other libraries widen each word's. Nothing is rounded or
saturated before the end. The image's numbers are uint8 as they are where none is below zero
(``non_negative``), else 128 more, which the sums begin below zero for.

Where registers do not hold both, the 32-bit sums wait on the stack: a wider tile reads its weights
less often. With VNNI (``x86_vnni_int8``) a word's products are added in 32 bits at once.

Source: the table of places is that of ``shared.x86_tiles``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tessella.core.errors import KernelError
from tessella.device.packing import packed
from tessella.device.x86 import code
from tessella.device.x86.assembler import AVX2, AVX512, Assembler, At
from tessella.device.x86.code import MAX_BYTES
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
    POINTERS,
    STACK,
    TAPS,
    WEIGHT,
    WORD,
    Tiles,
    kept,
    pixel_bytes,
)
from tessella.operations.problem import Problem

# tiles whose sums of both widths take all registers, and one whose wide sums wait on the stack
TILES = ((2, 6), (2, 3), (1, 7))  # vectors, pixels
VNNI_TILES = {AVX512: ((4, 6), (2, 7), (1, 7)), AVX2: ((2, 6), (1, 7))}
MOST_PRODUCTS = 2**16  # 255 · 128 · 2¹⁶ fits 32 bits
LONGEST = 8  # words whose sums are added in 16 bits
WIDE = "sums of two products leave 16 bits"
LOWEST, HIGHEST = -(2**15), 2**15 - 1  # of 16 bits
UNROLLED = 4
SHIFT = 128

# on the stack, behind what all tiles keep
NUMBERS, CALLER = len(STACK) * code.NUMBER, (len(STACK) + 1) * code.NUMBER
AHEAD = Ahead(pointer=POINTERS[7], step=kept(CALLER + code.NUMBER), end=kept(CALLER + 16))
ONES, SHIFTS, SUMS = 96, 128, 160
ALIGNED = 6  # bits of an address that are 0: vectors do not cross the cache's lines


def fits(problem: Problem) -> str | None:
    if problem.attr("wide_sums"):
        return WIDE
    return words_refusal(problem)


def words_refusal(problem: Problem) -> str | None:
    """Why no layer that multiplies words of four channels takes a problem, whatever its weights."""
    if problem["weight"].shape[1] % WORD:
        return f"channels of the input by {WORD}"
    return refusal(problem)


def refusal(problem: Problem) -> str | None:
    """Why no layer of int8 in machine code takes a problem, however many channels its input has."""
    x, weight, y = problem["input"], problem["weight"], problem.output
    epilogue = problem.epilogue
    residual = epilogue.residual
    vectors = [name for name in ("bias", "scale") if problem.get(name) is not None]
    if problem.is_constant("input"):
        return "its input is a constant"
    if why := activation_refusal(epilogue.activation):
        return why
    if not all(map(problem.is_constant, ("weight", *vectors))):
        return "weight, bias and scale must be constants"
    if (x.dtype, weight.dtype) != ("int8", "int8"):
        return f"multiplies int8, not {x.dtype} × {weight.dtype}"
    if y.dtype not in ("int8", "float32"):
        return f"makes int8 or float32, not {y.dtype}"
    if any(m is not None and m.dtype != "float32" for m in (epilogue.bias, epilogue.scale)):
        return "bias and scale must be float32"
    if residual is not None and (residual.dtype, residual.shape) != (y.dtype, y.shape):
        return "the residual is not like the result"
    if problem.attrs["groups"] != 1:
        return "one group"
    lanes = code.require_instructions().lanes
    if weight.shape[0] < lanes:
        return f"{lanes} channels at least"
    images = [m for m in (x, y, residual) if m is not None]
    if any(m.pixel_pitch is None for m in images):
        return "a pixel's channels must lie together"
    if 0 in (*x.shape, *y.shape):
        return "nothing to make"
    if max(math.prod(m.shape[2:]) * pixel_bytes(m) for m in images) > MAX_BYTES:
        return "distances have 32 bits"
    if math.prod(weight.shape[1:]) > MOST_PRODUCTS:
        return f"at most {MOST_PRODUCTS} products"
    return None


def configs(problem: Problem) -> tuple[Config, ...]:
    return tiles_of(problem, TILES)


def tiles_of(problem: Problem, tiles: Sequence[tuple[int, int]]) -> tuple[Config, ...]:
    """Those tiles whose vectors the result's channels fill."""
    channels, lanes = problem["weight"].shape[0], code.require_instructions().lanes
    return tuple(
        {"vectors": vectors, "pixels": pixels}
        for vectors, pixels in tiles
        if vectors * lanes <= channels
    )


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: int) -> code.Launch:
    return bound(problem, constants, config, configs(problem), vnni=False)


def bound(
    problem: Problem,
    constants: Mapping[int, torch.Tensor],
    config: Config,
    known: Sequence[Config],
    *,
    vnni: bool,
) -> code.Launch:
    """``bind`` with one of the tiles that are known, by default the first."""
    problem.require_constants(constants)
    config = one_of(known, config)
    signed = not problem.attr("non_negative")
    chain = 1 if vnni else _chain(constants[1], signed=signed)
    if not chain:
        raise KernelError(
            WIDE,
            seen=f"weights of {constants[1].abs().max()}, numbers up to {_most(signed)}",
            fix="quantize the weights to 7 bits, or choose another algorithm",
        )
    tiles = _Tiles.of(
        problem,
        **config,
        words=problem["input"].shape[1] // WORD,
        chain=chain,
        vnni=vnni,
        signed=signed,
        **epilogue_of(problem, constants),
    )
    return tiles.bound(problem, constants, _weight(constants[1], tiles))


def one_of(known: Sequence[Config], config: Config) -> Config:
    """The configuration, or the first where none is named.

    Raises:
        KernelError: it is none that is known.
    """
    if config and config not in known:
        raise KernelError(
            "no such tile", seen=config, fix=f"take one of {', '.join(map(str, known))}"
        )
    return config or known[0]


def _weight(weight: torch.Tensor, tiles: _Tiles) -> torch.Tensor:
    """[K, C, R, S] → [panels, R·S, words, width, 4]: as a tile reads it."""
    panels = tiles.panels

    def pack(w: torch.Tensor) -> torch.Tensor:
        parts = panels.laid_out(w).reshape(len(panels.begins), -1, tiles.words, WORD, tiles.taps)
        return parts.permute(0, 4, 2, 1, 3).contiguous()

    return packed(weight, ("conv2d.x86_int8", panels), pack)


def sums_are_wide(weight: torch.Tensor, *, signed: bool) -> bool:
    """Whether sums of two products leave 16 bits, of a weight [K, C, …] whose channels are words.

    Args:
        signed: the image's numbers may be below zero.
    """
    return weight.shape[1] % WORD == 0 and not _chain(weight, signed=signed)


def _most(signed: bool) -> int:
    """The largest number that is multiplied: 128 is added to those of an image that has signs."""
    return SHIFT + 127 if signed else 127


def _chain(weight: torch.Tensor, *, signed: bool) -> int:
    """How many words' products 16 bits hold, of these weights; 0 if not one word's."""
    most = _most(signed)

    def longest(w: torch.Tensor) -> torch.Tensor:
        taps = w.reshape(*w.shape[:2], -1).transpose(1, 2)
        words = taps.reshape(w.shape[0], -1, w.shape[1] // WORD, 2, 2)
        words = words.movedim(2, 0).to(torch.int16)  # 8 words of 2 weights: far below 2¹⁵
        positive, negative = words.clamp(min=0).sum(-1), words.clamp(max=0).sum(-1)
        for count in range(min(LONGEST, len(words)), 0, -1):
            high, low = _largest(positive, count), _largest(-negative, count)
            if high * most <= HIGHEST and low * most <= -LOWEST:
                return torch.tensor(count)
        return torch.tensor(0)

    return int(packed(weight, ("conv2d.x86_int8 chain", most), longest))


def _largest(sums: torch.Tensor, count: int) -> int:
    """The largest sum of ``count`` rows that are added, from the first on, and of those left."""
    whole = len(sums) // count * count
    parts = sums[:whole].reshape(-1, count, *sums.shape[1:]).sum(1).amax()
    return max(int(parts), int(sums[whole:].sum(0).amax()))


@dataclass(frozen=True, kw_only=True)
class Int8Tiles(Tiles):
    """What becomes of int32 sums: scale, bias, residual, activation, factor and rounding.

    Attributes:
        signed: the sums begin below zero, since 128 was added to each of the image's numbers.
        rounds: the result is int8, else float32.
        bounded: no sum leaves int32 behind scale, bias and residual.
    """

    signed: bool
    rounds: bool
    bounded: bool
    beta: float
    gamma: float

    def _beside(self, problem: Problem, constants: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Scale, bias and the sums' beginning (int32) of each panel: [panels, 3, width]."""
        weight, channels = constants[1], self.panels.channels
        scale = constants.get(problem.operation.position("scale"))
        scale = torch.ones(channels, dtype=torch.float32) if scale is None else scale
        bias = constants.get(2, torch.zeros(channels, dtype=torch.float32))
        begin = torch.zeros(channels, dtype=torch.int32)
        if self.signed:
            begin -= SHIFT * weight.flatten(1).sum(1, dtype=torch.int32)
        rows = (scale * problem.epilogue.alpha, bias, begin.view(torch.float32))
        parts = [self.panels.laid_out(r).reshape(-1, self.width) for r in rows]
        return torch.stack(parts, 1).contiguous()

    def _finish(
        self, a: Assembler, place: tuple[int, int], x: int, source: int | At, spare: int,
        constants: Constants,
    ) -> None:  # fmt: skip
        """A vector of sums to what is stored of it, but for packing.

        Args:
            place: its pixel and vector.
            x: the vector that it becomes.
            spare: the first of four vectors that hold nothing.
        """
        pixel, v = place
        column = v * self.isa.vector_bytes
        a.convert("vcvtdq2ps", x, source)
        a.vector("vmulps", x, x, At(base="rbx", distance=column))
        a.vector("vaddps", x, x, At(base="rbx", distance=self.width * WORD + column))
        self._add_residual(a, x, self._of_residual(pixel, v), spare, constants)
        if self.activation != "relu" or not self.rounds:
            activate(a, self.activation, constants, x, spare)
        if self.gamma != 1:
            a.vector("vmulps", x, x, constants.at(self.gamma))
        if self.rounds:
            to_integers(a, constants, x, bounded=self.bounded)
        else:
            a.store_vector(self._of_result(pixel, v), x)

    def _add_residual(
        self, a: Assembler, x: int, added: At | None, spare: int, constants: Constants
    ) -> None:
        if added is None or self.beta == 0:
            return
        if self.rounds:
            a.load_int8(spare, added)
            a.convert("vcvtdq2ps", spare, spare)
        else:
            a.load_vector(spare, added)
        if self.beta != 1:
            a.vector("vmulps", spare, spare, constants.at(self.beta))
        a.vector("vaddps", x, x, spare)


def epilogue_of(problem: Problem, constants: Mapping[int, torch.Tensor]) -> dict[str, Any]:
    """What ``Int8Tiles`` wants to know of a problem, but for ``signed``."""
    ending, scale = problem.epilogue, constants.get(problem.operation.position("scale"))
    factor = 1.0 if scale is None else float(scale.abs().max())
    offset = float(constants[2].abs().max()) if 2 in constants else 0.0
    sums = 2**15 * math.prod(problem["weight"].shape[1:])
    most = abs(ending.alpha) * factor * sums + offset + 128 * abs(ending.beta)
    known = ending.activation in (None, "relu", "relu6", "hardswish", "silu")  # none is further off
    return {
        "rounds": problem.output.dtype == "int8",
        "bounded": known and most * max(1.0, ending.gamma) < 2**30,  # a NaN is not
        "beta": float(ending.beta),
        "gamma": float(ending.gamma),
    }


@dataclass(frozen=True, kw_only=True)
class _Tiles(Int8Tiles):
    """Tiles of 32-bit sums, and of 16-bit sums where more than one word is added in these.

    The vectors behind the sums are those of the weight, the image's numbers, and a product.

    Attributes:
        words: of four channels that a pixel of the image has.
        chain: how many of them are added in 16 bits.
        vnni: products are added in 32 bits by one instruction.
    """

    words: int
    chain: int
    vnni: bool

    @property
    def _sums(self) -> int:
        return self.pixels * self.vectors

    @property
    def _behind(self) -> int:
        """Vectors that are needed beside the sums: the last product takes the numbers' place."""
        return self.vectors + (1 if self.vectors == 1 else 2)

    @property
    def _weights(self) -> int:
        return self.isa.vectors - self._behind

    @property
    def _in_memory(self) -> bool:
        """Whether the wide sums wait on the stack."""
        return self.chain > 1 and 2 * self._sums + self._behind > self.isa.vectors

    @property
    def _first_wide(self) -> int:
        """The first vector of the wide sums, where they are in registers."""
        return self._sums if self.chain > 1 and not self._in_memory else 0

    def written(self, constants: Constants) -> Assembler:
        """The code.

        rdi: the call; rbp: the tile's places; r13, r12: the tile in the result and the residual;
        rcx, rdx: where the weight is read, and how far the pixels.
        """
        constants.pointer = "rcx"
        a = Assembler(self.isa)
        a.enter()
        a.move("rax", "rsp")
        a.subtract("rsp", SUMS + self._sums * self.isa.vector_bytes)
        a.clear_low_bits("rsp", ALIGNED)
        a.store(kept(CALLER), "rax")
        for place, bits in ((ONES, 0x00010001), (SHIFTS, 0x80808080)):
            a.set("rax", bits)
            a.broadcast_bits(0, "rax")
            a.store_vector(kept(place), 0)
        self._take_item(a)
        a.store(kept(OWN_ITEM), "rbx")
        for place, source in ((PANEL, WEIGHT), (LEFT_PANELS, PANELS), (NUMBERS, BIAS)):
            a.load("rax", At(base="rbx", distance=source))
            a.store(kept(place), "rax")
        a.store_number(kept(COLUMN), 0)
        a.label("panel")
        a.load(AHEAD.pointer, kept(PANEL))
        AHEAD.begin(a, self.taps * self.words * self.width * WORD)
        self._each_tile(a, "panel", lambda n, pixels: self._tile(a, n, pixels, constants))
        a.add_to_stored(kept(PANEL), self.taps * self.words * self.width * WORD)
        a.add_to_stored(kept(NUMBERS), 3 * self.width * WORD)
        a.add_to_stored(kept(COLUMN), self.width * self.size)
        a.add_to_stored(kept(LEFT_PANELS), -1)
        a.jump_if("jne", "panel")
        a.jump("next")
        a.label("done")
        a.load("rsp", kept(CALLER))
        a.leave()
        return a

    def _tile(self, a: Assembler, name: str, pixels: int, constants: Constants) -> None:
        self._begin(a, pixels)
        for p in range(pixels):
            if (added := self._of_residual(p, 0)) is not None:
                a.prefetch(added)
        a.load("rcx", kept(PANEL))
        a.store_number(kept(TAPS), self.taps)
        a.label(f"{name} tap")
        for p in range(pixels):
            self._address(a, POINTERS[p], p)
        a.add("rbp", 4 * pixels)
        self._multiply(a, f"{name} channel", pixels)
        a.add_to_stored(kept(TAPS), -1)
        a.jump_if("jne", f"{name} tap")
        constants.begin(a)
        a.load("rbx", kept(NUMBERS))
        for p in range(pixels):
            self._finish_pixel(a, p, constants)
        AHEAD.pace(a, f"{name} asked", "rax")

    def _begin(self, a: Assembler, pixels: int) -> None:
        """The wide sums as they begin: zero, or what 128 more of each number will add, less."""
        if self.signed:
            a.load("rbx", kept(NUMBERS))
        for v in range(self.vectors):
            first = self._first_wide + v
            if self.signed:
                column = (2 * self.width + v * self.isa.lanes) * WORD
                a.load_vector(first, At(base="rbx", distance=column))
            else:
                a.vector("vxorps", first, first, first)
            for p in range(pixels):
                if self._in_memory:
                    a.store_vector(self._waiting(p * self.vectors + v), first)
                elif p:
                    a.copy_vector(first + p * self.vectors, first)

    def _multiply(self, a: Assembler, label: str, pixels: int) -> None:
        """All words of the tile's pixels under one tap."""
        together = self.chain if self.chain > 1 else min(UNROLLED, self.words)
        times, left = divmod(self.words, together)
        a.set("rdx", 0)
        a.label(label)
        self._words(a, pixels, together)
        a.add("rdx", together * WORD)
        if times > 1:
            a.compare("rdx", times * together * WORD)
            a.jump_if("jne", label)
        if left:
            self._words(a, pixels, left)

    def _words(self, a: Assembler, pixels: int, count: int) -> None:
        """Some words of the tile's pixels, whose sums are wide in the end."""
        weights = self._weights
        number, product = weights + self.vectors, self.isa.vectors - 1
        for word in range(count):
            for v in range(self.vectors):
                distance = (word * self.vectors + v) * self.isa.vector_bytes
                a.load_vector(weights + v, At(base="rcx", distance=distance))
            for p in range(pixels):
                a.broadcast(number, At(base=POINTERS[p], index="rdx", distance=word * WORD))
                if self.signed:
                    a.vector("vxorps", number, number, kept(SHIFTS))
                for v in range(self.vectors):
                    i, made = p * self.vectors + v, product if v < self.vectors - 1 else number
                    if self.vnni:
                        a.vector("vpdpbusd", i, number, weights + v)
                        continue
                    if self.chain > 1 and word == 0:
                        a.vector("vpmaddubsw", i, number, weights + v)
                        continue
                    a.vector("vpmaddubsw", made, number, weights + v)
                    if self.chain > 1:
                        a.vector("vpaddw", i, i, made)
                    else:
                        a.vector("vpmaddwd", made, made, kept(ONES))
                        a.vector("vpaddd", i, i, made)
            if word % UNROLLED == 0:
                AHEAD.line(a)
        a.add("rcx", count * self.width * WORD)
        if self.chain > 1:
            self._widen(a, pixels * self.vectors)

    def _widen(self, a: Assembler, sums: int) -> None:
        """Add the 16-bit sums to the wide ones."""
        a.load_vector(self._weights, kept(ONES))
        for i in range(sums):
            a.vector("vpmaddwd", i, i, self._weights)
            if self._in_memory:
                a.vector("vpaddd", i, i, self._waiting(i))
                a.store_vector(self._waiting(i), i)
            else:
                wide = self._first_wide + i
                a.vector("vpaddd", wide, wide, i)

    def _finish_pixel(self, a: Assembler, pixel: int, constants: Constants) -> None:
        """A pixel's sums to what is stored."""
        first = 0 if self._in_memory else self._first_wide + pixel * self.vectors
        spare = 0 if self._first_wide else self._sums  # four vectors that hold nothing any more
        for v in range(self.vectors):
            waiting = self._waiting(pixel * self.vectors + v)
            source = waiting if self._in_memory else first + v
            self._finish(a, (pixel, v), first + v, source, spare, constants)
        if not self.rounds:
            return
        at_least_zero, to = self.activation == "relu", self._of_result(pixel, 0)
        vectors = range(first, first + self.vectors)
        if self.isa == AVX2:
            store_int8(a, to, vectors, spare, at_least_zero=at_least_zero)
            return
        load_order(a, constants, spare)
        made = pack_int8(a, constants, vectors, spare, at_least_zero=at_least_zero)
        store_packed(a, to, made, self.vectors)

    def _waiting(self, sums: int) -> At:
        """Where a wide sum waits on the stack."""
        return kept(SUMS + sums * self.isa.vector_bytes)
