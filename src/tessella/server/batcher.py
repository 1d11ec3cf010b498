"""Dynamic batching: requests that wait for the same engine at the same time run as one batch.

One thread runs an engine; while it computes, requests gather, and the next execution takes
as many as fit, the urgent ones first. Requests that are larger than an execution are cut, and the
others pass in between. What cannot be answered in the time that its client has is refused at once.
Executions that are as short as what the event loop does for a request run in the loop's own thread:
so all requests that one look at the sockets has brought are joined, and no thread has to wake.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter_ns, thread_time_ns
from typing import Literal

import numpy as np

from tessella.core.errors import ServeError
from tessella.server import joining
from tessella.server.fairness import Waiting
from tessella.server.joining import samples_of, split
from tessella.server.pace import Pace
from tessella.server.statistics import Computation, Stages, Statistics
from tessella.server.waiting import (
    DEFAULT_PRIORITY,
    SHADOW_PRIORITY,
    Arrays,
    Infers,
    Piece,
    Request,
    Waiter,
)

# What may run in the event loop's thread, and so holds up everything else there: less than Python's
# own turn of a thread (5 ms), as far as a measured time is sure: 32 images of a LeNet take 3.2 to
# 4.1 ms in the loop, and in a thread, which waits for Python's lock, 4.2 to 5.2 ms of the processor
# and 7 to 14 ms by the clock. Two threads that wake each other cost a LeNet's request 0.3 ms.
BRIEF_NS = 6 * 10**6
# On a GPU, by the clock, as the thread waits for it: of a request that comes alone. Its way through
# the engine's thread and back takes 0.1 to 0.2 ms.
LONE_NS = 10**6
EFFORTS = 8  # of as many executions of a size one is timed by the processor's time


class Batcher(Infers):
    """Runs an engine for many requests. Requests may come from any thread.

    Attributes:
        has_thread: a thread of its own runs the engine; without, somebody calls ``step``.
        on_done: called in some thread when ``step`` has something to do that did not just come.

    Args:
        engine: ``engine(name=array) -> {name: array}``; the batch is dimension 0 of all of them.
        max_batch: most samples to join; a larger request is cut.
        max_delay_us: how long an execution may wait for more requests; 0 joins only what waits.
        max_waiting: requests that may wait; more are refused.
        join: makes one array of the samples of several requests, by the input's name.
        in_loop: executions of at most ``BRIEF_NS`` may run in the thread of the event loop; or
            those of one request that waits ``alone``, of at most ``LONE_NS``.
    """

    def __init__(
        self,
        engine: Callable[..., Mapping[str, np.ndarray]],
        *,
        max_batch: int,
        max_delay_us: int,
        max_waiting: int,
        statistics: Statistics,
        has_thread: bool = True,
        in_loop: bool | Literal["alone"] = False,
        join: Callable[[str, list[np.ndarray]], np.ndarray] | None = None,
    ) -> None:
        self._engine = engine
        self._join = join or joining.join
        self.has_thread = has_thread
        self.on_done: Callable[[], object] = lambda: None
        self._in_loop = bool(in_loop) and has_thread and not max_delay_us
        self._only_lone = in_loop == "alone"
        self._was_lone = False  # the last execution was of one request
        self._max_batch = max_batch
        self._max_delay_ns = max_delay_us * 1000
        self._max_waiting = max_waiting
        self._statistics = statistics
        self._pace = Pace()
        self._efforts = 0  # executions whose time might have been asked for
        self._effort = Pace()  # by the processor's time: other threads and programs do not count
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting = Waiting[Request](max_batch)
        self._abreast = 1  # executions that may run at a time
        self._running_until_ns = 0
        self._is_idle = False
        self._is_running = False
        self._ended = threading.Event()
        self._release: Callable[[], None] | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._has_turn = False  # the event loop will call ``_turn``
        self._deliver: Callable[[list[Request]], object] = _settle

    def begin(
        self,
        arrays: Arrays,
        answer: Waiter,
        *,
        timeout_us: int | None = None,
        priority: int = DEFAULT_PRIORITY,
        client: int = 0,
        stages: Stages | None = None,
    ) -> None:
        """As ``Infers.begin``."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            # One function for all requests: an execution wakes the loop once, for all its answers.
            with self._lock:
                self._loop, self._loop_thread = loop, threading.get_ident()
                self._deliver = partial(_tell, loop, self._loop_thread)
        request = Request(
            arrays=arrays,
            deliver=self._deliver,
            priority=priority,
            client=client,
            deadline_ns=None if timeout_us is None else perf_counter_ns() + 1000 * timeout_us,
            stages=Stages() if stages is None else stages,
            answer=answer,
        )
        self.submit(request)

    def submit(self, request: Request) -> None:
        """Let a request wait for its turn; ``request.deliver`` is called when it is over.

        Where as many wait as may, the last one of the client that has most waiting gives its place.

        Raises:
            ServeError: 503, too many requests wait; 429, there is no time for this one.
        """
        if refused := self._admit((request,)):
            deliver([other for other in refused if other is not request])
            if request.error is not None:
                raise request.error

    def submit_all(self, requests: Sequence[Request]) -> None:
        """As ``submit``, for requests that came together: those that are refused are given back
        with their errors.

        Raises:
            ServeError: 503, the model was unloaded; then none of them was taken.
        """
        deliver(self._admit(requests))

    def _admit(self, requests: Sequence[Request]) -> list[Request]:
        """Let requests wait; those that are refused, of these or of others, with their errors.

        Raises:
            ServeError: as ``submit_all``.
        """
        refused: list[Request] = []
        now_ns = perf_counter_ns()
        with self._lock:
            if self._release is not None:
                raise unloaded()
            waiting = self._waiting
            for request in requests:
                request.since_ns = now_ns
                for array in request.arrays.values():
                    request.batch = len(array)
                    break
                if request.deadline_ns is not None or waiting.members >= self._max_waiting:
                    try:
                        refused += self._make_room(request, now_ns)
                    except ServeError as error:
                        request.error = error
                        refused.append(request)
                        continue
                waiting.push(request, now_ns)
            self._statistics.waiting = waiting.members
            self._wake()
        return refused

    async def drain(self, unused: asyncio.Event) -> None:
        """Wait until nobody waits for an answer, as ``unused`` says; before ``close``."""
        await unused.wait()

    async def close(self, release: Callable[[], None]) -> None:
        """Finish what waits, then ``release`` the engine in the thread that ran it, if one did."""
        with self._lock:
            self._release = release
            self._changed.notify_all()
            unused = self._thread is None and not self._waiting and not self._is_running
        if unused:
            self._end()
        await asyncio.to_thread(self._ended.wait)

    def has_requests(self) -> bool:
        """Whether something waits that is not a shadow's copy."""
        with self._lock:
            return bool(self._waiting) and self._waiting.first.priority != SHADOW_PRIORITY

    # --- the queue, under the lock ----------------------------------------------------------------

    def _wake(self) -> None:
        """Have what waits run; who is running already looks again when that is over."""
        if not self._waiting or self._is_running or self._has_turn:
            return
        if threading.get_ident() == self._loop_thread and self._is_brief():
            assert self._loop is not None
            self._has_turn = True
            self._loop.call_soon(self._turn)
        elif self._thread is None and self.has_thread:
            self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
            self._thread.start()
        elif self._is_idle:
            self._changed.notify()

    def _is_brief(self) -> bool:
        """Whether the next execution belongs into the event loop's thread: as far as those before
        tell, it does not hold it up.

        By what they took of the processor: by the clock, executions in a thread that waits for
        Python's lock after each of its kernels seem long, and so would stay in the thread for good.
        """
        if not self._in_loop or self._loop is None or self._release is not None:
            return False
        samples = min(self._waiting.samples, self._max_batch)
        if self._only_lone:  # where several come at a time, the next ones are read meanwhile
            if not self._was_lone or len(self._waiting) != 1:
                return False
            return 0 < self._pace.expected_ns(samples, self._max_batch) <= LONE_NS
        return 0 < self._effort.expected_ns(samples, self._max_batch) <= BRIEF_NS

    def _is_for_thread(self) -> bool:
        """Whether the engine's thread has something to do: an execution, or the end."""
        if self._is_running or self._has_turn:
            return False
        if not self._waiting:
            return self._release is not None
        if self._is_brief():
            assert self._loop is not None
            if not self._loop.is_closed():
                self._has_turn = True
                self._loop.call_soon_threadsafe(self._turn)
                return False
        return True

    def _push(self, request: Request, now_ns: int) -> None:
        self._waiting.push(request, now_ns)
        self._statistics.waiting = self._waiting.members

    def _make_room(self, request: Request, now_ns: int) -> list[Request]:
        """See that a request can wait; those that are refused for it.

        Raises:
            ServeError: as ``submit``.
        """
        if request.deadline_ns is not None:
            self._require_time(request, now_ns)
        if self._waiting.members >= self._max_waiting:
            return self._give_place(request)
        return []

    def _give_place(self, request: Request) -> list[Request]:
        """Take out a request that gives its place to this one.

        Raises:
            ServeError: 503, there is none: no client has more waiting.
        """
        error = ServeError(
            "too many requests wait for this model",
            status=503,
            seen=f"{self._waiting.members} waiting",
            fix="try again in a moment, or send fewer requests at once",
        )
        last = self._waiting.last_of_greediest(request)
        if last is None:
            raise error
        last.error = error
        self._drop(last)
        return [last]

    def _require_time(self, request: Request, now_ns: int) -> None:
        """Raise ``ServeError`` 429 if this request cannot be answered before its deadline."""
        assert request.deadline_ns is not None
        running_ns = max(0, self._running_until_ns - now_ns)
        left_ns = request.deadline_ns - now_ns

        def needs(samples: int) -> int:
            samples = samples // self._abreast + request.batch
            return running_ns + self._pace.expected_ns(samples, self._max_batch)

        # To count who goes before takes longer, and there is time for all in most cases.
        needed_ns = needs(self._waiting.samples)
        if needed_ns > left_ns:
            before = self._waiting.samples_before(
                request, now_ns, is_enough=lambda found: needs(found) > left_ns
            )
            needed_ns = needs(before)
        if needed_ns > left_ns:
            if not self._waiting and not self._is_running and self._pace.is_old(now_ns):
                self._pace = Pace()  # refused for ever, it would never be measured again
                return
            raise _no_time(left_ns, needed_ns)

    def _take(self, most: int | None = None) -> tuple[list[Piece], list[Request]]:
        """The next execution: the first that waits, and those behind it that can join; and those
        for which it is too late.

        Args:
            most: samples that are joined; None is as many as fit.
        """
        most = most or self._max_batch
        pieces: list[Piece] = []
        late: list[Request] = []
        samples = 0
        now_ns = perf_counter_ns()
        waiting = self._waiting
        while waiting:
            request = waiting.first
            left = request.batch - request.begun
            if request.answer is not None and request.answer.done():  # nobody waits for it
                waiting.pop(is_computed=False)
                continue
            if request.deadline_ns is not None and not request.begun:
                needed_ns = self._pace.expected_ns(left, self._max_batch)
                if now_ns + needed_ns > request.deadline_ns:
                    request.error = _no_time(request.deadline_ns - now_ns, needed_ns)
                    late.append(waiting.pop(is_computed=False))
                    continue
            size = left
            if left > self._max_batch or request.begun:
                size = min(left, self._pace.most_samples(self._max_batch))
            if pieces:
                if samples + size > most or request.shapes != pieces[0][0].shapes:
                    break
                if request.priority == SHADOW_PRIORITY != pieces[0][0].priority:
                    break  # a copy makes no execution of requests longer
            waiting.pop()
            pieces.append((request, request.begun, request.begun + size))
            request.begun += size
            samples += size
        for request, _, end in pieces:
            if end < request.batch:  # the rest goes behind all that wait by now
                self._push(request, now_ns)
        self._statistics.waiting = waiting.members
        return pieces, late

    def _company_ns(self) -> int:
        """How long to wait for more: until the batch is full, the first request has waited
        ``max_delay_us``, or there is just the time to answer it.
        """
        if (
            not self._max_delay_ns
            or self._waiting.samples >= self._max_batch
            or self._release is not None
        ):
            return 0
        first = self._waiting.first
        until_ns = first.since_ns + self._max_delay_ns
        if first.deadline_ns is not None:
            needed_ns = self._pace.expected_ns(self._waiting.samples, self._max_batch)
            until_ns = min(until_ns, first.deadline_ns - 2 * needed_ns)
        return max(0, until_ns - perf_counter_ns())

    # --- the engine's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        """Be the thread that runs the engine."""
        while True:
            with self._lock:
                while not self._is_for_thread():
                    self._wait(None)
                while self._waiting and (company_ns := self._company_ns()):
                    self._wait(company_ns / 1e9)
            if self.step() is None and self._release is not None:
                break
        self._end()

    def _wait(self, seconds: float | None) -> None:
        self._is_idle = True
        self._changed.wait(seconds)
        self._is_idle = False

    def _turn(self) -> None:
        """Run the next execution in the event loop's thread, which called this."""
        with self._lock:
            self._has_turn = False
            if not self._is_brief():  # more have come since, or the end
                self._changed.notify()
                self._wake()
                return
        if self.step() is not None:
            with self._lock:
                self._wake()

    def step(self) -> int | None:
        """Run the next execution, if it is due.

        Returns:
            In how many nanoseconds there is something to do; None if nothing waits.
        """
        with self._lock:
            if not self._waiting or self._is_running:
                return None
            if company_ns := self._company_ns():
                return company_ns
            pieces, late = self._take()
            if pieces:
                self._expect(pieces)
        deliver(late)
        if pieces:
            self._execute(pieces)
        with self._lock:
            self._is_running = False
            if self._release is not None:
                self._changed.notify()  # the end is the engine's thread's, if there is one
            if self._waiting:
                return 0
            is_last = self._thread is None and self._release is not None
        if is_last:
            self._end()
        return None

    def _expect(self, pieces: list[Piece]) -> None:
        """Note that an execution begins, and when it will have ended."""
        now_ns = max(perf_counter_ns(), self._running_until_ns if self._is_running else 0)
        expected_ns = self._pace.expected_ns(samples_of(pieces), self._max_batch)
        self._running_until_ns = now_ns + expected_ns
        self._was_lone = len(pieces) == 1
        self._is_running = True

    def _end(self) -> None:
        assert self._release is not None
        self._release()
        self._ended.set()

    def _execute(self, pieces: list[Piece]) -> None:
        started_ns = perf_counter_ns()
        try:
            answers, spent = self._compute(pieces)
        except Exception as error:  # an engine's error is the request's answer
            self._failed(pieces, error)
            return
        self._pace.took(samples_of(pieces), spent.infer_ns)
        self._finished(pieces, answers, started_ns, spent)

    def _failed(self, pieces: list[Piece], error: Exception) -> None:
        """Answer with an execution's error; of several requests, whose it is."""
        pieces = [piece for piece in pieces if piece[0].error is None]  # else it was told
        if len(pieces) > 1:  # one of them may have caused it: run each alone
            for piece in pieces:
                if not piece[0].gave_up():
                    self._execute([piece])
            return
        for request, _, _ in pieces:
            with self._lock:
                if request.error is not None:
                    continue
                request.error = error
                self._drop(request)
            deliver([request])

    def _finished(
        self, pieces: list[Piece], answers: list[Arrays], started_ns: int, spent: Computation
    ) -> None:
        """Give each request its part of an execution's outputs."""
        deliver(self._answered(pieces, answers, started_ns, spent))

    def _answered(
        self, pieces: list[Piece], answers: list[Arrays], started_ns: int, spent: Computation
    ) -> list[Request]:
        """The requests that have all their outputs with those of an execution."""
        waited_ns: list[int] = []
        for request, start, _ in pieces:
            if not start:
                waited_ns += [started_ns - request.since_ns] * request.members
        self._statistics.executed(samples_of(pieces), waited_ns, spent)
        copied_ns, computed_ns = spent.input_ns + spent.output_ns, spent.infer_ns
        finished = []
        for (request, start, end), answer in zip(pieces, answers, strict=True):
            if request.error is not None:  # another piece of it failed
                continue
            stages = request.stages
            stages.copy += copied_ns
            stages.compute += computed_ns
            if start or end < request.batch:
                request.parts[start] = self._kept(answer)
                request.answered += end - start
                if request.answered < request.batch:
                    continue
                parts = [part for _, part in sorted(request.parts.items())]
                answer = {n: np.concatenate([p[n] for p in parts]) for n in answer}
            request.outputs = answer
            finished.append(request)
        return finished

    def _kept(self, outputs: Arrays) -> Arrays:
        """Outputs that stay as they are until the request's other pieces are there."""
        return outputs

    def let_go(self) -> None:
        """Hold no request for which nobody waits: behind others that go first, it would stay."""
        with self._lock:
            self._drop(*[one for one in self._waiting if one.gave_up()])

    def _drop(self, *requests: Request) -> None:
        """Take what is left of failed requests out of the queue."""
        self._waiting.drop(requests)
        self._statistics.waiting = self._waiting.members

    def _compute(self, pieces: list[Piece]) -> tuple[list[Arrays], Computation]:
        """Join the inputs, run the engine and split the outputs."""
        begin_ns = perf_counter_ns()
        first = pieces[0][0].arrays
        joined = {
            n: self._join(
                n,
                [
                    r.arrays[n] if end - start == r.batch else r.arrays[n][start:end]
                    for r, start, end in pieces
                ],
            )
            for n in first
        }
        asks_effort = self._in_loop and not self._only_lone and self._is_effort_due(pieces)
        joined_ns, worked_ns = perf_counter_ns(), thread_time_ns() if asks_effort else 0
        outputs = self._engine(**joined)
        ran_ns = perf_counter_ns()
        if asks_effort:
            self._effort.took(samples_of(pieces), thread_time_ns() - worked_ns)
        answers = split(outputs, pieces)
        end_ns = perf_counter_ns()
        spent = Computation(
            input_ns=joined_ns - begin_ns, infer_ns=ran_ns - joined_ns, output_ns=end_ns - ran_ns
        )
        return answers, spent

    def _is_effort_due(self, pieces: list[Piece]) -> bool:
        """Whether to ask for the processor's time, which takes 5 µs of a request of 200."""
        self._efforts += 1
        return self._efforts % EFFORTS == 0 or not self._effort.has(samples_of(pieces))


