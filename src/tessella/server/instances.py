"""Several instances of one model: how many and where, and the batcher that they share.

Requests wait in one queue, and the instance that is free takes the next execution. Each instance is
a process (``instance_process``): on two cores, two processes with a thread each run a ResNet-50
faster than one with two threads (1.5 times), or than two threads of one process (1.2 times), which
wait for Python's lock. One that ends takes no answer along: what it ran is run by the others.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Protocol

import numpy as np

from tessella.core.errors import ServeError, TessellaError, UsageError
from tessella.server.batcher import Batcher, deliver, unloaded
from tessella.server.joining import samples_of
from tessella.server.statistics import Computation, InstanceCounts, Stages, Statistics
from tessella.server.versions import check_name
from tessella.server.waiting import Arrays, Piece, Request

log = logging.getLogger(__name__)

MOST_INSTANCES = 64  # of a model
MOST_LOSSES = 3  # of a request, which may be what ends the instances that run it
RESTART_S = 1.0  # between two attempts to start an instance; each further pause is twice as long
MOST_RESTART_S = 60.0
# For an execution to end when the model is unloaded; then its instance is killed.
CLOSE_S = 30.0
_TAKING_OVER = threading.Lock()  # for rows of statistics, which batchers have after each other
_DEVICE = re.compile(r"cpu|cuda:[0-9]{1,3}")


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the instances of a model run.

    Attributes:
        count: on each device.
        devices: ``cpu`` or ``cuda:1``; none is the one on which the server runs all models.

    Raises:
        UsageError: it cannot be so.
    """

    count: int
    devices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= len(self.each) <= MOST_INSTANCES:
            raise UsageError(
                f"a model has 1 to {MOST_INSTANCES} instances",
                seen=self.count,
                fix="write --instances 2, or --instances NAME=1@cuda:0,cuda:1",
            )
        if wrong := [name for name in self.devices if not _DEVICE.fullmatch(name)]:
            raise UsageError(
                "this is no device of an instance", seen=wrong[0][:80], fix="write cpu or cuda:1"
            )

    @property
    def each(self) -> tuple[str | None, ...]:
        """The device of each instance; None is the server's."""
        return (self.devices or (None,)) * min(self.count, MOST_INSTANCES + 1)


def parse_instances(text: str) -> tuple[str, Placement]:
    """Name and placement in ``2``, ``NAME=2`` or ``NAME=1@cuda:0,cuda:1``, as a command line has
    it; without a name, the name is empty and all models are meant.

    Raises:
        UsageError: it says neither.
    """
    name, has_name, where = text.rpartition("=")
    count, has_devices, devices = where.partition("@")
    if not (count.isascii() and count.isdigit() and len(count) < 6) or (
        has_devices and not devices
    ):
        raise UsageError(
            "this does not say how many instances of a model there are",
            seen=text[:140],
            fix="write 2, NAME=2 or NAME=1@cuda:0,cuda:1",
        )
    placed = Placement(count=int(count), devices=tuple(devices.split(",")) if devices else ())
    return check_name(name) if has_name else "", placed


class InstanceLost(Exception):
    """An instance ended while it ran an execution; the execution may be repeated."""


class Instance(Protocol):
    """One of several engines of the same plan.

    Attributes:
        device: where it runs.
    """

    device: str

    def join(self, name: str, parts: list[np.ndarray]) -> np.ndarray:
        """The samples of several requests as one array, where the instance reads it."""
        ...

    def __call__(self, **arrays: np.ndarray) -> Mapping[str, np.ndarray]:
        """The outputs of joined arrays, in memory of their own.

        Raises:
            InstanceLost: it has ended. Exception: whatever the engine raised.
        """
        ...

    def restart(self) -> None:
        """Start it again, after it has ended.

        Raises:
            TessellaError: it cannot be started.
        """
        ...

    def kill(self) -> None:
        """End it at once, from any thread, whatever it does."""
        ...


class _Own(threading.local):
    """What a thread of the batcher runs."""

    number: int
    instance: Instance
    counts: InstanceCounts


