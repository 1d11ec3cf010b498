"""Calls of an engine that overlap, on a GPU: the answers of calls one by one."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tessella import compiler
from tessella.artifacts.plan import Plan
from tessella.core.device import default_target
from tessella.core.spec import DimRange, TensorSpec
from tessella.device.page_locked import CHUNK_BYTES
from tessella.device.streams import OwnStream
from tessella.graph import capture
from tessella.runtime import Engine, load
from tessella.runtime.overlapped import Overlapped, can_overlap
from tessella.runtime.settled_graph import SettledGraph
from tessella.server.instance_process import Instances
from tessella.server.lane import Lane, make_memory
from tessella.server.overlapping import OverlappingBatcher
from tessella.server.statistics import Statistics
from tessella.server.waiting import Request

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
MOST = 8


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 16, 3, padding=1)
        self.head = torch.nn.Linear(16, 5)

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        maps = self.conv(image).relu()
        return self.head(maps.mean((2, 3))), maps


@functools.cache
def exact_network() -> Network:
    """The plan's network in float64 on the host."""
    torch.manual_seed(0)
    return Network().eval().double()


def right(given: np.ndarray) -> list[np.ndarray]:
    """The network's outputs in float64, for any thread."""
    with torch.no_grad():
        return [t.numpy() for t in exact_network()(torch.tensor(given, dtype=torch.float64))]


@pytest.fixture(scope="module")
def plan() -> Plan:
    torch.manual_seed(0)
    batch = DimRange(min=1, opt=MOST, max=MOST)
    spec = TensorSpec(name="image", shape=(batch, 3, 16, 16), dtype="float32")
    return compiler.compile_graph(
        capture(Network().eval(), (spec,)),
        target=default_target(),
        batch=batch,
        precision="fp32",
        about=compiler.About(built_from="test", rebuild="tessella compile test"),
    )


@pytest.fixture(scope="module")
def engine(plan: Plan) -> Iterator[Engine]:
    with load(plan) as made:
        yield made


def images(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, 3, 16, 16)).astype(np.float32)


