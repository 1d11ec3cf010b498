"""Calls of an engine that overlap, on a GPU: the answers of calls one by one."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tessella import compiler
from tessella.core.device import default_target
from tessella.core.spec import DimRange, TensorSpec
from tessella.device.page_locked import CHUNK_BYTES
from tessella.graph import capture
from tessella.runtime import Engine, load
from tessella.runtime.overlapped import Overlapped, can_overlap
from tessella.server.lane import Lane, make_memory

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


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    torch.manual_seed(0)
    batch = DimRange(min=1, opt=MOST, max=MOST)
    spec = TensorSpec(name="image", shape=(batch, 3, 16, 16), dtype="float32")
    plan = compiler.compile_graph(
        capture(Network().eval(), (spec,)),
        target=default_target(),
        batch=batch,
        precision="fp32",
        about=compiler.About(built_from="test", rebuild="tessella compile test"),
    )
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
