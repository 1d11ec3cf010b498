"""A thread that runs an engine beside the event loop, which reads and answers requests meanwhile.

All that it does under Python's lock is the call: joining, splitting and answering are the loop's,
so that the two wait for each other twice an execution.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter_ns, thread_time_ns

import numpy as np

from tessella.server.waiting import Arrays


@dataclass(frozen=True, slots=True)
class Ran:
    """An execution that has ended.

    Attributes:
        outputs: None if there is an ``error``.
        ns, processor_ns: how long it took by the clock, and of the processor.
    """

    outputs: Mapping[str, np.ndarray] | None
    error: Exception | None
    ns: int
    processor_ns: int

    def made(self) -> Mapping[str, np.ndarray]:
        """The outputs.

        Raises:
            Exception: the engine's error.
        """
        if self.error is not None:
            raise self.error
        assert self.outputs is not None
        return self.outputs


class Beside:
    """Runs an engine in a thread of its own, which begins with the first execution."""

    def __init__(self, engine: Callable[..., Mapping[str, np.ndarray]]) -> None:
        self._engine = engine
        self._asked = queue.SimpleQueue[
            tuple[Arrays, asyncio.AbstractEventLoop, Callable[[Ran], None]] | None
        ]()
        self._thread: threading.Thread | None = None

    def run(
        self, arrays: Arrays, loop: asyncio.AbstractEventLoop, done: Callable[[Ran], None]
    ) -> None:
        """Run the engine; the loop calls ``done`` when it has."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="engine beside", daemon=True)
            self._thread.start()
        self._asked.put((arrays, loop, done))

    def end(self) -> None:
        """End the thread, if it has begun; it runs nothing."""
        self._asked.put(None)

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            arrays, loop, done = asked
            outputs, error = None, None
            begun_ns, worked_ns = perf_counter_ns(), thread_time_ns()
            try:
                outputs = self._engine(**arrays)
            except Exception as failure:  # it is the requests' answer
                error = failure
            worked_ns = thread_time_ns() - worked_ns
            ran = Ran(outputs, error, perf_counter_ns() - begun_ns, worked_ns)
            try:
                loop.call_soon_threadsafe(done, ran)
            except RuntimeError:  # the loop has ended: nobody waits
                return
            del asked, arrays, done, outputs, ran
