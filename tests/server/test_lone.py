"""A lone request between two processes: who waits for it, and for how long."""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import threading
import time

import numpy as np

from tessella.runtime.overlapped import runs_of
from tessella.server.acceptor import LONE_NS, _Lone
from tessella.server.counts import Counts
from tessella.server.engine_process import LONE_NS as GAP_NS
from tessella.server.engine_process import SPIN_NS, _Room
from tests.support.engines import Scores, repository


def test_an_answer_is_waited_for_and_no_longer_than_may_be() -> None:
    for spins in (False, True):
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        lone = _Lone(ours, lambda: True, spins=spins)
        threading.Timer(0.02, theirs.send, [b"answer"]).start()
        assert lone.wait(time.perf_counter_ns() + 10**10) == b"answer"
        began_ns = time.perf_counter_ns()
        assert lone.wait(began_ns + LONE_NS) == b""
        assert time.perf_counter_ns() - began_ns >= LONE_NS
        assert lone.send(b"ticket") == b""
        assert theirs.recv(100) == b"ticket"
        assert b"" < lone.send(bytes(1 << 24)) < bytes(1 << 24)  # the rest is the event loop's
        theirs.close()
        assert lone.wait(time.perf_counter_ns() + 10**10) == b""
        assert lone.send(b"ticket") == b"ticket"
        ours.close()


def test_the_engines_thread_looks_for_the_next_lone_request_and_then_sleeps() -> None:
    door, other = socket.socketpair()
    models = repository({"flowers": Scores()})
    room = _Room(models, None, door, spin_ns=100 * SPIN_NS)  # type: ignore[arg-type]

    def worked_s(seconds: float) -> float:
        began_s = time.thread_time()
        assert room._found(seconds) == []
        return time.thread_time() - began_s

    assert worked_s(0.2) < 0.02
    for gap_ns, has_files, looks in (
        (0, False, False),
        (GAP_NS, True, False),
        (GAP_NS, False, True),
    ):
        # a request in the future came less than nothing before
        room._last_ns = time.perf_counter_ns() + (10**9 if not gap_ns else -gap_ns)
        room.came(has_files=has_files)
        assert (room._spin_until_ns > 0) == looks, (gap_ns, has_files)
    threading.Timer(0.05, room._look).start()
    began_s = time.thread_time()
    (found,) = room._found(None)
    assert time.thread_time() - began_s > 0.001, "it has slept"
    found[0].data()
    threading.Timer(0.4, room._look).start()
    began_s = time.thread_time()
    assert room._found(None)
    assert time.thread_time() - began_s < 0.2, "it has not slept"
    for end in (door, other, room._wake):
        end.close()
    room._selector.close()


def test_processes_see_each_others_counts() -> None:
    counts = Counts(3)
    mine, other, third = (counts.of(place) for place in range(3))
    mine.add(1)
    mine.add(2)
    other.add(3)
    child = os.fork()
    if not child:
        for number in range(5):
            third.add(number)
        third.discard(0)
        os._exit(0)
    os.waitpid(child, 0)
    assert (mine.ahead(0), mine.ahead(2), other.ahead(0)) == (1, 3, 0)
    other.leave()
    other.discard(3)
    assert mine.ahead(0) == 0


def test_parts_that_follow_each_other_are_copied_at_once() -> None:
    made = np.arange(800, dtype=np.uint8).reshape(8, 100)
    lane = mmap.mmap(-1, 200)
    beside = [np.ndarray((1, 100), np.uint8, lane, at) for at in (0, 100)]
    parts = [made[0:1], made[1:3], made[3:4], made[5:6], made[4:5], made[6:7, ::2], *beside]
    sizes = [(nbytes, len(some)) for _, nbytes, some in runs_of(parts)]
    assert sizes == [(400, 3), (100, 1), (100, 1), (50, 1), (100, 1), (100, 1)]
    for address, nbytes, some in runs_of(parts):
        there = np.frombuffer(ctypes.string_at(address, nbytes), np.uint8)
        np.testing.assert_array_equal(there, np.concatenate(some, axis=None))
