"""The time that a build may measure kernels: counted from its first request on."""

from __future__ import annotations

import time
from dataclasses import dataclass


class OutOfTime(Exception):
    """The allowance is used up, and something has not been measured yet; caught by the compiler."""


@dataclass
class Allowance:
    """The seconds that a build may measure; None for as long as it takes.

    The time of choosing candidates counts, too. It leaves nothing in the cache, so that the first
    measurement is made however long the choice took.

    >>> Allowance(seconds=0.0).spend()      # the first measurement is always made

    Attributes:
        optional_s: the seconds of measurements without which a plan would be finished, too.
    """

    seconds: float | None = None
    started: float | None = None
    measured: bool = False
    optional_s: float = 0.0

    @property
    def left_s(self) -> float | None:
        """The seconds that are left since this was first asked; None without a limit."""
        now = time.monotonic()
        if self.started is None:
            self.started = now
        return None if self.seconds is None else max(0.0, self.started + self.seconds - now)

    @property
    def since_s(self) -> float:
        """The seconds since a time was first asked for."""
        return 0.0 if self.started is None else time.monotonic() - self.started

    def spend(self) -> None:
        """Called before each measurement.

        Raises:
            OutOfTime: the time is over.
        """
        if self.left_s == 0.0 and self.measured:
            raise OutOfTime
        self.measured = True
