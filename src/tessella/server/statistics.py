"""The statistics of a model since it was first loaded, for ``/stats`` and ``/metrics``; and where
the time of one request went, for its ``Server-Timing`` header.

What an engine's thread writes and what the event loop writes are different numbers.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tessella.server.fairness import name_of


@dataclass(slots=True)
class Duration:
    """How often something happened and how long it took in all."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int, count: int = 1) -> None:
        """It happened so often, and took ``ns`` in all."""
        self.count += count
        self.ns += ns

    def to_json(self) -> dict[str, int]:
        return {"count": self.count, "ns": self.ns}


@dataclass(frozen=True, kw_only=True)
class Computation:
    """Where the time of one execution went: joining the requests, the engine, splitting again."""

    input_ns: int
    infer_ns: int
    output_ns: int


STAGES = ("receive", "decode", "queue", "copy", "compute", "answer")


_TIMING = b", ".join(b"%s;dur=%%.3f" % name.encode() for name in STAGES)


@dataclass(slots=True)
class Stages:
    """The time of one request, by stage; they add up to the time from its head to its answer.

    Attributes:
        receive: waiting for its body and for memory to hold it.
        decode: parsing it, and decoding pictures.
        queue: waiting for the engine, and for other pieces of the request.
        copy: joining inputs and splitting outputs.
        compute: in the engine.
        answer: making the response's body.
        beside: of ``decode``, what the engine's GPU took.
    """

    receive: int = 0
    decode: int = 0
    queue: int = 0
    copy: int = 0
    compute: int = 0
    answer: int = 0
    beside: int = 0

    def decoded(self, ns: int) -> None:
        """The engine's GPU has decoded pictures of the request."""
        self.decode += ns
        self.beside += ns

    @property
    def total(self) -> int:
        return self.receive + self.decode + self.queue + self.copy + self.compute + self.answer

    def header(self) -> bytes:
        """The value of ``Server-Timing``, in milliseconds."""
        return _TIMING % (
            self.receive / 1e6, self.decode / 1e6, self.queue / 1e6, self.copy / 1e6,
            self.compute / 1e6, self.answer / 1e6,
        )  # fmt: skip


# Upper bounds of the histograms' buckets in seconds, and in nanoseconds to look them up by.
BOUNDS_S = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5)
_BOUNDS_NS = np.array([int(bound * 1e9) for bound in BOUNDS_S])


UNCOUNTED = 256  # requests whose times are counted together
DOORS = ("http", "pictures", "grpc")  # tensors over HTTP, a task's verb over HTTP, gRPC
MOST_CLIENTS, OTHERS = 32, "others"  # that have a count of their own, and all that came after them


