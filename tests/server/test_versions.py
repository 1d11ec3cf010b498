"""Versions side by side: which one answers, a split of traffic, and a shadow that is compared."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from tessella.core.errors import UsageError
from tessella.server import Doors, Repository, Server, Traffic, parse_rule
from tessella.server.shadow import compare
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


@pytest.fixture
def http(tmp_path: Path) -> Iterator[httpx.Client]:
    """Versions 1 and 2 loaded, 3 in a folder; a version's scores are multiplied by its number."""

    def opened(path: Path) -> FakeEngine:
        return Scaled(float(path.parent.name))

    for version in ("1", "2"):
        (tmp_path / "flowers" / version).mkdir(parents=True)
        (tmp_path / "flowers" / version / "model.plan").touch()
    models = Repository({"flowers": tmp_path / "flowers"}, open_engine=opened)  # type: ignore[arg-type]
    (tmp_path / "flowers" / "3").mkdir()
    (tmp_path / "flowers" / "3" / "model.plan").touch()
    with (
        Server(models, doors=Doors(grpc_port=0)) as server,
        httpx.Client(base_url=server.url, timeout=20) as client,
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
    assert {ask(http) for _ in range(80)} == {"1", "2"}, "without an id by chance"
    http.post(TRAFFIC, json={"split": {"1": 50, "2": 50}})
    second = {name: ask(http, name=name) for name in first}
    assert all(second[name] == "2" for name, version in first.items() if version == "2")
    assert http.post("/v2/repository/models/flowers/versions/1/unload").status_code == 200
    assert {ask(http, name=name) for name in "abcdef"} == {"2"}
    assert http.post(TRAFFIC, json={}).json()["rule"] is None


def test_a_shadow_is_compared_and_nobody_sees_it(http: httpx.Client) -> None:
    http.post(TRAFFIC, json={"shadow": "1"}).raise_for_status()
    until = time.monotonic() + 20
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
