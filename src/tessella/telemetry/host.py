"""Readings of the host: processors, memory, disk."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

# Two callers in quick succession (a page and Prometheus) share one reading: over a few clock ticks
# (10 ms each) the share of busy ones means nothing.
_SHORTEST_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Host:
    """The host at one moment.

    Attributes:
        cpu_percent: busy share of all cores together, 0 to 100, since the reading before this one
            (the first reading of a process: since the machine started).
        cpu_percent_by_core: the same, a core at a time.
        load: processes that run or want to, on average over 1, 5 and 15 minutes.
        disk_path: the path whose file system the disk numbers are of.
    """

    cpu_percent: float
    cpu_percent_by_core: tuple[float, ...]
    memory_total_bytes: int
    memory_used_bytes: int
    load: tuple[float, float, float]
    disk_path: str
    disk_total_bytes: int
    disk_free_bytes: int


class CpuMeter:
    """The busy share of each core between one reading and the next."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # busy and idle seconds since the start, by core
        self._times: list[tuple[float, float]] = []
        self._at = -_SHORTEST_S
        self._percent: tuple[float, ...] = ()

    def read(self) -> tuple[float, ...]:
        """Percent by core, 0 to 100."""
        with self._lock:
            now = time.monotonic()
            if now - self._at < _SHORTEST_S:
                return self._percent
            times = [_busy_idle(core) for core in psutil.cpu_times(percpu=True)]
            before = self._times
            if len(before) != len(times):  # the first reading, or a core came or went
                before = [(0.0, 0.0)] * len(times)
            self._percent = tuple(
                _share(busy - b, idle - i) for (busy, idle), (b, i) in zip(times, before)
            )
            self._times, self._at = times, now
            return self._percent


class _CpuTimes(Protocol):
    """psutil's named tuple of seconds; which kinds of time it has depends on the system."""

    idle: float

    def __iter__(self) -> Iterator[float]: ...


def _busy_idle(core: _CpuTimes) -> tuple[float, float]:
    # guest time is in user time already; waiting for a disk is not work
    idle = core.idle + getattr(core, "iowait", 0.0)
    guest = getattr(core, "guest", 0.0) + getattr(core, "guest_nice", 0.0)
    return sum(core) - guest - idle, idle


def _share(busy: float, idle: float) -> float:
    """The busy share in percent; the kernel's counters may step back a little."""
    busy, idle = max(0.0, busy), max(0.0, idle)
    return 100.0 * busy / (busy + idle) if busy + idle else 0.0


_meter = CpuMeter()


def host(disk: str | Path = "/") -> Host:
    """The host now; disk space is that of the file system which holds ``disk``."""
    by_core = _meter.read()
    memory = psutil.virtual_memory()
    space = psutil.disk_usage(str(disk))
    return Host(
        cpu_percent=sum(by_core) / len(by_core),
        cpu_percent_by_core=by_core,
        memory_total_bytes=memory.total,
        memory_used_bytes=memory.total - memory.available,
        load=os.getloadavg(),
        disk_path=str(disk),
        disk_total_bytes=space.total,
        disk_free_bytes=space.free,
    )
