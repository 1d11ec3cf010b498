"""HTTP/2 of our own under gRPC: every cut of its frames, windows, and clients that misuse it.

A client made of frames, whose header blocks are packed by the hpack library; most tests talk to a
connection over a transport of their own, in one thread.
"""

from __future__ import annotations

import asyncio
import gzip
import random
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from tessella.server import Limits, grpc_calls, grpc_front, http2_connection
from tessella.server.counts import Counts
from tessella.server.doors import Doors
from tessella.server.grpc_front import GrpcFront
from tessella.server.grpc_messages import cut
from tessella.server.guard import Guard
from tessella.server.http2_frames import Code, Heads, Kind, frame
from tessella.server.listening import make_room
from tests.support.engines import Scores, expected_scores
from tests.support.http2 import (
    IMAGE,
    INFER,
    LIMITS,
    SETTING,
    STREAM,
    Clock,
    Place,
    is_right,
    message,
    of_stream,
)

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place()
    yield made
    made.close()


class Other(Scores):
    """The next plan of the same network, whose answers have another name and type."""

    def __init__(self) -> None:
        super().__init__()
        (spec,) = self.outputs
        self.outputs = (replace(spec, name="logits", dtype="float64"),)

    def compute(self, image: np.ndarray) -> dict[str, np.ndarray]:
        return {"logits": expected_scores(image)}


def test_calls_however_their_frames_are_cut(place: Place) -> None:
    """Two calls that interleave, with padding, priority and a block in two frames, byte by byte."""
    client = place.client()
    block, body = client.block(), message()
    other = 2 * IMAGE
    padded = bytes([7]) + body[:100] + bytes(7)
    whole = b"".join((
        http2_connection.PREFACE, frame(Kind.SETTINGS, 0, 0),
        frame(Kind.HEADERS, 8 | 32, 1, bytes([3]) + bytes(4) + b"\x10" + block[:9] + bytes(3)),
        frame(Kind.CONTINUATION, 4, 1, block[9:]),
        client.head(3), frame(Kind.DATA, 8, 1, padded), frame(99, 255, 7, b"unknown"),
        frame(Kind.DATA, 0, 3, message(other)[:3]), frame(Kind.DATA, 0, 3),
        frame(Kind.DATA, 1, 1, body[100:]), frame(Kind.DATA, 0, 3, message(other)[3:]),
        frame(Kind.DATA, 1, 3),
    ))  # fmt: skip
    client.send(*(whole[i : i + 1] for i in range(len(whole))))
    first = client.place.client().greet()
    first.send(first.call(1, body), first.call(3, body))  # the second is known by its bytes
    assert is_right(first, 1)
    assert is_right(first, 3)
    assert is_right(client, 1)
    assert is_right(client, 3, other)
    assert place.is_at_rest()


def test_answers_wait_for_the_windows(place: Place) -> None:
    client = place.client().greet(window=0)
    client.send(client.call(1, message()), client.call(3, message()))
    place.until(place.is_done)
    assert not client.look().bodies
    size = struct.pack(">L", 1)
    for _ in range(4):
        client.send(of_stream(Kind.WINDOW_UPDATE, size))
    assert list(map(len, client.look().bodies[1])) == [1] * 4
    assert not client.bodies[3]
    client.send(frame(Kind.SETTINGS, 0, 0, SETTING.pack(4, 50)))
    assert [sum(map(len, client.look().bodies[n])) for n in (1, 3)] == [54, 50]
    client.send(frame(Kind.SETTINGS, 0, 0, SETTING.pack(4, 0)))  # windows of less than 0
    for number in (3, 1):
        client.send(of_stream(Kind.WINDOW_UPDATE, struct.pack(">L", 10_000), number=number))
    assert is_right(client, 1)
    assert is_right(client, 3)
    assert place.is_at_rest()


