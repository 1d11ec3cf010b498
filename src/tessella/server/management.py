"""The routes that are in no hurry, on FastAPI: the repository, metrics, the API's description."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from tessella.core.errors import ServeError, TessellaError
from tessella.core.version import VERSION
from tessella.server.answers import error_answer
from tessella.server.metrics import Metrics
from tessella.server.repository import Repository
from tessella.server.shared_memory import Regions
from tessella.server.strict_json import parse_object
from tessella.server.traffic import read_traffic
from tessella.server.welcome import INFERENCE_ROUTES


def management(repository: Repository, metrics: Metrics, regions: Regions) -> FastAPI:
    """The FastAPI application behind the inference routes."""
    # FastAPI's own /docs page loads its scripts from a CDN; ours is in ``welcome``.
    app = FastAPI(title="Tessella", version=VERSION, docs_url=None, redoc_url=None)

    _repository(app, repository)
    _shared_memory(app, regions)

    @app.get("/metrics", summary="Metrics in Prometheus' text format")
    async def metrics_text() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        text = f"{request.method} {request.url.path}: {error.detail}"
        if error.status_code == 404:
            text += ". To do: GET /docs lists the routes, GET /v2/models the models."
        return JSONResponse(
            {"error": text},
            error.status_code,
            headers=error.headers,
        )

    @app.exception_handler(TessellaError)
    async def failed(request: Request, error: TessellaError) -> Response:
        answer = error_answer(error)
        headers = {name.decode(): value.decode() for name, value in answer.headers}
        return Response(answer.body, answer.status, headers)

    app.openapi = lambda: _description(app)  # type: ignore[method-assign]
    return app


def _repository(app: FastAPI, repository: Repository) -> None:
    """The routes of models, their versions and their traffic."""

    @app.post("/v2/repository/index", summary="All models, their state and why")
    async def index(request: Request) -> list[dict[str, Any]]:
        document = await _document(request)
        ready = document.get("ready", False)
        return repository.index(ready=ready is True)

    root = "/v2/repository/models/{name}"

    @app.post(f"{root}/load", summary="Load the newest version of a model, or load it again")
    @app.post(f"{root}/versions/{{version}}/load", summary="Load a version, or load it again")
    async def load(name: str, request: Request, version: str | None = None) -> dict[str, Any]:
        parameters = (await _document(request)).get("parameters")
        if parameters:  # Triton takes a configuration and files here: a way to write to the disk
            raise ServeError(
                "a model is loaded from its plan alone",
                status=400,
                seen=repr(parameters)[:80],
                fix="send an empty body",
            )
        await repository.load(name, version)
        return {}

    @app.post(f"{root}/unload", summary="Take all versions of a model out of service")
    @app.post(f"{root}/versions/{{version}}/unload", summary="Take a version out of service")
    async def unload(name: str, request: Request, version: str | None = None) -> dict[str, Any]:
        await _document(request)
        await repository.unload(name, version)
        return {}

    @app.get(f"{root}/traffic", summary="Which versions answer requests that name none")
    async def traffic(name: str) -> dict[str, Any]:
        return repository.traffic(name)

    @app.post(f"{root}/traffic", summary="Share requests among versions, or copy them to one")
    async def direct(name: str, request: Request) -> dict[str, Any]:
        document = await _document(request)
        repository.direct(name, read_traffic(document) if document else None)
        return repository.traffic(name)


def _shared_memory(app: FastAPI, regions: Regions) -> None:
    """The routes of the shared-memory extension."""
    root = "/v2/systemsharedmemory"

    @app.get(f"{root}/status", summary="The registered regions of shared memory")
    @app.get(f"{root}/region/{{name}}/status", summary="A region of shared memory")
    async def status(name: str | None = None) -> list[dict[str, Any]]:
        return regions.status(name)

    @app.post(f"{root}/region/{{name}}/register", summary="Register a region of shared memory")
    async def register(name: str, request: Request) -> dict[str, Any]:
        asked = await _document(request)
        regions.register(name, asked.get("key"), asked.get("offset", 0), asked.get("byte_size"))
        return {}

    @app.post(f"{root}/unregister", summary="Forget all regions of shared memory")
    @app.post(f"{root}/region/{{name}}/unregister", summary="Forget a region of shared memory")
    async def unregister(name: str | None = None) -> dict[str, Any]:
        regions.unregister(name)
        return {}


async def _document(request: Request) -> dict[str, Any]:
    body = await request.body()
    return parse_object(body, "the request") if body else {}


def _description(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        for method, path, summary in INFERENCE_ROUTES:
            operation: dict[str, Any] = {
                "summary": summary,
                "responses": {"200": {"description": "OK"}},
            }
            for name in ("model", "version"):
                if f"{{{name}}}" in path:
                    told = {"name": name, "in": "path", "required": True}
                    operation.setdefault("parameters", []).append(
                        {**told, "schema": {"type": "string"}}
                    )
            schema["paths"].setdefault(path, {})[method] = operation
        app.openapi_schema = schema
    return app.openapi_schema
