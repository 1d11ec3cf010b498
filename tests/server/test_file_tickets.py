"""Tickets with JPEG files: decoded together, computed some at a time, answered each by its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tessella.core.errors import ServeError
from tessella.core.jpeg import Frame
from tessella.server import tickets
from tessella.server.file_tickets import PLENTY, TOGETHER, FileTickets
from tessella.server.jpegs import frames_of
from tessella.server.lane import Lane, aligned, make_memory
from tessella.server.repository import Model
from tessella.server.tickets import Ticket
from tessella.server.waiting import Request
from tests.support.engines import RECORD, Scores, expected_scores, repository
from tests.support.planes import jpeg

pytestmark = pytest.mark.timeout(60)
PLACE = 1 << 13  # bytes of a ticket


class Decoding:
    """The host's pixels, once they may be made; those of a file of 9 rows make the engine fail."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.may_go = threading.Event()

    def __call__(self, files: Sequence[Any], frames: Sequence[Frame] | None) -> np.ndarray:
        assert frames is None, "an acceptor may change its lane"
        self.sizes.append(len(files))
        assert self.may_go.wait(30)
        made = np.stack([RECORD(bytes(content)) for content in files])
        read = frames_of(files)
        assert read is not None
        made[[frame.height == 9 for frame in read]] = 666
        return made


class Acceptor:
    """An acceptor with a lane, and what it was told: scores, or an error."""

    def __init__(self, numbers: int) -> None:
        memory = make_memory(1 << 20)
        self.lane = Lane(memory)
        self.sends = 0
        self.told: dict[int, np.ndarray | ServeError] = {}
        self._ends: dict[int, int] = {}
        self._left = threading.Semaphore(0)
        self._numbers = numbers

    def ticket(self, number: int, files: list[bytes], **changed: int) -> Ticket:
        content, start = b"".join(files), number * PLACE
        self.lane.write(start, memoryview(content))
        self._ends[number] = start + aligned(len(content))
        sizes = tuple(map(len, files))
        kinds: dict[str, Any] = {"priority": 2, "deadline_ns": 0, **changed}
        return Ticket(
            number, model=0, start=start, end=start + PLACE, sizes=sizes, letter=b"p", **kinds
        )

    def send(self, frames: bytes) -> None:
        self.sends += 1
        for letter, content in tickets.Frames().feed(frames):
            if letter == b"o":
                number, spent_ns, (rows, classes) = tickets.unpack_done(content)
                assert spent_ns[0] > 0
                found = self.lane.array(self._ends[number], (rows, classes), np.dtype(np.float32))
                self.told[number] = found.copy()
            else:
                number, error = tickets.unpack_error(content)
                self.told[number] = error
            self._left.release()

    def wait(self) -> None:
        for _ in range(self._numbers):
            assert self._left.acquire(timeout=30)


class Room:
    """One model, whose batcher has a thread; what is to come soon comes at once, one by one."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.members: list[int] = []
        self._lock = threading.RLock()

    def soon(self, call: Callable[[], None]) -> None:
        with self._lock:
            call()

    def with_model(self, number: int, use: Callable[[Model], None]) -> None:
        use(self.model)

    def wait(self, model: Model, request: Request) -> None:
        self.members.append(request.members)
        model.batcher.submit(request)


def test_what_was_decoded_together_waits_together_and_is_answered_apart() -> None:
    decoding = Decoding()
    models = repository({"flowers": Scores()}, decoder_for=lambda engine: decoding)
    models.load_all()
    room = Room(models.get("flowers"))
    files, acceptor = FileTickets(room), Acceptor(24)
    pictures = {number: [jpeg(10 + number, 12, "4:2:0")] for number in range(24)}
    pictures[5] = [jpeg(side, 13, "4:2:0") for side in (20, 21, 22)]
    pictures[17] = [jpeg(9, 12, "4:2:0")]
    changed = {3: {"priority": 1}, 11: {"deadline_ns": 2**62}}
    for number, some in pictures.items():
        ticket = acceptor.ticket(number, some, **changed.get(number, {}))
        if number == 20:  # its place has no room for the scores,
            ticket = ticket._replace(end=ticket.start + aligned(len(some[0])))
        files.start(acceptor, ticket)
    assert not files.is_busy
    with pytest.raises(ServeError, match="does not lie in its lane"):
        files.start(acceptor, acceptor.ticket(24, [jpeg(20, 13, "4:2:0")])._replace(start=1 << 20))
    decoding.may_go.set()
    acceptor.wait()
    for number, some in pictures.items():
        told = acceptor.told[number]
        if number in (17, 20):
            assert isinstance(told, ServeError)
            assert told.status == 500
        else:
            wanted = expected_scores(np.stack([RECORD(content) for content in some]))
            np.testing.assert_allclose(told, wanted, rtol=1e-3, atol=1e-3)
    assert max(room.members) == TOGETHER
    # one thread has taken the first alone: its company, those cut out of it, and each of the failed
    assert len(room.members) <= 12 + TOGETHER
    counted = room.model.statistics
    assert counted.queue.count == 23
    assert acceptor.sends < 24
    asyncio.run(models.close())


def test_plenty_is_told_until_it_is_decoded() -> None:
    decoding = Decoding()
    models = repository({"flowers": Scores()}, decoder_for=lambda engine: decoding)
    models.load_all()
    room, acceptor = Room(models.get("flowers")), Acceptor(PLENTY)
    files, room.model.max_batch = FileTickets(room), 6  # which eights would not fill
    for number in range(PLENTY):
        assert not files.is_busy
        files.start(acceptor, acceptor.ticket(number, [jpeg(20, 13, "4:2:0")]))
    assert files.is_busy
    decoding.may_go.set()
    acceptor.wait()
    assert not files.is_busy
    assert sum(decoding.sizes) == sum(room.members) == PLENTY
    assert max(room.members) == 2
    asyncio.run(models.close())