def test_a_block_means_what_the_table_says_by_then() -> None:
    """A table of one entry, exchanged twice in one block: the last may lie where the first lay."""
    usual, of_table = b"\x83\x87\x84", b"\xbe"  # POST, https, /

    def added(value: bytes) -> bytes:
        return b"\x40\x01x\x01" + value

    heads = Heads()
    heads.read(b"\x3f\x09" + usual + added(b"1"))
    before = heads.read(usual + of_table)
    heads.read(usual + added(b"2") + added(b"3"))
    after = heads.read(usual + of_table)
    assert before is not None
    assert after is not None
    assert (before[b"x"], after[b"x"]) == (b"1", b"3")


MISUSES = {
    "not HTTP/2": (Code.PROTOCOL_ERROR, lambda c: b"GET / HTTP/1.1\r\n\r\n"),
    "no settings": (Code.PROTOCOL_ERROR, lambda c: http2_connection.PREFACE + c.head(1)),
    "data of no stream": (Code.PROTOCOL_ERROR, lambda c: of_stream(Kind.DATA, b"x")),
    "data of stream 0": (Code.PROTOCOL_ERROR, lambda c: of_stream(Kind.DATA, b"x", number=0)),
    "an even stream": (Code.PROTOCOL_ERROR, lambda c: c.head(2)),
    "a block without its end": (
        Code.PROTOCOL_ERROR, lambda c: of_stream(Kind.HEADERS, c.block()) + c.head(3)
    ),
    "nothing to continue": (
        Code.PROTOCOL_ERROR, lambda c: of_stream(Kind.CONTINUATION, c.block(), 4)
    ),
    "data behind the end": (
        Code.STREAM_CLOSED, lambda c: c.call(1, message()) + of_stream(Kind.DATA, b"x")
    ),
    "headers within a body": (Code.PROTOCOL_ERROR, lambda c: c.head(1) + c.head(1)),
    "too much padding": (
        Code.PROTOCOL_ERROR, lambda c: c.head(1) + of_stream(Kind.DATA, b"\x05abc", 8)
    ),
    "depends on itself": (
        Code.PROTOCOL_ERROR, lambda c: of_stream(Kind.PRIORITY, struct.pack(">LB", 1, 0))
    ),
    "push": (Code.PROTOCOL_ERROR, lambda c: of_stream(Kind.PUSH_PROMISE, bytes(4))),
    "reset of no stream": (Code.PROTOCOL_ERROR, lambda c: of_stream(Kind.RST_STREAM, bytes(4))),
    "a short ping": (Code.FRAME_SIZE_ERROR, lambda c: of_stream(Kind.PING, b"1234567", number=0)),
    "a ping of a stream": (Code.PROTOCOL_ERROR, lambda c: of_stream(Kind.PING, bytes(8))),
    "half a setting": (Code.FRAME_SIZE_ERROR, lambda c: of_stream(Kind.SETTINGS, b"12", number=0)),
    "a window of 2**31": (
        Code.FLOW_CONTROL_ERROR,
        lambda c: of_stream(Kind.SETTINGS, SETTING.pack(4, 1 << 31), number=0),
    ),
    "small frames": (
        Code.PROTOCOL_ERROR, lambda c: of_stream(Kind.SETTINGS, SETTING.pack(5, 100), number=0)
    ),
    "a window grows by 0": (
        Code.PROTOCOL_ERROR, lambda c: of_stream(Kind.WINDOW_UPDATE, bytes(4), number=0)
    ),
    "a window overflows": (
        Code.FLOW_CONTROL_ERROR,
        lambda c: 2 * of_stream(Kind.WINDOW_UPDATE, struct.pack(">L", (1 << 31) - 1), number=0),
    ),
    "a huge frame": (
        Code.FRAME_SIZE_ERROR, lambda c: struct.pack(">BHBBL", 0x10, 1, Kind.DATA, 0, 1)
    ),
    "no header block": (Code.COMPRESSION_ERROR, lambda c: of_stream(Kind.HEADERS, b"\xff" * 9, 4)),
    "a bomb of headers": (
        Code.COMPRESSION_ERROR,
        lambda c: of_stream(
            Kind.HEADERS, b"\x40\x01x\x7f\x81\x1e" + b"y" * 4000 + b"\xbe" * 9000, 4
        ),
    ),
    "a huge header block": (
        Code.ENHANCE_YOUR_CALM, lambda c: of_stream(Kind.HEADERS, bytes(20_000))
    ),
    "much padded data": (
        Code.ENHANCE_YOUR_CALM, lambda c: c.head(1) + struct.pack(">BHBBL", 1, 0, Kind.DATA, 8, 1)
    ),
    "much of an unknown kind": (
        Code.ENHANCE_YOUR_CALM, lambda c: struct.pack(">BHBBL", 1, 0, 99, 0, 1)
    ),
    "endless continuations": (
        Code.ENHANCE_YOUR_CALM,
        lambda c: of_stream(Kind.HEADERS, b"") + 99 * of_stream(Kind.CONTINUATION, b""),
    ),
    "a flood of pings": (
        Code.ENHANCE_YOUR_CALM, lambda c: 9000 * of_stream(Kind.PING, bytes(8), number=0)
    ),
    "a flood of settings": (
        Code.ENHANCE_YOUR_CALM, lambda c: 600 * frame(Kind.SETTINGS, 0, 0)
    ),
    "a flood of empty data": (
        Code.ENHANCE_YOUR_CALM, lambda c: c.head(1) + 9000 * of_stream(Kind.DATA, b"")
    ),
    "rapid resets": (
        Code.ENHANCE_YOUR_CALM,
        lambda c: b"".join(
            c.head(n) + of_stream(Kind.RST_STREAM, bytes(4), number=n) for n in range(1, 5000, 2)
        ),
    ),
}  # fmt: skip