class Histogram:
    """How many durations were how long."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.ns = 0

    def told(self) -> list[int]:
        """For ``tell`` in another process."""
        return [self.ns, *self.counts]

    def tell(self, told: list[int]) -> None:
        """Count what another one has ``told``."""
        ns, *counts = told
        self.ns += ns
        self.counts = [a + b for a, b in zip(self.counts, counts, strict=True)]


@dataclass
class _BatchSize:
    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)

    def add(self, spent: Computation, count: int = 1) -> None:
        self.compute_input.add(count * spent.input_ns, count)
        self.compute_infer.add(count * spent.infer_ns, count)
        self.compute_output.add(count * spent.output_ns, count)

    def to_json(self) -> dict[str, Any]:
        return {name: duration.to_json() for name, duration in vars(self).items()}


@dataclass
class Comparison:
    """How a version, as a shadow, answered copies of what another one had answered.

    Attributes:
        requests: copies that it answered.
        samples: how many samples they had.
        agreed: of the samples, those whose largest element is the same in every output.
        largest_difference: of any element of any output.
        shed: copies that were not computed, for want of time or memory.
        failed: copies for which its engine raised.
    """

    requests: int = 0
    samples: int = 0
    agreed: int = 0
    largest_difference: float = 0.0
    shed: int = 0
    failed: int = 0

    def compared(self, samples: int, agreed: int, difference: float) -> None:
        """One copy was answered; see ``shadow.compare``."""
        self.requests += 1
        self.samples += samples
        self.agreed += agreed
        self.largest_difference = max(self.largest_difference, difference)

    def add(self, other: Comparison) -> None:
        """Count what another process has counted."""
        for name in ("requests", "samples", "agreed", "shed", "failed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.largest_difference = max(self.largest_difference, other.largest_difference)

    def to_json(self) -> dict[str, Any]:
        """As an entry of ``model_stats`` tells it; JSON has no infinity, so that is null."""
        finite = math.isfinite(self.largest_difference)
        return vars(self) | {
            "agreement": self.agreed / self.samples if self.samples else None,
            "largest_difference": self.largest_difference if finite else None,
        }


@dataclass
class InstanceCounts:
    """What one of several instances of a model has done since the model was first loaded.

    Attributes:
        device: where it runs.
        executions, samples, ns: what it computed, and how long that took.
        restarts: how often its process was started again.
        is_up: whether it takes executions.
    """

    device: str
    executions: int = 0
    samples: int = 0
    ns: int = 0
    restarts: int = 0
    is_up: bool = True

    def executed(self, samples: int, ns: int) -> None:
        """It has run an execution."""
        self.executions += 1
        self.samples += samples
        self.ns += ns


class Statistics:
    """Triton's statistics of one model. Durations of a request include its share of waiting."""

    def __init__(self) -> None:
        self._success = Duration()
        self.fail = Duration()
        self.queue = Duration()
        self.compute = _BatchSize()
        self.inference_count = 0
        self.execution_count = 0
        self.last_inference_ms = 0
        self.waiting = 0
        self.failures: Counter[str] = Counter()
        self.shadow = Comparison()
        self._stages = {name: Histogram() for name in STAGES}
        self._whole = Histogram()
        self._doors: Counter[str] = Counter()
        self._clients: Counter[str] = Counter()
        self._unnamed: Counter[int] = Counter()  # requests by client, as ``fairness`` numbers them
        self._uncounted: list[tuple[int, ...]] = []  # of requests: the whole and the stages
        self.instances: list[InstanceCounts] = []  # where there are several
        self._batches: defaultdict[int, _BatchSize] = defaultdict(_BatchSize)

    def executed(self, batch: int, queue_ns: list[int], spent: Computation) -> None:
        """One execution of ``batch`` samples for the requests that waited ``queue_ns`` each."""
        self.execution_count += 1
        self.inference_count += batch
        self.last_inference_ms = time.time_ns() // 1_000_000
        self._batches[batch].add(spent)
        self.queue.add(sum(queue_ns), len(queue_ns))
        self.compute.add(spent, len(queue_ns))

    def batches(self) -> list[tuple[int, Duration]]:
        """The sizes of executions, with how many there were and what they took of the engine."""
        return [(size, spent.compute_infer) for size, spent in sorted(self._batches.copy().items())]

    def succeeded(self, ns: int, stages: Stages, door: str, client: int = 0) -> None:
        """A client's request that came by one of ``DOORS`` was answered."""
        self._doors[door] += 1
        self._unnamed[client] += 1
        self._uncounted.append(
            (
                ns, stages.receive, stages.decode, stages.queue, stages.copy, stages.compute,
                stages.answer,
            )
        )  # fmt: skip
        if len(self._uncounted) == UNCOUNTED:
            self._count()

    def _count(self) -> None:
        """Count what came since the last call: of 256 requests each takes 0.3 µs, one alone 3."""
        if not self._uncounted:
            return
        some, self._uncounted = np.array(self._uncounted), []
        named, self._unnamed = self._unnamed, Counter()
        for client, count in named.items():
            self._count_client(name_of(client) or OTHERS, count)
        buckets = np.searchsorted(_BOUNDS_NS, some)
        sums = some.sum(0).tolist()
        self._success.add(sums[0], len(some))
        for place, histogram in enumerate((self._whole, *self._stages.values())):
            counts = np.bincount(buckets[:, place], minlength=len(histogram.counts))
            histogram.tell([sums[place], *counts.tolist()])

    def _count_client(self, name: str, count: int) -> None:
        if name not in self._clients and len(self._clients) >= MOST_CLIENTS:
            name = OTHERS
        self._clients[name] += count

    @property
    def success(self) -> Duration:
        """Requests that were answered."""
        self._count()
        return self._success

    @property
    def stages(self) -> dict[str, Histogram]:
        """Where their time went."""
        self._count()
        return self._stages

    @property
    def whole(self) -> Histogram:
        """Of the same requests, the stages together."""
        self._count()
        return self._whole

    @property
    def doors(self) -> Counter[str]:
        """By which they came."""
        return self._doors

    @property
    def clients(self) -> Counter[str]:
        """Whose they were, by address: of the first ``MOST_CLIENTS``, and of all others."""
        self._count()
        return self._clients

    def failed(self, ns: int, reason: str) -> None:
        """``reason`` is one of Triton's: REJECTED, CANCELED, BACKEND, OTHER."""
        self.fail.add(ns)
        self.failures[reason] += 1

    @property
    def is_untold(self) -> bool:
        """Whether something was counted since ``taken``."""
        return bool(self.success.count or self.fail.count) or self.shadow != Comparison()

    def taken(self) -> dict[str, Any]:
        """What was counted of requests since the last call, for ``add`` in another process."""
        told = {
            "success": self.success.to_json(),
            "fail": self.fail.to_json(),
            "failures": dict(self.failures),
            "stages": {name: histogram.told() for name, histogram in self.stages.items()},
            "whole": self.whole.told(),
            "doors": self.doors,
            "clients": self.clients,
            "shadow": vars(self.shadow),
        }
        self.shadow = Comparison()
        self._success, self.fail, self.failures = Duration(), Duration(), Counter()
        self._stages = {name: Histogram() for name in STAGES}
        self._whole, self._doors, self._clients = Histogram(), Counter(), Counter()
        return told

    def add(self, told: dict[str, Any]) -> None:
        """Count what another process has ``taken``."""
        for mine, more in ((self.success, told["success"]), (self.fail, told["fail"])):
            mine.count += more["count"]
            mine.ns += more["ns"]
        self.failures.update(told["failures"])
        self.shadow.add(Comparison(**told["shadow"]))
        self.doors.update(told["doors"])
        for name, count in told["clients"].items():
            self._count_client(name, count)
        self.whole.tell(told["whole"])
        for name, stage in told["stages"].items():
            self.stages[name].tell(stage)

    def to_json(self, name: str, version: str) -> dict[str, Any]:
        """An entry of ``model_stats``."""
        none = Duration().to_json()
        told: dict[str, Any] = (
            {"shadow": self.shadow.to_json()} if self.shadow != Comparison() else {}
        )
        if self.instances:
            told["instances"] = [vars(instance).copy() for instance in self.instances]
        return told | {
            "name": name,
            "version": version,
            "last_inference": self.last_inference_ms,
            "inference_count": self.inference_count,
            "execution_count": self.execution_count,
            "inference_stats": {
                "success": self.success.to_json(),
                "fail": self.fail.to_json(),
                "queue": self.queue.to_json(),
                **self.compute.to_json(),
                "cache_hit": none,
                "cache_miss": none,
            },
            "batch_stats": [
                {"batch_size": size, **self._batches[size].to_json()}
                for size in sorted(self._batches)
            ],
        }
