"""An acceptor: a process that takes HTTP, and has its models in the engine's process.

It parses requests and decodes pictures as a server of one process does, with the same app. Its
models' batchers write tensors into the lane, and its other routes are asked of the engine.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import select
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns
from typing import Any, cast

import numpy as np

from tessella.core.errors import ServeError
from tessella.core.jpeg import Frame
from tessella.core.preprocess import Preprocess
from tessella.core.record import from_plain
from tessella.core.spec import DimRange, TensorSpec
from tessella.core.task import TaskRecord
from tessella.server import tickets
from tessella.server.answers import error_answer, reply
from tessella.server.body import Receive, Scope
from tessella.server.engine_process import GREETING
from tessella.server.lane import (
    ALIGNMENT,
    Lane,
    Layouts,
    Places,
    aligned,
    make_memory,
    numpy_type,
)
from tessella.server.looking import Awake
from tessella.server.protocol import Signature, signature
from tessella.server.statistics import Stages, Statistics
from tessella.server.tickets import Ticket
from tessella.server.traffic import Route, Traffic, settled
from tessella.server.versions import unknown_model, unknown_version
from tessella.server.waiting import DEFAULT_PRIORITY, Arrays, Infers, InfersFiles, Waiter

COUNTED_S = 0.5  # how old an acceptor's counts may be in the engine's statistics
RETRY_S = 0.05  # between attempts to reach an engine that is being started
# A turn that reads 40 small requests takes 4 ms, in which the engine should not have to wait.
MOST_TOGETHER = 8
# How long the event loop of an acceptor with one client may wait for its one request, whose way
# through the loop and back takes as long as the execution of an image.
LONE_NS = 10**6
OPEN_S = 5.0  # how long an acceptor waits for it before it takes requests, which are 503 till then


class Link:
    """The connection to the engine's process, and the models behind it. Takes what an app asks of
    a repository.

    Args:
        address: of the socket at which the engine's process takes acceptors.
        order: the lane has 2**order bytes.
        spins: look for a lone request's answer again and again, where cores are idle.

    Attributes:
        has_one_client: whether no other request can come while one is computed.
    """

    def __init__(self, address: str, *, order: int, spins: bool = False) -> None:
        self._address = address
        self._order = order
        self._spins = spins
        self.has_one_client: Callable[[], bool] = lambda: False
        self._engine: _Engine | None = None
        self._models: dict[str, dict[str, RemoteModel]] = {}  # by name and version
        self._defaults: dict[str, RemoteModel] = {}
        self._statistics: dict[str, Statistics] = {}  # by NAME@VERSION
        self._tasks: list[asyncio.Task[None]] = []

    def get(self, name: str, version: str | None = None) -> RemoteModel:
        """As ``Repository.get``.

        Raises:
            ServeError: 404 no such model or version, 503 the engine is not there.
        """
        self.require_ready()
        if not version:
            if (default := self._defaults.get(name)) is None:
                raise unknown_model(name)
            return default
        versions = self._models.get(name)
        if versions is None:
            raise unknown_model(name)
        if version not in versions:
            raise unknown_version(name, version)
        return versions[version]

    def require_ready(self) -> None:
        """Raise ``ServeError`` 503 while the engine is not there."""
        if self._engine is None:
            raise _no_engine()

    async def open(self) -> None:
        """Reach the engine's process, at first and whenever it was started again."""
        self._tasks = [
            asyncio.create_task(self._stay_connected()),
            asyncio.create_task(self._tell_counts()),
        ]
        until = perf_counter_ns() + OPEN_S * 1e9
        while self._engine is None and perf_counter_ns() < until:
            await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        self._send_counts()
        for task in self._tasks:
            task.cancel()
        if self._engine is not None:
            self._engine.transport.close()

    async def answer(self, scope: Scope, receive: Receive, send: Any) -> None:
        """Let the engine's process answer a request that is not for inference: an ASGI app."""
        if self._engine is None:
            await reply(error_answer(_no_engine()), {}, send)
            return
        self._send_counts()  # before a question about them
        text = {name: scope[name] for name in ("method", "path", "scheme", "http_version")}
        text["query_string"] = scope["query_string"].decode("latin-1")
        text["headers"] = [[k.decode("latin-1"), v.decode("latin-1")] for k, v in scope["headers"]]
        body = (await receive())["body"]
        told, content = await self._engine.ask(text, body)
        headers = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in told["headers"]]
        start = {"type": "http.response.start", "status": told["status"], "headers": headers}
        await send(start)
        await send({"type": "http.response.body", "body": content})

    # --- the connection ---------------------------------------------------------------------------

    async def _stay_connected(self) -> None:
        while True:
            try:
                engine = await self._connect()
            except OSError:
                await asyncio.sleep(RETRY_S)
                continue
            await engine.described.wait()
            if not engine.lost.is_set():
                self._engine = engine
            await engine.lost.wait()
            self._engine = None

    async def _connect(self) -> _Engine:
        loop = asyncio.get_running_loop()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(self._address)
            memory = make_memory(1 << self._order)
            lane = Lane(os.dup(memory))
            with os.fdopen(memory, "rb") as handed:
                socket.send_fds(connection, [GREETING], [handed.fileno()])
            connection.setblocking(False)
            lone = _Lone(connection, lambda: self.has_one_client(), spins=self._spins)
            _, engine = await loop.create_unix_connection(
                lambda: _Engine(lane, Places(self._order), self._described, lone), sock=connection
            )
        except BaseException:
            connection.close()
            raise
        return engine

    def _described(self, engine: _Engine, told: dict[str, Any]) -> None:
        before = [model for versions in self._models.values() for model in versions.values()]
        models: dict[str, dict[str, RemoteModel]] = {}
        for one in told["models"]:
            name, version = one["name"], one["version"]
            inputs, outputs = (
                tuple(from_plain(TensorSpec, spec, where=name) for spec in one[side])
                for side in ("inputs", "outputs")
            )
            record = one["preprocess"] and from_plain(Preprocess, one["preprocess"], where=name)
            task = from_plain(TaskRecord, one["task"], where=name)
            known = signature(inputs, outputs, tuple(one["labels"]), record, task)
            statistics = self._statistics.setdefault(f"{name}@{version}", Statistics())
            model = RemoteModel(
                name, version, one["number"], known, engine, statistics, decodes=one["decodes"]
            )
            models.setdefault(name, {})[version] = model
        self._defaults = {}
        for name, versions in models.items():
            rule = told["traffic"].get(name)
            traffic = None if rule is None else from_plain(Traffic, rule, where=name)
            default, route = settled(traffic, versions)
            default.route = route
            self._defaults[name] = default
        self._models = models
        _when_unused(before, partial(engine.has_understood, told["number"]))

    async def _tell_counts(self) -> None:
        while True:
            await asyncio.sleep(COUNTED_S)
            self._send_counts()

    def _send_counts(self) -> None:
        told = {
            name: statistics.taken()
            for name, statistics in self._statistics.items()
            if self._engine is not None and statistics.is_untold
        }
        if told and self._engine is not None:
            self._engine.write(tickets.frame(b"s", json.dumps(told).encode()))


