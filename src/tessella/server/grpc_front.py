"""gRPC in front of the app: each call becomes a request to the routes of HTTP, in this process.

So names, tokens, limits, deadlines, statistics and errors are the same on both doors. What is
gRPC's own stands here: which call is which route, its deadline, and its status codes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tessella.core.errors import ServeError, TessellaError, UsageError
from tessella.core.open_inference import MESSAGES, SERVICE, ModelInferRequest
from tessella.server.answers import Answer, error_answer, log
from tessella.server.app import App
from tessella.server.doors import Doors
from tessella.server.grpc_messages import (
    HEALTH,
    answered,
    change_body,
    infer_body,
    infer_response,
    parsed,
)
from tessella.server.limits import Limits

try:
    import grpc
except ImportError:
    grpc = None

# Larger tensors come by shared memory or HTTP: gRPC says how large a message is only to itself, so
# memory for messages that are still coming is bounded by how many may come at once.
MOST_MESSAGE_BYTES = 64 << 20
MOST_ARRIVING = 64
MOST_STREAMS = 64
MOST_CALLS = 1024
_CODES = {
    401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND", 408: "DEADLINE_EXCEEDED",
    409: "ALREADY_EXISTS", 413: "RESOURCE_EXHAUSTED", 429: "RESOURCE_EXHAUSTED", 500: "INTERNAL",
    501: "UNIMPLEMENTED", 503: "UNAVAILABLE", 507: "RESOURCE_EXHAUSTED",
}  # fmt: skip


HOST = (b"host", b"localhost")


@dataclass(frozen=True, kw_only=True)
class _Answer:
    status: int
    headers: dict[bytes, bytes]
    body: bytes

    @property
    def error(self) -> str:
        return str(json.loads(self.body).get("error", ""))


class GrpcFront:
    """The gRPC server of one process; runs in the event loop of its HTTP server.

    Args:
        app: the server as an ASGI application.
        address: ``host:port``; processes of this user may share the port.
        token: whether clients must send one.

    Raises:
        UsageError: grpcio is not installed.
    """

    def __init__(
        self, app: App, address: str, doors: Doors, limits: Limits, *, token: bool
    ) -> None:
        require_grpc()
        self._token = token
        self._app = app
        self.address = address
        self._doors = doors
        self._limits = limits

    async def start(self) -> None:
        """Listen.

        Raises:
            UsageError: the address cannot be listened on.
        """
        self._arriving = asyncio.Semaphore(MOST_ARRIVING)
        self._streaming = asyncio.Semaphore(MOST_STREAMS)
        most = min(self._limits.body_bytes, MOST_MESSAGE_BYTES)
        self._server = grpc.aio.server(
            maximum_concurrent_rpcs=MOST_CALLS,
            options=(
                ("grpc.max_receive_message_length", most),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", self._limits.head_bytes),
                ("grpc.max_concurrent_streams", MOST_CALLS),
                ("grpc.so_reuseport", 1),
                ("grpc.http2.max_frame_size", 1 << 20),
            ),
        )
        handlers = {name: self._unary(name) for name in ROUTES}
        handlers |= {
            "ModelInfer": grpc.stream_unary_rpc_method_handler(
                self._infer, response_serializer=_serialized
            ),
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(
                self._stream, response_serializer=_serialized
            ),
        }
        health = {"Check": grpc.unary_unary_rpc_method_handler(self._health)}
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(SERVICE, handlers),
                grpc.method_handlers_generic_handler("grpc.health.v1.Health", health),
            )
        )
        try:
            if self._doors.tls_cert is None or self._doors.tls_key is None:
                self._server.add_insecure_port(self.address)
            else:
                key, cert = (
                    Path(p).read_bytes() for p in (self._doors.tls_key, self._doors.tls_cert)
                )
                credentials = grpc.ssl_server_credentials([(key, cert)])
                self._server.add_secure_port(self.address, credentials)
        except RuntimeError as error:
            raise UsageError(
                f"{self.address} cannot be listened on for gRPC",
                seen=str(error),
                fix="choose another --grpc-port",
            ) from error
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Take no more calls, and let those at hand finish within ``grace_s`` seconds."""
        await self._server.stop(grace_s)

    # --- calls ------------------------------------------------------------------------------------

    async def _infer(self, requests: AsyncIterator[Any], context: Any) -> Any:
        # Unary on the wire; read here, so that a wrong token is refused before its message is read
        # and only so many messages arrive at once.
        await self._require_access(context)
        try:
            async with self._arriving, asyncio.timeout(self._limits.body_idle_s):
                content = await context.read()
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the message stopped coming")
        if content is grpc.aio.EOF:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "there is no message")
        answer = await self._answer_infer(content, context)
        if answer.status != 200:
            await _abort(context, answer)
        timing = answer.headers[b"server-timing"].decode()
        context.set_trailing_metadata((("server-timing", timing),))
        return _as_response(answer)

    async def _stream(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """One answer a request, in their order; an error is an answer too."""
        await self._require_access(context)
        if self._streaming.locked():
            told = f"more than {MOST_STREAMS} streams; try again, or call ModelInfer"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, told)
        async with self._streaming:
            async for content in requests:
                answer = await self._answer_infer(content, context)
                response = MESSAGES["ModelStreamInferResponse"]()
                if answer.status == 200:
                    response.infer_response.CopyFrom(_as_response(answer))
                else:
                    response.error_message = answer.error
                yield response

    async def _answer_infer(self, content: bytes, context: Any) -> _Answer:
        """The answer to a message, which is held until then beside the body that is made of it."""
        try:
            with self._app.bodies.holding(len(content)):
                return await self._answer_held(content, context)
        except ServeError as error:
            return _told(error_answer(error))

    async def _answer_held(self, content: bytes, context: Any) -> _Answer:
        remaining_s = context.time_remaining()
        # Without a deadline gRPC says so with None, or with one of many years.
        remaining_us = None if remaining_s is None or remaining_s > 1e8 else int(1e6 * remaining_s)
        if remaining_us is not None:
            remaining_us = max(1, remaining_us)  # 0 is no limit
        try:
            message = parsed(ModelInferRequest, content)
            json_bytes, body = infer_body(message, remaining_us)
        except TessellaError as error:
            return _told(error_answer(error))
        # Not through ASGI, which costs a fifth of a call's time here.
        answer = await self._app.infer(
            body,
            str(json_bytes).encode(),
            message.model_name,
            message.model_version or None,
            [HOST, *_tokens(context)],
        )
        return _told(answer)

    async def _require_access(self, context: Any) -> None:
        """Abort the call unless its token is right: as a cheap route says."""
        if not self._token:
            return
        answer = await self._ask(context, "GET", "/v2/models/-/ready", b"")
        if answer.status in (401, 403, 421):
            await _abort(context, answer)

    def _unary(self, name: str) -> Any:
        """The handler of a call that is not inference."""
        request, response = MESSAGES[f"{name}Request"], f"{name}Response"
        route = ROUTES[name]

        async def handle(content: bytes, context: Any) -> Any:
            try:
                method, path, body = route.asks(parsed(request, content))
            except TessellaError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            answer = await self._ask(context, method, path, body)
            if route.says_whether and answer.status in (200, 404, 503):
                return MESSAGES[response](**{route.says_whether: answer.status == 200})
            if answer.status != 200:
                await _abort(context, answer)
            return answered(response, route.tells(json.loads(answer.body)))

        return grpc.unary_unary_rpc_method_handler(handle, response_serializer=_serialized)

    async def _health(self, body: bytes, context: Any) -> bytes:
        """grpc.health.v1 for the server as a whole, whatever service is asked about."""
        answer = await self._ask(context, "GET", "/v2/health/ready", b"")
        return HEALTH[answer.status == 200]

    async def _ask(self, context: Any, method: str, path: str, body: bytes) -> _Answer:
        """The app's answer to a request."""
        scope = {
            "type": "http", "method": method, "path": path, "query_string": b"",
            "scheme": "http", "http_version": "2", "root_path": "", "raw_path": path.encode(),
            "headers": [
                HOST, (b"content-length", str(len(body)).encode()), *_tokens(context),
            ],
        }  # fmt: skip
        status, told = 500, {}
        parts: list[bytes] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            nonlocal status, told
            if message["type"] == "http.response.start":
                status, told = message["status"], dict(message["headers"])
            else:
                parts.append(message.get("body", b""))

        await self._app(scope, receive, send)
        return _Answer(status=status, headers=told, body=b"".join(parts))


