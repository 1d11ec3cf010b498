"""Maxima over windows along one axis, as maxima of shifted pieces. Whole numbers only, no tensors.

A window that hangs over the edge counts what lies inside: nothing is padded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Level:
    """One reduction along an axis: its place ``i`` is the maximum of a few places of its source.

    Positions are the image's, and may be negative. Place ``i`` starts at ``first + step * i``, and
    reads the source at that position plus each tap, where the source has it.

    Attributes:
        first, step, count: what it makes.
        taps: what each place reads.
        source_first, source_count: what it reads from, with step 1.
    """

    first: int
    step: int
    count: int
    taps: range | tuple[int, ...]
    source_first: int
    source_count: int


@dataclass(frozen=True, kw_only=True)
class Move:
    """``count`` places of a level from ``into`` on, which read the source from ``sources`` on.

    One source is copied, of two the maximum is taken; ``again`` says that what lies there already
    takes part.
    """

    into: int
    count: int
    sources: tuple[int, ...]
    again: bool = False


def levels(*, length: int, kernel: int, stride: int, first: int, count: int) -> list[Level]:
    """How ``count`` windows, the first at position ``first``, are reduced; none to do, no level.

    Pixel by pixel; or, where that is less to read, windows of 2, 4, 8 … pixels at every position
    first, two of which make a whole one: three levels instead of eight maxima for nine pixels.
    """
    if (kernel, stride, first, count) == (1, 1, 0, length):
        return []
    doublings = (kernel - 1).bit_length() - 1
    if (kernel - 1) / stride <= doublings + 1 / stride:
        return [Level(first, stride, count, range(kernel), 0, length)]
    made: list[Level] = []
    source_first, source_count, size = 0, length, 1
    for _ in range(doublings):
        size *= 2
        begin = max(first, 1 - size)  # before that, such a window lies outside
        end = min(length, first + (count - 1) * stride + kernel - size + 1)
        made.append(Level(begin, 1, end - begin, (0, size // 2), source_first, source_count))
        source_first, source_count = begin, end - begin
    made.append(Level(first, stride, count, (0, kernel - size), source_first, source_count))
    return made


def moves(level: Level) -> Iterator[Move]:
    """The moves of a level in order: the two taps that reach furthest first, so few are copied.

    >>> [(m.into, m.count, m.sources, m.again) for m in moves(*levels(
    ...     length=8, kernel=3, stride=2, first=-1, count=4))]
    [(0, 4, (0, 1), False), (1, 3, (1,), True)]
    """
    reaches = sorted(
        (reach for tap in level.taps if (reach := _reach(level, tap))[1]),
        key=lambda reach: -len(reach[1]),
    )
    (tap, places), *rest = reaches
    done: list[range] = []
    if rest:
        (other, others), *rest = rest
        if both := _common(places, others):
            yield _move(level, both, (tap, other))
            done = [both]
    for alone, whole in ((tap, places), *(((other, others),) if len(reaches) > 1 else ())):
        for piece in _without(whole, done):
            yield _move(level, piece, (alone,))
        done = _joined([*done, whole])
    for tap, places in rest:
        for known in done:
            if both := _common(places, known):
                yield _move(level, both, (tap,), again=True)
        for piece in _without(places, done):
            yield _move(level, piece, (tap,))
        done = _joined([*done, places])


def _reach(level: Level, tap: int) -> tuple[int, range]:
    """A tap, and the places that find something of the source there."""
    ahead = level.source_first - level.first - tap
    begin = max(0, -(-ahead // level.step))
    end = min(level.count, (ahead + level.source_count - 1) // level.step + 1)
    return tap, range(begin, max(begin, end))


def _move(level: Level, places: range, taps: tuple[int, ...], again: bool = False) -> Move:
    position = level.first + level.step * places.start - level.source_first
    return Move(
        into=places.start,
        count=len(places),
        sources=tuple(position + tap for tap in taps),
        again=again,
    )


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _without(whole: range, done: list[range]) -> Iterator[range]:
    """The parts of a range outside of ``done``, which are ranges in order and apart."""
    begin = whole.start
    for known in done:
        if known.stop > begin and known.start < whole.stop:
            if known.start > begin:
                yield range(begin, known.start)
            begin = known.stop
    if begin < whole.stop:
        yield range(begin, whole.stop)


def _joined(ranges: list[range]) -> list[range]:
    """The same places as ranges that are sorted and do not overlap."""
    made: list[range] = []
    for one in sorted(ranges, key=lambda r: r.start):
        if made and one.start <= made[-1].stop:
            made[-1] = range(made[-1].start, max(made[-1].stop, one.stop))
        else:
            made.append(one)
    return made
