"""Traces: what spans say of a request, whose they are, and what a collector cannot do to a server.

``test_doors`` exports those of servers in processes of their own.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from opentelemetry.sdk import environment_variables
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from tritonclient.utils import InferenceServerException

from tessella.core.errors import UsageError
from tessella.server import Doors, Server, tracing
from tessella.server.answers import Answer
from tessella.server.listening import bind
from tessella.server.short_way import ShortRequest
from tessella.server.statistics import STAGES, Stages
from tessella.server.tracing import Tracing
from tests.support.engines import Scores, repository

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).parents[2]
DELAY_S = 0.02  # of an execution
IMAGES = np.random.default_rng(1).normal(size=(3, 3, 8, 8)).astype(np.float32)
BROKEN = np.full_like(IMAGES, 666)
RAW = {"Inference-Header-Content-Length": "0"}
TRACE, SPAN = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
PARENT = f"00-{TRACE:032x}-{SPAN:016x}-01"
PATH = "/v2/models/flowers/infer"


class Place:
    """A server with traces, and its clients."""

    def __init__(self, server: Server, memory: InMemorySpanExporter) -> None:
        self.http = httpx.Client(base_url=server.url, timeout=60)
        assert server.grpc_address is not None
        self.grpc = triton.InferenceServerClient(server.grpc_address)
        self.memory = memory

    def infer(self, images: np.ndarray = IMAGES, headers: Any = None) -> httpx.Response:
        lines = [*RAW.items(), *(headers or [])]
        return self.http.post(PATH, content=images.tobytes(), headers=lines)

    def requests(self, count: int) -> list[tuple[ReadableSpan, list[ReadableSpan]]]:
        """The spans of so many requests, which are all there are, each with its stages."""
        until = time.monotonic() + 50
        while len(roots := _roots(spans := self.memory.get_finished_spans())) < count:
            assert time.monotonic() < until, spans
            time.sleep(0.005)
        self.memory.clear()
        assert len(roots) == count
        assert spans[-1] is roots[-1]  # whose stages came before it
        return [
            (root, [s for s in spans if s.parent is not None
                    and s.parent.span_id == root.context.span_id])
            for root in roots
        ]  # fmt: skip


def _roots(spans: tuple[ReadableSpan, ...]) -> list[ReadableSpan]:
    return [s for s in spans if s.kind == SpanKind.SERVER]


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    memory = InMemorySpanExporter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
        traced = Tracing([memory])
    models = repository({"flowers": Scores(delay_s=DELAY_S)})
    with Server(models, doors=Doors(grpc_port=0), tracing=traced) as server:
        made = Place(server, memory)
        with made.http, made.grpc:
            yield made


def stages_ms(header: str) -> dict[str, float]:
    pairs = (part.strip().split(";dur=") for part in header.split(","))
    return {name: float(ms) for name, ms in pairs}


def test_the_stages_lie_end_to_end_and_are_what_the_client_was_told(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    short: list[bool] = []
    run = ShortRequest.run
    monkeypatch.setattr(ShortRequest, "run", lambda self: short.append(run(self)) or short[-1])
    place.infer()  # from now on its head is known
    for headers in ([], [("traceparent", PARENT)]):
        place.requests(1)
        before_ns = time.time_ns()
        answer = place.infer(headers=headers)
        ((root, stages),) = place.requests(1)
        after_ns = time.time_ns()  # a span ends after its client has the answer
        told = stages_ms(answer.headers["server-timing"])
        assert [s.name for s in stages] == [s for s in STAGES if told[s] > 0]
        for span in stages:
            assert (span.end_time - span.start_time) / 1e6 == pytest.approx(
                told[span.name], abs=1e-3
            )
        ends = [root.start_time, *(s.end_time for s in stages)]
        assert [s.start_time for s in stages] == ends[:-1]
        assert before_ns <= root.start_time < ends[-1] <= root.end_time <= after_ns
        compute = next(s for s in stages if s.name == "compute")
        assert compute.end_time - compute.start_time >= DELAY_S * 1e9
        place.infer()
    place.requests(1)
    assert short == [True, True, True]  # who names a parent takes the long way


def test_a_span_says_what_was_asked_and_answered(place: Place) -> None:
    answer = place.infer()
    path = "/v2/models/flowers/versions/1/infer"
    place.http.post(path, content=IMAGES.tobytes(), headers=RAW)
    (first, _), (second, _) = place.requests(2)
    assert first.name == "POST /v2/models/{model}/infer"
    assert second.name == "POST /v2/models/{model}/versions/{version}/infer"
    assert second.attributes["url.path"] == path
    assert dict(first.attributes) == {
        "http.request.method": "POST",
        "http.route": "/v2/models/{model}/infer",
        "http.request.body.size": IMAGES.nbytes,
        "http.response.status_code": 200,
        "url.path": PATH,
        "url.scheme": "http",
        "tessella.model.name": "flowers",
        "tessella.model.version": "1",
        "tessella.batch.size": 3,
        "tessella.response.bytes": len(answer.content),
    }
    assert first.resource.attributes["service.name"] == "tessella"


def test_errors_are_the_server_s_or_the_client_s(place: Place) -> None:
    assert place.infer(BROKEN).status_code == 500
    assert place.http.post(PATH, content=b"{").status_code == 400
    assert place.http.post("/v2/models/weeds/infer", content=b"{}").status_code == 404
    (broken, _), (wrong, _), (unknown, none) = place.requests(3)
    assert broken.status.status_code == StatusCode.ERROR
    assert broken.attributes["error.type"] == "500"
    assert [s.status.status_code for s in (wrong, unknown)] == [StatusCode.UNSET] * 2
    assert unknown.attributes["http.response.status_code"] == 404
    assert not none


def test_only_inference_of_who_was_let_in_is_traced(place: Place) -> None:
    for path in ("/metrics", "/v2", "/v2/health/ready", "/v2/models/flowers/ready"):
        assert place.http.get(path).status_code == 200
    assert place.infer(headers=[("Host", "evil.example")]).status_code == 421
    place.infer()
    place.requests(1)


def test_a_client_s_span_is_the_parent(place: Place) -> None:
    place.infer(headers=[("traceparent", PARENT), ("tracestate", "a=1"), ("tracestate", "b=2")])
    ((root, stages),) = place.requests(1)
    assert (root.parent.trace_id, root.parent.span_id) == (TRACE, SPAN)
    assert root.parent.is_remote
    assert dict(root.context.trace_state) == {"a": "1", "b": "2"}
    assert {s.context.trace_id for s in stages} == {TRACE}


@pytest.mark.parametrize(
    "headers",
    [
        [("traceparent", b"")],
        [("traceparent", b"\xff" * 55)],
        [("traceparent", PARENT[:-1].encode())],
        [("traceparent", PARENT.encode() + b"0")],
        [("traceparent", PARENT.upper().encode())],
        [("traceparent", b"ff" + PARENT[2:].encode())],
        [("traceparent", f"00-{0:032x}-{SPAN:016x}-01".encode())],
        [("traceparent", f"00-{TRACE:032x}-{0:016x}-01".encode())],
        [("traceparent", b"01" + PARENT[2:].encode() + b"-" + b"x" * 5000)],
        [("traceparent", PARENT.encode()), ("traceparent", PARENT.encode())],
        [("tracestate", b"a=1")],
    ],
    ids=str,
)
def test_what_names_no_parent_is_passed_over(
    headers: list[tuple[str, bytes]], place: Place
) -> None:
    assert place.infer(headers=headers).status_code == 200
    ((root, _),) = place.requests(1)
    assert root.parent is None
    assert root.context.trace_id != TRACE
    assert not root.context.trace_state


@pytest.mark.parametrize("state", [b"a=" + b"x" * 600, b"=,\xff=,a", b"a=1," * 200], ids=len)
def test_a_state_that_is_none_leaves_the_parent(state: bytes, place: Place) -> None:
    place.infer(headers=[("traceparent", PARENT.encode()), ("tracestate", state)])
    ((root, _),) = place.requests(1)
    assert root.parent.span_id == SPAN
    assert not root.context.trace_state


def test_calls_of_grpc(place: Place) -> None:
    def tensor(images: np.ndarray = IMAGES) -> triton.InferInput:
        made = triton.InferInput("image", list(images.shape), "FP32")
        made.set_data_from_numpy(images)
        return made

    named = {"headers": {"traceparent": PARENT}}
    place.grpc.infer("flowers", [tensor()], **named)
    place.grpc.infer("flowers", [tensor()], **named, compression_algorithm="gzip")
    for model, images in (("flowers", BROKEN), ("weeds", IMAGES)):
        with pytest.raises(InferenceServerException):
            place.grpc.infer(model, [tensor(images)])
    answers: list[Any] = []
    place.grpc.start_stream(lambda result, error: answers.append(result), **named)
    for _ in range(2):
        place.grpc.async_stream_infer("flowers", [tensor()])
    place.grpc.stop_stream()
    assert len(answers) == 2
    found = place.requests(6)
    service = "inference.GRPCInferenceService"
    assert [root.name for root, _ in found] == [
        *[f"{service}/ModelInfer"] * 4, *[f"{service}/ModelStreamInfer"] * 2
    ]  # fmt: skip
    codes = [root.attributes["rpc.response.status_code"] for root, _ in found]
    assert codes == ["OK", "OK", "INTERNAL", "NOT_FOUND", "OK", "OK"]
    for root, stages in found[:2] + found[4:]:
        assert root.parent.span_id == SPAN
        assert root.attributes["rpc.system.name"] == "grpc"
        assert root.attributes["tessella.batch.size"] == 3
        assert sum(s.end_time - s.start_time for s in stages) >= DELAY_S * 1e9
        assert stages[-1].end_time <= root.end_time
    errors = [root.status.status_code == StatusCode.ERROR for root, _ in found]
    assert errors == [False, False, True, False, False, False]


def test_the_page_names_what_spans_have(place: Place) -> None:
    page = (ROOT / "docs" / "deploying.md").read_text()
    section = page.partition("## Traces")[2].partition("\n## ")[0]
    place.infer()
    ((root, _),) = place.requests(1)
    ours = {name for name in root.attributes if name.startswith("tessella.")}
    assert set(re.findall(r"`(tessella\.[a-z.]+)`", section)) == ours
    named = section.partition("`Server-Timing`")[2].partition("It has")[0]
    assert tuple(re.findall(r"`(\w+)`", named)) == STAGES
    variables = {name for name in vars(environment_variables) if name.startswith("OTEL_")}
    assert set(re.findall(r"OTEL_\w+", section)) <= variables
    assert f"{tracing.CLOSE_S:.0f} s" in section


# --- without a server -----------------------------------------------------------------------------


def answered(traced: Tracing, *lines: tuple[bytes, bytes]) -> None:
    trace = traced.request("flowers", None, "infer", lines)
    trace.stages = Stages(receive=1, compute=5)
    trace.answered(Answer(body=b"x"))


@pytest.mark.parametrize(
    ("sampler", "flags", "is_kept"),
    [
        ("always_off", b"01", False),
        ("parentbased_always_on", b"00", False),
        ("parentbased_always_off", b"01", True),
    ],
)
def test_the_environment_says_which_are_sampled(
    sampler: str, flags: bytes, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    memory = InMemorySpanExporter()
    traced = Tracing([memory])
    traced.open()
    answered(traced, (b"traceparent", PARENT[:-2].encode() + flags))
    memory.shutdown = lambda: None  # type: ignore[method-assign]
    traced.close()
    assert len(memory.get_finished_spans()) == (3 if is_kept else 0)


@pytest.mark.parametrize("is_silent", [False, True], ids=["refuses", "is silent"])
def test_a_collector_that_is_away_neither_blocks_nor_floods_the_log(
    is_silent: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "CLOSE_S", 0.3)
    with bind("127.0.0.1", 0) as nobody:
        if is_silent:
            nobody.listen()
        for name, value in {
            "EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{nobody.getsockname()[1]}",
            "EXPORTER_OTLP_TIMEOUT": "50" if is_silent else "0.1",
            "BSP_SCHEDULE_DELAY": "1",
            "BSP_MAX_QUEUE_SIZE": "50",
            "BSP_MAX_EXPORT_BATCH_SIZE": "3",
        }.items():
            monkeypatch.setenv(f"OTEL_{name}", value)
        traced = Tracing()
        traced.open()
        since_s = time.monotonic()
        for _ in range(500):
            answered(traced)
        traced.close()
        assert time.monotonic() - since_s < 30
    told = [record.msg for record in caplog.records]
    assert len(told) == len(set(told))
    if is_silent:
        assert any("not exported in time" in text for text in told)
    else:
        assert any("dropped so far" in text for text in told)
        assert any(text.startswith("Failed to export") for text in told)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("OTEL_TRACES_EXPORTER", "smoke", "'smoke'"),
        ("OTEL_BSP_SCHEDULE_DELAY", "-5", "OTEL_BSP_SCHEDULE_DELAY"),
    ],
)
def test_settings_that_cannot_be(
    name: str, value: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=told):
        Tracing()


def test_who_lacks_the_library_is_told_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.startswith("opentelemetry.sdk")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=r"tessella\[tracing\]"):
        Tracing([])