@pytest.fixture
def still() -> Iterator[Place]:
    """A place where no time passes, so that what a second may bring does not depend on it."""
    made = Place(loop=Clock())
    yield made
    made.close()


def test_misuse_ends_its_connection_alone(still: Place) -> None:
    place = still
    good, calm = place.client().greet(), place.client().greet()
    for first in range(1, 6000, 2000):  # as many streams given up as in the last case, in seconds
        calm.send(*(
            calm.head(n) + of_stream(Kind.RST_STREAM, bytes(4), number=n)
            for n in range(first, first + 2000, 2)
        ))  # fmt: skip
        assert calm.look().code is None
        place.loop.now_s += 1
    for number, (name, (code, misuse)) in enumerate(MISUSES.items()):
        client = place.client()
        content = misuse(client)
        if name not in ("not HTTP/2", "no settings"):
            client.greet()
        client.send(content)
        assert client.look().code == code, name
        client.send(b"more of it")
        good.send(good.call(2 * number + 1, message()))
        assert is_right(good, 2 * number + 1), name
        assert place.is_at_rest(), name


def test_where_no_descriptors_are_left_the_oldest_silent_connections_go(still: Place) -> None:
    clients = []
    for _ in range(4):
        clients.append(still.client().greet())
        still.loop.now_s += 0.1
    clients[0].send(clients[0].head(1))  # it has a call

    async def room() -> int:
        return make_room([client.connection for client in clients], most=2)

    assert still.run(room()) == 2
    assert [client.wire.is_closing() for client in clients] == [False, True, True, False]


def test_what_one_call_does_wrong_ends_that_call_alone(place: Place) -> None:
    client = place.client().greet()
    refused = {
        1: (client.call(1, message(), path="/other/Call"), b"12"),
        3: (client.call(3, b""), b"3"),
        5: (client.call(5, message() + b"more"), b"3"),
        7: (client.call(7, b"\x02" + message()[1:]), b"3"),
        9: (client.call(9, b"\x01" + message()[1:], grpc_encoding="br"), b"12"),
        11: (client.call(11, struct.pack(">BL", 0, 1 << 31)), b"8"),
        13: (client.call(13, message(), grpc_timeout="soon"), b"3"),
        15: (
            client.head(15)
            + 3 * of_stream(Kind.DATA, struct.pack(">BL", 0, 60 << 20) + bytes(400_000), number=15),
            b"14",  # more than may be held
        ),
    }
    for number, (frames, status) in refused.items():
        client.send(frames)
        assert client.answer(number)[1][b"grpc-status"] == status, number
    client.send(client.call(21, message()))
    assert is_right(client, 21)
    strange = [(":method", "POST"), (":path", INFER), ("x", "1"), (":scheme", "http")]
    client.send(frame(Kind.HEADERS, 5, 23, client.encoder.encode(strange)))
    assert client.look().resets[23] == Code.PROTOCOL_ERROR
    assert place.is_at_rest()


