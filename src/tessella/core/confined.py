"""Work on the bytes of strangers, in processes that can be ended.

A decoder in C cannot be interrupted, and what a thread has taken does not always come back. A
confined process has an address-space limit and an alarm for each order, which end it from within,
whatever its decoder does; its parent is told which signal it was.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any, Generic, Protocol, TypeVar

# Freed memory goes back at once instead of staying in the allocator's heap; one thread each, since
# thread pools of libraries count against the limit and there are several processes.
_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(4 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(32 << 20),
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_READY = b"ready"
_MOST_REPLY = 1 << 20  # bytes of an answer's JSON: it comes from foreign bytes
Order = dict[str, Any]
Answer = Callable[[Order, bytes, "Budget"], tuple[Order, memoryview | bytes | None]]


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The limits for decoding one picture.

    Attributes:
        pixels: the most pixels that the header may promise.
        nbytes: address space of the decoder beyond the file itself. 2²⁶ pixels take 0.7 GB of it in
            every format but WebP, whose decoder takes twice as much.
        seconds: by the clock. 2²⁶ pixels take 1.5 s as JPEG, 3 s as PNG or TIFF with LZW.
    """

    pixels: int = 1 << 26
    nbytes: int = 1 << 30
    seconds: float = 10.0


DEFAULT_BUDGET = Budget()


class Confined:
    """A confined process, as its parent sees it.

    Args:
        module: the program; its ``main`` calls ``serve``.
        passed: descriptors that it has by the same numbers.
    """

    def __init__(self, module: str, budget: Budget, *, passed: tuple[int, ...] = ()) -> None:
        self.connection, theirs = Pipe()
        limits = [str(budget.pixels), str(budget.nbytes), str(budget.seconds)]
        # A plain program, not ``multiprocessing``'s: that runs the parent's main module again,
        # which may import torch or lack a guard. It starts in 0.25 s and holds 40 MB.
        with theirs:
            handle = theirs.fileno()
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(handle), *limits],
                env=os.environ
                | _ENVIRONMENT
                | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                pass_fds=(handle, *passed),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the parent's to handle
            )
        try:
            if self.connection.recv_bytes(len(_READY)) != _READY:
                raise EOFError("another greeting")
        except (EOFError, OSError) as error:
            self.end()
            raise RuntimeError(
                f"a process of {module} does not start; see its message above"
            ) from error

    def send(self, order: Order, content: bytes | None = None) -> None:
        """Give an order; ``content`` follows as it is."""
        self.connection.send_bytes(json.dumps({**order, "follows": content is not None}).encode())
        if content is not None:
            self.connection.send_bytes(content)

    def reply(self) -> Order:
        """The answer to the first order that was not answered; what follows lies in the connection.

        Raises:
            EOFError, OSError: the process has ended.
        """
        answer: Order = json.loads(self.connection.recv_bytes(_MOST_REPLY))
        return answer

    def exit_code(self) -> int:
        """Of a process that has ended, negative for a signal."""
        return self._popen.wait()

    @property
    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def end(self) -> None:
        self.connection.close()
        self._popen.kill()
        self._popen.wait()


class Worker(Protocol):
    """What a ``Pool`` asks of a process."""

    @property
    def is_alive(self) -> bool: ...

    def end(self) -> None: ...


W = TypeVar("W", bound=Worker)


class Pool(Generic[W]):
    """Processes that each have one thing to do at a time: started when one is wanted, and kept.

    Args:
        start: starts one.
        most: processes at a time; whoever wants another one waits.
        lives_after: errors of the block that are no fault of the process.
    """

    def __init__(
        self, start: Callable[[], W], *, most: int, lives_after: tuple[type[Exception], ...] = ()
    ) -> None:
        self._start, self._lives_after = start, lives_after
        self._free = threading.Semaphore(most)
        self.idle: list[W] = []  # the last one used is the first one used again
        self._lock = threading.Lock()
        self._is_closed = False

    @contextlib.contextmanager
    def one(self) -> Iterator[W]:
        """Have a process for the block; one in which it fails is ended."""
        with self._free:
            process = self._take()
            try:
                yield process
            except self._lives_after:
                self._give_back(process)
                raise
            except BaseException:
                process.end()
                raise
            self._give_back(process)

    def close(self) -> None:
        """End the idle processes now, and each busy one when it has done what it was given."""
        with self._lock:
            self._is_closed = True
            idle, self.idle = self.idle, []
        for process in idle:
            process.end()

    def _take(self) -> W:
        while (process := self._pop()) is not None:
            if process.is_alive:
                return process
            process.end()  # somebody ended it while it was idle: nothing is lost
        return self._start()

    def _pop(self) -> W | None:
        with self._lock:
            return self.idle.pop() if self.idle else None

    def _give_back(self, process: W) -> None:
        with self._lock:
            if not self._is_closed:
                self.idle.append(process)
                return
        process.end()


# --- inside the process ---------------------------------------------------------------------------


def serve(answer: Answer) -> None:
    """Answer one order after another until the parent closes the connection."""
    connection = Connection(int(sys.argv[1]))
    budget = Budget(pixels=int(sys.argv[2]), nbytes=int(sys.argv[3]), seconds=float(sys.argv[4]))
    connection.send_bytes(_READY)
    # Decoders print what they think of a hostile file; nobody may fill the parent's log with that.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            order = json.loads(connection.recv_bytes())
            content = connection.recv_bytes() if order.pop("follows") else b""
            reply, follows = _within(budget, answer, order, content)
            connection.send_bytes(json.dumps(reply).encode())
            if follows is not None:
                connection.send_bytes(follows)


def _within(
    budget: Budget, answer: Answer, order: Order, content: bytes
) -> tuple[Order, memoryview | bytes | None]:
    with limited(budget):
        return answer(order, content, budget)


@contextlib.contextmanager
def limited(budget: Budget) -> Iterator[None]:
    """Run within the limits, which begin anew here: for one picture of an order that names many."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = _virtual_bytes() + budget.nbytes
    resource.setrlimit(resource.RLIMIT_AS, (most if hard < 0 else min(most, hard), hard))
    signal.setitimer(signal.ITIMER_REAL, budget.seconds)  # unhandled: it ends the process
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def _virtual_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