def test_overlapping_calls_answer_as_single_ones(engine: Engine) -> None:
    assert can_overlap(engine)
    overlapped = Overlapped(engine, MOST)
    lane = Lane(make_memory(1 << 27))
    random, running = np.random.default_rng(0), []
    for number in range(60):
        counts = [int(n) for n in random.integers(1, 4, int(random.integers(1, 4)))][:3]
        while sum(counts) > MOST:
            counts.pop()
        parts, start = [], int(random.integers(0, 1 << 20)) * 64
        for i, count in enumerate(counts):
            given = images(count, 100 * number + i)
            if number % 3:  # where acceptors put them, locked or, at first, not yet
                place = lane.array(start, given.shape, given.dtype)
                place[:] = given
                if number % 3 == 2:
                    lane.page_lock(start, start + given.nbytes)
                start += -(-given.nbytes // 64) * 64
                given = place
            parts.append({"image": given})
        running.append((overlapped.begin(parts), np.concatenate([p["image"] for p in parts])))
        if not overlapped.has_room:
            call, given = running.pop(0)
            wanted = engine(given)
            for name, made in call.outputs().items():
                np.testing.assert_allclose(made, wanted[name], rtol=1e-5, atol=1e-6)
            call.release()
    for call, given in running:
        call.wait()
        assert call.is_done()
        for name, made in call.outputs().items():
            np.testing.assert_allclose(made, engine(given)[name], rtol=1e-5, atol=1e-6)
        call.release()


def test_lone_and_crowded_requests_in_turn_are_answered_right(engine: Engine) -> None:
    """A lone one by the engine's own way, those of a crowd in executions that overlap; their
    arrays lie in a lane, or are for reading alone as those of a body.
    """
    looks, lane = threading.Event(), Lane(make_memory(1 << 28))
    batcher = OverlappingBatcher(
        Overlapped(engine, MOST),
        engine,
        max_batch=MOST,
        max_delay_us=0,
        max_waiting=999,
        statistics=Statistics(),
    )
    batcher.on_done = looks.set
    answered: list[tuple[np.ndarray, list[np.ndarray]]] = []

    def deliver(requests: list[Request]) -> None:
        for request in requests:  # the next call has the memory of these outputs
            assert request.outputs is not None, request.error
            copies = [array.copy() for array in request.outputs.values()]
            answered.append((request.arrays["image"], copies))

    random = np.random.default_rng(0)
    for turn in range(60):
        counts = [1] if turn % 2 else [int(n) for n in random.integers(1, 5, turn // 2 + 1)]
        start = int(random.integers(0, 1 << 20)) * 64
        if turn == 31:
            start = CHUNK_BYTES - 4096  # across two chunks, which are locked one by one
        for number, count in enumerate(counts):
            given = images(count, 1000 * turn + number)
            if turn % 3:
                place = lane.array(start, given.shape, given.dtype)
                lane.page_lock(start, start + given.nbytes)
                place[:] = given
                given, start = place, start + (1 << 16)
            else:
                given.flags.writeable = False
            batcher.submit(Request(arrays={"image": given}, deliver=deliver))
        while len(answered) < len(counts):
            looks.clear()
            if batcher.step() and len(answered) < len(counts):
                assert looks.wait(30)
        for given, made in answered:
            for one, exact in zip(made, right(given), strict=True):
                np.testing.assert_allclose(one, exact, rtol=1e-4, atol=1e-5)
        answered.clear()
    known = engine._settled[((1, 3, 16, 16), np.dtype(np.float32)),]
    assert isinstance(known, SettledGraph)


def test_a_settled_call_runs_beside_others(engine: Engine) -> None:
    """Of NumPy arrays in several threads, which have no context, and of tensors in streams."""
    exact_network()  # its weights are drawn before threads ask for it
    failed = list[BaseException]()

    def work(seed: int) -> None:
        try:
            for number in range(25):
                given = images(1 + number % 2, 100 * seed + number)
                array = given if number % 3 else given.transpose(3, 2, 1, 0).copy().T
                made = engine(array)
                for one, exact in zip(made.values(), right(given), strict=True):
                    np.testing.assert_allclose(one, exact, rtol=1e-4, atol=1e-5)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for number in range(25):
        given = images(1, 900 + number)
        with torch.cuda.stream(OwnStream(engine.device).stream):
            made = engine(torch.from_numpy(given).cuda())
            for one, exact in zip(made.values(), right(given), strict=True):
                np.testing.assert_allclose(one.cpu().numpy(), exact, rtol=1e-4, atol=1e-5)
    for thread in threads:
        thread.join()
    assert not failed, failed[0]


def test_an_instance_answers_from_memory_that_it_has_locked(plan: Plan, tmp_path: Path) -> None:
    """The batcher joins samples in it, of any sizes, again and again."""
    instances = Instances(plan.save(tmp_path / "m.plan"), ["cuda:0"])
    try:
        (instance,) = instances.each
        for number, counts in enumerate(([1], [2, 3], [MOST], [1, 1], [1])):
            parts = [images(count, 10 * number + i) for i, count in enumerate(counts)]
            made = instance(image=instance.join("image", parts))
            for one, exact in zip(made.values(), right(np.concatenate(parts)), strict=True):
                np.testing.assert_allclose(one, exact, rtol=1e-4, atol=1e-5)
    finally:
        instances.close()


def test_a_tensor_across_chunks_is_copied_right(engine: Engine) -> None:
    """Two chunks are locked one by one, and the driver copies across no such border."""
    overlapped, lane = Overlapped(engine, MOST), Lane(make_memory(1 << 28))
    given = images(MOST, 1)
    for start in (CHUNK_BYTES - 4096, 3 * CHUNK_BYTES - given.nbytes // 2 // 64 * 64):
        place = lane.array(start, given.shape, given.dtype)
        place[:] = given
        lane.page_lock(start, start + given.nbytes)
        call = overlapped.begin([{"image": place}])
        np.testing.assert_allclose(
            next(iter(call.outputs().values())),
            next(iter(engine(given).values())),
            rtol=1e-5,
            atol=1e-6,
        )
        call.release()


def test_an_input_that_does_not_fit_leaves_the_memory_usable(engine: Engine) -> None:
    overlapped = Overlapped(engine, MOST)
    for _ in range(3):
        with pytest.raises(Exception, match="image"):
            overlapped.begin([{"image": np.zeros((1, 3, 8, 8), np.float32)}])
    first = overlapped.begin([{"image": images(2, 5)}])
    second = overlapped.begin([{"image": images(3, 6)}])
    assert not overlapped.has_room
    for call, given in ((first, images(2, 5)), (second, images(3, 6))):
        wanted = engine(given)
        for name, made in call.outputs().items():
            np.testing.assert_allclose(made, wanted[name], rtol=1e-5, atol=1e-6)
        call.release()


def test_locked_memory_is_unlocked_before_it_goes() -> None:
    """The pages of a lane can be locked again where another one lies now."""
    torch.zeros(1, device="cuda")  # this thread has a context
    for _ in range(8):
        lane = Lane(make_memory(1 << 27))
        array: Any = lane.array(0, (1 << 20,), np.dtype(np.uint8))
        lane.page_lock(0, 1 << 27)
        driver = ctypes.CDLL("libcuda.so.1")
        flags = ctypes.c_uint()
        where = ctypes.c_void_p(array.ctypes.data)
        assert driver.cuMemHostGetFlags(ctypes.byref(flags), where) == 0
        address = array.ctypes.data
        del lane, array
        assert driver.cuMemHostGetFlags(ctypes.byref(flags), ctypes.c_void_p(address)) != 0
