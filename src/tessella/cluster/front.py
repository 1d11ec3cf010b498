"""In front of each of Ray's proxies: who may come in, and requests whose replica died."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.middleware import Middleware

from tessella.core.access_token import read_token
from tessella.core.errors import ServeError, UsageError
from tessella.core.record import from_plain
from tessella.server.answers import Send, error_answer, log, reply
from tessella.server.body import BodyReader, Disconnected, Headers, Receive, Scope
from tessella.server.guard import Guard, require_once
from tessella.server.limits import DEFAULT_LIMITS, Limits

REPLICA = b"tessella-replica"  # on every answer that a replica made: its name
ATTEMPTS = b"tessella-attempts"  # on every answer of a proxy: how many replicas were asked
SETTINGS = "TESSELLA_DOOR"  # Ray makes the proxies, and leaves us the environment to say how
# A request that ends its replica ends as many of them. The pauses are for Ray to learn of a death.
PAUSES_S = (0.1, 0.4, 1.0)
RAYS_OWN = ("/-/healthz", "/-/routes")
BODY_HEADERS = (b"content-encoding", b"content-length", b"transfer-encoding")

Message = MutableMapping[str, Any]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Door:
    """Where the proxies listen, and who may come in.

    Attributes:
        token_file: on every machine, a file with the token that clients must send.
        names: host names under which clients reach the proxies.

    Raises:
        UsageError: no port that all machines could have.
    """

    host: str
    port: int
    token_file: str | None = None
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.port < 1 << 16:
            raise UsageError(
                "all proxies listen at one port", seen=self.port, fix="use one from 1 to 65535"
            )

    def guard(self) -> Guard:
        """What checks requests.

        Raises:
            UsageError: an address for everybody without a token, or no token in its file.
        """
        token = None if self.token_file is None else read_token(Path(self.token_file))
        return Guard(host=self.host, token=token, names=self.names)


def middlewares() -> list[Middleware]:
    """What Ray puts around the HTTP proxy of each machine; it calls this there."""
    door = from_plain(Door, json.loads(os.environ[SETTINGS]), where=SETTINGS)
    return [Middleware(AskingAgain, guard=door.guard())]


class AskingAgain:
    """ASGI application around a proxy: refuses whom the guard does, reads bodies within limits, and
    asks another replica when one died.

    An answer is held until it is whole, as a replica may die in the middle of one.
    """

    def __init__(self, app: Application, *, guard: Guard, limits: Limits = DEFAULT_LIMITS) -> None:
        self._app = app
        self._guard = guard
        self._limits = limits
        self._bodies = BodyReader(limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1003})
            return
        if scope["type"] != "http" or scope["path"] in RAYS_OWN:
            await self._app(scope, receive, send)
            return
        headers: Headers = dict(scope["headers"])
        try:
            require_once(scope["headers"], headers)
            self._guard.check(scope["method"], scope["path"], headers)
            most_bytes = self._limits.body_bytes
            async with self._bodies.read(headers, receive, most_bytes=most_bytes) as body:
                answer = await self._answer(_with_length(scope, headers, body), body, receive)
        except Disconnected:
            return
        except Exception as error:
            await reply(error_answer(error), headers, send)
            return
        for message in answer:
            await send(message)

    async def _answer(
        self, scope: Scope, body: bytes | bytearray, receive: Receive
    ) -> list[Message]:
        """The messages of an answer, from the first replica that lives to give it.

        Raises:
            ServeError: 503, none did.
        """
        for attempt, pause_s in enumerate((*PAUSES_S, None), start=1):
            answer: list[Message] = []

            async def collect(message: Message, answer: list[Message] = answer) -> None:
                answer.append(message)

            client = _Client(body, receive)
            await self._app(dict(scope), client.receive, collect)
            if client.has_left:  # then Ray answers nothing, whatever its replica did
                raise Disconnected
            if not died(answer):
                answer[0]["headers"] = [*answer[0]["headers"], (ATTEMPTS, b"%d" % attempt)]
                return answer
            log.warning("a replica died with %s %s", scope["method"], scope["path"])
            if pause_s is not None:
                await asyncio.sleep(pause_s)
        raise ServeError(
            "the replicas that were asked ended before they answered",
            status=503,
            seen=f"{attempt} of them",
            fix="look into the replicas' logs (serve status), and ask again",
        )


def died(answer: list[Message]) -> bool:
    """Whether a replica died instead of giving this answer, or in the middle of it.

    What Ray refuses itself (404 and 503: nothing is deployed, too many wait) is an answer.
    """
    if not answer or answer[-1].get("more_body", answer[-1]["type"] != "http.response.body"):
        return True
    made = any(name == REPLICA for name, _ in answer[0]["headers"])
    return answer[0]["status"] == 500 and not made


def _with_length(scope: Scope, headers: Headers, body: bytes | bytearray) -> Scope:
    """The scope of a request whose body was read, and decompressed if it was compressed."""
    if not any(name in headers for name in BODY_HEADERS):
        return scope
    kept = [(name, value) for name, value in scope["headers"] if name not in BODY_HEADERS]
    return {**scope, "headers": [*kept, (b"content-length", b"%d" % len(body))]}


class _Client:
    """A client's messages: its whole body in one, and then that it has gone away.

    Attributes:
        has_left: it went away, and somebody was told so.
    """

    def __init__(self, body: bytes | bytearray, receive: Receive) -> None:
        self._body: bytes | bytearray | None = body
        self._receive = receive
        self.has_left = False

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = bytes(self._body), None
            return {"type": "http.request", "body": body, "more_body": False}
        message = await self._receive()
        self.has_left |= message["type"] == "http.disconnect"
        return message
