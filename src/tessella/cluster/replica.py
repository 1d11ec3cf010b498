"""A replica: the server of one process, behind one of Ray's proxies instead of a socket."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tessella.artifacts.outline import Outline
from tessella.artifacts.plan import load_outline
from tessella.cluster.front import REPLICA, Application, Door, Message
from tessella.core.errors import ArtifactError, ServeError
from tessella.core.record import digest
from tessella.runtime import Engine, load_tried
from tessella.server.answers import Send, error_answer, reply
from tessella.server.app import App
from tessella.server.body import Receive, Scope
from tessella.server.describing import Describing
from tessella.server.jpegs import decoder_for
from tessella.server.limits import DEFAULT_LIMITS
from tessella.server.listening import keep_what_is_loaded
from tessella.server.repository import Repository
from tessella.server.traffic import Traffic
from tessella.server.versions import plans_of, split_key


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """What every replica serves.

    Attributes:
        models: the files of plans, on every machine, by NAME@VERSION.
        hashes: by file, of the plan's manifests, which vouch for all of it.
    """

    models: dict[str, str]
    hashes: dict[str, str]
    door: Door
    traffic: dict[str, Traffic] = field(default_factory=dict)
    max_delay_us: int = 0
    compiled: bool = True
    decode: Literal["host", "gpu"] = "host"


def described(models: dict[str, Path], door: Door, **settings: Any) -> Deployment:
    """The deployment of these plans, or folders of VERSION/model.plan, as they are now.

    Raises:
        UsageError: a name or version that no model can have.
        ArtifactError: a file that is no plan.
    """
    files: dict[str, str] = {}
    for key, path in models.items():
        name, version = split_key(key)
        plans = plans_of(path) if path.is_dir() else {version: path}
        files |= {f"{name}@{v}": str(plan.absolute()) for v, plan in plans.items()}
    hashes = {file: hash_of(load_outline(file)) for file in files.values()}
    return Deployment(models=files, hashes=hashes, door=door, **settings)


def hash_of(plan: Outline) -> str:
    """One hash of the programs for all targets, and of the tensors."""
    return digest([plan.at(target).manifest for target in plan.targets])


class Replica:
    """What Ray makes in each process: it builds the application of the deployment's models."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment

    def __serve_build_asgi_app__(self) -> Application:
        from ray import serve  # takes 4 s

        asked = self._deployment
        repository = Repository(
            {key: Path(file) for key, file in asked.models.items()},
            traffic=asked.traffic,
            max_delay_us=asked.max_delay_us,
            open_engine=functools.partial(opened, asked),
            decoder_for=decoder_for(asked.decode),
        )
        repository.load_all()
        guard = asked.door.guard()
        rest = refusing(Describing(repository, token=guard.has_token))
        app = App(repository, guard, DEFAULT_LIMITS, rest=rest)
        keep_what_is_loaded()
        return named(app, serve.get_replica_context().replica_id.unique_id)


def opened(deployment: Deployment, path: Path) -> Engine:
    """The engine of a plan, if it is the one that was deployed.

    Raises:
        ArtifactError: it is another, or cannot be loaded here.
    """
    if hash_of(load_outline(path)) != deployment.hashes[str(path)]:
        raise ArtifactError(
            "this machine has another plan than the one that was deployed",
            seen=path,
            fix="copy the plan to all machines, under a name of its own, and deploy again",
        )
    return load_tried(path, compiled=deployment.compiled)


def named(app: Application, name: str) -> Application:
    """The application, with the replica's name on every answer."""

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        async def signed(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (REPLICA, name.encode())]
            await send(message)

        await app(scope, receive, signed)

    return answered


def refusing(rest: Application) -> Application:
    """The application without what would change, or count, one replica of many."""

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        fix = None
        match scope["method"], scope["path"].split("/")[1:]:
            case "POST", ["v2", "repository", "models", *_]:
                fix = "run tessella serve --on ray again, with the plans and --traffic to have"
            case _, ["v2", "systemsharedmemory", *_]:
                fix = "send tensors in the body of the request"
            case _, ["metrics"]:
                fix = "scrape Ray's metrics, which name the replica; GET /v2/models/stats has ours"
        if fix is None:
            await rest(scope, receive, send)
            return
        error = ServeError("one replica of many answers here", status=501, fix=fix)
        await reply(error_answer(error), dict(scope["headers"]), send)

    return answered
