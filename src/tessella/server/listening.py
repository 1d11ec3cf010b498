"""What every process that takes HTTP has: a bound port, and uvicorn with our limits."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import heapq
import ipaddress
import logging
import resource
import socket
import ssl
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import uvicorn

from tessella.core.errors import UsageError
from tessella.server.app import App
from tessella.server.connection import LAST_S, connection_with
from tessella.server.counts import Counted
from tessella.server.doors import HTTP_ONLY, Doors
from tessella.server.fairness import client_of
from tessella.server.limits import Limits

GRACE_S = 30
KEEP_ALIVE_S = 75  # longer than what clients and proxies keep a connection for
BACKLOG = 2048
MOST_ACCEPTED = 64  # connections in one turn of the event loop; each takes about 0.1 ms
# Of a socket that several processes share: who has more connections than another, but for a few,
# waits for it, as many turns as it has more.
FEW, TURN_S, MOST_TURNS = 2, 0.001, 4
RETRY_S = 1.0  # after a connection could not be taken for want of descriptors
ROOM_S = 0.01  # the same, where others were closed for it
MOST_DESCRIPTORS = 1 << 16
HANDSHAKE_S = 10.0  # of TLS; asyncio's own patience is 60 s
log = logging.getLogger(__name__)


class Beside(Protocol):
    """What listens in the event loop of an HTTP server, too."""

    address: str  # ``host:port``

    @property
    def has_clients(self) -> bool: ...

    async def start(self) -> None: ...

    async def stop(self, grace_s: float) -> None: ...


class Shared(Protocol):
    """A connection, which takes one of the process's descriptors."""

    def silence(self) -> tuple[int, float] | None:
        """Whose it is, as ``fairness`` numbers clients, and when it was opened on the loop's clock;
        None if it has something to do.
        """

    def give_way(self) -> None:
        """Be closed."""


def make_room(connections: Iterable[Shared], most: int = MOST_ACCEPTED) -> int:
    """Close the oldest of the client that has most silent ones: who opens as many as there are
    descriptors shuts nobody out. How many were closed.
    """
    silent = defaultdict[int, list[tuple[float, int, Shared]]](list)
    for number, connection in enumerate(connections):
        if (found := connection.silence()) is not None:
            silent[found[0]].append((found[1], number, connection))
    clients = sorted(silent.values(), key=len)
    chosen = heapq.nsmallest(most, clients[-1]) if clients else []
    for _, _, connection in chosen:
        connection.give_way()
    return len(chosen)


