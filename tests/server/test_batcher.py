"""Dynamic batching: who runs with whom, and what one request may do to another."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
import torch

from tessella.core.errors import ServeError
from tessella.server.batcher import BRIEF_NS, LONE_NS, Batcher
from tessella.server.joining import PageLocked
from tessella.server.pace import TRUST_NS, Pace
from tessella.server.statistics import Statistics

pytestmark = pytest.mark.timeout(60)


class Steady(Pace):
    """Has a time for one sample, and learns nothing: so that a busy machine changes no test."""

    def __init__(self, ns: int) -> None:
        super().__init__()
        super().took(1, ns)

    def took(self, samples: int, ns: int) -> None:
        pass


class Doubler:
    """``y = 2 · x``, held back by a gate; fails for negative numbers."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.batches: list[int] = []

    def __call__(self, x: np.ndarray) -> dict[str, np.ndarray]:
        self.batches.append(len(x))
        assert self.gate.wait(50)
        if (x < 0).any():
            raise ArithmeticError("negative")
        return {"y": 2 * x}


def batcher(engine: Callable[..., Any], **settings: int) -> Batcher:
    given = {"max_batch": 8, "max_delay_us": 0, "max_waiting": 100, **settings}
    return Batcher(engine, statistics=Statistics(), **given)


def rows(value: float, count: int = 1, width: int = 2) -> dict[str, np.ndarray]:
    return {"x": np.full((count, width), value, np.float32)}


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_what_waits_is_joined_and_split_again() -> None:
    async def test() -> None:
        engine = Doubler()
        engine.gate.clear()
        joined = batcher(engine)
        first = asyncio.create_task(joined.infer(rows(100)))
        await until(lambda: engine.batches == [1])
        others = [asyncio.create_task(joined.infer(rows(i, 1 + i % 3))) for i in range(6)]
        await asyncio.sleep(0.01)
        engine.gate.set()
        assert (await first)["y"].tolist() == [[200, 200]]
        for i, answer in enumerate(await asyncio.gather(*others)):
            assert answer["y"].tolist() == [[2 * i, 2 * i]] * (1 + i % 3)
        # sizes 1 2 3 1 2 3 in order of arrival, at most 8 together
        assert engine.batches == [1, 7, 5]
        await joined.close(lambda: None)

    run(test())


def test_a_delay_waits_for_company_but_not_when_full() -> None:
    async def test() -> None:
        engine = Doubler()
        patient = batcher(engine, max_batch=3, max_delay_us=10_000_000)
        answers = [asyncio.create_task(patient.infer(rows(i))) for i in range(2)]
        await asyncio.sleep(0.02)
        assert engine.batches == []
        answers.append(asyncio.create_task(patient.infer(rows(2))))
        await asyncio.wait_for(asyncio.gather(*answers), 60)
        assert engine.batches == [3]
        brief = batcher(engine, max_batch=3, max_delay_us=1000)
        await asyncio.wait_for(brief.infer(rows(1)), 60)
        assert engine.batches == [3, 1]

    run(test())


def test_requests_of_different_shapes_are_not_joined() -> None:
    async def test() -> None:
        engine = Doubler()
        engine.gate.clear()
        joined = batcher(engine)
        tasks = [asyncio.create_task(joined.infer(rows(i, width=2 + i % 2))) for i in range(4)]
        await until(lambda: len(engine.batches) == 1)
        engine.gate.set()
        for i, answer in enumerate(await asyncio.gather(*tasks)):
            assert answer["y"].shape == (1, 2 + i % 2)
        assert engine.batches == [1, 1, 1, 1]

    run(test())


def test_a_large_request_is_cut_and_others_pass_between() -> None:
    async def test() -> None:
        engine = Doubler()
        engine.gate.clear()
        joined = batcher(engine)
        joined._pace = Steady(1000)  # pieces are as long as they may be
        values = np.arange(40, dtype=np.float32).reshape(20, 2)
        large = asyncio.create_task(joined.infer({"x": values}))
        await until(lambda: engine.batches == [8])
        small = [asyncio.create_task(joined.infer(rows(i))) for i in range(3)]
        await asyncio.sleep(0)
        done: list[str] = []
        large.add_done_callback(lambda _: done.append("large"))
        small[-1].add_done_callback(lambda _: done.append("small"))
        engine.gate.set()
        np.testing.assert_array_equal((await large)["y"], 2 * values)
        assert [(await s)["y"][0, 0] for s in small] == [0, 2, 4]
        assert engine.batches == [8, 3 + 5, 7]
        assert done == ["small", "large"]
        await joined.close(lambda: None)

    run(test())


