"""A lone request between two processes: who waits for it, and for how long."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from tessella.core.errors import ServeError
from tessella.runtime.overlapped import runs_of
from tessella.server.acceptor import LONE_NS, _Engine, _Lone
from tessella.server.counts import Counts
from tessella.server.looking import LOST_NS, REST_S, SLEEPS_NS, SPIN_NS, Awake, Cores, Looking
from tests.support.wires import Wire


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


def test_an_event_loop_stays_awake_while_its_client_is_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = [True]

    async def is_awake(begin: Callable[[Awake, asyncio.AbstractEventLoop], None]) -> list[bool]:
        """Whether it is awake: some turns later, and when another client has come."""
        loop, found = asyncio.get_running_loop(), []
        for alone[0] in (True, False):
            begin(awake, loop)
            for _ in range(5):
                await asyncio.sleep(0)
            found.append(awake.is_on)
        return found

    def asked(awake: Awake, loop: asyncio.AbstractEventLoop) -> None:
        for _ in range(2):  # the second one comes close behind the answer to the first
            awake.came()
            awake.answered(loop)

    def asked_once(awake: Awake, loop: asyncio.AbstractEventLoop) -> None:
        awake.came()
        awake.answered(loop)

    def asked_again(awake: Awake, loop: asyncio.AbstractEventLoop) -> None:
        asked(awake, loop)
        awake.came()  # other threads may work for it

    monkeypatch.setattr("tessella.server.looking.LOST_NS", 10**12)  # whatever runs beside
    for spins in (False, True):
        for begin, spin_s, stays in (
            (Awake.stay, 600, True),
            (Awake.stay, -1, False),
            (asked, 600, True),
            (asked_once, 1, False),
            (asked_again, 600, False),
        ):
            monkeypatch.setattr("tessella.server.looking.SPIN_NS", spin_s * 10**9)
            awake = Awake(lambda: alone[0], spins=spins)
            assert asyncio.run(is_awake(begin)) == [spins and stays, False], (begin, spins)


def test_the_engines_thread_looks_for_the_next_lone_request_and_then_sleeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tessella.server.looking.LOST_NS", 10**12)  # whatever runs beside
    ours, theirs = socket.socketpair()
    wakes, wake = socket.socketpair()
    looking = Looking(100 * SPIN_NS, wakes)
    looking.register(ours, selectors.EVENT_READ)

    def worked_s(come_s: float) -> float:
        """Seconds of the processor until something has come, after so long."""
        threading.Timer(come_s, theirs.send, [b"ticket"]).start()
        began_s = time.thread_time()
        assert looking.found(None)
        ours.recv(100)
        return time.thread_time() - began_s

    assert looking.found(0.001) == []
    assert worked_s(0.05) < 0.02, "it looks before anything has come"
    looking.came(has_files=False)
    looking._last_ns = time.perf_counter_ns() + 10**9  # so the next one follows at once
    for is_first, has_files in ((False, False), (True, True)):
        if is_first:
            looking._last_ns = 0
        looking.came(has_files=has_files)
        assert worked_s(0.05) < 0.02, (is_first, has_files)
    looking._last_ns = 0
    looking.came(has_files=False)
    assert worked_s(0.05) > 0.001, "it has slept"
    looking._last_ns = 0
    looking.came(has_files=False)
    assert worked_s(0.4) < 0.2, "it has not slept"

    theirs.send(b"ticket")
    began_ns = time.perf_counter_ns()
    looking.rest()
    assert time.perf_counter_ns() - began_ns > 0.9e9 * REST_S, "a ticket has ended its rest"
    monkeypatch.setattr("tessella.server.looking.REST_S", 600.0)
    wake.send(b"c")
    looking.rest()
    for end in (looking, ours, theirs, wakes, wake):
        end.close()


def test_who_loses_its_core_while_it_looks_sleeps_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cores = Cores()
    assert cores.are_idle(1)
    assert all(cores.are_still_idle(1 + n * LOST_NS) for n in range(1, 5))
    lost_ns = 2 + 5 * LOST_NS
    assert not cores.are_still_idle(lost_ns)
    assert not cores.are_idle(lost_ns + SLEEPS_NS - 1)
    assert cores.are_idle(lost_ns + SLEEPS_NS)
    assert cores.are_idle(lost_ns + 9 * SLEEPS_NS), "work between two looks is no loss"

    async def stays(blocked_s: float) -> list[bool]:
        """Whether a loop is awake behind something that holds it up, and can be again at once."""
        loop, awake, found = asyncio.get_running_loop(), Awake(lambda: True, spins=True), []
        awake.stay(loop)
        await asyncio.sleep(0)
        time.sleep(blocked_s)
        for _ in range(2):
            await asyncio.sleep(0)
            found.append(awake.is_on)
            awake.stay(loop)
        return found

    monkeypatch.setattr("tessella.server.looking.SPIN_NS", 600 * 10**9)
    monkeypatch.setattr("tessella.server.looking.SLEEPS_NS", 600 * 10**9)
    assert asyncio.run(stays(2e-9 * LOST_NS)) == [False, False]
    monkeypatch.setattr("tessella.server.looking.LOST_NS", 10**12)
    assert asyncio.run(stays(2e-9 * LOST_NS)) == [True, True]


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


def test_a_frame_for_an_engine_that_has_just_ended_is_no_failure() -> None:
    """Who waits is told that it has; nothing is written to a closed socket."""
    failures: list[object] = []

    async def ask() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, told: failures.append(told))
        engine = _Engine(None, None, lambda *_: None, None)  # type: ignore[arg-type]
        wire = Wire()
        wire.protocol = engine
        engine.connection_made(wire)
        question = loop.create_task(engine.ask({}, b""))
        loop.call_soon(wire.close)  # before the frame is sent, and before it is known
        with pytest.raises(ServeError):
            await question
        await asyncio.sleep(0)
        assert wire.sent == b""

    asyncio.run(ask())
    assert not failures
