"""gRPC without a socket: a server in one event loop, and clients made of frames of HTTP/2."""

from __future__ import annotations

import asyncio
import struct
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import hpack
import numpy as np
from tritonclient.grpc import service_pb2

from tessella.server import Limits, http2_connection
from tessella.server.app import App
from tessella.server.describing import Describing
from tessella.server.doors import Doors
from tessella.server.grpc_front import GrpcFront
from tessella.server.guard import Guard
from tessella.server.http2_connection import Connection
from tessella.server.http2_frames import Kind, frame
from tessella.server.listening import bind
from tests.support.engines import Scores, expected_scores, repository
from tests.support.wires import Wire

IMAGE = np.random.default_rng(3).normal(size=(1, 3, 8, 8)).astype(np.float32)
INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
LIMITS = Limits(held_bytes=1 << 20)


class Place:
    """A server without a socket: one event loop, an engine, and as many connections as asked."""

    def __init__(self, limits: Limits = LIMITS, loop: Any = None) -> None:
        self.loop = loop or asyncio.new_event_loop()
        self.engine = Scores()
        self.listener = bind("127.0.0.1", 0)
        self.models = repository({"flowers": self.engine}, limits=limits)
        self.models.load_all()
        guard = Guard(host="127.0.0.1", token=None)
        self.app = App(self.models, guard, limits, rest=Describing(self.models, token=False))
        self.front = GrpcFront(self.app, guard, self.listener, Doors(grpc_port=0), limits)
        self.limits = limits

    def close(self) -> None:
        self.run(self.models.close())
        self.app._images.close()
        self.listener.close()
        self.loop.close()

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def turn(self, seconds: float = 0.0) -> None:
        self.run(asyncio.sleep(seconds))

    def until(self, condition: Callable[[], bool]) -> None:
        """Turn until it is so."""
        end = time.monotonic() + 50
        while not condition():
            assert time.monotonic() < end
            self.turn()
            time.sleep(0.001)

    def is_done(self) -> bool:
        """Whether every call so far has its answer, sent or not."""
        return self.front._shared.calls == 0 and not self.models.get("flowers").is_used

    def client(self) -> Client:
        return Client(self)

    def is_at_rest(self) -> bool:
        """Whether nothing is held for anybody."""
        shared = self.front._shared
        held = self.app.bodies.held_bytes, self.app.bodies.unread_bytes
        return (shared.calls, shared.questions, shared.streams, *held) == (0, 0, 0, 0, 0)


class Client:
    """One connection, from the client's side."""

    def __init__(self, place: Place) -> None:
        self.place, self.wire, self.encoder = place, Wire(), hpack.Encoder()
        self.decoder = hpack.Decoder()
        self._read = 0
        self.bodies: defaultdict[int, list[bytes]] = defaultdict(list)
        self.last: dict[int, dict[bytes, bytes]] = {}
        self.resets: dict[int, int] = {}
        self.code: int | None = None

        async def connect() -> Connection:
            made = place.front._protocol()
            self.wire.protocol = made
            made.connection_made(self.wire)
            return made

        self.connection = place.run(connect())

    def send(self, *frames: bytes) -> None:
        async def receive() -> None:
            for part in frames:
                self.connection.data_received(part)

        self.place.run(receive())

    def greet(self, **settings: int) -> Client:
        numbers = {"window": 4, "frames": 5}
        pairs = [struct.pack(">HL", numbers[n], v) for n, v in settings.items()]
        self.send(http2_connection.PREFACE + frame(Kind.SETTINGS, 0, 0, b"".join(pairs)))
        return self

    def block(self, path: str = INFER, **more: str) -> bytes:
        lines = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "here"),
                 ("te", "trailers"), ("content-type", "application/grpc")]  # fmt: skip
        lines += [(name.replace("_", "-"), value) for name, value in more.items()]
        return self.encoder.encode(lines)

    def call(self, number: int, message: bytes, path: str = INFER, **more: str) -> bytes:
        return self.head(number, path, **more) + frame(Kind.DATA, 1, number, message)

    def head(self, number: int, path: str = INFER, **more: str) -> bytes:
        return frame(Kind.HEADERS, 4, number, self.block(path, **more))

    def look(self) -> Client:
        """Take what has come: bodies and last headers by stream, resets, and why it ends."""
        self.place.turn()
        sent = self.wire.sent
        while len(sent) - self._read >= 9:
            high, low, kind, flags, number = struct.unpack_from(">BHBBL", sent, self._read)
            start = self._read + 9
            self._read = start + (high << 16 | low)
            payload = sent[start : self._read]
            if kind == Kind.HEADERS:
                headers = dict(self.decoder.decode(payload, raw=True))
                if flags & 1:
                    self.last[number] = headers
            elif kind == Kind.DATA:
                self.bodies[number].append(payload)
            elif kind == Kind.RST_STREAM:
                self.resets[number] = struct.unpack(">L", payload)[0]
            elif kind == Kind.GOAWAY:
                self.code = struct.unpack_from(">L", payload, 4)[0]
                assert self.wire.is_closing()
        return self

    def answer(self, number: int) -> tuple[bytes, dict[bytes, bytes]]:
        """The body and the last headers of a stream; waits for them."""
        until = time.monotonic() + 50
        while number not in self.look().last:
            assert time.monotonic() < until, (self.bodies, self.resets, self.code)
            time.sleep(0.001)
        return b"".join(self.bodies[number]), self.last[number]


def message(image: np.ndarray = IMAGE) -> bytes:
    """A request as it lies in frames."""
    request = service_pb2.ModelInferRequest(model_name="flowers")
    request.inputs.add(name="image", datatype="FP32", shape=image.shape)
    request.raw_input_contents.append(image.tobytes())
    content = request.SerializeToString()
    return struct.pack(">BL", 0, len(content)) + content


def scores_of(body: bytes) -> np.ndarray:
    flag, size = struct.unpack_from(">BL", body)
    assert (flag, size) == (0, len(body) - 5)
    answer = service_pb2.ModelInferResponse.FromString(body[5:])
    (output,) = answer.outputs
    assert (output.name, output.datatype, answer.model_name) == ("scores", "FP32", "flowers")
    return np.frombuffer(answer.raw_output_contents[0], np.float32).reshape(output.shape)


def is_right(client: Client, number: int, image: np.ndarray = IMAGE) -> bool:
    body, last = client.answer(number)
    assert last[b"grpc-status"] == b"0"
    return np.allclose(scores_of(body), expected_scores(image), rtol=1e-4, atol=1e-4)


SETTING = struct.Struct(">HL")


def of_stream(kind: Kind, payload: bytes, flags: int = 0, number: int = 1) -> bytes:
    return frame(kind, flags, number, payload)


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time passes when a test says so."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s
