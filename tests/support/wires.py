"""A transport without a socket: what a server sends lies in memory."""

from __future__ import annotations

import asyncio
from typing import Any


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

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass
