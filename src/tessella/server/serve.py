"""Start a server: blocking for the command line, or beside the caller as a context manager."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Literal

from tessella.core.errors import UsageError
from tessella.server.app import App
from tessella.server.describing import Describing
from tessella.server.doors import HTTP_ONLY, Doors
from tessella.server.grpc_front import GrpcFront
from tessella.server.guard import Guard
from tessella.server.instances import Placement
from tessella.server.jpegs import decoder_for
from tessella.server.limits import DEFAULT_LIMITS, Limits
from tessella.server.listening import (
    HttpServer,
    bind,
    configured,
    keep_what_is_loaded,
    take_descriptors,
)
from tessella.server.looking import Awake
from tessella.server.repository import Repository
from tessella.server.shared_memory import Regions
from tessella.server.supervisor import Settings, repository_of, serve_in_processes
from tessella.server.tracing import Tracing
from tessella.server.traffic import Traffic
from tessella.server.versions import split_key

MOST_ACCEPTORS = 64  # each has memory for the largest request


def serve(
    models: Mapping[str, Path],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    host_names: tuple[str, ...] = (),
    max_delay_us: int = 0,
    folder: Path | None = None,
    traffic: Mapping[str, Traffic] | None = None,
    compiled: bool = True,
    device: str | None = None,
    acceptors: int = 0,
    doors: Doors = HTTP_ONLY,
    decode: Literal["host", "gpu"] = "host",
    trace: bool = False,
    instances: Mapping[str, Placement] | None = None,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve plans until SIGTERM or SIGINT; then finish the requests at hand and return.

    Args:
        models: plans by name, or ``NAME@VERSION``; or folders of ``VERSION/model.plan`` by name.
        host, port: where to listen; port 0 takes a free one.
        token: what clients must send; needed unless ``host`` is this machine's own.
        host_names: further names under which clients reach this server; addresses need none.
        max_delay_us: how long a request may wait for others to share its batch.
        folder: a folder of models that may be loaded over HTTP too: ``NAME.plan`` files, and
            ``NAME/VERSION/model.plan``.
        traffic: rules by name: how versions share the requests that name none.
        compiled: run the machine code that plans for a GPU carry, else compile it from our sources.
        device: ``cpu``, or the GPU of all plans by its number, ``cuda:1``; by default the first.
        acceptors: processes that take HTTP, beside one that runs the engines; 0 is one process for
            all, which needs the least memory.
        doors: gRPC, TLS and shared memory.
        decode: who decodes JPEG files: the ``host``, or the engine's ``gpu``, to the same bits
            where it has decoders of its own. Sound files, that is: of damaged ones the host
            refuses more, and nobody but NVIDIA can read the decoder.
        trace: export OpenTelemetry traces, as its own environment variables say; an extra.
        instances: how many instances of a model run, each in a process of its own, by its name; by
            the empty name, of all others. They share one queue.
        ready: called once with the server's URL when it takes requests.

    Raises:
        UsageError: nothing to serve; an address or a name that cannot be used, no token for a
            public address; traces without what they need.
        ArtifactError: a plan that cannot be loaded.
    """
    if not 0 <= acceptors <= MOST_ACCEPTORS:
        raise UsageError(
            f"acceptors are a number from 0 to {MOST_ACCEPTORS}",
            seen=acceptors,
            fix="use as many as there are cores beside the engine's",
        )
    doors.check()
    decoder_for(decode)  # raises, if there is none
    _check(instances or {}, models, may_load=folder is not None, decode=decode)
    settings = Settings(
        models={name: str(Path(path).absolute()) for name, path in models.items()},
        host=host,
        port=port,
        token=token,
        host_names=host_names,
        max_delay_us=max_delay_us,
        folder=None if folder is None else str(folder.absolute()),
        traffic=dict(traffic or {}),
        compiled=compiled,
        device=device,
        acceptors=acceptors,
        doors=doors,
        decode=decode,
        trace=trace,
        instances=dict(instances or {}),
    )
    take_descriptors()
    (serve_in_processes if acceptors else _serve_here)(settings, ready)


