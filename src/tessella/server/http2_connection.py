"""HTTP/2 as clients of gRPC speak it (RFC 9113): the server's side of one connection.

Here are frames and windows; what a call means is its ``Handler``'s. Written out, as gRPC's own
library takes 300 to 400 µs of Python for a call. Whatever a client may send without end is bounded:
frames that bring no call further by their rate, header blocks by their size, bodies by the windows
and by who counts the bytes that are held.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import cast

from tessella.core.errors import TessellaError
from tessella.server.body import BodyReader
from tessella.server.fairness import client_of
from tessella.server.http2_frames import (
    ACK,
    END_HEADERS,
    END_STREAM,
    FRAME,
    LARGEST_WINDOW,
    MOST_HEAD_BYTES,
    PADDED,
    PRIORITY,
    Code,
    Handler,
    Head,
    Heads,
    Kind,
    Misuse,
    Setting,
    frame,
    unpadded,
)

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_BYTES = 1 << 20  # of a client; a frame of 16 kB costs as much of Python as a larger one
STREAM_WINDOW, CONNECTION_WINDOW = 4 << 20, 16 << 20  # what a client may send unasked
MOST_STREAMS = 256  # of a connection at a time
MOST_CONTINUATIONS = 16
# What may come in a second that brings no call further, each frame by its cost: such as pings,
# settings and streams that are given up.
MOST_IDLE = 4096
LOOK_S = 1.0  # between looks at what stands still
MOST_WAITING_BYTES = 1 << 20  # of answers that a client does not read: then it is not read, either
_SIZES = {Kind.PRIORITY: 5, Kind.RST_STREAM: 4, Kind.PING: 8, Kind.WINDOW_UPDATE: 4}
_COSTS = {Kind.RST_STREAM: 4, Kind.SETTINGS: 16}
_OF_CONNECTION = (Kind.SETTINGS, Kind.PING, Kind.GOAWAY)

Opened = Callable[["Stream", Head], Handler]


class Stream:
    """One call's place in a connection.

    Attributes:
        heard_s: when the client sent something of it last, on the loop's clock.
        is_read: the client has sent all.
        stood_s: since when an answer waits for a window, or when its client had read enough.
    """

    __slots__ = (
        "_connection", "_last", "_out", "_position", "_seen", "client", "handler", "heard_s",
        "is_read", "number", "room", "stood_s", "window",
    )  # fmt: skip

    def __init__(self, connection: Connection, number: int, window: int, now_s: float) -> None:
        self._connection = connection
        self.number, self.client = number, connection.client
        self.window = window  # what we may send
        self.room = STREAM_WINDOW  # what the client may send
        self.heard_s = self.stood_s = now_s
        self.is_read = False
        self.handler: Handler
        self._out = bytearray()  # that waits for a window
        self._position = self._seen = 0  # what of it was sent, by now and at ``stood_s``
        self._last: bytes | None = None  # the header block behind it

    @property
    def is_open(self) -> bool:
        """Whether an answer can be sent."""
        return self._connection.streams.get(self.number) is self

    @property
    def is_sent(self) -> bool:
        """Whether nothing waits for a window."""
        return not self._out

    def taken(self, now_s: float) -> int:
        """How much of an answer the client took since ``stood_s``, which is now again."""
        taken, self.stood_s, self._seen = self._position - self._seen, now_s, self._position
        return taken

    def begin(self, block: bytes) -> None:
        """Send the first header block."""
        self._connection.write(frame(Kind.HEADERS, END_HEADERS, self.number, block))

    def send(self, data: bytes) -> None:
        """Send a part of the answer's body, as far as the windows allow; the rest follows."""
        if self.is_open:
            if not self._out:
                self.stood_s = self._connection.now_s()
            self._out += data
            self.pump()

    def finish(self, block: bytes) -> None:
        """End the stream with a header block."""
        if self.is_open:
            self._last = block
            self.pump()

    def answer(self, head: bytes, data: bytes, last: bytes) -> None:
        """All of an answer at once."""
        if not self.is_open:
            return
        connection, size = self._connection, len(data)
        if size > min(self.window, connection.window, connection.frame_bytes, connection.room):
            self.begin(head)
            self.send(data)
            self.finish(last)
            return
        self.window -= size
        connection.window -= size
        number = self.number
        first = frame(Kind.HEADERS, END_HEADERS, number, head)
        body = FRAME.pack(size >> 16, size & 0xFFFF, Kind.DATA, 0, number)
        end = frame(Kind.HEADERS, END_HEADERS | END_STREAM, number, last)
        connection.write(b"".join((first, body, data, end)))
        connection.answered(self)

    def pump(self) -> None:
        """Send what the windows allow."""
        connection, parts = self._connection, []
        room = connection.room
        while (left := len(self._out) - self._position) > 0:
            size = min(left, self.window, connection.window, connection.frame_bytes, room)
            if size <= 0:
                break
            self.window -= size
            connection.window -= size
            room -= size
            piece = self._out[self._position : self._position + size]
            parts.append(frame(Kind.DATA, 0, self.number, bytes(piece)))
            self._position += size
        if left <= 0:
            self._out.clear()
            self._position = self._seen = 0
        if parts:
            connection.write(b"".join(parts))
            if left <= 0:
                self.handler.sent()
        if left > 0 and self.window > 0:
            connection.blocked[self.number] = self
        elif not left and self._last is not None:
            flags = END_HEADERS | END_STREAM
            connection.write(frame(Kind.HEADERS, flags, self.number, self._last))
            connection.answered(self)

    def refill(self) -> None:
        """Let the client send as much as at first, once that is worth a frame."""
        if self.room < STREAM_WINDOW // 2 and self.is_open:
            more = struct.pack(">L", STREAM_WINDOW - self.room)
            self.room = STREAM_WINDOW
            self._connection.write(frame(Kind.WINDOW_UPDATE, 0, self.number, more))


