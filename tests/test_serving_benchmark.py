"""What the benchmark of the server reads in wrk's words."""

from __future__ import annotations

import pytest

from benchmarks.serving import engine_us, parse
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
