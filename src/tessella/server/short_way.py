"""The short way of an inference request: without a parser and without ASGI.

Clients send the same head again and again. One that the long way (uvicorn's parser, the guard, the
app) has read and let in is remembered, byte for byte; a request with just these bytes as its head
then needs nothing but its body. Whatever is unusual takes the long way, which alone decides what
is allowed; both give the same answers and count the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from asyncio import CancelledError
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

from tessella.core.errors import ServeError
from tessella.server.answers import Answer, error_answer
from tessella.server.body import Headers, accepted
from tessella.server.guard import Guard, require_once
from tessella.server.inference import Inference, ServedModel, Watch, chosen
from tessella.server.protocol import InferRequest, Unread
from tessella.server.shared_memory import BRIEF_BYTES
from tessella.server.traffic import Route
from tessella.server.waiting import Arrays

MOST_HEADS, MOST_HEAD_BYTES = 256, 2048  # half a megabyte at most
# That is put together here. The long way stops and goes on for each 64 kB of a body.
MOST_BODY_BYTES = 8 << 20
# Headers of which this module knows what they mean for an inference request. With any other the
# request takes the long way, also if that would not mind.
USUAL = {
    b"host", b"user-agent", b"accept", b"accept-encoding", b"authorization", b"connection",
    b"content-length", b"content-type", b"inference-header-content-length",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """What a head says.

    Attributes:
        version: of the model; None is whichever there is.
        body_bytes: its ``Content-Length``.
        json_length: its ``Inference-Header-Content-Length``.
        accept_encoding: if the client takes compressed answers.
    """

    head: bytes
    name: str
    version: str | None
    body_bytes: int
    json_length: bytes | None
    accept_encoding: bytes


class ShortWay:
    """The heads that this process knows, for all its connections."""

    def __init__(self, inference: Inference, guard: Guard) -> None:
        self.inference = inference
        self._guard = guard
        self._heads: dict[bytes, Known | None] = {}  # None: its bodies need the long way
        self.find: Callable[[bytes], Known | None] = self._heads.get

    def learn(self, head: bytes, url: bytes, scope: Mapping[str, Any]) -> None:
        """Remember a head, if requests like it can take the short way.

        Args:
            head: the bytes that the parser was given, up to the first blank line.
            url, scope: what it read in the first head of them.
        """
        if scope["method"] != "POST" or len(head) > MOST_HEAD_BYTES or head in self._heads:
            return
        known = self._known(head, url, scope)
        if known is not None:
            if len(self._heads) >= MOST_HEADS:
                self._heads.clear()
            self._heads[head] = known

    def refuse(self, known: Known) -> None:
        """Let the long way have the requests with this head."""
        if known.head in self._heads:
            self._heads[known.head] = None

    def _known(self, head: bytes, url: bytes, scope: Mapping[str, Any]) -> Known | None:
        lines: Sequence[tuple[bytes, bytes]] = scope["headers"]
        headers: Headers = dict(lines)
        place = _model_of(scope["path"])
        nbytes = _length(headers.get(b"content-length", b""))
        if (
            place is None
            or nbytes is None
            or nbytes > min(MOST_BODY_BYTES, self.inference.limits.body_bytes)
            or scope["http_version"] != "1.1"
            or headers.get(b"connection", b"keep-alive").lower() != b"keep-alive"
            or len(headers) < len(lines)
            or not headers.keys() <= USUAL
            or not _is_all_of(head, url, lines)
        ):
            return None
        try:
            require_once(lines, headers)
            self._guard.check(scope["method"], scope["path"], headers)
            self.inference.models.get(*place)
        except ServeError:
            return None
        accept = headers.get(b"accept-encoding", b"")
        return Known(
            head=head,
            name=place[0],
            version=place[1],
            body_bytes=nbytes,
            json_length=headers.get(b"inference-header-content-length"),
            accept_encoding=accept if accepted(accept) is not None else b"",
        )


def _model_of(path: str) -> tuple[str, str | None] | None:
    """Name and version of the model that a path runs; None if it does something else."""
    match path.split("/")[1:]:
        case ["v2", "models", name, "infer"]:
            return name, None
        case ["v2", "models", name, "versions", version, "infer"]:
            return name, version
    return None


def _length(text: bytes) -> int | None:
    return int(text) if text.isdigit() and len(text) <= 9 else None


def _is_all_of(head: bytes, url: bytes, lines: Sequence[tuple[bytes, bytes]]) -> bool:
    """Whether these bytes are one request line and these headers, each ended by CR LF, and nothing
    else: then the parser cannot have taken another place for the end of the head.
    """
    first, *rest, end, after = head.split(b"\r\n")
    if first != b"POST " + url + b" HTTP/1.1" or end or after:
        return False
    told = [line.partition(b":") for line in rest]
    return [(name.lower(), value.strip(b" \t")) for name, _, value in told] == list(lines)


class Quick(ABC):
    """A request whose body is there, from its parsing to its answer, without a task: who waits for
    its outputs is itself. What would hold up the event loop takes the long way.
    """

    __slots__ = ("_begun_ns", "_is_answered", "_model", "_request", "_route", "_watch")

    def __init__(self) -> None:
        self._begun_ns = perf_counter_ns()
        self._is_answered = False
        self._model: ServedModel
        self._request: InferRequest
        self._route: Route[Any] | None = None
        self._watch: Watch

    def start(
        self, inference: Inference, name: str, version: str | None, timeout_us: int | None = None
    ) -> bool:
        """Have the whole request answered; False if that takes the long way.

        Args:
            timeout_us: within which an answer is of use, beside what the request says.
        """
        try:
            model = inference.models.get(name, version)
        except Exception as error:
            self._answer(error_answer(error))
            return True
        self._watch = watch = Watch(model, self._begun_ns)
        watch.lap("receive")
        self._model = model.__enter__()
        try:
            request = self._parsed(model)
            if isinstance(request, Unread) or request.place_bytes > BRIEF_BYTES or request.images:
                model.__exit__()
                return False
            self._request = request
            self._route = None if version else model.route
            if (other := chosen(model, version, request.id)) is not model:
                model.__exit__()
                self._model = model = other.__enter__()
                watch.on(model)
            watch.lap("decode")
            if timeout_us is None or (request.timeout_us or timeout_us) < timeout_us:
                timeout_us = request.timeout_us
            model.batcher.begin(
                request.arrays,
                self,
                timeout_us=timeout_us,
                priority=request.priority,
                stages=watch.stages,
            )
        except Exception as error:
            self.set_exception(error)
        return True

    # --- what each door has of its own ------------------------------------------------------------

    @property
    @abstractmethod
    def _inference(self) -> Inference:
        """What all requests of a process share."""

    @abstractmethod
    def _parsed(self, model: ServedModel) -> InferRequest | Unread:
        """The checked request."""

    def _made(self, outputs: Arrays) -> Answer:
        """The answer with the outputs; all stages of the request are over with it."""
        return self._inference.answer(self._model, self._request, outputs, self._watch)

    @abstractmethod
    def _answer(self, answer: Answer) -> None:
        """Send the answer."""

    # --- what a batcher asks of who waits ---------------------------------------------------------

    def done(self) -> bool:
        """Whether it has its answer; who goes away is computed for, as on the long way."""
        return self._is_answered

    def set_result(self, outputs: Arrays, /) -> None:
        """Answer with the outputs."""
        try:
            self._watch.lap("queue")
            answer = self._made(outputs)
        except Exception as error:
            self.set_exception(error)
            return
        self._end(None, answer)
        if self._route is not None:
            self._inference.shadowing.offer(self._route, self._request.arrays, outputs)

    def set_exception(self, error: Exception, /) -> None:
        """Answer with an error."""
        self._end(error, error_answer(error))

    def give_up(self) -> None:
        """Nobody waits any more: what has not begun is not computed, nor held."""
        self._is_answered = True
        self._watch.ended(CancelledError())
        self._model.batcher.let_go()
        self._model.__exit__()

    def _end(self, error: Exception | None, answer: Answer) -> None:
        self._watch.ended(error)
        self._model.__exit__()
        self._answer(answer)


class ShortRequest(Quick):
    """A request on the short way: it gathers its body, and waits for its outputs.

    Args:
        respond: called once with the answer, in the event loop.
    """

    __slots__ = ("_held", "_respond", "_way", "content", "known")

    def __init__(self, way: ShortWay, known: Known, respond: Callable[[Answer], None]) -> None:
        super().__init__()
        self.known = known
        self.content: bytearray | memoryview = memoryview(b"")
        self._way = way
        self._respond = respond
        self._held = 0

    @property
    def missing(self) -> int:
        """The bytes of the body that have not come."""
        return self.known.body_bytes - len(self.content)

    def take(self, data: memoryview) -> None:
        """Add what has come of the body.

        Raises:
            ServeError: the server holds as much as it may.
        """
        self._way.inference.bodies.hold(len(data))
        self._held += len(data)
        if not self.content:
            self.content = data if len(data) == self.known.body_bytes else bytearray(data)
        else:
            self.content += data  # type: ignore[operator]

    def drop(self) -> None:
        """Nobody answers it here: its body is not held any more."""
        self._way.inference.bodies.held_bytes -= self._held
        self._held = 0

    def run(self) -> bool:
        """Have the whole request answered; False if that takes the long way."""
        return self.start(self._way.inference, self.known.name, self.known.version)

    @property
    def _inference(self) -> Inference:
        return self._way.inference

    def _parsed(self, model: ServedModel) -> InferRequest | Unread:
        request = self._way.inference.parse(self.content, self.known.json_length, model)
        if isinstance(request, InferRequest) and request.images:
            self._way.refuse(self.known)
        return request

    def _answer(self, answer: Answer) -> None:
        self._is_answered = True
        self.drop()
        self._respond(answer)
