"""Find how to serve a model: settings of a server and offered rates, tried until one is best.

The best answers most requests a second within the asked p99. For each setting the rate is doubled
until the p99 breaks, then the gap between what held and what broke is halved. A setting after the
first is asked at once for a tenth more than the best so far; if it cannot, it is left. Acceptors
are compared first, then delays with the best of them, then instances of the model with both.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol

from tessella.core.count import counted
from tessella.core.errors import ServeError, TessellaError, UsageError
from tessella.loadtest.generator import NOT_SENT, Outcome

MARGIN = 1.1  # rates nearer to each other than this are one
# A rate is offered for so many times the p99: an overload by a tenth is late by the p99 at its end.
STEADY = 10.0
REQUESTS = 100  # the fewest of which a p99 is taken
MISSES = 0.01
TRIALS = 60  # how many the time is cut into
LEAST_S, MOST_S = 0.25, 5.0  # of a trial, where p99 and rate do not ask for more
BUSY = 0.9  # of a core: beyond, the generator may be what limits


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a server is started.

    Attributes:
        acceptors, max_delay_us, instances: as of ``tessella serve``.
    """

    acceptors: int
    max_delay_us: int
    instances: int = 1

    @property
    def words(self) -> tuple[str, ...]:
        """The options of ``tessella serve``."""
        several = ("--instances", str(self.instances)) if self.instances > 1 else ()
        delay = ("--max-delay-us", str(self.max_delay_us))
        return ("--acceptors", str(self.acceptors), *delay, *several)

    def __str__(self) -> str:
        several = f", {self.instances} instances" if self.instances > 1 else ""
        return f"{counted(self.acceptors, 'acceptor')}, {self.max_delay_us:,} µs delay{several}"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The answers of a server with one setting to one rate of requests.

    Attributes:
        rate: requests a second that were offered, at random times; None is one client that sends
            when it has its answer.
        requests: that were to be sent.
        goodput: good answers a second within the asked p99.
        p50_ms, p99_ms: of good answers; None without any.
        failures: other answers by status; requests that were given up are ``not sent``.
        meets: whether 99 % of all requests had a good answer in time.
        generator_cores: what part of a core the load generator took.
    """

    setting: Setting
    rate: float | None
    requests: int
    goodput: float
    p50_ms: float | None
    p99_ms: float | None
    failures: dict[str, int]
    meets: bool
    generator_cores: float

    @property
    def refused(self) -> int:
        """Requests that were sent and had no good answer."""
        return sum(count for status, count in self.failures.items() if status != NOT_SENT)

    def __str__(self) -> str:
        offered = "one at a time" if self.rate is None else f"{self.rate:,.1f}/s offered"
        p99 = "no good answer" if self.p99_ms is None else f"p99 {self.p99_ms:.2f} ms"
        word = "held" if self.meets else "broken"
        return f"{self.setting}, {offered}: {self.goodput:,.1f}/s in time, {p99}, {word}"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The goal of a search for settings, and the settings among which to search.

    Attributes:
        p99_ms: within which 99 % of all requests are to be answered.
        seconds: how long to try, since the first server was ready.
        acceptors: numbers to try.
        max_delays_us: delays to try; the acceptors are compared with the first.
        instances: numbers of instances to try, the first with all acceptors and delays.

    Raises:
        UsageError: a time that is none, nothing to try.
    """

    p99_ms: float
    seconds: float
    acceptors: tuple[int, ...]
    max_delays_us: tuple[int, ...]
    instances: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        for name, value in (("p99", self.p99_ms), ("seconds", self.seconds)):
            if not 0 < value < 1e7:
                raise UsageError(f"{name} is a positive time", seen=value, fix="give a longer one")
        if not (self.acceptors and self.max_delays_us and self.instances):
            raise UsageError("there is nothing to try", fix="name one of each, or leave them out")


@dataclass(frozen=True, kw_only=True)
class Found:
    """The end of a search.

    Attributes:
        best: the trial with the most goodput of those that held.
        notes: what a reader has to know of the search, a sentence each.
    """

    best: Trial
    trials: tuple[Trial, ...] = field(repr=False)
    notes: tuple[str, ...] = ()


class Served(Protocol):
    """A server that runs with one setting."""

    @property
    def max_batch(self) -> int:
        """The most samples that the server joins to a batch."""
        ...

    def alone(self, seconds: float) -> Outcome:
        """Ask with one client, one request after another."""
        ...

    def offered(self, rate: float, seconds: float) -> Outcome:
        """Send ``rate`` requests a second at random times."""
        ...


Opened = Callable[[Setting], AbstractContextManager[Served]]


def search(
    opened: Opened,
    asked: Asked,
    *,
    tell: Callable[[Trial], None] = lambda trial: None,
    now: Callable[[], float] = time.perf_counter,
) -> Found:
    """Find the setting with the most goodput.

    Args:
        opened: starts a server; leaving its context ends it.
        tell: called after each trial.

    Raises:
        UsageError: the p99 cannot be met, or not in this time; with what was measured.
        ServeError: the server has no good answer at all.
    """
    return _Search(opened, asked, tell, now).run()


