"""The short way: whatever comes, both ways give the same answers, count the same and hold nothing.

Most tests talk to a connection over a transport of their own, in one thread: so that every cut of a
stream of requests can be tried.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import numpy as np
import pytest
from uvicorn.server import ServerState

from tessella.server import Limits, Server, short_way
from tessella.server.app import App
from tessella.server.describing import Describing
from tessella.server.guard import Guard
from tessella.server.limits import DEFAULT_LIMITS
from tessella.server.listening import configured
from tessella.server.metrics import Metrics
from tessella.server.pace import Pace
from tessella.server.repository import Repository
from tessella.server.short_way import MOST_HEADS, ShortRequest, ShortWay
from tests.support.engines import FakeEngine, Pair, Scores, expected_scores, repository
from tests.support.wires import Wire

pytestmark = pytest.mark.timeout(60)
IMAGE = np.random.default_rng(3).normal(size=(1, 3, 8, 8)).astype(np.float32)
PATH = b"/v2/models/flowers/infer"
TOKEN = "0123456789abcdef"


class Steady(Pace):
    """Takes every execution for short: so all of them run in the event loop's thread."""

    def expected_ns(self, samples: int, largest: int) -> int:
        return 1000


PLACES: list[Place] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while PLACES:
        PLACES.pop().app._images.close()


