"""The server as an ASGI application: access, the inference routes, then FastAPI for the rest.

The inference routes are plain functions of a request, since a framework costs more than a small
network. Bodies are read within limits, and only a checked model name ever names a file.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from typing import Any, TypedDict
from urllib.parse import parse_qs

import numpy as np

from tessella.core.errors import InputError, ServeError, TessellaError
from tessella.core.spec import TensorSpec
from tessella.server.answers import (
    JSON,
    Answer,
    Send,
    error_answer,
    json_answer,
    log,
    reply,
    status_of,
)
from tessella.server.body import BodyReader, Disconnected, Headers, Receive, Scope
from tessella.server.classification import best
from tessella.server.descriptions import model_config, model_metadata, server_metadata
from tessella.server.guard import Guard, require_once
from tessella.server.images import ImageDecoder, files_of_form
from tessella.server.limits import DEFAULT_LIMITS, Limits
from tessella.server.management import management
from tessella.server.metrics import Metrics
from tessella.server.protocol import (
    InferRequest,
    build_infer,
    check_tensor_bytes,
    parse_infer,
    parse_priority,
    parse_timeout,
)
from tessella.server.repository import MODEL_VERSION, Model, Repository
from tessella.server.statistics import Stages
from tessella.server.tensors import to_json
from tessella.server.welcome import front_page, models, routes_page

MANAGEMENT_BODY_BYTES = 1 << 20
DEFAULT_TOP = 5


class _Here(TypedDict):
    url: str
    token: bool


class App:
    """ASGI application of one repository."""

    def __init__(
        self, repository: Repository, guard: Guard, limits: Limits = DEFAULT_LIMITS
    ) -> None:
        self.repository = repository
        self._guard = guard
        self._limits = limits
        self._bodies = BodyReader(limits)
        self._images = ImageDecoder(limits.image)
        self._management = management(repository, Metrics(repository))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        headers: Headers = dict(scope["headers"])
        try:
            require_once(scope["headers"], headers)
            self._guard.check(scope["method"], scope["path"], headers)
            answer = await self._answer(scope, headers, receive)
        except Disconnected:
            return
        except Exception as error:
            answer = error_answer(error)
        if answer is None:
            await self._manage(scope, headers, receive, send)
        else:
            await reply(answer, headers, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                await self.repository.close()
                self._images.close()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return

    # --- routes -------------------------------------------------------------------------------

    async def _answer(self, scope: Scope, headers: Headers, receive: Receive) -> Answer | None:
        """The answer of an inference route; None if the path is not one."""
        match scope["path"].split("/")[1:]:
            case ["v2", "models", name, "versions", version, *verb] if len(verb) <= 1:
                pass
            case [""]:
                return _get(
                    scope, lambda: front_page(self.repository, **self._here(scope, headers))
                )
            case ["docs"]:
                return _get(scope, routes_page)
            case ["v2", "models"] | ["v2", "models", ""]:
                return _get(scope, lambda: models(self.repository, **self._here(scope, headers)))
            case ["v2", "models", "stats"]:
                return _get(scope, self._all_statistics)
            case ["v2", "models", name, *verb] if len(verb) <= 1:
                version = None
            case ["v2"] | ["v2", ""]:
                return _get(scope, server_metadata)
            case ["v2", "health", "live" | "ready"]:
                return _get(scope, dict)
            case _:
                return None
        return await self._answer_model(scope, headers, receive, name, version, verb)

    async def _answer_model(
        self,
        scope: Scope,
        headers: Headers,
        receive: Receive,
        name: str,
        version: str | None,
        verb: list[str],
    ) -> Answer | None:
        match verb:
            case ["infer"]:
                _require(scope, "POST")
                return await self._infer(headers, receive, name, version)
            case ["classify"]:
                _require(scope, "POST")
                query = parse_qs(scope["query_string"].decode("latin-1"))
                return await self._classify(headers, receive, name, version, query)
            case []:
                return _get(scope, lambda: model_metadata(self.repository.get(name, version)))
            case ["config"]:
                return _get(scope, lambda: model_config(self.repository.get(name, version)))
            case ["stats"]:
                return _get(scope, lambda: _statistics([self.repository.get(name, version)]))
            case ["ready"]:
                _require(scope, "GET")
                self.repository.get(name, version)
                return json_answer({})
        return None

    def _here(self, scope: Scope, headers: Headers) -> _Here:
        """Under which address the client reaches this server, and whether with a token."""
        host = headers.get(b"host", b"").decode("latin-1")
        return {"url": f"{scope['scheme']}://{host}", "token": self._guard.has_token}

    def _all_statistics(self) -> dict[str, object]:
        return _statistics(self.repository.models)

    async def _infer(
        self, headers: Headers, receive: Receive, name: str, version: str | None
    ) -> Answer:
        watch = _Watch(self.repository.get(name, version))  # do not read a body that nobody wants
        most_bytes = self._limits.body_bytes
        async with self._bodies.read(headers, receive, most_bytes=most_bytes) as body:
            watch.lap("receive")
            with self.repository.get(name, version) as model, watch.on(model):
                header_length = headers.get(b"inference-header-content-length")
                request = parse_infer(body, header_length, model.signature, self._limits)
                outputs = await self._run(model, request, watch)
                response = build_infer(
                    request, outputs, model.signature, name=model.name, version=MODEL_VERSION
                )
                watch.lap("answer")
        timing = (b"server-timing", watch.stages.header())
        if response.json_bytes is None:
            return Answer(body=response.body, headers=(JSON, timing))
        length = str(response.json_bytes).encode()
        return Answer(
            body=response.body,
            headers=(
                (b"content-type", b"application/octet-stream"),
                (b"inference-header-content-length", length),
                timing,
            ),
        )

    async def _run(
        self, model: Model, request: InferRequest, watch: _Watch
    ) -> dict[str, np.ndarray]:
        arrays = request.arrays
        for name, files in request.images.items():
            record = model.signature.preprocess
            assert record is not None, "only a plan with a record has an image input"
            pixels = model.signature.inputs[name].dtype == "uint8"
            made = await self._images.decode(files, record, name=name, pixels=pixels)
            arrays = arrays | {name: made}
        watch.lap("decode")
        outputs = await model.batcher.infer(
            arrays,
            timeout_us=request.timeout_us,
            priority=request.priority,
            stages=watch.stages,
        )
        watch.lap("queue")
        return outputs

    async def _classify(
        self,
        headers: Headers,
        receive: Receive,
        name: str,
        version: str | None,
        query: dict[str, list[str]],
    ) -> Answer:
        """The best classes of image files, for people and scripts without a client library."""
        top = _whole(query, "top", DEFAULT_TOP)
        if not top:
            raise InputError("top is not a number of classes", seen=top, fix="use ?top=5")
        watch = _Watch(self.repository.get(name, version))
        most_bytes = self._limits.body_bytes
        async with self._bodies.read(headers, receive, most_bytes=most_bytes) as body:
            watch.lap("receive")
            with self.repository.get(name, version) as model, watch.on(model):
                spec = _only_image(model)
                files = await _files(headers, body)
                check_tensor_bytes(spec, len(files), self._limits)
                request = InferRequest(
                    id=None,
                    outputs=(),
                    timeout_us=parse_timeout(_whole(query, "timeout", 0)),
                    priority=parse_priority(_whole(query, "priority", 0)),
                    images={spec.name: files},
                )
                outputs = await self._run(model, request, watch)
                name_of_first, scores = next(iter(outputs.items()))
                predictions = [
                    _predictions(row, name_of_first, model.signature.labels, top) for row in scores
                ]
                watch.lap("answer")
        answer = json_answer(
            {"model_name": model.name, "model_version": MODEL_VERSION, "predictions": predictions}
        )
        return replace(answer, headers=(JSON, (b"server-timing", watch.stages.header())))

    async def _manage(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        """Let FastAPI answer, with a body that has been read within limits."""
        started = False

        async def body_again() -> dict[str, object]:
            return {"type": "http.request", "body": bytes(body), "more_body": False}

        async def watched(message: MutableMapping[str, Any]) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            async with self._bodies.read(
                headers, receive, most_bytes=MANAGEMENT_BODY_BYTES
            ) as body:
                await self._management(scope, body_again, watched)
        except Disconnected:
            return
        except Exception as error:
            if started:
                log.exception("an answer could not be completed")
                return
            await reply(error_answer(error), headers, send)


class _Watch:
    """The clock of one request: its stages, and whether it was answered.

    Written out, as a generator for each of these blocks costs a tenth of a small request.
    """

    def __init__(self, model: Model) -> None:
        self.stages = Stages()
        self._statistics = model.statistics
        self._begun_ns = self._last_ns = time.perf_counter_ns()

    def on(self, model: Model) -> _Watch:
        """Count the request, in this block, as one of this model: the one that will answer it."""
        self._statistics = model.statistics
        return self

    def lap(self, stage: str) -> None:
        """What passed since the last call, less what others have booked of it, was this stage."""
        now_ns = time.perf_counter_ns()
        booked_ns = self.stages.total - (self._last_ns - self._begun_ns)
        setattr(
            self.stages, stage, getattr(self.stages, stage) + now_ns - self._last_ns - booked_ns
        )
        self._last_ns = now_ns

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        ns = time.perf_counter_ns() - self._begun_ns
        if error is None:
            self._statistics.succeeded(ns, self.stages)
        else:
            self._statistics.failed(ns, _reason(error))


def _reason(error: BaseException) -> str:
    """Triton's word for why a request failed."""
    if isinstance(error, asyncio.CancelledError):
        return "CANCELED"
    if isinstance(error, TessellaError):
        return "REJECTED" if status_of(error) in (429, 503) else "OTHER"
    return "BACKEND"