class _Search:
    def __init__(
        self,
        opened: Opened,
        asked: Asked,
        tell: Callable[[Trial], None],
        now: Callable[[], float],
    ) -> None:
        self._opened, self._asked, self._tell, self._now = opened, asked, tell, now
        self._ends_s: float | None = None
        self._start_s = 0.0  # the longest that a server took to start
        self._trial_s = min(MOST_S, max(LEAST_S, asked.seconds / TRIALS))
        self._max_batch = 1
        self._best: Trial | None = None
        self._trials: list[Trial] = []
        self._untried: list[Setting] = []
        self._is_cut = False  # a rate was left out for lack of time

    def run(self) -> Found:
        delay_us, *longer = self._asked.max_delays_us
        instances, *others = self._asked.instances
        for acceptors in self._asked.acceptors:
            self._try(Setting(acceptors=acceptors, max_delay_us=delay_us, instances=instances))
        if self._best is None:
            raise self._failure()
        best = self._best
        notes = []
        if longer and self._max_batch == 1:
            notes.append("the plan takes one sample at a time, so that no delay was tried")
            longer = []
        for delay_us in longer:
            before = self._best
            self._try(replace(best.setting, max_delay_us=delay_us))
            if self._best is before:
                break  # a longer delay costs more of the p99
        best = self._best
        for instances in others:
            self._try(replace(best.setting, instances=instances))
        return Found(
            best=self._best, trials=tuple(self._trials), notes=(*notes, *self._notes(self._best))
        )

    def _notes(self, best: Trial) -> list[str]:
        notes = []
        if self._untried:
            left = "; ".join(map(str, self._untried))
            notes.append(f"there was no time for {left}: give more seconds")
        if self._is_cut:
            notes.append("the search for the highest rate was cut short: give more seconds")
        of_best = [t for t in self._trials if t.setting == best.setting]
        if (cores := max(t.generator_cores for t in of_best)) > BUSY:
            notes.append(
                f"the load generator itself took {cores:.2f} of a core, so the server may do more"
            )
        return notes

    def _try(self, setting: Setting) -> None:
        """Start a server and find its highest rate."""
        began_s = self._now()
        if self._ends_s is not None and began_s + self._start_s + self._trial_s > self._ends_s:
            self._untried.append(setting)
            return
        with self._opened(setting) as served:
            self._start_s = max(self._start_s, self._now() - began_s)
            if self._ends_s is None:
                self._ends_s = self._now() + self._asked.seconds
            self._max_batch = served.max_batch
            alone = self._took(setting, None, served.alone(self._trial_s))
            if alone.meets:
                self._climb(served, setting, alone)

    def _climb(self, served: Served, setting: Setting, alone: Trial) -> None:
        """Double or halve the rate until it is between one that held and one that broke."""
        best = self._best
        held: Trial | None = None
        broken: float | None = None
        rate = alone.goodput / 2 if best is None or best.rate is None else MARGIN * best.rate
        while (trial := self._at(served, setting, rate)) is not None:
            if trial.meets:
                held = trial
            else:
                broken = rate
            if broken is None:
                rate *= 2
            elif held is None or held.rate is None:
                if best is not None:
                    break  # behind the best
                rate /= 2
            elif broken <= MARGIN * held.rate:
                break
            else:
                rate = math.sqrt(held.rate * broken)
        if held is not None and (best is None or held.goodput > best.goodput):
            self._best = held

    def _at(self, served: Served, setting: Setting, rate: float) -> Trial | None:
        """One trial, or None if there is no time for it."""
        assert self._ends_s is not None
        seconds = self._needed_s(rate)
        if self._now() + seconds > self._ends_s:
            self._is_cut = True
            return None
        return self._took(setting, rate, served.offered(rate, seconds))

    def _needed_s(self, rate: float) -> float:
        return max(self._trial_s, STEADY * self._asked.p99_ms / 1e3, REQUESTS / rate)

    def _took(self, setting: Setting, rate: float | None, outcome: Outcome) -> Trial:
        slo_s = self._asked.p99_ms / 1e3
        requests = len(outcome.latencies_s) + sum(outcome.failures.values())
        in_time = sum(s <= slo_s for s in outcome.latencies_s)
        has_any = bool(outcome.latencies_s)
        trial = Trial(
            setting=setting,
            rate=rate,
            requests=requests,
            goodput=outcome.goodput(slo_s),
            p50_ms=1e3 * outcome.percentile(50) if has_any else None,
            p99_ms=1e3 * outcome.percentile(99) if has_any else None,
            failures=outcome.failures,
            meets=in_time > 0 and requests - in_time <= MISSES * requests,
            generator_cores=outcome.generator_cores,
        )
        self._trials.append(trial)
        self._tell(trial)
        return trial

    def _failure(self) -> TessellaError:
        """Why no setting held at any rate."""
        p99 = f"a p99 of {self._asked.p99_ms:g} ms"
        alone = [t for t in self._trials if t.rate is None]
        answered = [t for t in alone if t.p99_ms is not None]
        if not answered:
            return ServeError(
                "the server gives no good answer to one request at a time",
                status=503,
                seen=alone[0].failures,
                fix="send what the model takes: see --body, --batch and --picture",
            )
        if not any(t.meets for t in alone):
            fastest = min(answered, key=lambda t: t.p99_ms or math.inf)
            return UsageError(
                f"{p99} cannot be met here, even by one request at a time",
                seen=f"p99 {fastest.p99_ms:.3g} ms, median {fastest.p50_ms:.3g} ms with"
                f" {fastest.setting}; {fastest.refused} of {fastest.requests} refused",
                fix="ask for a longer one, or make the plan faster: another precision, or tune it",
            )
        lone = next(t for t in alone if t.meets)
        tried = [t for t in self._trials if t.rate is not None]
        if not tried:
            needed_s = self._needed_s(lone.goodput / 2)
            return UsageError(
                "there is no time to try a rate",
                seen=f"{self._asked.seconds:g} s, and each rate takes {needed_s:.3g} s",
                fix=f"give {math.ceil(8 * needed_s)} seconds or more",
            )
        lowest = min(tried, key=lambda t: t.rate or math.inf)
        return UsageError(
            f"{p99} is met by one request at a time, but by no rate that was tried",
            seen=lowest,
            fix="ask for a longer one, give more seconds, or end what else this machine does",
        )
