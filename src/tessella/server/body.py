"""Request and response bodies: read and decompressed within limits, compressed on request."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from tessella.core.errors import InputError, ServeError
from tessella.server.limits import Limits

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Headers = dict[bytes, bytes]

# Below this, compressing costs more than sending; above it, (de)compressing would hold up the loop.
SMALL_BYTES = 1 << 10
BRIEF_BYTES = 64 << 10


class Disconnected(Exception):
    """The client went away in the middle of its request: there is nobody to answer."""


class BodyReader:
    """Reads bodies, and limits the bytes that all of them hold together.

    Attributes:
        held_bytes: of requests.
        unread_bytes: of answers that wait until their clients read on.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.expanding = asyncio.Semaphore(2)  # so that bombs cannot swell side by side
        self.held_bytes = self.unread_bytes = 0

    def read(self, headers: Headers, receive: Receive, *, most_bytes: int) -> Body:
        """The whole decompressed body, in an ``async with``; its bytes count as held until the
        block ends.

        Raises:
            ServeError: 408 silent client, 413 too large, 415 unknown encoding, 503 too much held.
            InputError: the body does not decompress.
            Disconnected: the client went away.
        """
        return Body(self, headers, receive, most_bytes)

    @contextmanager
    def holding(self, nbytes: int) -> Iterator[None]:
        """Count bytes as held in this block.

        Raises:
            ServeError: as ``hold``.
        """
        self.hold(nbytes)
        try:
            yield
        finally:
            self.held_bytes -= nbytes

    def hold(self, nbytes: int) -> None:
        """Count bytes as held, for ``held_bytes`` to be made less by who lets them go.

        Raises:
            ServeError: 503, too much is held.
        """
        limit = self.limits.held_bytes
        held_bytes = self.held_bytes + self.unread_bytes
        if held_bytes + nbytes > limit:
            raise ServeError(
                "the server holds as many request bytes as it may",
                status=503,
                seen=f"{held_bytes:,} of {limit:,} bytes",
                fix="try again in a moment, or send smaller batches",
            )
        self.held_bytes += nbytes

    def least_bytes(self) -> float:
        """What a client has to have read of an answer in ``body_idle_s``."""
        limits = self.limits
        is_crowded = self.unread_bytes > limits.held_bytes / 2
        rate = limits.crowded_bytes_s if is_crowded else limits.answer_bytes_s
        return rate * limits.body_idle_s

    def require_readers(self, nbytes: int) -> None:
        """See that an answer may wait until its client reads it.

        Raises:
            ServeError: 503, too much waits for clients that do not read.
        """
        if self.unread_bytes + nbytes > self.limits.held_bytes:
            raise ServeError(
                "the server holds as many answers that nobody reads as it may",
                status=503,
                seen=f"{self.unread_bytes:,} bytes",
                fix="read the answers, or try again in a moment",
            )

    async def _receive(
        self, headers: Headers, receive: Receive, most_bytes: int, account: Body
    ) -> bytearray | bytes:
        declared = headers.get(b"content-length")
        if declared is not None and int(declared) > most_bytes:
            raise too_large(int(declared), most_bytes)
        body: bytearray | bytes = b""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.limits.body_idle_s) as silence:
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Disconnected
                    chunk: bytes = message.get("body", b"")
                    if len(body) + len(chunk) > most_bytes:
                        raise too_large(len(body) + len(chunk), most_bytes)
                    account.hold(len(chunk))
                    if not message.get("more_body", False):
                        return body + chunk if body else chunk
                    if not isinstance(body, bytearray):
                        body = bytearray()
                    body += chunk
                    silence.reschedule(loop.time() + self.limits.body_idle_s)
        except TimeoutError as error:
            raise ServeError(
                "the body stopped coming",
                status=408,
                seen=f"{len(body):,} bytes, then {self.limits.body_idle_s:g} s of silence",
                fix="send the request again",
            ) from error


