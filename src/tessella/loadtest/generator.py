"""Send requests by a schedule, and count what comes back.

In an open loop the latency of a request runs from the time at which it was to be sent, also when
no connection was free then: a server that stalls is charged for all who would have come meanwhile
(no coordinated omission).
"""

from __future__ import annotations

import asyncio
import math
import ssl
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httptools
import uvloop

from tessella.core.errors import ServeError, UsageError
from tessella.loadtest.bodies import Target
from tessella.loadtest.schedule import Schedule

try:
    import grpc
except ImportError:
    grpc = None

NOT_SENT = "not sent"  # the failure of a request that was given up
ANSWER_S = 60.0  # after the last request, how long its answer is waited for
Ask = Callable[[bytes], Awaitable[str]]  # the answer's status, "200" or "OK" if it is good


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came back.

    Attributes:
        latencies_s: of good answers, sorted.
        failures: other answers, by status.
        late_s: how much later than intended requests were sent, sorted; empty in a closed loop.
        seconds: from the start to the last answer, at least as long as the schedule.
        generator_cores: what part of a core this process took meanwhile.
    """

    latencies_s: list[float] = field(repr=False)
    failures: dict[str, int]
    late_s: list[float] = field(repr=False)
    seconds: float
    generator_cores: float = 0.0

    @property
    def rate(self) -> float:
        """Good answers a second."""
        return len(self.latencies_s) / self.seconds

    def percentile(self, percent: float) -> float:
        """The latency within which so many of the good answers came; NaN without any."""
        return _percentile(self.latencies_s, percent)

    def lateness(self, percent: float) -> float:
        """As ``percentile``, of how late the generator itself was."""
        return _percentile(self.late_s, percent)

    def goodput(self, slo_s: float) -> float:
        """Good answers a second that came within ``slo_s`` seconds."""
        return sum(s <= slo_s for s in self.latencies_s) / self.seconds


def generate(
    target: Target, body: bytes, schedule: Schedule, *, give_up_s: float = math.inf
) -> Outcome:
    """Run a schedule; HTTP for a target without ``grpc``.

    Args:
        give_up_s: requests of an open loop for which no connection is free so long after their time
            are failures, ``not sent``: an overload ends soon after its schedule.

    Raises:
        ServeError: the server cannot be reached.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_generate(target, body, schedule, give_up_s))


async def _generate(target: Target, body: bytes, schedule: Schedule, give_up_s: float) -> Outcome:
    asks: list[Ask] = []
    close: Callable[[], Awaitable[None]] = _nothing
    if target.grpc is not None:
        asks, close = _grpc(target, schedule.clients)
    else:
        connections = [_Connection(target.url) for _ in range(schedule.clients)]
        await asyncio.gather(*(c.open() for c in connections))
        asks = [c.ask for c in connections]
    run = _Run(body)
    started_s, worked_s = time.perf_counter(), time.process_time()
    try:
        if schedule.times_s is None:
            until_s = started_s + schedule.seconds
            await asyncio.gather(*(run.closed(ask, until_s) for ask in asks))
        else:
            await run.open(asks, schedule.times_s, started_s, give_up_s)
    finally:
        await close()
        if target.grpc is None:
            for connection in connections:
                connection.close()
    took_s, worked_s = time.perf_counter() - started_s, time.process_time() - worked_s
    return Outcome(
        latencies_s=sorted(run.latencies_s),
        failures=dict(run.failures),
        late_s=sorted(run.late_s),
        seconds=max(schedule.seconds, took_s),
        generator_cores=worked_s / took_s,
    )


class _Run:
    def __init__(self, body: bytes) -> None:
        self._body = body
        self.latencies_s: list[float] = []
        self.late_s: list[float] = []
        self.failures: Counter[str] = Counter()

    async def closed(self, ask: Ask, until_s: float) -> None:
        while (now_s := time.perf_counter()) < until_s:
            await self._one(ask, now_s)

    async def open(
        self, asks: list[Ask], times_s: tuple[float, ...], started_s: float, give_up_s: float
    ) -> None:
        """Every free connection takes the next request that is due, or waits for it."""
        due = deque(times_s)

        async def client(ask: Ask) -> None:
            while due:
                intended_s = started_s + due.popleft()
                if (early_s := intended_s - time.perf_counter()) > 0:
                    await asyncio.sleep(early_s)
                late_s = time.perf_counter() - intended_s
                self.late_s.append(late_s)
                if late_s > give_up_s:
                    self.failures[NOT_SENT] += 1
                    continue
                await self._one(ask, intended_s)

        await asyncio.gather(*map(client, asks))

    async def _one(self, ask: Ask, since_s: float) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                status = await ask(self._body)
        except TimeoutError:
            status = "no answer"
        except (ConnectionError, OSError) as error:
            status = type(error).__name__
            await asyncio.sleep(0.01)  # a server that is gone is not asked a million times
        if status in ("200", "OK"):
            self.latencies_s.append(time.perf_counter() - since_s)
        else:
            self.failures[status] += 1


class _Connection(asyncio.Protocol):
    """One connection of HTTP/1.1 with one request at a time."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise UsageError("this is no URL of a server", seen=url, fix="use http://HOST:PORT")
        self._host, self._tls = parts.hostname, parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[str] | None = None

    async def open(self) -> None:
        """Raise ``ServeError`` if nobody listens."""
        try:
            await self._connect()
        except OSError as error:
            raise ServeError("the server cannot be reached", status=503, seen=error) from error

    async def _connect(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_connection(
            lambda: self, self._host, self._port, ssl=self._tls or None
        )

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    async def ask(self, body: bytes) -> str:
        if self._transport is None or self._transport.is_closing():
            await self._connect()
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(body)
        try:
            return await self._answer
        except asyncio.CancelledError:
            self._transport.abort()  # a late answer would be taken for the next one
            raise

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()

    def on_message_complete(self) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(str(self._parser.get_status_code()))
        if not self._parser.should_keep_alive():
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionResetError())


def _grpc(target: Target, clients: int) -> tuple[list[Ask], Callable[[], Awaitable[None]]]:
    """``clients`` ways to call, over one connection for each sixteen."""
    if grpc is None:
        raise UsageError("gRPC needs grpcio", fix="pip install 'tessella[grpc]'")
    # Else channels to one address share a connection.
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1))
    if target.url.startswith("https:"):
        roots = ssl.get_default_verify_paths().cafile  # SSL_CERT_FILE, if that is set
        trusted = grpc.ssl_channel_credentials(Path(roots).read_bytes() if roots else None)
        channel = partial(grpc.aio.secure_channel, target.grpc, trusted, options)
    else:
        channel = partial(grpc.aio.insecure_channel, target.grpc, options)
    channels = [channel() for _ in range(-(-clients // 16))]
    metadata = tuple((name.lower(), value) for name, value in target.headers.items())

    def way(channel: object) -> Ask:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")  # type: ignore[attr-defined]

        async def ask(body: bytes) -> str:
            try:
                await call(body, metadata=metadata)
            except grpc.RpcError as error:
                return str(error.code().name)
            return "OK"

        return ask

    async def close() -> None:
        for channel in channels:
            await channel.close()

    return [way(channels[i % len(channels)]) for i in range(clients)], close


async def _nothing() -> None:
    pass


def _percentile(values: list[float], percent: float) -> float:
    """The nearest rank of sorted values."""
    return values[max(0, math.ceil(len(values) * percent / 100) - 1)] if values else math.nan
