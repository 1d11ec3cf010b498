"""Frames and header blocks of HTTP/2 (RFC 9113, 7541), as far as a server of gRPC needs them, and
what a stream tells the call on it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Any, Protocol

from hpack import Decoder, HPACKError

from tessella.core.errors import TessellaError

MOST_HEAD_BYTES = 16 << 10  # of a header block, packed and unpacked
MOST_KNOWN, MOST_KNOWN_BYTES = 64, 2048  # header blocks that a connection remembers
LARGEST_WINDOW = (1 << 31) - 1
FRAME = struct.Struct(">BHBBL")  # its size (high byte and rest), kind, flags and stream


class Kind(IntEnum):
    """Of a frame."""

    DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE = range(6)
    PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(6, 10)


class Code(IntEnum):
    """Why a stream or a connection ends."""

    NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR = range(4)
    STREAM_CLOSED, FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL = 5, 6, 7, 8
    COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 9, 11


END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY = 1, 1, 4, 8, 32


class Setting(IntEnum):
    """The numbers of a connection's settings, as RFC 9113 has them."""

    TABLE_SIZE, ENABLE_PUSH, MOST_STREAMS, FIRST_WINDOW, FRAME_BYTES, HEAD_BYTES = range(1, 7)


class Misuse(Exception):
    """What a client sent is not HTTP/2, or more than anybody needs: its connection ends."""

    def __init__(self, code: Code, why: str) -> None:
        super().__init__(why)
        self.code, self.why = code, why


Head = Mapping[bytes, bytes]


def frame(kind: Kind, flags: int, number: int, payload: bytes = b"") -> bytes:
    """A frame of a stream, or of stream 0: the connection."""
    size = len(payload)
    return FRAME.pack(size >> 16, size & 0xFFFF, kind, flags, number) + payload


def literal(name: bytes, value: bytes) -> bytes:
    """A header in a block of ours: as it is, never in the table, which so stays empty."""
    return b"\x00" + _length(len(name)) + name + _length(len(value)) + value


def _length(count: int) -> bytes:
    if count < 127:
        return bytes((count,))
    made, count = bytearray(b"\x7f"), count - 127
    while count >= 128:
        made.append(count & 127 | 128)
        count >>= 7
    return bytes(made) + bytes((count,))


def unpadded(payload: memoryview) -> memoryview:
    """What is left of a padded frame without its padding.

    Raises:
        Misuse: there is more padding than frame.
    """
    if not payload or payload[0] >= len(payload):
        raise Misuse(Code.PROTOCOL_ERROR, "more padding than frame")
    return payload[1 : len(payload) - payload[0]]


class Heads:
    """Reads the header blocks of one connection. Clients send the same block again and again, and
    it means the same until another one changes the table to which it points.
    """

    def __init__(self) -> None:
        self._decoder = Decoder(max_header_list_size=MOST_HEAD_BYTES)
        self._known: dict[bytes, Head | None] = {}

    def read(self, block: bytes) -> Head | None:
        """The headers of a block; None if no request has such.

        Raises:
            Misuse: it cannot be read, so that no later one can.
        """
        if block in self._known:
            return self._known[block]
        table = self._decoder.header_table
        count, newest, size = _state(table)
        try:
            lines = self._decoder.decode(block, raw=True)
        except (HPACKError, ValueError, IndexError) as error:
            raise Misuse(Code.COMPRESSION_ERROR, "a header block cannot be read") from error
        head = _head([(bytes(name), bytes(value)) for name, value in lines])
        now = _state(table)
        unchanged = now[1] is newest and (now[0], now[2]) == (count, size)
        if not unchanged or len(self._known) >= MOST_KNOWN:
            self._known.clear()
        elif len(block) <= MOST_KNOWN_BYTES:
            self._known[block] = head
        return head


def _state(table: Any) -> tuple[int, object, int]:
    """What differs after the table of a decoder has changed: the newest entry is another object.

    It is held meanwhile: at the address of one that is gone another could lie.
    """
    entries = table.dynamic_entries
    return len(entries), entries[0] if entries else None, table.maxsize


_PSEUDO = {b":method", b":path", b":scheme", b":authority"}
_OF_HTTP_1 = {
    b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"
}  # fmt: skip
_ONCE = {b"authorization", b"content-type", b"grpc-timeout", b"grpc-encoding", b"te"}


def _head(lines: Iterable[tuple[bytes, bytes]]) -> Head | None:
    """The headers by name; None if they are none of a request, or say twice what decides."""
    head: dict[bytes, bytes] = {}
    is_first = True
    for name, value in lines:
        is_pseudo = name[:1] == b":"
        if is_pseudo and (not is_first or name not in _PSEUDO or name in head):
            return None
        is_first = is_pseudo
        if name != name.lower() or name in _OF_HTTP_1 or (name in _ONCE and name in head):
            return None
        head[name] = value
    if b":method" not in head or not head.get(b":path") or b":scheme" not in head:
        return None
    return head if head.get(b"te", b"trailers") == b"trailers" else None


class Handler(Protocol):
    """What a call makes of its stream. After ``gone`` nothing more is asked of it."""

    def data(self, chunk: memoryview) -> None:
        """A part of the body has come. Raises ``TessellaError`` where it cannot be taken."""

    def ended(self) -> None:
        """The body is complete."""

    def silent(self, seconds: float) -> None:
        """Nothing has come for so long, and the body is not complete."""

    def failed(self, error: TessellaError) -> None:
        """Answer with an error that ``data`` has raised."""

    def sent(self) -> None:
        """What waited for a window has been sent."""

    def leaving(self) -> None:
        """The server stops, and takes no more calls."""

    def gone(self) -> None:
        """The client, or its connection, has given the call up."""
