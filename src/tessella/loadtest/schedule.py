"""When requests are sent: as soon as a client is free, or at times that no answer can move."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

from tessella.core.errors import InputError, UsageError

MOST_REQUESTS = 10_000_000


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When to send.

    Attributes:
        times_s: the intended times of all requests since the start; None is a closed loop.
        seconds: how long a closed loop runs.
        clients: connections; in a closed loop each sends again when it has its answer.
    """

    times_s: tuple[float, ...] | None
    seconds: float
    clients: int


def closed(clients: int, seconds: float) -> Schedule:
    """A closed loop of clients, each with one request at a time."""
    return Schedule(times_s=None, seconds=_positive(seconds), clients=_clients(clients))


def poisson(rate: float, seconds: float, *, clients: int, seed: int = 0) -> Schedule:
    """Requests that arrive independently of each other, ``rate`` a second on average."""
    if _positive(rate) * _positive(seconds) > MOST_REQUESTS:
        raise UsageError("this is too many requests", seen=f"{rate * seconds:,.0f}")
    chance, times, now_s = random.Random(seed), [], 0.0
    while (now_s := now_s + chance.expovariate(rate)) < seconds:
        times.append(now_s)
    return Schedule(times_s=tuple(times), seconds=seconds, clients=_clients(clients))


def trace(path: Path, *, clients: int) -> Schedule:
    """The times in a file, a number of seconds or an object with ``at_s`` a line.

    Raises:
        InputError: a line that is none of these, or earlier than the one before.
    """
    times: list[float] = []
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("the trace cannot be read", seen=error, fix="give a text file") from error
    for number, line in enumerate(lines, 1):
        try:
            told = json.loads(line)
            at_s = float(told["at_s"] if isinstance(told, dict) else told)
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(
                f"line {number} of the trace is no time", seen=line[:60], fix='write {"at_s": 0.5}'
            ) from error
        if not math.isfinite(at_s) or at_s < (times[-1] if times else 0.0):
            raise InputError(f"line {number} of the trace is out of order", seen=line[:60])
        times.append(at_s)
    if not times:
        raise InputError("the trace is empty", seen=path)
    return Schedule(times_s=tuple(times), seconds=times[-1], clients=_clients(clients))


def _positive(number: float) -> float:
    if not 0 < number < 1e7:
        raise UsageError("rates and seconds are positive numbers", seen=number)
    return number


def _clients(count: int) -> int:
    if not 1 <= count <= 4096:
        raise UsageError("clients are a number from 1 to 4096", seen=count)
    return count
