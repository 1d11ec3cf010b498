"""What a running server tells of itself: one reading of its ``/metrics``, bounded and checked.

The studio asks only the host that a person named: no redirects, no proxies, little time, few bytes.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import math
import re
import ssl
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from urllib.parse import urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tessella.core.errors import TessellaError, UsageError

TIMEOUT_S = 3.0  # for the whole answer
MOST_BYTES = 2_000_000  # of it: a model takes 12 kB
MOST_MODELS = 100
MOST_INSTANCES = 64  # of a model
_OF_INSTANCE = {
    f"tessella_instance_{name}_total": name
    for name in ("executions", "samples", "seconds", "restarts")
}
_NAME = re.compile(r"(?!-)[a-z0-9-]{1,63}(\.(?!-)[a-z0-9-]{1,63})*", re.IGNORECASE)
_WHOLE = "tessella_request_seconds"
_READ = ("nv_inference_", "nv_cpu_memory_", "tessella_", "process_", "DCGM_FI_DEV_FB_")


class NotServed(TessellaError):
    """A server that does not answer, or not as one of Tessella does; the message is for people."""


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where a server listens: ``http://127.0.0.1:8000``, without a slash at the end."""

    url: str
    is_loopback: bool


def address(written: str) -> Address:
    """The address that a person wrote; without a scheme it is ``http``, without a port
    8000, of ``https`` 443.

    Raises:
        UsageError: it is none, or one that names no server: with a path, a user, or of a network's
            own services (169.254.x.x).
    """
    written = written.strip()
    try:
        parts = urlsplit(written if "://" in written else f"http://{written}")
        host = parts.hostname or ""
        port = parts.port or (443 if parts.scheme == "https" else 8000)
    except ValueError:
        raise _no_address(written) from None
    if parts.scheme not in ("http", "https") or parts.username is not None or parts.password:
        raise _no_address(written)
    if parts.path not in ("", "/") or parts.query or parts.fragment or not written.isprintable():
        raise _no_address(written)
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        # A last part of digits is an address written in another way: 2852039166, 0x7f.1
        if not _NAME.fullmatch(host) or re.fullmatch(r"0x[0-9a-f]*|\d+", host.split(".")[-1]):
            raise _no_address(written) from None
        return Address(url=f"{parts.scheme}://{host}:{port}", is_loopback=host == "localhost")
    inside = getattr(ip, "ipv4_mapped", None) or ip
    if inside.is_link_local or inside.is_multicast or inside.is_unspecified or "%" in host:
        raise _no_address(written)
    shown = f"[{host}]" if ip.version == 6 else host
    return Address(url=f"{parts.scheme}://{shown}:{port}", is_loopback=inside.is_loopback)


def _no_address(written: str) -> UsageError:
    return UsageError(
        "this is no address of a server",
        seen=repr(written[:100]),
        fix="give one like http://127.0.0.1:8000, without a path",
    )


@dataclass(frozen=True)
class Histogram:
    """How many numbers lay between bounds.

    Attributes:
        bounds: upper bounds of the buckets, upwards, the last one infinite; a number that equals
            a bound lies below it.
        counts: in each bucket.
        total: the sum of the numbers.
    """

    bounds: tuple[float, ...] = ()
    counts: tuple[float, ...] = ()
    total: float = 0.0

    @property
    def count(self) -> float:
        return sum(self.counts)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def since(self, before: Histogram) -> Histogram:
        """What was counted between two readings; all of it if the first one had none."""
        if before.bounds != self.bounds:
            return self
        counts = tuple(a - b for a, b in zip(self.counts, before.counts, strict=True))
        return Histogram(self.bounds, counts, self.total - before.total)

    def quantile(self, q: float) -> float | None:
        """The number below which a share ``q`` lies, as if a bucket's were spread evenly in it.

        Beyond the last finite bound it is that bound: at least so much. None if there are none.
        """
        left, low = q * self.count, 0.0
        if not self.count:
            return None
        for bound, count in zip(self.bounds, self.counts, strict=True):
            if count and left <= count:
                return low if math.isinf(bound) else low + (bound - low) * left / count
            left -= count
            low = low if math.isinf(bound) else bound
        return low


@dataclass
class Instance:
    """What an instance of a model has counted.

    Attributes:
        executions, samples, seconds: that it computed.
        restarts: how often it was started again.
        is_up: whether it takes executions.
    """

    device: str = ""
    executions: float = 0.0
    samples: float = 0.0
    seconds: float = 0.0
    restarts: float = 0.0
    is_up: bool = True