def _when_unused(models: list[RemoteModel], then: Callable[[], None]) -> None:
    """Call back when no request uses these models any more: at once, if none does."""
    used = [model for model in models if model.users]
    if not used:
        then()
        return
    used[0].on_unused.append(lambda: _when_unused(used[1:], then))


class RemoteModel(Infers, InfersFiles):
    """A model in the engine's process. Takes what an app asks of a model and of its batcher.

    Attributes:
        decodes: whether the engine's GPU decodes JPEG files.
        users: requests that may yet send a ticket for it.
        on_unused: called once when there are none.
    """

    route: Route[RemoteModel] | None = None

    def __init__(
        self,
        name: str,
        version: str,
        number: int,
        known: Signature,
        engine: _Engine,
        statistics: Statistics,
        *,
        decodes: bool,
    ) -> None:
        self.decodes = decodes
        self.name = name
        self.version = version
        self.number = number
        self.users = 0
        self.on_unused: list[Callable[[], None]] = []
        self.signature = known
        self.statistics = statistics
        self.batcher = self
        self._engine = engine
        self.inputs, self.outputs = Layouts(known.inputs.values()), Layouts(known.outputs.values())
        self._output_bytes = sum(_most_bytes(spec) for spec in known.outputs.values())

    def __enter__(self) -> RemoteModel:
        self.users += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.users -= 1
        while not self.users and self.on_unused:
            self.on_unused.pop()()

    def room_for_outputs(self, batch: int) -> int:
        """The bytes that the outputs of a batch take at most, each aligned."""
        return batch * self._output_bytes + ALIGNMENT * len(self.signature.outputs)

    def begin(
        self,
        arrays: Arrays,
        answer: Waiter,
        *,
        timeout_us: int | None = None,
        priority: int = DEFAULT_PRIORITY,
        client: int = 0,
        stages: Stages | None = None,
    ) -> None:
        """As ``Infers.begin``."""
        deadline_ns = 0 if timeout_us is None else perf_counter_ns() + 1000 * timeout_us
        flight = _Flight(self, answer, Stages() if stages is None else stages, client)
        self._engine.start(flight, arrays, deadline_ns, priority)

    def begin_files(
        self,
        files: Sequence[bytes],
        frames: Sequence[Frame],
        answer: Waiter,
        *,
        timeout_us: int | None,
        priority: int,
        client: int,
        stages: Stages,
    ) -> None:
        """As ``InfersFiles.begin_files``; the engine's process reads the frames itself."""
        deadline_ns = 0 if timeout_us is None else perf_counter_ns() + 1000 * timeout_us
        flight = _Flight(self, answer, stages, client)
        self._engine.start_files(flight, files, deadline_ns, priority)


