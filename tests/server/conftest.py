"""Live servers for the tests of this room."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tessella.server import Server
from tests.support.engines import Echo, Pair, Scores, repository


@pytest.fixture(scope="module")
def scores() -> Scores:
    return Scores()


@pytest.fixture(scope="module")
def server(scores: Scores) -> Iterator[Server]:
    """Three models: flowers (a classifier of images), pair (two inputs), echo (all types)."""
    models = repository({"flowers": scores, "pair": Pair(), "echo": Echo()})
    with Server(models) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
