"""What happens at a server between two readings of its counters: rates, percentiles, shares."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tessella.studio.serving import Counts, Histogram, Instance, Model, Reading

WINDOW_S = 10.0  # that rates and percentiles are of: the p99 of a second is of too few requests


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a version of a model did within a time.

    Attributes:
        answered, refused, failed: requests a second: with an answer; that found no time or no
            place (429, 503); with another error, or whose client left.
        samples: computed a second.
        busy: share of the time in which the engine computed.
        of_best: share of the samples a second that the engine makes with the size of batch that
            suits it best, as far as it was seen since the model was loaded.
        whole, stages, batches, doors, clients: as ``Counts`` has them, of this time alone.
        waiting: requests that wait at its end.
        instances: each one's device, state and share of the time in which it computed, if there
            are several; ``busy`` and ``of_best`` are of all together.
    """

    answered: float
    refused: float
    failed: float
    samples: float
    busy: float
    of_best: float
    whole: Histogram
    stages: dict[str, Histogram]
    batches: Histogram
    doors: dict[str, float]
    clients: dict[str, float]
    waiting: float
    instances: dict[str, InstanceLoad] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class InstanceLoad:
    """What an instance did within a time; ``restarts`` are all since the model was first loaded."""

    device: str
    executions: float
    samples: float
    busy: float
    restarts: float
    is_up: bool


def load(before: Counts, now: Counts, seconds: float) -> Load:
    """The load between two readings, ``seconds`` apart."""
    failures = _since(before.failures, now.failures)
    refused = failures.pop("REJECTED", 0.0)
    whole = now.whole.since(before.whole)
    samples = sum(_since(before.samples, now.samples).values()) / seconds
    abreast = len(now.instances) or 1
    best_rate = abreast * now.best_rate
    return Load(
        answered=whole.count / seconds,
        refused=refused / seconds,
        failed=sum(failures.values()) / seconds,
        samples=samples,
        busy=min(1.0, sum(_since(before.seconds, now.seconds).values()) / seconds / abreast),
        of_best=min(1.0, samples / best_rate) if best_rate else 0.0,
        whole=whole,
        stages={
            name: histogram.since(before.stages.get(name, Histogram()))
            for name, histogram in now.stages.items()
        },
        batches=now.batches.since(before.batches),
        doors=_since(before.doors, now.doors),
        clients=_since(before.clients, now.clients),
        waiting=now.waiting,
        instances={
            number: _instance(before.instances.get(number, Instance()), instance, seconds)
            for number, instance in now.instances.items()
        },
    )


def _instance(before: Instance, now: Instance, seconds: float) -> InstanceLoad:
    executions, samples, computed = (
        getattr(now, what) - getattr(before, what) for what in ("executions", "samples", "seconds")
    )
    if now.device != before.device or min(executions, samples, computed) < 0:  # it counts anew
        executions, samples, computed = now.executions, now.samples, now.seconds
    return InstanceLoad(
        device=now.device,
        executions=executions / seconds,
        samples=samples / seconds,
        busy=min(1.0, computed / seconds),
        restarts=now.restarts,
        is_up=now.is_up,
    )


def to_watch(loads: dict[Model, Load], here: Model | None) -> Model:
    """The model that a page shows where nobody chose one: the busiest. The one that is shown stays
    as long as it is asked, or no other model is."""
    busiest = max(loads, key=lambda model: loads[model].answered)
    if here not in loads:
        return busiest
    return here if loads[here].answered or not loads[busiest].answered else busiest


def _since(before: dict[str, float], now: dict[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in now.items()}


class Window:
    """The readings of the last seconds.

    Attributes:
        latest: the newest one.
    """

    def __init__(self, seconds: float = WINDOW_S) -> None:
        self._seconds = seconds
        self._readings: deque[Reading] = deque()

    @property
    def latest(self) -> Reading | None:
        return self._readings[-1] if self._readings else None

    def add(self, reading: Reading) -> bool:
        """Take another reading; False if the server has begun to count anew since the last one."""
        again = self.latest is not None and _fell(self.latest, reading)
        if again:
            self._readings.clear()
        self._readings.append(reading)
        # The first one is the newest that is as old as the window.
        while len(self._readings) > 2 and reading.time - self._readings[1].time >= self._seconds:
            self._readings.popleft()
        return not again

    def loads(self) -> dict[Model, Load]:
        """Of all models since the first reading of the window; none while there is only one."""
        if len(self._readings) < 2:
            return {}
        first, last = self._readings[0], self._readings[-1]
        seconds = max(1e-6, last.time - first.time)
        return {
            model: load(first.models.get(model, Counts()), counts, seconds)
            for model, counts in last.models.items()
        }


def _fell(before: Reading, now: Reading) -> bool:
    """Whether the server was started again: it says so, or some counter is less than it was."""
    if before.started != now.started:
        return True
    for model, counts in before.models.items():
        other = now.models.get(model)
        if other is None:
            return True
        falls = (
            (counts.whole.count, other.whole.count),
            (counts.batches.count, other.batches.count),
            (sum(counts.failures.values()), sum(other.failures.values())),
            (sum(counts.seconds.values()), sum(other.seconds.values())),
        )
        if any(b < a for a, b in falls):
            return True
    return False
