"""What is handed to replicas, and what one of them refuses to serve: no Ray is needed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tessella.cluster.deploying import Scale
from tessella.cluster.front import SETTINGS, AskingAgain, Door, middlewares
from tessella.cluster.replica import described, opened
from tessella.core.errors import ArtifactError, ServeError, UsageError
from tessella.core.record import to_plain
from tests.support.plans.linear import linear_plan

DOOR = Door(host="127.0.0.1", port=8000)
TOKEN = "0123456789abcdefghij"


def test_a_deployment_names_every_version_by_its_file(tmp_path: Path) -> None:
    alone = linear_plan().save(tmp_path / "a.plan")
    for version, scale in (("3", 3.0), ("12", 12.0)):
        (tmp_path / "many" / version).mkdir(parents=True)
        linear_plan(scale=scale).save(tmp_path / "many" / version / "model.plan")
    made = described({"a": alone, "b@2": alone, "c": tmp_path / "many"}, DOOR, max_delay_us=7)
    files = {key: Path(file) for key, file in made.models.items()}
    assert files == {
        "a@1": alone,
        "b@2": alone,
        "c@3": tmp_path / "many" / "3" / "model.plan",
        "c@12": tmp_path / "many" / "12" / "model.plan",
    }
    assert len(set(made.hashes.values())) == 3
    assert made.max_delay_us == 7


def test_a_replica_serves_the_plan_that_was_deployed_and_no_other(tmp_path: Path) -> None:
    path = linear_plan().save(tmp_path / "a.plan")
    made = described({"a": path}, DOOR)
    opened(made, path).close()
    linear_plan(scale=2.0).save(path)
    with pytest.raises(ArtifactError, match="another plan than the one that was deployed"):
        opened(made, path)
    linear_plan().save(path)
    opened(made, path).close()


def test_what_is_no_plan_is_not_deployed(tmp_path: Path) -> None:
    (tmp_path / "x.plan").write_bytes(b"PK\3\4")
    with pytest.raises(ArtifactError):
        described({"x": tmp_path / "x.plan"}, DOOR)
    with pytest.raises(UsageError):
        described({"..": tmp_path / "x.plan"}, DOOR)


def test_a_proxy_learns_from_its_environment_who_may_come_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    token_file = str(tmp_path / "token")
    door = Door(host="0.0.0.0", port=8000, token_file=token_file, names=("plans.lab",))
    monkeypatch.setenv(SETTINGS, json.dumps(to_plain(door)))
    assert TOKEN not in json.dumps(to_plain(door))  # environments are shown to many
    (made,) = middlewares()
    assert made.cls is AskingAgain
    guard = made.kwargs["guard"]
    known = {b"host": b"plans.lab", b"authorization": f"Bearer {TOKEN}".encode()}
    guard.check("POST", "/v2/models/a/infer", known)
    with pytest.raises(ServeError, match="token"):
        guard.check("POST", "/v2/models/a/infer", {b"host": b"plans.lab"})
    with pytest.raises(UsageError, match="no token here"):
        Door(host="0.0.0.0", port=8000, token_file=str(tmp_path / "none")).guard()
    with pytest.raises(UsageError, match="could use and reload"):
        Door(host="0.0.0.0", port=8000).guard()
    with pytest.raises(UsageError, match="one port"):
        Door(host="127.0.0.1", port=0)


def test_replicas_are_a_number_or_a_range() -> None:
    assert Scale.parsed("4") == Scale(least=4, most=4)
    assert Scale.parsed("2:8", cpus=3, gpus=1) == Scale(least=2, most=8, cpus=3, gpus=1)
    for text in ("0", "8:2", "", "2:", "a", "1:99999", "-1"):
        with pytest.raises(UsageError):
            Scale.parsed(text)
    with pytest.raises(UsageError):
        Scale(cpus=0)
