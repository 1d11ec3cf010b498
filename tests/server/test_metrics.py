"""``/metrics`` read by Prometheus' own parser; the description of the API; probes."""

from __future__ import annotations

import re
import time

import httpx
import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tessella.server import Server
from tessella.server.metrics import Metrics, _start
from tessella.server.statistics import Computation, InstanceCounts, Stages
from tessella.server.welcome import INFERENCE_ROUTES, MANAGEMENT_ROUTES
from tessella.tasks import verbs
from tests.support.engines import Scores, repository


def samples(http: httpx.Client) -> dict[tuple[str, str], float]:
    answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    # The parser gives counters the suffix that OpenMetrics wants; Triton's names have none.
    return {
        (
            s.name.removesuffix("_total") if s.name.startswith("nv_") else s.name,
            s.labels.get("model", "") + s.labels.get("reason", ""),
        ): s.value
        for family in text_string_to_metric_families(answer.text)
        for s in family.samples
    }


def test_metrics_follow_what_happened(http: httpx.Client) -> None:
    before = samples(http)
    for width in (8, 8, 7):
        image = np.zeros((2, 3, 8, width))
        entry = {"name": "image", "datatype": "FP32", "shape": list(image.shape)}
        body = {"inputs": [{**entry, "data": image.ravel().tolist()}]}
        http.post("/v2/models/flowers/infer", json=body)
    after = samples(http)

    def change(name: str, label: str = "flowers") -> float:
        return after[name, label] - before[name, label]

    assert change("nv_inference_request_success") == 2
    assert change("nv_inference_request_failure", "flowersOTHER") == 1
    assert change("nv_inference_request_failure", "flowersBACKEND") == 0
    assert change("nv_inference_count") == 4
    assert change("nv_inference_exec_count") == 2
    assert change("nv_inference_count", "pair") == 0
    parts = ["queue", "compute_input", "compute_infer", "compute_output"]
    spent = [change(f"nv_inference_{part}_duration_us") for part in parts]
    assert all(us > 0 for us in spent)
    assert sum(spent) < change("nv_inference_request_duration_us") < 60e6
    assert after["nv_inference_pending_request_count", "flowers"] == 0
    stats = http.get("/v2/models/flowers/stats").json()["model_stats"][0]
    assert after["nv_inference_count", "flowers"] == stats["inference_count"]


def test_process_and_host(http: httpx.Client) -> None:
    found = samples(http)
    assert found["process_resident_memory_bytes", ""] > 1e6
    assert 0 <= found["nv_cpu_utilization", ""] <= 1
    assert found["nv_cpu_memory_total_bytes", ""] > found["nv_cpu_memory_used_bytes", ""] > 0


def test_names_and_types_are_tritons(http: httpx.Client) -> None:
    lines = http.get("/metrics").text.splitlines()
    assert "# TYPE nv_inference_exec_count counter" in lines
    assert "# TYPE nv_inference_pending_request_count gauge" in lines
    assert not [line for line in lines if line.startswith(("nv_", "# ")) and "nv_" in line
                and "_total " in line]  # fmt: skip


