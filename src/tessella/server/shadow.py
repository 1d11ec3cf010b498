"""Shadow traffic: a version answers copies of requests, and its answers are compared.

A copy waits until its request has its answer and this process has no other request at hand. One
copy is computed at a time, and what would wait too long or hold too much memory is shed: so the
version that serves is never waited for, and at most one short execution is ahead of it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import numpy as np

from tessella.core.errors import ServeError
from tessella.server.body import BodyReader
from tessella.server.statistics import Comparison
from tessella.server.traffic import Route
from tessella.server.waiting import SHADOW_PRIORITY, Arrays

MOST_COPIES, MOST_BYTES = 32, 64 << 20  # that wait in one process
PATIENCE_NS = 10**9  # a copy that has waited longer is shed
# Between looks whether nothing else is at hand: the most that shadows take is one execution each.
PAUSE_S = 0.002
SMALL_BYTES = 1 << 18  # larger answers are compared in a thread


@dataclass(eq=False, kw_only=True)
class _Copy:
    """A request that was answered, for the shadow; tells the batcher's ``Waiter`` story."""

    shadowing: Shadowing
    model: Any
    arrays: Arrays
    outputs: Mapping[str, np.ndarray]
    nbytes: int
    since_ns: int
    is_over: bool = False

    @property
    def counts(self) -> Comparison:
        """Where its fate is counted: with the shadow's version."""
        counts: Comparison = self.model.statistics.shadow
        return counts

    def done(self) -> bool:
        return self.is_over

    def set_result(self, outputs: Arrays, /) -> None:
        self.is_over = True
        self.shadowing.answered(self, outputs)

    def set_exception(self, error: Exception, /) -> None:
        self.is_over = True
        if isinstance(error, ServeError):  # no time, too many wait, unloaded
            self.counts.shed += 1
        else:
            self.counts.failed += 1
        self.shadowing.ended(self)


class Shadowing:
    """The copies of one process.

    Args:
        bodies: says whether requests are at hand.
    """

    def __init__(self, bodies: BodyReader) -> None:
        self._bodies = bodies
        self._waiting: deque[_Copy] = deque()
        self._held_bytes = 0
        self._is_busy = False  # a look is due, or a copy is being computed
        self._comparing: set[asyncio.Task[None]] = set()

    def offer(self, route: Route[Any], arrays: Arrays, outputs: Mapping[str, np.ndarray]) -> None:
        """Have the shadow of a route answer this too, some time after the answer has gone out."""
        if not route.copies():
            return
        assert route.shadow is not None
        nbytes = sum(a.nbytes for side in (arrays, outputs) for a in side.values())
        if len(self._waiting) >= MOST_COPIES or self._held_bytes + nbytes > MOST_BYTES:
            route.shadow.statistics.shadow.shed += 1
            return
        self._held_bytes += nbytes
        self._waiting.append(
            _Copy(
                shadowing=self, model=route.shadow, arrays=arrays, outputs=outputs, nbytes=nbytes,
                since_ns=perf_counter_ns(),
            )
        )  # fmt: skip
        if not self._is_busy:
            self._look_later()

    def _look_later(self) -> None:
        self._is_busy = True
        asyncio.get_running_loop().call_later(PAUSE_S, self._look)

    def _look(self) -> None:
        """Begin the next copy if nothing else is at hand."""
        self._is_busy = False
        now_ns = perf_counter_ns()
        while self._waiting and now_ns - self._waiting[0].since_ns > PATIENCE_NS:
            late = self._waiting.popleft()
            late.counts.shed += 1
            self._held_bytes -= late.nbytes
        if not self._waiting:
            return
        if self._bodies.held_bytes:
            self._look_later()
            return
        self._is_busy = True
        copy = self._waiting.popleft()
        copy.model.__enter__()
        try:
            copy.model.batcher.begin(
                copy.arrays, copy, timeout_us=PATIENCE_NS // 1000, priority=SHADOW_PRIORITY
            )
        except Exception as error:
            copy.set_exception(error)

    def answered(self, copy: _Copy, outputs: Arrays) -> None:
        """Compare the shadow's outputs with those that were sent."""
        if sum(array.nbytes for array in outputs.values()) <= SMALL_BYTES:
            copy.counts.compared(*compare(copy.outputs, outputs))
            self.ended(copy)
            return
        task = asyncio.get_running_loop().create_task(self._compare(copy, outputs))
        self._comparing.add(task)
        task.add_done_callback(self._comparing.discard)

    async def _compare(self, copy: _Copy, outputs: Arrays) -> None:
        copy.counts.compared(*await asyncio.to_thread(compare, copy.outputs, outputs))
        self.ended(copy)

    def ended(self, copy: _Copy) -> None:
        """Let the copy go, and look for the next one."""
        copy.model.__exit__()
        self._held_bytes -= copy.nbytes
        if self._waiting:
            self._look_later()
        else:
            self._is_busy = False


def compare(
    served: Mapping[str, np.ndarray], shadow: Mapping[str, np.ndarray]
) -> tuple[int, int, float]:
    """How many samples there were, for how many the largest element of every output is the same
    one, and the largest difference of an element.

    Two NaN or two equal infinities differ by nothing, a number and a NaN by infinity. Outputs of
    other shapes agree in nothing.
    """
    samples = len(next(iter(served.values())))
    agrees = np.ones(samples, bool)
    largest = 0.0
    for name, one in served.items():
        other = shadow.get(name)
        if other is None or other.shape != one.shape:
            return samples, 0, float("inf")
        if not one.size:
            continue
        a, b = (x.reshape(samples, -1).astype(np.float64) for x in (one, other))
        agrees &= a.argmax(axis=1) == b.argmax(axis=1)
        with np.errstate(invalid="ignore"):  # ∞ − ∞
            difference = np.abs(a - b)
        difference[(a == b) | (np.isnan(a) & np.isnan(b))] = 0
        largest = max(largest, float(np.nan_to_num(difference, nan=np.inf, posinf=np.inf).max()))
    return samples, int(agrees.sum()), largest
