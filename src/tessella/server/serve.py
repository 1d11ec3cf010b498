"""Start a server: blocking for the command line, or beside the caller as a context manager."""

from __future__ import annotations

import functools
import ipaddress
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType, TracebackType

import uvicorn

from tessella.core.errors import UsageError
from tessella.runtime import load_tried
from tessella.server.app import App
from tessella.server.connection import connection_with
from tessella.server.guard import Guard
from tessella.server.limits import DEFAULT_LIMITS, Limits
from tessella.server.repository import Repository

GRACE_S = 30
KEEP_ALIVE_S = 75  # longer than what clients and proxies keep a connection for
BACKLOG = 2048


def serve(
    models: Mapping[str, Path],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    max_delay_us: int = 0,
    folder: Path | None = None,
    compiled: bool = True,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve plans until SIGTERM or SIGINT; then finish the requests at hand and return.

    Args:
        models: plans by name.
        host, port: where to listen; port 0 takes a free one.
        token: what clients must send; needed unless ``host`` is this machine's own.
        max_delay_us: how long a request may wait for others to share its batch.
        folder: a folder of NAME.plan files that may be loaded over HTTP too.
        compiled: run the machine code that plans for a GPU carry, else compile it from our sources.
        ready: called once with the server's URL when it takes requests.

    Raises:
        UsageError: an address or a name that cannot be used, no token for a public address.
        ArtifactError: a plan that cannot be loaded.
    """
    repository = Repository(
        models,
        folder=folder,
        max_delay_us=max_delay_us,
        open_engine=functools.partial(load_tried, compiled=compiled),
    )
    server = _prepare(repository, host=host, port=port, token=token, limits=DEFAULT_LIMITS)
    if ready is not None:
        server.on_ready = ready

    def stop(number: int, frame: FrameType | None) -> None:
        server.should_exit = True

    # uvicorn has handlers of its own while it runs and then raises the signal again: it ends here.
    earlier = {s: signal.signal(s, stop) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        server.run(sockets=[server.listener])
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


class Server:
    """A server beside the caller, for tests, notebooks and the quick start.

    Takes what ``serve`` takes, or a ``Repository``.

    >>> with Server({"flowers": Path("flowers.plan")}, port=0) as server:
    ...     print(server.url)
    """

    def __init__(
        self,
        models: Mapping[str, Path] | Repository,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        max_delay_us: int = 0,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        if not isinstance(models, Repository):
            models = Repository(models, max_delay_us=max_delay_us, limits=limits)
        self._server = _prepare(models, host=host, port=port, token=token, limits=limits)
        self._server.on_ready = lambda url: self._started.set()
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)

    @property
    def url(self) -> str:
        """Where it listens, for example ``http://127.0.0.1:8000``."""
        return self._server.url

    def __enter__(self) -> Server:
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop listening, finish the requests at hand, close the engines."""
        self._server.should_exit = True
        self._thread.join()
        if self._failure is not None and error is None:
            raise self._failure

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._server.listener])
        except BaseException as error:  # carried over to the thread that waits
            self._failure = error
        finally:
            self._started.set()


class _UvicornServer(uvicorn.Server):
    """uvicorn on a socket of ours; calls ``on_ready`` with the URL when it takes requests."""

    def __init__(self, config: uvicorn.Config, listener: socket.socket) -> None:
        super().__init__(config)
        self.listener = listener
        self.on_ready: Callable[[str], None] = lambda url: None
        self.url = _url(listener)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_ready(self.url)


def _prepare(
    repository: Repository, *, host: str, port: int, token: str | None, limits: Limits
) -> _UvicornServer:
    """Check the settings, take the port and load the models: all that can fail before the start."""
    guard = Guard(host=host, token=token)
    listener = _bind(host, port)
    try:
        repository.load_all()
    except BaseException:
        listener.close()
        raise
    config = uvicorn.Config(
        App(repository, guard, limits),
        http=connection_with(limits),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
    )
    return _UvicornServer(config, listener)


def _bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: a client is refused now instead of kept waiting."""
    try:
        if not 0 <= port < 1 << 16:  # getaddrinfo would take it modulo 65,536
            raise OverflowError("a port is a number from 0 to 65535")
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"{host}:{port} cannot be listened on",
            seen=str(error),
            fix="choose another port (0 takes a free one), or stop what uses it",
        ) from error
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = "localhost"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
