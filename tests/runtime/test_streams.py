"""Who waits for whom around an engine's own stream, on a CUDA that only takes notes."""

from __future__ import annotations

import pytest
import torch

from tessella.runtime.streams import OwnStream


class Cuda:
    """Streams are names; an event keeps what had been queued in its stream when it was recorded."""

    def __init__(self) -> None:
        self.queued: dict[str, list[str]] = {"a": [], "b": [], "own": []}
        self.current = {0: "a", 1: "other"}
        self.device = 0

    def work(self, name: str) -> None:
        self.queued[self.current[self.device]].append(name)

    def set_stream(self, stream) -> None:
        self.device = getattr(stream, "device_index", 0)
        self.current[self.device] = stream.name if isinstance(stream, Stream) else stream

    def set_device(self, index: int) -> None:
        self.device = index


class Stream:
    name, device_index = "own", 0

    def __init__(self, device: torch.device) -> None:
        pass


@pytest.fixture
def cuda(monkeypatch) -> Cuda:
    cuda = Cuda()

    class Event:
        before: list[str] | None = None

        def record(self, stream) -> None:
            self.before = list(cuda.queued[getattr(stream, "name", stream)])

        def wait(self, stream) -> None:
            queue = cuda.queued[getattr(stream, "name", stream)]
            queue += [name for name in self.before or () if name not in queue]

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: cuda.current[index])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: cuda.device)
    monkeypatch.setattr(torch.cuda, "set_stream", cuda.set_stream)
    monkeypatch.setattr(torch.cuda, "set_device", cuda.set_device)
    return cuda


def call(cuda: Cuda, own: OwnStream, name: str) -> None:
    with own:
        cuda.work(f"run {name}")
    cuda.work(f"copy {name}")
    own.taken()


def test_a_run_is_between_what_its_caller_did_and_does(cuda: Cuda) -> None:
    own = OwnStream(torch.device("cuda"))
    cuda.work("make input")
    call(cuda, own, "1")
    assert cuda.queued["own"] == ["make input", "run 1"]
    assert cuda.queued["a"] == ["make input", "run 1", "copy 1"]


def test_a_run_waits_until_another_stream_has_copied_the_answer_before(cuda: Cuda) -> None:
    own = OwnStream(torch.device("cuda"))
    call(cuda, own, "1")
    cuda.current[0] = "b"
    call(cuda, own, "2")
    assert cuda.queued["own"] == ["run 1", "copy 1", "run 2"]
    assert cuda.queued["b"] == ["run 1", "copy 1", "run 2", "copy 2"]


def failing(cuda: Cuda, own: OwnStream) -> None:
    with own:
        assert (cuda.device, cuda.current[0]) == (0, "own")
        raise ZeroDivisionError


def test_the_caller_keeps_its_device_and_its_stream(cuda: Cuda) -> None:
    own = OwnStream(torch.device("cuda"))
    cuda.device = 1
    with pytest.raises(ZeroDivisionError):
        failing(cuda, own)
    assert (cuda.device, cuda.current) == (1, {0: "a", 1: "other"})
