"""Dynamic batching: requests that wait for the same engine at the same time run as one batch.

One thread a model runs its engine; while it computes, requests gather, and the next execution takes
as many as fit. With ``max_delay_us`` an execution also waits that long for company.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from tessella.core.errors import ServeError
from tessella.server.statistics import Computation, Statistics

Arrays = dict[str, np.ndarray]


@dataclass(eq=False, slots=True)
class _Waiting:
    arrays: Arrays
    batch: int
    shapes: tuple[tuple[int, ...], ...]  # but for the batch: only equal ones can be joined
    since_ns: int
    answer: asyncio.Future[Arrays]


class Batcher:
    """Runs an engine for many requests.

    Args:
        engine: ``engine(name=array) -> {name: array}``; the batch is dimension 0 of all of them.
        max_batch: most samples to join; a single larger request runs alone.
        max_delay_us: how long an execution may wait for more requests; 0 joins only what waits.
        max_waiting: requests that may wait; more are refused.
    """

    def __init__(
        self,
        engine: Callable[..., Mapping[str, np.ndarray]],
        *,
        max_batch: int,
        max_delay_us: int,
        max_waiting: int,
        statistics: Statistics,
    ) -> None:
        self._engine = engine
        self._max_batch = max_batch
        self._max_delay_ns = max_delay_us * 1000
        self._max_waiting = max_waiting
        self._statistics = statistics
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._waiting: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None

    async def infer(self, arrays: Arrays) -> Arrays:
        """The engine's outputs for these inputs, computed alone or in a batch with other requests.

        Raises:
            ServeError: 503, too many requests wait.
            Exception: whatever the engine raised for this request.
        """
        if len(self._waiting) >= self._max_waiting:
            raise ServeError(
                "too many requests wait for this model",
                status=503,
                seen=f"{len(self._waiting)} waiting",
                fix="try again in a moment, or send fewer requests at once",
            )
        item = _Waiting(
            arrays=arrays,
            batch=len(next(iter(arrays.values()))),
            shapes=tuple(arrays[name].shape[1:] for name in sorted(arrays)),
            since_ns=time.perf_counter_ns(),
            answer=asyncio.get_running_loop().create_future(),
        )
        self._waiting.append(item)
        self._statistics.waiting = len(self._waiting)
        self._arrived.set()
        if self._runner is None:
            self._runner = asyncio.create_task(self._run())
        return await item.answer

    async def close(self, release: Callable[[], None]) -> None:
        """Finish what waits, then ``release`` the engine in the thread that ran it."""
        while self._runner is not None:
            await asyncio.wait([self._runner])
        await asyncio.get_running_loop().run_in_executor(self._thread, release)
        self._thread.shutdown(wait=False)

    async def _run(self) -> None:
        try:
            while self._waiting:
                if self._max_delay_ns:
                    await self._wait_for_company()
                if items := self._take():
                    await self._execute(items)
        finally:
            self._runner = None

    async def _wait_for_company(self) -> None:
        """Wait until the batch is full or the first request has waited ``max_delay_us``."""
        deadline_ns = self._waiting[0].since_ns + self._max_delay_ns
        while sum(i.batch for i in self._waiting) < self._max_batch:
            remaining_ns = deadline_ns - time.perf_counter_ns()
            if remaining_ns <= 0:
                return
            self._arrived.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(remaining_ns / 1e9):
                    await self._arrived.wait()

    def _take(self) -> list[_Waiting]:
        """The first waiting request and those behind that can join; drops cancelled requests."""
        items: list[_Waiting] = []
        samples = 0
        while self._waiting:
            head = self._waiting[0]
            if not head.answer.done():
                joins = not items or (
                    samples + head.batch <= self._max_batch and head.shapes == items[0].shapes
                )
                if not joins:
                    break
                items.append(head)
                samples += head.batch
            self._waiting.popleft()
        self._statistics.waiting = len(self._waiting)
        return items

    async def _execute(self, items: list[_Waiting]) -> None:
        started_ns = time.perf_counter_ns()
        work = [i.arrays for i in items]
        loop = asyncio.get_running_loop()
        try:
            answers, spent = await loop.run_in_executor(self._thread, self._compute, work)
        except Exception as error:  # an engine's error is the request's answer
            if len(items) == 1:
                if not items[0].answer.done():
                    items[0].answer.set_exception(error)
                return
            for item in items:  # one of them may have caused it: run each alone
                if not item.answer.done():
                    await self._execute([item])
            return
        self._statistics.executed(
            sum(i.batch for i in items), [started_ns - i.since_ns for i in items], spent
        )
        for item, answer in zip(items, answers, strict=True):
            if not item.answer.done():
                item.answer.set_result(answer)

    def _compute(self, work: list[Arrays]) -> tuple[list[Arrays], Computation]:
        """Join the inputs, run the engine and split the outputs, in the engine's thread."""
        begin_ns = time.perf_counter_ns()
        joined = {name: _join([arrays[name] for arrays in work]) for name in work[0]}
        joined_ns = time.perf_counter_ns()
        outputs = self._engine(**joined)
        ran_ns = time.perf_counter_ns()
        answers = _split(outputs, [len(next(iter(arrays.values()))) for arrays in work])
        end_ns = time.perf_counter_ns()
        spent = Computation(
            input_ns=joined_ns - begin_ns, infer_ns=ran_ns - joined_ns, output_ns=end_ns - ran_ns
        )
        return answers, spent


def _join(parts: list[np.ndarray]) -> np.ndarray:
    """One writable, aligned array: an array from a body may be unaligned and read-only."""
    if len(parts) > 1:
        return np.concatenate(parts)
    return np.require(parts[0], requirements=["C", "A", "W"])


def _split(outputs: Mapping[str, np.ndarray], batches: list[int]) -> list[Arrays]:
    if len(batches) == 1:
        return [dict(outputs)]
    total = sum(batches)
    for name, array in outputs.items():
        if len(array) != total:
            raise ValueError(f"output {name} has {len(array)} rows for {total} samples")
    ends = np.cumsum(batches).tolist()
    return [
        {name: array[end - batch : end] for name, array in outputs.items()}
        for end, batch in zip(ends, batches, strict=True)
    ]
