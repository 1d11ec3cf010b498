"""A server of several processes: acceptors, one that runs the engines, and one that watches them.

``engine_process`` says what passes between them. The watching process is a clean one of its own: it
has imported everything, runs no thread and holds no engine, so that it can fork the others at once,
and again when one has crashed. A crashed acceptor takes its own connections along; while a crashed
engine is started again, clients get 503.
"""

from __future__ import annotations

import ctypes
import functools
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import IO, Any, Literal, NoReturn

from tessella.core.errors import TessellaError
from tessella.core.record import from_plain, to_plain
from tessella.runtime import load_tried
from tessella.server import engine_process
from tessella.server.acceptor import Link
from tessella.server.app import App
from tessella.server.child import told_error
from tessella.server.counts import Counts
from tessella.server.decoding_process import decodes_apart
from tessella.server.describing import Describing
from tessella.server.doors import HTTP_ONLY, Doors
from tessella.server.grpc_front import GrpcFront
from tessella.server.guard import Guard
from tessella.server.instance_process import Instances
from tessella.server.instances import Placement
from tessella.server.jpegs import decoder_for
from tessella.server.limits import DEFAULT_LIMITS, Limits
from tessella.server.listening import (
    GRACE_S,
    HttpServer,
    bind,
    configured,
    keep_what_is_loaded,
    url_of,
)
from tessella.server.repository import Repository
from tessella.server.shared_memory import Regions
from tessella.server.tracing import Tracing, require_opentelemetry
from tessella.server.traffic import Traffic

log = logging.getLogger(__name__)
Ready = Callable[[], None]

_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # linux/prctl.h
BRIEF_S = 1.0  # a process that lives shorter is started again after as long


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What ``serve`` was asked for, as it is handed to the watching process.

    Attributes:
        sockets: a folder that only this user can look into, for the engine's socket.
    """

    models: dict[str, str]
    host: str
    port: int
    token: str | None
    host_names: tuple[str, ...]
    max_delay_us: int
    folder: str | None
    traffic: dict[str, Traffic]
    compiled: bool
    device: str | None
    acceptors: int
    doors: Doors = HTTP_ONLY
    decode: Literal["host", "gpu"] = "host"
    trace: bool = False
    instances: dict[str, Placement] = field(default_factory=dict)
    sockets: str = ""


def repository_of(
    settings: Settings, *, traffic_file: Path | None = None, threads: bool = True
) -> Repository:
    """The models of a server, none of which is loaded yet.

    Args:
        traffic_file, threads: as of ``Repository``.
    """
    apart = settings.decode == "gpu" and not threads  # from the thread that reads requests
    load: dict[str, Any] = {"compiled": settings.compiled, "device": settings.device}
    return Repository(
        {name: Path(path) for name, path in settings.models.items()},
        folder=None if settings.folder is None else Path(settings.folder),
        traffic=settings.traffic,
        traffic_file=traffic_file,
        max_delay_us=settings.max_delay_us,
        open_engine=functools.partial(load_tried, **load),
        decoder_for=decodes_apart if apart else decoder_for(settings.decode),
        instances=settings.instances,
        open_instances=functools.partial(Instances, **load),
        threads=threads,
    )


def serve_in_processes(settings: Settings, ready: Callable[[str], None] | None) -> None:
    """Start the watching process and wait for its end; SIGTERM and SIGINT are handed on.

    Raises:
        TessellaError: what it says that is wrong.
    """
    # Made and removed here: the watching process may be killed.
    with tempfile.TemporaryDirectory(prefix="tessella-", ignore_cleanup_errors=True) as sockets:
        _watched(replace(settings, sockets=sockets), ready)


def _watched(settings: Settings, ready: Callable[[str], None] | None) -> None:
    is_asked = False
    watching = subprocess.Popen(
        [sys.executable, "-P", "-c", f"from {__name__} import main; main({os.getpid()})"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,  # Ctrl-C comes here, and is handed on
    )

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal is_asked
        is_asked = True
        watching.terminate()

    earlier = {s: signal.signal(s, stop) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        assert watching.stdin
        assert watching.stdout
        with watching.stdin, watching.stdout:
            with suppress(BrokenPipeError):  # it has ended, as its silence says
                watching.stdin.write(json.dumps(to_plain(settings)).encode() + b"\n")
                watching.stdin.flush()
            told = json.loads(watching.stdout.readline() or "{}")
            if "url" in told and ready is not None:
                ready(told["url"])
            watching.wait()
        if "error" in told:
            raise told_error(told)
        if not is_asked:
            raise TessellaError(
                "the processes of the server have ended",
                seen=f"exit status {watching.returncode}",
                fix="read their messages above, and start it again",
            )
    finally:
        watching.kill()
        watching.wait()
        for number, handler in earlier.items():
            signal.signal(number, handler)


# --- the watching process -------------------------------------------------------------------------


def main(parent: int) -> None:
    """Read the settings, start all processes, say where they listen, and watch them.

    However early SIGTERM comes, the folder of the sockets is removed: the signal is blocked but
    where a start waits, and ``watch`` asks for it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    signal.signal(signal.SIGTERM, _exit)
    _die_with_parent(parent)
    settings = from_plain(Settings, json.loads(sys.stdin.readline()), where="the settings")
    watching = _Watching(settings)
    try:
        try:
            watching.start()
        except TessellaError as error:
            print(json.dumps(error.to_json()), flush=True)
            sys.exit(1)
        print(json.dumps({"url": watching.url}), flush=True)
        watching.watch()
    finally:
        watching.stop()


