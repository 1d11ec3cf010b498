"""Who waits for whom around an engine's calls, on a CUDA that only takes notes."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from tessella.runtime import streams
from tessella.runtime.streams import Turns


class Cuda:
    """Streams are names; who waits for an event knows that what was queued before it has ended."""

    def __init__(self) -> None:
        self.queued: dict[str, list[str]] = {"a": [], "b": [], "own": []}
        self.current = {0: "a", 1: "other"}
        self.device = 0
        self.ended: set[str] = set()
        self.ended_before: dict[str, set[str]] = {}  # what had ended when work was queued

    def work(self, name: str) -> None:
        self.queued[self.current[self.device]].append(name)
        self.ended_before[name] = set(self.ended)

    def set_device(self, index: int) -> None:
        self.device = index

    @contextmanager
    def stream(self, stream):
        before = self.device, self.current[0]
        self.device, self.current[0] = 0, stream.name
        yield
        self.device, self.current[0] = before


class Name(str):
    """A stream of torch 2.11, which does not differ from None."""

    __hash__ = str.__hash__

    def __ne__(self, other: object) -> bool:
        return other is not None and str.__ne__(self, str(other))


class Stream:
    name, device_index = "own", 0


@pytest.fixture
def cuda(monkeypatch) -> Cuda:
    cuda = Cuda()

    class Event:
        before: tuple[str, ...] = ()

        def record(self, stream) -> None:
            self.before = tuple(cuda.queued[stream])

        def synchronize(self) -> None:
            cuda.ended.update(self.before)

    monkeypatch.setattr(streams, "OwnStream", lambda device: SimpleNamespace(stream=Stream()))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", cuda.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: Name(cuda.current[index]))
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
    streams = "aabab"
    for number, stream in enumerate(streams):
        cuda.current[0] = stream
        with turns:
            cuda.work(f"run {number}")
        cuda.work(f"use {number}")
    for number in range(1, len(streams)):
        ended = cuda.ended_before[f"run {number}"]
        changed = streams[number] != streams[number - 1]
        assert (f"run {number - 1}" in ended) == changed  # in its own stream it is behind it
        assert f"use {number - 1}" not in ended


def test_from_host_memory_it_waits_for_runs_only(cuda: Cuda) -> None:
    turns = Turns(torch.device("cuda"))
    with turns:
        cuda.work("run 1")
    cuda.work("other work")
    with turns.in_own_stream():
        cuda.work("run 2")
    assert cuda.ended_before["run 2"] == {"run 1"}
    assert cuda.queued == {"a": ["run 1", "other work"], "b": [], "own": ["run 2"]}
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
