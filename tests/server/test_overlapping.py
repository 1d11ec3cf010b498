"""Executions that overlap: what may begin beside one that computes, and that all are answered.

A thread plays the GPU here; ``tests/gpu/test_overlapped.py`` has the real one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tessella.core.errors import InputError
from tessella.server.batcher import LONE_NS
from tessella.server.overlapping import OverlappingBatcher
from tessella.server.pace import Pace
from tessella.server.statistics import Statistics
from tessella.server.waiting import Request

pytestmark = pytest.mark.timeout(60)
Parts = Sequence[Mapping[str, np.ndarray]]


class Call:
    def __init__(self, gpu: GPU, parts: Parts) -> None:
        self._gpu, self._parts = gpu, parts
        self.ended = threading.Event()
        self.ended_ns: int | None = None

    def is_done(self) -> bool:
        return self.ended.is_set()

    def wait(self) -> None:
        assert self.ended.wait(30)
        self.ended_ns = time.perf_counter_ns()

    def outputs(self) -> dict[str, np.ndarray]:
        self.wait()
        joined = np.concatenate([part["x"] for part in self._parts])
        if (joined == 13).any():
            raise RuntimeError("the GPU stumbled")
        self.made = {"y": 2 * joined}
        return self.made

    def release(self) -> None:
        if hasattr(self, "made"):
            self.made["y"][:] = -1  # as another call would
        self._gpu.running.remove(self)


class GPU:
    """Doubles, two calls at a time, which end when they are let."""

    def __init__(self) -> None:
        self.running: list[Call] = []
        self.sizes: list[int] = []

    @property
    def has_room(self) -> bool:
        return len(self.running) < 2

    def begin(self, parts: Parts) -> Call:
        assert self.has_room
        if any((part["x"] < 0).any() for part in parts):
            raise InputError("negative")
        self.sizes.append(sum(len(part["x"]) for part in parts))
        self.running.append(Call(self, parts))
        return self.running[-1]


def alone(x: np.ndarray) -> dict[str, np.ndarray]:
    """The engine of one request after another."""
    if (x < 0).any() or (x == 13).any():
        raise InputError("this one")
    return {"y": 2 * x}


class Server:
    """A batcher of at most 4 samples, and what it has answered by each request's first number."""

    def __init__(self) -> None:
        self.gpu, self.looks = GPU(), threading.Event()
        self.engine_sizes: list[int] = []
        gpu: Any = self.gpu
        self.batcher = OverlappingBatcher(
            gpu, self._alone, max_batch=4, max_delay_us=0, max_waiting=99, statistics=Statistics()
        )
        self.batcher.on_done = self.looks.set
        self.answers: dict[float, list[list[float]] | str] = {}

    def _alone(self, x: np.ndarray) -> dict[str, np.ndarray]:
        self.engine_sizes.append(len(x))
        return alone(x)

    def expect(self, ns: int) -> None:
        """As if each sample had taken so long; 0 is not known."""
        self.batcher._pace = Pace()
        if ns:
            self.batcher._pace.took(1, ns)

    def ask(self, *numbers: float) -> None:
        arrays = {"x": np.array([[n] for n in numbers], np.float32)}
        self.batcher.submit(Request(arrays=arrays, deliver=self._tell))

    def _tell(self, requests: list[Request]) -> None:
        for request in requests:
            first = float(request.arrays["x"][0, 0])
            assert first not in self.answers
            if request.error is not None:
                self.answers[first] = str(request.error)
            else:
                assert request.outputs is not None
                self.answers[first] = request.outputs["y"].tolist()

    def end(self, count: int = 1) -> None:
        """Let the first calls end, and answer them when their thread has told."""
        for _ in range(count):
            self.looks.clear()
            self.gpu.running[0].ended.set()
            assert self.looks.wait(30)
            self.batcher.step()


@pytest.fixture
def server() -> Server:
    return Server()


