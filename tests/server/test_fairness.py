"""Who a client is, and that one of a whole server is not kept waiting by another."""

from __future__ import annotations

import http.client
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event

import numpy as np
import pytest

from tessella.server import Server
from tessella.server.fairness import PATIENCE_NS, Waiting, client_of
from tessella.server.limits import DEFAULT_LIMITS
from tessella.server.waiting import Request
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


def _waits(
    client: int = 0, *, batch: int = 1, priority: int = 2, deadline_ns: int | None = None
) -> Request:
    arrays = {"x": np.zeros((batch, 1))}
    made = Request(
        arrays=arrays, deliver=print, client=client, priority=priority, deadline_ns=deadline_ns
    )
    made.batch = batch
    return made


def _order(waiting: Waiting[Request]) -> list[int]:
    """Whose turns come one after the other, with their pieces."""
    found = []
    while waiting:
        request = waiting.pop()
        found.append(request.client)
        request.begun += min(request.batch - request.begun, 8)
        if request.begun < request.batch:
            waiting.push(request, 0)
    assert (waiting.samples, waiting.members, len(waiting._clients)) == (0, 0, 0)
    return found


def test_a_crowd_of_clients_is_no_ones_debt() -> None:
    """Who comes behind three hundred that ask once has his part from then on."""
    waiting = Waiting[Request](8)
    for _ in range(60):
        waiting.push(_waits(1), 0)
    for client in range(3, 303):
        waiting.push(_waits(client), 0)
    for _ in range(60):
        waiting.push(_waits(2), 0)
    order = _order(waiting)
    assert order[0] == 1
    assert order.index(2) <= 301
    assert order[-116:] == [1, 2] * 58
    waiting.push(_waits(2), 0)
    waiting.push(_waits(1), 0)
    assert _order(waiting) == [2, 1]


def test_what_is_abandoned_is_nobodys_debt() -> None:
    waiting = Waiting[Request](8)
    abandoned = [_waits(1, batch=3) for _ in range(20)]
    for request in [_waits(1), *abandoned]:
        waiting.push(request, 0)
    waiting.drop([*abandoned, _waits(1)])  # the last one does not wait
    for client in (1, 2, 1, 2, 2):
        waiting.push(_waits(client), 0)
    assert _order(waiting) == [1, 2, 1, 2, 1, 2]


def test_small_requests_pass_between_the_pieces_of_a_large_one() -> None:
    for deadline_ns in (None, 1, PATIENCE_NS - 1, 10 * PATIENCE_NS):
        waiting = Waiting[Request](8)
        waiting.push(_waits(1, batch=400, deadline_ns=deadline_ns), 0)
        for _ in range(3):
            waiting.push(_waits(2), 0)
        order = _order(waiting)
        assert len(order) == 53
        assert order[:6].count(2) == 3, (deadline_ns, order)


def test_what_is_urgent_goes_first_but_nobody_waits_for_ever() -> None:
    waiting = Waiting[Request](8)
    waiting.push(_waits(1), 0)
    urgent = [PATIENCE_NS + 20, PATIENCE_NS - 20, PATIENCE_NS + 30]
    for client, deadline_ns in enumerate(urgent, 2):
        before = waiting.samples_before(_waits(9, deadline_ns=deadline_ns), 100)
        assert before == (client - 1 if client != 3 else 0)
        waiting.push(_waits(client, deadline_ns=deadline_ns), 100)
    assert waiting.first.client == 3
    assert waiting.samples_before(_waits(9, priority=1), 100) == 0
    assert waiting.samples_before(_waits(9), 100) == waiting.samples_before(_waits(9), 200) == 4
    assert _order(waiting) == [3, 1, 2, 4]


@pytest.mark.parametrize("many_ns", [None, PATIENCE_NS // 2])
@pytest.mark.parametrize("few_ns", [None, PATIENCE_NS // 10, 9 * PATIENCE_NS])
def test_a_deadline_is_no_larger_part_and_no_smaller_one(
    many_ns: int | None, few_ns: int | None
) -> None:
    waiting = Waiting[Request](8)
    for _ in range(20):
        waiting.push(_waits(1, deadline_ns=many_ns), 0)
    assert waiting.pop().client == 1
    for late in (0, 1):  # the second of each two is the more urgent one
        for one in (_waits(2, deadline_ns=few_ns), _waits(2, deadline_ns=50, batch=2)):
            assert waiting.samples_before(one, late) <= 6  # of 22
            waiting.push(one, late)
    order = [waiting.pop() for _ in range(9)]
    assert [one.batch for one in order if one.client == 2] == [2, 2, 1, 1]
    assert sum(one.client == 1 for one in order) == 5


def test_who_has_had_the_engine_with_one_priority_waits_with_another() -> None:
    waiting = Waiting[Request](8)
    for client, priority in ((1, 1), (1, 2), (2, 2), (1, 2)):
        waiting.push(_waits(client, priority=priority), 0)
    assert waiting.samples_before(_waits(3, priority=1), 0) == 1
    assert _order(waiting) == [1, 2, 1, 1]


def test_what_others_had_with_a_higher_priority_is_owed_to_nobody() -> None:
    waiting = Waiting[Request](8)
    waiting.push(_waits(2), 0)
    for _ in range(300):
        waiting.push(_waits(1, priority=1), 0)
        assert waiting.pop().client == 1
    for client in (2, 3) * 30:
        waiting.push(_waits(client), 0)
    order = [waiting.pop().client for _ in range(30)]
    assert 10 < order.count(3) < 20


def test_abandoned_turns_are_forgotten() -> None:
    waiting = Waiting[Request](8)
    waiting.push(_waits(1), 0)
    for _ in range(300):
        waiting.push(gone := _waits(2, priority=3), 0)
        waiting.drop([gone])
    assert len(waiting) == 1
    assert len(waiting._turns) < 150
