"""The Serve page and what it reads: a real server's numbers, percentiles, hostile addresses."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from PIL import Image

from tessella.core.errors import UsageError
from tessella.server import Doors, Server
from tessella.server.fairness import MOST_NAMES, client_of
from tessella.server.metrics import Metrics
from tessella.server.statistics import (
    BOUNDS_S,
    MOST_CLIENTS,
    Computation,
    InstanceCounts,
    Stages,
    Statistics,
)
from tessella.studio import serving
from tessella.studio.serving import Histogram, NotServed, address, read, reading
from tessella.studio.serving_load import Window
from tests.support.engines import Pair, Scores, repository
from tests.support.pictures.encoded import saved
from tests.support.studio.browsing import alive, fill, fit, press, resize, see, series, until

TOKEN = "a token of a test, long enough"
KNOWN = {"Authorization": f"Bearer {TOKEN}"}
MODEL = ("flowers", "1")
IMAGES = np.random.default_rng(0).normal(size=(6, 3, 8, 8)).astype(np.float32)


def look(url: str, token: str = "") -> serving.Reading:
    return asyncio.run(read(address(url), token))


def post(http: httpx.Client, images: np.ndarray, **headers: str) -> httpx.Response:
    return http.post(
        "/v2/models/flowers/infer",
        content=images.tobytes(),
        headers={"Inference-Header-Content-Length": "0", **headers},
    )


def test_a_servers_numbers_are_what_was_sent(monkeypatch) -> None:
    monkeypatch.setattr(serving, "TIMEOUT_S", 60.0)  # the machine may be busy
    engine = Scores(delay_s=0.03)
    models = repository({"flowers": engine, "pair": Pair()})
    with (
        Server(models, doors=Doors(grpc_port=0), token=TOKEN) as server,
        httpx.Client(base_url=server.url, headers=KNOWN, timeout=60) as http,
        closing(triton.InferenceServerClient(server.grpc_address)) as grpc,
    ):
        with pytest.raises(NotServed, match="wants its token"):
            look(server.url)
        window = Window()
        assert window.add(first := look(server.url, TOKEN))
        assert window.loads() == {}
        begun = time.monotonic()
        sizes = (1, 3, 3, 6)
        assert [post(http, IMAGES[:n]).status_code for n in sizes] == [200] * len(sizes)
        picture = saved(Image.new("RGB", (8, 8)), "PNG")
        for _ in range(2):
            assert http.post("/v2/models/flowers/classify", content=picture).status_code == 200
        given = triton.InferInput("image", [2, 3, 8, 8], "FP32")
        given.set_data_from_numpy(IMAGES[:2])
        grpc.infer("flowers", [given], headers={"authorization": f"Bearer {TOKEN}"})
        late = {"inputs": [{"name": "image", "datatype": "FP32", "shape": [1, 3, 8, 8],
                            "data": [0.0] * 192}], "parameters": {"timeout": 100}}  # fmt: skip
        assert http.post("/v2/models/flowers/infer", json=late).status_code == 429
        assert post(http, IMAGES[0, :, :4]).status_code == 400
        spent = time.monotonic() - begun
        assert window.add(look(server.url, TOKEN))
        one, other = window.loads()[MODEL], window.loads()["pair", "1"]
        seconds = window._readings[-1].time - window._readings[0].time
    counts = dict(zip(one.batches.bounds, one.batches.counts, strict=True))
    assert {size: n for size, n in counts.items() if n} == {1: 3, 2: 1, 4: 2, 8: 1}
    assert one.batches.count == len(engine.batches) == 7
    assert one.batches.mean == pytest.approx(np.mean(engine.batches))
    assert one.doors == {"http": 4, "pictures": 2, "grpc": 1}
    assert one.clients == {"127.0.0.1": 7}
    assert one.answered * seconds == pytest.approx(7)
    assert (one.refused * seconds, one.failed * seconds) == pytest.approx((1, 1))
    assert one.samples * seconds == pytest.approx(sum(engine.batches))
    # Each of the 7 executions slept 30 ms; nothing else was computed.
    assert 7 * 0.03 <= one.busy * seconds <= spent
    assert min(one.whole.quantile(0.5), one.whole.mean) >= 0.025
    parts = sum(stage.total for stage in one.stages.values())
    assert 7 * 0.03 <= one.stages["compute"].total <= parts <= one.whole.total + 1e-6
    assert 0 < one.of_best <= one.busy  # batches of 5 to 8 make the most samples a second
    assert (other.answered, other.busy, other.whole.quantile(0.5)) == (0, 0, None)
    assert not window.add(first)  # as if the server had been started again: it counts from zero
    assert window.loads() == {}


def test_the_window_is_of_the_last_seconds() -> None:
    window = Window(10)
    for second in range(0, 60, 3):
        whole = Histogram((1.0, math.inf), (float(second**2), 0.0), 0.0)
        counts = serving.Counts(whole=whole)
        window.add(serving.Reading(time=second, started=1, models={MODEL: counts}))
    assert window.loads()[MODEL].answered == pytest.approx((57**2 - 45**2) / 12)


def test_a_models_instances_add_up_and_each_is_told() -> None:
    models = repository({"flowers": Scores()})
    models.load_all()
    (model,) = models.models
    model.statistics.instances = rows = [InstanceCounts("cuda:0"), InstanceCounts("cuda:1")]
    place, metrics, window = serving.address("localhost"), Metrics(models), Window(10)
    window.add(serving.reading(metrics.text().decode(), 100.0, place))
    for row, milliseconds in ((rows[0], 4000), (rows[1], 1000)):
        row.executed(8, milliseconds * 10**6)
        spent = Computation(input_ns=0, infer_ns=milliseconds * 10**6, output_ns=0)
        model.statistics.executed(8, [0], spent)
    rows[1].restarts, rows[1].is_up = 2, False
    window.add(serving.reading(metrics.text().decode(), 105.0, place))
    load = window.loads()[MODEL]
    assert load.busy == pytest.approx(0.5), "of both"
    assert [i.busy for i in load.instances.values()] == pytest.approx([0.8, 0.2])
    assert [i.device for i in load.instances.values()] == ["cuda:0", "cuda:1"]
    assert sum(i.samples for i in load.instances.values()) == pytest.approx(load.samples)
    assert (load.instances["1"].restarts, load.instances["1"].is_up) == (2, False)


def test_percentiles_are_numpys_within_a_bucket() -> None:
    """Of numbers that are spread evenly in each bucket they are NumPy's; of any, in its bucket."""
    chance = np.random.default_rng(0)
    bounds = (*BOUNDS_S, math.inf)
    counts = chance.integers(0, 400, len(BOUNDS_S))
    edges = np.array((0.0, *BOUNDS_S))
    even = np.concatenate([np.linspace(a, b, n + 1)[1:]
                           for a, b, n in zip(edges, edges[1:], counts)])  # fmt: skip
    for values, tolerance in ((even, 0.02), (chance.lognormal(-5, 1.2, 5000), None)):
        server = Statistics()
        for value in values:
            server.succeeded(int(value * 1e9), Stages(), "http")
        told = Histogram(bounds, tuple(server.whole.counts), float(values.sum()))
        for q in (0.5, 0.95, 0.99):
            found, right = told.quantile(q), float(np.quantile(values, q, method="inverted_cdf"))
            if tolerance is not None:
                assert found == pytest.approx(right, rel=tolerance)
            place = np.searchsorted(BOUNDS_S, right)
            assert edges[place] <= found <= bounds[place]
    beyond = Histogram((1.0, math.inf), (1.0, 9.0), 50.0)
    assert beyond.quantile(0.5) == 1.0
    assert Histogram((1.0, math.inf), (0.0, 0.0), 0.0).quantile(0.5) is None