class SharedBatcher(Batcher):
    """As ``Batcher``, for several instances that share its queue; each has a thread.

    Args:
        max_batch, max_delay_us, max_waiting: as of ``Batcher``.
        shares: an instance takes its share of what waits and leaves the rest to the others: for a
            CPU, where a sample takes as long in any company.
    """

    def __init__(
        self,
        instances: Sequence[Instance],
        *,
        shares: bool = False,
        max_batch: int,
        max_delay_us: int,
        max_waiting: int,
        statistics: Statistics,
    ) -> None:
        self._own = _Own()
        super().__init__(
            lambda **arrays: self._own.instance(**arrays),
            max_batch=max_batch,
            max_delay_us=max_delay_us,
            max_waiting=max_waiting,
            statistics=statistics,
            join=lambda name, parts: self._own.instance.join(name, parts),
        )
        self._abreast = self._count = len(instances)  # those that run, and all
        self._shares = shares
        self._until_ns: dict[int, int] = {}  # when those that execute will be free
        self._begun_ns: dict[int, int] = {}  # when their executions began, or attempts to start
        self._instances = tuple(instances)
        self._gone: set[int] = set()  # instances that have ended and are not back
        self._again: deque[Piece] = deque()  # of executions whose instance ended
        self._down: set[int] = set()  # instances that could not be started again
        self._closing = threading.Event()
        self._refuses = False  # what has no answer when its instance ends
        self._left = len(instances)  # threads
        with _TAKING_OVER:
            self._rows = statistics.instances = _counts(statistics.instances, instances)
        for number, instance in enumerate(instances):
            thread = threading.Thread(
                target=self._serve, args=(number, instance), name=f"instance {number}", daemon=True
            )
            self._thread = thread
            thread.start()

    def _admit(self, requests: Sequence[Request]) -> list[Request]:
        """As ``Batcher._admit``.

        Raises:
            ServeError: also 503, no instance runs.
        """
        if len(self._down) == self._count and self._release is None:
            raise _none_runs()
        return super()._admit(requests)

    async def drain(self, unused: asyncio.Event) -> None:
        """As ``Batcher.drain``; once an instance answers no more, it is killed, and what has no
        answer yet is refused.
        """
        await self._comes_to_an_end(asyncio.create_task(super().drain(unused)))

    async def close(self, release: Callable[[], None]) -> None:
        """As ``Batcher.close``, and as ``drain``."""
        with self._lock:
            is_over = not self._left and self._release is None  # their threads have failed
            self._release = release
        self._closing.set()
        if is_over:
            self._end()
        await self._comes_to_an_end(asyncio.create_task(super().close(release)))

    async def _comes_to_an_end(self, ending: asyncio.Task[None]) -> None:
        """Wait for a task, but for no execution that takes ``CLOSE_S`` of this time."""
        since_ns = perf_counter_ns()
        while not (await asyncio.wait([ending], timeout=CLOSE_S / 10))[0]:
            until_ns = perf_counter_ns() - int(1e9 * CLOSE_S)
            with self._lock:
                late = [n for n, begun_ns in self._begun_ns.items() if begun_ns <= until_ns]
                if until_ns < since_ns or not late:
                    continue
                self._refuses = True
                self._closing.set()
                refused = self._stranded(unloaded)
            deliver(refused)
            for number in late:
                log.error("instance %d of a model is killed: it does not come to an end", number)
                self._instances[number].kill()
        await ending

    def _wake(self) -> None:
        self._changed.notify()  # one that is free, if there is one

    # --- the threads of the instances -------------------------------------------------------------

    def _serve(self, number: int, instance: Instance) -> None:
        """Be the thread of an instance."""
        self._own.number, self._own.instance = number, instance
        self._own.counts = self._rows[number]
        try:
            while self._has_served():
                pass
        except Exception:  # of any kind: what it held is given to the others
            log.exception("the thread of instance %d of a model has failed", number)
        finally:
            self._leave()

    def _leave(self) -> None:
        """Take this thread's instance from those that run; the last one ends the batcher."""
        with self._lock:
            self._is_gone()
            self._down.add(self._own.number)
            self._left -= 1
            is_over = not self._left and self._release is not None
            stranded = self._stranded(_none_runs) if len(self._down) == self._count else []
            self._changed.notify_all()
        deliver(stranded)
        if is_over:
            self._end()

    def _has_served(self) -> bool:
        """Wait for an execution and run it; False if none will come."""
        late: list[Request] = []
        with self._lock:
            while not (self._again or self._waiting or self._release):
                self._changed.wait()
            while self._waiting and not self._again and (company_ns := self._company_ns()):
                self._changed.wait(company_ns / 1e9)
            pieces = self._next_again()
            if not pieces and self._waiting:
                share = (
                    -(-self._waiting.samples // self._abreast) if self._shares else self._max_batch
                )
                pieces, late = self._take(min(share, self._max_batch))
            if pieces:
                self._expect(pieces)
                if self._waiting or self._again:  # the rest of a large request, say
                    self._changed.notify()
            is_over = not (pieces or self._waiting) and self._release is not None
        deliver(late)
        if pieces:
            self._execute(pieces)
            with self._lock:
                self._until_ns.pop(self._own.number, None)
                self._begun_ns.pop(self._own.number, None)
                self._foresee()
        return not is_over and not (self._closing.is_set() and self._own.number in self._down)

    def _next_again(self) -> list[Piece]:
        """A piece that is to be run again, if somebody still waits for it: it runs alone."""
        while self._again:
            piece = self._again.popleft()
            if piece[0].error is None and not piece[0].gave_up():
                return [piece]
        return []

    def _expect(self, pieces: list[Piece]) -> None:
        expected_ns = self._pace.expected_ns(samples_of(pieces), self._max_batch)
        self._begun_ns[self._own.number] = now_ns = perf_counter_ns()
        self._until_ns[self._own.number] = now_ns + expected_ns
        self._foresee()

    def _is_gone(self) -> None:
        self._say_up(False)
        self._gone.add(self._own.number)
        self._until_ns.pop(self._own.number, None)
        self._foresee()

    def _foresee(self) -> None:
        """Say when the next instance is free."""
        self._abreast = self._count - len(self._gone) or 1
        self._is_running = bool(self._until_ns)
        all_run = len(self._until_ns) == self._abreast
        self._running_until_ns = min(self._until_ns.values(), default=0) if all_run else 0

    def _execute(self, pieces: list[Piece]) -> None:
        started_ns = perf_counter_ns()
        try:
            answers, spent = self._compute(pieces)
        except InstanceLost as error:
            self._lost(pieces, error)
            return
        except Exception as error:  # an engine's error is the request's answer
            self._failed(pieces, error)
            return
        with self._lock:
            self._pace.took(samples_of(pieces), spent.infer_ns)
            self._own.counts.executed(samples_of(pieces), spent.infer_ns)
        self._finished(pieces, answers, started_ns, spent)

    def _answered(
        self, pieces: list[Piece], answers: list[Arrays], started_ns: int, spent: Computation
    ) -> list[Request]:
        with self._lock:  # other instances may have pieces of the same requests
            finished = super()._answered(pieces, answers, started_ns, spent)
        for request in finished:
            if request.parts:
                _within(request.stages, perf_counter_ns() - request.since_ns)
        return finished

    def _lost(self, pieces: list[Piece], error: InstanceLost) -> None:
        """Have what an instance ran when it ended run again, a request at a time: one of them may
        have ended it, and would end them all. Then start the instance again.
        """
        log.error(
            "instance %d of a model on %s has ended and is started again: %s",
            self._own.number, self._own.instance.device, error,
        )  # fmt: skip
        failed = []
        with self._lock:
            for request in dict.fromkeys(piece[0] for piece in pieces):
                request.losses += 1
                if request.error is not None:
                    continue
                if self._refuses:
                    request.error = unloaded()
                elif request.losses == MOST_LOSSES:
                    request.error = RuntimeError("the processes that computed a request have ended")
                else:
                    continue
                self._drop(request)
                failed.append(request)
            self._again.extend(piece for piece in pieces if piece[0].error is None)
            self._is_gone()
            self._changed.notify_all()
        deliver(failed)
        self._restart()

    def _restart(self) -> None:
        """Start this thread's instance again; as long as none runs, nobody waits for that."""
        number, pause_s = self._own.number, RESTART_S
        while True:
            with self._lock:
                if self._closing.is_set() and not (self._again or self._waiting):
                    self._down.add(number)
                    return
                self._begun_ns[number] = perf_counter_ns()
            try:
                self._own.instance.restart()
                break
            except TessellaError as error:
                log.error("instance %d of a model cannot be started: %s", number, error)
            except Exception:  # of any kind: without this thread its requests would wait
                log.exception("instance %d of a model cannot be started", number)
            with self._lock:
                self._down.add(number)
                stranded = self._stranded(_none_runs) if len(self._down) == self._count else []
            deliver(stranded)
            if self._closing.wait(pause_s):
                return
            pause_s = min(2 * pause_s, MOST_RESTART_S)
        with self._lock:
            self._down.discard(number)
            self._gone.discard(number)
            self._foresee()
            self._own.counts.restarts += 1
            self._say_up(True)

    def _say_up(self, is_up: bool) -> None:
        """Tell whether this thread's instance runs; of a row that a newer batcher has taken over,
        that one tells.
        """
        with _TAKING_OVER:
            if self._statistics.instances is self._rows:
                self._own.counts.is_up = is_up

    def _stranded(self, why: Callable[[], ServeError]) -> list[Request]:
        """All that wait, which nobody will answer, with the error that says why."""
        waiting = [*self._waiting] + [piece[0] for piece in self._again]
        requests = [r for r in dict.fromkeys(waiting) if r.error is None]
        for request in requests:
            request.error = why()
        self._waiting.clear()
        self._statistics.waiting = 0
        self._again.clear()
        return requests


def _within(stages: Stages, ns: int) -> None:
    """Let pieces that were computed at the same time take no more than the time that passed."""
    spent_ns = stages.copy + stages.compute
    if spent_ns > ns:
        stages.copy = stages.copy * ns // spent_ns
        stages.compute = ns - stages.copy


def _none_runs() -> ServeError:
    return ServeError(
        "no instance of this model runs",
        status=503,
        fix="send it again in a moment; the server's log says why",
        retry_after_s=1,
    )


def _counts(before: list[InstanceCounts], instances: Sequence[Instance]) -> list[InstanceCounts]:
    """A row for each instance, which goes on counting where one was there before."""
    rows = [InstanceCounts(one.device) for one in instances]
    for n, row in enumerate(before[: len(rows)]):
        if row.device == rows[n].device:
            rows[n], row.is_up = row, True
    return rows
