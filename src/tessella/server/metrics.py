"""``/metrics`` for Prometheus: Triton's names for the models, and process, host and GPUs.

The numbers are read from the models' statistics when they are asked for; nothing is counted twice.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from tessella.server.repository import Repository
from tessella.server.statistics import BOUNDS_S, DOORS, Comparison, Histogram, Statistics
from tessella.telemetry.prometheus import TelemetryCollector

_US = 1000

# Triton's counters: name, meaning, how to read it. Durations add up; divide by a count for a mean.
_COUNTERS: tuple[tuple[str, str, Callable[[Statistics], float]], ...] = (
    ("nv_inference_request_success", "requests answered", lambda s: s.success.count),
    ("nv_inference_count", "samples computed", lambda s: s.inference_count),
    ("nv_inference_exec_count", "batches computed", lambda s: s.execution_count),
    ("nv_inference_request_duration_us", "time of requests", lambda s: s.success.ns / _US),
    ("nv_inference_queue_duration_us", "time spent waiting", lambda s: s.queue.ns / _US),
    (
        "nv_inference_compute_input_duration_us",
        "time spent joining requests",
        lambda s: s.compute.compute_input.ns / _US,
    ),
    (
        "nv_inference_compute_infer_duration_us",
        "time spent in the engine",
        lambda s: s.compute.compute_infer.ns / _US,
    ),
    (
        "nv_inference_compute_output_duration_us",
        "time spent splitting outputs",
        lambda s: s.compute.compute_output.ns / _US,
    ),
)
# Upper bounds of the buckets that executions are counted in by their samples.
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
FAILURE_REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")


class Metrics:
    """The metrics of one server, in a registry of its own."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._registry.register(TelemetryCollector())
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        # The library wants every counter to end in _total; Triton's do not.
        return re.sub(
            rb"(?m)^(# (?:HELP|TYPE) nv_\w+)_total ", rb"\1 ", generate_latest(self._registry)
        )

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        models = self._repository.statistics
        for name, meaning, read in _COUNTERS:
            metric = Metric(name, meaning, "counter")
            for (model, version), statistics in models.items():
                metric.add_sample(name, {"model": model, "version": version}, read(statistics))
            yield metric
        failure = Metric("nv_inference_request_failure", "requests that got an error", "counter")
        pending = GaugeMetricFamily(
            "nv_inference_pending_request_count",
            "requests that wait for the engine",
            labels=("model", "version"),
        )
        for (model, version), statistics in models.items():
            labels = {"model": model, "version": version}
            for reason in FAILURE_REASONS:
                failure.add_sample(
                    failure.name, {**labels, "reason": reason}, statistics.failures[reason]
                )
            pending.add_metric((model, version), statistics.waiting)
        yield failure
        yield pending
        yield from _shadows(models)
        yield from _latencies(models)
        yield _doors(models)
        yield from _batches(models)


def _shadows(models: dict[tuple[str, str], Statistics]) -> Iterator[Metric]:
    """How versions answered copies of what others had answered."""
    copies = CounterMetricFamily(
        "tessella_shadow_requests",
        "copies of requests for a version that is a shadow, by what became of them",
        labels=("model", "version", "result"),
    )
    samples = CounterMetricFamily(
        "tessella_shadow_samples",
        "samples of copies, by whether the largest element of every output was the same one",
        labels=("model", "version", "result"),
    )
    largest = GaugeMetricFamily(
        "tessella_shadow_largest_difference",
        "largest difference of an element between the shadow's answers and those that were sent",
        labels=("model", "version"),
    )
    for place, statistics in models.items():
        shadow = statistics.shadow
        if shadow == Comparison():
            continue
        for result, count in (
            ("compared", shadow.requests), ("shed", shadow.shed), ("failed", shadow.failed)
        ):  # fmt: skip
            copies.add_metric((*place, result), count)
        samples.add_metric((*place, "agreed"), shadow.agreed)
        samples.add_metric((*place, "differed"), shadow.samples - shadow.agreed)
        largest.add_metric(place, shadow.largest_difference)
    yield copies
    yield samples
    yield largest


def _latencies(models: dict[tuple[str, str], Statistics]) -> Iterator[Metric]:
    """The time of answered requests, and where it went: a histogram a stage."""
    whole = HistogramMetricFamily(
        "tessella_request_seconds", "time of answered requests", labels=("model", "version")
    )
    stages = HistogramMetricFamily(
        "tessella_request_stage_seconds",
        "time of answered requests, by stage; the stages of a request add up to its time",
        labels=("model", "version", "stage"),
    )
    for place, statistics in models.items():
        whole.add_metric(place, _buckets(statistics.whole), statistics.whole.ns / 1e9)
        for stage, histogram in statistics.stages.items():
            stages.add_metric((*place, stage), _buckets(histogram), histogram.ns / 1e9)
    yield whole
    yield stages


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    upto = accumulate(histogram.counts)
    return [(str(s), n) for s, n in zip((*BOUNDS_S, "+Inf"), upto, strict=True)]


def _doors(models: dict[tuple[str, str], Statistics]) -> Metric:
    """By which doors answered requests came."""
    doors = CounterMetricFamily(
        "tessella_requests",
        "requests answered, by door: tensors over HTTP, pictures over HTTP, gRPC",
        labels=("model", "version", "door"),
    )
    for place, statistics in models.items():
        for door in DOORS:
            doors.add_metric((*place, door), statistics.doors[door])
    return doors


def _batches(models: dict[tuple[str, str], Statistics]) -> Iterator[Metric]:
    """How large executions were, and what those of a size took of the engine: each is counted
    once, so that the seconds of all sizes are those in which the engine computed.
    """
    sizes = HistogramMetricFamily(
        "tessella_batch_size", "samples of executions", labels=("model", "version")
    )
    labels = ("model", "version", "batch")
    samples = CounterMetricFamily(
        "tessella_engine_samples",
        "samples computed, by the bucket of their execution's size",
        labels=labels,
    )
    seconds = CounterMetricFamily(
        "tessella_engine_seconds",
        "time in which the engine computed, by the bucket of the execution's size",
        labels=labels,
    )
    bounds = [*map(str, BATCHES), "+Inf"]
    for place, statistics in models.items():
        executions, computed, spent_ns = ([0] * len(bounds) for _ in range(3))
        for size, spent in statistics.batches():
            bucket = bisect_left(BATCHES, size)
            executions[bucket] += spent.count
            computed[bucket] += size * spent.count
            spent_ns[bucket] += spent.ns
        upto = list(accumulate(executions))
        sizes.add_metric(place, list(zip(bounds, upto, strict=True)), sum(computed))
        for bound, count, ns in zip(bounds, computed, spent_ns, strict=True):
            if count:
                samples.add_metric((*place, bound), count)
                seconds.add_metric((*place, bound), ns / 1e9)
    yield sizes
    yield samples
    yield seconds
