"""OpenTelemetry traces: a span for each inference request, with a child for each of its stages.

An event loop only notes what it knows when it has answered. A thread makes spans of that and
exports them, so a collector that is slow or away holds up no answer: what it cannot take is dropped
and counted. Which are sampled and where they go is said by OpenTelemetry's environment variables.

Its SDK is an extra, ``pip install tessella[tracing]``, and imported only where traces are on.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING, Protocol

from tessella.core.errors import UsageError
from tessella.core.version import VERSION
from tessella.server.answers import Answer
from tessella.server.protocol import InferRequest
from tessella.server.statistics import STAGES, Stages

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import SpanExporter

log = logging.getLogger(__name__)

EXTRA = "pip install 'tessella[tracing]'"
# A version-00 ``traceparent`` has 55 bytes, later ones may have more; of ``tracestate`` everybody
# has to pass on 512 (W3C Trace Context). Longer ones are ignored.
MOST_PARENT_BYTES, MOST_STATE_BYTES = 128, 512
MOST_PATH = 256  # characters
RPC_CODE = "rpc.response.status_code"
QUIET_S = 60.0  # between two messages of one kind in the log
CLOSE_S = 3.0  # how long a server that stops waits for what is not exported yet

Lines = Sequence[tuple[bytes, bytes]]


class Named(Protocol):
    """A model."""

    name: str
    version: str


def require_opentelemetry() -> None:
    """Import the library; processes that are forked afterwards share it.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import opentelemetry.sdk.trace.export.in_memory_span_exporter
        import opentelemetry.trace.propagation.tracecontext  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "traces need OpenTelemetry, which is not installed", seen=str(error), fix=EXTRA
        ) from error


@dataclass(eq=False, slots=True, kw_only=True)
class Trace:
    """What the span of one request will say.

    Attributes:
        begun_ns: when the request's head was there, on ``perf_counter``'s clock.
        attributes: of the span.
        parent: the ``traceparent`` and ``tracestate`` that the client has sent.
        code: the status of gRPC for one of HTTP; None for a request over HTTP.
        model: that answers, once that is known.
        stages: of the request, once they are counted.
    """

    tracing: Tracing
    begun_ns: int
    name: str
    attributes: dict[str, str | int]
    parent: tuple[bytes, bytes]
    code: Callable[[int], str] | None = None
    model: Named | None = None
    stages: Stages | None = None
    ended_ns: int = 0
    epoch_ns: int = 0  # of ``perf_counter``
    is_error: bool = False

    def asks(self, request: InferRequest) -> None:
        """The request was read."""
        for array in request.arrays.values():
            self.attributes["tessella.batch.size"] = len(array)
            return
        for files in request.images.values():
            self.attributes["tessella.batch.size"] = len(files)

    def answered(self, answer: Answer) -> None:
        """The request has its answer: hand its span to the thread."""
        self.ended_ns = perf_counter_ns()
        self.epoch_ns = time.time_ns() - self.ended_ns
        attributes = self.attributes
        if self.model is not None:
            attributes["tessella.model.name"] = self.model.name
            attributes["tessella.model.version"] = self.model.version
            self.model = None  # it may be unloaded meanwhile
        code = answer.status if self.code is None else self.code(answer.status)
        attributes["http.response.status_code" if self.code is None else RPC_CODE] = code
        attributes["tessella.response.bytes"] = len(answer.body)
        self.is_error = answer.status >= 500
        if self.is_error:
            attributes["error.type"] = str(code)
        self.tracing.note(self)


