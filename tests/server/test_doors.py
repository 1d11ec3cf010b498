"""TLS, gRPC, shared memory and traces on a server of one process and of several."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton

from tessella.core.errors import UsageError
from tessella.server import Doors, Server
from tessella.server.listening import bind
from tests.support.certificates import self_signed
from tests.support.collector import Collector, attributes_of
from tests.support.engines import expected_scores, repository
from tests.support.plans.linear import linear_plan

ROOT = Path(__file__).parents[2]
IMAGES = np.random.default_rng(1).normal(size=(2, 3, 8, 8)).astype(np.float32)
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
pytestmark = pytest.mark.timeout(280)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A certificate for localhost that signs itself, and its key."""
    return self_signed(tmp_path_factory.mktemp("tls"))


def grpc_port(pid: int, url: str) -> int:
    """Where a server with two doors listens beside its URL."""
    while True:
        server = psutil.Process(pid)
        doors = {
            connection.laddr.port
            for process in (server, *server.children(recursive=True))
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        } - {int(url.rpartition(":")[2])}
        if doors:
            (port,) = doors
            return port
        time.sleep(0.01)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as listening:
        yield listening


@pytest.fixture(params=[0, 2])
def served(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    certificate: tuple[str, str],
    collector: Collector,
) -> Iterator[tuple[str, int]]:
    """A server's URL and the port of its gRPC, with and without acceptors."""
    plan = linear_plan().save(tmp_path / "flowers.plan")
    cert, key = certificate
    doors = {"grpc_port": 0, "tls_cert": cert, "tls_key": key, "shared_memory": True}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.plans.linear", str(plan), str(request.param),
         json.dumps(doors)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
             "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
             "OTEL_BSP_SCHEDULE_DELAY": "600000"},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        yield url, grpc_port(process.pid, url)
        # one that never shakes hands, for which asyncio would wait 60 s
        with socket.create_connection(("localhost", int(url.rpartition(":")[2]))):
            process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=50)
        assert process.returncode == 0, err
        check_traces(collector)  # which came when it ended
    finally:
        process.kill()
        process.communicate()


def check_traces(collector: Collector) -> None:
    stages = {span.parent_span_id for _, span in collector.spans}
    found = {span.name: (who, span) for who, span in collector.spans if span.span_id in stages}
    assert len([s for _, s in collector.spans if s.span_id in stages]) == 5
    who, http = found["POST /v2/models/{model}/infer"]
    assert who["service.name"] == "tessella"
    assert http.trace_id == bytes.fromhex(PARENT.split("-")[1])
    assert http.parent_span_id == bytes.fromhex(PARENT.split("-")[2])
    assert attributes_of(http)["url.scheme"] == "https"
    under = [s for _, s in collector.spans if s.parent_span_id == http.span_id]
    assert {"queue", "copy", "compute", "answer"} <= {s.name for s in under}
    assert all(
        http.start_time_unix_nano <= s.start_time_unix_nano < s.end_time_unix_nano
        and s.end_time_unix_nano <= http.end_time_unix_nano
        for s in under
    )
    _, call = found["inference.GRPCInferenceService/ModelInfer"]
    assert attributes_of(call)["tessella.batch.size"] == len(IMAGES)


def test_all_doors_at_once(served: tuple[str, int], certificate: tuple[str, str]) -> None:
    url, port = served
    trusted = ssl.create_default_context(cafile=certificate[0])
    url = url.replace("127.0.0.1", "localhost")
    assert url.startswith("https://localhost:")
    name = f"tessella_test_{secrets.token_hex(8)}"
    memory = SharedMemory(name, create=True, size=4096)
    try:
        memory.buf[: IMAGES.nbytes] = IMAGES.tobytes()
        with httpx.Client(base_url=url, verify=trusted, timeout=60) as http:
            asked = {"key": f"/{name}", "offset": 0, "byte_size": 4096}
            register = "/v2/systemsharedmemory/region/r/register"
            http.post(register, json=asked).raise_for_status()
            named = {"Inference-Header-Content-Length": "0", "traceparent": PARENT}
            path = "/v2/models/flowers/infer"
            http.post(path, content=IMAGES.tobytes(), headers=named).raise_for_status()
        for _ in range(4):  # several connections: each acceptor knows the region
            with triton.InferenceServerClient(
                f"localhost:{port}", ssl=True, root_certificates=certificate[0]
            ) as client:
                assert list(client.get_system_shared_memory_status().regions) == ["r"]
                tensor = triton.InferInput("image", list(IMAGES.shape), "FP32")
                tensor.set_shared_memory("r", IMAGES.nbytes)
                scores = client.infer("flowers", [tensor]).as_numpy("scores")
                np.testing.assert_allclose(scores, expected_scores(IMAGES), rtol=1e-3, atol=1e-3)
    finally:
        memory.close()
        memory.unlink()


def test_settings_that_cannot_be(tmp_path: Path, certificate: tuple[str, str]) -> None:
    cert, _ = certificate
    with pytest.raises(UsageError, match="a certificate and its key"):
        Doors(tls_cert=cert)
    for key in (str(tmp_path / "nothing.pem"), cert):
        with pytest.raises(UsageError, match="cannot be used"):
            Server(repository({}), doors=Doors(tls_cert=cert, tls_key=key))
    with bind("127.0.0.1", 0) as other:
        other.listen()
        taken = Doors(grpc_port=other.getsockname()[1])
        with pytest.raises(UsageError, match="0 takes a free one"):
            Server(repository({}), doors=taken)