def test_a_large_request_of_which_a_piece_fails() -> None:
    async def test() -> None:
        engine = Doubler()
        joined = batcher(engine)
        joined._pace = Steady(1000)
        values = np.ones((20, 2), np.float32)
        values[9] = -1
        with pytest.raises(ArithmeticError):
            await joined.infer({"x": values})
        assert engine.batches == [8, 8]  # what is left of it is not computed
        assert (await joined.infer(rows(5)))["y"].tolist() == [[10, 10]]
        await joined.close(lambda: None)

    run(test())


def test_the_urgent_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tessella.server.fairness.PATIENCE_NS", 50 * 10**9)

    async def test() -> None:
        engine = Doubler()
        engine.gate.clear()
        alone = batcher(engine, max_batch=1)
        order: list[str] = []

        async def ask(name: str, **settings: int) -> None:
            await alone.infer(rows(1), **settings)
            order.append(name)

        first = asyncio.create_task(ask("first"))
        await until(lambda: engine.batches == [1])
        given = [
            ("low", {"priority": 3}),
            ("default", {}),
            ("late", {"timeout_us": 45_000_000}),
            ("soon", {"timeout_us": 40_000_000}),
            ("high", {"priority": 1}),
            ("of an hour", {"timeout_us": 3_600_000_000}),
            ("afterwards", {}),
        ]
        tasks = [asyncio.create_task(ask(name, **settings)) for name, settings in given]
        await asyncio.sleep(0.01)
        engine.gate.set()
        await asyncio.gather(first, *tasks)
        # a deadline of an hour makes nobody wait longer than none
        others = "default", "of an hour", "afterwards"
        assert order == ["first", "high", "soon", "late", *others, "low"]
        await alone.close(lambda: None)

    run(test())


def test_clients_have_equal_parts_of_an_engine() -> None:
    async def test() -> None:
        engine = Doubler()
        engine.gate.clear()
        shared = batcher(engine, max_batch=1, max_waiting=24)
        order: list[int] = []
        refused: list[int] = []

        async def ask(client: int) -> None:
            try:
                await shared.infer(rows(1), client=client)
                order.append(client)
            except ServeError:
                refused.append(client)

        first = asyncio.create_task(ask(0))
        await until(lambda: engine.batches == [1])
        tasks = [asyncio.create_task(ask(1)) for _ in range(24)]
        await asyncio.sleep(0)
        tasks += [asyncio.create_task(ask(1))]  # as many wait as may, all of its own
        await asyncio.sleep(0)
        assert refused == [1]
        tasks += [asyncio.create_task(ask(client)) for client in (2, 2, 3, 2)]
        await until(lambda: len(refused) == 5)
        assert refused == [1] * 5, "the last ones of client 1 give their places"
        shared._pace = Steady(10**9)
        with pytest.raises(ServeError, match="no time"):  # and so nobody gives his place
            await shared.infer(rows(1), client=4, timeout_us=1000)
        assert refused == [1] * 5
        engine.gate.set()
        await asyncio.gather(first, *tasks)
        assert sorted(order) == [0] + [1] * 20 + [2] * 3 + [3]
        assert order[:6] == [0, 1, 2, 3, 1, 2], order
        assert order[6:9].count(2) == 1, order
        assert not shared._waiting._clients  # nothing is kept of who has left

    run(test())


def test_what_cannot_be_answered_in_time_is_refused_at_once() -> None:
    async def test() -> None:
        engine = Doubler()
        alone = batcher(engine, max_batch=1)
        alone._pace.took(1, 49_500_000_000)  # as if an execution had taken 49.5 s
        with pytest.raises(ServeError, match="no time") as caught:
            await alone.infer(rows(1), timeout_us=40_000_000)
        assert (caught.value.status, caught.value.retry_after_s) == (429, 50)
        assert engine.batches == []
        engine.gate.clear()
        running = asyncio.create_task(alone.infer(rows(1), timeout_us=80_000_000))
        await until(lambda: engine.batches == [1])
        with pytest.raises(ServeError, match="no time"):  # alone it could, behind the other not
            await alone.infer(rows(1), timeout_us=60_000_000)
        waits = asyncio.create_task(alone.infer(rows(1), timeout_us=150_000_000))
        await asyncio.sleep(0)
        alone._pace.took(1, 10**13)  # slower than thought: there is no time any more
        engine.gate.set()
        await running
        with pytest.raises(ServeError, match="no time"):
            await waits
        assert engine.batches == [1]
        await alone.close(lambda: None)

    run(test())