class Tracing:
    """Makes spans and exports them, in a thread between ``open`` and ``close``.

    Args:
        exporters: where to; by default those of ``OTEL_TRACES_EXPORTER``, which are ``otlp`` (over
            HTTP, unless ``OTEL_EXPORTER_OTLP_PROTOCOL`` says ``grpc``), ``console``, ``none``, or
            what else is installed.
        scheme: of the server's URL.

    Raises:
        UsageError: OpenTelemetry or an exporter is not installed, or cannot be made.
    """

    def __init__(
        self, exporters: Sequence[SpanExporter] | None = None, *, scheme: str = "http"
    ) -> None:
        require_opentelemetry()
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._scheme = scheme
        self._exporters = _by_environment() if exporters is None else list(exporters)
        self._made = InMemorySpanExporter()
        provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._made))
        self._tracer = provider.get_tracer("tessella", VERSION)
        self._propagator = TraceContextTextMapPropagator()
        self._noted: deque[Trace] = deque()
        self._most = _whole("OTEL_BSP_MAX_QUEUE_SIZE", 2048)
        self._batch = _whole("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512)
        self._delay_s = _whole("OTEL_BSP_SCHEDULE_DELAY", 5000) / 1e3
        self._lost = self._told = 0
        self._wake = threading.Event()
        self._is_closing = self._is_late = False
        self._thread = threading.Thread(target=self._work, name="traces", daemon=True)
        _keep_quiet()

    def open(self) -> None:
        """Start the thread, in the process that answers."""
        self._thread.start()

    def close(self) -> None:
        """Export what is left, within ``CLOSE_S``; blocks as long."""
        self._is_closing = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)
        self._is_late = True
        for exporter in self._exporters:
            exporter.shutdown()  # ends its waiting, too
        if self._noted:
            log.error("%d traces were not exported in time", len(self._noted))

    # --- in the event loop ------------------------------------------------------------------------

    def request(
        self,
        name: str,
        version: str | None,
        verb: str,
        lines: Lines,
        *,
        method: str = "POST",
        nbytes: int | None = None,
        begun_ns: int | None = None,
    ) -> Trace:
        """The trace of a request over HTTP that has been let in.

        Args:
            verb: as in the path: ``infer``, or a task's.
            lines: its headers.
            nbytes: of its body, if that is known.
        """
        chosen = f"/versions/{version}" if version else ""
        route = f"/v2/models/{{model}}{'/versions/{version}' if version else ''}/{verb}"
        attributes: dict[str, str | int] = {
            "http.request.method": method,
            "http.route": route,
            "url.path": f"/v2/models/{name}{chosen}/{verb}"[:MOST_PATH],
            "url.scheme": self._scheme,
        }
        if nbytes is not None:
            attributes["http.request.body.size"] = nbytes
        return Trace(
            tracing=self,
            begun_ns=perf_counter_ns() if begun_ns is None else begun_ns,
            name=f"{method} {route}",
            attributes=attributes,
            parent=_parent(lines),
        )

    def call(
        self,
        head: Mapping[bytes, bytes],
        code: Callable[[int], str],
        *,
        begun_ns: int | None = None,
    ) -> Trace:
        """The trace of a call of gRPC, or of one message of a stream.

        Args:
            head: its metadata; the path is one that is known.
            code: the status of gRPC for one of HTTP.
        """
        method = head[b":path"][1:].decode("latin-1")
        return Trace(
            tracing=self,
            begun_ns=perf_counter_ns() if begun_ns is None else begun_ns,
            name=method,
            attributes={"rpc.system.name": "grpc", "rpc.method": method},
            parent=_parent(list(head.items())),
            code=code,
        )

    def note(self, trace: Trace) -> None:
        """Have a span made; dropped where too many wait already."""
        if len(self._noted) >= self._most:
            self._lost += 1
            return
        self._noted.append(trace)
        if len(self._noted) * len(STAGES) >= self._batch and not self._wake.is_set():
            self._wake.set()

    # --- in the thread ----------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._is_closing:
            self._wake.wait(self._delay_s)
            self._wake.clear()
            self._export_all()
        self._export_all()

    def _export_all(self) -> None:
        while self._noted and not self._is_late:
            try:
                while self._noted and len(self._made.get_finished_spans()) < self._batch:
                    self._make(self._noted.popleft())
                spans = self._made.get_finished_spans()
                self._made.clear()
                for exporter in self._exporters if spans else ():
                    exporter.export(spans)
            except Exception:  # the next ones may be better
                log.exception("traces cannot be exported")
            if self._lost > self._told:
                self._told = self._lost
                log.warning("%d traces were dropped so far: %d waited", self._lost, self._most)

    def _make(self, trace: Trace) -> None:
        """Make the spans of one request, which is over. The stages lie end to end in their order:
        they are sums of what may have come in several parts.
        """
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        carrier = dict(zip(("traceparent", "tracestate"), map(_text, trace.parent)))
        above = self._propagator.extract(carrier, Context())
        at_ns = trace.begun_ns + trace.epoch_ns
        span = self._tracer.start_span(
            trace.name,
            above,
            SpanKind.SERVER,
            attributes=trace.attributes,
            start_time=at_ns,
        )
        if span.is_recording():
            inside = set_span_in_context(span, above)
            for stage in STAGES if trace.stages is not None else ():
                if (ns := getattr(trace.stages, stage)) > 0:
                    self._tracer.start_span(stage, inside, start_time=at_ns).end(at_ns + ns)
                    at_ns += ns
            if trace.is_error:
                span.set_status(StatusCode.ERROR)
        span.end(max(at_ns, trace.ended_ns + trace.epoch_ns))