def _check(
    instances: Mapping[str, Placement], models: Mapping[str, Path], *, may_load: bool, decode: str
) -> None:
    """Raise ``UsageError`` unless there are models, and they can have these instances."""
    if not models and not may_load:
        raise UsageError(
            "there is nothing to serve", seen="no model, no folder", fix="name a plan or a folder"
        )
    unknown = set(instances) - {"", *(split_key(key)[0] for key in models)}
    if unknown and not may_load:
        raise UsageError(
            "instances are for a model that is not served",
            seen=", ".join(sorted(unknown)),
            fix=f"name one of {', '.join(models)}",
        )
    if decode == "gpu" and any(placed.each != (None,) for placed in instances.values()):
        raise UsageError(
            "the GPU decodes JPEG files for models of one instance only",
            seen="--decode gpu with --instances",
            fix="leave one of them out",
        )


def _serve_here(settings: Settings, ready: Callable[[str], None] | None) -> None:
    """Serve in this process alone; raises as ``serve``."""
    doors = settings.doors
    settled = _prepared(
        repository_of(settings),
        Guard(host=settings.host, token=settings.token, names=settings.host_names),
        host=settings.host,
        port=settings.port,
        limits=DEFAULT_LIMITS,
        doors=doors,
        tracing=Tracing(scheme=doors.scheme) if settings.trace else None,
    )
    with settled as (server, app):
        keep_what_is_loaded()
        # Of the cores, half have nothing to do with this process. ``Server`` has other threads
        # beside it, which would wait for Python's lock.
        spins = len(os.sched_getaffinity(0)) >= 2
        app.short_way.awake = Awake(server.has_one_client, spins=spins)
        if ready is not None:
            server.on_ready = ready

        _run_until_signal(server)


def _run_until_signal(server: HttpServer) -> None:
    """Serve until SIGTERM or SIGINT."""

    def stop(number: int, frame: FrameType | None) -> None:
        server.should_exit = True

    # uvicorn has handlers of its own while it runs, then raises the signal again: it ends here.
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
        doors: Doors = HTTP_ONLY,
        tracing: Tracing | None = None,
    ) -> None:
        if not isinstance(models, Repository):
            models = Repository(models, max_delay_us=max_delay_us, limits=limits)
        doors.check()
        self._settled = ExitStack()
        guard = Guard(host=host, token=token)
        self._server, _ = self._settled.enter_context(
            _prepared(
                models, guard, host=host, port=port, limits=limits, doors=doors, tracing=tracing
            )
        )
        self._server.on_ready = lambda url: self._started.set()
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)

    @property
    def url(self) -> str:
        """The address of the server, for example ``http://127.0.0.1:8000``."""
        return self._server.url

    @property
    def grpc_address(self) -> str | None:
        """Where gRPC listens, for example ``127.0.0.1:8001``, if it does."""
        beside = self._server.beside
        return None if beside is None else beside.address

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
        self._settled.close()
        if self._failure is not None and error is None:
            raise self._failure

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._server.listener])
        except BaseException as error:  # carried over to the thread that waits
            self._failure = error
        finally:
            self._started.set()


@contextmanager
def _prepared(
    repository: Repository,
    guard: Guard,
    *,
    host: str,
    port: int,
    limits: Limits,
    doors: Doors,
    tracing: Tracing | None,
) -> Iterator[tuple[HttpServer, App]]:
    """Check the settings, take the ports and load the models: all that can fail before the start.
    What a server needs to the end is given back after the block.
    """
    with ExitStack() as kept:
        folder = None
        if doors.shared_memory:
            made = tempfile.TemporaryDirectory(prefix="tessella-regions-")
            folder = Path(kept.enter_context(made))
        regions = Regions(folder, limits)
        of_grpc = None
        if doors.grpc_port is not None:
            of_grpc = kept.enter_context(bind(host, doors.grpc_port))
        listener = bind(host, port)
        try:
            repository.load_all()
        except BaseException:
            listener.close()
            raise
        rest = Describing(repository, token=guard.has_token, regions=regions)
        app = App(repository, guard, limits, rest=rest, regions=regions, tracing=tracing)
        front = None
        if of_grpc is not None:
            front = GrpcFront(app, guard, of_grpc, doors, limits)
        yield HttpServer(configured(app, limits, doors), listener, front), app
