"""A server from start to end, on a real plan: ports, signals, reloading while it is used."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from tessella import runtime
from tessella.core.errors import ArtifactError, CorruptArtifact, UsageError
from tessella.server import Repository, Server, serve
from tests.support.engines import Scores, expected_scores, repository
from tests.support.plans.linear import linear_plan
from tests.support.wires import CONTINUE, until_refused

pytestmark = pytest.mark.timeout(280)
ROOT = Path(__file__).parents[2]


@pytest.fixture
def plan_path(tmp_path: Path) -> Path:
    return linear_plan().save(tmp_path / "flowers.plan")


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    with httpx.Client(verify=False, timeout=60) as client:
        yield client


def infer(http: httpx.Client, url: str, images: np.ndarray) -> np.ndarray:
    entry = {"name": "image", "datatype": "FP32", "shape": list(images.shape)}
    body = {"inputs": [{**entry, "data": images.ravel().tolist()}]}
    answer = http.post(f"{url}/v2/models/flowers/infer", json=body)
    assert answer.status_code == 200, answer.text
    return np.reshape(answer.json()["outputs"][0]["data"], (-1, 4))


def until(condition: Callable[[], bool]) -> None:
    """Return as soon as it is so; the limit of a test is that of waiting."""
    while not condition():
        time.sleep(0.005)


def images(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, 3, 8, 8)).astype(np.float32)


def test_a_real_plan_under_many_clients(plan_path: Path) -> None:
    """Answers stay right when buckets, arena and threads are shared: joined, split, of any size."""
    sizes = [[1 + (seed + round_number) % 11 for round_number in range(5)] for seed in range(16)]
    with Server({"flowers": plan_path}, max_delay_us=500) as server:

        def client(seed: int) -> None:
            with httpx.Client(verify=False, timeout=60) as http:
                for size in sizes[seed]:
                    batch = images(size, seed)
                    np.testing.assert_allclose(
                        infer(http, server.url, batch), expected_scores(batch), rtol=1e-3, atol=1e-3
                    )

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(client, range(16)))
        stats = httpx.get(f"{server.url}/v2/models/flowers/stats", verify=False, timeout=60).json()
    counted = stats["model_stats"][0]
    assert counted["inference_stats"]["success"]["count"] == 80
    cut = sum(-(-size // 8) for of_client in sizes for size in of_client)  # by the plan's largest
    assert counted["execution_count"] < cut  # so some were joined


def test_what_the_server_says_of_a_real_plan(plan_path: Path, http: httpx.Client) -> None:
    with Server({"flowers": plan_path}) as server:
        config = http.get(f"{server.url}/v2/models/flowers/config").json()
    engine = runtime.load(plan_path)
    assert config["max_batch_size"] == 8
    assert config["parameters"]["target"] == {"string_value": "cpu"}
    assert config["parameters"]["jpeg_decoder"] == {"string_value": "host"}
    assert config["parameters"]["preprocess_hash"] == {"string_value": engine.preprocess.hash}
    assert config["instance_group"][0]["kind"] == "KIND_CPU"


def test_a_changed_plan_is_not_served(plan_path: Path) -> None:
    content = bytearray(plan_path.read_bytes())
    content[len(content) // 2] ^= 1
    plan_path.write_bytes(content)
    with pytest.raises(CorruptArtifact):
        Server({"flowers": plan_path})
    with pytest.raises(ArtifactError, match="no plan here"):
        serve({"flowers": plan_path.with_name("nothing.plan")}, port=0)


def test_reloading_under_load_loses_no_request(plan_path: Path, http: httpx.Client) -> None:
    batch = images(2)
    once, twice = expected_scores(batch), 2 * expected_scores(batch)
    seen: set[int] = set()
    stop = threading.Event()

    def client() -> None:
        with httpx.Client(verify=False, timeout=60) as mine:
            while not stop.is_set():
                answer = infer(mine, server.url, batch)
                factor = 1 if np.allclose(answer, once, rtol=1e-3, atol=1e-3) else 2
                np.testing.assert_allclose(answer, factor * once, rtol=1e-3, atol=1e-3)
                seen.add(factor)

    def load() -> httpx.Response:
        return http.post(f"{server.url}/v2/repository/models/flowers/load")

    with Server({"flowers": plan_path}) as server, ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(client) for _ in range(4)]
        try:
            assert load().status_code == 200
            until(lambda: 1 in seen)
            good = plan_path.read_bytes()
            plan_path.write_bytes(good[:-100])
            broken = load()
            assert broken.status_code == 500
            assert "To do" in broken.json()["error"]
            linear_plan(scale=2.0).save(plan_path)
            assert load().status_code == 200
            np.testing.assert_allclose(infer(http, server.url, batch), twice, rtol=1e-3, atol=1e-3)
            until(lambda: 2 in seen)
        finally:
            stop.set()
        for done in clients:
            done.result()


def test_a_folder_of_plans(plan_path: Path, http: httpx.Client) -> None:
    models = Repository({}, folder=plan_path.parent)
    with Server(models) as server:
        url = f"{server.url}/v2/repository"
        entry = {"name": "flowers", "version": "1", "state": "UNAVAILABLE", "reason": "not loaded"}
        assert http.post(f"{url}/index").json() == [entry]
        assert http.post(f"{url}/index", json={"ready": True}).json() == []
        assert http.post(f"{url}/models/flowers/load").status_code == 200
        infer(http, server.url, images(1))


def test_a_taken_port_and_an_impossible_address(plan_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        with pytest.raises(UsageError, match="0 takes a free one"):
            Server({"flowers": plan_path}, port=other.getsockname()[1])
    with pytest.raises(UsageError, match="cannot be listened on"):
        Server({}, host="203.0.113.7", token="x" * 20)
    with pytest.raises(UsageError, match="cannot be listened on"):
        Server({}, port=70000)
    with pytest.raises(UsageError, match="negative"):
        Server({}, max_delay_us=-1)


def test_leaving_the_block_closes_the_port_and_the_engine() -> None:
    engine = Scores()
    with Server(repository({"flowers": engine})) as server:
        port = int(server.url.rpartition(":")[2])
        assert not engine.closed
    assert engine.closed
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_leaving_the_block_finishes_requests_in_flight(http: httpx.Client) -> None:
    engine = Scores()
    engine.gate = threading.Event()

    def go_on(url: str) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        until_refused(host, int(port))
        assert engine.gate is not None
        engine.gate.set()

    with ThreadPoolExecutor(2) as pool:
        with Server(repository({"flowers": engine})) as server:
            flying = pool.submit(infer, http, server.url, images(1))
            until(lambda: bool(engine.batches))
            pool.submit(go_on, server.url)
        np.testing.assert_allclose(flying.result(), expected_scores(images(1)), rtol=1e-3)


def test_a_signal_ends_the_process_in_order(plan_path: Path) -> None:
    sources = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    environment = {**os.environ, "PYTHONPATH": sources, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.plans.linear", str(plan_path), "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with httpx.Client(verify=False, timeout=60) as http:
            infer(http, url, images(3))
            # A body that is still coming when the signal does is read to its end and answered.
            host, _, port = url.removeprefix("http://").partition(":")
            body = images(1).tobytes()
            with socket.create_connection((host, int(port)), timeout=60) as late:
                late.sendall(
                    b"POST /v2/models/flowers/infer HTTP/1.1\r\nHost: localhost\r\n"
                    b"Inference-Header-Content-Length: 0\r\nExpect: 100-continue\r\n"
                    b"Content-Length: %d\r\n\r\n" % len(body) + body[:100]
                )
                assert late.recv(100) == CONTINUE, "its body is waited for"
                process.send_signal(signal.SIGTERM)
                until_refused(host, int(port))
                late.sendall(body[100:])
                answer = b""
                while chunk := late.recv(65536):
                    answer += chunk
        assert answer.startswith(b"HTTP/1.1 200")
        scores = np.frombuffer(answer[-16:], np.float32)
        np.testing.assert_allclose(scores, expected_scores(images(1))[0], rtol=1e-3, atol=1e-3)
        out, err = process.communicate(timeout=90)
        assert (process.returncode, err) == (0, "")
        assert out.split() == []  # nobody asked for traces, and nothing of them was imported
    finally:
        process.kill()
        process.communicate()
