"""A connection beside its requests: answers that its client does not read, and the server's end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from uvicorn.server import ServerState

from tessella.server import Limits
from tessella.server.listening import configured
from tests.support.http2 import Clock, Place, is_right, message
from tests.support.wires import Wire

LIMITS = Limits(body_idle_s=20, answer_bytes_s=0.5, crowded_bytes_s=1, held_bytes=4000)
HEAD = (
    b"POST /v2/models/flowers/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 768\r\n"
    b"Inference-Header-Content-Length: 0\r\n\r\n"
)
REQUEST = HEAD + bytes(768)


class Deaf(Wire):
    """A client that reads when a test says so."""

    unread = 0
    is_aborted = False

    def close(self) -> None:
        if self.unread:
            self._is_closing = True  # until all is read
        else:
            super().close()

    def abort(self) -> None:
        self.is_aborted, self._is_closing, self.unread = True, False, 0
        super().close()

    def write(self, data: bytes) -> None:
        super().write(data)
        self.unread += len(data)
        self.protocol.pause_writing()

    def read(self, nbytes: int) -> None:
        self.unread -= nbytes
        if nbytes and not self.unread:
            self.protocol.resume_writing()

    def get_write_buffer_size(self) -> int:
        return self.unread


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place(LIMITS, Clock())
    yield made
    assert made.is_at_rest()
    made.close()


def connected(place: Place, wire: Wire) -> Wire:
    """A client's connection."""

    async def connect() -> None:
        config = configured(place.app, LIMITS)
        config.load()
        kind = config.http_protocol_class
        wire.protocol = kind(config=config, server_state=ServerState(), app_state={})  # type: ignore[call-arg, arg-type, assignment]
        wire.protocol.connection_made(wire)

    place.run(connect())
    return wire


def asks(place: Place, wire: Wire, *parts: bytes) -> bytes:
    """What was answered to these parts."""

    if not hasattr(wire, "protocol"):
        connected(place, wire)

    async def ask() -> None:
        for part in parts:
            wire.protocol.data_received(part)

    before = len(wire.sent)
    place.run(ask())
    place.until(lambda: len(wire.sent) > before and place.app.bodies.held_bytes == 0)
    return wire.sent[before:]


def passes(place: Place, seconds: float) -> None:
    for _ in range(round(seconds)):
        place.loop.now_s += 1
        place.turn()


def test_who_reads_nothing_of_an_answer_is_cut_off(place: Place) -> None:
    bodies, deaf, slow = place.app.bodies, Deaf(), Deaf()
    assert asks(place, deaf, REQUEST).startswith(b"HTTP/1.1 200")
    assert bodies.unread_bytes == deaf.unread > 0
    assert asks(place, slow, REQUEST).startswith(b"HTTP/1.1 200")
    deaf.protocol.data_received(REQUEST)  # more requests are for when it has read
    deaf.protocol.data_received(REQUEST)
    place.turn()
    assert place.engine.batches == [1, 1]
    for _ in range(5):  # who takes enough of it now and then is not given up
        passes(place, 15)
        slow.read(10)
    assert deaf.is_closing()
    assert not slow.is_closing()
    slow.read(slow.unread)
    assert bodies.unread_bytes == 0
    passes(place, 60)
    assert not slow.is_closing()
    assert asks(place, slow, REQUEST).startswith(b"HTTP/1.1 200")
    slow.read(9)
    passes(place, 21)
    assert slow.is_closing(), "ten are wanted"


def test_who_is_told_to_go_and_does_not_read_goes(place: Place) -> None:
    """A connection that ends behind its answer."""
    last = Deaf()
    asks(place, last, REQUEST.replace(b"Host", b"Connection: close\r\nHost"))
    last.read(last.unread)
    place.until(lambda: last.unread > 0)
    assert place.app.bodies.unread_bytes == last.unread
    passes(place, 21)
    assert last.is_aborted