class Connection(asyncio.Protocol):
    """A client's connection.

    Args:
        opened: makes the handler of a call, by its stream and headers.
        bodies: with the limits, of which ``head_s`` is also of any other frame.
        all: where connections are noted while they are there.
    """

    def __init__(self, opened: Opened, bodies: BodyReader, all: set[Connection]) -> None:
        self._opened, self._bodies, self._limits, self._all = opened, bodies, bodies.limits, all
        self.streams, self.blocked = dict[int, Stream](), dict[int, Stream]()  # these for a window
        self.window = 65535
        self.frame_bytes = 16384  # of ours
        self._first_window = 65535  # of a new stream, to send
        self._room = CONNECTION_WINDOW
        self._rest = b""
        self._to_send: list[bytes] = []
        self._waiting = 0  # bytes of these
        self._ended_s = 0.0
        self._last = 0  # the highest number of a stream
        self._left = 0  # of a frame of data that is handed on as it comes
        self._reading: Stream | None = None
        self._ends = False
        self._block: bytearray | None = None  # of a stream, and not complete yet
        self._block_of, self._block_flags, self._block_parts = 0, 0, 0
        self._heads = Heads()
        self._is_greeted = self._has_settings = self._is_leaving = self._has_ended = False
        self._idle, self._idle_since_s = 0, 0.0

    # --- the transport ----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)
        self.client = client_of(transport.get_extra_info("peername"))
        self._loop = asyncio.get_running_loop()
        self._whole_s = self._loop.time()  # when nothing was incomplete
        self._all.add(self)
        transport.set_write_buffer_limits(high=MOST_WAITING_BYTES)
        self._paused_s: float | None = None  # since when the client reads nothing
        self._timer = self._loop.call_later(LOOK_S, self._look)
        wanted = {
            Setting.MOST_STREAMS: MOST_STREAMS, Setting.FIRST_WINDOW: STREAM_WINDOW,
            Setting.FRAME_BYTES: FRAME_BYTES, Setting.HEAD_BYTES: MOST_HEAD_BYTES,
        }  # fmt: skip
        settings = b"".join(struct.pack(">HL", *pair) for pair in wanted.items())
        more = struct.pack(">L", CONNECTION_WINDOW - 65535)
        self.write(frame(Kind.SETTINGS, 0, 0, settings) + frame(Kind.WINDOW_UPDATE, 0, 0, more))

    def connection_lost(self, exc: Exception | None) -> None:
        self._has_ended = True
        self._to_send.clear()
        self._timer.cancel()
        self._all.discard(self)
        streams, self.streams = self.streams, {}
        self.blocked.clear()
        for stream in streams.values():
            stream.handler.gone()

    def pause_writing(self) -> None:
        self._paused_s = self.now_s()
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._paused_s = None
        self._transport.resume_reading()
        self._pump_blocked()

    def now_s(self) -> float:
        """On the loop's clock."""
        return self._loop.time()

    def write(self, frames: bytes) -> None:
        """Send frames, together with all others of this turn of the event loop."""
        if not self._to_send:
            self._loop.call_soon(self._flush)
        self._to_send.append(frames)
        self._waiting += len(frames)

    @property
    def room(self) -> int:
        """How much of answers may still be written before the client reads some."""
        return 0 if self._paused_s is not None else max(0, MOST_WAITING_BYTES - self._waiting)

    def _pump_blocked(self) -> None:
        while self.blocked and self.window > 0 and self.room:
            self.blocked.pop(next(iter(self.blocked))).pump()

    def _flush(self) -> None:
        if self._to_send and not self._transport.is_closing():
            self._transport.write(b"".join(self._to_send))
        self._to_send.clear()
        self._waiting = 0
        self._pump_blocked()

    def _close(self) -> None:
        self._flush()
        self._has_ended, self._ended_s = True, self.now_s()
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        if self._has_ended:
            return
        try:
            self._feed(data)
        except Misuse as error:
            self._end(error.code, error.why)

    def leave(self) -> None:
        """Take no more calls, and close when those at hand have their answers."""
        if not self._is_leaving:
            self._is_leaving = True
            self.write(self._goaway(Code.NO_ERROR, ""))
            for stream in list(self.streams.values()):
                stream.handler.leaving()
            self._close_if_done()

    def abort(self) -> None:
        """Close now."""
        self._transport.abort()

    def _end(self, code: Code, why: str) -> None:
        """Close with a reason, after a client's misuse."""
        self.write(self._goaway(code, why))
        self._close()

    def _goaway(self, code: Code, why: str) -> bytes:
        return frame(Kind.GOAWAY, 0, 0, struct.pack(">LL", self._last, code) + why.encode())

    def _close_if_done(self) -> None:
        if self._is_leaving and not self.streams and not self._has_ended:
            self._close()

    def _look(self) -> None:
        """Find what stands still."""
        now_s = self._loop.time()
        if self._has_ended:
            # Who misused it and does not read why; others may still read their last answers
            if not self._is_leaving or now_s - self._ended_s > self._limits.body_idle_s:
                self._transport.abort()
            else:
                self._timer = self._loop.call_later(LOOK_S, self._look)
            return
        if self._paused_s is not None and now_s - self._paused_s > self._limits.body_idle_s:
            self._transport.abort()
            return
        self._timer = self._loop.call_later(LOOK_S, self._look)
        # The next byte begins a frame, or brings a body further
        if self._has_settings and not self._rest and self._block is None:
            self._whole_s = now_s
        elif now_s - self._whole_s > self._limits.head_s:
            self._end(Code.ENHANCE_YOUR_CALM, f"no complete frame within {self._limits.head_s:g} s")
            return
        for stream in list(self.streams.values()):
            if not stream.is_read and now_s - stream.heard_s > self._limits.body_idle_s:
                stream.handler.silent(now_s - stream.heard_s)
            is_due = not stream.is_sent and now_s - stream.stood_s > self._limits.body_idle_s
            if is_due and stream.taken(now_s) < self._bodies.least_bytes():
                self.reset(stream, Code.CANCEL)
                stream.handler.gone()

    # --- frames -----------------------------------------------------------------------------------

    def _feed(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
        view, position, end = memoryview(data), 0, len(data)
        if not self._is_greeted:
            if not data.startswith(PREFACE[:end]):
                raise Misuse(Code.PROTOCOL_ERROR, "this port speaks HTTP/2 alone")
            if end < len(PREFACE):
                self._rest = data
                return
            position, self._is_greeted = len(PREFACE), True
        now_s = self._loop.time()
        while position < end:
            if self._left:
                size = min(self._left, end - position)
                self._left -= size
                self._whole_s = now_s
                self._on_part(view[position : position + size])
                position += size
                continue
            if end - position < FRAME.size:
                break
            high, low, kind, flags, number = FRAME.unpack_from(data, position)
            size, number = high << 16 | low, number & LARGEST_WINDOW
            start = position + FRAME.size
            self._check(kind, flags, size, number)
            if kind == 0 and not flags & PADDED:
                position = start
                self._on_data(flags, number, size)
                continue
            if end - start < size:
                break
            position = start + size
            self._on_frame(kind, flags, number, view[start:position])
            if self._block is None:
                self._whole_s = now_s
        self._rest = data[position:]

    def _check(self, kind: int, flags: int, size: int, number: int) -> None:
        """Refuse a frame by its head, before it is waited for and put together."""
        if size > FRAME_BYTES or size != _SIZES.get(kind, size):  # type: ignore[call-overload]
            raise Misuse(Code.FRAME_SIZE_ERROR, f"a frame of {size:,} bytes")
        if self._block is not None:
            if kind != Kind.CONTINUATION or number != self._block_of:
                raise Misuse(Code.PROTOCOL_ERROR, "a header block does not go on")
        elif kind == Kind.CONTINUATION:
            raise Misuse(Code.PROTOCOL_ERROR, "nothing to continue")
        if not self._has_settings and kind != Kind.SETTINGS:
            raise Misuse(Code.PROTOCOL_ERROR, "settings come first")
        # gRPC pads no data and knows all kinds
        most = 1 << 10 if kind in (Kind.SETTINGS, Kind.GOAWAY) else MOST_HEAD_BYTES + 256
        held = size + len(self._block or b"")
        if (kind != Kind.DATA or flags & PADDED) and held > most:
            raise Misuse(Code.ENHANCE_YOUR_CALM, f"a frame or header block of {held:,} bytes")
        is_of_any = kind == Kind.WINDOW_UPDATE or kind > Kind.CONTINUATION
        if not is_of_any and (number == 0) != (kind in _OF_CONNECTION):
            raise Misuse(Code.PROTOCOL_ERROR, f"a frame of stream {number}")

    def _on_frame(self, kind: int, flags: int, number: int, payload: memoryview) -> None:
        if kind == Kind.HEADERS:
            if flags & PADDED:
                payload = unpadded(payload)
            if flags & PRIORITY:
                if len(payload) < 5:
                    raise Misuse(Code.FRAME_SIZE_ERROR, "a header block without its priority")
                if struct.unpack_from(">L", payload)[0] & LARGEST_WINDOW == number:
                    raise Misuse(Code.PROTOCOL_ERROR, "a stream that depends on itself")
                payload = payload[5:]
            self._on_block(number, flags, payload)
        elif kind == Kind.CONTINUATION:
            self._block_parts += 1
            if self._block_parts > MOST_CONTINUATIONS:
                raise Misuse(Code.ENHANCE_YOUR_CALM, "a header block in too many frames")
            assert self._block is not None
            self._block += payload
            if flags & END_HEADERS:
                block, self._block = bytes(self._block), None
                self._on_headers(number, block, bool(self._block_flags & END_STREAM))
        elif kind == Kind.DATA:
            self._on_padded(flags, number, payload)
        else:
            self._count(_COSTS.get(kind, 1))  # type: ignore[call-overload]
            if kind == Kind.SETTINGS:
                self._on_settings(flags, payload)
            elif kind == Kind.PING and not flags & ACK:
                self.write(frame(Kind.PING, ACK, 0, bytes(payload)))
            elif kind == Kind.WINDOW_UPDATE:
                self._on_window(number, payload)
            elif kind == Kind.RST_STREAM:
                self._require_opened(number)
                if (stream := self._forget(number)) is not None:
                    stream.handler.gone()
                    self._close_if_done()
            elif kind == Kind.PRIORITY:
                if struct.unpack_from(">L", payload)[0] & LARGEST_WINDOW == number:
                    raise Misuse(Code.PROTOCOL_ERROR, "a stream that depends on itself")
            elif kind == Kind.PUSH_PROMISE:
                raise Misuse(Code.PROTOCOL_ERROR, "clients do not push")

    def _count(self, cost: int) -> None:
        """Count what brings no call further."""
        self._idle += cost
        if self._idle > MOST_IDLE:
            now_s = self._loop.time()
            if now_s - self._idle_since_s < 1:
                raise Misuse(Code.ENHANCE_YOUR_CALM, "too many frames that do nothing")
            self._idle, self._idle_since_s = cost, now_s

    def _require_opened(self, number: int) -> None:
        if number > self._last or not number % 2:
            raise Misuse(Code.PROTOCOL_ERROR, f"stream {number} was never opened")

    def _forget(self, number: int) -> Stream | None:
        self.blocked.pop(number, None)
        return self.streams.pop(number, None)

    # --- bodies -----------------------------------------------------------------------------------

    def _on_data(self, flags: int, number: int, size: int) -> None:
        """A frame of data begins, whose bytes are handed on as they come."""
        self._require_opened(number)
        if size < 64 and not flags & END_STREAM:
            self._count(1)
        self._room -= size
        if self._room < 0:
            raise Misuse(Code.FLOW_CONTROL_ERROR, "more than the connection's window")
        stream = self.streams.get(number)
        if stream is not None:
            if stream.is_read:
                raise Misuse(Code.STREAM_CLOSED, f"stream {number} has ended")
            stream.room -= size
            if stream.room < 0:
                raise Misuse(Code.FLOW_CONTROL_ERROR, "more than a stream's window")
        elif size < 64:
            self._count(1)
        if self._room < CONNECTION_WINDOW // 2:
            more = struct.pack(">L", CONNECTION_WINDOW - self._room)
            self.write(frame(Kind.WINDOW_UPDATE, 0, 0, more))
            self._room = CONNECTION_WINDOW
        self._reading, self._left, self._ends = stream, size, bool(flags & END_STREAM)
        if not size:
            self._on_part(memoryview(b""))

    def _on_part(self, chunk: memoryview) -> None:
        """A part of a frame of data; the last one if nothing is left of it."""
        stream = self._reading
        if stream is None or not stream.is_open:
            return
        stream.heard_s = self._loop.time()
        if chunk:
            try:
                stream.handler.data(chunk)
            except TessellaError as error:
                stream.handler.failed(error)
                return
        if self._ends and not self._left and stream.is_open:
            self._on_end(stream)

    def _on_padded(self, flags: int, number: int, payload: memoryview) -> None:
        self._on_data(flags & ~END_STREAM, number, len(payload))
        self._left, self._ends = 0, bool(flags & END_STREAM)
        self._on_part(unpadded(payload))

    def _on_end(self, stream: Stream) -> None:
        stream.is_read = True
        stream.handler.ended()

    # --- header blocks ----------------------------------------------------------------------------

    def _on_block(self, number: int, flags: int, payload: memoryview) -> None:
        if not number % 2:
            raise Misuse(Code.PROTOCOL_ERROR, "clients open odd streams")
        if flags & END_HEADERS:
            self._on_headers(number, bytes(payload), bool(flags & END_STREAM))
        else:
            self._block, self._block_of, self._block_parts = bytearray(payload), number, 0
            self._block_flags = flags

    def _on_headers(self, number: int, block: bytes, ends: bool) -> None:
        head = self._heads.read(block)
        stream = self.streams.get(number)
        if stream is not None:  # what follows a body
            if not ends or stream.is_read:
                raise Misuse(Code.PROTOCOL_ERROR, "headers in the middle of a body")
            self._on_end(stream)
            return
        if number <= self._last:  # of a stream that has ended here
            self._count(4)
            return
        self._last = number
        if head is None or self._is_leaving or len(self.streams) >= MOST_STREAMS:
            self._count(4)
            code = Code.PROTOCOL_ERROR if head is None else Code.REFUSED_STREAM
            self.write(frame(Kind.RST_STREAM, 0, number, struct.pack(">L", code)))
            return
        stream = Stream(self, number, self._first_window, self._loop.time())
        self.streams[number] = stream
        stream.handler = self._opened(stream, head)
        if ends and stream.is_open:
            self._on_end(stream)

    # --- windows and settings ---------------------------------------------------------------------

    def _on_window(self, number: int, payload: memoryview) -> None:
        more = struct.unpack(">L", payload)[0] & LARGEST_WINDOW
        if number:
            self._require_opened(number)
            stream = self.streams.get(number)
            if stream is None:
                return
            stream.window += more
            if not more or stream.window > LARGEST_WINDOW:
                code = Code.FLOW_CONTROL_ERROR if more else Code.PROTOCOL_ERROR
                self._count(3)
                self.reset(stream, code)
                stream.handler.gone()
            else:
                stream.pump()
            return
        self.window += more
        if not more:
            raise Misuse(Code.PROTOCOL_ERROR, "a window grows by nothing")
        if self.window > LARGEST_WINDOW:
            raise Misuse(Code.FLOW_CONTROL_ERROR, "a window is too large")
        self._pump_blocked()

    def _on_settings(self, flags: int, payload: memoryview) -> None:
        if flags & ACK:
            if payload:
                raise Misuse(Code.FRAME_SIZE_ERROR, "an answer to settings has no settings")
            return
        if len(payload) % 6:
            raise Misuse(Code.FRAME_SIZE_ERROR, "settings have six bytes each")
        self._count(len(payload) // 6)
        for name, value in dict(struct.iter_unpack(">HL", payload)).items():  # the last one holds
            if name == Setting.FIRST_WINDOW:
                if value > LARGEST_WINDOW:
                    raise Misuse(Code.FLOW_CONTROL_ERROR, "a window is too large")
                more, self._first_window = value - self._first_window, value
                for stream in list(self.streams.values()):
                    stream.window += more
                    if stream.window > LARGEST_WINDOW:
                        raise Misuse(Code.FLOW_CONTROL_ERROR, "a window is too large")
                    stream.pump()
            elif name == Setting.FRAME_BYTES:
                if not 16384 <= value < 1 << 24:
                    raise Misuse(Code.PROTOCOL_ERROR, "frames of an impossible size")
                self.frame_bytes = value
            elif name == Setting.ENABLE_PUSH and value > 1:
                raise Misuse(Code.PROTOCOL_ERROR, "a setting is neither 0 nor 1")
        self._has_settings = True
        self.write(frame(Kind.SETTINGS, ACK, 0))

    # --- what a stream asks -----------------------------------------------------------------------

    def answered(self, stream: Stream) -> None:
        """A stream's answer is complete; what the client still sends of it is passed over."""
        self._forget(stream.number)
        self._idle = max(0, self._idle - 8)
        if not stream.is_read:
            self.write(frame(Kind.RST_STREAM, 0, stream.number, struct.pack(">L", Code.NO_ERROR)))
        self._close_if_done()

    def reset(self, stream: Stream, code: Code) -> None:
        """End a stream without an answer."""
        if self._forget(stream.number) is not None:
            self.write(frame(Kind.RST_STREAM, 0, stream.number, struct.pack(">L", code)))
            self._close_if_done()
