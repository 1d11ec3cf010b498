"""gRPC in front of the app: each call becomes a request to the routes of HTTP, in this process.

So names, tokens, limits, deadlines, statistics and errors are the same on both doors. Which call is
which route stands here; ``http2_connection`` has the protocol below, ``grpc_calls`` what a call is.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from urllib.parse import quote

from tessella.core.errors import ServeError, TessellaError
from tessella.core.open_inference import MESSAGES, SERVICE, ModelInferRequest
from tessella.server.answers import Answer, error_answer
from tessella.server.app import App
from tessella.server.counts import Counted
from tessella.server.doors import Doors
from tessella.server.grpc_calls import (
    ANSWERED,
    HEAD,
    Call,
    HealthCall,
    InferCall,
    Shared,
    StreamCall,
    UnaryCall,
    code_of,
    refused,
    timeout_ns,
)
from tessella.server.grpc_messages import (
    HEALTH,
    answered,
    change_body,
    infer_body,
    infer_response,
    parsed,
)
from tessella.server.guard import Guard
from tessella.server.http2_connection import Connection, Stream
from tessella.server.http2_frames import Handler, Head, literal
from tessella.server.limits import Limits
from tessella.server.listening import Accepting, address_of
from tessella.server.tracing import Trace

MOST_MESSAGE_BYTES = 64 << 20  # larger tensors come by shared memory or HTTP
MOST_STREAMS = 64
MOST_CALLS = 1024
LEAVE_S = 0.05  # between looks whether connections have closed
# About the server's health, beside the others: who has all calls does not make it look dead.
MOST_QUESTIONS = 256
_HEALTH = "/grpc.health.v1.Health/Check"
_ABOUT_HEALTH = ("ServerLive", "ServerReady")
HOST = (b"host", b"localhost")
NOT_GRPC = literal(b":status", b"415")


class SharedConnection(Connection):
    """As ``listening.Shared``."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._opened_s = self.now_s()

    def silence(self) -> tuple[int, float] | None:
        return None if self.streams else (self.client, self._opened_s)

    def give_way(self) -> None:
        self._transport.abort()


