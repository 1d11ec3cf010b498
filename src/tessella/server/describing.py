"""The routes that describe the server and its models, and behind them those of ``management``."""

from __future__ import annotations

from collections.abc import Callable

from tessella.server.answers import Answer, Send, error_answer, json_answer, reply
from tessella.server.body import Headers, Receive, Scope
from tessella.server.descriptions import model_config, model_metadata, server_metadata
from tessella.server.guard import require_method
from tessella.server.management import management
from tessella.server.metrics import Metrics
from tessella.server.protocol import NO_REGIONS
from tessella.server.repository import Model, Repository
from tessella.server.shared_memory import Regions
from tessella.server.welcome import front_page, models, routes_page

Describe = Callable[[], dict[str, object] | Answer]


class Describing:
    """ASGI application of all that is not inference.

    Args:
        token: whether clients send one.
        regions: the shared memory that clients may register.
    """

    def __init__(
        self, repository: Repository, *, token: bool, regions: Regions = NO_REGIONS
    ) -> None:
        self._repository = repository
        self._token = token
        self._management = management(repository, Metrics(repository), regions)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: Headers = dict(scope["headers"])
        describe = self._route(scope, headers)
        if describe is None:
            await self._management(scope, receive, send)
            return
        try:
            require_method(scope["method"], "GET")
            made = describe()
        except Exception as error:
            made = error_answer(error)
        await reply(made if isinstance(made, Answer) else json_answer(made), headers, send)

    def _route(self, scope: Scope, headers: Headers) -> Describe | None:
        repository = self._repository
        url = f"{scope['scheme']}://{headers.get(b'host', b'').decode('latin-1')}"
        match scope["path"].split("/")[1:]:
            case [""]:
                return lambda: front_page(repository, url, token=self._token)
            case ["docs"]:
                return routes_page
            case ["v2"] | ["v2", ""]:
                return server_metadata
            case ["v2", "models"] | ["v2", "models", ""]:
                return lambda: models(repository, url, token=self._token)
            case ["v2", "models", "stats"]:
                return lambda: _statistics(repository.models)
            case ["v2", "models", name, "versions", version, *verb] if len(verb) <= 1:
                return self._of_model(name, version, verb)
            case ["v2", "models", name, *verb] if len(verb) <= 1:
                return self._of_model(name, None, verb)
        return None

    def _of_model(self, name: str, version: str | None, verb: list[str]) -> Describe | None:
        get, versions = self._repository.get, self._repository.versions
        match verb:
            case []:
                return lambda: model_metadata(get(name, version), versions(name))
            case ["config"]:
                return lambda: model_config(get(name, version), versions(name))
            case ["stats"]:
                return lambda: _statistics([get(name, version)] if version else versions(name))
        return None


def _statistics(models: list[Model]) -> dict[str, object]:
    return {"model_stats": [m.statistics.to_json(m.name, m.version) for m in models]}
