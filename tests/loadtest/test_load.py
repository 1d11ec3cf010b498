"""The load generator, against tritonclient's own timing and a server that stalls."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http
import typer
from PIL import Image
from typer.testing import CliRunner

import tessella.cli.load
from tessella import loadtest
from tessella.core.errors import InputError, ServeError, UsageError
from tessella.server import Doors, Server
from tests.support.certificates import self_signed
from tests.support.engines import Pair, Scores, repository

TOKEN = "a token of a test, long enough"


@pytest.fixture(scope="module")
def engine() -> Scores:
    return Scores()


@pytest.fixture(scope="module")
def server(engine: Scores) -> Iterator[Server]:
    models = repository({"flowers": engine, "pair": Pair()})
    with Server(models, token=TOKEN, doors=Doors(grpc_port=0)) as running:
        yield running


@pytest.fixture
def target(server: Server) -> loadtest.Target:
    return loadtest.Target(url=server.url, model="flowers", token=TOKEN)


@pytest.mark.parametrize("model", ["flowers", "pair"])
@pytest.mark.parametrize("kind", ["binary", "json", "image", "grpc"])
def test_every_body_is_answered(server: Server, kind, model: str, tmp_path: Path) -> None:
    if kind == "image" and model == "pair":
        return
    picture = tmp_path / "a.png"
    Image.new("RGB", (9, 9)).save(picture)
    grpc = server.grpc_address if kind == "grpc" else None
    target = loadtest.Target(url=server.url, model=model, token=TOKEN, grpc=grpc)
    body = loadtest.body_for(target, kind, batch=2, picture=picture)
    outcome = loadtest.generate(target, body, loadtest.closed(2, 0.2))
    assert outcome.latencies_s
    assert outcome.failures == {}


@pytest.mark.parametrize("kind", ["int64", "int32", "uint8", "bool"])
def test_numbers_of_words_are_in_every_vocabulary(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"inputs": [{"name": "words", "datatype": kind.upper(), "shape": [-1, 100]}]}
    monkeypatch.setattr("tessella.loadtest.bodies._asked", lambda *_: told)
    body = loadtest.body_for(loadtest.Target(url="http://x", model="m"), "binary", batch=2)
    words = np.frombuffer(body[-200 * np.dtype(kind).itemsize :], kind)
    assert set(words.tolist()) == {0, 1}


def test_latencies_are_those_that_tritonclient_sees(
    target: loadtest.Target, engine: Scores
) -> None:
    """One client, an engine of 30 ms: the quickest answers of both, which other work on the machine
    held up least, are within a few milliseconds.
    """
    engine.delay_s = 0.03
    try:
        body = loadtest.body_for(target, "binary")
        ours = loadtest.generate(target, body, loadtest.closed(1, 0.6))
        seen = []
        with tritonclient.http.InferenceServerClient(target.url.removeprefix("http://")) as client:
            tensor = tritonclient.http.InferInput("image", [1, 3, 8, 8], "FP32")
            tensor.set_data_from_numpy(np.zeros((1, 3, 8, 8), np.float32))
            for _ in range(15):
                since = time.perf_counter()
                client.infer("flowers", [tensor], headers=target.headers)
                seen.append(time.perf_counter() - since)
    finally:
        engine.delay_s = 0.0
    assert ours.percentile(50) >= 0.03
    assert min(ours.latencies_s) == pytest.approx(min(seen), rel=0.5)


def test_a_stall_is_charged_to_all_who_would_have_come(
    target: loadtest.Target, engine: Scores
) -> None:
    """Every answer takes 50 ms on one connection, where 100 a second are to come: the wait grows
    with every request, though each answer by itself takes 50 ms.
    """
    engine.delay_s = 0.05
    try:
        body = loadtest.body_for(target, "binary")
        schedule = loadtest.poisson(100, 0.15, clients=1)
        outcome = loadtest.generate(target, body, schedule)
        impatient = loadtest.generate(target, body, schedule, give_up_s=0.1)
    finally:
        engine.delay_s = 0.0
    assert schedule.times_s is not None
    count = len(schedule.times_s)
    assert len(outcome.latencies_s) == count
    # The last one was to be sent at its time, and could not before all others had their 50 ms.
    least = 0.05 * count - schedule.times_s[-1]
    assert outcome.latencies_s[-1] >= least > 0.3
    assert outcome.lateness(100) >= least - 0.05 - 1e-3
    assert outcome.goodput(0.1) < outcome.rate
    assert impatient.failures["not sent"] > 0
    assert len(impatient.latencies_s) + impatient.failures["not sent"] == count


def test_poisson_times_are_independent_of_answers_and_seeded() -> None:
    one, same, other = (loadtest.poisson(1000, 10, clients=1, seed=s).times_s for s in (1, 1, 2))
    assert one == same != other
    assert one is not None
    gaps = np.diff(one)
    assert len(one) == pytest.approx(10_000, rel=0.05)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05), "as of an exponential distribution"


def test_traces(tmp_path: Path, target: loadtest.Target) -> None:
    path = tmp_path / "trace"
    path.write_text('0.0\n{"at_s": 0.05}\n0.05\n')
    schedule = loadtest.trace(path, clients=2)
    assert schedule.times_s == (0.0, 0.05, 0.05)
    body = loadtest.body_for(target, "binary")
    assert len(loadtest.generate(target, body, schedule).latencies_s) == 3
    for text in ("", "x", "1\n0", "nan", "-1", "{}", "[1]"):
        path.write_text(text)
        with pytest.raises(InputError):
            loadtest.trace(path, clients=1)


def test_failures_are_counted_and_never_latencies(target: loadtest.Target) -> None:
    body = loadtest.body_for(target, "binary").replace(TOKEN.encode(), b"x" * len(TOKEN))
    outcome = loadtest.generate(target, body, loadtest.closed(1, 0.1))
    assert outcome.latencies_s == []
    assert set(outcome.failures) == {"401"}
    assert np.isnan(outcome.percentile(50))
    nobody = loadtest.Target(url="http://127.0.0.1:9", model="flowers")
    with pytest.raises(ServeError, match="cannot be reached"):
        loadtest.generate(nobody, body, loadtest.closed(1, 0.1))
    for rate in (0, -1, float("nan"), 1e9):
        with pytest.raises(UsageError):
            loadtest.poisson(rate, 1, clients=1)


def test_the_command(target: loadtest.Target, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    app = typer.Typer()
    tessella.cli.load.register(app)
    asked = ["flowers", "--url", target.url, "--token-file", str(token), "--rate", "100"]
    ran = CliRunner().invoke(app, [*asked, "--seconds", "0.3", "--slo-ms", "1000"])
    assert ran.exit_code == 0, ran.output
    assert "goodput" in ran.output
    ran = CliRunner().invoke(app, ["flowers", "--body", "grpc"])
    assert ran.exit_code != 0
    nobody = ["--body", "grpc", "--grpc", "localhost:1", "--seconds", "0.1"]
    ran = CliRunner().invoke(app, [*asked[:5], *nobody])
    assert ran.exit_code != 0
    assert "no request was answered" in ran.output
    assert "UNAVAILABLE" in ran.output


def test_grpc_by_tls(tmp_path: Path, monkeypatch) -> None:
    cert, key = self_signed(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", cert)
    doors = Doors(grpc_port=0, tls_cert=cert, tls_key=key)
    with Server(repository({"flowers": Scores()}), doors=doors) as server:
        url, address = (
            f"{scheme}localhost:{where.rpartition(':')[2]}"
            for scheme, where in (("https://", server.url), ("", server.grpc_address))
        )
        target = loadtest.Target(url=url, model="flowers", grpc=address)
        body = loadtest.body_for(target, "grpc")
        found = loadtest.generate(target, body, loadtest.closed(2, 0.2))
    assert found.latencies_s
    assert not found.failures


def test_it_needs_no_torch() -> None:
    script = "import sys, tessella.loadtest; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