def test_one_slow_execution_does_not_refuse_for_ever() -> None:
    async def test() -> None:
        engine = Doubler()
        alone = batcher(engine, max_batch=1)
        alone._pace.took(1, 50_000_000_000)  # the machine was busy
        alone._pace._since_ns -= 2 * TRUST_NS
        assert (await alone.infer(rows(3), timeout_us=40_000_000))["y"].tolist() == [[6, 6]]
        assert alone._pace.expected_ns(1, 1) < 20_000_000_000, "as it is now"
        await alone.close(lambda: None)

    run(test())


def test_pieces_of_a_slow_network_are_short() -> None:
    pace = Pace()
    assert pace.most_samples(128) == 128
    pace.took(128, 2_560_000_000)  # 20 ms a sample
    assert pace.most_samples(128) == 5
    pace.took(32, 500_000_000)
    assert pace.expected_ns(32, 128) == 500_000_000
    assert pace.expected_ns(33, 128) == 2_560_000_000
    assert pace.expected_ns(300, 128) == 2 * 2_560_000_000 + 2_560_000_000


def test_a_bad_request_spoils_no_other() -> None:
    async def test() -> None:
        engine = Doubler()
        engine.gate.clear()
        joined = batcher(engine)
        first = asyncio.create_task(joined.infer(rows(0)))
        await until(lambda: engine.batches == [1])
        tasks = [asyncio.create_task(joined.infer(rows(v))) for v in (1, -1, 2)]
        await asyncio.sleep(0.01)
        engine.gate.set()
        await first
        good, bad, fine = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(bad, ArithmeticError)
        assert good["y"].tolist() == [[2, 2]]
        assert fine["y"].tolist() == [[4, 4]]
        assert (await joined.infer(rows(5)))["y"].tolist() == [[10, 10]]

    run(test())


def test_who_gave_up_is_not_computed() -> None:
    async def test() -> None:
        engine = Doubler()
        engine.gate.clear()
        joined = batcher(engine)
        running = asyncio.create_task(joined.infer(rows(1)))
        await until(lambda: engine.batches == [1])
        waiting = [asyncio.create_task(joined.infer(rows(v))) for v in (2, 3, 4)]
        await asyncio.sleep(0.01)
        running.cancel()
        waiting[1].cancel()
        await asyncio.sleep(0)
        engine.gate.set()
        answers = await asyncio.gather(waiting[0], waiting[2])
        assert [a["y"][0, 0] for a in answers] == [4, 8]
        assert engine.batches == [1, 2]
        with pytest.raises(asyncio.CancelledError):
            await running

    run(test())


def test_a_full_queue_refuses_and_recovers() -> None:
    async def test() -> None:
        engine = Doubler()
        engine.gate.clear()
        short = batcher(engine, max_waiting=2)
        running = asyncio.create_task(short.infer(rows(1)))
        await until(lambda: engine.batches == [1])
        waiting = [asyncio.create_task(short.infer(rows(1))) for _ in range(2)]
        await asyncio.sleep(0.01)
        with pytest.raises(ServeError, match="2 waiting") as caught:
            await short.infer(rows(1))
        assert caught.value.status == 503
        engine.gate.set()
        await asyncio.gather(running, *waiting)
        await short.infer(rows(1))

    run(test())


def test_closing_finishes_what_waits() -> None:
    async def test() -> None:
        engine = Doubler()
        engine.gate.clear()
        joined = batcher(engine, max_batch=1)
        tasks = [asyncio.create_task(joined.infer(rows(i))) for i in range(3)]
        await until(lambda: engine.batches == [1])
        order: list[str] = []
        closing = asyncio.create_task(joined.close(lambda: order.append("released")))
        await asyncio.sleep(0.01)
        assert order == []
        engine.gate.set()
        answers = await asyncio.gather(*tasks)
        await closing
        assert [a["y"][0, 0] for a in answers] == [0, 2, 4]
        assert order == ["released"]

    run(test())


