"""The server as an ASGI application: access, the inference routes, ``describing`` for the rest.

The inference routes are plain functions of a request, since a framework costs more than a small
network. Bodies are read within limits, and only a checked model name ever names a file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

import numpy as np

from tessella.core.errors import InputError
from tessella.core.jpeg import Frame
from tessella.core.preprocess import encode
from tessella.server.answers import Answer, Send, error_answer, json_answer, log, reply
from tessella.server.body import Disconnected, Headers, Receive, Scope, too_large
from tessella.server.fairness import client_of
from tessella.server.guard import Guard, require_method, require_once
from tessella.server.images import MAX_THREADS, ImageDecoder, files_of_form
from tessella.server.inference import Inference, Models, ServedModel, Watch, chosen
from tessella.server.jpegs import frames_of
from tessella.server.limits import Limits
from tessella.server.protocol import NO_REGIONS, InferRequest, Signature
from tessella.server.shared_memory import Regions
from tessella.server.short_way import ShortWay, length_of, model_of
from tessella.server.tracing import Trace, Tracing
from tessella.server.traffic import Route
from tessella.server.verbs import (
    LONG_ANSWER,
    MULTIPART,
    answer_of,
    in_words,
    parse_query,
    scores_of,
    with_verb,
)
from tessella.tasks import View, verbs

MANAGEMENT_BODY_BYTES = 1 << 20


class App:
    """ASGI application of a server's models.

    Args:
        rest: an ASGI application of all that is not inference; bodies come to it whole.
        decoders: threads that decode pictures.
        regions: the shared memory in which clients may put tensors.
        tracing: makes spans of inference requests; opened and closed here.

    Attributes:
        bodies: counts the bytes of all requests that are held, of whichever door.
        short_way: answers requests whose head has been here before, without this application.
    """

    def __init__(
        self,
        models: Models,
        guard: Guard,
        limits: Limits,
        *,
        rest: Callable[[Scope, Receive, Send], Awaitable[None]],
        decoders: int = MAX_THREADS,
        regions: Regions = NO_REGIONS,
        tracing: Tracing | None = None,
    ) -> None:
        self._models = models
        self._guard = guard
        self._limits = limits
        self._inference = Inference(models=models, limits=limits, regions=regions, tracing=tracing)
        self.bodies = self._inference.bodies
        self.short_way = ShortWay(self._inference, guard)
        self._images = ImageDecoder(limits.image, threads=decoders)
        self._rest = rest
        self._regions = regions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        headers: Headers = dict(scope["headers"])
        trace = None
        try:
            require_once(scope["headers"], headers)
            self._guard.check(scope["method"], scope["path"], headers)
            trace = self._trace(scope, headers)
            answer = await self._answer(scope, headers, receive, trace)
        except Disconnected:
            return
        except Exception as error:
            answer = error_answer(error)
        if answer is None:
            await self._pass_on(scope, headers, receive, send)
        else:
            await reply(answer, headers, send)
            if trace is not None:
                trace.answered(answer)

    def _trace(self, scope: Scope, headers: Headers) -> Trace | None:
        """The trace of a request that was let in, if it is for inference and traces are on."""
        tracing = self._inference.tracing
        if tracing is None or (asked := model_of(scope["path"])) is None:
            return None
        name, version, verb = asked
        return tracing.request(
            name,
            version,
            verb or "infer",
            scope["headers"],
            method=scope["method"],
            nbytes=length_of(headers.get(b"content-length", b"")),
        )

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        tracing = self._inference.tracing
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await self._models.open()
                if tracing is not None:
                    tracing.open()
            else:
                if tracing is not None:
                    await asyncio.to_thread(tracing.close)
                await self._models.close()
                self._images.close()
                self._regions.close()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return

    # --- routes -------------------------------------------------------------------------------

    async def _answer(
        self, scope: Scope, headers: Headers, receive: Receive, trace: Trace | None
    ) -> Answer | None:
        """The answer of an inference route; None if the path is not one."""
        match scope["path"].split("/")[1:]:
            case ["v2", "models", name, "versions", version, *verb] if len(verb) <= 1:
                pass
            case ["v2", "models", name, *verb] if len(verb) <= 1:
                version = None
            case ["v2", "health", "live" | "ready" as asked]:
                require_method(scope["method"], "GET")
                if asked == "ready":
                    self._models.require_ready()
                return json_answer({})
            case _:
                return None
        return await self._answer_model(scope, headers, receive, name, version, verb, trace)

    async def _answer_model(
        self,
        scope: Scope,
        headers: Headers,
        receive: Receive,
        name: str,
        version: str | None,
        verb: list[str],
        trace: Trace | None,
    ) -> Answer | None:
        match verb:
            case ["infer"]:
                require_method(scope["method"], "POST")
                client = client_of(scope.get("client"))
                return await self._infer(headers, receive, name, version, client, trace)
            case [told] if told in verbs():
                require_method(scope["method"], "POST")
                return await self._tell(scope, headers, receive, name, version, told, trace)
            case ["ready"]:
                require_method(scope["method"], "GET")
                self._models.get(name, version)
                return json_answer({})
        return None

    async def _infer(
        self,
        headers: Headers,
        receive: Receive,
        name: str,
        version: str | None,
        client: int,
        trace: Trace | None,
    ) -> Answer:
        # do not read a body that nobody wants
        watch = Watch(self._models.get(name, version), trace=trace, client=client)
        most_bytes = self._limits.body_bytes
        async with self.bodies.read(headers, receive, most_bytes=most_bytes) as body:
            json_length = headers.get(b"inference-header-content-length")
            return await self._answer_body(body, json_length, name, version, watch)

    async def infer(
        self,
        body: bytes,
        json_length: bytes,
        name: str,
        version: str | None,
        lines: Sequence[tuple[bytes, bytes]],
        trace: Trace | None = None,
        *,
        client: int = 0,
    ) -> Answer:
        """The answer to an inference request whose body came over gRPC.

        Args:
            json_length: as in HTTP's header.
            lines: what HTTP's headers would say of the client.
            client: whose it is, as ``fairness`` numbers them.
        """
        headers: Headers = dict(lines)
        try:
            require_once(lines, headers)
            self._guard.check("POST", f"/v2/models/{name}/infer", headers)
            model = self._models.get(name, version)
            watch = Watch(model, trace=trace, door="grpc", client=client)
            if len(body) > self._limits.body_bytes:
                raise too_large(len(body), self._limits.body_bytes)
            with self.bodies.holding(len(body)):
                return await self._answer_body(body, json_length, name, version, watch)
        except Exception as error:
            return error_answer(error)

    async def _answer_body(
        self,
        body: bytes | bytearray,
        json_length: bytes | None,
        name: str,
        version: str | None,
        watch: Watch,
    ) -> Answer:
        watch.lap("receive")
        with watch:
            first, request = await self._inference.request(body, json_length, name, version, watch)
            with chosen(first, version, request.id) as model:
                watch.on(model)
                route = None if version else first.route
                outputs, _ = await self._run(model, request, watch, route)
                return await self._inference.answer_aside(model, request, outputs, watch)

    async def _run(
        self,
        model: ServedModel,
        request: InferRequest,
        watch: Watch,
        route: Route[Any] | None,
    ) -> tuple[dict[str, np.ndarray], tuple[View, ...]]:
        """The outputs; and where the model saw each picture that came as a file.

        Args:
            route: by which the model was chosen; its shadow may get a copy.
        """
        if watch.trace is not None:
            watch.trace.asks(request)
        arrays, views = request.arrays, tuple[View, ...]()
        copied = route is not None and route.copies()
        if model.decodes and request.images and not copied:
            (files,) = request.images.values()
            if frames := frames_of(files):
                return await self._run_files(model, request, files, frames, watch)
        for name, files in request.images.items():
            record = model.signature.preprocess
            assert record is not None, "only a plan with a record has an image input"
            pixels = model.signature.inputs[name].dtype == "uint8"
            made, sizes = await self._images.decode(files, record, name=name, pixels=pixels)
            arrays = arrays | {name: made}
            views = tuple(View(height=h, width=w, record=record) for h, w in sizes)
        watch.lap("decode")
        outputs = await model.batcher.infer(
            arrays,
            timeout_us=request.timeout_us,
            priority=request.priority,
            client=watch.client,
            stages=watch.stages,
        )
        watch.lap("queue")
        if route is not None:
            self._inference.shadowing.offer(route, arrays, outputs)
        return outputs, views

    async def _run_files(
        self,
        model: ServedModel,
        request: InferRequest,
        files: list[bytes],
        frames: list[Frame],
        watch: Watch,
    ) -> tuple[dict[str, np.ndarray], tuple[View, ...]]:
        """As ``_run``, for JPEG files that the engine's GPU decodes."""
        record = model.signature.preprocess
        assert record is not None, "only a plan with a record has an image input"
        watch.lap("decode")
        outputs = await model.infer_files(
            files,
            frames,
            timeout_us=request.timeout_us,
            priority=request.priority,
            client=watch.client,
            stages=watch.stages,
        )
        watch.lap("queue")
        return outputs, tuple(View(height=f.height, width=f.width, record=record) for f in frames)

    async def _tell(
        self,
        scope: Scope,
        headers: Headers,
        receive: Receive,
        name: str,
        version: str | None,
        verb: str,
        trace: Trace | None,
    ) -> Answer:
        """A task's answers to image files, for people and scripts without a client library."""
        model = with_verb(self._models.get(name, version), verb)
        client = client_of(scope.get("client"))
        watch = Watch(model, trace=trace, door="pictures", client=client)
        most_bytes = self._limits.body_bytes
        async with self.bodies.read(headers, receive, most_bytes=most_bytes) as body:
            watch.lap("receive")
            default = with_verb(self._models.get(name, version), verb)
            model, route = chosen(default, version), None if version else default.route
            with model, watch.on(model):
                files = await _files(headers, body)
                asked = parse_query(scope["query_string"])
                request = asked.request(model, files, self._limits)
                outputs, views = await self._run(model, request, watch, route)
                scores = scores_of(outputs)
                said = model, scores, views, asked.query
                if model.signature.answers.SLOW or scores.nbytes > LONG_ANSWER:
                    predictions = await asyncio.to_thread(in_words, *said)  # none should wait
                else:
                    predictions = in_words(*said)
                if asked.draws:
                    return await self._drawn(files, predictions, model.signature)
        return answer_of(model, predictions, watch)

    async def _drawn(self, files: list[bytes], predictions: list[Any], known: Signature) -> Answer:
        """The picture of a request as PNG, with its answer drawn: for ``?draw``."""
        if len(files) != 1:
            raise InputError("only one picture can be drawn", seen=len(files), fix="send one")
        pixels = await self._images.in_rgb(files[0], name="the picture")
        made = await asyncio.to_thread(known.answers.drawn, pixels, predictions[0])
        if made is None:
            raise InputError(
                "the answers of this model cannot be drawn",
                seen=known.task.name,
                fix="leave out draw",
            )
        body = await asyncio.to_thread(encode, made)
        return Answer(body=body, headers=((b"content-type", b"image/png"),))

    async def _pass_on(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        """Let the rest answer, with a body that has been read within limits."""
        started = False

        async def body_again() -> dict[str, object]:
            return {"type": "http.request", "body": bytes(body), "more_body": False}

        async def watched(message: MutableMapping[str, Any]) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            async with self.bodies.read(headers, receive, most_bytes=MANAGEMENT_BODY_BYTES) as body:
                await self._rest(scope, body_again, watched)
        except Disconnected:
            return
        except Exception as error:
            if started:
                log.exception("an answer could not be completed")
                return
            await reply(error_answer(error), headers, send)


async def _files(headers: Headers, body: bytes | bytearray) -> list[bytes]:
    content_type = headers.get(b"content-type", b"").decode("latin-1")
    if content_type.lower().startswith(MULTIPART):
        return await files_of_form(content_type, body)
    return [bytes(body)]
