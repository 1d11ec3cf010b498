"""The statistics of a model since it was first loaded, for ``/stats`` and ``/metrics``.

All numbers are written on the event loop, so they need no lock.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Duration:
    """How often something happened and how long it took in all."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        self.count += 1
        self.ns += ns

    def to_json(self) -> dict[str, int]:
        return {"count": self.count, "ns": self.ns}


@dataclass(frozen=True, kw_only=True)
class Computation:
    """Where the time of one execution went: joining the requests, the engine, splitting again."""

    input_ns: int
    infer_ns: int
    output_ns: int


@dataclass
class _BatchSize:
    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)

    def add(self, spent: Computation) -> None:
        self.compute_input.add(spent.input_ns)
        self.compute_infer.add(spent.infer_ns)
        self.compute_output.add(spent.output_ns)

    def to_json(self) -> dict[str, Any]:
        return {name: duration.to_json() for name, duration in vars(self).items()}


class Statistics:
    """Triton's statistics of one model. Durations of a request include its share of waiting."""

    def __init__(self) -> None:
        self.success = Duration()
        self.fail = Duration()
        self.queue = Duration()
        self.compute = _BatchSize()
        self.inference_count = 0
        self.execution_count = 0
        self.last_inference_ms = 0
        self.waiting = 0
        self.failures: Counter[str] = Counter()
        self._batches: defaultdict[int, _BatchSize] = defaultdict(_BatchSize)

    def executed(self, batch: int, queue_ns: list[int], spent: Computation) -> None:
        """One execution of ``batch`` samples for the requests that waited ``queue_ns`` each."""
        self.execution_count += 1
        self.inference_count += batch
        self.last_inference_ms = time.time_ns() // 1_000_000
        self._batches[batch].add(spent)
        for waited_ns in queue_ns:
            self.queue.add(waited_ns)
            self.compute.add(spent)

    def succeeded(self, ns: int) -> None:
        self.success.add(ns)

    def failed(self, ns: int, reason: str) -> None:
        """``reason`` is one of Triton's: REJECTED, CANCELED, BACKEND, OTHER."""
        self.fail.add(ns)
        self.failures[reason] += 1

    def to_json(self, name: str, version: str) -> dict[str, Any]:
        """An entry of ``model_stats``."""
        none = Duration().to_json()
        return {
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
