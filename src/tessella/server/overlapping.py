"""A batcher whose executions overlap, for an engine on a GPU and a process of one thread."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np

from tessella.runtime.overlapped import Call, Overlapped
from tessella.server.batcher import LONE_NS, Batcher, deliver
from tessella.server.joining import samples_of, split
from tessella.server.statistics import Computation, Statistics
from tessella.server.waiting import Arrays, Piece, Request

LONG_NS = 10**9  # somebody is told before


@dataclass(frozen=True, slots=True)
class _Execution:
    """One that has begun.

    Attributes:
        begun_ns: when the copies of its inputs began. started_ns: when the GPU had all it needs.
    """

    pieces: list[Piece]
    call: Call
    begun_ns: int
    started_ns: int


class OverlappingBatcher(Batcher):
    """As ``Batcher``, without a thread. While one execution computes, the next one begins, if it is
    full: its inputs are copied, and the GPU goes on with it at once. A request that is alone is
    computed while this thread waits.

    Args:
        overlapped: the engine; ``Batcher``'s own runs what is alone, or has failed in company.
        max_batch, max_delay_us, max_waiting: as of ``Batcher``.
    """

    def __init__(
        self,
        overlapped: Overlapped,
        engine: Callable[..., Mapping[str, np.ndarray]],
        *,
        max_batch: int,
        max_delay_us: int,
        max_waiting: int,
        statistics: Statistics,
    ) -> None:
        super().__init__(
            engine,
            max_batch=max_batch,
            max_delay_us=max_delay_us,
            max_waiting=max_waiting,
            statistics=statistics,
            has_thread=False,
        )
        self._overlapped = overlapped
        self._executions = deque[_Execution]()
        self._last_ns = 0  # when an execution was answered last
        self._watched: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        threading.Thread(target=self._watch, name="GPU", daemon=True).start()

    def has_requests(self) -> bool:
        """As ``Batcher.has_requests``; also whether an answer is on its way."""
        return bool(self._executions) or super().has_requests()

    def step(self) -> int | None:
        """Answer what has ended, and begin what may begin.

        Returns:
            As ``Batcher.step``.
        """
        while self._executions and self._executions[0].call.is_done():
            self._answer(self._executions.popleft())
        pieces: list[Piece] = []
        late: list[Request] = []
        company_ns, is_alone = 0, False
        with self._lock:
            self._is_running = bool(self._executions)
            if self._may_begin() and not (company_ns := self._company_ns()):
                pieces, late = self._take()
                is_alone = self._is_alone(pieces)
                if pieces:
                    self._expect(pieces)
        deliver(late)
        if is_alone:
            self._execute(pieces)
        elif pieces:
            self._begin(pieces)
        with self._lock:
            self._is_running = bool(self._executions)
            if self._may_begin():
                return company_ns
            if self._executions:
                return LONG_NS
            is_last = self._release is not None
        if is_last:
            self._end()
        return None

    def _may_begin(self) -> bool:
        """Whether another execution may: beside one that computes only a full one, since what comes
        until that has ended could join a smaller one.
        """
        if not self._waiting or not self._overlapped.has_room:
            return False
        return not self._executions or self._waiting.samples >= self._max_batch

    def _is_alone(self, pieces: list[Piece]) -> bool:
        """Whether an execution is of one request, all there is to do, and brief: then the engine's
        own way answers it sooner: one image of ResNet-50 in 408 instead of 547 µs (H200), most of
        which went to streams and events. Beside a full one the next could begin.
        """
        samples = samples_of(pieces)
        if len(pieces) != 1 or self._waiting or self._executions or samples == self._max_batch > 1:
            return False
        return 0 < self._pace.expected_ns(samples, self._max_batch) <= LONE_NS

    def _begin(self, pieces: list[Piece]) -> None:
        begun_ns = perf_counter_ns()
        parts = [
            r.arrays if end - start == r.batch else {n: a[start:end] for n, a in r.arrays.items()}
            for r, start, end in pieces
        ]
        try:
            call = self._overlapped.begin(parts)
        except Exception as error:
            self._answer_all()  # pieces of a request go in order
            self._failed(pieces, error)
            return
        self._executions.append(_Execution(pieces, call, begun_ns, perf_counter_ns()))
        self._watched.put(call)

    def _answer(self, execution: _Execution) -> None:
        pieces, call = execution.pieces, execution.call
        try:
            answers = split(call.outputs(), pieces)
        except Exception as error:
            call.release()
            self._give_up(pieces, error)
            return
        ended_ns = call.ended_ns or perf_counter_ns()
        free_ns = max(execution.begun_ns, self._last_ns)  # the GPU had nothing else from then on
        started_ns = max(execution.started_ns, free_ns)
        spent = Computation(
            input_ns=started_ns - free_ns, infer_ns=max(0, ended_ns - started_ns), output_ns=0
        )
        self._last_ns = max(self._last_ns, ended_ns)
        with self._lock:
            self._pace.took(samples_of(pieces), spent.infer_ns)
            expected = [
                self._pace.expected_ns(samples_of(other.pieces), self._max_batch)
                for other in self._executions
            ]
            self._running_until_ns = ended_ns + sum(expected)
        self._finished(pieces, answers, execution.begun_ns, spent)
        call.release()

    def _give_up(self, pieces: list[Piece], error: Exception) -> None:
        """As ``_failed``, of an execution that may have others before it or behind it."""
        cut = [r for r, start, end in pieces if end - start < r.batch and r.error is None]
        for request in cut:  # no other piece of it may answer it
            request.error = error
            with self._lock:
                self._drop(request)
        self._answer_all()  # they may read memory of these requests, or have pieces of them
        deliver(cut)
        self._failed(pieces, error)

    def _kept(self, outputs: Arrays) -> Arrays:
        """Copies: the next call has the memory of this one's outputs."""
        return {name: array.copy() for name, array in outputs.items()}

    def _answer_all(self) -> None:
        while self._executions:
            self._answer(self._executions.popleft())

    def _watch(self) -> None:
        """Be the thread that waits for the GPU, without Python's lock."""
        while (call := self._watched.get()) is not None:
            with suppress(RuntimeError):  # told by its outputs
                call.wait()
            del call
            self.on_done()

    def _end(self) -> None:
        if not self._ended.is_set():
            self._watched.put(None)
            super()._end()
