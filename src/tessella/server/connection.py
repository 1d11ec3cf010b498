"""One connection: uvicorn's HTTP protocol, with limits on how large and how slow a head may be,
and with the short way for requests whose head is known.

A head is the request line and the headers. Nothing above sees a request before its head is
complete, so nothing above can refuse one that never ends.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import math
import os
import socket
import struct
import sys
import termios
from collections.abc import Callable
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from tessella.core.errors import ServeError
from tessella.server.answers import Answer, encoded
from tessella.server.body import SMALL_BYTES
from tessella.server.fairness import client_of
from tessella.server.limits import Limits
from tessella.server.short_way import MOST_HEAD_BYTES, Known, ShortRequest, ShortWay

Timer = asyncio.TimerHandle

END = b"\r\n\r\n"
CLOSE = (b"connection", b"close")
# How long the short way waits for more of a body; the long way has the patience of the limits.
GATHER_S = 0.05
LAST_S = 0.1  # how long a server that ends waits for a request that may be on its way


class Starts:
    """The lines with which the answers of all connections begin: they are the same for a second."""

    def __init__(self) -> None:
        self._headers: list[tuple[bytes, bytes]] | None = None
        self._lines: dict[int, bytes] = {}

    def of(self, status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
        """A status and uvicorn's own headers, of which it makes another list when they change."""
        if headers is not self._headers:
            self._headers, self._lines = headers, {}
        lines = self._lines.get(status)
        if lines is None:
            told = [b"%b: %b\r\n" % header for header in headers]
            lines = self._lines[status] = b"".join([STATUS_LINE[status], *told])
        return lines


