"""The process that compiles for the tests: one test's time may be over, the next has its answer."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.support.kernels.compile_only import compile_all


class OverTime(Exception):
    """Stands for what ``pytest-timeout`` raises in a test."""


def never() -> Iterator[None]:
    """Cases that are never found: while they are looked for, the test's time is over."""
    os.kill(os.getppid(), signal.SIGUSR1)
    signal.pause()
    yield


def nothing() -> list[None]:
    return []


def test_a_process_whose_answer_did_not_come_is_replaced() -> None:
    def over(number: int, frame: object) -> None:
        raise OverTime

    earlier = signal.signal(signal.SIGUSR1, over)
    try:
        with pytest.raises(OverTime):
            compile_all(f"{__name__}:never")
    finally:
        signal.signal(signal.SIGUSR1, earlier)
    assert compile_all(f"{__name__}:nothing") == {}
