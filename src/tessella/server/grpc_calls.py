"""Calls of gRPC over one stream of HTTP/2 each: their messages, deadlines, answers and status."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from enum import IntEnum
from time import perf_counter_ns
from typing import Any
from urllib.parse import quote

from tessella.core.dtype import dtype
from tessella.core.errors import InputError, ServeError, TessellaError
from tessella.core.open_inference import MESSAGES
from tessella.server.answers import Answer, error_answer, log
from tessella.server.body import decompress
from tessella.server.grpc_messages import (
    PREFIX,
    Known,
    Messages,
    answer_of,
    cut,
    infer_response,
    known_message,
)
from tessella.server.http2_connection import Stream
from tessella.server.http2_frames import Head, literal
from tessella.server.inference import Inference, ServedModel
from tessella.server.protocol import InferRequest, Unread
from tessella.server.responses import MOST_TEXTS, build_infer
from tessella.server.short_way import Quick
from tessella.server.tensors import to_binary
from tessella.server.tracing import Trace, Tracing
from tessella.server.waiting import Arrays

MOST_QUEUED = 16  # messages of a stream that wait
MANAGEMENT_BODY_BYTES = 1 << 20  # as over HTTP
MOST_TEXT = 1000  # characters of an error
MOST_KNOWN = 256  # messages whose fields but the tensors are remembered


class Status(IntEnum):
    """gRPC's."""

    OK, CANCELLED, UNKNOWN, INVALID_ARGUMENT, DEADLINE_EXCEEDED, NOT_FOUND = range(6)
    ALREADY_EXISTS, PERMISSION_DENIED, RESOURCE_EXHAUSTED = 6, 7, 8
    UNIMPLEMENTED, INTERNAL, UNAVAILABLE, UNAUTHENTICATED = 12, 13, 14, 16


_STATUS = {
    401: Status.UNAUTHENTICATED, 403: Status.PERMISSION_DENIED, 404: Status.NOT_FOUND,
    405: Status.UNIMPLEMENTED, 408: Status.DEADLINE_EXCEEDED, 409: Status.ALREADY_EXISTS,
    413: Status.RESOURCE_EXHAUSTED,
    421: Status.PERMISSION_DENIED, 429: Status.RESOURCE_EXHAUSTED, 500: Status.INTERNAL,
    501: Status.UNIMPLEMENTED, 503: Status.UNAVAILABLE, 507: Status.RESOURCE_EXHAUSTED,
}  # fmt: skip
HEAD = b"\x88" + literal(b"content-type", b"application/grpc")  # :status 200
_OK = literal(b"grpc-status", b"0")
_UNITS_NS = {
    b"H": 3600 * 10**9, b"M": 60 * 10**9, b"S": 10**9, b"m": 10**6, b"u": 10**3, b"n": 1
}  # fmt: skip


def timeout_ns(head: Head) -> int | None:
    """What ``grpc-timeout`` says; None if there is no limit.

    Raises:
        InputError: it says nothing.
    """
    text = head.get(b"grpc-timeout")
    if text is None:
        return None
    unit = _UNITS_NS.get(text[-1:])
    if unit is None or not text[:-1].isdigit() or len(text) > 9:
        raise InputError("grpc-timeout is none", seen=repr(text)[:40], fix="send 100m")
    return int(text[:-1]) * unit


@dataclass(kw_only=True)
class Shared:
    """What all calls of a process share.

    Attributes:
        most_bytes: of a message.
        idle_s: how long a client may be silent in the middle of one.
        answer_infer: the answer to a ``ModelInferRequest`` the long way, as its message.
        known: what was learned of messages, by their fields but the tensors' bytes.
        calls: how many there are, also of clients that have given up, but for ``questions`` about
            the server's health.
        streams: how many of them are streams.
    """

    inference: Inference
    most_bytes: int
    answer_infer: Callable[[Call, memoryview], Awaitable[Answer]]
    known: dict[tuple[bytes, tuple[int, ...]], Known] = field(default_factory=dict)
    calls: int = 0
    questions: int = 0
    streams: int = 0


