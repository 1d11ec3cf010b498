"""A live server under hostile clients: whatever they send, the others are served."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import httpx
import numpy as np
import pytest

from tessella.server import Limits, Server
from tessella.server.body import BodyReader
from tests.support.engines import Scores, expected_scores, repository

pytestmark = pytest.mark.timeout(60)
IMAGE = np.random.default_rng(3).normal(size=(1, 3, 8, 8)).astype(np.float32)
SMALL = Limits(body_bytes=1 << 20, held_bytes=3 << 20, body_idle_s=0.5, head_s=0.5, waiting=4)


HTTP = httpx.Client(verify=False, timeout=60)


@pytest.fixture(scope="module", autouse=True)
def _close_http() -> Iterator[None]:
    yield
    HTTP.close()


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    """A server with small limits."""
    with Server(repository({"flowers": Scores()}, limits=SMALL), limits=SMALL) as running:
        yield running


def infer_body(image: np.ndarray = IMAGE) -> dict[str, object]:
    entry = {"name": "image", "datatype": "FP32", "shape": list(image.shape)}
    return {"inputs": [{**entry, "data": image.ravel().tolist()}]}


def still_serves(server: Server) -> None:
    answer = HTTP.post(f"{server.url}/v2/models/flowers/infer", json=infer_body(), timeout=60)
    assert answer.status_code == 200, answer.text
    np.testing.assert_allclose(
        answer.json()["outputs"][0]["data"], expected_scores(IMAGE)[0], rtol=1e-4
    )


@contextmanager
def connected(server: Server) -> Iterator[socket.socket]:
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        yield connection


def read_all(connection: socket.socket) -> bytes:
    content = b""
    try:
        while chunk := connection.recv(65536):
            content += chunk
    except ConnectionResetError:
        pass  # the server closed while more was coming: what it said before counts
    return content


HEAD = b"POST /v2/models/flowers/infer HTTP/1.1\r\nHost: localhost\r\n"


def test_trailers_are_passed_over(small: Server) -> None:
    """Nobody asks for them; those of a name that means something behind a head are no header."""
    text = json.dumps(infer_body()).encode()
    with connected(small) as connection:
        connection.sendall(CHUNKED.replace(b"1\r\n{", b"%x\r\n%b" % (len(text), text)))
        connection.sendall(b"Content-Encoding: gzip\r\nX: y\r\n\r\n" + b"GET /v2 HTTP/1.1\r\n")
        connection.sendall(b"Host: localhost\r\nConnection: close\r\n\r\n")
        assert read_all(connection).count(b"HTTP/1.1 200 OK") == 2


def test_json_of_very_many_parts(small: Server) -> None:
    """To take it apart keeps everybody waiting, where numbers of so many bytes do not."""
    entry = {"name": "image", "datatype": "FP32", "shape": [1, 3, 8, 8], "data": []}
    for text in ("[" + "[]," * 300_000 + "[]]", "[" + '"a",' * 200_000 + '"a"]'):
        whole = json.dumps({"inputs": [entry]}).replace('"data": []', f'"data": {text}')
        answer = HTTP.post(f"{small.url}/v2/models/flowers/infer", content=whole)
        assert answer.status_code == 400
        assert "parts" in answer.json()["error"]
    still_serves(small)


# --- too much -----------------------------------------------------------------------------------


def test_a_body_that_says_it_is_too_large(small: Server) -> None:
    with connected(small) as connection:
        connection.sendall(HEAD + b"Content-Length: 99999999999\r\n\r\n")
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"larger than 1,048,576 bytes" in answer
    still_serves(small)


def test_a_body_that_does_not_say_it_is_too_large(small: Server) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(100):
            yield bytes(65536)

    try:
        answer = HTTP.post(f"{small.url}/v2/models/flowers/infer", content=endless())
    except httpx.TransportError:
        pass  # the connection was closed while we were still sending
    else:
        assert answer.status_code == 413
    still_serves(small)


def test_a_body_in_very_many_tiny_chunks(small: Server) -> None:
    text = json.dumps(infer_body()).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in text) + b"0\r\n\r\n"
    with connected(small) as connection:
        connection.sendall(
            HEAD + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + chunks
        )
        assert read_all(connection).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress], ids=["gzip", "deflate"])
def test_a_bomb(small: Server, compress: object) -> None:
    bomb = compress(bytes(200 << 20))  # type: ignore[operator]
    assert len(bomb) < 1 << 20
    encoding = "gzip" if compress is gzip.compress else "deflate"
    answer = HTTP.post(
        f"{small.url}/v2/models/flowers/infer",
        content=bomb,
        headers={"Content-Encoding": encoding},
    )
    assert answer.status_code == 413
    still_serves(small)


def test_broken_compression(small: Server) -> None:
    whole = gzip.compress(json.dumps(infer_body()).encode())
    cases = [
        (b"no", "gzip", 400),
        (whole[:-9], "gzip", 400),
        (whole + b"x", "gzip", 400),
        (b"", "gzip", 400),
        (whole, "br", 415),
        (whole, "gzip, gzip", 415),
        (whole, "identity", 400),
        (whole, "gzip", 200),
    ]
    for content, encoding, status in cases:
        answer = HTTP.post(
            f"{small.url}/v2/models/flowers/infer",
            content=content,
            headers={"Content-Encoding": encoding},
        )
        assert answer.status_code == status, (encoding, answer.text)


def test_all_bodies_together_are_limited(monkeypatch) -> None:
    """Clients that hold almost-complete bodies open cannot fill the memory; it is free again as
    soon as they are gone.
    """
    nbytes = SMALL.body_bytes
    head = HEAD + b"Content-Length: %d\r\n\r\n" % nbytes
    limits = replace(SMALL, body_idle_s=60)
    kept, make = list[BodyReader](), BodyReader.__init__
    monkeypatch.setattr(
        BodyReader, "__init__", lambda self, limits: kept.append(self) or make(self, limits)
    )

    def held(count: int) -> None:
        """Wait until the server holds so many of the bodies."""
        until = time.monotonic() + 50
        while sum(reader.held_bytes for reader in kept) != count * (nbytes - 1):
            assert time.monotonic() < until
            time.sleep(0.01)

    def ask() -> httpx.Response:
        return HTTP.post(f"{server.url}/v2/models/flowers/infer", json=infer_body())

    models = repository({"flowers": Scores()}, limits=limits)
    with Server(models, limits=limits) as server:
        with ThreadPoolExecutor(4) as pool, connected(server) as a, connected(server) as b:
            with connected(server) as c:
                list(pool.map(lambda s: s.sendall(head + bytes(nbytes - 1)), (a, b, c)))
                held(3)  # else a body that still grows would be refused, not what is asked
                answer = ask()
                assert answer.status_code == 503
                assert "Retry-After" in answer.headers
            held(2)
        assert ask().status_code == 200
        still_serves(server)


def test_management_takes_no_large_body(small: Server) -> None:
    answer = HTTP.post(f"{small.url}/v2/repository/index", content=bytes((1 << 20) + 1))
    assert answer.status_code == 413


CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n"


@pytest.mark.parametrize(
    ("begin", "more"),
    [(HEAD + b"X-Filler: ", b"a"), (CHUNKED + b"X-Filler: ", b"a"), (CHUNKED, b"X: y\r\n")],
    ids=["header", "trailer", "trailers"],
)
def test_endless_headers(small: Server, begin: bytes, more: bytes) -> None:
    with connected(small) as connection:
        connection.sendall(begin)
        try:
            for _ in range(200):
                connection.sendall(more * (65536 // len(more)))
        except (BrokenPipeError, ConnectionResetError):
            pass  # closed on us after the limit, as it should
        else:
            assert read_all(connection).startswith(b"HTTP/1.1 431")
    still_serves(small)


def test_a_head_of_the_largest_allowed_size_is_fine(server: Server) -> None:
    with connected(server) as connection:
        filler = b"X-Filler: " + b"a" * 60_000 + b"\r\n"
        connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n" + filler)
        time.sleep(0.05)
        connection.sendall(b"Connection: close\r\n\r\n")
        assert read_all(connection).startswith(b"HTTP/1.1 200")


# --- too slow -----------------------------------------------------------------------------------


def test_slow_heads_and_bodies_are_given_up_and_hold_up_nobody(small: Server) -> None:
    starts = [b"", HEAD, HEAD + b"Content-Length: 1000\r\n\r\n{", b"POST /v2/mod"] * 5
    connections = []
    try:
        for start in starts:
            host, _, port = small.url.removeprefix("http://").partition(":")
            connection = socket.create_connection((host, int(port)), timeout=60)
            connections.append(connection)
            connection.sendall(start)
        begin = time.perf_counter()
        for _ in range(10):
            still_serves(small)
        assert time.perf_counter() - begin < 8  # 10 s, if they waited for the slow ones
        for start, connection in zip(starts, connections, strict=True):
            answer = read_all(connection)
            assert answer.startswith(b"HTTP/1.1 408"), (start, answer)
    finally:
        for connection in connections:
            connection.close()


def test_a_slow_but_steady_body_is_waited_for() -> None:
    text = json.dumps(infer_body()).encode()
    limits = replace(SMALL, body_idle_s=1.2)  # a busy machine may itself be silent for 1 s
    models = repository({"flowers": Scores()}, limits=limits)
    with Server(models, limits=limits) as server, connected(server) as connection:
        connection.sendall(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(text))
        step = len(text) // 9 + 1
        for start in range(0, len(text), step):
            time.sleep(0.15)  # nine times: more in all than the longest silence
            connection.sendall(text[start : start + step])
        assert read_all(connection).startswith(b"HTTP/1.1 200")


def test_an_abort_in_the_middle(small: Server) -> None:
    for end in (HEAD, HEAD + b"Content-Length: 1000\r\n\r\n", HEAD + b"Content-Length: 9\r\n\r\n{"):
        with connected(small) as connection:
            connection.sendall(end)
    still_serves(small)


def test_aborts_while_the_engine_runs() -> None:
    engine = Scores()
    engine.gate = threading.Event()
    text = json.dumps(infer_body()).encode()
    request = HEAD + b"Content-Length: %d\r\n\r\n" % len(text) + text
    with Server(repository({"flowers": engine})) as server:
        for _ in range(5):
            with connected(server) as connection:
                connection.sendall(request)
                deadline = time.monotonic() + 60
                while not engine.batches and time.monotonic() < deadline:
                    time.sleep(0.01)
        engine.gate.set()
        still_serves(server)


# --- lies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lines",
    [
        b"Content-Length: -1\r\n\r\n",
        b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
        b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
        b"Content-Length: 0x10\r\n\r\n",
        b"Bad Header\r\n\r\n",
        b"Host: localhost\r\nContent-Length: 2\r\n\r\n{}",
        b"Content-Encoding: gzip\r\nContent-Encoding: identity\r\nContent-Length: 2\r\n\r\n{}",
    ],
)
def test_malformed_http(small: Server, lines: bytes) -> None:
    with connected(small) as connection:
        connection.sendall(HEAD + lines)
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection).startswith(b"HTTP/1.1 400")
    still_serves(small)


@pytest.mark.parametrize(
    "path",
    [
        "/v2/models/../flowers",
        "/v2/models/..%2f..%2fetc%2fpasswd",
        "/v2/models/%2e%2e",
        "/v2/models/%252e%252e%252f",
        "/v2/models/flowers%00",
        "/v2/models//ready",
        "/v2/models/flowers/versions/..",
        "/v2/models/flowers/versions/../config",
        "/v2/models/flowers/../../metrics",
        "/v2/models/C:%5Cplan",
        "/v2/models/" + "a" * 5000,
        "//v2/models/flowers",
        "/v2/models/flowers/ready/x",
        "/v2/models/flowers/explain",
    ],
)
def test_paths_that_are_none(small: Server, path: str) -> None:
    with connected(small) as connection:
        head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        connection.sendall(head.encode())
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 404"), answer
    assert "error" in json.loads(answer.partition(b"\r\n\r\n")[2])


@pytest.mark.parametrize("verb", ["load", "unload"])
@pytest.mark.parametrize(
    "name", ["..", "%2e%2e", "..%2fsecret", "%2fetc%2fpasswd", "a%00", "flowers%0a", "stats", "é"]
)
def test_names_that_no_model_can_have(small: Server, verb: str, name: str) -> None:
    with connected(small) as connection:
        path = f"/v2/repository/models/{name}/{verb}".encode()
        end = b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        connection.sendall(b"POST " + path + end)
        answer = read_all(connection)
    assert answer[9:12] in (b"400", b"404"), answer
    still_serves(small)


def test_methods(small: Server) -> None:
    for method, path in [
        ("GET", "/v2/models/flowers/infer"),
        ("DELETE", "/v2/models/flowers"),
        ("POST", "/v2/health/live"),
        ("PUT", "/v2/models/flowers/infer"),
        ("GET", "/v2/repository/index"),
        ("DELETE", "/v2/repository/models/flowers/unload"),
    ]:
        assert HTTP.request(method, small.url + path).status_code == 405, (method, path)
    assert HTTP.head(f"{small.url}/v2/health/live").status_code == 200


def test_an_engine_that_fails_tells_no_secrets_and_spoils_nobody(small: Server) -> None:
    answer = HTTP.post(
        f"{small.url}/v2/models/flowers/infer", json=infer_body(np.full_like(IMAGE, 666))
    )
    assert answer.status_code == 500
    assert "secrets" not in answer.text
    assert "error" in answer.json()
    still_serves(small)


def test_an_answer_that_json_cannot_hold(small: Server) -> None:
    entry = {"name": "image", "datatype": "FP32", "shape": [1, 3, 8, 8]}
    entry["parameters"] = {"binary_data_size": 768}
    text = json.dumps({"inputs": [entry]}).encode()
    answer = HTTP.post(
        f"{small.url}/v2/models/flowers/infer",
        content=text + np.full_like(IMAGE, np.nan).tobytes(),
        headers={"Inference-Header-Content-Length": str(len(text))},
    )
    assert answer.status_code == 422
    assert "NaN" in answer.json()["error"]
    binary = HTTP.post(
        f"{small.url}/v2/models/flowers/infer",
        content=np.full_like(IMAGE, np.nan).tobytes(),
        headers={"Inference-Header-Content-Length": "0"},
    )
    assert binary.status_code == 200
    assert np.isnan(np.frombuffer(binary.content[-16:], np.float32)).all()


# --- many ---------------------------------------------------------------------------------------


def test_many_clients_get_their_own_answers_in_joined_batches() -> None:
    engine = Scores(delay_s=0.002)
    with Server(repository({"flowers": engine})) as server:

        def client(seed: int) -> None:
            rng = np.random.default_rng(seed)
            with httpx.Client(base_url=server.url, timeout=60) as http:
                for _ in range(8):
                    images = rng.normal(size=(1 + seed % 3, 3, 8, 8)).astype(np.float32)
                    answer = http.post("/v2/models/flowers/infer", json=infer_body(images))
                    scores = np.reshape(answer.json()["outputs"][0]["data"], (-1, 4))
                    np.testing.assert_allclose(
                        scores, expected_scores(images), rtol=1e-3, atol=1e-3
                    )

        with ThreadPoolExecutor(32) as pool:
            list(pool.map(client, range(32)))
        stats = HTTP.get(f"{server.url}/v2/models/flowers/stats").json()["model_stats"][0]
    samples = sum(8 * (1 + seed % 3) for seed in range(32))
    assert stats["inference_stats"]["success"]["count"] == 32 * 8
    assert stats["inference_count"] == samples == sum(engine.batches)
    assert stats["execution_count"] == len(engine.batches) < 32 * 8
    assert max(engine.batches) <= 8


def test_a_full_queue_says_so() -> None:
    engine = Scores()
    engine.gate = threading.Event()
    limits = Limits(waiting=2)
    with Server(repository({"flowers": engine}, limits=limits), limits=limits) as server:

        def post(_: int) -> httpx.Response:
            return HTTP.post(f"{server.url}/v2/models/flowers/infer", json=infer_body(), timeout=30)

        with ThreadPoolExecutor(6) as pool:
            answers = [pool.submit(post, 0)]
            deadline = time.monotonic() + 60
            while not engine.batches and time.monotonic() < deadline:
                time.sleep(0.01)
            answers += [pool.submit(post, i) for i in range(1, 6)]
            while sum(a.done() for a in answers) < 3 and time.monotonic() < deadline:
                time.sleep(0.01)
            refused = [a.result() for a in answers if a.done()]
            assert [r.status_code for r in refused] == [503] * 3
            assert "too many requests wait" in refused[0].json()["error"]
            engine.gate.set()
            assert sorted(a.result().status_code for a in answers) == [200] * 3 + [503] * 3
        text = HTTP.get(f"{server.url}/metrics").text
    assert 'nv_inference_request_failure{model="flowers",reason="REJECTED",version="1"} 3.0' in text