def test_a_bomb_and_a_compressed_message(place: Place) -> None:
    client = place.client().greet()
    packed = gzip.compress(message()[5:])
    client.send(client.call(1, b"\x01" + struct.pack(">L", len(packed)) + packed,
                            grpc_encoding="gzip"))  # fmt: skip
    assert is_right(client, 1)
    client.send(client.head(5, STREAM, grpc_encoding="gzip"))
    for whole in (packed, b"no gzip", packed):
        parts = b"\x01", struct.pack(">L", len(whole)), whole
        client.send(*(of_stream(Kind.DATA, part, number=5) for part in parts))
    client.send(of_stream(Kind.DATA, b"", 1, 5))
    assert client.answer(5)[1][b"grpc-status"] == b"0"
    answers, told = client.answer(5)[0], []
    while answers:
        size = 5 + struct.unpack_from(">L", answers, 1)[0]
        told.append(service_pb2.ModelStreamInferResponse.FromString(answers[5:size]))
        answers = answers[size:]
    assert ["decompress" in t.error_message for t in told] == [False, True, False]
    bomb = gzip.compress(bytes(65 << 20), 1)
    client.send(client.call(7, b"\x01" + struct.pack(">L", len(bomb)) + bomb, grpc_encoding="gzip"))
    assert client.answer(7)[1][b"grpc-status"] == b"8"
    assert place.is_at_rest()


def test_silent_clients_are_given_up() -> None:
    place = Place(Limits(head_s=20, body_idle_s=20, answer_bytes_s=0.1), Clock())

    def pass_time(seconds: float) -> None:
        for _ in range(round(seconds)):  # the connections look every second
            place.loop.now_s += 1
            place.turn()

    try:
        quiet, cut, silent = place.client(), place.client().greet(), place.client().greet()
        cut.send(of_stream(Kind.HEADERS, cut.block()[:5]))
        silent.send(silent.head(1) + of_stream(Kind.DATA, message()[:50]))
        idle, deaf, full = (place.client().greet(**s) for s in ({}, {"window": 0}, {}))
        deaf.send(deaf.call(1, message()), deaf.call(3, message()))
        full.connection.pause_writing()
        # both of its answers are there, and wait for a window
        place.until(lambda: sum(place.engine.batches) == 2)
        place.until(lambda: not place.models.get("flowers").is_used)
        for _ in range(4):  # who takes some now and then is not given up
            pass_time(8)
            deaf.send(of_stream(Kind.WINDOW_UPDATE, struct.pack(">L", 1), number=3))
        body, last = silent.answer(1)
        assert (body, last[b"grpc-status"]) == (b"", b"4")
        assert deaf.look().resets == {1: Code.CANCEL}
        assert full.wire.is_closing()
        pass_time(45)
        assert deaf.look().resets == {1: Code.CANCEL, 3: Code.CANCEL}
        assert quiet.look().code == cut.look().code == Code.ENHANCE_YOUR_CALM
        idle.send(idle.call(1, message()))
        assert is_right(idle, 1)
        assert place.is_at_rest()
    finally:
        place.close()


