"""SIGINT and SIGTERM as a wish that a training hears between two steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def never() -> bool:
    """Nobody asks."""
    return False


@contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """Tells whether a signal to stop has come; behind the first, a signal does what it did before.

    Outside of the main thread, where Python takes none, nobody is heard.
    """
    if threading.current_thread() is not threading.main_thread():
        yield never
        return
    asked: list[int] = []
    before: dict[int, Any] = {}

    def hear(number: int, _: FrameType | None) -> None:
        asked.append(number)
        restore()

    def restore() -> None:
        while before:
            signal.signal(*before.popitem())

    for number in SIGNALS:
        before[number] = signal.signal(number, hear)
    try:
        yield lambda: bool(asked)
    finally:
        restore()