def test_counts_of_another_process_are_added_once() -> None:
    """As acceptors send them: as JSON, what was counted since they did last."""
    acceptor, engine = Statistics(), Statistics()
    for seconds, door in ((0.004, "http"), (0.3, "grpc"), (0.004, "http")):
        peer = client_of([f"10.0.0.{len(door)}", 1])
        acceptor.succeeded(int(seconds * 1e9), Stages(compute=1000), door, peer)
        engine.add(json.loads(json.dumps(acceptor.taken())))
    engine.add(json.loads(json.dumps(acceptor.taken())))
    assert engine.doors == {"http": 2, "grpc": 1}
    assert engine.clients == {"10.0.0.4": 3}
    busy = client_of(["10.0.2.1", 1])
    for host in range(2 * MOST_NAMES):  # come once, beside one that asks on and on
        client_of([f"10.{3 + host // 256}.0.{host % 256}", 1])
        if host % 256 == 0:
            acceptor.succeeded(1, Stages(), "http", busy)
            assert acceptor.taken()["clients"] == {"10.0.2.1": 1}
    assert engine.whole.ns == pytest.approx(0.308e9)
    found = {b: n for b, n in zip((*BOUNDS_S, math.inf), engine.whole.counts, strict=True) if n}
    assert found == {0.005: 2, 0.5: 1}
    for host in range(2 * MOST_CLIENTS):
        acceptor.succeeded(1, Stages(), "http", client_of([f"10.0.1.{host}", 1]))
    other = Statistics()
    for told in (acceptor.taken(), engine.taken()):
        other.add(json.loads(json.dumps(told)))
    assert len(other.clients) <= MOST_CLIENTS + 1
    assert other.clients.total() == 2 * MOST_CLIENTS + 3
    assert other.clients["others"] == MOST_CLIENTS + 3


