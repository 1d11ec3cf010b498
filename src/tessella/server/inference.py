"""What an inference request needs, however it came in: its model, its clock, its answer's body."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, Protocol

import numpy as np

from tessella.core.errors import TessellaError
from tessella.server.answers import JSON, Answer, status_of
from tessella.server.body import BodyReader
from tessella.server.limits import Limits
from tessella.server.protocol import NO_REGIONS, InferRequest, Signature, Unread, parse_infer
from tessella.server.responses import InferResponse, build_infer
from tessella.server.shadow import Shadowing
from tessella.server.shared_memory import Regions, make
from tessella.server.statistics import Stages, Statistics
from tessella.server.tracing import Trace, Tracing
from tessella.server.traffic import Route
from tessella.server.waiting import Infers, InfersFiles

OCTETS = (b"content-type", b"application/octet-stream")


class ServedModel(InfersFiles, Protocol):
    """What an app asks of a model."""

    name: str
    version: str
    signature: Signature
    statistics: Statistics

    @property
    def batcher(self) -> Infers: ...

    @property
    def route(self) -> Route[Any] | None: ...

    @property
    def decodes(self) -> bool:
        """Whether the engine's GPU decodes JPEG files."""
        ...

    def __enter__(self) -> ServedModel: ...

    def __exit__(self, *_: object) -> None: ...


def chosen(model: ServedModel, version: str | None, request_id: str | None = None) -> ServedModel:
    """The model that answers a request: another version, if the client named none and a rule of
    traffic says so.
    """
    if version or model.route is None:
        return model
    found: ServedModel = model.route.choose(request_id)
    return found


class Models(Protocol):
    """What an app asks of a repository, here or in another process."""

    def get(self, name: str, version: str | None = None) -> ServedModel: ...

    def require_ready(self) -> None: ...

    async def open(self) -> None: ...

    async def close(self) -> None: ...


@dataclass(kw_only=True)
class Inference:
    """What all inference requests of a process share, and the two ends of each.

    Attributes:
        tracing: makes spans of them; None does not.
    """

    models: Models
    limits: Limits
    regions: Regions = NO_REGIONS
    tracing: Tracing | None = None
    bodies: BodyReader = field(init=False)
    shadowing: Shadowing = field(init=False)

    def __post_init__(self) -> None:
        self.bodies = BodyReader(self.limits)
        self.shadowing = Shadowing(self.bodies)

    def parse(
        self, body: bytes | bytearray | memoryview, json_length: bytes | None, model: ServedModel
    ) -> InferRequest | Unread:
        """The checked request; ``json_length`` is its ``Inference-Header-Content-Length``."""
        return parse_infer(body, json_length, model.signature, self.limits, self.regions)

    def parse_parts(
        self, text: bytes, parts: Sequence[memoryview], model: ServedModel
    ) -> InferRequest | Unread:
        """As ``parse``, of a body that is not in one piece: its JSON, and the tensors behind it."""
        known = model.signature.heads.get((text, self.limits.body_bytes))
        if known is not None and known.fits(parts):
            return known.request_of(parts)
        body = b"".join([text, *parts])
        return self.parse(body, str(len(text)).encode(), model)

    async def request(
        self,
        body: bytes | bytearray,
        json_length: bytes | None,
        name: str,
        version: str | None,
        watch: Watch,
    ) -> tuple[ServedModel, InferRequest]:
        """The checked request with what lies in shared memory, and the model that it is for."""
        while True:
            watch.on(model := self.models.get(name, version))
            request = self.parse(body, json_length, model)
            if not isinstance(request, Unread):
                return model, request
            await make(request.copies)
            if self.models.get(name, version) is model:  # else it was replaced meanwhile
                return model, request.finish()

    def answer(
        self,
        model: ServedModel,
        request: InferRequest,
        outputs: Mapping[str, np.ndarray],
        watch: Watch,
    ) -> Answer:
        """The response; all stages of the request are over with it."""
        response = self._response(model, request, outputs)
        for copy in response.copies:
            copy.make()
        return self._answered(response, watch)

    async def answer_aside(
        self,
        model: ServedModel,
        request: InferRequest,
        outputs: Mapping[str, np.ndarray],
        watch: Watch,
    ) -> Answer:
        """As ``answer``, with what is large written to shared memory in a thread."""
        response = self._response(model, request, outputs)
        await make(response.copies)
        return self._answered(response, watch)

    def _response(
        self, model: ServedModel, request: InferRequest, outputs: Mapping[str, np.ndarray]
    ) -> InferResponse:
        return build_infer(
            request,
            outputs,
            model.signature,
            name=model.name,
            version=model.version,
            regions=self.regions,
        )

    def _answered(self, response: InferResponse, watch: Watch) -> Answer:
        self.bodies.require_readers(len(response.body))
        watch.lap("answer")
        timing = (b"server-timing", watch.stages.header())
        if response.json_bytes is None:
            return Answer(body=response.body, headers=(JSON, timing))
        length = (b"inference-header-content-length", b"%d" % response.json_bytes)
        return Answer(body=response.body, headers=(OCTETS, length, timing))


