"""What two processes share: no two places overlap, and nobody reads beyond them."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessella.core.errors import InputError, ServeError
from tessella.core.spec import DimRange, TensorSpec
from tessella.server import tickets
from tessella.server.lane import ALIGNMENT, Lane, Places, make_memory, places_of
from tessella.server.tickets import Frames, Ticket

ORDER = 16


@given(st.lists(st.tuples(st.integers(1, 70_000), st.booleans()), max_size=60))
def test_places_never_overlap_and_come_back_whole(wishes: list[tuple[int, bool]]) -> None:
    places = Places(ORDER)
    taken: dict[int, tuple[int, int]] = {}  # start → bytes, order
    for nbytes, gives_back in wishes:
        if gives_back and taken:
            start, (_, order) = taken.popitem()
            places.give_back(start, order)
        try:
            start, order = places.take(nbytes)
        except ServeError:
            continue
        assert start >= 0
        assert start % ALIGNMENT == 0
        assert start + nbytes <= 1 << ORDER
        for other, (length, _) in taken.items():
            assert start + nbytes <= other or other + length <= start
        taken[start] = nbytes, order
    for start, (_, order) in taken.items():
        places.give_back(start, order)
    assert places.take(1 << ORDER) == (0, ORDER)


def test_what_will_never_have_room_is_told_from_what_has_none_now() -> None:
    places = Places(ORDER)
    with pytest.raises(ServeError) as never:
        places.take((1 << ORDER) + 1)
    place = places.take(1 << ORDER)
    with pytest.raises(ServeError) as now:
        places.take(1)
    assert (never.value.status, now.value.status) == (413, 503)
    places.give_back(*place)
    assert places.take(1)


def test_two_sides_see_the_same_and_nothing_beyond() -> None:
    memory = make_memory(1 << ORDER)
    ours, theirs = Lane(os.dup(memory)), Lane(memory)
    ours.array(64, (2, 3), np.dtype("f4"))[:] = 7
    assert (theirs.array(64, (6,), np.dtype("f4")) == 7).all()
    for start, count in [(1 << ORDER, 1), (-64, 1), (0, (1 << ORDER) + 1), (32, 1), (2**63, 1)]:
        with pytest.raises(ServeError, match="does not lie in its lane"):
            theirs.array(start, (count,), np.dtype("u1"))


def test_memory_that_may_shrink_is_refused() -> None:
    memory = os.memfd_create("open")
    os.ftruncate(memory, 4096)
    with pytest.raises(ServeError, match="may change its size"):
        Lane(memory)


def test_sizes_that_are_not_the_tensors() -> None:
    specs = (
        TensorSpec(name="a", dtype="float32", shape=(DimRange(min=1, opt=1, max=8), 3)),
        TensorSpec(name="b", dtype="bfloat16", shape=(DimRange(min=1, opt=1, max=8),)),
    )
    places, end = places_of(specs, (2, 3, 2), 128)
    assert [(s.name, start, shape) for s, start, shape in places] == [
        ("a", 128, (2, 3)),
        ("b", 192, (2,)),
    ]
    assert end == 256
    for sizes in [(2, 3), (2, 3, 2, 2), (), (2,)]:
        with pytest.raises(ServeError, match="other dimensions"):
            places_of(specs, sizes, 0)


@given(st.lists(st.binary(max_size=40), max_size=8), st.lists(st.integers(1, 30), min_size=1))
def test_frames_arrive_in_any_parts(contents: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(tickets.frame(b"x", content) for content in contents)
    frames, found, position = Frames(), [], 0
    while position < len(stream):
        cut = cuts[position % len(cuts)]
        found += [content for _, content in frames.feed(stream[position : position + cut])]
        position += cut
    assert found == contents
    with pytest.raises(ServeError, match="larger than any"):
        list(frames.feed(b"\xff\xff\xff\xffx"))


def test_tickets_and_errors_are_read_as_they_were_written() -> None:
    ticket = Ticket(2**32 - 1, 3, 1, 2**62, 2**40, 2**41, (1, 3, 224, 224), client=2**32 - 1)
    ((letter, content),) = Frames().feed(ticket.pack())
    assert (letter, Ticket.unpack(content)) == (b"i", ticket)
    for error, status, text in [
        (InputError("a is wrong", seen=3, fix="b"), 400, "a is wrong. Seen: 3. To do: b."),
        (ServeError("busy", status=429, retry_after_s=7), 429, "busy."),
        (RuntimeError("secrets"), 500, "failed to answer"),
    ]:
        ((_, content),) = Frames().feed(tickets.pack_error(5, error))
        number, told = tickets.unpack_error(content)
        assert (number, told.status) == (5, status)
        assert text in str(told)
        assert "secrets" not in str(told)
    assert told.retry_after_s == 1
