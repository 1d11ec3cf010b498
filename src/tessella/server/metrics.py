"""``/metrics`` for Prometheus: Triton's names for the models, and process, host and GPUs.

The numbers are read from the models' statistics when they are asked for; nothing is counted twice.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import cast

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from tessella.server.repository import Repository
from tessella.server.statistics import (
    BOUNDS_S,
    DOORS,
    Comparison,
    InstanceCounts,
    Statistics,
)
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
MOST_LINES = 1 << 14  # whose beginnings are kept; a model has 160
_BOUNDS = (*map(str, BOUNDS_S), "+Inf")
_written = cast(Callable[[float], str], floatToGoString)
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
        lines = []
        for metric in self._registry.collect():
            lines.append(_head(metric.name, metric.documentation, metric.type))
            lines += [
                f"{_start(name, tuple(labels.items()))}{_written(value)}\n"
                for name, labels, value, *_ in metric.samples
            ]
            if isinstance(metric, _Histograms):
                lines += metric.lines
        return "".join(lines).encode()

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
        yield from _whence(models)
        yield from _batches(models)
        yield from _instances(models)


class _Of:
    """A collector of one metric."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> list[Metric]:
        return [self._metric]


class _Histograms(Metric):
    """Histograms of one name: lines as the library would write them, without an object for each."""

    def __init__(self, name: str, meaning: str, labels: tuple[str, ...]) -> None:
        super().__init__(name, meaning, "histogram")
        self._labels = labels
        self.lines: list[str] = []

    def add(
        self, place: tuple[str, ...], bounds: tuple[str, ...], counts: list[int], total: float
    ) -> None:
        """Add the histogram of a place: how many numbers lay in each bucket, and their sum."""
        upto = list(accumulate(counts))
        starts = _starts(self.name, tuple(zip(self._labels, place, strict=True)), bounds)
        values = (*upto, upto[-1], total)
        self.lines += [f"{a}{_written(n)}\n" for a, n in zip(starts, values, strict=True)]


@functools.lru_cache(MOST_LINES // 16)
def _starts(
    name: str, labels: tuple[tuple[str, str], ...], bounds: tuple[str, ...]
) -> tuple[str, ...]:
    """As ``_start``, of all lines of a histogram."""
    buckets = [_start(f"{name}_bucket", (*labels, ("le", bound))) for bound in bounds]
    return *buckets, _start(f"{name}_count", labels), _start(f"{name}_sum", labels)


# What a line begins with is the same each time: the library writes it once (seven tenths of the
# time of a whole text; that was 7.3 ms of the processor for three models, and is 2 ms now).
@functools.lru_cache(MOST_LINES)
def _head(name: str, meaning: str, kind: str) -> str:
    """The lines that say what a metric is, as the library writes them."""
    made = generate_latest(_Of(Metric(name, meaning, kind))).decode()
    if name.startswith("nv_"):  # the library wants every counter to end in _total, Triton's do not
        made = made.replace(f" {name}_total ", f" {name} ")
    return made


@functools.lru_cache(MOST_LINES)
def _start(name: str, labels: tuple[tuple[str, str], ...]) -> str:
    """A sample's line up to its value, as the library writes it."""
    metric = Metric("of", "", "untyped")
    metric.add_sample(name, dict(labels), 0)
    made = generate_latest(_Of(metric)).decode()
    return made.removesuffix("0.0\n").rpartition("\n")[2]  # a name may have other ends of lines


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
    whole = _Histograms(
        "tessella_request_seconds", "time of answered requests", labels=("model", "version")
    )
    stages = _Histograms(
        "tessella_request_stage_seconds",
        "time of answered requests, by stage; the stages of a request add up to its time",
        labels=("model", "version", "stage"),
    )
    for place, statistics in models.items():
        whole.add(place, _BOUNDS, statistics.whole.counts, statistics.whole.ns / 1e9)
        for stage, histogram in statistics.stages.items():
            stages.add((*place, stage), _BOUNDS, histogram.counts, histogram.ns / 1e9)
    yield whole
    yield stages


def _whence(models: dict[tuple[str, str], Statistics]) -> Iterator[Metric]:
    """By which doors answered requests came, and whose they were."""
    doors = CounterMetricFamily(
        "tessella_requests",
        "requests answered, by door: tensors over HTTP, pictures over HTTP, gRPC",
        labels=("model", "version", "door"),
    )
    clients = CounterMetricFamily(
        "tessella_client_requests",
        "requests answered, by the client's address",
        labels=("model", "version", "client"),
    )
    for place, statistics in models.items():
        for door in DOORS:
            doors.add_metric((*place, door), statistics.doors[door])
        for client, count in statistics.clients.items():
            clients.add_metric((*place, client), count)
    yield doors
    yield clients


def _batches(models: dict[tuple[str, str], Statistics]) -> Iterator[Metric]:
    """How large executions were, and what those of a size took of the engine: each is counted
    once, so that the seconds of all sizes are those in which the engine computed.
    """
    sizes = _Histograms("tessella_batch_size", "samples of executions", labels=("model", "version"))
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
    bounds = (*map(str, BATCHES), "+Inf")
    for place, statistics in models.items():
        executions, computed, spent_ns = ([0] * len(bounds) for _ in range(3))
        for size, spent in statistics.batches():
            bucket = bisect_left(BATCHES, size)
            executions[bucket] += spent.count
            computed[bucket] += size * spent.count
            spent_ns[bucket] += spent.ns
        sizes.add(place, bounds, executions, sum(computed))
        for bound, count, ns in zip(bounds, computed, spent_ns, strict=True):
            if count:
                samples.add_metric((*place, bound), count)
                seconds.add_metric((*place, bound), ns / 1e9)
    yield sizes
    yield samples
    yield seconds


def _instances(models: dict[tuple[str, str], Statistics]) -> Iterator[Metric]:
    """What each instance has done, of models that have several."""
    labels = ("model", "version", "instance", "device")
    up = GaugeMetricFamily(
        "tessella_instance_up", "whether an instance takes executions", labels=labels
    )
    counters: tuple[tuple[CounterMetricFamily, Callable[[InstanceCounts], float]], ...] = (
        (
            CounterMetricFamily(
                "tessella_instance_executions", "executions of an instance", labels=labels
            ),
            lambda i: i.executions,
        ),
        (
            CounterMetricFamily(
                "tessella_instance_samples", "samples that an instance computed", labels=labels
            ),
            lambda i: i.samples,
        ),
        (
            CounterMetricFamily(
                "tessella_instance_seconds", "time in which an instance computed", labels=labels
            ),
            lambda i: i.ns / 1e9,
        ),
        (
            CounterMetricFamily(
                "tessella_instance_restarts",
                "how often an instance was started again",
                labels=labels,
            ),
            lambda i: i.restarts,
        ),
    )
    for place, statistics in models.items():
        for number, instance in enumerate(statistics.instances):
            where = (*place, str(number), instance.device)
            up.add_metric(where, instance.is_up)
            for counter, read in counters:
                counter.add_metric(where, read(instance))
    yield up
    for counter, _ in counters:
        yield counter
