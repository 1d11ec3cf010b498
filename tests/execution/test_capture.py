"""Captures, with a graph that only counts: what is run when, and what is told before a replay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tessella.device.cuda_graphs import GRAPH_LOCK
from tessella.execution import capture
from tessella.execution.capture import Captured


class Counting:
    """Stands for a CUDA graph, and for the places in one that hold an address."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def raw_cuda_graph_exec(self) -> int:
        return 7

    def raw_cuda_graph(self) -> int:
        return 5

    def point(self, executable: int, address: int) -> None:
        assert GRAPH_LOCK.locked()
        self.told.append((executable, address))

    def replay(self) -> None:
        assert GRAPH_LOCK.locked()
        self.told.append("replay")


def test_warm_runs_a_capture_and_replays_behind_new_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = Counting()

    @contextmanager
    def capturing(**asked: Any) -> Iterator[Counting]:
        graph.told.append(asked)
        yield graph
        graph.told.append("captured")

    monkeypatch.setattr(capture, "capturing", capturing)
    monkeypatch.setattr(capture, "cuda_driver", lambda: None)

    def run() -> int:
        graph.told.append("run")
        return len(graph.told)

    captured = Captured(run, pool=(1, 2))
    asked = {"pool": (1, 2), "stream": None}
    assert graph.told == ["run", "run", asked, "run", "captured"]
    assert captured.results == 4
    graph.told.clear()
    captured.replay((graph, 64), (graph, 128))  # type: ignore[arg-type]
    captured.replay()
    assert graph.told == [(7, 64), (7, 128), "replay", "replay"]
    assert not GRAPH_LOCK.locked()
