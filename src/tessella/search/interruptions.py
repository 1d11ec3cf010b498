"""What other work takes of the cores while something is timed.

Linux counts it for each thread: how long it could have run but had to wait for a core
(``run_delay``), and how often it was sent away before it was done.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Interruptions:
    """What has been counted until now.

    Attributes:
        waited_s: seconds that the calling thread waited for a core.
        switches: how often a thread of this process had to leave its core.
    """

    waited_s: float
    switches: int


def interruptions() -> Interruptions:
    """The counts now, in about 2 µs; no waiting where the system does not tell of it."""
    waited_ns = 0
    if (file := _counts().descriptor) is not None:
        waited_ns = int(os.pread(file, 80, 0).split()[1])
    return Interruptions(1e-9 * waited_ns, resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw)


class _Counts:
    """A thread's open file of the scheduler's counts, if there is one; closed with the thread."""

    def __init__(self) -> None:
        self.process = os.getpid()
        try:
            self.descriptor = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # another system, or a kernel that does not count
            self.descriptor = None

    descriptor: int | None

    def __del__(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)


_threads = threading.local()


def _counts() -> _Counts:
    known: _Counts | None = getattr(_threads, "counts", None)
    if known is None or known.process != os.getpid():  # a child would read its parent's
        known = _threads.counts = _Counts()
    return known


@dataclass(frozen=True)
class CpuUse:
    """A moment, and the processor seconds that all and this process had used by then."""

    at_s: float
    all_s: float
    own_s: float


def cpu_use() -> CpuUse:
    """The processor seconds until now; this process's with those of its children that ended."""
    times, own = psutil.cpu_times(), os.times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # in user's already
    own_s = own.user + own.system + own.children_user + own.children_system
    return CpuUse(time.monotonic(), sum(times) - idle - guests, own_s)


def others_cores(before: CpuUse, after: CpuUse) -> float:
    """How many cores other processes kept busy between two moments, on average."""
    seconds = max(after.at_s - before.at_s, 1e-9)
    return max(0.0, after.all_s - before.all_s - (after.own_s - before.own_s)) / seconds
