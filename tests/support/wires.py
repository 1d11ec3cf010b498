"""A transport without a socket, whose bytes lie in memory; and what a server on a socket shows."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import suppress
from typing import Any

# What a server says when it waits for a body, to a client that asks for it: so it has the head.
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def until_refused(host: str, port: int) -> None:
    """Wait until nobody listens there any more, as of a server that has begun to stop."""
    until = time.monotonic() + 60
    with suppress(ConnectionRefusedError):
        while time.monotonic() < until:
            with suppress(ConnectionResetError):
                socket.create_connection((host, port)).close()
            time.sleep(0.01)
        raise AssertionError(f"{host}:{port} still takes connections")


class Wire(asyncio.Transport):
    """A client's end of a connection: what was sent, and whether it may send."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.protocol: asyncio.Protocol
        self.is_paused = False
        self._is_closing = False

    def write(self, data: Any) -> None:
        assert not self._is_closing
        self.sent += data

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    def abort(self) -> None:
        self.close()

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass
