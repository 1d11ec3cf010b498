"""Waits for what comes to the engine's process, and looks for a lone client's next request."""

from __future__ import annotations

import asyncio
import select
import selectors
import socket
from collections.abc import Callable
from time import perf_counter_ns

# How long after a lone request a thread looks for the next one before it sleeps, where cores are
# idle: to wake it takes 20 to 70 µs. Requests that come faster than that are not lone.
SPIN_NS, LONE_NS = 10**6, 10**5
# A thread that loses its core for so long between two looks shares it with others, and has spent
# its part of it on looking: for a while it sleeps between requests. With three programs to a core,
# one client of a LeNet had 816 answers a second from a loop that never looked and 500 from one that
# did now and then; where they took turns by load 9, both had the same.
LOST_NS, SLEEPS_NS = 10**6, 5 * 10**8
# How long a thread leaves tickets unread while the decoders have enough to do. To look for each
# one is two calls of the system, after each of which it waits for Python's lock.
REST_S = 1e-3


class Cores:
    """Whether cores are idle, as far as a thread sees that looks again and again."""

    def __init__(self) -> None:
        self._looked_ns = self._sleeps_until_ns = 0

    def are_idle(self, now_ns: int) -> bool:
        """Whether to look; the first look is now."""
        self._looked_ns = now_ns
        return now_ns >= self._sleeps_until_ns

    def are_still_idle(self, now_ns: int) -> bool:
        """Whether to look on; it has done nothing else since the last look."""
        if now_ns - self._looked_ns > LOST_NS:
            self._sleeps_until_ns = now_ns + SLEEPS_NS
        return self.are_idle(now_ns)


class Looking(selectors.DefaultSelector):
    """A selector of one thread.

    Args:
        spin_ns: how long it looks after a lone request; 0 where it always sleeps.
        wakes: what ends a rest.
    """

    def __init__(self, spin_ns: int, wakes: socket.socket) -> None:
        super().__init__()
        self._wakes = select.epoll()
        self._wakes.register(wakes, select.EPOLLIN)
        self._spin_ns, self._until_ns, self._last_ns = spin_ns, 0, 0
        self._cores = Cores()

    def found(self, seconds: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        """What has come, or comes within so long."""
        if seconds is None:
            are_idle = self._cores.are_idle(now_ns := perf_counter_ns())
            while are_idle and now_ns < self._until_ns:
                found = self.select(0)
                are_idle = self._cores.are_still_idle(now_ns := perf_counter_ns())
                if found:
                    return found
        return self.select(seconds)

    def rest(self) -> None:
        """Let things come for a while, unless somebody wakes this thread."""
        self._wakes.poll(REST_S)

    def came(self, count: int = 1, *, has_files: bool) -> None:
        """So many requests have come: see whether the next one is worth looking for. Files are
        decoded by other threads, which would wait for Python's lock meanwhile.
        """
        now_ns = perf_counter_ns()
        is_lone = count == 1 and not has_files and now_ns - self._last_ns > LONE_NS
        self._last_ns = now_ns
        self._until_ns = now_ns + self._spin_ns if is_lone else 0


class Awake:
    """Keeps an event loop from sleeping for ``SPIN_NS``, within which a lone client's next request
    comes.

    Attributes:
        is_on: it does.

    Args:
        is_alone: whether no other client can have a request meanwhile.
        spins: whether it ever does: where cores are idle.
    """

    def __init__(self, is_alone: Callable[[], bool], *, spins: bool) -> None:
        self._is_alone, self._spins = is_alone, spins
        self.is_on = False
        self._until_ns = self._answered_ns = 0
        self._cores = Cores()
        self._is_close = False  # the last request came so soon behind an answer

    def stay(self, loop: asyncio.AbstractEventLoop) -> None:
        """Keep the running event loop awake from now on."""
        now_ns = perf_counter_ns()
        if self._spins and self._cores.are_idle(now_ns):
            self._until_ns = now_ns + SPIN_NS
            if not self.is_on:
                self.is_on = True
                loop.call_soon(self._stay, loop)

    def came(self) -> None:
        """A request has come: other threads may have to work for it."""
        now_ns = perf_counter_ns()
        if self.is_on:
            self._cores.are_still_idle(now_ns)
        self._is_close = now_ns - self._answered_ns < SPIN_NS
        self._until_ns = 0

    def answered(self, loop: asyncio.AbstractEventLoop) -> None:
        """A request has its answer: the loop stays awake if the last one came close behind."""
        self._answered_ns = perf_counter_ns()
        if self._is_close and self._is_alone():
            self.stay(loop)

    def _stay(self, loop: asyncio.AbstractEventLoop) -> None:
        now_ns = perf_counter_ns()
        # with 0 a request has come, whose execution is no loss
        are_idle = bool(self._until_ns) and self._cores.are_still_idle(now_ns)
        self.is_on = are_idle and now_ns < self._until_ns and self._is_alone()
        if self.is_on:
            loop.call_soon(self._stay, loop)