@dataclass(eq=False, slots=True)
class _Flight:
    """A ticket that has no answer yet."""

    model: RemoteModel
    answer: Waiter
    stages: Stages
    client: int
    place: tuple[int, int] = (0, 0)
    outputs_at: int = 0
    end: int = 0
    since_ns: int = 0


class _Lone:
    """Sends a lone ticket and waits for its answer, past the event loop.

    Args:
        connection: to the engine's process, of which the event loop knows.
        is_alone: whether no other request can come meanwhile.
    """

    def __init__(
        self, connection: socket.socket, is_alone: Callable[[], bool], *, spins: bool
    ) -> None:
        self._descriptor, self._spins = connection.fileno(), spins
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)
        self.is_alone = is_alone
        self.usual_ns = 0.0  # until an answer
        self.awake = Awake(is_alone, spins=spins)

    def took(self, ns: int) -> None:
        """Learn how long an answer takes."""
        self.usual_ns = 0.8 * self.usual_ns + 0.2 * ns

    def send(self, ticket: bytes) -> bytes:
        """Send a ticket; returns what could not be sent."""
        try:
            return ticket[os.write(self._descriptor, ticket) :]
        except OSError:  # full, or gone, as the event loop will find
            return ticket

    def wait(self, until_ns: int) -> bytes:
        """What comes within a time; nothing if nothing does, or the connection has ended."""
        while perf_counter_ns() < until_ns:
            try:
                return os.read(self._descriptor, 1 << 16)
            except BlockingIOError:
                if not self._spins:
                    self._poll.poll(1)
            except OSError:
                break
        return b""