def test_a_head_behind_a_large_body_is_not_a_large_head(place: Place) -> None:
    first = HEAD.replace(b"768", b"70000") + bytes(70_000)  # more than may be held
    wire = Wire()
    assert asks(place, wire, b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n").count(b" 200 OK") == 1
    before = len(wire.sent)
    asks(place, wire, first + REQUEST[:40])
    asks(place, wire, REQUEST[40:])
    place.until(lambda: b" 200 OK" in wire.sent[before:])
    assert wire.sent[before:].count(b"HTTP/1.1 503") == 1
    place.run(_lost(wire))


@pytest.mark.parametrize("is_known", [False, True])
def test_the_next_request_of_a_server_that_ends_is_answered(
    place: Place, *, is_known: bool
) -> None:
    """A client that asks again and again has sent it before it can know."""
    wires = Wire(), Wire(), Wire()
    for wire in wires:
        asks(place, wire, *(1 + is_known) * [REQUEST])
        place.turn()
    late, later, silent = wires
    for wire in wires:
        wire.protocol.shutdown()
    for wire, parts in (late, [REQUEST[:50], REQUEST[50:]]), (later, (1 + is_known) * [REQUEST]):
        before = len(wire.sent)
        asks(place, wire, *parts)
        place.until(wire.is_closing)
        whole = len(b"".join(parts)) // len(REQUEST)
        assert wire.sent[before:].count(b"HTTP/1.1 200 OK") == whole
        assert wire.sent[before:].count(b"connection: close") == 1
    assert not silent.is_closing()
    passes(place, 1)
    assert silent.is_closing()


@pytest.mark.parametrize("way", ["long", "short"])
def test_who_says_no_more_has_the_answers_to_what_came_whole(place: Place, way: str) -> None:
    """As ``printf … | nc`` shuts its writing side behind a request."""
    request = REQUEST if way == "short" else REQUEST.replace(b"Host", b"X-Unusual: 1\r\nHost")
    asks(place, first := Wire(), request)
    for said, whole in (
        (b"", 0),
        (request[:20], 0),
        (request[:-1], 0),
        (request, 1),
        (2 * request, 2),
        (2 * request + request[:20], 2),
        (request + request[:-1], 1),
    ):
        wire = connected(place, Wire())

        async def ends(wire: Wire = wire, said: bytes = said) -> bool:
            if said:
                wire.protocol.data_received(said)
            return bool(wire.protocol.eof_received())

        assert place.run(ends()) == (whole > 0), said
        place.until(wire.is_closing)
        assert wire.sent.count(b"HTTP/1.1 ") == wire.sent.count(b"HTTP/1.1 200 OK") == whole, said
        place.until(lambda: place.app.bodies.held_bytes == 0)
    wire = connected(place, Wire())

    async def breaks() -> None:
        wire.protocol.data_received(request + b"no HTTP\r\n\r\n")
        wire.protocol.eof_received()

    place.run(breaks())
    place.until(wire.is_closing)
    said = wire.sent.count(b"HTTP/1.1 200 OK"), wire.sent.count(b"HTTP/1.1 400")
    assert said == (1, 1), "what ends it is said, too"
    place.until(lambda: place.app.bodies.held_bytes == 0)
    place.run(_lost(first))


def test_a_client_goes_on_where_it_had_not_read(place: Place) -> None:
    wire = Deaf()
    first = asks(place, wire, REQUEST)
    wire.protocol.data_received(REQUEST[:100])
    wire.protocol.data_received(REQUEST[100:] + REQUEST)
    place.turn()
    assert wire.is_paused
    assert wire.sent == first
    assert place.engine.batches == [1]
    ending = first[-16:]  # the scores of four classes

    def has_read() -> bool:
        wire.read(wire.unread)
        return wire.sent.count(ending) == 3 and not wire.unread

    place.until(has_read)
    assert wire.sent.count(b"HTTP/1.1 200 OK\r\n") == 3
    assert wire.sent.endswith(ending)
    assert not wire.is_paused
    asks(place, wire, REQUEST)
    place.run(_lost(wire))


def test_answers_that_nobody_reads_are_bounded(place: Place) -> None:
    """By HTTP and gRPC together."""
    bodies, clients = place.app.bodies, list[Deaf]()
    deaf = place.client().greet(window=0)
    deaf.send(deaf.call(1, message()))
    place.until(lambda: bodies.unread_bytes > 0)
    while True:
        clients.append(Deaf())
        answer = asks(place, clients[-1], REQUEST)
        assert bodies.unread_bytes <= LIMITS.held_bytes + 768
        if answer.startswith(b"HTTP/1.1 503"):
            break
    assert b"Retry-After" in answer.title()
    assert len(clients) > 2
    assert bodies.least_bytes() == 20  # of each, in 20 s
    for wire in clients:
        place.run(_lost(wire))
    deaf.connection.connection_lost(None)
    assert bodies.unread_bytes == 0
    assert bodies.least_bytes() == 10
    other = place.client().greet()
    other.send(other.call(1, message()))
    assert is_right(other, 1)
    assert asks(place, Wire(), REQUEST).startswith(b"HTTP/1.1 200")


async def _lost(wire: Wire) -> None:
    wire.protocol.connection_lost(None)