def test_outputs_that_cannot_be_split_are_computed_alone() -> None:
    async def test() -> None:
        gate = threading.Event()

        def total(x: np.ndarray) -> dict[str, np.ndarray]:
            assert gate.wait(50)
            return {"sum": x.sum(keepdims=True)}  # one row, whatever the batch

        joined = batcher(total)
        tasks = [asyncio.create_task(joined.infer(rows(i))) for i in range(3)]
        gate.set()
        answers = await asyncio.gather(*tasks)
        assert [a["sum"].item() for a in answers] == [0, 2, 4]

    run(test())


# --- in the event loop's thread -------------------------------------------------------------------


class Witness(Doubler):
    """Notes the thread of each execution, and that none runs beside another."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[int] = []
        self.running = 0

    def __call__(self, x: np.ndarray) -> dict[str, np.ndarray]:
        self.running += 1
        assert self.running == 1
        self.threads.append(threading.get_ident())
        try:
            return super().__call__(x)
        finally:
            self.running -= 1


def in_loop(engine: Callable[..., Any], ns: int, **settings: int) -> Batcher:
    """A batcher that takes an execution of one sample for ``ns`` long; 0 has to be measured."""
    made = batcher(engine, in_loop=True, **settings)
    if ns:
        made._effort = Steady(ns)
    return made


def test_what_one_turn_of_the_loop_brings_is_one_batch_in_its_thread() -> None:
    async def test() -> None:
        engine = Witness()
        joined = in_loop(engine, 1000)
        for _ in range(3):
            answers = await asyncio.gather(*(joined.infer(rows(i)) for i in range(8)))
            assert [a["y"][0, 0] for a in answers] == [2 * i for i in range(8)]
        assert engine.batches == [8, 8, 8]
        assert set(engine.threads) == {threading.get_ident()}
        await joined.close(lambda: None)

    run(test())


def test_what_was_never_timed_and_what_takes_long_runs_in_the_engines_thread() -> None:
    async def test() -> None:
        engine = Witness()
        unknown = in_loop(engine, 0)
        await unknown.infer(rows(1))
        assert threading.get_ident() not in engine.threads
        assert unknown._effort.expected_ns(1, 8) > 0
        slow = in_loop(engine, 3 * BRIEF_NS // 4)  # one is brief, two are not
        await asyncio.gather(*(slow.infer(rows(i)) for i in range(4)))
        assert threading.get_ident() not in engine.threads
        await slow.infer(rows(1))
        assert engine.threads[-1] == threading.get_ident()
        patient = in_loop(engine, 1000, max_delay_us=100)
        await patient.infer(rows(1))
        assert engine.threads[-1] != threading.get_ident()
        for one in (unknown, slow, patient):
            await one.close(lambda: None)

    run(test())


def test_on_a_gpu_who_comes_alone_again_is_computed_in_the_loop() -> None:
    async def test() -> None:
        engine = Witness()
        alone = batcher(engine, in_loop="alone")
        here = threading.get_ident()
        for _ in range(2):
            await alone.infer(rows(1))
        alone._pace = Steady(1000)
        await alone.infer(rows(1))
        assert [thread == here for thread in engine.threads][0::2] == [False, True]
        await asyncio.gather(*(alone.infer(rows(i)) for i in range(4)))
        assert engine.batches[3:] == [4]
        await alone.infer(rows(1))  # others were there just now
        assert engine.threads[-2:] == [engine.threads[0]] * 2
        await alone.infer(rows(1))
        assert engine.threads[-1] == here
        alone._pace = Steady(2 * LONE_NS)
        await alone.infer(rows(1))
        assert engine.threads[-1] != here
        await alone.close(lambda: None)

    run(test())


def test_a_slow_execution_does_not_hold_up_the_loop_and_brief_ones_come_back_to_it() -> None:
    async def test() -> None:
        engine = Witness()
        joined = in_loop(engine, 0)
        engine.gate.clear()  # only the loop opens it
        first = asyncio.create_task(joined.infer(rows(1)))
        await until(lambda: engine.batches == [1])
        later = [asyncio.create_task(joined.infer(rows(i))) for i in range(3)]
        await asyncio.sleep(0)
        joined._effort = Steady(1000)  # as if it were brief by now
        engine.gate.set()
        await asyncio.gather(first, *later)
        assert engine.batches == [1, 3]
        assert engine.threads[1] == threading.get_ident() != engine.threads[0]
        await joined.close(lambda: None)

    run(test())


def test_time_that_an_execution_only_waits_does_not_keep_it_in_the_thread() -> None:
    """As when it gets Python's lock back late after each kernel, while the loop has it."""

    class Waits(Witness):
        def __call__(self, x: np.ndarray) -> dict[str, np.ndarray]:
            time.sleep(4 * BRIEF_NS / 1e9)
            return super().__call__(x)

    async def test() -> None:
        engine = Waits()
        joined = in_loop(engine, 0)
        await joined.infer(rows(1))
        await joined.infer(rows(2))
        assert engine.threads[0] != threading.get_ident() == engine.threads[1]
        await joined.close(lambda: None)

    run(test())


