"""Several instances of a model: who runs what, and what becomes of requests when one ends."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tessella import api
from tessella.artifacts.outline import Manifest
from tessella.core.errors import ArtifactError, ServeError, UsageError
from tessella.core.record import to_plain
from tessella.server import Placement, child, instance_process, instances, parse_instances, tickets
from tessella.server.instance_process import InstanceProcess, Instances, threads_of_each
from tessella.server.instances import MOST_LOSSES, InstanceLost, SharedBatcher
from tessella.server.serve import _check
from tessella.server.statistics import Stages, Statistics
from tests.support.engines import expected_scores
from tests.support.plans.linear import linear_plan

pytestmark = pytest.mark.timeout(30)
POISON = 666.0


class Doubler:
    """``y = 2 · x``, held back by a gate; ends by ``kill``, or by itself for ``POISON``."""

    device = "cpu"

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.begun: list[list[float]] = []  # the first numbers of what it has begun
        self.ends: set[float] = {POISON}
        self.starts, self.may_start = 0, True
        self.wrong: Exception = ArtifactError("the plan's file is gone")
        self.is_killed = False

    def join(self, name: str, parts: list[np.ndarray]) -> np.ndarray:
        return np.concatenate(parts)

    def __call__(self, x: np.ndarray) -> dict[str, np.ndarray]:
        self.begun.append(x[:, 0].tolist())
        assert self.gate.wait(20)
        if self.is_killed or self.ends & set(x[:, 0]):
            raise InstanceLost("SIGKILL")
        if (x < 0).any():
            raise ArithmeticError("negative")
        return {"y": 2 * x}

    def kill(self) -> None:
        self.is_killed = True
        self.gate.set()

    def restart(self) -> None:
        if not self.may_start:
            raise self.wrong
        self.starts += 1
        self.is_killed = False


def shared(*engines: Doubler, **settings: int) -> tuple[SharedBatcher, Statistics]:
    statistics = Statistics()
    given = {"max_batch": 8, "max_delay_us": 0, "max_waiting": 100, **settings}
    return SharedBatcher(engines, statistics=statistics, **given), statistics


def rows(*values: float) -> dict[str, np.ndarray]:
    return {"x": np.repeat(np.array(values, np.float32)[:, None], 2, 1)}


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def filled(batcher: SharedBatcher, *engines: Doubler) -> list[asyncio.Task]:
    """Requests that every engine holds at its gate, one each."""
    for engine in engines:
        engine.gate.clear()
        engine.begun.clear()
    tasks = []
    for n in range(len(engines)):
        tasks.append(asyncio.create_task(batcher.infer(rows(n + 1))))
        await until(lambda n=n: sum(len(engine.begun) for engine in engines) == n + 1)
    return tasks


def test_one_queue_and_the_free_instance_takes_the_next_execution() -> None:
    async def test() -> None:
        one, two = Doubler(), Doubler()
        batcher, statistics = shared(one, two)
        held = await filled(batcher, one, two)
        assert [len(one.begun), len(two.begun)] == [1, 1], "both run at a time"
        others = [asyncio.create_task(batcher.infer(rows(v))) for v in (10, 20, 30)]
        await until(lambda: statistics.waiting == 3)
        two.gate.set()
        answers = await asyncio.gather(*others)
        assert [a["y"][0, 0] for a in answers] == [20, 40, 60]
        assert (two.begun[1:], len(one.begun)) == ([[10, 20, 30]], 1)
        one.gate.set()
        assert sorted([(await task)["y"][0, 0] for task in held]) == [2, 4]
        counts = statistics.instances
        assert [c.executions for c in counts] == [1, 2]
        assert [c.samples for c in counts] == [1, 4]
        assert statistics.execution_count == 3
        assert statistics.inference_count == sum(c.samples for c in counts)
        assert sum(d.ns for _, d in statistics.batches()) == sum(c.ns for c in counts)
        with pytest.raises(ArithmeticError):
            await batcher.infer(rows(-1))
        closed: list[bool] = []
        await batcher.close(lambda: closed.append(True))
        assert closed == [True]

    run(test)


def test_on_a_cpu_an_instance_leaves_their_share_to_the_others() -> None:
    async def test() -> None:
        one, two = Doubler(), Doubler()
        batcher, statistics = shared(one, two, shares=True)
        held = await filled(batcher, one, two)
        others = [asyncio.create_task(batcher.infer(rows(v))) for v in range(10, 16)]
        await until(lambda: statistics.waiting == 6)
        two.gate.set()
        await asyncio.gather(*others)
        assert two.begun[1:] == [[10, 11, 12], [13, 14], [15]]
        one.gate.set()
        await asyncio.gather(*held)
        await batcher.close(lambda: None)

    run(test)


def test_pieces_of_a_large_request_run_at_a_time_and_come_back_in_order() -> None:
    async def test() -> None:
        one, two = Doubler(), Doubler()
        batcher, _ = shared(one, two)
        one.gate.clear()
        two.gate.clear()
        values, stages = np.arange(1, 21, dtype=np.float32), Stages()
        large = asyncio.create_task(batcher.infer(rows(*values), stages=stages))
        await until(lambda: len(one.begun) == len(two.begun) == 1)
        (first, second) = (one, two) if one.begun[0][0] == 1 else (two, one)
        assert (first.begun[0][0], second.begun[0][0]) == (1, 9)
        second.gate.set()  # the second piece is there first, and then the third
        await until(lambda: len(second.begun) == 2)
        first.gate.set()
        assert (await large)["y"][:, 0].tolist() == (2 * values).tolist()
        assert stages.compute > 0
        await batcher.close(lambda: None)

    run(test)


def test_an_instance_that_ends_takes_no_answer_along_and_comes_back() -> None:
    async def test() -> None:
        one, two = Doubler(), Doubler()
        batcher, statistics = shared(one, two)
        tasks = await filled(batcher, one, two)
        one.kill()
        two.gate.set()
        assert sorted([(await task)["y"][0, 0] for task in tasks]) == [2, 4]
        await until(lambda: statistics.instances[0].is_up)
        assert [(c.restarts, c.is_up) for c in statistics.instances] == [(1, True), (0, True)]
        # both end: what they had waits for their return
        tasks = await filled(batcher, one, two)
        for engine in (one, two):
            engine.kill()
        assert sorted([(await task)["y"][0, 0] for task in tasks]) == [2, 4]
        # half of a large request is lost, and that half alone is run again
        one.begun.clear(), two.begun.clear()
        one.gate.clear(), two.gate.clear()
        large = asyncio.create_task(batcher.infer(rows(*range(1, 17))))
        await until(lambda: len(one.begun) == len(two.begun) == 1)
        one.kill()
        two.gate.set()
        assert (await large)["y"][:, 0].tolist() == [2 * v for v in range(1, 17)]
        assert sum(map(len, one.begun + two.begun)) == 24
        await batcher.close(lambda: None)

    run(test)


def test_a_request_that_ends_instances_is_given_up_and_its_company_is_answered() -> None:
    async def test() -> None:
        one, two = Doubler(), Doubler()
        batcher, statistics = shared(one, two)
        held = await filled(batcher, one, two)
        poison = asyncio.create_task(batcher.infer(rows(POISON)))
        company = [asyncio.create_task(batcher.infer(rows(v))) for v in (5, 6)]
        await until(lambda: statistics.waiting == 3)
        for engine in (one, two):
            engine.gate.set()
        assert [(await task)["y"][0, 0] for task in company] == [10, 12]
        with pytest.raises(RuntimeError, match="have ended"):
            await poison
        await asyncio.gather(*held)
        lost = [batch for batch in one.begun + two.begun if POISON in batch]
        assert sorted(map(len, lost)) == [1] * (MOST_LOSSES - 1) + [3], "alone after the first time"
        assert (await batcher.infer(rows(7)))["y"][0, 0] == 14
        await batcher.close(lambda: None)

    run(test)


def test_nobody_waits_for_instances_that_cannot_be_started(monkeypatch) -> None:
    monkeypatch.setattr(instances, "RESTART_S", 0.01)

    async def test() -> None:
        one, two = Doubler(), Doubler()
        batcher, statistics = shared(one, two)
        one.may_start = two.may_start = False
        two.wrong = BrokenPipeError("no error of ours")
        tasks = await filled(batcher, one, two)
        tasks.append(asyncio.create_task(batcher.infer(rows(9))))
        await until(lambda: statistics.waiting == 1)
        one.kill()
        await until(lambda: not statistics.instances[0].is_up)
        assert not any(task.done() for task in tasks), "the other one goes on"
        two.kill()
        for task in tasks:
            with pytest.raises(ServeError, match="no instance") as refused:
                await task
            assert refused.value.status == 503
        await until(lambda: len(batcher._down) == 2)
        with pytest.raises(ServeError, match="no instance"):
            await batcher.infer(rows(1))
        one.may_start = True
        await until(lambda: statistics.instances[0].is_up)
        assert (await batcher.infer(rows(4)))["y"][0, 0] == 8
        two.may_start = True
        await until(lambda: statistics.instances[1].is_up)
        await asyncio.wait_for(batcher.close(lambda: None), 30)

    run(test)


def test_what_was_unloaded_is_not_up_and_what_took_its_place_is() -> None:
    async def test() -> None:
        old, statistics = shared(Doubler(), Doubler())
        settings = {"max_batch": 8, "max_delay_us": 0, "max_waiting": 9}
        new = SharedBatcher([Doubler()], statistics=statistics, **settings)  # as at a reload
        await old.close(lambda: None)
        assert [counts.is_up for counts in statistics.instances] == [True]
        await new.close(lambda: None)
        assert [counts.is_up for counts in statistics.instances] == [False]
        again = SharedBatcher([Doubler()], statistics=statistics, **settings)
        assert [counts.is_up for counts in statistics.instances] == [True]
        await again.close(lambda: None)

    run(test)


def test_a_thread_that_fails_leaves_nobody_waiting(monkeypatch) -> None:
    def fails(self: SharedBatcher) -> None:
        raise MemoryError

    monkeypatch.setattr(SharedBatcher, "_restart", fails)

    async def test() -> None:
        one, two = Doubler(), Doubler()
        batcher, statistics = shared(one, two)
        tasks = await filled(batcher, one, two)
        one.kill(), two.kill()
        for task in tasks:
            with pytest.raises(ServeError, match="no instance"):
                await task
        assert not any(counts.is_up for counts in statistics.instances)
        with pytest.raises(ServeError, match="no instance"):
            await batcher.infer(rows(1))
        closed: list[bool] = []
        await batcher.close(lambda: closed.append(True))
        assert closed == [True]

    run(test)


def test_a_process_that_hangs_is_killed(monkeypatch) -> None:
    for limit in ("HANG_S", "END_S"):
        monkeypatch.setattr(child, limit, 0.1)
    monkeypatch.setattr(Stub, "manifest_now", linear_plan().manifest, raising=False)
    monkeypatch.setattr(instance_process, "InstanceProcess", Stub)
    several = Instances(Path("m.plan"), ["cpu"] * 3)
    for instance in several.each:
        instance._process.send_signal(signal.SIGSTOP)
    with pytest.raises(InstanceLost, match="SIGKILL"):
        scores(several.each[0], np.ones((1, 3, 8, 8), np.float32))
    several.each[0].restart()
    several.close()
    ends = [instance._process.returncode for instance in several.each]
    assert ends[1:] == [-signal.SIGKILL] * 2


def test_a_load_is_told_of_and_has_a_limit(monkeypatch, caplog) -> None:
    clock = itertools.count(0.0, 300.0)  # of its own: an hour in which the instance says nothing
    monkeypatch.setattr(instance_process, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(instance_process, "TELL_S", 0.01)
    monkeypatch.setattr(tickets, "frame", lambda letter, content: b"")  # it says nothing
    monkeypatch.setattr(Stub, "manifest_now", linear_plan().manifest, raising=False)
    stub = Stub(Path("m.plan"), compiled=True, device=None, threads=1)
    with pytest.raises(ArtifactError, match=r"ended while it loaded.*SIGKILL after 600 s of load"):
        stub.ready()
    stub.release()
    assert "has been loading m.plan for 300 s" in caplog.text


def test_what_the_system_refuses_at_a_start_is_told(monkeypatch) -> None:
    def refuses(*args: object, **settings: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Stub, "manifest_now", linear_plan().manifest, raising=False)
    stub = Stub(Path("m.plan"), compiled=True, device=None, threads=1)
    with monkeypatch.context() as now:
        now.setattr(socket, "send_fds", refuses)
        with pytest.raises(ServeError, match=r"cannot be started.*Too many open files"):
            stub.ready()
    stub.release()
    monkeypatch.setattr(subprocess, "Popen", refuses)
    with pytest.raises(ServeError, match=r"cannot be started.*Too many open files"):
        Instances(Path("m.plan"), ["cpu"])


@pytest.mark.parametrize("is_used", [True, False], ids=["unload", "close"])
def test_no_unloading_waits_for_ever_for_an_execution(monkeypatch, is_used: bool) -> None:
    """What has no answer when an instance is killed is refused; what goes on has its answer."""
    monkeypatch.setattr(instances, "CLOSE_S", 0.2)

    async def test() -> None:
        one, two = Doubler(), Doubler()
        batcher, statistics = shared(one, two)
        held = await filled(batcher, one, two)
        large = asyncio.create_task(batcher.infer(rows(*range(10, 30))))
        await until(lambda: statistics.waiting == 1)
        closed: list[bool] = []
        if is_used:  # as a model with requests is unloaded
            unused = asyncio.Event()
            draining = asyncio.create_task(batcher.drain(unused))
            refused = await asyncio.gather(*held, large, return_exceptions=True)
            assert not draining.done()
            unused.set()
            await draining
        await batcher.close(lambda: closed.append(True))
        assert closed == [True]
        refused = await asyncio.gather(*held, large, return_exceptions=True)
        told = [(type(error), getattr(error, "status", 0)) for error in refused]
        assert told == [(ServeError, 503)] * 3, refused
        assert all("unloaded" in str(error) for error in refused)
        assert one.starts == two.starts == 0
        with pytest.raises(ServeError, match="unloaded"):
            await batcher.infer(rows(1))

    run(test)


def test_an_unloading_that_goes_on_loses_no_request(monkeypatch) -> None:
    """However long the queue is: what is limited is an execution."""
    now_ns, looks = 0, 0

    def clock() -> int:
        nonlocal looks
        looks += 1
        return now_ns

    monkeypatch.setattr(instances, "CLOSE_S", 0.01)
    monkeypatch.setattr(instances, "perf_counter_ns", clock)

    async def test() -> None:
        nonlocal now_ns
        one = Doubler()
        batcher, statistics = shared(one, max_batch=1)
        tasks = await filled(batcher, one)
        tasks += [asyncio.create_task(batcher.infer(rows(v))) for v in range(2, 8)]
        await until(lambda: statistics.waiting == 6)
        draining = asyncio.create_task(batcher.drain(unused := asyncio.Event()))
        for n, task in enumerate(tasks):  # each execution takes most of the limit
            await until(lambda n=n: len(one.begun) == n + 1)
            now_ns += 8 * 10**6
            looked = looks
            await until(lambda n=looked: looks > n + 1)
            gate, one.gate = one.gate, threading.Event()
            gate.set()
            assert (await task)["y"][0, 0] == 2 * (n + 1)
        unused.set()
        await draining
        await batcher.close(lambda: None)

    run(test)


def test_pauses_between_starts_grow() -> None:
    async def test() -> None:
        engine, pauses = Doubler(), []
        engine.may_start = False
        batcher, _ = shared(engine)

        def pause(seconds: float) -> bool:
            pauses.append(seconds)
            engine.may_start = len(pauses) == 8
            return False

        batcher._closing.wait = pause
        engine.kill()
        with pytest.raises(ServeError, match="no instance"):
            await batcher.infer(rows(1))
        await until(lambda: engine.starts)
        assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
        await batcher.close(lambda: None)

    run(test)


def test_deadlines_count_on_no_instance_that_has_ended(monkeypatch) -> None:
    monkeypatch.setattr(instances, "RESTART_S", 0.01)

    async def test() -> None:
        one, two = Doubler(), Doubler()
        one.may_start = False
        batcher, statistics = shared(one, two, shares=True)
        held = await filled(batcher, one, two)
        batcher._pace.took(8, 10**9)
        one.kill()
        await until(lambda: batcher._down)
        assert batcher._running_until_ns == batcher._until_ns[1], "the other one is waited for"
        others = [asyncio.create_task(batcher.infer(rows(v))) for v in (10, 11, 12)]
        await until(lambda: statistics.waiting == 3)
        two.gate.set()
        await asyncio.gather(*held, *others)
        assert [10, 11, 12] in two.begun, "an instance that runs alone leaves nothing to others"
        one.may_start = True
        await until(lambda: statistics.instances[0].is_up)
        assert batcher._abreast == 2
        await batcher.close(lambda: None)

    run(test)


def test_deadlines_count_on_all_instances() -> None:
    async def test() -> None:
        one, two = Doubler(), Doubler()
        batcher, _ = shared(one, two)
        ms = 10**6
        batcher._pace.took(8, 100 * ms)
        one.gate.clear()
        first = asyncio.create_task(batcher.infer(rows(1)))
        await until(lambda: one.begun or two.begun)
        busy, free = (one, two) if one.begun else (two, one)
        busy.gate.clear()
        # one is free: 40 ms are enough for 2 samples (25 ms), whatever the other one does
        await batcher.infer(rows(2, 3), timeout_us=10_000_000)
        await until(lambda: len(batcher._until_ns) == 1)  # the answer is there before it is free
        assert batcher._running_until_ns == 0
        free.gate.clear()
        second = asyncio.create_task(batcher.infer(rows(4)))
        await until(lambda: len(free.begun) == 2)
        assert batcher._running_until_ns == min(batcher._until_ns.values())
        with pytest.raises(ServeError, match="no time"):
            await batcher.infer(rows(*range(8)), timeout_us=1)
        for engine in (one, two):
            engine.gate.set()
        await asyncio.gather(first, second)
        await batcher.close(lambda: None)

    run(test)


def test_how_instances_are_asked_for() -> None:
    assert parse_instances("2") == ("", Placement(count=2))
    assert parse_instances("m=3")[1].each == (None,) * 3
    name, placed = parse_instances("m=2@cuda:0,cuda:1")
    assert (name, placed.each) == ("m", ("cuda:0", "cuda:1") * 2)
    for wrong in ("", "m=", "m=0", "m=x", "=2", "2@", "m=1@gpu", "m=65", "1@cpu,", "m=99999@cpu",
                  "m=2=2", "../m=2", "²", "m=1@cuda:0,,cpu"):  # fmt: skip
        with pytest.raises(UsageError):
            parse_instances(wrong)
    for rules, why in ((["m=2", "m=3"], "two rules"), ([2, 3], "two rules"), ("12", "a list")):
        with pytest.raises(UsageError, match=why):
            api.serve({"m": "no.plan"}, instances=rules if why == "a list" else [*map(str, rules)])


def test_the_gpu_decodes_for_one_instance_only() -> None:
    of = {"m": Path("no.plan")}
    _check({"": Placement(count=1)}, of, may_load=False, decode="gpu")
    for placed in (Placement(count=2), Placement(count=1, devices=("cuda:1",))):
        _check({"m": placed}, of, may_load=False, decode="host")
        with pytest.raises(UsageError, match="one instance only"):
            _check({"m": placed}, of, may_load=False, decode="gpu")


def test_threads_of_an_instance(monkeypatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    for given, threads in (("3", 3), ("0", 2), ("", 2), ("²", 2), ("9" * 5000, 2), ("-1", 2)):
        monkeypatch.setenv("OMP_NUM_THREADS", given)
        assert threads_of_each(3) == threads
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert threads_of_each(12) == 1


def scores(instance: InstanceProcess, images: np.ndarray) -> np.ndarray:
    return instance(image=instance.join("image", [images]))["scores"]


@pytest.mark.timeout(180)  # a real process: 5 s on an idle machine
def test_a_manifest_that_comes_in_parts_leaves_the_answers_whole(tmp_path: Path) -> None:
    plan = linear_plan()
    accuracy = {f"{n}: {'a long name' * 9}": 0.5 for n in range(1000)}  # 100 kB
    path = replace(plan, manifest=replace(plan.manifest, accuracy=accuracy)).save(tmp_path / "plan")
    images = np.random.default_rng(0).normal(size=(3, 3, 8, 8)).astype(np.float32)
    both = Instances(path, ["cpu"])
    try:
        assert len(both.manifest.accuracy) == 1000
        for n in (1, 3):
            np.testing.assert_allclose(
                scores(both.each[0], images[:n]), expected_scores(images[:n]), rtol=1e-3, atol=1e-3
            )
    finally:
        both.close()


class Stub(InstanceProcess):
    """Says what a process would say that has loaded ``manifest``, and ends with its socket."""

    manifest_now: Manifest

    def _begin(self) -> None:
        ours, theirs = socket.socketpair()
        told = {"manifest": to_plain(self.manifest_now), "device": "cpu"}
        with theirs:
            theirs.sendall(tickets.frame(b"d", json.dumps(told).encode()))
            self._process = subprocess.Popen(["cat"], stdin=theirs, stdout=subprocess.DEVNULL)
        self._talk(ours)


def test_an_instance_never_comes_back_with_another_plan(monkeypatch) -> None:
    """However often it is tried after the plan's file was replaced; with the old file it does."""
    old = linear_plan().manifest
    monkeypatch.setattr(Stub, "manifest_now", old, raising=False)
    instance = Stub(Path("m.plan"), compiled=True, device=None, threads=1)
    try:
        assert instance.ready() == old
        Stub.manifest_now = replace(old, built_from="another hand")
        for _ in range(2):
            with pytest.raises(ArtifactError, match="different programs"):
                instance.restart()
            assert instance._process.poll() is not None, "the refused process has ended"
            assert instance.manifest == old
        Stub.manifest_now = old
        instance.restart()
        assert instance._process.poll() is None
    finally:
        instance.release()
    assert instance._process.poll() is not None