def unloaded() -> ServeError:
    """The answer to a request that a model does not compute any more."""
    return ServeError("the model was unloaded", status=503, fix="send it again")


def _no_time(left_ns: int, needed_ns: int) -> ServeError:
    return ServeError(
        "there is no time to answer this request",
        status=429,
        seen=f"{max(0, left_ns) // 1000:,} µs left, {needed_ns // 1000:,} µs needed",
        fix="give it more time, or send fewer requests at once",
        retry_after_s=math.ceil(needed_ns / 1e9) or 1,
    )


def deliver(requests: list[Request]) -> None:
    """Give the requests back, all of one place together."""
    while requests:
        place = requests[0].deliver
        if len(requests) == 1:
            place(requests)
            return
        others = [r for r in requests if r.deliver is not place]
        place([r for r in requests if r.deliver is place] if others else requests)
        requests = others


def _tell(loop: asyncio.AbstractEventLoop, thread: int, requests: list[Request]) -> None:
    """Settle requests on the event loop of a thread: at once, if this is it."""
    if threading.get_ident() == thread:
        _settle(requests)
    else:
        loop.call_soon_threadsafe(_settle, requests)


def _settle(requests: list[Request]) -> None:
    """Tell those who wait for the answers, on their event loop."""
    for request in requests:
        answer = request.answer
        if answer is None or answer.done():
            continue
        if request.error is not None:
            answer.set_exception(request.error)
        else:
            assert request.outputs is not None
            answer.set_result(request.outputs)