def _parent(lines: Lines) -> tuple[bytes, bytes]:
    """What a client says of its own span: nothing, if it says so twice or at great length."""
    parents = [value for name, value in lines if name == b"traceparent"]
    if len(parents) != 1 or len(parents[0]) > MOST_PARENT_BYTES:
        return b"", b""
    state = b",".join(value for name, value in lines if name == b"tracestate")
    return parents[0], state if len(state) <= MOST_STATE_BYTES else b""


def _text(value: bytes) -> str:
    return value.decode("latin-1")


# --- OpenTelemetry's environment ------------------------------------------------------------------


def _by_environment() -> list[SpanExporter]:
    """The exporters that ``OTEL_TRACES_EXPORTER`` names."""
    made = []
    for asked in os.environ.get("OTEL_TRACES_EXPORTER", "otlp").split(","):
        name = asked.strip() or "otlp"
        if name == "none":
            continue
        if name == "otlp":
            of_all = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
            protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or of_all
            name = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
        try:
            group = "opentelemetry_traces_exporter"
            (found,) = importlib.metadata.entry_points(group=group, name=name)
            made.append(found.load()())
        except Exception as error:
            raise UsageError(
                f"the exporter of traces {name!r} cannot be made",
                seen=str(error)[:200],
                fix=f"install it ({EXTRA} has otlp over HTTP), or correct the variables OTEL_…",
            ) from error
    return made


def _whole(name: str, default: int) -> int:
    """A variable that is a number greater than 0."""
    text = os.environ.get(name) or str(default)
    if not text.isdecimal() or not 0 < int(text) < 1 << 31:
        raise UsageError(f"{name} is no number", seen=text[:40], fix=f"use {name}={default}")
    return int(text)


def _resource() -> Resource:
    """Who exports: as ``OTEL_SERVICE_NAME`` and ``OTEL_RESOURCE_ATTRIBUTES`` say."""
    from opentelemetry.sdk.resources import Resource

    told = Resource.create()
    ours: dict[str, str | int] = {"service.version": VERSION, "process.pid": os.getpid()}
    more = {name: value for name, value in ours.items() if name not in told.attributes}
    if str(told.attributes["service.name"]).startswith("unknown_service"):
        more["service.name"] = "tessella"
    return told.merge(Resource(more))


class _Seldom(logging.Filter):
    """Lets a message through once in ``QUIET_S``, whatever it tells of."""

    def __init__(self) -> None:
        super().__init__()
        self._told_s: dict[object, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now_s = time.monotonic()
        if now_s - self._told_s.get(record.msg, -QUIET_S) < QUIET_S:
            return False
        if len(self._told_s) < 100:
            self._told_s[record.msg] = now_s
        return True


def _keep_quiet() -> None:
    """Let OpenTelemetry, and this module, say each thing once a minute: an exporter whose collector
    is away says so at every attempt, and a parser of headers at each that is malformed.
    """
    names = [n for n in logging.root.manager.loggerDict if n.startswith("opentelemetry.")]
    for logger in map(logging.getLogger, (__name__, *names)):
        for earlier in [known for known in logger.filters if isinstance(known, _Seldom)]:
            logger.removeFilter(earlier)
        logger.addFilter(_Seldom())