class Connection(HttpToolsProtocol):
    """Closes itself on a head that is larger or slower than ``limits`` allow."""

    limits = Limits()
    short_way: ShortWay
    starts: Starts

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        is_plain = connection is not None and self.scheme == "http"
        self._client = client_of(self.client)
        self._descriptor: int | None = connection.fileno() if is_plain else None
        self._head_bytes = 0
        self._reading_head = True
        self._deadline: Timer | None = self._start_deadline()
        # Whether the parser has had whole requests only, and what it gets now begins with a head.
        self._is_between = True
        self._body_bytes = 0  # of bodies in what the parser has had last
        self._is_usual = True  # no upgrade, after which the parser reads no requests
        self._new_head: bytes | None = None  # that the parser is given and may be learned
        self._request: ShortRequest | None = None  # that is gathered or waits for its outputs
        self._behind = b""  # what came after it
        self._gathering: Timer | None = None
        self._is_last, self._last_s = False, math.inf  # and after that time, if more has come
        self._parting: Callable[[], None] | None = None  # what is said when all have answers
        self._has_ended = False  # its client says no more
        self._unread_bytes = self._left_bytes = 0  # of answers: at first, and at the last look
        self._unread: Timer | None = None  # until it is looked at again
        self._opened_s = self.loop.time()
        self._answered_s = -math.inf  # the last request of the short way, on the loop's clock

    def silence(self) -> tuple[int, float] | None:
        """As ``listening.Shared``; half a head is nothing to do."""
        if self._request is not None or not self._is_answered():
            return None
        return self._client, self._opened_s

    def give_way(self) -> None:
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        self._count_unread(0)
        if self._gathering is not None and self._request is not None:
            self._stop_gathering()
            self._request.drop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._parting is not None:
            return
        if self._request is not None or self._behind or self.flow.write_paused:
            self._receive_more(data)
            return
        self._new_head = None
        if self._is_between and self._is_usual and self._is_quiet():
            known = self.short_way.last  # most requests begin as the one before
            if known is not None and data.startswith(known.head):
                head = known.head
            elif (end := data.find(END, 0, MOST_HEAD_BYTES)) >= 0:
                head = data[: end + len(END)]
                known = self.short_way.find(head)
            else:
                head = b""
            if head:
                if known is not None and len(data) - len(head) <= known.body_bytes:
                    self._take(known, memoryview(data)[len(head) :])
                    return
                self._new_head = head
        self._parse(data)

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client that says no more may still read: what came whole is answered before the
        connection goes. TLS cannot be closed by half.
        """
        self._has_ended = True
        self._end_behind_answers()
        return self.scheme == "http" and not self.transport.is_closing()

    def _end_behind_answers(self) -> None:
        if self._gathering is not None:
            self._go_long_way()  # the rest of its body will not come
        if self._request is not None:
            self._is_last = True
        elif not self._behind and self._parting is None:
            self._part(self.transport.close)
            self._look_for_leaver()

    def shutdown(self) -> None:
        """Close behind the answer to the last request: the one at hand, or one that is on its way.
        To close at once lost the next request of every client that asks again and again.
        """
        self._is_last, self._last_s = True, self.loop.time() + LAST_S
        if not self._is_answered():
            super().shutdown()
        elif self._request is None:
            self.loop.call_later(LAST_S, self._close_unasked)

    def _close_unasked(self) -> None:
        if self._request is None and self._is_answered():
            self.transport.close()

    # --- answers that nobody reads ----------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look_for_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._count_unread(0)
        self._left_bytes = 0
        if self._request is None:
            self.flow.resume_reading()
            if self._behind:
                self.loop.call_soon(self._go_on)

    def timeout_keep_alive_handler(self) -> None:
        left_s = self._answered_s + self.timeout_keep_alive - self.loop.time()
        if self._unread is not None or self._request is not None:  # its client reads or waits
            left_s = self.timeout_keep_alive
        if left_s > 0:
            handler = self.timeout_keep_alive_handler
            self.timeout_keep_alive_task = self.loop.call_later(left_s, handler)
            return
        super().timeout_keep_alive_handler()
        self._look_for_leaver()

    def _look_for_leaver(self) -> None:
        """See that a connection that is closed goes: it does when its client has read all."""
        is_leaving = self.transport.is_closing() and self._unread is None
        if is_leaving and self.transport.get_write_buffer_size():
            self._look_for_reader()

    def _look_for_reader(self) -> None:
        """Cut off a client that has read too little of its answer since the last look."""
        before, self._left_bytes = self._left_bytes, _unread_bytes(self.transport)
        least_bytes = self.short_way.inference.bodies.least_bytes()
        if before and before - self._left_bytes < least_bytes:
            if (connection := self.transport.get_extra_info("socket")) is not None:
                # else the system keeps what it has of the answer for minutes
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()
        else:
            # an answer is held whole until its last byte is taken
            self._count_unread(max(self._unread_bytes, self._left_bytes))
            self._unread = self.loop.call_later(self.limits.body_idle_s, self._look_for_reader)

    def _count_unread(self, nbytes: int) -> None:
        """So many bytes of answers wait for the client."""
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        self.short_way.inference.bodies.unread_bytes += nbytes - self._unread_bytes
        self._unread_bytes = nbytes

    # --- the long way -----------------------------------------------------------------------------

    def _parse(self, data: bytes) -> None:
        self._body_bytes = 0
        super().data_received(data)
        is_head = self._reading_head or not (self._is_between or self._body_bytes)
        if is_head and self._parting is None and not self.transport.is_closing():
            self._head_bytes += len(data) - self._body_bytes
            if self._head_bytes > self.limits.head_bytes:
                self._refuse(431, f"the headers are larger than {self.limits.head_bytes:,} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_between = False
        self._head_bytes = 0
        self._reading_head = True
        if self._deadline is None:
            self._deadline = self._start_deadline()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reading_head:  # else it is behind a body, where nobody asks for it
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        self._head_bytes = 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        self._reading_head = False
        self._stop_deadline()
        super().on_headers_complete()
        if self._is_last:
            super().shutdown()
        if self.parser.should_upgrade():
            self._is_usual = False
        elif self._new_head is not None:
            self.short_way.learn(self._new_head, self.url, self.scope)
        self._new_head = None

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_between = True

    def _start_deadline(self) -> Timer:
        return self.loop.call_later(self.limits.head_s, self._too_slow)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._deadline = None
        if not self.transport.is_closing():
            self._refuse(408, f"no complete request within {self.limits.head_s:g} s")

    def _refuse(self, status: int, wrong: str) -> None:
        body = json.dumps({"error": wrong}).encode()
        head = (
            f"HTTP/1.1 {status} Refused\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )

        def refuse() -> None:
            self.transport.write(head.encode() + body)
            self.transport.close()

        self._part(refuse)

    def send_400_response(self, msg: str) -> None:
        self._part(partial(super().send_400_response, msg))

    def _part(self, last: Callable[[], None]) -> None:
        """Say what ends the connection, behind the answers of the requests that came whole."""
        cycle = self.cycle
        is_broken = cycle is not None and cycle.more_body  # it was in the body of this request
        if self.pipeline:
            if is_broken and self.pipeline[0][0] is cycle:
                self.pipeline.popleft()
        elif cycle is None or cycle.response_complete or is_broken:
            last()
            return
        self._stop_deadline()
        self._parting = last

    def on_response_complete(self) -> None:
        is_end = self._parting is not None and not self.pipeline
        super().on_response_complete()
        if is_end and not self.transport.is_closing():
            assert self._parting is not None
            self._parting()
        self._look_for_leaver()

    # --- the short way ----------------------------------------------------------------------------

    def _is_quiet(self) -> bool:
        """Whether every request so far has its answer, and the client reads them."""
        cycle = self.cycle
        is_answered = cycle is None or cycle.response_complete
        return is_answered and not self.flow.write_paused and not self.transport.is_closing()

    def _is_answered(self) -> bool:
        """Whether every request of the long way so far has its answer."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def _take(self, known: Known, body: memoryview) -> None:
        """Begin a request of the short way with what has come of its body."""
        if self._deadline is not None:
            self._stop_deadline()
        self._reading_head = False
        self.short_way.awake.came()
        self._request = self.short_way.request(known, self._client, self._respond)
        self._gather(body)

    def _gather(self, body: memoryview) -> None:
        request = self._request
        assert request is not None
        try:
            request.take(body)
        except ServeError:
            self._go_long_way(bytes(body))  # it says what is wrong
            return
        if request.missing:
            self._gathering = self.loop.call_later(GATHER_S, self._go_long_way)
        elif not request.run():
            self._go_long_way()

    def _receive_more(self, data: bytes) -> None:
        if self._gathering is None or self._request is None:  # the next request, too early
            self.flow.pause_reading()
            self._behind += data
            return
        self._stop_gathering()
        missing = self._request.missing
        self._behind = data[missing:]
        if self._behind:
            self.flow.pause_reading()
        self._gather(memoryview(data)[:missing])

    def _stop_gathering(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None

    def _go_long_way(self, more: bytes = b"") -> None:
        """Give the parser the request from its first byte on, and what came behind it."""
        self._stop_gathering()
        request, self._request = self._request, None
        if request is None or self.transport.is_closing():
            return
        behind, self._behind = self._behind, b""
        request.drop()
        self.flow.resume_reading()
        self._parse(b"".join([request.known.head, request.content, more, behind]))
        if self._is_last:
            super().shutdown()

    def _respond(self, answer: Answer) -> None:
        assert self._request is not None
        known = self._request.known
        if known.accept_encoding and len(answer.body) >= SMALL_BYTES:
            task = self.loop.create_task(self._encode(answer, known.accept_encoding))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        else:
            length = (b"content-length", b"%d" % len(answer.body))
            self._write(answer.status, (*answer.headers, length), answer.body)

    async def _encode(self, answer: Answer, accept_encoding: bytes) -> None:
        self._write(answer.status, *await encoded(answer, accept_encoding))

    def _write(self, status: int, headers: Any, body: bytes) -> None:
        """Send an answer as uvicorn would, and go on."""
        self._request = None
        if self.transport.is_closing():
            return
        lines = [self.starts.of(status, self.server_state.default_headers)]
        for name, value in headers:
            lines += (name, b": ", value, b"\r\n")
        is_late = self._is_last and self.loop.time() >= self._last_s
        ends, is_last = CLOSE in headers, is_late or (self._is_last and not self._behind)
        if is_last and not ends:
            lines.append(b"connection: close\r\n")
        self._send(b"".join([*lines, b"\r\n", body]))
        if ends or is_last:
            self.transport.close()
        if self.timeout_keep_alive_task is None or self.transport.is_closing():
            self.on_response_complete()
        else:  # the timer goes on; to stop and start it takes 5 µs of a request of 200
            self.server_state.total_requests += 1
            self.flow.resume_reading()
            self._answered_s = self.loop.time()
            self.short_way.awake.answered(self.loop)
        if self._behind:
            self.loop.call_soon(self._go_on)

    def _send(self, data: bytes) -> None:
        """Send at once what the system takes: uvloop would when all else of its turn is done."""
        sent = 0
        if self._descriptor is not None and not self.transport.get_write_buffer_size():
            try:
                sent = os.write(self._descriptor, data)
            except OSError:  # it takes nothing now, or the client is gone: the transport sees to it
                sent = 0
        if sent < len(data):
            self.transport.write(data[sent:])

    def _go_on(self) -> None:
        """Begin with what came behind the last request."""
        data, self._behind = self._behind, b""
        if not self.transport.is_closing():
            self.data_received(data)
            if self._has_ended:
                self._end_behind_answers()


def _unread_bytes(transport: asyncio.Transport) -> int:
    """What waits here and in the system until the client takes it."""
    nbytes = transport.get_write_buffer_size()
    if (connection := transport.get_extra_info("socket")) is not None:
        queued = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4))
        nbytes += int.from_bytes(queued, sys.byteorder)
    return nbytes


def connection_with(limits: Limits, short_way: ShortWay) -> type[Connection]:
    """The protocol class for these limits; uvicorn makes an instance a connection."""
    attributes: dict[str, Any] = {"limits": limits, "short_way": short_way, "starts": Starts()}
    return type("LimitedConnection", (Connection,), attributes)
