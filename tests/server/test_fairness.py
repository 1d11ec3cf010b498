"""Who a client is, and that one of a whole server is not kept waiting by another."""

from __future__ import annotations

import http.client
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event

from tessella.server import Server
from tessella.server.fairness import client_of
from tessella.server.limits import DEFAULT_LIMITS
from tests.support.engines import RECORD, Scores, repository


def test_a_client_is_an_address() -> None:
    one = client_of(("192.0.2.1", 40000))
    assert one == client_of(("192.0.2.1", 50000)) != client_of(("192.0.2.2", 40000))
    assert one == client_of(("::ffff:192.0.2.1", 40000, 0, 0))
    assert client_of(("2001:db8::1", 1, 0, 0)) == client_of(("2001:db8::ffff:1", 1, 0, 0))
    assert client_of(("2001:db8::1", 1, 0, 0)) != client_of(("2001:db8:0:1::1", 1, 0, 0))
    assert client_of(("fe80::1%eth0", 1, 0, 2)) == client_of(("fe80::2%eth0", 1, 0, 2))
    assert client_of(None) == client_of(()) == 0  # of a socket that has none


def test_who_comes_to_a_full_queue_has_the_place_of_who_has_many() -> None:
    engine = Scores()
    engine.gate = Event()
    limits = replace(DEFAULT_LIMITS, waiting=4)
    image = bytes(4 * RECORD.height * RECORD.width * RECORD.channels)

    def ask(source: str) -> int:
        connection = http.client.HTTPConnection(host, int(port), 60, source_address=(source, 0))
        headers = {"Inference-Header-Content-Length": "0"}
        connection.request("POST", "/v2/models/flowers/infer", image, headers)
        status = connection.getresponse().status
        connection.close()
        return status

    models = repository({"flowers": engine}, limits=limits)
    with Server(models, limits=limits) as server, ThreadPoolExecutor(7) as pool:
        host, port = server.url.removeprefix("http://").split(":")
        statistics = models.get("flowers").statistics
        greedy = [pool.submit(ask, "127.0.0.1")]
        until_s = time.monotonic() + 30
        while not engine.batches and time.monotonic() < until_s:
            time.sleep(0.001)
        greedy += [pool.submit(ask, "127.0.0.1") for _ in range(4)]
        while statistics.waiting < 4 and time.monotonic() < until_s:
            time.sleep(0.001)
        modest = pool.submit(ask, "127.0.0.2")
        while not statistics.fail.count and time.monotonic() < until_s:
            time.sleep(0.001)
        engine.gate.set()
        assert modest.result() == 200
        assert sorted(one.result() for one in greedy) == [200] * 4 + [503]