class Place:
    """The parts of a server, for connections in the test's own event loop."""

    def __init__(
        self,
        *,
        is_short: bool = True,
        limits: Limits = DEFAULT_LIMITS,
        engines: dict[str, FakeEngine] | None = None,
        token: str | None = None,
    ) -> None:
        PLACES.append(self)
        self.models: Repository = repository(engines or {"flowers": Scores(), "pair": Pair()})
        self.models.load_all()
        for model in self.models.models:
            model.batcher._effort = Steady()
        guard = Guard(host="127.0.0.1", token=token)
        rest = Describing(self.models, token=token is not None)
        self.app = App(self.models, guard, limits, rest=rest)
        self.way: ShortWay = self.app.short_way
        if not is_short:
            self.way.learn = lambda *_: None  # type: ignore[method-assign]
        self.config = configured(self.app, limits)
        self.config.load()
        self.state = ServerState()
        self.state.default_headers = [(b"date", b"today")]

    def connect(self) -> Wire:
        wire = Wire()
        made = self.config.http_protocol_class
        wire.protocol = made(config=self.config, server_state=self.state, app_state={})  # type: ignore[call-arg, arg-type, assignment]
        wire.protocol.connection_made(wire)
        return wire

    @property
    def held_bytes(self) -> int:
        return self.app.bodies.held_bytes

    def counts(self) -> list[str]:
        """The metrics that are no durations."""
        lines = Metrics(self.models).text().decode().splitlines()
        kinds = (
            r"nv_inference_(request_success|request_failure|count|exec_count|pending)\w*|.*_count"
        )
        return [line for line in lines if re.match(rf"(?!process|python)({kinds})\{{", line)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


def is_settled(wire: Wire) -> bool:
    connection = wire.protocol
    return wire.is_closing() or (
        connection._request is None
        and not connection._behind
        and (connection.cycle is None or connection.cycle.response_complete)
    )


async def say(wire: Wire, *parts: bytes) -> bytes:
    """Send parts of a stream, and what was answered to all of it."""
    before = len(wire.sent)
    for part in parts:
        await until(lambda: wire.is_closing() or not wire.is_paused)
        if wire.is_closing():
            break
        wire.protocol.data_received(part)
        await asyncio.sleep(0)
    await until(lambda: is_settled(wire))
    return told(wire.sent[before:])


def told(answers: bytes) -> bytes:
    """Answers without what differs from one time to the next."""
    return re.sub(rb"dur=[0-9.]+", b"dur=", answers)


def request(body: bytes, *lines: bytes, path: bytes = PATH, method: bytes = b"POST") -> bytes:
    head = [method + b" " + path + b" HTTP/1.1", b"Host: localhost", *lines]
    if not any(line.lower().startswith((b"content-length", b"transfer")) for line in lines):
        head.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join([*head, b"", body])


def raw(image: np.ndarray = IMAGE, *lines: bytes, path: bytes = PATH) -> bytes:
    return request(image.tobytes(), b"Inference-Header-Content-Length: 0", *lines, path=path)


def binary(image: np.ndarray = IMAGE, *lines: bytes, **parameters: Any) -> bytes:
    entry = {"name": "image", "datatype": "FP32", "shape": list(image.shape)}
    entry["parameters"] = {"binary_data_size": image.nbytes}
    text = json.dumps({"inputs": [entry], "parameters": parameters}).encode()
    length = b"Inference-Header-Content-Length: %d" % len(text)
    return request(text + image.tobytes(), length, *lines)


def in_json(image: np.ndarray = IMAGE, *lines: bytes) -> bytes:
    entry = {"name": "image", "datatype": "FP32", "shape": list(image.shape)}
    return request(
        json.dumps({"inputs": [entry | {"data": image.ravel().tolist()}]}).encode(), *lines
    )


BATCH = np.repeat(IMAGE, 40, axis=0)
GOOD = {
    "raw": raw(),
    "a version": raw(path=b"/v2/models/flowers/versions/1/infer"),
    "usual headers": raw(IMAGE, b"User-Agent: x", b"Accept: */*", b"Connection: keep-alive"),
    "a batch": raw(BATCH),
    "binary": binary(),
    "binary out": binary(IMAGE, binary_data_output=True),
    "a deadline": binary(IMAGE, timeout=10_000_000, priority=1),
    "json": in_json(),
    "compressed": in_json(BATCH, b"Accept-Encoding: gzip, deflate"),
    "too small to compress": in_json(IMAGE, b"Accept-Encoding: gzip, deflate"),
    "not compressed": in_json(BATCH, b"Accept-Encoding: br, gzip;q=0"),
}
BAD = {
    "no such time": binary(IMAGE, timeout=-1),
    "the wrong bytes": request(b"123", b"Inference-Header-Content-Length: 0"),
    "no json": request(b"{]"),
    "nothing": request(b""),
    "a lying length": request(b"{}", b"Inference-Header-Content-Length: 9"),
    "an engine that fails": raw(np.full_like(IMAGE, 666)),
    "no finite answer": binary(np.full_like(IMAGE, np.nan)),
    "two inputs": request(b"1234", b"Inference-Header-Content-Length: 0",
                          path=b"/v2/models/pair/infer"),
}  # fmt: skip
OTHER = {
    "two at once": raw() + in_json(),
    "another route": request(b"", path=b"/v2/health/live", method=b"GET"),
    "no such model": raw(path=b"/v2/models/roses/infer"),
    "no such version": raw(path=b"/v2/models/flowers/versions/2/infer"),
    "a picture": request(b"no picture", path=b"/v2/models/flowers/classify"),
    "a file in json": request(json.dumps({"inputs": [{"name": "image", "datatype": "BYTES",
                                                      "shape": [1], "data": ["AAAA"]}]}).encode()),
    "chunks": request(b"2\r\n{}\r\n0\r\n\r\n", b"Transfer-Encoding: chunked"),
    "expects": raw(IMAGE, b"Expect: 100-continue"),
    "another site": raw(IMAGE, b"Origin: http://example.org"),
    "another host": raw().replace(b"localhost", b"example.org"),
    "an encoding": raw(IMAGE, b"Content-Encoding: gzip"),
    "a query": raw(path=PATH + b"?x=1"),
    "an absolute address": raw(path=b"http://localhost" + PATH),
    "a trace": raw(IMAGE, b"traceparent: 00-1-2-3"),
    "line ends before": b"\r\n\r\n" + raw(),
    "spaces": raw(IMAGE, b"User-Agent: \t x \t"),
    "a header of no value": raw(IMAGE, b"User-Agent:"),
    "an empty header twice": raw(IMAGE, b"Accept: a", b"Accept: b"),
}  # fmt: skip
ENDING = {
    "two lengths": raw(IMAGE, b"Content-Length: 768", b"Content-Length: 4"),
    "a length and chunks": raw(IMAGE, b"Content-Length: 768", b"Transfer-Encoding: chunked"),
    "chunks and a length": raw(IMAGE, b"Transfer-Encoding: chunked", b"Content-Length: 768"),
    "a folded line": raw(IMAGE, b"User-Agent: a", b" Content-Length: 4"),
    "bare line feeds": raw().replace(b"\r\n", b"\n"),
    "a bare line feed": raw().replace(b"localhost\r\n", b"localhost\n"),
    "line feeds before the end": raw().replace(b"\r\n\r\n", b"\n\n" + b"\0" * 9 + b"\r\n\r\n"),
    "a bare return": raw().replace(b"localhost\r\n", b"localhost\r"),
    "a zero byte": raw(IMAGE, b"User-Agent: \0"),
    "a space before the colon": raw(IMAGE, b"Content-Length : 768"),
    "a signed length": raw(IMAGE, b"Content-Length: +768"),
    "http 1.0": raw().replace(b"HTTP/1.1", b"HTTP/1.0"),
    "http 0.9": b"GET " + PATH + b"\r\n\r\n",
    "no method": b"PO\0ST" + raw()[4:],
    "a small method": b"post" + raw()[4:],
    "the end": raw(IMAGE, b"Connection: close"),
    "an upgrade": raw(IMAGE, b"Connection: upgrade", b"Upgrade: websocket"),
    "too much": raw(IMAGE, b"Content-Length: 999999999"),
}
LAST = request(b"", b"Connection: close", path=b"/v2/health/live", method=b"GET")


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each request that came to the short way, whether it stayed there."""
    ways: list[bool] = []
    run = ShortRequest.run

    def noted(self: ShortRequest) -> bool:
        ways.append(run(self))
        return ways[-1]

    monkeypatch.setattr(ShortRequest, "run", noted)
    return ways


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


@pytest.mark.parametrize("name", [*GOOD, *BAD])
def test_a_known_head_takes_the_short_way_to_the_same_answer(name: str, taken: list[bool]) -> None:
    async def test() -> None:
        content = (GOOD | BAD)[name]
        there, here = Place(is_short=False), Place()
        expected = [await say(there.connect(), content) for _ in range(3)]
        assert not taken
        assert [await say(here.connect(), content) for _ in range(3)] == expected
        assert taken
        assert all(taken)
        assert here.counts() == there.counts()
        assert here.held_bytes == there.held_bytes == 0
        assert here.state.total_requests == there.state.total_requests
        assert expected[0].startswith(b"HTTP/1.1 200" if name in GOOD else b"HTTP/1.1 ")

    run(test())


def test_only_the_length_of_a_body_may_differ(taken: list[bool]) -> None:
    async def test() -> None:
        there, here = Place(is_short=False), Place()
        for place in (there, here):
            await say(place.connect(), raw())
        bodies = [raw(np.repeat(IMAGE, count, axis=0)) for count in (3, 1, 4, 2, 3)]
        for body in bodies:
            assert await say(here.connect(), body) == await say(there.connect(), body)
        assert len(taken) == len(bodies)
        length = len(IMAGE.tobytes())
        for told in (
            b"0%d", b" %d", b"%d ", b"+%d", b"-%d", b"%d, %d", b"%d\r\nContent-Length: %d", b"0x%x",
            b"%d\r\n x", b"%d0000000000", b"%d\n", b"", b"%d\r\nTransfer-Encoding: chunked",
        ):  # fmt: skip
            said = told % ((length,) * told.count(b"%"))
            content = raw().replace(b"Content-Length: %d" % length, b"Content-Length: " + said, 1)
            assert content != raw()
            both = [await say(place.connect(), content + LAST) for place in (there, here)]
            assert both[0] == both[1], told
        assert here.counts() == there.counts()
        assert here.held_bytes == there.held_bytes == 0

    run(test())


@pytest.mark.parametrize("name", [*OTHER, *ENDING])
def test_whatever_is_unusual_is_answered_as_by_the_long_way(name: str) -> None:
    async def test() -> None:
        content = (OTHER | ENDING)[name]
        there, here = Place(is_short=False), Place()
        for stream in (content + LAST, raw() + content + LAST, content * 2 + raw() + LAST):
            for _ in range(3):
                answers = []
                for place in (there, here):
                    wire = (
                        place.connect()
                    )  # where a parser finds an error, what runs is not answered
                    answers.append(await say(wire, raw()) + await say(wire, stream))
                assert answers[0] == answers[1]
        assert here.counts() == there.counts()
        assert here.held_bytes == there.held_bytes == 0

    run(test())


def test_a_known_head_that_is_no_head(taken: list[bool]) -> None:
    async def test() -> None:
        there, here = Place(is_short=False), Place()
        hidden = request(b"", b"Content-Length: %d" % len(raw()), path=b"/v2/models/roses/infer")
        begun = [hidden, b"X", b"GET ", b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nX: "]
        for beginning in begun:
            answers = []
            for place in (there, here):
                wire = place.connect()
                answers.append(await say(wire, raw()))
                answers[-1] += await say(wire, beginning)  # 404, before the body comes
                answers[-1] += await say(wire, raw(), LAST)
            assert answers[0] == answers[1]
        assert len(taken) == len(begun) - 1  # but for the first of all, each wire's first request
        assert here.counts() == there.counts()

    run(test())


def test_what_the_parser_does_not_read_byte_for_byte_is_never_learned() -> None:
    async def test() -> None:
        here = Place()
        fine = {"two at once", "a file in json", "spaces", "a header of no value", "a query",
                "an absolute address"}  # fmt: skip
        unusual = [c for name, c in (OTHER | ENDING).items() if name not in fine]
        for content in unusual:
            await say(here.connect(), content)
            await say(here.connect(), content + LAST)
        heads = {content.partition(b"\r\n\r\n")[0] + b"\r\n\r\n" for content in unusual}
        assert not heads & here.way._heads.keys()

    run(test())


def test_a_request_may_be_cut_anywhere(taken: list[bool]) -> None:
    async def test() -> None:
        here = Place()
        wire = here.connect()
        content = raw()
        expected = await say(wire, content)
        for cut in range(1, len(content)):
            assert await say(wire, content[:cut], content[cut:]) == expected
        head = content.index(b"\r\n\r\n") + 4
        assert len(taken) == len(content) - head
        step = 7
        for rest in range(step):
            cuts = range(head + rest, len(content), step)
            ends = [*cuts, len(content)]
            parts = [content[a:b] for a, b in zip([0, *cuts], ends, strict=True)]
            assert await say(wire, *parts) == expected
        assert here.held_bytes == 0

    run(test())


def test_streams_of_all_kinds_of_requests_cut_at_random() -> None:
    async def test() -> None:
        there, here = Place(is_short=False), Place()
        kinds = list((GOOD | BAD | OTHER).values())
        choose = random.Random(0)
        for _ in range(60):
            stream = b"".join(choose.choices(kinds, k=6))
            cuts = sorted(choose.sample(range(1, len(stream)), choose.randint(0, 8)))
            parts = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
            expected = await say(there.connect(), *parts, LAST)
            assert await say(here.connect(), *parts, LAST) == expected
        assert here.counts() == there.counts()
        assert here.held_bytes == there.held_bytes == 0

    run(test())


def test_a_body_that_stops_coming_is_the_long_ways(taken: list[bool]) -> None:
    async def test() -> None:
        limits = Limits(body_idle_s=0.2)
        there, here, patient = Place(is_short=False, limits=limits), Place(limits=limits), Place()
        expected = await say(there.connect(), raw()[:-5])
        assert expected.startswith(b"HTTP/1.1 408")
        wire = patient.connect()
        ok = await say(wire, raw())
        wire.protocol.data_received(raw()[:-5])
        assert patient.held_bytes == IMAGE.nbytes - 5
        await until(lambda: wire.protocol._request is None)  # the parser has it
        assert await say(wire, raw()[-5:]) == ok
        assert patient.held_bytes == 0
        wire = here.connect()
        assert await say(wire, raw()) == ok
        assert await say(wire, raw()[:-5]) == expected
        assert here.held_bytes == 0
        assert not taken

    run(test())


def test_clients_that_go_away(taken: list[bool]) -> None:
    async def test() -> None:
        there, here = Place(is_short=False), Place()
        for place in (there, here):
            await say(place.connect(), raw())
            for content in (raw()[:-5], raw()):
                wire = place.connect()
                wire.protocol.data_received(content)
                wire.close()
                await asyncio.sleep(0.01)
                assert wire.sent == b""
        await until(lambda: not there.state.tasks)
        assert taken == [True]
        assert here.counts() == there.counts()
        assert here.held_bytes == there.held_bytes == 0
        assert len(here.state.connections) == 1  # that of the first answer

    run(test())


@pytest.mark.parametrize(
    ("bad", "status"),
    [
        (b"NONSENSE\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nx: " + b"a" * (DEFAULT_LIMITS.head_bytes + 1), b"431"),
        (raw(IMAGE, b"Transfer-Encoding: chunked")[:-768] + b"no number\r\n", b"400"),
    ],
)
def test_requests_that_came_whole_are_answered_before_a_broken_one(
    bad: bytes, status: bytes
) -> None:
    async def test() -> None:
        for whole in (1, 3):
            for cut in (len(bad), 5):
                place = Place()
                wire = place.connect()
                sent = raw() * whole + bad[:cut]
                wire.protocol.data_received(sent)
                for part in (bad[cut:], b"more"):
                    if part and not wire.is_closing():
                        wire.protocol.data_received(part)
                await until(wire.is_closing)
                statuses = re.findall(rb"HTTP/1.1 (\d+)", wire.sent)
                assert statuses == [b"200"] * whole + [status]
                await until(lambda place=place: place.held_bytes == 0)

    run(test())


def test_a_broken_request_alone_is_refused_at_once() -> None:
    async def test() -> None:
        wire = Place().connect()
        wire.protocol.data_received(b"NONSENSE\r\n\r\n")
        assert wire.sent.startswith(b"HTTP/1.1 400")
        assert wire.is_closing()

    run(test())


def test_a_shutdown_waits_for_the_answer_and_says_that_it_is_the_last() -> None:
    async def test() -> None:
        for content in ((raw(),), (raw()[:-5], raw()[-5:])):
            answers = []
            for place in (Place(is_short=False), Place()):
                await say(place.connect(), raw())
                wire = place.connect()
                first, *rest = content
                wire.protocol.data_received(first)
                wire.protocol.shutdown()
                answers.append(await say(wire, *rest))
                assert wire.is_closing()
            assert answers[0] == answers[1]
            assert b"connection: close" in answers[1]
        wire = Place().connect()
        wire.protocol.shutdown()
        await until(wire.is_closing)  # a request may be on its way

    run(test())


def test_the_bytes_of_all_requests_are_limited(taken: list[bool]) -> None:
    async def test() -> None:
        limits = Limits(held_bytes=2 * IMAGE.nbytes)
        there, here = Place(is_short=False, limits=limits), Place(limits=limits)
        answers = []
        for place in (there, here):
            await say(place.connect(), raw())
            place.app.bodies.hold(IMAGE.nbytes + 1)
            answers.append(await say(place.connect(), raw()))
            place.app.bodies.held_bytes = 0
            answers[-1] += await say(place.connect(), raw())
        assert answers[0] == answers[1]
        assert answers[0].startswith(b"HTTP/1.1 503")
        assert taken == [True]
        assert here.counts() == there.counts()

    run(test())


def test_a_client_that_reads_nothing_takes_the_long_way(taken: list[bool]) -> None:
    async def test() -> None:
        here = Place()
        wire = here.connect()
        await say(wire, raw())
        wire.protocol.pause_writing()
        wire.protocol.data_received(raw())
        await asyncio.sleep(0.01)
        assert not taken
        wire.protocol.resume_writing()
        await until(lambda: is_settled(wire))
        assert told(wire.sent).count(b"HTTP/1.1 200") == 2

    run(test())


def test_tokens() -> None:
    async def test() -> None:
        here = Place(token=TOKEN)
        good = raw(IMAGE, b"Authorization: Bearer " + TOKEN.encode())
        wrong = [raw(), raw(IMAGE, b"Authorization: Bearer " + TOKEN[:-1].encode()),
                 raw(IMAGE, b"Authorization: Basic " + TOKEN.encode())]  # fmt: skip
        for _ in range(3):
            assert (await say(here.connect(), good)).startswith(b"HTTP/1.1 200")
            for content in wrong:
                assert (await say(here.connect(), content)).startswith(b"HTTP/1.1 401")
        assert [h.count(TOKEN.encode()) for h in here.way._heads] == [1]

    run(test())


def test_what_is_remembered_is_bounded() -> None:
    async def test() -> None:
        here = Place()
        for i in range(MOST_HEADS + 9):
            await say(here.connect(), raw(IMAGE, b"User-Agent: %d" % i))
        assert len(here.way._heads) == 9
        await say(here.connect(), raw(IMAGE, b"User-Agent: " + b"x" * short_way.MOST_HEAD_BYTES))
        assert len(here.way._heads) == 9

    run(test())


def test_a_model_that_was_unloaded_and_loaded_again(taken: list[bool]) -> None:
    async def test() -> None:
        engines = {"flowers": Scores()}
        here = Place(engines=engines)
        await say(here.connect(), raw())
        await here.models.unload("flowers")
        assert (await say(here.connect(), raw())).startswith(b"HTTP/1.1 503")
        engines["flowers"] = Scores()
        await here.models.load("flowers")
        answer = await say(here.connect(), raw())
        assert answer.startswith(b"HTTP/1.1 200")
        scores = np.frombuffer(answer[-16:], np.float32)
        np.testing.assert_allclose(scores, expected_scores(IMAGE)[0], rtol=1e-4)
        assert taken == [True, True]

    run(test())


def test_requests_of_one_turn_are_one_batch_each_with_its_own_answer() -> None:
    async def test() -> None:
        engine = Scores()
        here = Place(engines={"flowers": engine})
        await say(here.connect(), raw())
        images = np.random.default_rng(0).normal(size=(6, 1, 3, 8, 8)).astype(np.float32)
        wires = [here.connect() for _ in images]
        for wire, image in zip(wires, images, strict=True):
            wire.protocol.data_received(raw(image))
        await until(lambda: all(map(is_settled, wires)))
        assert engine.batches == [1, 6]
        for wire, image in zip(wires, images, strict=True):
            scores = np.frombuffer(wire.sent[-16:], np.float32)
            np.testing.assert_allclose(scores, expected_scores(image)[0], rtol=1e-4, atol=1e-5)

    run(test())


def test_a_live_server_takes_it(server: Server, http: Any, taken: list[bool]) -> None:
    headers = {"Inference-Header-Content-Length": "0"}
    for _ in range(4):
        answer = http.post(PATH.decode(), content=IMAGE.tobytes(), headers=headers)
        assert answer.status_code == 200
    assert taken == [True] * 3
