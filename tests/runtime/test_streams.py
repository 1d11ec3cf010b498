"""Who waits for whom around an engine's calls, on a CUDA that only takes notes."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from tessella.runtime import streams
from tessella.runtime.streams import Turns


class Cuda:
    """Streams are names; an event keeps what had been queued in its stream when it was recorded."""

    def __init__(self) -> None:
        self.queued: dict[str, list[str]] = {"a": [], "b": [], "own": []}
        self.current = {0: "a", 1: "other"}
        self.device = 0

    def work(self, name: str) -> None:
        self.queued[self.current[self.device]].append(name)

    def set_device(self, index: int) -> None:
        self.device = index

    @contextmanager
    def stream(self, stream):
        before = self.device, self.current[0]
        self.device, self.current[0] = 0, stream.name
        yield
        self.device, self.current[0] = before


class Stream:
    name, device_index = "own", 0


@pytest.fixture
def cuda(monkeypatch) -> Cuda:
    cuda = Cuda()

    class Event:
        before: list[str] | None = None

        def record(self, stream) -> None:
            self.before = list(cuda.queued[stream])

        def wait(self, stream) -> None:
            queue = cuda.queued[stream]
            queue += [name for name in self.before or () if name not in queue]

    monkeypatch.setattr(streams, "OwnStream", lambda device: SimpleNamespace(stream=Stream()))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", cuda.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: cuda.current[index])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: cuda.device)
    monkeypatch.setattr(torch.cuda, "set_device", cuda.set_device)
    return cuda


def test_a_run_is_in_its_caller_s_stream(cuda: Cuda) -> None:
    turns = Turns(torch.device("cuda"))
    cuda.work("make input")
    with turns:
        cuda.work("run")
    cuda.work("use answer")
    assert cuda.queued == {"a": ["make input", "run", "use answer"], "b": [], "own": []}


def test_a_run_waits_for_the_run_before_in_another_stream(cuda: Cuda) -> None:
    turns = Turns(torch.device("cuda"))
    for number, stream in enumerate("aabab"):
        cuda.current[0] = stream
        with turns:
            cuda.work(f"run {number}")
        cuda.work(f"use {number}")
    a, b = cuda.queued["a"], cuda.queued["b"]
    assert a == ["run 0", "use 0", "run 1", "use 1", "run 2", "run 3", "use 3"]
    assert b == ["run 0", "use 0", "run 1", "run 2", "use 2", "use 1", "run 3", "run 4", "use 4"]


def test_from_host_memory_it_waits_for_runs_only(cuda: Cuda) -> None:
    turns = Turns(torch.device("cuda"))
    with turns:
        cuda.work("run 1")
    cuda.work("other work")
    with turns.in_own_stream():
        cuda.work("run 2")
    assert cuda.queued["own"] == ["run 1", "run 2"]
    assert cuda.queued["a"] == ["run 1", "other work"]
    assert cuda.current[0] == "a"


def failing(cuda: Cuda, turns: Turns) -> None:
    with turns:
        assert (cuda.device, cuda.current[0]) == (0, "a")
        raise ZeroDivisionError


def test_the_caller_keeps_its_device(cuda: Cuda) -> None:
    turns = Turns(torch.device("cuda"))
    cuda.device = 1
    with pytest.raises(ZeroDivisionError):
        failing(cuda, turns)
    assert (cuda.device, cuda.current) == (1, {0: "a", 1: "other"})