def test_a_call_whose_deadline_passes_while_it_waits_is_not_computed(place: Place) -> None:
    """Its client is silent: the time is the server's own, and no reset tells it."""
    client = place.client().greet()
    place.engine.gate = threading.Event()
    client.send(client.call(1, message()))
    place.until(lambda: place.engine.batches == [1])
    client.send(client.call(3, message(), grpc_timeout="1m"))
    time.sleep(0.002)
    place.engine.gate.set()
    assert is_right(client, 1)
    assert client.answer(3)[1][b"grpc-status"] == b"8"
    client.send(client.call(5, message(), grpc_timeout="1M"))
    assert is_right(client, 5)
    assert place.engine.batches == [1, 1]
    assert place.is_at_rest()


def test_who_leaves_holds_nothing(place: Place) -> None:
    """Streams and connections that end before their message, its answer, or its last part."""
    for count in (1, 2, 3):
        client = place.client().greet(window=0)
        call = client.call(1, message())
        client.send(*(client.head(3), call, client.head(5, STREAM))[:count])
        if count == 3:
            client.send(*(of_stream(Kind.RST_STREAM, bytes(4), number=n) for n in (1, 3, 5)))
        client.connection.connection_lost(None)
        place.turn()
        assert place.is_at_rest()
        place.until(lambda: not place.models.get("flowers").is_used)


@pytest.mark.parametrize("most", [1 << 20, 1 << 30])
def test_a_stream_waits_for_its_client(most: int) -> None:
    """Who sends a stream without an end, and reads no answer, is not read beyond his window, nor
    beyond what may be held.
    """
    place = Place(Limits(held_bytes=most))
    client = place.client().greet(window=0)
    client.send(client.head(1, STREAM))
    client.send(of_stream(Kind.DATA, 300 * message()))
    place.until(lambda: bool(place.engine.batches))
    place.until(lambda: not place.models.get("flowers").is_used)
    place.turn(0.02)
    assert place.app.bodies.held_bytes > 0
    assert len(place.engine.batches) == 1  # its answer waits
    tiny = of_stream(Kind.DATA, bytes(5 * 200_000))  # messages of nothing
    client.send(tiny, tiny, tiny)
    if most > 4 << 20:
        assert len(client.connection.streams[1].handler._queue) == grpc_calls.MOST_QUEUED
    else:
        assert place.app.bodies.held_bytes == 0
    client.send(tiny)
    assert client.look().code == Code.FLOW_CONTROL_ERROR
    place.until(place.is_at_rest)
    place.close()