def _require(scope: Scope, method: str) -> None:
    if scope["method"] != method and not (method == "GET" and scope["method"] == "HEAD"):
        raise ServeError(
            f"this route takes {method}", status=405, seen=scope["method"], fix=f"use {method}"
        )


def _get(scope: Scope, describe: Callable[[], dict[str, object] | Answer]) -> Answer:
    _require(scope, "GET")
    made = describe()
    return made if isinstance(made, Answer) else json_answer(made)


def _statistics(models: list[Model]) -> dict[str, object]:
    return {"model_stats": [m.statistics.to_json(m.name, MODEL_VERSION) for m in models]}


def _whole(query: dict[str, list[str]], name: str, default: int) -> int:
    """A whole number of the query, 0 or more."""
    text = query.get(name, [str(default)])[-1]
    if not text.isdecimal() or not text.isascii() or len(text) > 9:
        raise InputError(f"{name} is not a number", seen=text[:40], fix=f"use ?{name}=5")
    return int(text)


async def _files(headers: Headers, body: bytes | bytearray) -> list[bytes]:
    content_type = headers.get(b"content-type", b"").decode("latin-1")
    if content_type.lower().startswith("multipart/form-data"):
        return await files_of_form(content_type, body)
    return [bytes(body)]


def _only_image(model: Model) -> TensorSpec:
    """The image input of a model that takes nothing else."""
    inputs = model.signature.inputs
    if model.signature.image_input is None or len(inputs) != 1:
        raise InputError(
            f"model {model.name!r} does not take one image",
            seen=", ".join(str(s) for s in inputs.values()),
            fix=f"send its inputs to /v2/models/{model.name}/infer",
        )
    return inputs[model.signature.image_input]


def _predictions(
    scores: np.ndarray, output: str, labels: tuple[str, ...], top: int
) -> list[dict[str, object]]:
    """The best classes of one image: raw scores, and their softmax as ``tessella run`` has it."""
    values = to_json(scores, name=output)
    named = len(labels) == len(values)
    powers = np.exp(np.asarray(values, np.float64) - max(values))
    probabilities = (powers / powers.sum()).tolist()
    return [
        {
            "index": i,
            "label": labels[i] if named else None,
            "score": values[i],
            "probability": probabilities[i],
        }
        for i in best(scores[None], top)[0].tolist()
    ]