class GrpcFront:
    """The gRPC server of one process; runs in the event loop of its HTTP server.

    Args:
        app: the server as an ASGI application.
        listener: a bound socket.
        counted: its connections, if other processes take some from the socket, too.
    """

    def __init__(
        self,
        app: App,
        guard: Guard,
        listener: socket.socket,
        doors: Doors,
        limits: Limits,
        *,
        counted: Counted | None = None,
    ) -> None:
        self._app, self._guard = app, guard
        self._listener = listener
        self.address = address_of(listener)
        self._accepting: Accepting
        self._doors = doors
        self._limits = limits
        self._connections: set[Connection] = set() if counted is None else counted
        self._shared = Shared(
            inference=app.short_way.inference,
            most_bytes=min(limits.body_bytes, MOST_MESSAGE_BYTES),
            answer_infer=self._answer_infer,
        )

    @property
    def has_clients(self) -> bool:
        """Whether there are connections."""
        return bool(self._connections)

    async def start(self) -> None:
        """Listen."""
        context = None
        if self._doors.tls_cert is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self._doors.tls_cert, self._doors.tls_key)
            context.set_alpn_protocols(["h2"])
        self._accepting = Accepting(
            self._listener,
            self._protocol,
            self._connections,
            tls=context,
        )

    def _protocol(self) -> Connection:
        return SharedConnection(self._opened, self._shared.inference.bodies, self._connections)

    async def stop(self, grace_s: float) -> None:
        """Take no more calls, and let those at hand finish within ``grace_s`` seconds."""
        self._accepting.stop()
        until_s = asyncio.get_running_loop().time() + grace_s
        while True:
            for connection in list(self._connections):  # also one that has just come
                connection.leave()
            if not self._connections or asyncio.get_running_loop().time() >= until_s:
                break
            await asyncio.sleep(LEAVE_S)
        for connection in list(self._connections):
            connection.abort()

    # --- calls ------------------------------------------------------------------------------------

    def _opened(self, stream: Stream, head: Head) -> Handler:
        """The handler of a call; one that is refused has its answer before its body is read."""
        if head[b":method"] != b"POST" or not head.get(b"content-type", b"").startswith(
            b"application/grpc"
        ):
            stream.finish(NOT_GRPC)
            return ANSWERED
        try:
            limit_ns = timeout_ns(head)
            call = self._call(stream, head)
        except TessellaError as error:
            stream.finish(HEAD + refused(error_answer(error)))
            return ANSWERED
        call.begin(limit_ns)
        return call

    def _call(self, stream: Stream, head: Head) -> Call:
        path = head[b":path"].decode("latin-1")
        service, _, name = path[1:].rpartition("/")
        is_health = path == _HEALTH or (service == SERVICE and name in _ABOUT_HEALTH)
        shared = self._shared
        if is_health:
            if shared.questions >= MOST_QUESTIONS:
                raise _too_many(MOST_QUESTIONS, "calls about the server's health")
            if path == _HEALTH:
                return HealthCall(shared, stream, head, self._health)
            return HealthCall(shared, stream, head, partial(self._answer_route, name))
        if shared.calls >= MOST_CALLS:
            raise _too_many(MOST_CALLS, "calls")
        if service != SERVICE or name not in METHODS:
            raise ServeError("there is no such call", status=405, seen=path[:100])
        if self._guard.has_token:
            # Before the message is read
            headers = dict((HOST, *_tokens(head)))
            self._guard.check("POST", "/v2/models/-/infer", headers)
        if name in ROUTES:
            return UnaryCall(shared, stream, head, partial(self._answer_route, name))
        if name == "ModelInfer":
            return InferCall(shared, stream, head)
        if shared.streams >= MOST_STREAMS:
            raise _too_many(MOST_STREAMS, "streams")
        return StreamCall(shared, stream, head)

    async def _answer_infer(self, call: Call, content: memoryview) -> Answer:
        """The answer to a message, which is held until then beside the body that is made of it."""
        tracing = self._shared.inference.tracing
        trace = None if tracing is None else tracing.call(call.head, code_of)
        answer = await self._answer_message(call, content, trace)
        if trace is not None:
            trace.answered(answer)
        return answer

    async def _answer_message(self, call: Call, content: memoryview, trace: Trace | None) -> Answer:
        try:
            message = parsed(ModelInferRequest, bytes(content))
            json_bytes, body = infer_body(message, call.remaining_us)
        except TessellaError as error:
            return error_answer(error)
        # Not through ASGI, which costs a fifth of a call's time here.
        answer = await self._app.infer(
            body,
            str(json_bytes).encode(),
            message.model_name,
            message.model_version or None,
            [HOST, *_tokens(call.head)],
            trace,
            client=call.stream.client,
        )
        if answer.status != 200:
            return answer
        length = dict(answer.headers).get(b"inference-header-content-length")
        response = infer_response(answer.body, None if length is None else int(length))
        return replace(answer, body=response.SerializeToString())

    async def _answer_route(self, name: str, call: Call, content: bytes) -> bytes | Answer:
        """The answer of a call that is not inference."""
        route, response = ROUTES[name], f"{name}Response"
        method, path, body = route.asks(parsed(MESSAGES[f"{name}Request"], content))
        answer = await self._ask(call, method, path, body)
        if route.says_whether and answer.status in (200, 404, 503):
            told = {route.says_whether: answer.status == 200}
            return _serialized(MESSAGES[response](**told))
        if answer.status != 200:
            return answer
        return _serialized(answered(response, route.tells(json.loads(answer.body))))

    async def _health(self, call: Call, content: bytes) -> bytes:
        """grpc.health.v1 for the server as a whole, whatever service is asked about."""
        answer = await self._ask(call, "GET", "/v2/health/ready", b"")
        return HEALTH[answer.status == 200]

    async def _ask(self, call: Call, method: str, path: str, body: bytes) -> Answer:
        """The app's answer to a request."""
        scope = {
            "type": "http", "method": method, "path": path, "query_string": b"",
            "scheme": "http", "http_version": "2", "root_path": "", "raw_path": path.encode(),
            "headers": [
                HOST, (b"content-length", str(len(body)).encode()), *_tokens(call.head),
            ],
        }  # fmt: skip
        status, told = 500, ()
        parts: list[bytes] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            nonlocal status, told
            if message["type"] == "http.response.start":
                status, told = message["status"], tuple(message["headers"])
            else:
                parts.append(message.get("body", b""))

        await self._app(scope, receive, send)
        return Answer(status=status, headers=told, body=b"".join(parts))