def test_errors_deadlines_and_the_urgent_in_the_loop() -> None:
    async def test() -> None:
        engine = Witness()
        joined = in_loop(engine, 1000, max_batch=2)
        order: list[str] = []

        async def ask(name: str, value: float = 1, **settings: int) -> None:
            try:
                await joined.infer(rows(value), **settings)
            except (ArithmeticError, ServeError) as error:
                name += f" {type(error).__name__}"
            order.append(name)

        asked = [ask("low", priority=3), ask("bad", -1), ask("high", priority=1), ask("default")]
        gone = asyncio.create_task(ask("gone"))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(*asked)
        assert order == ["high", "bad ArithmeticError", "default", "low"]
        order.clear()
        joined._pace = Pace()
        joined._pace.took(1, 1000)
        late = asyncio.create_task(ask("late", timeout_us=1_000_000))
        await asyncio.sleep(0)
        joined._pace.took(1, 10**13)
        await late
        assert order == ["late ServeError"]
        await joined.close(lambda: None)

    run(test())


def test_closing_finishes_what_the_loop_was_to_run() -> None:
    async def test() -> None:
        engine = Witness()
        joined = in_loop(engine, 0, max_batch=1)
        await joined.infer(rows(0))  # so that there is a thread
        joined._effort = Steady(1000)
        tasks = [asyncio.create_task(joined.infer(rows(i))) for i in range(3)]
        await asyncio.sleep(0)
        released: list[int] = []
        await joined.close(lambda: released.append(len(engine.batches)))
        assert [t.result()["y"][0, 0] for t in tasks] == [0, 2, 4]
        assert released == [4]
        with pytest.raises(ServeError, match="unloaded"):
            await joined.infer(rows(1))

    run(test())


def test_executions_that_change_between_loop_and_thread_lose_nothing() -> None:
    async def test() -> None:
        engine = Witness()
        joined = in_loop(engine, BRIEF_NS // 4)  # up to four are brief
        rng = np.random.default_rng(0)

        async def client(number: int) -> None:
            for i in range(60):
                answer = await joined.infer(rows(number + i, 1 + number % 2))
                assert answer["y"].tolist() == [[2 * (number + i)] * 2] * (1 + number % 2)
                if rng.random() < 0.3:
                    await asyncio.sleep(0.001 * rng.random())

        await asyncio.gather(*(client(i) for i in range(8)))
        here = [t == threading.get_ident() for t in engine.threads]
        assert any(here)
        assert not all(here)
        assert sum(engine.batches) == 60 * (4 + 2 * 4)
        await joined.close(lambda: None)

    run(test())


def test_samples_are_joined_in_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)  # here is no GPU
    join, random = PageLocked(8), np.random.default_rng(0)
    seen = set()
    for counts in ((3, 2), (1, 1, 6), (4,), (2, 2)):
        parts = [random.normal(size=(count, 3)).astype(np.float32) for count in counts]
        made = join("image", parts)
        assert np.array_equal(made, np.concatenate(parts))
        if len(parts) > 1:
            seen.add(made.ctypes.data)
    assert len(seen) == 1
    wide = [np.ones((2, 5), np.uint8), np.zeros((1, 5), np.uint8)]
    assert np.array_equal(join("image", wide), np.concatenate(wide))
