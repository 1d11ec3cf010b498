"""Versions side by side: which one answers, a split of traffic, and a shadow that is compared."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from tessella.core.errors import UsageError
from tessella.server import Doors, Repository, Server, Traffic, parse_rule
from tessella.server.shadow import MOST_COPIES, compare
from tests.support.engines import FakeEngine, Scores, expected_scores

IMAGE = np.random.default_rng(3).normal(size=(1, 3, 8, 8)).astype(np.float32)
TRAFFIC = "/v2/repository/models/flowers/traffic"


class Scaled(Scores):
    """Scores times a number."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def compute(self, image: np.ndarray) -> dict[str, np.ndarray]:
        return {"scores": self.factor * super().compute(image)["scores"]}


def saved(folder: Path, *versions: str) -> Path:
    """A folder of versions whose plans are empty files."""
    for version in versions:
        (folder / version).mkdir(parents=True)
        (folder / version / "model.plan").touch()
    return folder


def versions_of(folder: Path, engines: Mapping[str, FakeEngine]) -> Repository:
    """Flowers, with these engines by version."""
    home = saved(folder / "flowers", *engines)
    opened = lambda path: engines[path.parent.name]  # noqa: E731
    return Repository({"flowers": home}, open_engine=opened)  # type: ignore[arg-type, return-value]


