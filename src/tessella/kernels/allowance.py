"""How long a build may measure: counted from its first measurement, so that each run gets on."""

from __future__ import annotations

import time
from dataclasses import dataclass


class OutOfTime(Exception):
    """The allowance is used up, and something has not been measured yet; caught by the compiler."""


@dataclass
class Allowance:
    """``seconds`` of measuring; None for as long as it takes.

    >>> Allowance(seconds=0.0).spend()      # the first measurement is always made
    """

    seconds: float | None = None
    started: float | None = None

    def spend(self) -> None:
        """Called before each measurement.

        Raises:
            OutOfTime: the time is over.
        """
        now = time.monotonic()
        if self.started is None:
            self.started = now
        elif self.seconds is not None and now - self.started >= self.seconds:
            raise OutOfTime
