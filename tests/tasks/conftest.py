"""The command line in this process; and detectors that are captured once."""

from __future__ import annotations

from typing import Any

import pytest

from tessella import graph
from tests.support.cli import Tessella, in_process


@pytest.fixture
def tessella(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tessella:
    return in_process(monkeypatch, capsys)


@pytest.fixture
def captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph for the ONNX file and the plan, of which each would take torch.export seconds."""
    known: list[graph.Graph] = []

    def once(*args: Any, capture: Any = graph.capture, **settings: Any) -> graph.Graph:
        known[:] = known or [capture(*args, **settings)]
        return known[0]

    monkeypatch.setattr(graph, "capture", once)
