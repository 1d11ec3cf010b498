"""Streams of one's own: nobody else's while they live, and used again."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from tessella.device import streams


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Handles that the driver was asked for."""
    handles: list[int] = []
    count = itertools.count(100)

    def new_stream(device: int) -> int:
        handles.append(next(count))
        return handles[-1]

    class ExternalStream:
        def __init__(self, handle: int, device: int) -> None:
            self.cuda_stream = handle

    monkeypatch.setattr(streams, "cuda_driver", lambda: SimpleNamespace(new_stream=new_stream))
    monkeypatch.setattr(streams, "_FREE", type(streams._FREE)(list))
    monkeypatch.setattr(torch.cuda, "ExternalStream", ExternalStream)
    return handles


def handle(own: streams.OwnStream) -> int:
    return own.stream.cuda_stream


def test_each_has_its_own_and_what_ended_is_used_again(made: list[int]) -> None:
    device = torch.device("cuda", 0)
    one, other = streams.OwnStream(device), streams.OwnStream(device)
    ended = handle(one)
    assert ended != handle(other)
    view = one.stream  # torch's view may live on: the stream is not destroyed
    del one
    again, third = streams.OwnStream(device), streams.OwnStream(device)
    assert handle(again) == ended == view.cuda_stream
    assert handle(third) not in (ended, handle(other))
    assert len(made) == 3


def test_a_device_s_streams_are_its_own(made: list[int]) -> None:
    first = handle(streams.OwnStream(torch.device("cuda", 0)))  # ended at once
    assert handle(streams.OwnStream(torch.device("cuda", 1))) != first