class _Engine(asyncio.Protocol):
    """One connection to the engine's process, its lane, and what is asked over it."""

    transport: asyncio.Transport

    def __init__(
        self,
        lane: Lane,
        places: Places,
        on_description: Callable[[_Engine, dict[str, Any]], None],
        lone: _Lone,
    ) -> None:
        self.described = asyncio.Event()
        self.lost = asyncio.Event()
        self._lane = lane
        self._places = places
        self._on_description = on_description
        self._lone = lone
        self._frames = tickets.Frames()
        self._flights: dict[int, _Flight] = {}
        self._questions: dict[int, asyncio.Future[tuple[dict[str, Any], bytes]]] = {}
        self._numbers = itertools.count(1)
        self._to_send: list[bytes] = []
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()
        self.described.set()
        flights = [f.answer for f in self._flights.values()]
        waiting: list[Waiter | asyncio.Future[Any]] = [*flights, *self._questions.values()]
        for answer in waiting:
            if not answer.done():
                answer.set_exception(_no_engine())

    def data_received(self, data: bytes) -> None:
        for letter, content in self._frames.feed(data):
            if letter == b"o":
                self._done(*tickets.unpack_done(content))
            elif letter == b"e":
                self._failed(*tickets.unpack_error(content))
            elif letter == b"r":
                number, told, body = tickets.unpack_numbered(content)
                question = self._questions.pop(number)
                if not question.done():
                    question.set_result((told, body))
            elif letter == b"d":
                self._on_description(self, json.loads(content))
                self.described.set()

    def write(self, frame: bytes) -> None:
        """Send a frame, together with some others of this turn of the event loop."""
        if not self._to_send:
            self._loop.call_soon(self._flush)
        self._to_send.append(frame)
        if len(self._to_send) == MOST_TOGETHER:
            self._flush()

    def has_understood(self, number: int) -> None:
        """Say that no ticket will come for models that this description does not name."""
        self.write(tickets.pack_understood(number))

    def _flush(self) -> None:
        frames = b"".join(self._to_send)
        self._to_send.clear()
        # Where the engine's process has ended, ``connection_lost`` tells those who wait
        if not frames or self.transport.is_closing():
            return
        lone = self._lone
        waits = (
            len(self._flights) == 1
            and not self._questions
            and lone.usual_ns < LONE_NS
            and lone.is_alone()
            and not self.transport.get_write_buffer_size()
        )
        if waits and not (frames := lone.send(frames)):
            until_ns = perf_counter_ns() + LONE_NS
            while self._flights and (data := lone.wait(until_ns)):
                self.data_received(data)
            lone.awake.stay(self._loop)
        else:
            self.transport.write(frames)

    async def ask(self, question: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        """Ask what is not inference.

        Raises:
            ServeError: 503, the engine's process ended; or its own.
        """
        if self.lost.is_set():
            raise _no_engine()
        number = self._number()
        answer: asyncio.Future[tuple[dict[str, Any], bytes]] = self._loop.create_future()
        self._questions[number] = answer
        self.write(tickets.pack_question(number, question, body))
        return await answer

    def start(self, flight: _Flight, arrays: Arrays, deadline_ns: int, priority: int) -> None:
        """Write the inputs into the lane and send the ticket.

        Raises:
            ServeError: 413, it is larger than the lane; 503, the lane is full or the engine's
                process has ended.
        """
        if self.lost.is_set():
            raise _no_engine()
        known = flight.model.signature.inputs
        sizes = tuple([d for name in known for d in arrays[name].shape])
        layout, inputs_end = flight.model.inputs.of(sizes)
        start = self._place(flight, inputs_end, sizes[0])
        for name, offset, shape, element, nbytes in layout:
            np.copyto(self._lane.array(start + offset, shape, element, nbytes), arrays[name])
        self._send(flight, deadline_ns, priority, sizes)

    def start_files(
        self, flight: _Flight, files: Sequence[bytes], deadline_ns: int, priority: int
    ) -> None:
        """As ``start``, for JPEG files, one behind the other."""
        if self.lost.is_set():
            raise _no_engine()
        content = np.frombuffer(files[0] if len(files) == 1 else b"".join(files), np.uint8)
        start = self._place(flight, aligned(len(content)), len(files))
        np.copyto(self._lane.array(start, content.shape, content.dtype), content)
        self._send(flight, deadline_ns, priority, tuple(map(len, files)), b"p")

    def _place(self, flight: _Flight, inputs_nbytes: int, batch: int) -> int:
        """Take a place in the lane; where it starts."""
        nbytes = inputs_nbytes + flight.model.room_for_outputs(batch)
        flight.place = start, _ = self._places.take(nbytes)
        flight.outputs_at, flight.end = start + inputs_nbytes, start + nbytes
        return start

    def _send(
        self,
        flight: _Flight,
        deadline_ns: int,
        priority: int,
        sizes: tuple[int, ...],
        letter: bytes = b"i",
    ) -> None:
        number, model = self._number(), flight.model.number
        flight.since_ns = perf_counter_ns()
        self._flights[number] = flight
        start, end = flight.place[0], flight.end
        ticket = Ticket(
            number, model, priority, deadline_ns, start, end, sizes, letter, flight.client
        )
        self.write(ticket.pack())

    def _number(self) -> int:
        return next(self._numbers) & 0xFFFFFFFF

    def _done(self, number: int, spent_ns: tuple[int, int, int], sizes: tuple[int, ...]) -> None:
        flight = self._flights.pop(number)
        self._lone.took(perf_counter_ns() - flight.since_ns)
        decode_ns, copy_ns, compute_ns = spent_ns
        flight.stages.decoded(decode_ns)
        flight.stages.copy += copy_ns
        flight.stages.compute += compute_ns
        if not flight.answer.done():
            array, first = self._lane.array, flight.outputs_at
            layout, _ = flight.model.outputs.of(sizes)
            flight.answer.set_result(
                {  # copies: the place goes to the next request
                    name: array(first + offset, shape, element, nbytes).copy()
                    for name, offset, shape, element, nbytes in layout
                }
            )
        self._places.give_back(*flight.place)

    def _failed(self, number: int, error: ServeError) -> None:
        flight = self._flights.pop(number, None)
        if flight is not None:
            self._places.give_back(*flight.place)
        answer: Waiter | asyncio.Future[Any]
        answer = self._questions.pop(number) if flight is None else flight.answer
        if not answer.done():
            answer.set_exception(error)


def _most_bytes(spec: TensorSpec) -> int:
    """The most bytes that one sample of a tensor takes."""
    sizes = (d.max if isinstance(d, DimRange) else d for d in spec.shape[1:])
    return math.prod(sizes) * numpy_type(spec).itemsize


def _no_engine() -> ServeError:
    return ServeError("the engine is being started", status=503, fix="try again in a moment")