class _Watching:
    """The processes of one server. The engine's process is first, and is the last to end."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._works: dict[int, tuple[Callable[[Ready], None], float]] = {}
        self._limits = _share(DEFAULT_LIMITS, settings.acceptors)
        # More than half of the cores have nothing to do with our processes.
        self._spins = len(os.sched_getaffinity(0)) >= 2 * (settings.acceptors + 1)
        self._http: socket.socket | None = None
        self._grpc: socket.socket | None = None

    def start(self) -> None:
        """Raise ``TessellaError`` for all that can be wrong with the settings."""
        settings = self._settings
        self._guard = Guard(host=settings.host, token=settings.token, names=settings.host_names)
        self._http = bind(settings.host, settings.port)
        self.url = url_of(self._http, tls=settings.doors.tls_cert is not None)
        if settings.doors.grpc_port is not None:
            self._grpc = bind(settings.host, settings.doors.grpc_port)
        folder = None
        if settings.doors.shared_memory:
            folder = Path(settings.sockets) / "regions"
            folder.mkdir(mode=0o700)
        self._regions = Regions(folder, self._limits)
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._door.bind(f"{settings.sockets}/engine")
        self._door.listen(64)
        if settings.trace:
            require_opentelemetry()
        keep_what_is_loaded()
        self._begin(self._run_engine, wait=True)
        self._of_http, self._of_grpc = Counts(settings.acceptors), Counts(settings.acceptors)
        for place in range(settings.acceptors):
            self._begin(self._acceptor(place), wait=True)

    def watch(self) -> None:
        """Start again what ends, until SIGTERM or SIGINT."""
        while signal.sigwait(_SIGNALS) == signal.SIGCHLD:
            while (ended := _ended(-1)) is not None and ended in self._works:
                work, since = self._works.pop(ended)
                log.error("%s has ended and is started again", work.__name__)
                if time.monotonic() - since < BRIEF_S:
                    time.sleep(BRIEF_S)
                self._begin(work)

    def stop(self) -> None:
        """End the acceptors, which answer what they have, then the engine's process."""
        self._close_ports()  # so that clients are refused when no acceptor has them any more
        for last in (False, True):
            chosen = [p for p, (w, _) in self._works.items() if (w == self._run_engine) == last]
            for pid in chosen:
                os.kill(pid, signal.SIGTERM)
            until = time.monotonic() + GRACE_S + 5
            while chosen:
                chosen = [pid for pid in chosen if _ended(pid) is None]
                if time.monotonic() > until:
                    for pid in chosen:
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.01)
        shutil.rmtree(self._settings.sockets, ignore_errors=True)

    def _begin(self, work: Callable[[Ready], None], *, wait: bool = False) -> None:
        """Fork a process for the work; if asked, wait until it is ready.

        Raises:
            TessellaError: what it says that is wrong, if waited for.
        """
        theirs, ours = os.pipe()
        watching = os.getpid()
        pid = os.fork()
        if not pid:
            os.close(theirs)
            name = "tessella-engine" if work == self._run_engine else "tessella-http"
            ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())  # for ps and top
            _be(work, ours, watching)
        os.close(ours)
        self._works[pid] = work, time.monotonic()
        with os.fdopen(theirs, "rb") as told:
            if wait and (line := _first_line(told)) != b"ready\n":
                del self._works[pid]
                os.waitpid(pid, 0)
                if line:
                    raise told_error(json.loads(line))
                raise TessellaError(
                    "a process of the server does not start", fix="read its messages above"
                )

    def _close_ports(self) -> None:
        for listener in (self._http, self._grpc):
            if listener is not None:
                listener.close()

    def _run_engine(self, ready: Ready) -> None:
        self._close_ports()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        traffic = Path(self._settings.sockets) / "traffic"  # outlives an engine that crashes
        repository = repository_of(self._settings, traffic_file=traffic, threads=False)
        rest = Describing(repository, token=self._guard.has_token, regions=self._regions)
        app = App(repository, self._guard, self._limits, rest=rest)
        engine_process.run(repository, app, self._door, ready, spins=self._spins)

    def _acceptor(self, place: int) -> Callable[[Ready], None]:
        """The work of the acceptor with this place among them."""

        def run_acceptor(ready: Ready) -> None:
            self._run_acceptor(ready, place)

        return run_acceptor

    def _run_acceptor(self, ready: Ready, place: int) -> None:
        nbytes = max(self._limits.held_bytes, 2 * self._limits.body_bytes)
        address, order = f"{self._settings.sockets}/engine", (nbytes - 1).bit_length()
        link = Link(address, order=order, spins=self._spins)
        doors = self._settings.doors
        decoders = max(1, len(os.sched_getaffinity(0)) // self._settings.acceptors)
        app = App(
            link,
            self._guard,
            self._limits,
            rest=link.answer,
            decoders=decoders,
            regions=self._regions,
            tracing=Tracing(scheme=doors.scheme) if self._settings.trace else None,
        )
        front = None
        if self._grpc is not None:
            counted = self._of_grpc.of(place)
            front = GrpcFront(app, self._guard, self._grpc, doors, self._limits, counted=counted)
        config = configured(app, self._limits, doors)
        assert self._http is not None
        server = HttpServer(config, self._http, front, counted=self._of_http.of(place))
        server.on_ready = lambda url: ready()
        link.has_one_client = server.has_one_client
        server.run(sockets=[self._http])


def _share(limits: Limits, acceptors: int) -> Limits:
    """The limits of one of several acceptors."""
    return replace(limits, held_bytes=max(limits.body_bytes, limits.held_bytes // acceptors))


def _be(work: Callable[[Ready], None], told: int, watching: int) -> NoReturn:
    """Do the work as a process of its own."""

    def ready() -> None:
        with suppress(BrokenPipeError):  # at a later start nobody waits to hear it
            os.write(told, b"ready\n")

    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        _die_with_parent(watching)
        work(ready)
        code = 0
    except TessellaError as error:
        try:
            os.write(told, json.dumps(error.to_json()).encode() + b"\n")
        except BrokenPipeError:
            log.error("%s cannot go on: %s", work.__name__, error)
    except BaseException:
        log.exception("%s ends", work.__name__)
    finally:
        os._exit(code)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(1)


def _first_line(told: IO[bytes]) -> bytes:
    """Wait for a line; SIGTERM ends the wait, and this process."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    try:
        return told.readline()
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _ended(pid: int) -> int | None:
    """The process, any for −1, if it has ended."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] or None
    except ChildProcessError:
        return None if pid == -1 else pid


def _die_with_parent(parent: int) -> None:
    """Let the kernel end this process when the one that started it is gone, however it ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it went before that
        signal.raise_signal(signal.SIGTERM)