GOOD = {
    "127.0.0.1:8000": ("http://127.0.0.1:8000", True),
    " http://127.0.0.1/ ": ("http://127.0.0.1:8000", True),
    "https://serve.example.org": ("https://serve.example.org:443", False),
    "localhost:81": ("http://localhost:81", True),
    "[::1]:8001": ("http://[::1]:8001", True),
    "http://10.1.2.3:8000": ("http://10.1.2.3:8000", False),
}
BAD = (
    "", "ftp://127.0.0.1", "file:///etc/passwd", "http://", "127.0.0.1:99999", "http://[::1",
    "http://user:secret@127.0.0.1:8000", "http://127.0.0.1@evil.example", "//evil.example",
    "http://127.0.0.1:8000/v2/repository", "http://127.0.0.1:8000?x=1", "http://127.0.0.1#x",
    "http://169.254.169.254", "http://[::ffff:169.254.169.254]", "http://[fe80::1%25eth0]:80",
    "http://0.0.0.0:8000", "http://2852039166", "http://0x7f000001", "http://127.1", "224.0.0.1",
    "a host", "http://a\nb", "http://-x.org", "a" * 300, "http://bücher.example", "a..b",
)  # fmt: skip


def test_only_an_address_of_a_server_is_one() -> None:
    for written, right in GOOD.items():
        found = address(written)
        assert (found.url, found.is_loopback) == right
    for written in BAD:
        with pytest.raises(UsageError, match="no address"):
            address(written)


