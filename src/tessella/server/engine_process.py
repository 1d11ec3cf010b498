"""The engine's process of a server of several: it runs what acceptors put into their lanes.

    client ── HTTP ──▶ acceptor ── tensors into its lane, a ticket ──▶ engine's process
                          ◀── outputs in the lane, a frame ──

A *lane* is memory that one acceptor shares with this process, a *ticket* says where in it a request
lies, and the *batcher* of the ticket's model joins those of all acceptors. No tensor passes through
a socket. One thread reads tickets, runs models in turn and answers; another has the event loop that
answers what is not inference.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import selectors
import signal
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from tessella.core.errors import ServeError
from tessella.core.record import to_plain
from tessella.server import tickets
from tessella.server.app import App
from tessella.server.batcher import Batcher
from tessella.server.file_tickets import FileTickets
from tessella.server.lane import MOST_LAYOUTS, Lane, Layouts, Part, aligned
from tessella.server.listening import keep_what_is_loaded
from tessella.server.looking import REST_S, SPIN_NS, Looking
from tessella.server.repository import Model, Repository
from tessella.server.statistics import Stages
from tessella.server.tickets import Ticket
from tessella.server.versions import split_key
from tessella.server.waiting import Arrays, Request

log = logging.getLogger(__name__)
GREETING = b"lane"
CLOSE_S = 30
GREETING_S = 1
LEAVE_S = 5.0  # how long an acceptor may take to understand that a model is gone
SEND_S = 1  # then an acceptor that does not read, as it was stopped, is given up


def run(
    repository: Repository,
    app: App,
    door: socket.socket,
    ready: Callable[[], None],
    *,
    spins: bool = False,
) -> None:
    """Load the models and work for all acceptors that come to the door, until SIGTERM.

    Args:
        spins: look for the next request for ``SPIN_NS`` after a lone one.

    Raises:
        TessellaError: a model cannot be loaded.
    """
    repository.load_all()
    keep_what_is_loaded()
    room = _Room(repository, app, door, spin_ns=SPIN_NS if spins else 0)
    signal.signal(signal.SIGTERM, lambda *_: room.end())
    threading.Thread(target=room.answer_questions, daemon=True).start()
    ready()
    room.work()


class _Room:
    """What all acceptors share here: the models, and the app that answers questions."""

    def __init__(
        self, repository: Repository, app: App, door: socket.socket, *, spin_ns: int
    ) -> None:
        self.repository = repository
        self.app = app
        self._models: dict[int, _Known] = {}  # by the numbers of tickets
        self.leaving: dict[int, Model] = {}  # unloaded, but acceptors may not know it
        self._descriptions = 0
        self._numbers = itertools.count()
        self.loop = asyncio.new_event_loop()
        self.busy: dict[Batcher, None] = {}  # in the order of their next turns
        self.files = FileTickets(self)
        self._door = door
        self._acceptors: set[_Acceptor] = set()
        self._lock = threading.Lock()
        self._wake, wakes = socket.socketpair()
        self.looking = self._selector = Looking(spin_ns, wakes)
        self._selector.register(door, selectors.EVENT_READ, self._accept)
        self._wake.setblocking(False)
        self._selector.register(wakes, selectors.EVENT_READ, lambda: self._woken(wakes))
        self._is_woken = False  # ``work`` is about to look
        self._next: deque[Callable[[], None]] = deque()
        signal.set_wakeup_fd(self._wake.fileno())
        self._is_ending = False
        repository.on_change = self._tell

    def work(self) -> None:
        """Read tickets and run models in turn, in one thread: with a thread for each, they
        would wait for each other at every step (one client: 0.6 ms instead of 0.4 for a LeNet). A
        GPU's executions are begun here too, and end when they do: see ``OverlappingBatcher``.
        """
        due_ns: int | None = None
        while not self._is_ending or self.busy:
            seconds = None if due_ns is None else due_ns / 1e9
            if (seconds is None or seconds > 100 * REST_S) and self.files.is_busy:
                self.looking.rest()
            for key, _ in self._selector.found(seconds):
                key.data()
            while self._next:
                self._next.popleft()()
            due_ns = None
            for batcher in self._next_turns():
                del self.busy[batcher]
                if (next_ns := batcher.step()) is not None:
                    self.busy[batcher] = None
                    due_ns = next_ns if due_ns is None else min(due_ns, next_ns)
                elif self.busy:  # copies for a shadow, which had to wait
                    due_ns = 0 if due_ns is None else due_ns
        # Acceptors that are left, as the watching process was killed, say 503 and not 404
        self.repository.on_change = lambda: None
        asyncio.run_coroutine_threadsafe(self.repository.close(), self.loop).result(CLOSE_S)

    def soon(self, call: Callable[[], None]) -> None:
        """Have the thread of ``work`` call something; from any thread."""
        self._next.append(call)
        self._look()

    def _look(self) -> None:
        """Have the thread of ``work`` look what there is to do; from any thread."""
        if not self._is_woken:
            self._is_woken = True
            with suppress(BlockingIOError):  # full of wake-ups: it will look
                self._wake.send(b"c")

    def _woken(self, wakes: socket.socket) -> None:
        """Before anything is looked at: who has something to do from now on wakes it again."""
        wakes.recv(4096)
        self._is_woken = False

    def _next_turns(self) -> list[Batcher]:
        """Who runs now: all that have something to do, or all but those with copies alone."""
        turns = list(self.busy)
        if len(turns) > 1:
            turns = [batcher for batcher in turns if batcher.has_requests()] or turns
        return turns

    def end(self) -> None:
        """Finish what waits and return from ``work``: a signal's handler, which wakes it."""
        self._is_ending = True

    def answer_questions(self) -> None:
        """Be the thread of the event loop that answers what is not inference."""
        self.loop.run_forever()

    def _accept(self) -> None:
        connection, _ = self._door.accept()
        try:
            acceptor = _Acceptor(self, connection)
        except Exception as error:
            log.error("somebody who is no acceptor: %s", error)
            connection.close()
            return
        with self._lock:
            self._acceptors.add(acceptor)
        with self._lock:
            self._models, told = self._described()
            acceptor.tell(self._descriptions, told, [])

        def read() -> None:
            try:
                if acceptor.read():
                    return
            except OSError:
                pass  # it has crashed
            except Exception:  # of any kind: the thread serves all other acceptors, too
                log.exception("an acceptor said what none would say; its connection is closed")
            self._selector.unregister(connection)
            connection.close()
            with self._lock:
                self._acceptors.discard(acceptor)
            acceptor.release_all()

        self._selector.register(connection, selectors.EVENT_READ, read)

    def _tell(self) -> None:
        """Tell all acceptors which models there are, in the event loop's thread. Models that are
        about to go stay open until no acceptor will send a ticket for them, or for ``LEAVE_S``.
        """
        with self._lock:
            models, told = self._described()
            gone = {n: k.model for n, k in self._models.items() if n not in models}
            leaving = [
                (acceptor, [_Leaving(self.leaving, n, model) for n, model in gone.items()])
                for acceptor in self._acceptors
            ]
            self._models = models  # before anybody sends a ticket for one of them
            for acceptor, kept in leaving:
                acceptor.tell(self._descriptions, told, kept)
                for one in kept:
                    self.loop.call_later(LEAVE_S, one.go)

    def _described(self) -> tuple[dict[int, _Known], bytes]:
        """The models by number, and the frame that tells of them."""
        numbers = {(k.name, k.version): number for number, k in self._models.items()}
        told, models = [], {}
        for model in self.repository.models:
            model.batcher.on_done = self._look
            number = numbers.get((model.name, model.version))
            if number is None or not _is_same(self._models[number].model, model):
                number = next(self._numbers)
            models[number] = _Known(name=model.name, version=model.version, model=model)
            told.append({"number": number, **describe(model)})
        self._descriptions += 1
        document = {
            "number": self._descriptions, "models": told, "traffic": self.repository.rules()
        }  # fmt: skip
        return models, tickets.frame(b"d", json.dumps(document).encode())

    def model(self, number: int) -> Model:
        """The model of a ticket.

        Raises:
            ServeError: 503, it was unloaded, or its tensors are others than the acceptor knew.
        """
        known = self._models.get(number)
        if known is None:
            model = self.leaving.get(number)
        else:
            try:
                model = self.repository.get(known.name, known.version)
            except ServeError:  # just unloaded, and ``_tell`` is about to say so
                model = known.model
            model = model if _is_same(model, known.model) else None
        if model is None:
            raise ServeError("the model was replaced", status=503, fix="send it again")
        return model

    def with_model(self, number: int, use: Callable[[Model], None]) -> None:
        """Give the model of a ticket something to do; the next one of the same tensors, if it is
        replaced meanwhile.

        Raises:
            ServeError: as ``model``, or what ``use`` raises.
        """
        while True:
            model = self.model(number)
            try:
                return use(model)
            except ServeError:
                if self.model(number) is model:
                    raise

    def wait(self, model: Model, request: Request) -> None:
        """Let a request wait for its engine.

        Raises:
            ServeError: as ``Batcher.submit``.
        """
        model.batcher.submit(request)
        self._has_work(model)

    def wait_all(self, model: Model, requests: Sequence[Request]) -> None:
        """As ``wait``, for several; those that are refused are given back.

        Raises:
            ServeError: as ``Batcher.submit_all``.
        """
        model.batcher.submit_all(requests)
        self._has_work(model)

    def _has_work(self, model: Model) -> None:
        if not model.batcher.has_thread:
            self.busy[model.batcher] = None


