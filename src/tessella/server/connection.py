"""One connection: uvicorn's HTTP protocol, with limits on how large and how slow a head may be.

A head is the request line and the headers. Nothing above sees a request before its head is
complete, so nothing above can refuse one that never ends.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tessella.server.limits import Limits

Timer = asyncio.TimerHandle


class Connection(HttpToolsProtocol):
    """Closes itself on a head that is larger or slower than ``limits`` allow."""

    limits = Limits()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_bytes = 0
        self._reading_head = True
        self._deadline: Timer | None = self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._reading_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > self.limits.head_bytes:
                self._refuse(431, f"the headers are larger than {self.limits.head_bytes:,} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        self._reading_head = True
        if self._deadline is None:
            self._deadline = self._start_deadline()

    def on_headers_complete(self) -> None:
        self._reading_head = False
        self._stop_deadline()
        super().on_headers_complete()

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
        self.transport.write(head.encode() + body)
        self.transport.close()


def connection_with(limits: Limits) -> type[Connection]:
    """The protocol class for these limits; uvicorn makes an instance a connection."""
    attributes: dict[str, Any] = {"limits": limits}
    return type("LimitedConnection", (Connection,), attributes)