def test_messages_of_a_stream_that_come_in_pieces_while_one_is_computed(place: Place) -> None:
    client = place.client().greet()
    whole = message() * 3
    client.send(client.head(1, STREAM), of_stream(Kind.DATA, whole[: 3 * len(whole) // 5]))
    client.send(of_stream(Kind.DATA, whole[3 * len(whole) // 5 :], flags=1))
    body, last = client.answer(1)
    assert last[b"grpc-status"] == b"0"
    sizes = []
    while body:
        size = struct.unpack_from(">L", body, 1)[0]
        answer = service_pb2.ModelStreamInferResponse.FromString(body[5 : 5 + size])
        sizes.append(len(answer.infer_response.raw_output_contents))
        body = body[5 + size :]
    assert sizes == [1, 1, 1]
    assert place.is_at_rest()


def test_what_would_hold_up_the_others_is_refused(place: Place) -> None:
    """Parts without end in a small message, and settings that move all windows again and again."""
    began_s = time.thread_time()  # other work on the machine does not count
    assert cut(memoryview(b"\x3a\x00" * 300_000)) is None
    assert cut(memoryview(b"\x0a\x00" * 300_000)) is None
    client = place.client().greet()
    windows = b"".join(SETTING.pack(4, 1000 + i % 2) for i in range(170))
    client.send(*[frame(Kind.SETTINGS, 0, 0, windows)] * 60)
    assert client.look().code == Code.ENHANCE_YOUR_CALM
    assert time.thread_time() - began_s < 2


def test_who_has_all_calls_does_not_make_the_server_look_dead(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_front, "MOST_CALLS", 2)
    monkeypatch.setattr(grpc_front, "MOST_QUESTIONS", 2)
    live = INFER.replace("ModelInfer", "ServerLive")
    client = place.client().greet()
    client.send(client.head(1), client.head(3), client.head(5), client.call(7, bytes(5), live))
    assert client.answer(5)[1][b"grpc-status"] == b"8"
    assert client.answer(7) == (b"\0\0\0\0\2\x08\1", client.last[7])
    assert client.last[7][b"grpc-status"] == b"0"
    client.send(client.head(9, live), client.head(11, live), client.head(13, live))
    assert client.answer(13)[1][b"grpc-status"] == b"8"
    client.connection.connection_lost(None)
    assert place.is_at_rest()


def test_a_stream_without_an_end_does_not_hold_up_a_stop(place: Place) -> None:
    """What has come of it is answered."""
    client = place.client().greet()
    place.run(place.front.start())
    client.send(client.head(1, STREAM), client.head(3, STREAM))
    client.send(of_stream(Kind.DATA, message() * 2, number=3))
    began_s = place.loop.time()
    place.run(place.front.stop(50))
    assert place.loop.time() - began_s < 30
    client.look()
    assert client.last[1][b"grpc-status"] == client.last[3][b"grpc-status"] == b"14"
    assert len(client.bodies[3]) == 2
    assert not client.bodies[1]
    assert place.is_at_rest()


def test_a_models_next_plan_has_its_own_names(place: Place) -> None:
    """What was remembered of answers belongs to the plan that gave them."""
    client = place.client().greet()
    client.send(client.call(1, message()), client.call(3, message()))
    assert is_right(client, 1)
    assert is_right(client, 3)
    place.models._open_engine = lambda *_, **__: Other()
    place.run(place.models.load("flowers"))
    for number in (5, 7):  # as the long way, and as what is remembered
        client.send(client.call(number, message()))
        body, last = client.answer(number)
        assert last[b"grpc-status"] == b"0"
        answer = service_pb2.ModelInferResponse.FromString(body[5:])
        assert [(o.name, o.datatype) for o in answer.outputs] == [("logits", "FP64")]
        logits = np.frombuffer(answer.raw_output_contents[0], np.float64)
        np.testing.assert_allclose(logits[None], expected_scores(IMAGE), rtol=1e-4, atol=1e-4)


def test_random_frames_break_nothing(place: Place) -> None:
    """Frames of good calls, changed at random; errors of Python would come out of ``send``."""
    chance = random.Random(0)
    for _ in range(300):
        client = place.client().greet()
        frames = bytearray(client.call(1, message()) + client.call(3, message(), STREAM))
        for _ in range(chance.choice((1, 2, 8))):
            at = chance.randrange(min(len(frames), 300))
            frames[at] = chance.randrange(256)
        cut = chance.randrange(len(frames))
        client.send(bytes(frames[:cut]), bytes(frames[cut:]))
        client.connection.connection_lost(None)
    place.until(place.is_at_rest)
    client = place.client().greet()
    client.send(client.call(1, message()))
    assert is_right(client, 1)


def test_processes_that_share_a_port_get_as_many_connections(place: Place) -> None:
    """Two of them in one loop, each with a descriptor of its own; one leaves."""
    counts = Counts(2)
    other = GrpcFront(place.app, Guard(host="127.0.0.1", token=None), place.listener.dup(),
                      Doors(grpc_port=0), LIMITS, counted=counts.of(0))  # fmt: skip
    place.front._connections = counts.of(1)
    fronts = [place.front, other]

    async def test() -> None:
        address = place.listener.getsockname()
        for front in fronts:
            await front.start()
        opened = [await asyncio.open_connection(*address) for _ in range(12)]
        while sum(len(front._connections) for front in fronts) < 12:
            await asyncio.sleep(0.01)
        assert all(5 <= len(front._connections) <= 7 for front in fronts)
        left = len(other._connections)
        await place.front.stop(5)
        opened.append(await asyncio.open_connection(*address))
        while len(other._connections) == left:
            await asyncio.sleep(0.01)
        await other.stop(5)
        for _, writer in opened:
            writer.close()

    place.run(test())
    other._listener.close()