@pytest.fixture
def http(tmp_path: Path) -> Iterator[httpx.Client]:
    """Versions 1 and 2 loaded, 3 in a folder; a version's scores are multiplied by its number."""

    def opened(path: Path) -> FakeEngine:
        return Scaled(float(path.parent.name))

    home = saved(tmp_path / "flowers", "1", "2")
    models = Repository({"flowers": home}, open_engine=opened)  # type: ignore[arg-type]
    saved(home, "3")
    with (
        Server(models, doors=Doors(grpc_port=0)) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        client.headers["x-grpc"] = server.grpc_address or ""
        yield client


def ask(http: httpx.Client, path: str = "flowers", name: str | None = None) -> str:
    """The version that answered; its scores are its own."""
    entry = {"name": "image", "datatype": "FP32", "shape": [1, 3, 8, 8]}
    body: dict[str, object] = {"inputs": [{**entry, "data": IMAGE.ravel().tolist()}]}
    answer = http.post(
        f"/v2/models/{path}/infer", json=body if name is None else body | {"id": name}
    )
    told = answer.json()
    scores = np.array(told["outputs"][0]["data"])
    wanted = float(told["model_version"]) * expected_scores(IMAGE)[0]
    np.testing.assert_allclose(scores, wanted, rtol=1e-3, atol=1e-3)
    return str(told["model_version"])


def test_the_newest_version_answers_and_each_by_its_number(http: httpx.Client) -> None:
    assert [ask(http), ask(http, "flowers/versions/1")] == ["2", "1"]
    assert http.get("/v2/models/flowers").json()["versions"] == ["1", "2"]
    assert http.get("/v2/models/flowers/versions/3/ready").status_code == 404
    assert http.post("/v2/repository/models/flowers/load").status_code == 200
    assert ask(http) == "3"
    assert http.post("/v2/repository/models/flowers/versions/3/unload").status_code == 200
    assert ask(http) == "2"
    assert http.get("/v2/models/flowers/versions/3/ready").status_code == 503
    stats = http.get("/v2/models/flowers/stats").json()["model_stats"]
    assert [s["version"] for s in stats] == ["1", "2"]
    for bad in ("0", "01", "x", "1e3", "9" * 10):
        assert http.post(f"/v2/repository/models/flowers/versions/{bad}/load").status_code == 400


@pytest.mark.parametrize("kind", [tritonclient.http, tritonclient.grpc])
def test_a_real_client_names_a_version(http: httpx.Client, kind) -> None:
    address = http.headers["x-grpc"] if kind is tritonclient.grpc else http.base_url.netloc.decode()
    tensor = kind.InferInput("image", [1, 3, 8, 8], "FP32")
    tensor.set_data_from_numpy(IMAGE)
    with kind.InferenceServerClient(address) as client:
        for version in ("1", "2"):
            assert client.is_model_ready("flowers", version)
            found = client.infer("flowers", [tensor], model_version=version).as_numpy("scores")
            np.testing.assert_allclose(found, int(version) * expected_scores(IMAGE), rtol=1e-3)


def test_a_split_goes_by_the_requests_id_and_changes_at_once(http: httpx.Client) -> None:
    told = http.post(TRAFFIC, json={"split": {"1": 90, "2": 10}}).json()
    assert told["in_force"] == {"shares": {"1": 0.9, "2": 0.1}, "shadow": None}
    first = {name: ask(http, name=name) for name in map(str, range(200))}
    assert {name: ask(http, name=name) for name in first} == first
    assert 4 <= Counter(first.values())["2"] <= 40
    seen = {ask(http) for _ in range(40)}  # without an id by chance: two, but for one in 70
    while seen != {"1", "2"}:
        seen.add(ask(http))
    http.post(TRAFFIC, json={"split": {"1": 50, "2": 50}})
    second = {name: ask(http, name=name) for name in first}
    assert all(second[name] == "2" for name, version in first.items() if version == "2")
    assert http.post("/v2/repository/models/flowers/versions/1/unload").status_code == 200
    assert {ask(http, name=name) for name in "abcdef"} == {"2"}
    assert http.post(TRAFFIC, json={}).json()["rule"] is None


def test_a_shadow_is_compared_and_nobody_sees_it(http: httpx.Client) -> None:
    http.post(TRAFFIC, json={"shadow": "1"}).raise_for_status()
    until = time.monotonic() + 60
    shadow: dict[str, float] = {}
    while shadow.get("requests", 0) < 3 and time.monotonic() < until:
        assert ask(http) == "2"
        stats = http.get("/v2/models/flowers/versions/1/stats").json()["model_stats"][0]
        shadow = stats.get("shadow", {})
    assert shadow["requests"] >= 3
    assert shadow["agreement"] == 1
    largest = np.abs(expected_scores(IMAGE)).max()
    assert shadow["largest_difference"] == pytest.approx(largest, rel=1e-3)
    assert stats["inference_stats"]["success"]["count"] == 0
    assert (
        'tessella_shadow_samples_total{model="flowers",result="agreed"' in http.get("/metrics").text
    )


class Failing(Scores):
    """Raises for every picture."""

    def compute(self, image: np.ndarray) -> dict[str, np.ndarray]:
        raise RuntimeError("this version is broken")


def shadow_of(
    http: httpx.Client, is_enough: Callable[[dict[str, float]], bool]
) -> dict[str, float]:
    """What is counted of version 1 as a shadow, as soon as it is enough."""
    until = time.monotonic() + 60
    while True:
        stats = http.get("/v2/models/flowers/versions/1/stats").json()["model_stats"][0]
        assert stats["inference_stats"]["fail"]["count"] == 0
        shadow: dict[str, float] = stats.get("shadow", {"failed": 0, "shed": 0, "requests": 0})
        if is_enough(shadow) or time.monotonic() > until:
            return shadow
        time.sleep(0.02)


def test_a_shadow_that_fails_changes_no_answer_and_is_counted(tmp_path: Path) -> None:
    models = versions_of(tmp_path, {"1": Failing(), "2": Scaled(2.0)})
    with Server(models) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        http.post(TRAFFIC, json={"shadow": "1"}).raise_for_status()
        asked, shadow = 0, {"failed": 0.0}
        while not shadow["failed"]:  # a busy machine may shed some
            asked += 5
            assert [ask(http) for _ in range(5)] == ["2"] * 5
            shadow = shadow_of(http, lambda s, n=asked: s["failed"] + s["shed"] >= n)
        assert shadow["failed"] + shadow["shed"] == asked
        assert shadow["requests"] == 0
        assert shadow["agreement"] is None
        metrics = http.get("/metrics").text
        (line,) = re.findall(r'tessella_shadow_\w+{[^}]*failed[^}]*version="1"} (.*)', metrics)
        assert float(line) == shadow["failed"]
        assert ask(http) == "2"


def test_copies_that_would_wait_are_shed_and_counted(tmp_path: Path) -> None:
    """The shadow stands still: nobody waits for it, and 32 copies at most wait."""
    stuck = Scaled(1.0)
    stuck.gate = threading.Event()
    models = versions_of(tmp_path, {"1": stuck, "2": Scaled(2.0)})
    with Server(models) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        http.post(TRAFFIC, json={"shadow": "1"}).raise_for_status()
        asked = 0
        while not stuck.batches:  # a copy is being computed
            asked += 1
            assert ask(http) == "2"
            time.sleep(0.01)
        for _ in range(MOST_COPIES + 5):
            asked += 1
            assert ask(http) == "2"
        assert shadow_of(http, lambda s: s["shed"] >= 5)["shed"] >= 5
        stuck.gate.set()
        shadow = shadow_of(http, lambda s: s["shed"] + s["requests"] >= asked)
        assert shadow["shed"] + shadow["requests"] == asked
        assert (shadow["failed"], shadow["agreement"]) == (0, 1)


def test_traffic_is_managed_with_the_token_alone(tmp_path: Path) -> None:
    token = "a-long-and-random-token"
    models = versions_of(tmp_path, {"1": Scaled(1.0), "2": Scaled(2.0)})
    with (
        Server(models, token=token) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        for headers in ({}, {"Authorization": "Bearer wrong-token-of-length"}, {"Cookie": token}):
            asked = http.post(TRAFFIC, json={"split": {"1": 1}}, headers=headers)
            assert (asked.status_code, http.get(TRAFFIC, headers=headers).status_code) == (401, 401)
        http.headers["Authorization"] = f"Bearer {token}"
        assert http.get(TRAFFIC).json()["rule"] is None, "what was refused changed nothing"
        other = http.post(TRAFFIC, json={"split": {"1": 1}}, headers={"Origin": "http://evil.test"})
        assert other.status_code == 403
        assert ask(http) == "2"


def test_the_pages_show_versions_and_shares(http: httpx.Client) -> None:
    def shown() -> tuple[object, str]:
        (model,) = http.get("/v2/models").json()["models"]
        assert model["versions"] == versions
        return model["traffic"], http.get("/").text

    versions = ["1", "2"]
    told, page = shown()
    assert told == {"shares": {"2": 1.0}, "shadow": None}
    assert "1 answers 0 %, 2 answers 100 %" in page
    http.post("/v2/repository/models/flowers/load").raise_for_status()
    http.post(TRAFFIC, json={"split": {"1": 90, "2": 10}, "shadow": "3"}).raise_for_status()
    versions = ["1", "2", "3"]
    told, page = shown()
    assert told == {"shares": {"1": 0.9, "2": 0.1}, "shadow": "3"}
    assert "1 answers 90 %, 2 answers 10 %, 3 is a shadow" in page
    for version in ("2", "3"):
        path = f"/v2/repository/models/flowers/versions/{version}/unload"
        http.post(path).raise_for_status()
    versions = ["1"]
    assert "Versions" not in shown()[1]


def test_rules_that_cannot_be(http: httpx.Client) -> None:
    for rule, status in (
        ({"split": {"1": -1}}, 400),
        ({"split": {"1": 0}}, 400),
        ({"split": {"1": 10**6}}, 400),
        ({"split": {str(v): 1 for v in range(1, 10)}}, 400),
        ({"split": {"1": 1}, "shadow": "1"}, 400),
        ({"split": [1]}, 400),
        ({"weights": {}}, 400),
        ({"shadow": "7"}, 404),
    ):
        assert http.post(TRAFFIC, json=rule).status_code == status, rule
    assert ask(http) == "2"
    assert parse_rule("a=1:90,2:10,shadow:3") == (
        "a",
        Traffic(split={"1": 90, "2": 10}, shadow="3"),
    )
    with pytest.raises(UsageError, match="no rule of traffic"):
        parse_rule("a=1:x")


def test_what_is_compared() -> None:
    served = {"a": np.array([[1.0, 2, np.nan], [5, 1, 1]])}
    assert compare(served, served) == (2, 2, 0.0)
    assert compare(served, {"a": np.array([[1.0, 2, np.nan], [5, 9, 1]])}) == (2, 1, 8.0)
    assert compare(served, {"a": np.zeros((2, 4))}) == (2, 0, float("inf"))