def test_a_full_execution_begins_beside_one_that_computes(server: Server) -> None:
    server.ask(1)
    server.batcher.step()
    assert server.gpu.sizes == [1]
    for number in range(2, 5):
        server.ask(number)
    server.batcher.step()
    assert server.gpu.sizes == [1]  # three would be joined by whom comes meanwhile
    server.ask(5)
    server.ask(6)
    server.batcher.step()
    assert server.gpu.sizes == [1, 4]
    for number in range(7, 12):
        server.ask(number)
    server.batcher.step()
    assert server.gpu.sizes == [1, 4]  # two at a time
    server.end()
    assert server.answers == {1: [[2]]}
    assert server.gpu.sizes == [1, 4, 4]
    server.end(2)
    assert server.answers == {n: [[2 * n]] for n in range(1, 10)}
    server.end()
    assert server.answers == {n: [[2 * n]] for n in range(1, 12)}
    assert server.gpu.sizes == [1, 4, 4, 2]
    assert server.batcher.step() is None


def test_who_comes_alone_is_answered_without_a_wake_up(server: Server) -> None:
    """The engine's own way answers one request that is brief and all there is to do."""
    for begun, (numbers, expected_ns) in enumerate(
        [([1], 0), ([2, 3, 4, 5], LONE_NS // 8), ([6], 2 * LONE_NS)]  # how long for a sample
    ):
        server.expect(expected_ns)
        server.ask(*numbers)
        server.batcher.step()
        assert len(server.gpu.sizes) == begun + 1, "not known, or not brief, or full: it overlaps"
        server.end()
    server.expect(LONE_NS // 8)
    server.looks.clear()
    for numbers in ([7], [8, 9, 10]):
        server.ask(*numbers)
        assert server.batcher.step() is None
        assert server.answers[numbers[0]] == [[2 * n] for n in numbers]
    assert server.engine_sizes == [1, 3]
    assert not server.looks.is_set()
    server.ask(11)
    server.ask(12)
    server.batcher.step()  # two are joined, and nobody else is alone beside them
    server.expect(LONE_NS // 8)
    server.ask(13)
    server.batcher.step()
    assert (server.gpu.sizes[3:], server.engine_sizes) == ([2], [1, 3])
    server.ask(-14)
    server.end()
    server.batcher.step()
    assert server.answers[-14] == "this one."
    assert server.answers.keys() == {1, 2, 6, 7, 8, 11, 12, 13, -14}
    assert server.batcher.step() is None


def test_a_large_request_is_cut_and_its_parts_are_its_own(server: Server) -> None:
    """The memory of a call's outputs goes to the next call: parts that wait are copies."""
    server.ask(*range(1, 11))
    server.batcher.step()
    while server.gpu.running:
        server.end()
    assert server.answers == {1: [[2 * n] for n in range(1, 11)]}
    assert server.gpu.sizes + server.engine_sizes == [4, 4, 2]  # the last one may be alone


@pytest.mark.parametrize("bad", [-1, 13], ids=["refused", "failed on the GPU"])
def test_one_request_does_not_fail_the_others(server: Server, bad: float) -> None:
    for number in (1, bad, 3):
        server.ask(number)
    server.batcher.step()
    while server.gpu.running:
        server.end()
    assert server.answers[1] == [[2]]
    assert server.answers[3] == [[6]]
    assert "this one" in server.answers[bad]
    server.ask(5, 6, 7, 8)
    server.batcher.step()
    server.end()
    assert server.answers[5] == [[10], [12], [14], [16]]


def test_what_computes_is_answered_before_the_end(server: Server) -> None:
    ended = threading.Event()

    def close() -> None:
        import asyncio

        asyncio.run(server.batcher.close(ended.set))

    for number in range(1, 6):
        server.ask(number)
    server.batcher.step()
    closing = threading.Thread(target=close)
    closing.start()
    until = time.monotonic() + 30
    while server.batcher._release is None:
        assert time.monotonic() < until
    server.batcher.step()
    assert not ended.is_set()
    while server.gpu.running:
        server.end()
    closing.join(30)
    assert ended.is_set()
    assert len(server.answers) == 5


def test_no_answer_is_lost_under_load(server: Server) -> None:
    """Requests come from a thread while another ends calls at random and this one answers."""
    looks, gpu, stop = server.looks, server.gpu, threading.Event()
    server.batcher.on_done = looks.set
    random = np.random.default_rng(0)
    sizes = [int(n) for n in random.integers(1, 7, 150)]
    numbers = iter(range(100, 10**6))

    def ends() -> None:
        while not stop.is_set():
            for call in list(gpu.running)[:1]:
                call.ended.set()
            time.sleep(0.0002)

    def asks(count: int, then: Callable[[], None]) -> None:
        for size in sizes[:count]:
            server.ask(*[next(numbers) for _ in range(size)])
            looks.set()
            time.sleep(0.0003 if size % 2 else 0)
        then()

    asked = threading.Event()
    threads = [
        threading.Thread(target=ends),
        threading.Thread(target=asks, args=(len(sizes), asked.set)),
    ]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 40
    while not asked.is_set() or len(server.answers) < len(sizes):
        assert time.monotonic() < until, f"{len(server.answers)} of {len(sizes)}"
        looks.wait(0.05)
        looks.clear()
        due = server.batcher.step()
        if due == 0:
            looks.set()
    stop.set()
    for thread in threads:
        thread.join()
    first = 100
    for size in sizes:
        assert server.answers[first] == [[2 * n] for n in range(first, first + size)]
        first += size
    assert max(gpu.sizes) == 4


def test_a_cut_request_whose_last_piece_cannot_begin_is_answered_whole(server: Server) -> None:
    """Its first piece is still computed when the second one fails to begin."""
    server.ask(101, 102, 103, 104, 105)
    server.batcher.step()
    server.ask(*range(201, 204))
    begin, calls = server.gpu.begin, []

    def fails_once(parts: Parts) -> Call:
        calls.append(len(parts))
        if len(calls) == 1:
            raise RuntimeError("out of memory")
        return begin(parts)

    server.gpu.begin = fails_once  # type: ignore[method-assign]
    for call in server.gpu.running:
        call.ended.set()
    server.batcher._executions[0].call.is_done = lambda: False  # type: ignore[method-assign]
    server.batcher.step()
    while server.gpu.running:
        server.end()
    assert server.answers == {
        101: [[2 * n] for n in range(101, 106)],
        201: [[2 * n] for n in range(201, 204)],
    }


def test_a_cut_request_fails_once_and_when_nothing_reads_it_any_more(server: Server) -> None:
    told: list[int] = []
    tell = server._tell

    def watched(requests: list[Request]) -> None:
        told.append(len(server.gpu.running))
        tell(requests)

    server._tell = watched  # type: ignore[method-assign]
    server.ask(13, 2, 3, 4, 5, 6, 7, 8)  # its first piece fails on the GPU
    server.batcher.step()
    server.batcher.step()
    assert server.gpu.sizes == [4, 4]
    for call in server.gpu.running:
        call.ended.set()
    while server.gpu.running:
        server.batcher.step()
    assert server.answers == {13: "the GPU stumbled"}
    assert told == [0]
    server.ask(1, 2, 3, 4)
    server.batcher.step()
    server.end()
    assert server.answers[1] == [[2], [4], [6], [8]]


def test_a_slow_execution_refuses_nobody_for_long(server: Server) -> None:
    """What is still to come is expected anew with each answer."""

    def flood() -> None:
        for _ in range(8):
            server.ask(*[next(numbers) for _ in range(4)])
        server.batcher.step()

    numbers = iter(range(100, 10**6))
    flood()
    first, long_ns = server.batcher._executions[0], 100 * 10**9
    server.batcher._executions[0] = replace(  # as if it had taken so long
        first, begun_ns=first.begun_ns - long_ns, started_ns=first.started_ns - long_ns
    )
    server.end()
    for _ in range(60):  # quick ones, always two in flight
        if server.batcher._waiting.samples < 16:
            flood()
        server.end()
    urgent = Request(
        arrays={"x": np.array([[1.0]], np.float32)},
        deliver=server._tell,
        priority=1,
        deadline_ns=time.perf_counter_ns() + 80 * 10**9,
    )
    server.batcher.submit(urgent)  # raises, if the slow one is still counted
    while server.gpu.running:
        server.end()
    assert server.answers[1] == [[2]]