def test_the_description_names_every_route_and_every_route_answers(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    described = {(m, p) for p, methods in paths.items() for m in methods}
    assert {(m, p) for m, p, _ in (*INFERENCE_ROUTES, *MANAGEMENT_ROUTES)} == described
    assert ("post", "/v2/repository/models/{name}/load") in described
    for method, path in described:
        path = path.replace("{model}", "flowers").replace("{name}", "pair")
        path = path.replace("{version}", "1")
        if not path.endswith("/unload"):
            answer = http.request(method, path)
            verb = path.rpartition("/")[2]
            if verb in verbs() - {"classify"}:  # of another task
                assert answer.status_code == 404
                assert f"does not {verb}" in answer.json()["error"]
                continue
            if "/systemsharedmemory/" in path:  # this server was started without
                assert (answer.status_code, "--shared-memory" in answer.text) == (501, True)
                continue
            assert answer.status_code != 404, path
            assert (answer.status_code == 200) == (not path.endswith(("/infer", "/classify")))


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready", "/v2/models/pair/ready"])
def test_probes(http: httpx.Client, path: str) -> None:
    assert http.get(path).status_code == 200
    assert http.head(path).status_code == 200


def test_the_text_is_the_librarys_own() -> None:
    """Read by its parser and written again by its writer, every line is the one that we wrote."""
    models = repository({"a": Scores(), "b.c-d": Scores()})
    models.load_all()
    chance = np.random.default_rng(0)
    for model in models.models:
        statistics = model.statistics
        statistics.instances = [InstanceCounts("cuda:0", 3, 4, 10**9), InstanceCounts("cpu")]
        for _ in range(50):
            batch, ns = int(chance.integers(1, 700)), int(chance.integers(1, 10**9))
            spent = Computation(input_ns=ns // 7, infer_ns=ns, output_ns=3)
            statistics.executed(batch, [ns, 5], spent)
            statistics.succeeded(ns * 3, Stages(compute=ns, answer=17), "grpc")
            statistics.failed(ns, "OTHER")
        statistics.shadow.compared(5, 3, 0.25)
    metrics = Metrics(models)
    text = metrics.text().decode()
    assert metrics.text().decode().count("\n") == text.count("\n"), "what is kept stays right"
    found = list(text_string_to_metric_families(text))
    names = ("nv_inference", "tessella_")
    ours = [f for f in found if f.name.startswith(names) and "disk" not in f.name]
    assert len(ours) == 25

    class Again:
        def collect(self) -> list[Metric]:
            return ours

    registry = CollectorRegistry()
    registry.register(Again())
    again = generate_latest(registry).decode()
    again = re.sub(r"(?m)(nv_\w+)_total\b", r"\1", again)
    lines = [line for line in text.splitlines() if line.removeprefix("# HELP ")
             .removeprefix("# TYPE ").startswith(names) and "disk" not in line]  # fmt: skip
    assert again.splitlines() == lines


def test_an_answer_explains_its_latency_and_so_do_the_histograms() -> None:
    """The stages add up to the server's time, which lies within what the client saw."""
    slow = Scores(delay_s=0.06)
    with (
        Server(repository({"flowers": slow})) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        http.get("/v2")  # connected
        begin = time.perf_counter()
        answer = http.post(
            "/v2/models/flowers/infer",
            content=bytes(3 * 64 * 4),
            headers={"Inference-Header-Content-Length": "0"},
        )
        seen_ms = 1000 * (time.perf_counter() - begin)
        page = http.get("/metrics").text
        stats = http.get("/v2/models/flowers/stats").json()["model_stats"][0]
    timing = re.findall(r"(\w+);dur=([\d.]+)", answer.headers["server-timing"])
    stages = {name: float(ms) for name, ms in timing}
    assert list(stages) == ["receive", "decode", "queue", "copy", "compute", "answer"]
    assert 60 <= stages["compute"] <= sum(stages.values()) <= seen_ms
    counted_ms = stats["inference_stats"]["success"]["ns"] / 1e6
    assert sum(stages.values()) == pytest.approx(counted_ms, abs=0.5)
    histogram = {
        s.labels["le"]: s.value
        for family in text_string_to_metric_families(page)
        for s in family.samples
        if s.name == "tessella_request_stage_seconds_bucket" and s.labels["stage"] == "compute"
    }
    assert (histogram["0.05"], histogram["2.5"], histogram["+Inf"]) == (0, 1, 1)


def test_a_label_may_have_any_end_of_a_line() -> None:
    names = ["\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\r", "\n", "0.0", "\\", '"']
    labels = tuple((f"l{n}", f"a{name}b") for n, name in enumerate(names))
    line = f"{_start('name', labels)}1\n"
    (family,) = text_string_to_metric_families(f"# TYPE name untyped\n{line}")
    assert [(s.name, s.labels, s.value) for s in family.samples] == [("name", dict(labels), 1)]
