"""Where an element of a rearranged tensor comes from: what the GPU's kernels compute of its place.

Sizes are read from memory, so that one compilation serves all shapes of a kind (of a tuple of
numbers Triton compiles each 1 in, even where it is told not to); a division by one is a product and
a shift, whose factors come with it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import triton
import triton.language as tl

from tessella.operations.rearrangement import Moves, Part, Turn

MOST_PLACES = (1 << 30) - 1  # that are divided


@dataclass(frozen=True, kw_only=True)
class Places:
    """Some parts of a tensor, for ``walk``.

    Attributes:
        numbers: what a kernel reads.
        digits: how many numbers a place is cut into.
        turns: for each into how many its sum is cut, where its numbers begin, and the digits that
            are counted together. Like ``digits`` it is compiled in.
    """

    numbers: tuple[int, ...]
    digits: int
    turns: tuple[tuple[int, ...], ...]


def places(moves: Moves, these: Sequence[int], step: tuple[int, int] = (1, 1)) -> Places:
    """Parts by position, in the order in which they are counted, the outermost first.

    Neighbours that follow each other in a turn are one digit.

    Args:
        step: elements that offsets are counted in, in the input and in the result.
    """
    parts = tuple(replace(p, read=p.read // step[0], write=p.write // step[1]) for p in moves.parts)
    follows = {b: a for turn in moves.turns for a, b in pairwise(turn.parts)}
    runs: list[list[int]] = []
    for p in these:
        if runs and follows.get(p) == runs[-1][-1] == p - 1:
            runs[-1].append(p)
        else:
            runs.append([p])
    runs.reverse()  # a place's last digit comes first
    numbers: list[int] = []
    for run in runs:
        read = 0 if run[0] in moves.turning else parts[run[0]].read
        numbers += (*divisor(_count(parts, run)), read, parts[run[-1]].write)
    turns = []
    for turn in moves.turns:
        members = tuple(i for p in turn.parts for i, run in enumerate(runs) if run[0] == p)
        cuts = _cuts(parts, turn)
        turns.append((len(cuts), len(numbers), *members))
        numbers += (_count(parts, turn.parts), turn.back)
        for size, read in cuts:
            numbers += (*divisor(size), read)
    return Places(numbers=tuple(numbers), digits=len(runs), turns=tuple(turns))


def _count(parts: Sequence[Part], positions: Sequence[int]) -> int:
    return math.prod(parts[p].size for p in positions)


def _cuts(parts: Sequence[Part], turn: Turn) -> list[tuple[int, int]]:
    """Size and step in the input of what a turned place is cut into, the last first: one, where the
    parts follow each other there.
    """
    found: list[tuple[int, int]] = []
    for p in reversed(turn.parts):
        size, read = found[-1] if found else (1, 0)
        if found and parts[p].read == size * read:
            found[-1] = (size * parts[p].size, read)
        else:
            found.append((parts[p].size, parts[p].read))
    return found


def divisor(size: int) -> tuple[int, int, int]:
    """A size, and the factor and the shift that divide what is below 2³¹ by it.

    With 2ˡ at or above the size, ⌊x / size⌋ = ⌊x · ⌈2³¹⁺ˡ / size⌉ / 2³¹⁺ˡ⌋: the factor is too large
    by less than 1 / 2³¹ of what the quotient may be off. It has 32 bits, and comes with a sign.
    """
    if size == 1:
        return 1, 0, 0
    length = (size - 1).bit_length()
    factor = -(-(1 << (31 + length)) // size)
    return size, factor - (1 << 32), length - 1


@functools.cache
def numbers_on(device: torch.device, numbers: tuple[int, ...]) -> torch.Tensor:
    """In memory; first asked for in the run before a graph is captured."""
    wide = max(map(abs, numbers), default=0) >= 1 << 31
    return torch.tensor(numbers, dtype=torch.int64 if wide else torch.int32, device=device)


@triton.jit
def quotient(x, numbers, AT: tl.constexpr):
    """``x`` over the divisor at AT."""
    high = tl.umulhi(x.to(tl.uint32), tl.load(numbers + AT + 1).to(tl.uint32))
    return (high >> tl.load(numbers + AT + 2).to(tl.uint32)).to(tl.int32)


@triton.jit
def walk(place, numbers, DIGITS: tl.constexpr, TURNS: tl.constexpr, WIDE: tl.constexpr):
    """Offsets in the input and in the result of a place, counted along all digits.

    ``numbers`` lie in memory: of a tuple Triton would compile each 1 in. WIDE: offsets of 64 bits.
    """
    OF: tl.constexpr = tl.int64 if WIDE else tl.int32
    read = (place * 0).to(OF)
    write = (place * 0).to(OF)
    digits = ()
    rest = place
    for i in tl.static_range(DIGITS):
        digit = rest
        if i < DIGITS - 1:
            rest = quotient(digit, numbers, 5 * i)
            digit = digit - rest * tl.load(numbers + 5 * i).to(tl.int32)
        digits = digits + (digit,)  # noqa: RUF005
        read += digit.to(OF) * tl.load(numbers + 5 * i + 3).to(OF)
        write += digit.to(OF) * tl.load(numbers + 5 * i + 4).to(OF)
    for t in tl.static_range(len(TURNS)):
        read += _turned(digits, numbers, TURNS, t, OF)
    return read, write


@triton.jit
def _turned(digits, numbers, TURNS: tl.constexpr, T: tl.constexpr, OF: tl.constexpr):
    """The offset in the input of what turn number T counts together."""
    TURN: tl.constexpr = TURNS[T]
    CUTS: tl.constexpr = TURN[0]
    AT: tl.constexpr = TURN[1]
    FIRST: tl.constexpr = TURN[2]
    place = digits[FIRST]
    for m in tl.static_range(3, len(TURN)):
        place = place * tl.load(numbers + 5 * TURN[m]).to(tl.int32) + digits[TURN[m]]
    size = tl.load(numbers + AT).to(tl.int32)
    place += tl.load(numbers + AT + 1).to(tl.int32)
    rest = tl.where(place < size, place, place - size)
    read = (place * 0).to(OF)
    for c in tl.static_range(CUTS):
        digit = rest
        if c < CUTS - 1:
            rest = quotient(digit, numbers, AT + 2 + 4 * c)
            digit = digit - rest * tl.load(numbers + AT + 2 + 4 * c).to(tl.int32)
        read += digit.to(OF) * tl.load(numbers + AT + 5 + 4 * c).to(OF)
    return read
