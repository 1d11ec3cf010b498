"""Depthwise convolutions on a CPU with AVX-512 or AVX2, in float32 or bfloat16, with bias and
activation.

A thread takes some pixels of an image. For a tile of them it looks the places up that each tap of
the filter reads, once for all channels; then, panel by panel of channels, the sums of the tile wait
in registers while tap after tap is multiplied in, straight from memory. Sums are float32.

Source: the table of places is that of ``shared.x86_tiles``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tessella.device.packing import packed
from tessella.device.x86 import code
from tessella.device.x86.assembler import Assembler, At
from tessella.kernels.catalog import Call, Config
from tessella.kernels.epilogue.x86 import Constants, activate
from tessella.kernels.shared import x86_convolution as x86
from tessella.kernels.shared import x86_tiles
from tessella.operations.problem import Problem

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
    tiles = _Tiles.of(problem, vectors)
    return tiles.bound(problem, constants, weight_of(constants[1], tiles.panels))


def weight_of(weight: torch.Tensor, panels: x86_tiles.Panels) -> torch.Tensor:
    """[C, 1, R, S] → float32 [panels, R·S, width]: as a tile reads it."""

    def pack(w: torch.Tensor) -> torch.Tensor:
        taps = w.shape[2:].numel()
        parts = panels.laid_out(w.float()).reshape(len(panels.begins), -1, taps)
        return parts.transpose(1, 2).contiguous()

    return packed(weight, ("conv2d.x86_depthwise", panels), pack)


ADDRESSES = x86_tiles.LEFT + code.NUMBER  # on the stack from here on: those of a tile


@dataclass(frozen=True, kw_only=True)
class _Tiles(x86_tiles.Tiles):
    """Tiles whose channels read one channel each. Behind the sums are the vectors of the weight,
    and one of the image.
    """

    DEPTHWISE = True

    def written(self, constants: Constants) -> Assembler:
        """The code.

        rdi: the call; rbx: the item; rbp: the tile's places; r13, r14: the tile in the result, and
        its panel there; rcx, r9: the panel's weight and bias; rdx: how far its channels begin; rsi:
        the tap's addresses; r8: one of them; r10, r11: how many taps and panels are left.
        """
        a = Assembler(self.isa)
        kept_bytes = ADDRESSES + self.taps * self.pixels * code.NUMBER
        self._begin_item(a, kept_bytes)
        a.load("r13", x86_tiles.CALL_RESULT)
        a.add_stored("r13", At(base="rbx", distance=x86_tiles.RESULT))
        a.load("rbp", At(base="rbx", distance=x86_tiles.PLACES))
        a.load("rax", At(base="rbx", distance=x86_tiles.COUNT))
        a.store(x86_tiles.kept(x86_tiles.LEFT), "rax")
        a.compare("rax", 0)
        a.jump_if("je", "rest")
        with a.counted("tile", x86_tiles.kept(x86_tiles.LEFT)):
            self._tile(a, "tile", self.pixels, constants)
            a.add("r13", self.pixels * self.pitches[0])
        a.label("rest")
        if self.rest:
            a.load("rax", At(base="rbx", distance=x86_tiles.HAS_REST))
            a.compare("rax", 0)
            a.jump_if("je", "next")
            self._tile(a, "rest", self.rest, constants)
        self._end_items(a, kept_bytes)
        return a

    def _tile(self, a: Assembler, name: str, pixels: int, constants: Constants) -> None:
        self._addresses(a, name, pixels)
        for register, place in (
            ("rcx", x86_tiles.WEIGHT),
            ("r9", x86_tiles.BIAS),
            ("r11", x86_tiles.PANELS),
        ):
            a.load(register, At(base="rbx", distance=place))
        a.move("r14", "r13")
        a.set("rdx", 0)
        constants.begin(a)
        vector = self.isa.vector_bytes
        columns = [column * self.size for column in self.panels.columns]
        places, taken = self._places(pixels), self.vectors * self.pixels
        with a.counted(f"{name} panel", "r11"):
            self._begin_sums(a, pixels, "r9")
            with self._each_tap(a, f"{name} tap", pixels):
                for v in range(self.vectors):
                    a.load_vector(taken + v, At(base="rcx", distance=v * vector))
                for i, (p, v) in enumerate(places):
                    if v == 0:
                        a.load("r8", At(base="rsi", distance=p * code.NUMBER))
                    read = At(base="r8", index="rdx", distance=columns[v])
                    if self.size == x86_tiles.WORD:
                        a.vector("vfmadd231ps", i, taken + v, read)
                    else:
                        a.load_bfloat16(taken + self.vectors, read)
                        a.vector("vfmadd231ps", i, taken + v, taken + self.vectors)
                a.add("rcx", self.vectors * vector)
            for i, (p, v) in enumerate(places):
                activate(a, self.activation, constants, i, taken, floor=self.floor)
                self._store(a, At(base="r14", distance=p * self.pitches[0] + columns[v]), i)
            a.add("r9", self.width * x86_tiles.WORD)
            for register in ("rdx", "r14"):
                a.add(register, self.width * self.size)

    def _addresses(self, a: Assembler, name: str, pixels: int) -> None:
        """Of what each tap reads for each pixel of the tile: on the stack, in this order."""
        with self._each_tap(a, f"{name} address", pixels):
            for p in range(pixels):
                self._address(a, "r8", p)
                a.store(At(base="rsi", distance=p * code.NUMBER), "r8")
            a.add("rbp", 4 * pixels)

    @contextmanager
    def _each_tap(self, a: Assembler, label: str, pixels: int) -> Iterator[None]:
        a.move("rsi", "rsp")
        a.add("rsi", ADDRESSES)
        a.set("r10", self.taps)
        with a.counted(label, "r10"):
            yield
            a.add("rsi", pixels * code.NUMBER)