@dataclass
class Counts:
    """What a version of a model has counted since it was first loaded.

    Attributes:
        whole, stages: seconds of answered requests, and of each stage of them.
        batches: samples of executions.
        doors: answered requests by how they came: http, pictures, grpc.
        clients: the same by whose they were, an address or all others.
        failures: requests that were not, by Triton's reasons.
        samples, seconds: computed, and spent by the engine, by the bucket of the execution's size.
        waiting: requests that wait now.
        instances: by their number, if the model has several.
    """

    whole: Histogram = field(default_factory=Histogram)
    stages: dict[str, Histogram] = field(default_factory=dict)
    batches: Histogram = field(default_factory=Histogram)
    doors: dict[str, float] = field(default_factory=dict)
    clients: dict[str, float] = field(default_factory=dict)
    failures: dict[str, float] = field(default_factory=dict)
    samples: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    waiting: float = 0.0
    instances: dict[str, Instance] = field(default_factory=dict)

    @property
    def best_rate(self) -> float:
        """Samples a second while an engine computes, with the size of batch that had the most."""
        rates = (
            count / self.seconds[size]
            for size, count in self.samples.items()
            if self.seconds.get(size)
        )
        return max(rates, default=0.0)


Model = tuple[str, str]  # name, version


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A server at a moment.

    Attributes:
        time: seconds on this process's steady clock.
        started: when the process that runs the engines was, by its machine's clock.
        process_bytes: memory of the process that runs the engines; 0 if it does not say.
        host_bytes: of its machine, used and in all.
        gpu_bytes: of each of its GPUs, used and in all.
    """

    time: float
    started: float
    models: dict[Model, Counts]
    process_bytes: float = 0.0
    host_bytes: tuple[float, float] = (0.0, 0.0)
    gpu_bytes: dict[str, tuple[float, float]] = field(default_factory=dict)


@functools.cache
def _trusted() -> ssl.SSLContext:
    """The certificates that this machine trusts (``SSL_CERT_FILE`` names others); 20 ms to read."""
    return ssl.create_default_context()


async def read(place: Address, token: str = "") -> Reading:
    """Ask a server for its metrics.

    Raises:
        NotServed: it cannot be reached, refuses, or answers something else; says which.
    """
    headers = {"Accept-Encoding": "identity"}
    if token:
        if not (token.isascii() and token.isprintable()):
            raise NotServed("a token is of ASCII characters", fix="look at it again")
        headers["Authorization"] = f"Bearer {token}"
    try:
        async with (
            asyncio.timeout(TIMEOUT_S),
            httpx.AsyncClient(verify=_trusted(), trust_env=False, timeout=TIMEOUT_S) as client,
            client.stream("GET", f"{place.url}/metrics", headers=headers) as answer,
        ):
            _require_metrics(place, answer)
            content = bytearray()
            async for piece in answer.aiter_raw():
                content += piece
                if len(content) > MOST_BYTES:
                    raise _no_tessella(place, f"more than {MOST_BYTES} bytes")
    except (TimeoutError, httpx.TimeoutException):
        raise NotServed(
            "the server does not answer in time",
            seen=f"{place.url}, {TIMEOUT_S:.0f} s",
            fix="see whether it runs and what it does",
        ) from None
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        raise NotServed(
            "the server cannot be reached",
            seen=f"{place.url}: {str(error)[:200] or type(error).__name__}",
            fix="see whether it runs, and whether this is its address",
        ) from error
    now = time.monotonic()
    return await asyncio.to_thread(reading, content.decode("utf-8", "replace"), now, place)


def _require_metrics(place: Address, answer: httpx.Response) -> None:
    if answer.status_code == 401:
        raise NotServed(
            "the server wants its token",
            seen=place.url,
            fix="enter the one that tessella serve was given",
        )
    if answer.status_code != 200:
        raise _no_tessella(place, f"status {answer.status_code}")
    if answer.headers.get("content-encoding", "identity") != "identity":
        raise _no_tessella(place, "a compressed answer")


def _no_tessella(place: Address, seen: str) -> NotServed:
    return NotServed(
        "this does not answer as a server of Tessella does",
        seen=f"{place.url}/metrics: {seen}",
        fix="give the address of a server that this version's tessella serve started",
    )


def reading(text: str, now: float, place: Address) -> Reading:
    """A reading from Prometheus' text.

    Raises:
        NotServed: it is not what a server of ours writes.
    """
    if _WHOLE not in text:
        raise _no_tessella(place, f"no {_WHOLE}")
    try:
        return _reading(_samples(text), now)
    except (ValueError, KeyError, IndexError) as error:
        raise _no_tessella(place, str(error)[:100]) from error


def _samples(text: str) -> Iterator[Sample]:
    """The samples that a reading is made of. Lines that others read cost a quarter of the time."""
    wanted = "\n".join(line for line in text.split("\n") if line.startswith(_READ))
    for family in text_string_to_metric_families(wanted + "\n"):
        for sample in family.samples:
            if not (math.isfinite(sample.value) and sample.value >= 0):
                raise ValueError(f"{sample.name} is {sample.value}")
            yield sample


def _reading(samples: Iterable[Sample], now: float) -> Reading:
    models: defaultdict[Model, Counts] = defaultdict(Counts)
    buckets: defaultdict[tuple[Model, str], dict[float, float]] = defaultdict(dict)
    totals: dict[tuple[Model, str], float] = {}
    machine: dict[str, float] = {}
    gpus: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for sample in samples:
        name, labels, value = sample.name, sample.labels, sample.value
        if name.startswith("DCGM_FI_DEV_FB_"):
            gpus[labels["gpu"][:20]][name] = value * (1 << 20)
        if "model" not in labels:
            machine[name] = value
            continue
        model = labels["model"], labels["version"]
        if len(models) >= MOST_MODELS and model not in models:
            raise ValueError(f"more than {MOST_MODELS} versions of models")
        counts = models[model]
        series, _, kind = name.rpartition("_")
        if series in _HISTOGRAMS and kind == "bucket":
            buckets[model, series + labels.get("stage", "")][float(labels["le"])] = value
        elif series in _HISTOGRAMS and kind == "sum":
            totals[model, series + labels.get("stage", "")] = value
        elif name == "tessella_requests_total":
            counts.doors[labels["door"]] = value
        elif name == "tessella_client_requests_total":
            counts.clients[labels["client"]] = value
        elif name == "nv_inference_request_failure":
            counts.failures[labels["reason"]] = value
        elif name == "tessella_engine_samples_total":
            counts.samples[labels["batch"]] = value
        elif name == "tessella_engine_seconds_total":
            counts.seconds[labels["batch"]] = value
        elif name == "nv_inference_pending_request_count":
            counts.waiting = value
        elif name.startswith("tessella_instance_"):
            _count_instance(counts.instances, name, labels, value)
    for (model, series), upto in buckets.items():
        histogram = _histogram(upto, totals[model, series])
        if series == _WHOLE:
            models[model].whole = histogram
        elif series == "tessella_batch_size":
            models[model].batches = histogram
        else:
            models[model].stages[series.removeprefix("tessella_request_stage_seconds")] = histogram
    return Reading(
        time=now,
        started=machine.get("process_start_time_seconds", 0.0),
        models=dict(models),
        process_bytes=machine.get("process_resident_memory_bytes", 0.0),
        host_bytes=(
            machine.get("nv_cpu_memory_used_bytes", 0.0),
            machine.get("nv_cpu_memory_total_bytes", 0.0),
        ),
        gpu_bytes={
            gpu: (found.get("DCGM_FI_DEV_FB_USED", 0.0), sum(found.values()))
            for gpu, found in sorted(gpus.items())
        },
    )


def _count_instance(
    found: dict[str, Instance], name: str, labels: dict[str, str], value: float
) -> None:
    if len(found) >= MOST_INSTANCES and labels["instance"] not in found:
        raise ValueError(f"more than {MOST_INSTANCES} instances of a model")
    instance = found.setdefault(labels["instance"], Instance(labels["device"][:20]))
    if name == "tessella_instance_up":
        instance.is_up = value == 1
    elif name in _OF_INSTANCE:
        setattr(instance, _OF_INSTANCE[name], value)


_HISTOGRAMS = (_WHOLE, "tessella_request_stage_seconds", "tessella_batch_size")


def _histogram(upto: dict[float, float], total: float) -> Histogram:
    bounds = tuple(sorted(upto))
    if math.isfinite(bounds[-1]):
        raise ValueError("a histogram has no last bucket")
    counts = tuple(upto[b] - upto[a] for a, b in pairwise(bounds))
    if any(count < 0 for count in counts):
        raise ValueError("a histogram falls")
    return Histogram(bounds, (upto[bounds[0]], *counts), total)