def take_descriptors() -> None:
    """Let this process and those that it starts have as many as the system lets them; a shell's
    usual limit is 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Arriving:
    """As ``Shared``: a connection that has no protocol yet, as its handshake of TLS goes on."""

    client: int
    opened_s: float
    connection: socket.socket

    def silence(self) -> tuple[int, float]:
        return self.client, self.opened_s

    def give_way(self) -> None:
        with suppress(OSError):  # its client was first
            self.connection.shutdown(socket.SHUT_RDWR)  # which its transport sees, and closes it


class Accepting:
    """Takes connections from a listening socket in the running event loop, several in a turn:
    libuv, since 1.45, takes one in each, and where a turn is as long as an execution (4 ms for 32
    images of a LeNet), the last of 128 clients waited 0.2 to 0.5 s for its first answer (p99;
    uvicorn alone does the same).

    Args:
        listener: bound.
        protocol: of a connection.
        connections: that there are; counted, if other processes take some from the socket, too.
        tls: for all of them.
    """

    _all: ClassVar[weakref.WeakSet[Accepting]] = weakref.WeakSet()  # of this process

    def __init__(
        self,
        listener: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        connections: set[Any],
        *,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._all.add(self)
        self._listener, self._protocol, self._tls = listener, protocol, tls
        self._connections = connections
        self._is_on = True
        self._arriving: dict[asyncio.Task[object], _Arriving] = {}
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._listen()

    def stop(self) -> None:
        """Take no more than those that the system has taken: then this process's socket is closed,
        so that clients are refused.
        """
        if self._is_on:
            self._is_on = False
            if isinstance(self._connections, Counted):
                self._connections.leave()
            asyncio.get_running_loop().remove_reader(self._listener)
            self._accept(BACKLOG)
            self._listener.close()

    async def arrived(self) -> None:
        """Let the connections that were taken have their protocols; who is slow to is let go."""
        if self._arriving:
            _, late = await asyncio.wait(self._arriving, timeout=LAST_S)
            for task in late:
                task.cancel()

    def shared(self) -> Iterator[Shared]:
        """All connections that it has taken."""
        yield from self._connections
        yield from self._arriving.values()

    def _listen(self) -> None:
        if self._is_on:
            is_counted = isinstance(self._connections, Counted)
            found = self._wait_for_others if is_counted else self._accept
            asyncio.get_running_loop().add_reader(self._listener, found)

    def _wait_for_others(self) -> None:
        """Let a process that has fewer connections take this one: a client may have few, each with
        many calls, and left to chance one process of six had a third of all.
        """
        assert isinstance(self._connections, Counted)
        ahead = self._connections.ahead(len(self._arriving))
        if ahead <= FEW:
            self._accept(1)
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener)
        loop.call_later(TURN_S * min(ahead - FEW, MOST_TURNS), self._take)

    def _take(self) -> None:
        if self._is_on and self._accept(1):
            self._listen()

    def _accept(self, most: int = MOST_ACCEPTED) -> bool:
        """Take connections that wait; those at hand have their turn after some of them. False: none
        can be taken for a while.
        """
        loop = asyncio.get_running_loop()
        for _ in range(most):
            try:
                connection, peer = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return True
            except OSError as error:  # no descriptors or memory are left: ask again later
                doors = [door for door in self._all if door._loop is loop]
                closed = make_room(one for door in doors for one in door.shared())
                log.error("a connection cannot be taken: %s; %d silent ones go", error, closed)
                loop.remove_reader(self._listener)
                loop.call_later(ROOM_S if closed else RETRY_S, self._listen)
                return False
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # peers that vanish
            task = loop.create_task(self._begin(connection))
            self._arriving[task] = _Arriving(
                client=client_of(peer), opened_s=loop.time(), connection=connection
            )
            task.add_done_callback(self._arriving.pop)
        return True

    async def _begin(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):  # it went, or spoke no TLS
            await loop.connect_accepted_socket(
                self._protocol,
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else HANDSHAKE_S,
            )


class HttpServer(uvicorn.Server):
    """uvicorn on a socket of ours; calls ``on_ready`` with the URL when it takes requests.

    Args:
        beside: answers gRPC in the same event loop.
        counted: its connections, if other processes take some from the socket, too.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        listener: socket.socket,
        beside: Beside | None = None,
        *,
        counted: Counted | None = None,
    ) -> None:
        super().__init__(config)
        if counted is not None:
            self.server_state.connections = counted
        self.listener = listener
        self.on_ready: Callable[[str], None] = lambda url: None
        self.url = url_of(listener, tls=config.is_ssl)
        self.beside = beside
        self._accepting: Accepting | None = None

    def has_one_client(self) -> bool:
        """Whether no other request can come while one is computed: over one connection of HTTP
        comes one at a time, over one of gRPC many.
        """
        has_others = self.beside is not None and self.beside.has_clients
        return len(self.server_state.connections) == 1 and not has_others

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        self._accepting = Accepting(
            self.listener,
            self._protocol,
            self.server_state.connections,
            tls=self.config.ssl,
        )
        if self.beside is not None:
            await self.beside.start()
        self.on_ready(self.url)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._accepting is not None:
            self._accepting.stop()
            await self._accepting.arrived()
        if self.beside is not None:
            await self.beside.stop(GRACE_S)
        await super().shutdown(sockets)

    def _protocol(self) -> asyncio.Protocol:
        kind: Any = self.config.http_protocol_class
        made: asyncio.Protocol = kind(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made


def configured(app: App, limits: Limits, doors: Doors = HTTP_ONLY) -> uvicorn.Config:
    """How every process of ours that takes HTTP is set up."""
    return uvicorn.Config(
        app,
        http=connection_with(limits, app.short_way),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
        ssl_certfile=doors.tls_cert,
        ssl_keyfile=doors.tls_key,
    )


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: a client is refused now instead of kept waiting.

    Raises:
        UsageError: the address cannot be listened on.
    """
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


def address_of(listener: socket.socket) -> str:
    """Its ``host:port``."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def url_of(listener: socket.socket, *, tls: bool = False) -> str:
    """Where clients reach it."""
    host, port = listener.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = "localhost"
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def give_back() -> None:
    """Give the system the memory that was freed, where the C library is glibc. With a heap for each
    thread it keeps what one takes and another frees: behind acceptors 9.9 % more in 1,200 cycles of
    load and unload, and so 0.03 % from the 110th cycle to the 210th.
    """
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def keep_what_is_loaded() -> None:
    """Take what is in memory by now out of the garbage collector's rounds: each looks at all that
    torch has loaded, and held up every request of the moment (p99 at 128 clients: 170 ms).
    """
    gc.collect()
    gc.freeze()
