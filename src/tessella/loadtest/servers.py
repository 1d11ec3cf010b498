"""Servers to put load on, started as ``tessella serve`` starts them, in processes of their own."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tessella.core.errors import ServeError
from tessella.core.events import Event, read_events
from tessella.loadtest.bodies import Target, max_batch
from tessella.loadtest.generator import Outcome, generate
from tessella.loadtest.schedule import closed, poisson

START_S = 600.0  # a plan for a GPU may compile its kernels when it is loaded
END_S = 60.0  # a server that is told to end finishes its requests first
WARM_S = 0.2
LEAST_CLIENTS, MOST_CLIENTS = 8, 256
# Becomes ``tessella WORDS``, which gets SIGTERM (15) when the process that started it ends, however
# it ends: PR_SET_PDEATHSIG (1) of linux/prctl.h is kept by exec.
_PROGRAM = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.executable, [sys.executable, "-P", "-m", "tessella", *sys.argv[2:]])
"""


@dataclass(frozen=True, kw_only=True)
class Running:
    """A running server and the request that it is sent; for methods see ``sizing.Served``.

    Attributes:
        slo_s: what comes later is of no use; it decides how many connections there are, and when
            requests are given up.
    """

    target: Target
    content: bytes
    slo_s: float
    max_batch: int

    def warm(self) -> None:
        """Ask a little, so that what happens only once is over."""
        generate(self.target, self.content, closed(LEAST_CLIENTS, WARM_S))

    def alone(self, seconds: float) -> Outcome:
        """Ask with one client."""
        return generate(self.target, self.content, closed(1, seconds))

    def offered(self, rate: float, seconds: float) -> Outcome:
        """Ask at random times."""
        wanted = math.ceil(2 * rate * self.slo_s)  # twice what waits at a time, if all is in time
        clients = min(MOST_CLIENTS, max(LEAST_CLIENTS, wanted))
        schedule = poisson(rate, seconds, clients=clients)
        return generate(self.target, self.content, schedule, give_up_s=4 * self.slo_s + 0.5)


def running(target: Target, content: bytes, slo_s: float) -> Running:
    """A server that has been asked a little."""
    server = Running(target=target, content=content, slo_s=slo_s, max_batch=max_batch(target))
    server.warm()
    return server


@contextmanager
def started(words: Sequence[str]) -> Iterator[str]:
    """Start ``tessella WORDS --port 0``, a server that ends with the block; gives its URL once it
    takes requests.

    Raises:
        ServeError: it ended instead, with what it said.
    """
    with tempfile.TemporaryDirectory(prefix="tessella-size-") as folder:
        events, said = Path(folder, "events.jsonl"), Path(folder, "said")
        with said.open("wb") as file:
            asked = [*words, "--port", "0", "--events", str(events)]
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, str(os.getpid()), *asked],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        try:
            yield url_of(process, events, said)
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def url_of(process: subprocess.Popen[bytes], events: Path, said: Path) -> str:
    """Where a server takes requests, once it does.

    Args:
        events: its log of events.
        said: what it printed.

    Raises:
        ServeError: it ended instead, with what it said.
    """
    until_s = time.monotonic() + START_S
    happened: list[Event] = []
    while time.monotonic() < until_s:
        ended = process.poll() is not None  # before the events are read: then they are all there
        happened = read_events(events)[0]
        for event in happened:
            if event.kind == "phase" and event.name == "serving":
                return event.text
        if ended:
            break
        time.sleep(0.02)
    for event in happened:
        if event.kind == "error":  # the parts of the error that the server raised
            told = event.values
            raise ServeError(
                f"the server did not start: {told['wrong']}",
                status=503,
                seen=told["seen"],
                fix=told["fix"],
            )
    last = said.read_text(errors="replace").strip().splitlines()[-3:]
    raise ServeError(
        "the server did not start",
        status=503,
        seen=" ".join(last) or f"nothing in {START_S:g} s",
        fix="start it by hand, and see what it says",
    )