class Call(ABC):
    """One call; a ``http2_connection.Handler``.

    Attributes:
        is_over: it has its answer, or nobody waits for one.
    """

    def __init__(self, shared: Shared, stream: Stream, head: Head) -> None:
        self.shared, self.stream, self.head = shared, stream, head
        self.is_over = False
        self.messages = Messages(
            shared.inference.bodies, self.most_bytes, is_stream=isinstance(self, StreamCall)
        )
        self._unpacked_bytes = 0  # of messages that came compressed
        self._unread_bytes = 0  # of an answer that waits until the client reads on
        self._task: asyncio.Task[None] | None = None
        self._deadline_ns: int | None = None
        self._count(1)

    @property
    def most_bytes(self) -> int:
        """Of a message."""
        return self.shared.most_bytes

    def _count(self, change: int) -> None:
        self.shared.calls += change

    def begin(self, limit_ns: int | None) -> None:
        """Have an answer within so long."""
        self._deadline_ns = None if limit_ns is None else perf_counter_ns() + limit_ns

    @property
    def remaining_us(self) -> int | None:
        """Until the deadline, at least 1; None if there is none."""
        if self._deadline_ns is None:
            return None
        return max(1, (self._deadline_ns - perf_counter_ns()) // 1000)

    @property
    def tokens(self) -> list[tuple[bytes, bytes]]:
        """What the client has sent of them, as HTTP's headers."""
        value = self.head.get(b"authorization")
        return [] if value is None else [(b"authorization", value)]

    def data(self, chunk: memoryview) -> None:
        if not self.is_over:
            self.stream.refill()
            self.messages.take(chunk)

    @abstractmethod
    def ended(self) -> None:
        """The body is complete."""

    def silent(self, seconds: float) -> None:
        text = f"the message stopped coming, {seconds:.0f} s ago"
        self.refuse(Status.DEADLINE_EXCEEDED, text)

    def failed(self, error: TessellaError) -> None:
        self.fail(error_answer(error))

    def sent(self) -> None:
        self._count_unread(0)

    def leaving(self) -> None:
        """It has its answer soon; streams may have no end."""
        return

    def gone(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._let_go()

    def _let_go(self) -> None:
        """Nothing of it is held, as nobody waits for an answer."""
        self._over()
        self._count_unread(0)

    def _count_unread(self, nbytes: int) -> None:
        """So many bytes of an answer wait for the client."""
        self.shared.inference.bodies.unread_bytes += nbytes - self._unread_bytes
        self._unread_bytes = nbytes

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Answer in a task."""
        self._task = asyncio.get_running_loop().create_task(self._watched(work))

    async def _watched(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            if not self.is_over:
                self.fail(error_answer(error))

    async def unpacked(self, message: tuple[bool, memoryview]) -> memoryview:
        """The bytes of a message, which may be compressed; held until ``drop_unpacked``.

        Raises:
            InputError, ServeError: as ``body.decompress``; it is compressed in another way.
        """
        is_compressed, content = message
        if not is_compressed:
            return content
        encoding = self.head.get(b"grpc-encoding", b"identity")
        if encoding not in (b"gzip", b"deflate"):
            raise ServeError(
                "a message is compressed in an unknown way",
                status=501,
                seen=encoding.decode("latin-1")[:60],
                fix="send it as gzip, deflate or uncompressed",
            )
        most, bodies = self.most_bytes, self.shared.inference.bodies

        async def expanded() -> bytes:
            async with bodies.expanding:
                return await asyncio.to_thread(decompress, bytes(content), most)

        # The thread goes on when the call is given up, and so does its place among the others.
        made = await asyncio.shield(asyncio.create_task(expanded()))
        if self.is_over:  # nobody would count it any more
            raise asyncio.CancelledError
        bodies.hold(len(made))
        self._unpacked_bytes += len(made)
        return memoryview(made)

    def drop_unpacked(self) -> None:
        """Hold no message any more that came compressed."""
        self.shared.inference.bodies.held_bytes -= self._unpacked_bytes
        self._unpacked_bytes = 0

    # --- answers ----------------------------------------------------------------------------------

    def respond(self, message: bytes, trailing: bytes = b"") -> None:
        """Answer with a message, and with headers behind it."""
        if not self.is_over:
            self._over()
            data = b"".join((PREFIX.pack(0, len(message)), message))
            self.stream.answer(HEAD, data, _OK + trailing)
            if not self.stream.is_sent:
                self._count_unread(len(data))

    def fail(self, answer: Answer) -> None:
        """Answer with an error, as HTTP would tell it."""
        self._refuse(refused(answer))

    def refuse(self, status: Status, text: str) -> None:
        """Answer with a status alone."""
        self._refuse(refusal(status, text))

    def _refuse(self, block: bytes) -> None:
        if not self.is_over:
            self._over()
            self.stream.finish(self.head_block() + block)

    def head_block(self) -> bytes:
        """What goes before the status, if no message has."""
        return HEAD

    def _over(self) -> None:
        if not self.is_over:
            self.is_over = True
            self._count(-1)
            self.messages.drop()
            self.drop_unpacked()


def _status(status: int) -> Status:
    """gRPC's status for one of HTTP."""
    return Status.OK if status == 200 else _STATUS.get(status, Status.INVALID_ARGUMENT)


def code_of(status: int) -> str:
    """The name of gRPC's status for one of HTTP."""
    return _status(status).name


def refused(answer: Answer) -> bytes:
    """The headers of an error, as HTTP would tell it."""
    status = _status(answer.status)
    text = str(json.loads(answer.body).get("error", ""))
    if answer.status == 500:
        log.warning("a call failed: %s", text)
    after = [literal(n, v) for n, v in answer.headers if n == b"retry-after"]
    return refusal(status, text) + b"".join(after)


def refusal(status: Status, text: str) -> bytes:
    """The headers of a status other than OK."""
    told = quote(text[:MOST_TEXT], safe=" !\"#$&'()*+,/:;<=>?@[\\]^`{|}").encode()
    return literal(b"grpc-status", str(int(status)).encode()) + literal(b"grpc-message", told)


class UnaryCall(Call):
    """A call that is a question to the app, not inference.

    Args:
        answers: gives the message of the answer, or what is wrong.
    """

    def __init__(
        self,
        shared: Shared,
        stream: Stream,
        head: Head,
        answers: Callable[[Call, bytes], Awaitable[bytes | Answer]],
    ) -> None:
        super().__init__(shared, stream, head)
        self._answers = answers

    def ended(self) -> None:
        self.run(self._answer_whole())

    @property
    def most_bytes(self) -> int:
        return min(self.shared.most_bytes, MANAGEMENT_BODY_BYTES)

    def gone(self) -> None:
        self._let_go()  # it goes on, as over HTTP: half a load or unload would leave an engine open

    async def _answer_whole(self) -> None:
        content = bytes(await self.unpacked(self.messages.only()))
        answer = await self._answers(self, content)
        if isinstance(answer, Answer):
            self.fail(answer)
        else:
            self.respond(answer)


class HealthCall(UnaryCall):
    """A question whether the server is there, which is counted beside all other calls."""

    def _count(self, change: int) -> None:
        self.shared.questions += change


class InferCall(Call, Quick):
    """``ModelInfer``: without a task and without JSON where its message is like one before."""

    DOOR = "grpc"

    def __init__(self, shared: Shared, stream: Stream, head: Head) -> None:
        Quick.__init__(self, stream.client)
        Call.__init__(self, shared, stream, head)
        self._is_started = False  # and is answered by a batcher
        self._known: Known | None = None
        self._parts: list[memoryview] = []

    def ended(self) -> None:
        try:
            is_compressed, content = self.messages.only()
            known = None if is_compressed else self._find(content)
            if known is not None:
                self._known, left_us = known, self.remaining_us
                self._is_started = self.start(self._inference, known.name, known.version, left_us)
                if self._is_started:
                    return
        except Exception as error:  # of any kind: others have calls on this connection
            self.fail(error_answer(error))
            return
        self.run(self._answer_slowly())

    def gone(self) -> None:
        super().gone()
        if self._is_started and not self._is_answered:
            self.give_up()

    async def _answer_slowly(self) -> None:
        content = await self.unpacked(self.messages.only())
        self._answer(await self.shared.answer_infer(self, content))

    def _find(self, content: memoryview) -> Known | None:
        """What the message says but for its tensors; finds these in it."""
        found = cut(content)
        if found is None:
            return None
        fields, self._parts = found
        kind = fields, tuple(map(len, self._parts))
        known = self.shared.known.get(kind)
        if known is None and (known := known_message(content, self._parts)) is not None:
            if len(self.shared.known) >= MOST_KNOWN:
                self.shared.known.clear()
            self.shared.known[kind] = known
        return known

    # --- what ``Quick`` asks ----------------------------------------------------------------------

    @property
    def _inference(self) -> Inference:
        return self.shared.inference

    def _traced(self, tracing: Tracing) -> Trace:
        return tracing.call(self.head, code_of, begun_ns=self._begun_ns)

    def _parsed(self, model: ServedModel) -> InferRequest | Unread | None:
        assert self._known is not None
        request = self._inference.parse_parts(self._known.text, self._parts, model)
        return None if isinstance(request, InferRequest) and request.images else request

    def _made(self, outputs: Arrays) -> Answer:
        model, request, known = self._model, self._request, self._known
        assert known is not None
        key: tuple[str | tuple[int, ...], ...]
        key = "gRPC", model.version, *(outputs[o.name].shape for o in request.outputs)
        # With the signature, as another plan may take the model's place under the same version.
        fields = None if request.texts is None else request.texts.get(key)
        if fields is None:
            regions = self._inference.regions
            made = build_infer(
                request,
                outputs,
                model.signature,
                name=model.name,
                version=model.version,
                regions=regions,
            )
            for copy in made.copies:
                copy.make()
            message = infer_response(made.body, made.json_bytes)
            body = message.SerializeToString()
            if request.texts is not None:
                message.ClearField("raw_output_contents")
                if len(request.texts) < MOST_TEXTS:
                    request.texts[key] = message.SerializeToString()
        else:
            specs = model.signature.outputs
            tensors = [
                to_binary(outputs[o.name], dtype(specs[o.name].dtype)) for o in request.outputs
            ]
            body = answer_of(fields, tensors)
        self._inference.bodies.require_readers(len(body))
        self._watch.lap("answer")
        return Answer(body=body, headers=((b"server-timing", self._watch.stages.header()),))

    def _answer(self, answer: Answer) -> None:
        self._is_answered = True
        if answer.status != 200:
            self.fail(answer)
            return
        timing = [literal(n, v) for n, v in answer.headers if n == b"server-timing"]
        self.respond(answer.body, b"".join(timing))


class StreamCall(Call):
    """``ModelStreamInfer``: one answer a request, in their order; an error is an answer too."""

    def __init__(self, shared: Shared, stream: Stream, head: Head) -> None:
        super().__init__(shared, stream, head)
        self._queue: deque[tuple[bool, memoryview]] = deque()
        self._changed = asyncio.Event()
        self._has_begun = self._is_leaving = False
        shared.streams += 1
        self.run(self._work())

    def data(self, chunk: memoryview) -> None:
        if not self.is_over:
            self.messages.take(chunk)
            self._fill()
            self._changed.set()

    def _fill(self) -> None:
        """Take messages that have come whole; while too many wait, the client may not send more
        than its window.
        """
        while len(self._queue) < MOST_QUEUED and (message := self.messages.next()) is not None:
            self._queue.append(message)
        if len(self._queue) < MOST_QUEUED:
            self.stream.refill()

    def ended(self) -> None:
        self._changed.set()

    def sent(self) -> None:
        super().sent()
        self._changed.set()

    def leaving(self) -> None:
        self._is_leaving = True
        self._changed.set()

    def silent(self, seconds: float) -> None:
        if self.messages.is_partial and not self._queue:
            super().silent(seconds)

    def _refuse(self, block: bytes) -> None:
        super()._refuse(block)
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()  # else it answers on a stream that has ended, or waits for ever

    def head_block(self) -> bytes:
        return b"" if self._has_begun else HEAD

    def _over(self) -> None:
        if not self.is_over:
            self.shared.streams -= 1
            self._queue.clear()
        super()._over()

    async def _work(self) -> None:
        while not (self.stream.is_read and not self._queue):
            if not self._queue:
                if self._is_leaving and not self.messages.is_partial:
                    self.refuse(Status.UNAVAILABLE, "the server is stopping")
                    return
                self._changed.clear()
                await self._changed.wait()
                continue
            message = self._queue.popleft()
            await self._answer_one(message)
            await asyncio.sleep(0)  # errors need no turn of the event loop, and others do
            self.messages.release(message[1])
            self.drop_unpacked()
            self._fill()
            while not self.stream.is_sent:
                self._changed.clear()
                await self._changed.wait()
        if self.messages.is_partial:
            raise InputError("the last message is not complete")
        if not self.is_over:
            self._over()
            self.stream.finish(self.head_block() + _OK)

    async def _answer_one(self, message: tuple[bool, memoryview]) -> None:
        response = MESSAGES["ModelStreamInferResponse"]()
        try:
            answer = await self.shared.answer_infer(self, await self.unpacked(message))
        except TessellaError as error:
            answer = error_answer(error)
        if answer.status == 200:
            response.infer_response.ParseFromString(answer.body)
        else:
            response.error_message = str(json.loads(answer.body).get("error", ""))
        body = response.SerializeToString()
        if not self._has_begun:
            self._has_begun = True
            self.stream.begin(HEAD)
        self.stream.send(PREFIX.pack(0, len(body)) + body)
        if not self.stream.is_sent:
            self._count_unread(len(body))


class Answered:
    """The handler of a call that was answered before its body has come, which is passed over."""

    def data(self, chunk: memoryview) -> None:
        """Passed over."""

    def ended(self) -> None:
        """Passed over."""

    def silent(self, seconds: float) -> None:
        """Passed over."""

    def failed(self, error: TessellaError) -> None:
        """Cannot be."""

    def sent(self) -> None:
        """Nobody waits for it."""

    def leaving(self) -> None:
        """It has its answer."""

    def gone(self) -> None:
        """Nobody waits for it."""


ANSWERED = Answered()