@dataclass(frozen=True, kw_only=True)
class _Known:
    """A version as it was described to acceptors."""

    name: str
    version: str
    model: Model


def _is_same(one: Model, other: Model) -> bool:
    return one.signature is other.signature or one.signature == other.signature


class _Leaving:
    """An unloaded model that one acceptor may not know to be gone. Made in the event loop's thread,
    where models count their users.

    Args:
        leaving: all these models, by their number.
    """

    def __init__(self, leaving: dict[int, Model], number: int, model: Model) -> None:
        self._leaving, self._number, self._model = leaving, number, model
        self._is_gone = False
        leaving[number] = model.__enter__()

    def go(self) -> None:
        """Let the model go, once, in the event loop's thread."""
        if not self._is_gone:
            self._is_gone = True
            self._model.__exit__()
            if not self._model.is_used:
                self._leaving.pop(self._number, None)


def describe(model: Model) -> dict[str, Any]:
    """What an acceptor has to know of a model."""
    known = model.signature
    return {
        "name": model.name,
        "version": model.version,
        "inputs": [to_plain(spec) for spec in known.inputs.values()],
        "outputs": [to_plain(spec) for spec in known.outputs.values()],
        "labels": list(known.labels),
        "task": to_plain(known.task),
        "decodes": model.decodes,
        "preprocess": None if known.preprocess is None else to_plain(known.preprocess),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Where the inputs of a ticket lie: the same in all of a model and of these sizes.

    Attributes:
        nbytes: where the outputs begin.
        shapes: as ``Request.shapes``.
        is_copied: a GPU copies them from where they lie.
    """

    places: list[Part]
    nbytes: int
    shapes: tuple[tuple[int, ...], ...]
    is_copied: bool

    @classmethod
    def of(cls, model: Model, sizes: tuple[int, ...]) -> _Layout:
        """The layout of a model's inputs.

        Raises:
            InputError, ServeError: these are no sizes of its inputs.
        """
        specs = model.signature.inputs
        places, nbytes = Layouts(specs.values()).of(sizes)
        for name, _, shape, *_ in places:
            specs[name].check(shape=shape, dtype=specs[name].dtype)
        shapes = tuple(shape[1:] for _, _, shape, _, _ in sorted(places, key=lambda p: p[0]))
        return cls(places=places, nbytes=nbytes, shapes=shapes, is_copied=model.overlaps)


class _Acceptor:
    """One acceptor, as the engine's process sees it.

    Raises:
        OSError: it does not greet as one of this user's processes with a lane.
    """

    def __init__(self, room: _Room, connection: socket.socket) -> None:
        user = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        connection.settimeout(GREETING_S)
        greeting, descriptors, _, _ = socket.recv_fds(connection, len(GREETING), 1)
        if struct.unpack("3i", user)[1] != os.getuid() or greeting != GREETING or not descriptors:
            for descriptor in descriptors:
                os.close(descriptor)
            raise OSError("no acceptor of this server")
        connection.setblocking(False)  # with a timeout each call asks the system twice
        self._room = room
        self._connection = connection
        self.lane = Lane(descriptors[0])
        self._sending = threading.Lock()
        self._frames = tickets.Frames()
        self._leaving: dict[int, list[_Leaving]] = {}  # by description, until it is understood
        self._layouts: dict[tuple[int, tuple[int, ...]], _Layout] = {}
        self._sizes: dict[tuple[tuple[int, ...], ...], bytes] = {}  # of outputs, by their shapes
        self._deliver = self._answer  # one object, by which a batcher groups its answers

    def read(self) -> bool:
        """Start what has come; False if the acceptor is gone."""
        try:
            data = self._connection.recv(1 << 16)
        except BlockingIOError:
            return True
        found: list[Ticket] = []
        for letter, content in self._frames.feed(data):
            if letter == b"i":
                found.append(Ticket.unpack(content))
                continue
            if found:  # before what came behind them: a k, say
                self._start(found)
                found = []
            if letter == b"p":
                self._start_files(Ticket.unpack(content, letter))
            elif letter == b"q":
                question = self._reply(*tickets.unpack_numbered(content))
                asyncio.run_coroutine_threadsafe(question, self._room.loop)
            elif letter == b"s":
                known = self._room.repository.statistics
                for key, told in json.loads(content).items():
                    known[split_key(key)].add(told)
            elif letter == b"k":
                self._let_go(self._leaving.pop(tickets.unpack_number(content)))
        if found:
            self._start(found)
        return bool(data)

    def tell(self, number: int, description: bytes, leaving: list[_Leaving]) -> None:
        """Describe the models; those that are leaving may go when the acceptor has understood."""
        self._leaving[number] = leaving
        self.send(description)

    def release_all(self) -> None:
        """No ticket will come any more."""
        for number in list(self._leaving):
            self._let_go(self._leaving.pop(number))
        del self._deliver  # a cycle, which would keep the lane's locked memory

    def _let_go(self, leaving: list[_Leaving]) -> None:
        for one in leaving:
            self._room.loop.call_soon_threadsafe(one.go)

    def send(self, frames: bytes) -> None:
        """Write to the acceptor. One that does not read, since it was stopped, is given up when the
        socket's buffer is full: it would stop all others. It comes again when it goes on.
        """
        with self._sending, suppress(OSError):  # it is gone, as the next ``read`` will find
            try:
                sent = self._connection.send(frames)
            except BlockingIOError:
                sent = 0
            if sent < len(frames):
                self._send_in_time(frames[sent:])

    def _send_in_time(self, rest: bytes) -> None:
        self._connection.settimeout(SEND_S)
        try:
            self._connection.sendall(rest)
        except TimeoutError:
            self._connection.shutdown(socket.SHUT_RDWR)  # a frame may have been cut
        finally:
            self._connection.setblocking(False)

    def _start_files(self, ticket: Ticket) -> None:
        self._room.looking.came(has_files=True)
        try:
            self._room.files.start(self, ticket)
        except Exception as error:
            self.send(tickets.pack_error(ticket.number, error))

    def _start(self, found: Sequence[Ticket]) -> None:
        """Let tickets that came together wait for their engines: what they have in common is done
        once, as one by one it took half of a ticket's time.
        """
        self._room.looking.came(len(found), has_files=False)
        errors: list[bytes] = []
        by_model: dict[int, list[Request]] = {}
        for ticket in found:
            try:
                by_model.setdefault(ticket.model, []).append(self._request(ticket))
            except Exception as error:
                errors.append(tickets.pack_error(ticket.number, error))
        for number, requests in by_model.items():
            wait = partial(self._room.wait_all, requests=requests)
            try:
                self._room.with_model(number, wait)
            except Exception as error:
                errors += [tickets.pack_error(request.tag[0], error) for request in requests]
        if errors:
            self.send(b"".join(errors))

    def _request(self, ticket: Ticket) -> Request:
        """What a ticket asks for, with its inputs where they lie."""
        number, model, priority, deadline_ns, start, end, sizes, _, client = ticket
        layout = self._layouts.get((model, sizes))
        if layout is None:
            if len(self._layouts) == MOST_LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[model, sizes] = _Layout.of(self._room.model(model), sizes)
        lane = self.lane
        if layout.is_copied:
            lane.page_lock(start, end)
        return Request(
            arrays={
                name: lane.array(start + offset, shape, element, nbytes)
                for name, offset, shape, element, nbytes in layout.places
            },
            deliver=self._deliver,
            priority=priority,
            deadline_ns=deadline_ns or None,
            client=client,
            tag=(number, start + layout.nbytes, end),
            shapes=layout.shapes,
        )

    def _answer(self, requests: list[Request]) -> None:
        """Write the outputs behind the inputs and tell it, in the engine's thread."""
        frames = []
        before, pack = None, tickets.done_packer(Stages(), b"")
        for request in requests:
            number, start, end = request.tag
            try:
                if request.error is not None:
                    raise request.error
                assert request.outputs is not None
                shapes = self._write(request.outputs, start, end)
                spent = request.stages
                alike = shapes, spent.beside, spent.copy, spent.compute
                if alike != before:  # those of one execution are alike
                    before, pack = alike, tickets.done_packer(spent, self._packed(shapes))
                frames.append(pack(number))
            except Exception as error:
                frames.append(tickets.pack_error(number, error))
        self.send(b"".join(frames))

    def _write(self, outputs: Arrays, start: int, end: int) -> tuple[tuple[int, ...], ...]:
        """Write outputs to a place; their shapes."""
        shapes = []
        for array in outputs.values():
            nbytes = array.nbytes
            if start + nbytes > end:
                raise ServeError("the outputs are larger than the plan says", status=500)
            shape = array.shape
            self.lane.array(start, shape, array.dtype, nbytes)[...] = array
            start = aligned(start + nbytes)
            shapes.append(shape)
        return tuple(shapes)

    def _packed(self, shapes: tuple[tuple[int, ...], ...]) -> bytes:
        sizes = self._sizes.get(shapes)
        if sizes is None:
            if len(self._sizes) == MOST_LAYOUTS:
                self._sizes.clear()
            sizes = self._sizes[shapes] = tickets.pack_sizes(list(itertools.chain(*shapes)))
        return sizes

    async def _reply(self, number: int, question: dict[str, Any], body: bytes) -> None:
        """Let the app answer a request that is not for inference."""
        reply: dict[str, Any] = {}
        parts: list[bytes] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                reply["status"] = message["status"]
                reply["headers"] = [[k.decode("latin-1"), v.decode("latin-1")]
                                    for k, v in message["headers"]]  # fmt: skip
            else:
                parts.append(message.get("body", b""))

        headers = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in question.pop("headers")]
        query = question.pop("query_string").encode("latin-1")
        scope = {"type": "http", **question, "headers": headers, "query_string": query}
        try:
            await self._room.app(scope, receive, send)
            self.send(tickets.pack_reply(number, reply, b"".join(parts)))
        except Exception as error:
            log.exception("a question could not be answered")
            self.send(tickets.pack_error(number, error))
