"""What the benchmark of the server reads in wrk's words."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import serve
from benchmarks.losses import Clients
from benchmarks.serving import BARE, JSON_HEADERS, Asked, beside_peers, engine_us, parse
from tests.support.engines import Scores

# As wrk 4.1.0 printed it.
TEXT = """\
Running 2s test @ http://127.0.0.1:38137/v2/models/lenet/infer
  1 threads and 128 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency     5.49ms   10.93ms 219.23ms   99.00%
    Req/Sec    27.16k     3.87k   30.28k    90.00%
  Latency Distribution
     50%  984.00us
     75%    4.71ms
     90%    5.36ms
     99%    1.05s
  54134 requests in 2.01s, 9.50MB read
Requests/sec:  26958.60
Transfer/sec:      4.73MB
""".replace("1.05s", "1.05s ")


def test_rate_and_latencies() -> None:
    assert parse(TEXT) == {"requests_per_s": 26958.6, "p50_ms": 0.984, "p99_ms": 1050.0}


@pytest.mark.parametrize(
    "line", ["  Non-2xx or 3xx responses: 3\n", "  Socket errors: connect 0, read 1, write 0\n"]
)
def test_a_run_with_errors_is_no_measurement(line: str) -> None:
    with pytest.raises(ValueError, match="not every request"):
        parse(TEXT + line)


def test_the_engines_time_is_that_of_one_image() -> None:
    engine = Scores(delay_s=0.004)
    assert engine_us(engine, 1, seconds=0) >= 4000  # type: ignore[arg-type]
    assert engine_us(engine, 8, seconds=0.01) >= 500  # type: ignore[arg-type]
    assert engine.batches[:2] == [1, 8]


def test_ratios_to_peers_are_medians_over_the_rounds() -> None:
    def row(server: str, clients: int, *rates: float) -> dict[str, object]:
        return {
            "server": server,
            "clients": clients,
            "rounds": [{"requests_per_s": rate} for rate in rates],
        }

    rows = [
        row("one process", 1, 100, 300, 1000),
        row("one process", 32, 50, 50, 50),
        row(BARE, 1, 1, 1, 1),
        row("litserve", 1, 50, 100, 100),
        row("litserve", 32, 100, 100, 100),
    ]
    told = {"one process over litserve": "3.00 with 1 client, 0.50 with 32 clients"}
    assert beside_peers(rows) == told


def test_what_wrk_sends_lies_in_a_file(tmp_path: Path) -> None:
    asked = Asked(url="http://127.0.0.1/x", body=b'{"a": 1}', headers=JSON_HEADERS)
    text = asked.script(tmp_path, "litserve").read_text()
    assert 'wrk.headers["Content-Type"] = "application/json"' in text
    assert (tmp_path / "litserve.body").read_bytes() == b'{"a": 1}'
    assert f'io.open("{tmp_path}/litserve.body", "rb")' in text


def test_what_is_lost_is_counted_by_kind(tmp_path: Path) -> None:
    scores = np.stack([np.arange(10.0), 2 * np.arange(10.0)]).astype(np.float32)
    np.save(tmp_path / "scores.npy", scores)
    (tmp_path / "request").write_bytes(b"ask")
    bodies = [scores[0], scores[1] + 1e-4, scores[0] + 1, scores[1]]
    statuses = [b"200", b"200", b"200", b"503"]
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        connection, _ = listener.accept()
        listener.close()
        with connection:
            for status, body in zip(statuses, bodies, strict=True):
                assert connection.recv(100) == b"ask"
                head = b"HTTP/1.1 %s X\r\nContent-Length: 40\r\n\r\n" % status
                connection.sendall(head + body.tobytes())
            assert connection.recv(100) == b"ask"  # and it is lost

    with ThreadPoolExecutor() as pool:
        answered = pool.submit(answer)
        clients = Clients(listener.getsockname(), tmp_path)
        clients.ask(1, 60, is_enough=lambda: clients.counts["unsent"] > 0)
        answered.result()
    assert clients.counts.pop("unsent") > 0
    assert clients.counts == {"first": 1, "second": 1, "other": 1, "503": 1, "lost": 1}
    assert len(clients.lost_s) == 1


@pytest.mark.timeout(180)
def test_the_servers_benchmark_runs_on_two_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A smoke test without thresholds: each work has its row, and every request its answer."""
    works = ("lone", "one")
    asked = [
        "serve", "--target", "cpu", "--network", "lenet", "--precision", "fp32", "--untuned",
        "--batch", "4", "--works", ",".join(works), "--acceptors", "0", "--clients", "2",
        "--generators", "1", "--seconds", "0.1", "--out", str(tmp_path / "serve.json"),
    ]  # fmt: skip
    monkeypatch.setattr("sys.argv", asked)
    serve.main()
    (run,) = _runs(tmp_path / "serve.json")
    engine, arrays, *rows = run["rows"]
    assert [row["work"] for row in rows] == list(works)
    for row in rows:
        assert not row["failures"], row
        assert row["images_per_s"] > 0
        assert row["of_device"] == round(row["images_per_s"] / engine["images_per_s"], 3)
        assert row["of_engine"] == round(row["images_per_s"] / arrays["images_per_s"], 3)


def _runs(path: Path) -> list[dict[str, Any]]:
    found = json.loads(path.read_text())
    return found if isinstance(found, list) else [found]
