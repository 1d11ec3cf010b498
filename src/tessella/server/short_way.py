"""The short way of an inference request: without a parser and without ASGI.

Clients send the same head again and again. One that the long way (uvicorn's parser, the guard, the
app) has read and let in is remembered, byte for byte but for the length of the body; a request with
just these bytes as its head then needs nothing but its body. Whatever is unusual takes the long
way, which alone decides what is allowed; both give the same answers and count the same.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from asyncio import CancelledError
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter_ns
from typing import Any

from tessella.core.errors import InputError, ServeError
from tessella.core.spec import DimRange
from tessella.server.answers import Answer, error_answer
from tessella.server.body import Headers, accepted
from tessella.server.guard import Guard, require_once
from tessella.server.inference import Inference, ServedModel, Watch, chosen
from tessella.server.jpegs import frames_of
from tessella.server.looking import Awake
from tessella.server.protocol import InferRequest, Unread
from tessella.server.shared_memory import BRIEF_BYTES
from tessella.server.tracing import Trace, Tracing
from tessella.server.traffic import Route
from tessella.server.verbs import (
    LONG_ANSWER,
    MULTIPART,
    Asked,
    answer_of,
    in_words,
    parse_query,
    scores_of,
)
from tessella.server.waiting import Arrays
from tessella.tasks import View, verbs

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
        verb, asked: what a picture's task is to do, and the query; None where tensors are sent.
    """

    head: bytes
    name: str
    version: str | None
    body_bytes: int
    json_length: bytes | None
    accept_encoding: bytes
    verb: str = ""
    asked: Asked | None = None


# What of a head may differ from one that is known: how long the body is.
_LENGTH = re.compile(rb"\r\ncontent-length: ?(0|[1-9][0-9]{0,8})\r\n", re.IGNORECASE)


