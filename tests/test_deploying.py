"""The files under deploy/ and what docs/deploying.md shows, held to the code."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tessella.cli.serve import parse_models
from tessella.server import Server
from tessella.server.guard import OPEN_PATHS
from tessella.server.listening import GRACE_S
from tests.support.cli import context
from tests.support.engines import Scores, repository

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
PAGE = (ROOT / "docs" / "deploying.md").read_text()
TOKEN = "0123456789abcdefghij"
UNITS = {"s": 1, "m": 60, "h": 3600}


def documents(name: str) -> list[Any]:
    return [d for d in yaml.safe_load_all((DEPLOY / name).read_text()) if d is not None]


@pytest.fixture(scope="module")
def kinds() -> dict[str, Any]:
    return {document["kind"]: document for document in documents("kubernetes.yaml")}


@pytest.fixture(scope="module")
def pod(kinds: dict[str, Any]) -> Any:
    return kinds["Deployment"]["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def container(pod: Any) -> Any:
    (container,) = pod["containers"]
    return container


@pytest.fixture(scope="module")
def compose() -> Any:
    (document,) = documents("compose.yaml")
    return document["services"]


@pytest.fixture(scope="module")
def unit() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(DEPLOY / "tessella.service")
    return parser["Service"]


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with Server(repository({"flowers": Scores()}), token=TOKEN) as server:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            yield client


# --- commands -------------------------------------------------------------------------------------


def shown() -> list[list[str]]:
    """The commands ``tessella …`` of the page, without what a shell would do to them."""
    text = re.sub(r"\\\n", " ", PAGE)
    lines = [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
             for line in block.splitlines()]  # fmt: skip
    words = [shlex.split(line, comments=True) for line in lines]
    return [w[1:] for w in words if w[:1] == ["tessella"]]


def commands() -> dict[str, list[str]]:
    start = re.search(r"^ExecStart=\S+ (.*)$", (DEPLOY / "tessella.service").read_text(), re.M)
    assert start is not None
    kinds = {document["kind"]: document for document in documents("kubernetes.yaml")}
    (pod,) = kinds["Deployment"]["spec"]["template"]["spec"]["containers"]
    (composed,) = documents("compose.yaml")
    found = {
        "systemd": start[1].split(),
        "kubernetes": pod["args"],
        "compose": composed["services"]["tessella"]["command"],
    }
    return found | {f"page {n}": words for n, words in enumerate(shown())}


@pytest.mark.parametrize("words", commands().values(), ids=commands())
def test_a_command_is_one_that_the_command_line_takes(words: list[str]) -> None:
    asked = context(words)
    assert asked.info_name == words[0]
    given = asked.params
    assert all(Path(p).suffix == ".plan" for p in parse_models(given["models"]).values())
    assert given["host"] == "0.0.0.0"
    assert given["token_file"]  # without one, such an address is refused
    assert given["port"] == 8000


def test_every_option_that_the_page_names_exists() -> None:
    names = {n for command in ("serve",) for p in context([command, "x.plan"]).command.params
             for n in p.opts}  # fmt: skip
    prose = re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)
    named = set(re.findall(r"`(--[a-z-]+)", prose))
    assert len(named) >= 7
    assert named <= names


# --- ports, paths, times --------------------------------------------------------------------------


def test_ports_lead_to_the_server(kinds: dict[str, Any], container: Any, compose: Any) -> None:
    asked = context(container["args"]).params
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": asked["port"], "grpc": asked["grpc_port"]}
    assert {p["targetPort"] for p in kinds["Service"]["spec"]["ports"]} == set(ports)
    assert {p["port"] for p in kinds["Service"]["spec"]["ports"]} == set(ports.values())
    exposed = re.search(r"^EXPOSE (.*)$", (DEPLOY / "Dockerfile").read_text(), re.M)
    assert exposed is not None
    assert set(map(int, exposed[1].split())) == set(ports.values())
    served = context(compose["tessella"]["command"]).params
    outside = {f"{port}:{port}" for port in (served["port"], served["grpc_port"])}
    assert set(compose["tessella"]["ports"]) == outside


def test_clients_may_use_the_names_that_they_are_given(
    kinds: dict[str, Any], container: Any, compose: Any
) -> None:
    name = kinds["Service"]["metadata"]["name"]
    names = context(container["args"]).params["host_name"]
    assert set(names) == {name, f"{name}.default.svc.cluster.local"}
    (scraped,) = documents("prometheus.yml")[0]["scrape_configs"][0]["static_configs"]
    hosts = {target.partition(":")[0] for target in scraped["targets"]}
    assert hosts <= set(compose)
    assert hosts <= set(context(compose["tessella"]["command"]).params["host_name"])


def test_probes_and_scrapes_ask_paths_that_answer(container: Any, http: httpx.Client) -> None:
    probes = {kind: container[f"{kind}Probe"]["httpGet"]
              for kind in ("startup", "readiness", "liveness")}  # fmt: skip
    assert {probe["port"] for probe in probes.values()} == {"http"}
    paths = {probe["path"] for probe in probes.values()}
    assert paths == set(OPEN_PATHS)
    check = re.search(r"127\.0\.0\.1:8000(/[\w/]+)", (DEPLOY / "Dockerfile").read_text())
    assert check is not None
    assert check[1] in OPEN_PATHS
    for path in paths:  # kubelets know no token, and ask a pod by its address
        assert http.get(path).status_code == 200
    for job in documents("prometheus.yml")[0]["scrape_configs"]:
        assert job["authorization"]["credentials_file"].endswith("/token")
        assert http.get(job["metrics_path"]).status_code == 401
        known = {"Authorization": f"Bearer {TOKEN}"}
        assert http.get(job["metrics_path"], headers=known).status_code == 200


def test_the_autoscaler_s_metric_is_one_of_ours(kinds: dict[str, Any], http: httpx.Client) -> None:
    spec = kinds["HorizontalPodAutoscaler"]["spec"]
    assert spec["scaleTargetRef"]["name"] == kinds["Deployment"]["metadata"]["name"]
    assert spec["minReplicas"] <= spec["maxReplicas"]
    (metric,) = (entry["pods"]["metric"]["name"] for entry in spec["metrics"])
    text = http.get("/metrics", headers={"Authorization": f"Bearer {TOKEN}"}).text
    assert f"# TYPE {metric} gauge" in text
    pods = documents("prometheus.yml")[0]["scrape_configs"][1]["relabel_configs"]
    named = {rule["target_label"] for rule in pods if "target_label" in rule}
    assert named == {"namespace", "pod"}  # by which prometheus-adapter finds a pod's metric
    (kept,) = (rule["regex"] for rule in pods if rule.get("action") == "keep")
    labels = kinds["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert kept == f"{labels['app']};http"


def test_whoever_stops_a_server_waits_for_its_last_answer(
    pod: Any, container: Any, compose: Any, unit: configparser.SectionProxy
) -> None:
    sleep, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    probe = container["readinessProbe"]
    assert int(seconds) > probe["periodSeconds"] * probe["failureThreshold"]
    assert pod["terminationGracePeriodSeconds"] > int(seconds) + GRACE_S
    assert seconds_of(compose["tessella"]["stop_grace_period"]) > GRACE_S
    assert seconds_of(unit["TimeoutStopSec"]) > GRACE_S
    assert unit["KillMode"] == "mixed"  # SIGTERM to the first process alone, which tells the others
    assert "STOPSIGNAL SIGTERM" in (DEPLOY / "Dockerfile").read_text()


def seconds_of(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([smh]?)", text).groups()  # type: ignore[union-attr]
    return int(number) * UNITS[unit or "s"]


# --- what belongs together ------------------------------------------------------------------------


def test_kubernetes_parts_find_each_other(kinds: dict[str, Any], pod: Any, container: Any) -> None:
    assert {kind: kinds[kind]["apiVersion"] for kind in kinds} == {
        "Deployment": "apps/v1",
        "Service": "v1",
        "HorizontalPodAutoscaler": "autoscaling/v2",
        "PodDisruptionBudget": "policy/v1",
    }
    spec = kinds["Deployment"]["spec"]
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"] == labels
    assert kinds["Service"]["spec"]["selector"] == labels
    budget = kinds["PodDisruptionBudget"]["spec"]
    assert budget["selector"]["matchLabels"] == labels
    assert budget["minAvailable"] < spec["replicas"]
    assert spec["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert set(mounts.values()) == set(volumes)
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    asked = context(container["args"]).params
    read = [str(asked["token_file"]), *map(str, parse_models(asked["models"]).values())]
    assert all(str(Path(path).parent) in mounts for path in read)
    uid = re.search(r"--uid (\d+)", (DEPLOY / "Dockerfile").read_text())
    assert uid is not None
    assert pod["securityContext"]["runAsUser"] == int(uid[1])


def test_compose_s_parts_find_each_other(compose: Any) -> None:
    (document,) = documents("compose.yaml")
    served = compose["tessella"]
    (device,) = served["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    assert (DEPLOY / served["build"]["context"] / served["build"]["dockerfile"]).is_file()
    for service in compose.values():
        assert set(service["secrets"]) <= set(document["secrets"])
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert source == "./plans" or (DEPLOY / source).is_file()
    secret = context(served["command"]).params["token_file"]
    assert str(secret) == f"/run/secrets/{served['secrets'][0]}"


def test_the_container_is_made_of_what_there_is() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    copied = re.search(r"^COPY (\S+) (\S+) /", text, re.M)
    assert copied is not None
    assert (ROOT / copied[1]).is_file()
    assert copied[2] == "dist/*.whl"  # where make wheel puts it
    assert "--wheel-dir dist" in (ROOT / "Makefile").read_text()
    for words in re.findall(r"^(?:ENTRYPOINT|CMD|\s+CMD) (\[.*\])$", text, re.M):
        assert json.loads(words)
    assert 'ENTRYPOINT ["tessella"]' in text


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "tessella.service").read_text()
    unit = tmp_path / "tessella.service"
    unit.write_text(text.replace("/opt/tessella/bin/tessella", "/bin/true"))
    ran = subprocess.run(
        ["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "tessella.service" not in ran.stderr