class Body:
    """A body that is read when the block begins, and the bytes that it holds.

    Written out, as ``asynccontextmanager`` costs a tenth of a small request.
    """

    def __init__(
        self, reader: BodyReader, headers: Headers, receive: Receive, most_bytes: int
    ) -> None:
        self._reader = reader
        self._headers = headers
        self._receive = receive
        self._most_bytes = most_bytes
        self._nbytes = 0

    async def __aenter__(self) -> bytearray | bytes:
        reader, most_bytes = self._reader, self._most_bytes
        try:
            body = await reader._receive(self._headers, self._receive, most_bytes, self)
            encoding = self._headers.get(b"content-encoding", b"identity").strip().lower()
            if encoding != b"identity":
                async with reader.expanding:
                    body = await _decompress(body, encoding, most_bytes)
                    self.hold(len(body))
        except BaseException:
            reader.held_bytes -= self._nbytes
            raise
        return body

    async def __aexit__(self, *_: object) -> None:
        self._reader.held_bytes -= self._nbytes

    def hold(self, nbytes: int) -> None:
        self._reader.hold(nbytes)
        self._nbytes += nbytes


def too_large(nbytes: int, most_bytes: int) -> ServeError:
    return ServeError(
        f"the body is larger than {most_bytes:,} bytes",
        status=413,
        seen=f"{nbytes:,} bytes or more",
        fix="send fewer samples in one request",
    )


async def _decompress(body: bytes | bytearray, encoding: bytes, most_bytes: int) -> bytes:
    if encoding not in (b"gzip", b"x-gzip", b"deflate"):
        raise ServeError(
            "the body has an unknown Content-Encoding",
            status=415,
            seen=encoding.decode("latin-1")[:60],
            fix="send it as gzip, deflate or uncompressed",
        )
    if len(body) < BRIEF_BYTES // 16:
        return decompress(body, most_bytes)
    return await asyncio.to_thread(decompress, body, most_bytes)


def decompress(body: bytes | bytearray, most_bytes: int) -> bytes:
    """The bytes of one gzip member or zlib stream; never more than ``most_bytes`` in memory.

    Raises:
        InputError: not compressed data, truncated, or followed by something else.
        ServeError: 413, the result is larger than ``most_bytes``.
    """
    stream = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # reads gzip's and zlib's header
    try:
        plain = stream.decompress(body, most_bytes + 1)
    except zlib.error as error:
        raise InputError(
            "the body does not decompress",
            seen=str(error),
            fix="compress it again, or send it without Content-Encoding",
        ) from error
    if len(plain) > most_bytes:
        raise too_large(len(plain), most_bytes)
    if not stream.eof or stream.unused_data:
        raise InputError(
            "the compressed body is not one complete stream",
            seen="bytes after its end" if stream.eof else "it ends early",
            fix="compress it again, or send it without Content-Encoding",
        )
    return plain


async def compress(body: bytes, accept_encoding: bytes) -> tuple[bytes, bytes | None]:
    """The body as the client asked for it in ``Accept-Encoding``, and the encoding's name."""
    encoding = accepted(accept_encoding)
    if encoding is None or len(body) < SMALL_BYTES:
        return body, None
    if len(body) < BRIEF_BYTES:
        return _compress(body, encoding), encoding
    return await asyncio.to_thread(_compress, body, encoding), encoding


def _compress(body: bytes, encoding: bytes) -> bytes:
    wbits = zlib.MAX_WBITS | (16 if encoding == b"gzip" else 0)
    stream = zlib.compressobj(level=1, wbits=wbits)  # tensors gain little from higher levels
    return stream.compress(body) + stream.flush()


def accepted(accept_encoding: bytes) -> bytes | None:
    """The first encoding of ``Accept-Encoding`` in which we can answer."""
    for item in accept_encoding.lower().split(b","):
        name, _, quality = item.strip().partition(b";")
        refused = quality.strip().replace(b" ", b"").rstrip(b"0.") == b"q="
        if name.strip() in (b"gzip", b"deflate") and not refused:
            return name.strip()
    return None