class ShortWay:
    """The heads that this process knows, for all its connections.

    Attributes:
        awake: keeps the event loop awake for a lone client.
        last: the head that was found last.
    """

    def __init__(self, inference: Inference, guard: Guard) -> None:
        self.inference = inference
        self.awake = Awake(lambda: False, spins=False)
        self._guard = guard
        self._most_bytes = min(MOST_BODY_BYTES, inference.limits.body_bytes)
        # without their lengths; None: their bodies need the long way
        self._heads: dict[bytes, Known | None] = {}
        self.last: Known | None = None

    def find(self, head: bytes) -> Known | None:
        """What a head says, if one was learned that is the same but for the body's length."""
        parts = _cut(head)
        known = None if parts is None else self._heads.get(parts[0])
        if parts is None or known is None or parts[1] > self._most_bytes:
            return None
        self.last = found = replace(known, head=head, body_bytes=parts[1])
        return found

    def learn(self, head: bytes, url: bytes, scope: Mapping[str, Any]) -> None:
        """Remember a head, if requests like it can take the short way.

        Args:
            head: the bytes that the parser was given, up to the first blank line.
            url, scope: what it read in the first head of them.
        """
        parts = _cut(head)
        if (
            scope["method"] != "POST"
            or len(head) > MOST_HEAD_BYTES
            or parts is None
            or parts[0] in self._heads
        ):
            return
        known = self._known(head, url, scope)
        if known is not None:
            if len(self._heads) >= MOST_HEADS:
                self._heads.clear()
            self._heads[parts[0]] = known

    def refuse(self, known: Known) -> None:
        """Let the long way have the requests with this head."""
        self.last = None
        parts = _cut(known.head)
        if parts is not None and parts[0] in self._heads:
            self._heads[parts[0]] = None

    def _known(self, head: bytes, url: bytes, scope: Mapping[str, Any]) -> Known | None:
        lines: Sequence[tuple[bytes, bytes]] = scope["headers"]
        headers: Headers = dict(lines)
        place = model_of(scope["path"])
        nbytes = length_of(headers.get(b"content-length", b""))
        if (
            place is None
            or nbytes is None
            or nbytes > self._most_bytes
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
            name, version, verb = place
            model = self.inference.models.get(name, version)
            asked = parse_query(scope["query_string"]) if verb else None
        except (ServeError, InputError):
            return None
        is_form = headers.get(b"content-type", b"").lower().startswith(MULTIPART.encode())
        if asked is not None and (asked.draws or is_form or not _says_soon(model, verb)):
            return None
        accept = headers.get(b"accept-encoding", b"")
        return Known(
            head=head,
            name=name,
            version=version,
            body_bytes=nbytes,
            json_length=headers.get(b"inference-header-content-length"),
            accept_encoding=accept if accepted(accept) is not None else b"",
            verb=verb,
            asked=asked,
        )

    def request(self, known: Known, client: int, respond: Callable[[Answer], None]) -> ShortRequest:
        """A request with a known head, of a client as ``fairness`` numbers them."""
        kind = ShortRequest if known.asked is None else ShortPicture
        return kind(self, known, client, respond)


def _cut(head: bytes) -> tuple[bytes, int] | None:
    """A head without its body's length, and the length."""
    found = _LENGTH.search(head)
    if found is None:
        return None
    return head[: found.start(1)] + head[found.end(1) :], int(found[1])


def model_of(path: str) -> tuple[str, str | None, str] | None:
    """Name and version of the model that a path runs, and the verb of a task that it asks, if it
    does; None if it does something else.
    """
    match path.split("/")[1:]:
        case ["v2", "models", name, verb]:
            version = None
        case ["v2", "models", name, "versions", version, verb]:
            pass
        case _:
            return None
    if verb == "infer":
        return name, version, ""
    return (name, version, verb) if verb in verbs() else None


def _says_soon(model: ServedModel, verb: str) -> bool:
    """Whether a model answers this about a picture, and holds up no others with that."""
    answers, spec = model.signature.answers, next(iter(model.signature.outputs.values()))
    sizes = [d.max if isinstance(d, DimRange) else d for d in spec.shape[1:]]
    is_long = 8 * math.prod(sizes) > LONG_ANSWER
    return model.decodes and verb == answers.VERB and not (answers.SLOW or is_long)


def length_of(text: bytes) -> int | None:
    """What a ``Content-Length`` says; None if that is no number of bytes."""
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

    __slots__ = (
        "_begun_ns", "_client", "_is_answered", "_model", "_request", "_route", "_trace", "_watch",
    )  # fmt: skip
    DOOR = "http"  # one of ``statistics.DOORS``

    def __init__(self, client: int) -> None:
        self._begun_ns, self._client = perf_counter_ns(), client
        self._is_answered = False
        self._model: ServedModel
        self._request: InferRequest
        self._route: Route[Any] | None = None
        self._trace: Trace | None = None
        self._watch: Watch

    def start(
        self, inference: Inference, name: str, version: str | None, timeout_us: int | None = None
    ) -> bool:
        """Have the whole request answered; False if that takes the long way.

        Args:
            timeout_us: within which an answer is of use, beside what the request says.
        """
        if inference.tracing is not None:
            self._trace = self._traced(inference.tracing)
        try:
            model = inference.models.get(name, version)
        except Exception as error:
            self._finish(error_answer(error))
            return True
        self._watch = watch = Watch(
            model, self._begun_ns, self._trace, door=self.DOOR, client=self._client
        )
        watch.lap("receive")
        self._model = model.__enter__()
        try:
            request = self._parsed(model)
            if not isinstance(request, InferRequest) or (
                request.texts is None and request.place_bytes > BRIEF_BYTES
            ):
                model.__exit__()
                return False
            self._request = request
            if self._trace is not None:
                self._trace.asks(request)
            self._route = None if version else model.route
            if (other := chosen(model, version, request.id)) is not model:
                model.__exit__()
                self._model = model = other.__enter__()
                watch.on(model)
            watch.lap("decode")
            if timeout_us is None or (request.timeout_us or timeout_us) < timeout_us:
                timeout_us = request.timeout_us
            self._begin(model, request, timeout_us)
        except Exception as error:
            self.set_exception(error)
        return True

    def _begin(self, model: ServedModel, request: InferRequest, timeout_us: int | None) -> None:
        """Have the outputs computed."""
        model.batcher.begin(
            request.arrays,
            self,
            timeout_us=timeout_us,
            priority=request.priority,
            client=self._client,
            stages=self._watch.stages,
        )

    # --- what each door has of its own ------------------------------------------------------------

    @property
    @abstractmethod
    def _inference(self) -> Inference:
        """What all requests of a process share."""

    @abstractmethod
    def _traced(self, tracing: Tracing) -> Trace:
        """The trace of the request."""

    @abstractmethod
    def _parsed(self, model: ServedModel) -> InferRequest | Unread | None:
        """The checked request; None if it is for the long way."""

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
        if self._route is not None and self._request.arrays:
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
        ns = self._watch.passed_ns
        try:
            self._finish(answer)
        finally:  # what its client need not wait for
            self._watch.ended(error, ns)
            self._model.__exit__()

    def _finish(self, answer: Answer) -> None:
        self._answer(answer)
        if self._trace is not None:
            self._trace.answered(answer)


class ShortRequest(Quick):
    """A request on the short way: it gathers its body, and waits for its outputs.

    Args:
        respond: called once with the answer, in the event loop.
    """

    __slots__ = ("_held", "_respond", "_way", "content", "known")

    def __init__(
        self, way: ShortWay, known: Known, client: int, respond: Callable[[Answer], None]
    ) -> None:
        super().__init__(client)
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

    def _traced(self, tracing: Tracing) -> Trace:
        known = self.known
        return tracing.request(
            known.name,
            known.version,
            known.verb or "infer",
            (),  # a head with a ``traceparent`` takes the long way
            nbytes=known.body_bytes,
            begun_ns=self._begun_ns,
        )

    def _parsed(self, model: ServedModel) -> InferRequest | Unread | None:
        inference, known = self._way.inference, self.known
        if known.json_length == b"0":  # a tensor alone, as most: what ``parse`` does with it
            heads, most_bytes = model.signature.heads, inference.limits.body_bytes
            if (head := heads.get((known.body_bytes, most_bytes))) is not None:
                return head.request_with(memoryview(self.content))
        request = inference.parse(self.content, known.json_length, model)
        if isinstance(request, InferRequest) and request.images:
            self._way.refuse(self.known)
            return None
        return request

    def _answer(self, answer: Answer) -> None:
        self._is_answered = True
        self.drop()
        self._respond(answer)


class ShortPicture(ShortRequest):
    """A picture that the engine's GPU decodes, for a task's verb."""

    __slots__ = ("_frames",)
    DOOR = "pictures"

    def _parsed(self, model: ServedModel) -> InferRequest | None:
        files = [bytes(self.content)]
        frames = frames_of(files) if _says_soon(model, self.known.verb) else None
        if frames is None or (model.route is not None and model.route.shadow is not None):
            return None
        self._frames = frames
        assert self.known.asked is not None
        return self.known.asked.request(model, files, self._inference.limits)

    def _begin(self, model: ServedModel, request: InferRequest, timeout_us: int | None) -> None:
        (files,) = request.images.values()
        model.begin_files(
            files,
            self._frames,
            self,
            timeout_us=timeout_us,
            priority=request.priority,
            client=self._client,
            stages=self._watch.stages,
        )

    def _made(self, outputs: Arrays) -> Answer:
        model, (frame,) = self._model, self._frames
        record = model.signature.preprocess
        assert record is not None, "only a plan with a record has an image input"
        assert self.known.asked is not None
        views = (View(height=frame.height, width=frame.width, record=record),)
        said = in_words(model, scores_of(outputs), views, self.known.asked.query)
        return answer_of(model, said, self._watch)
