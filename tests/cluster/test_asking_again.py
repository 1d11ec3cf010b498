"""The application around Ray's proxies, with a proxy of the test's own: no Ray is needed."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tessella.cluster.front import ATTEMPTS, REPLICA, AskingAgain, died
from tessella.cluster.replica import named, refusing
from tessella.server.guard import Guard
from tessella.server.limits import Limits

TOKEN = "0123456789abcdefghij"
Proxy = Callable[[Any, Any, Any], Any]


def start(status: int, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def body(content: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": content, "more_body": more}


BY_REPLICA = (REPLICA, b"r1")
DEATH = [start(500), body(b"ActorDiedError: /home/x")]
HALF = [start(200, BY_REPLICA), body(b"abc", more=True)]


class Scripted:
    """A proxy that gives one answer after another; the last one repeats the request."""

    def __init__(self, *deaths: list[dict[str, Any]]) -> None:
        self.deaths = list(deaths)
        self.bodies: list[bytes] = []
        self.headers: dict[bytes, bytes] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.bodies.append((await receive())["body"])
        self.headers = dict(scope["headers"])
        if self.deaths:
            for message in self.deaths.pop(0):
                await send(message)
            return
        await send(start(200, BY_REPLICA))
        await send(body(b"got ", more=True))
        await send(body(self.bodies[-1]))


def ask(proxy: Proxy, *, token: str | None = None, limits: Limits | None = None, **request: Any):
    guard = Guard(host="127.0.0.1", token=token)
    app = AskingAgain(proxy, guard=guard, limits=limits or Limits())

    async def asked() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.request("POST", "/v2/models/m/infer", **request)

    return asyncio.run(asked())


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tessella.cluster.front.PAUSES_S", (0.0, 0.0, 0.0))


@pytest.mark.parametrize("deaths", [[], [DEATH], [HALF, []], [DEATH, [start(200)], DEATH]])
def test_a_replica_that_dies_costs_an_attempt_and_no_answer(deaths: list[Any]) -> None:
    proxy = Scripted(*deaths)
    answer = ask(proxy, content=b"tensors")
    assert (answer.status_code, answer.content) == (200, b"got tensors")
    assert answer.headers[ATTEMPTS.decode()] == str(len(deaths) + 1)
    assert proxy.bodies == [b"tensors"] * (len(deaths) + 1)


def test_a_request_that_ends_every_replica_ends_few(caplog: pytest.LogCaptureFixture) -> None:
    proxy = Scripted(*[DEATH] * 99)
    answer = ask(proxy, content=b"x")
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    assert "4 of them" in answer.json()["error"]
    assert "/home" not in answer.text
    assert len(proxy.bodies) == 4
    assert caplog.text.count("a replica died") == 4


@pytest.mark.parametrize(
    ("answer", "dead"),
    [
        ([start(500, BY_REPLICA), body(b"a kernel failed")], False),
        ([start(503), body(b"too many wait")], False),
        ([start(404), body(b"nothing is deployed")], False),
        ([start(200, BY_REPLICA), body(b"scores")], False),
        ([start(200, BY_REPLICA)], True),
        (HALF, True),
        (DEATH, True),
        ([], True),
    ],
)
def test_what_is_an_answer(answer: list[Any], dead: bool) -> None:
    assert died(answer) is dead


def test_strangers_and_large_bodies_reach_no_replica() -> None:
    proxy = Scripted()
    assert ask(proxy, token=TOKEN, content=b"x").status_code == 401
    assert ask(proxy, headers={"host": "elsewhere.example"}, content=b"x").status_code == 421
    assert ask(proxy, limits=Limits(body_bytes=8), content=b"x" * 9).status_code == 413
    assert ask(proxy, limits=Limits(held_bytes=8), content=b"x" * 9).status_code == 503
    assert proxy.bodies == []
    known = {"authorization": f"Bearer {TOKEN}"}
    assert ask(proxy, token=TOKEN, headers=known, content=b"x").status_code == 200


def test_a_compressed_body_is_passed_on_plain_and_measured() -> None:
    proxy = Scripted()
    content = b"tensor" * 1000
    answer = ask(proxy, headers={"content-encoding": "gzip"}, content=gzip.compress(content))
    assert answer.content == b"got " + content
    assert proxy.headers[b"content-length"] == b"6000"
    assert b"content-encoding" not in proxy.headers


@pytest.mark.parametrize(
    ("method", "path", "fix"),
    [
        ("POST", "/v2/repository/models/m/load", "--on ray again"),
        ("POST", "/v2/repository/models/m/versions/2/unload", "--on ray again"),
        ("POST", "/v2/repository/models/m/traffic", "--traffic"),
        ("POST", "/v2/systemsharedmemory/region/r/register", "body of the request"),
        ("GET", "/metrics", "Ray's metrics"),
        ("GET", "/v2/repository/models/m/traffic", None),
        ("POST", "/v2/repository/index", None),
    ],
)
def test_what_would_change_one_replica_of_many_is_refused(
    method: str, path: str, fix: str | None
) -> None:
    async def rest(scope: Any, receive: Any, send: Any) -> None:
        await send(start(200))
        await send(body(b"asked"))

    app = named(refusing(rest), "r7")

    async def asked() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.request(method, path)

    answer = asyncio.run(asked())
    assert answer.headers[REPLICA.decode()] == "r7"
    assert answer.status_code == (200 if fix is None else 501)
    assert fix is None or fix in answer.json()["error"]