@contextmanager
def answering(answer: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """A server that sends the same bytes to everybody and hangs up; and what it was sent."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        heard: list[bytes] = []

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    heard.append(connection.recv(4096))
                    with suppress(OSError):
                        connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", heard
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


OK = b"HTTP/1.1 200 OK\r\nConnection: close\r\n"
LINE = 'tessella_request_seconds_bucket{le="%s",model="m",version="1"} %s\n'
SUM = 'tessella_request_seconds_sum{model="m",version="1"} 1\n'


def test_answers_that_are_no_servers_of_ours_are_told_and_bounded(monkeypatch) -> None:
    monkeypatch.setattr(serving, "TIMEOUT_S", 60.0)  # the machine may be busy
    with answering(b"") as (inner, reached):
        moved = f"HTTP/1.1 302 Found\r\nLocation: {inner}/metrics\r\n\r\n".encode()
        packed = OK + b"Content-Encoding: gzip\r\n\r\n" + b"\x1f\x8b"
        for answer, words in {
            moved: "status 302",
            OK + b"\r\n" + b"x" * (serving.MOST_BYTES + 1): "more than",
            packed: "compressed",
            OK + b"\r\nhello": "no tessella_request_seconds",
            b"not HTTP at all\r\n\r\n": "cannot be reached",
            OK + b"Content-Length: 9\r\n\r\nx": "cannot be reached",
        }.items():
            with answering(answer) as (url, _), pytest.raises(NotServed, match=words):
                look(url)
        assert not reached
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(serving, "TIMEOUT_S", 0.3)
        begun = time.monotonic()
        with pytest.raises(NotServed, match="in time"):
            look(url)
        assert time.monotonic() - begun < 30
    monkeypatch.setattr(serving, "TIMEOUT_S", 60.0)
    with pytest.raises(NotServed, match="cannot be reached"):
        look(url)


@pytest.mark.parametrize(
    "text",
    [
        LINE % ("+Inf", "nan") + SUM,
        LINE % ("+Inf", "-1") + SUM,
        LINE % ("1.0", "5") + SUM,
        LINE % ("1.0", "5") + LINE % ("+Inf", "4") + SUM,
        LINE % ("+Inf", "4"),
        LINE % ("many", "4") + SUM,
        'tessella_request_seconds_bucket{le="1"',
        'tessella_request_seconds_bucket{model="m"} 1\n',
        "".join((LINE + SUM).replace('"m"', f'"{i}"') % ("+Inf", 1) for i in range(101)),
    ],
)
def test_texts_that_no_server_writes_are_refused(text: str) -> None:
    with pytest.raises(NotServed, match="does not answer as a server of Tessella"):
        reading(text, 0.0, address("127.0.0.1"))


def test_a_link_to_no_address_says_so_and_one_to_elsewhere_asks_nobody(client) -> None:
    answer = client.get("/serve?address=http://169.254.169.254/")
    assert answer.status_code == 404
    assert "no address of a server" in answer.text
    answer = client.get("/serve?address=http://serve.example.org:8000")
    assert answer.status_code == 200
    assert "No server is watched" in answer.text


@pytest.mark.browser
def test_the_page_shows_what_a_server_does_and_that_it_is_gone(studio, chromium) -> None:
    resize(chromium, 1280, 800)
    models = repository({"flowers": Scores(delay_s=0.01)})
    with Server(models) as server:
        models.models[0].statistics.instances = [InstanceCounts("cuda:0")]
        chromium.get(f"{studio.url}/serve?token={studio.token}")
        alive(chromium)
        fill(chromium, "Address", server.url)
        press(chromium, "Watch")
        see(chromium, "of the process that runs the engines")
        row = """return [...document.querySelectorAll('tr')].map(r => r.innerText)
                 .find(t => t.includes('tensors over HTTP'))?.split(/\\s*\\t\\s*/).slice(2)"""
        sent = [-math.inf]

        def filled() -> bool:
            """Again if the window has gone by while a busy machine looked elsewhere."""
            if chromium.execute_script(row) is None and time.monotonic() - sent[-1] > 15:
                with httpx.Client(base_url=server.url, timeout=60) as http:
                    for _ in range(20):
                        post(http, IMAGES[:2])
                sent.append(time.monotonic())
            return chromium.execute_script(row) == ["20", "100 %"]

        until(filled)
        see(chromium, "0 on cuda:0")
        until(lambda: series(chromium).get("p99", 0) >= 1)
        until(lambda: series(chromium).get("executions") == 2)
        fit(chromium, 1280, "/serve")
    see(chromium, "The server cannot be reached")