class Watch:
    """The clock of one request: its stages, and whether it was answered.

    Written out, as a generator for each of these blocks costs a tenth of a small request.

    Args:
        begun_ns: when its head was there, on ``perf_counter``'s clock; None is now.
        door: by which it came: one of ``statistics.DOORS``.
        client: whose it is, as ``fairness`` numbers them.
        trace: that learns the model and the stages; with it the time is the trace's.
    """

    __slots__ = (
        "_begun_ns", "_booked_ns", "_door", "_last_ns", "_statistics", "client", "stages", "trace",
    )  # fmt: skip

    def __init__(
        self,
        model: ServedModel,
        begun_ns: int | None = None,
        trace: Trace | None = None,
        *,
        door: str = "http",
        client: int = 0,
    ) -> None:
        self.stages = Stages()
        self.client = client
        self.trace = trace
        self._door = door
        self._statistics = model.statistics
        if trace is not None:
            begun_ns, trace.model, trace.stages = trace.begun_ns, model, self.stages
        begun_ns = perf_counter_ns() if begun_ns is None else begun_ns
        self._begun_ns = self._last_ns = begun_ns
        self._booked_ns = 0

    def on(self, model: ServedModel) -> Watch:
        """Count the request, in this block, as one of this model: the one that will answer it."""
        self._statistics = model.statistics
        if self.trace is not None:
            self.trace.model = model
        return self

    def lap(self, stage: str) -> None:
        """What passed since the last call, less what others have booked of it, was this stage."""
        now_ns, stages = perf_counter_ns(), self.stages
        booked_ns = stages.copy + stages.compute + stages.beside  # by others than this
        passed_ns = now_ns - self._last_ns - booked_ns + self._booked_ns
        setattr(stages, stage, getattr(stages, stage) + passed_ns)
        self._last_ns, self._booked_ns = now_ns, booked_ns

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.ended(error)

    @property
    def passed_ns(self) -> int:
        """Since the request began."""
        return perf_counter_ns() - self._begun_ns

    def ended(self, error: BaseException | None, ns: int | None = None) -> None:
        """The request has its answer, or this error, now or when so much time had passed."""
        ns = self.passed_ns if ns is None else ns
        if error is None:
            self._statistics.succeeded(ns, self.stages, self._door, self.client)
        else:
            self._statistics.failed(ns, _reason(error))


def _reason(error: BaseException) -> str:
    """Triton's word for why a request failed."""
    if isinstance(error, asyncio.CancelledError):
        return "CANCELED"
    if isinstance(error, TessellaError):
        return "REJECTED" if status_of(error) in (429, 503) else "OTHER"
    return "BACKEND"