def require_grpc() -> None:
    """Raise ``UsageError`` if grpcio is not installed."""
    if grpc is None:
        raise UsageError("gRPC needs grpcio", fix="pip install 'tessella[grpc]'")


def _tokens(context: Any) -> list[tuple[bytes, bytes]]:
    """The tokens that a client has sent, as HTTP's headers."""
    return [
        (b"authorization", value.encode() if isinstance(value, str) else value)
        for name, value in context.invocation_metadata() or ()
        if name == "authorization"
    ]


def _told(answer: Answer) -> _Answer:
    return _Answer(status=answer.status, headers=dict(answer.headers), body=answer.body)


def _as_response(answer: _Answer) -> Any:
    length = answer.headers.get(b"inference-header-content-length")
    return infer_response(answer.body, None if length is None else int(length))


async def _abort(context: Any, answer: _Answer) -> None:
    code = getattr(grpc.StatusCode, _CODES.get(answer.status, "INVALID_ARGUMENT"))
    if answer.status == 500:
        log.warning("a call failed: %s", answer.error)
    trailing: tuple[tuple[str, str], ...] = ()
    if (after := answer.headers.get(b"retry-after")) is not None:
        trailing = (("retry-after", after.decode()),)
    await context.abort(code, answer.error, trailing)


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
