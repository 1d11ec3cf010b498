"""A process that works for one of the server's: a socket between them, and how it ends.

It ends when its socket does: with the server, however that ended.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from tessella.core import errors
from tessella.core.errors import TessellaError
from tessella.server.instances import InstanceLost
from tessella.server.tickets import Frames

HANG_S = 600.0  # for an execution, or a load; who has not answered then is killed
END_S = 10.0  # for one that has nothing to do to end; then it is killed


class Child:
    """A process that works for this one; a subclass starts it by ``start_python``."""

    _process: subprocess.Popen[bytes]

    def _talk(self, ours: socket.socket) -> None:
        self._socket, self._frames = ours, Frames()
        self._socket.settimeout(HANG_S)
        self._come: deque[tuple[bytes, bytes]] = deque()  # frames that nobody has read

    def dismiss(self) -> None:
        """Let the process end; ``close`` or ``release`` waits for it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def kill(self) -> None:
        """As ``instances.Instance.kill``."""
        self._process.kill()

    def _next(self) -> tuple[bytes, bytes]:
        """The next frame that the process sends.

        Raises:
            InstanceLost: it has ended.
        """
        while not self._come:
            try:
                data = self._socket.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                raise InstanceLost(self._ended())
            self._come.extend(self._frames.feed(data))
        return self._come.popleft()

    def _wait(self, seconds: float) -> int:
        """Its exit status; it is killed if it has not ended in this time."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _ended(self) -> str:
        code = self._wait(END_S)  # nothing comes from its socket
        return signal.Signals(-code).name if code < 0 else f"exit status {code}"


def start_python(
    module: str, asked: Mapping[str, Any], descriptor: int, *, threads: int
) -> subprocess.Popen[bytes]:
    """Start ``main`` of a module; its argument is ``asked`` as JSON, with the number of its socket.

    Args:
        threads: of OpenMP.
    """
    paths = [p or os.getcwd() for p in sys.path]  # a user's modules are found where they were
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(threads)
    }  # fmt: skip
    return subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-c",
            f"from {module} import main; main()",
            json.dumps({**asked, "socket": descriptor}),
        ],
        stdin=subprocess.DEVNULL,
        stdout=2,  # what it says is for the log
        env=environment,
        pass_fds=[descriptor],
        start_new_session=True,  # Ctrl-C is not for it
    )


def told_error(told: Mapping[str, Any]) -> TessellaError:
    """An error as it was raised in another process, of its ``to_json``."""
    kind: type[TessellaError] = getattr(errors, told["error"], TessellaError)
    error = kind.__new__(kind)
    TessellaError.__init__(error, told["wrong"], seen=told["seen"], fix=told["fix"])
    return error