def _tokens(head: Head) -> list[tuple[bytes, bytes]]:
    """The token that a client has sent, as HTTP's header."""
    value = head.get(b"authorization")
    return [] if value is None else [(b"authorization", value)]


def _too_many(most: int, what: str) -> ServeError:
    return ServeError(f"more than {most} {what} at a time", status=429, fix="try again later")


def _serialized(message: Any) -> bytes:
    serialized: bytes = message.SerializeToString()
    return serialized


def _model_path(name: str, version: str) -> str:
    path = f"/v2/models/{quote(name, safe='')}"
    return f"{path}/versions/{quote(version, safe='')}" if version else path


# --- which call is which route --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Route:
    """A call as a request.

    Attributes:
        asks: method, path and body for a message.
        tells: what the answer's JSON says, as the response's fields.
        says_whether: the response's one field, if it says only whether the request succeeded.
    """

    asks: Callable[[Any], tuple[str, str, bytes]]
    tells: Callable[[Any], dict[str, Any]] = lambda document: document
    says_whether: str = ""


def _get(path: str, **rest: Any) -> _Route:
    return _Route(asks=lambda _: ("GET", path, b""), **rest)


def _of_model(verb: str, **rest: Any) -> _Route:
    return _Route(asks=lambda m: ("GET", _model_path(m.name, m.version) + verb, b""), **rest)


def _statistics(message: Any) -> tuple[str, str, bytes]:
    path = _model_path(message.name, message.version) if message.name else "/v2/models"
    return "GET", f"{path}/stats", b""


def _change(verb: str) -> _Route:
    def asks(message: Any) -> tuple[str, str, bytes]:
        path = f"/v2/repository/models/{quote(message.model_name, safe='')}/{verb}"
        return "POST", path, change_body(message) if verb == "load" else b""

    return _Route(asks=asks)


def _region(name: str) -> str:
    root = "/v2/systemsharedmemory"
    return f"{root}/region/{quote(name, safe='')}" if name else root


def _register(message: Any) -> tuple[str, str, bytes]:
    asked = {"key": message.key, "offset": message.offset, "byte_size": message.byte_size}
    path = f"/v2/systemsharedmemory/region/{quote(message.name, safe='')}/register"
    return "POST", path, json.dumps(asked).encode()


ROUTES = {
    "ServerLive": _get("/v2/health/live", says_whether="live"),
    "ServerReady": _get("/v2/health/ready", says_whether="ready"),
    "ModelReady": _of_model("/ready", says_whether="ready"),
    "ServerMetadata": _get("/v2"),
    "ModelMetadata": _of_model(""),
    "ModelConfig": _of_model("/config", tells=lambda document: {"config": document}),
    "ModelStatistics": _Route(asks=_statistics),
    "RepositoryIndex": _Route(
        asks=lambda m: ("POST", "/v2/repository/index", json.dumps({"ready": m.ready}).encode()),
        tells=lambda document: {"models": document},
    ),
    "RepositoryModelLoad": _change("load"),
    "RepositoryModelUnload": _change("unload"),
    "SystemSharedMemoryStatus": _Route(
        asks=lambda m: ("GET", f"{_region(m.name)}/status", b""),
        tells=lambda document: {"regions": {r["name"]: r for r in document}},
    ),
    "SystemSharedMemoryRegister": _Route(asks=_register),
    "SystemSharedMemoryUnregister": _Route(
        asks=lambda m: ("POST", f"{_region(m.name)}/unregister", b"")
    ),
}
METHODS = {"ModelInfer", "ModelStreamInfer", *ROUTES}
