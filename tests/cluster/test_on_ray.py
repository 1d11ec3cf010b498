"""A Ray cluster of two machines, as processes of this one: replicas and machines that are killed,
and plans that are replaced, while clients ask. ``make ray`` installs Ray and runs it (a minute or
two).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from tests.support.engines import expected_scores
from tests.support.plans.linear import linear_plan

pytest.importorskip("ray", reason="pip install 'tessella[ray]'")
pytestmark = [pytest.mark.timeout(280), pytest.mark.filterwarnings("ignore")]

# In a process of its own: the cluster's end is certain, and Ray's settings stay out of this one.
CLUSTER = """
import json, os, sys
os.environ["RAY_worker_niceness"] = "0"  # by 15, as it is, proxies do not start on a busy machine
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
node = cluster.add_node(num_cpus=1)
pids = [p.process.pid for kind in node.all_processes.values() for p in kind]
print(json.dumps({"address": cluster.address, "pids": pids}), flush=True)
sys.stdin.read()
cluster.shutdown()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Running:
    """A cluster and what clients see of it."""

    def __init__(self, address: str, pids: list[int], folder: Path) -> None:
        self.address, self.pids, self.folder = address, pids, folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def deploy(self, plan: Path, *more: str) -> subprocess.CompletedProcess[str]:
        words = ["serve", "--on", "ray", f"flowers={plan}", "--port", str(self.port), *more]
        return subprocess.run(
            [sys.executable, "-m", "tessella", *words],
            env=os.environ | {"RAY_ADDRESS": self.address},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def processes(self) -> dict[str, list[psutil.Process]]:
        """The replicas' processes on each machine."""
        found: dict[str, list[psutil.Process]] = {"head": [], "other": []}
        others = {c.pid for pid in self.pids for c in psutil.Process(pid).children(recursive=True)}
        for process in psutil.process_iter(["name", "cmdline"]):
            words = " ".join(process.info["cmdline"] or ())
            if words.startswith("ray::ServeReplica") and process.parent() is not None:
                found["other" if process.pid in others else "head"].append(process)
        return found


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_SERVE_WORKER_PROXY_HTTP_PORT": str(free_port())}
    with subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | quiet,
    ) as cluster:
        assert cluster.stdout is not None
        line = next(line for line in cluster.stdout if line.startswith("{"))
        yield Running(**json.loads(line), folder=tmp_path_factory.mktemp("plans"))
        cluster.communicate()  # closes its input, which ends it


class Clients:
    """Ask without a pause until the block ends; every answer has to be one of the plans'."""

    def __init__(self, url: str, *, scales: tuple[float, ...], count: int = 6) -> None:
        self.seen: Counter[Any] = Counter()
        self.replicas: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._stop = threading.Event()
        self._url, self._scales = url, scales
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(count)]

    def _ask(self, seed: int) -> None:
        images = np.random.default_rng(seed).normal(size=(2, 3, 8, 8)).astype(np.float32)
        entry = {"name": "image", "datatype": "FP32", "shape": list(images.shape)}
        asked = {"inputs": [{**entry, "data": images.ravel().tolist()}]}
        with httpx.Client(timeout=60) as client:
            while not self._stop.is_set():
                try:
                    answer = client.post(f"{self._url}/v2/models/flowers/infer", json=asked)
                    scores = np.reshape(answer.json()["outputs"][0]["data"], (-1, 4))
                except Exception as error:
                    self.wrong.append(repr(error))
                    continue
                (scale,) = [
                    s
                    for s in self._scales
                    if np.allclose(scores, s * expected_scores(images), rtol=1e-3, atol=1e-3)
                ] or [None]
                self.seen[scale] += 1
                self.seen["asked again"] += answer.headers["tessella-attempts"] != "1"
                self.replicas[answer.headers["tessella-replica"]] += 1

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def until(self, what: Any, *, within_s: float = 60.0) -> None:
        until_s = time.monotonic() + within_s
        while not what():
            assert time.monotonic() < until_s, (self.seen, self.replicas, self.wrong[:3])
            time.sleep(0.1)


def test_replicas_and_machines_die_and_plans_change_while_clients_ask(running: Running) -> None:
    first = linear_plan().save(running.folder / "first.plan")
    second = linear_plan(scale=2.0).save(running.folder / "second.plan")
    # Ray itself asks elsewhere for what a replica had not accepted. Here a batch gathers for 0.1 s,
    # so that accepted requests are in a replica at any time.
    asked = ("--replicas", "2", "--max-delay-us", "100000")
    deployed = running.deploy(first, *asked)
    assert deployed.returncode == 0, deployed.stderr
    assert running.url in deployed.stdout + deployed.stderr

    with Clients(running.url, scales=(1.0, 2.0)) as clients:
        # a replica is killed
        clients.until(lambda: len(clients.replicas) == 2 and min(clients.replicas.values()) > 20)
        where = running.processes()
        assert [len(where["head"]), len(where["other"])] == [1, 1]
        where["head"][0].kill()
        clients.until(lambda: len(clients.replicas) == 3, within_s=90)
        assert clients.wrong == []
        assert clients.seen["asked again"] >= 1

        # the plan is replaced
        deployed = running.deploy(second, *asked)
        assert deployed.returncode == 0, deployed.stderr
        count = clients.seen[2.0]
        clients.until(lambda: clients.seen[2.0] > count + 50)  # what was under way has come
        before, count = clients.seen[1.0], clients.seen[2.0]
        clients.until(lambda: clients.seen[2.0] > count + 100)
        assert clients.seen[1.0] == before
        assert clients.wrong == []

        # a machine is killed, with all that runs on it
        doomed = [psutil.Process(pid) for pid in running.pids]
        doomed += [c for p in doomed for c in p.children(recursive=True)]
        again = clients.seen["asked again"]
        for process in doomed:
            process.kill()
        count = clients.seen[2.0]
        clients.until(lambda: clients.seen[2.0] > count + 150)
    print(clients.seen, clients.replicas)
    assert clients.wrong == []
    assert clients.seen["asked again"] > again
    assert set(clients.seen) <= {1.0, 2.0, "asked again"}

    refused = httpx.post(f"{running.url}/v2/repository/models/flowers/load", timeout=60)
    assert refused.status_code == 501
    assert httpx.get(f"{running.url}/v2/health/ready", timeout=60).status_code == 200
