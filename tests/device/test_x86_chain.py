"""Calls of machine code one after another: in order, and by no more threads than each allows."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from torch.nn.functional import batch_norm

from tessella.device.x86 import chain, code
from tessella.device.x86.assembler import Assembler, At
from tessella.kernels.pointwise import x86 as pointwise_x86
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta

HERE = code.instructions()
REFUSAL = "no machine code of ours runs here" if HERE is None else code.refusal(HERE.name)

pytestmark = [
    pytest.mark.instructions,
    pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL)),
]


def adding() -> code.MachineCode:
    """For each item, a row of one number: what lies so far behind the call's first number, an
    address, grows by the number before it and 1. At the second, threads that came are counted.
    """
    a = Assembler(code.require_instructions())
    with a.function():
        a.set("rax", 1)
        a.load("rcx", code.given(1))
        a.fetch_add(At(base="rcx"), "rax")
        with code.each_item(a, "rbx", 1):
            a.load("rcx", code.given(0))
            a.add_stored("rcx", At(base="rbx"))
            a.load("rdx", At(base="rcx", distance=-8))
            a.add("rdx", 1)
            a.fetch_add(At(base="rcx"), "rdx")
    return code.MachineCode(a.code())


@pytest.mark.parametrize("threads", [1, 2, 5])  # more than there are cores, too
def test_each_step_sees_all_of_the_one_before(threads: int) -> None:
    """And each item is done once, or the numbers, which grow from step to step, would differ."""
    made, steps, length = adding(), 40, 24
    numbers, came = np.zeros(length, np.int64), np.zeros(steps, np.int64)
    calls, before = [], torch.get_num_threads()
    for step in range(steps):  # every second number, from the ones that the step before wrote
        items = code.Table([[8 * i] for i in range(1 + step % 2, length, 2)])
        most = (1, 2, None)[step % 3]
        places = numbers.ctypes.data, came.ctypes.data + 8 * step
        calls.append(made.ready(items, *places, most=most))
    torch.set_num_threads(threads)
    try:
        for call in calls:
            call(None)
        right, numbers[...], came[...] = numbers.copy(), 0, 0
        assert right[-1] > 2**20
        (one,) = chain.chained(calls, lambda call: call)
        assert isinstance(one, chain.Chain)
        for _ in range(30):
            numbers[...] = came[...] = 0
            one(None)
            assert np.array_equal(numbers, right)
            assert (came >= 1).all()
            most = [1 if c.most == 1 else 2 * min(threads, c.most or threads) for c in calls]
            assert (came <= most).all()  # for both halves of the items
    finally:
        torch.set_num_threads(before)


def marking(parts: int, items: int) -> tuple[code.Ready, np.ndarray, np.ndarray]:
    """A call that counts in each part of its workspace who had it, and its items."""
    a = Assembler(code.require_instructions())
    done, had = (np.zeros(count, np.int64) for count in (items, parts))
    with a.function():
        code.take_part(a, "r13", code.given(0), code.given(2), 8)
        a.add_to_stored(At(base="r13"), 1)
        with code.each_item(a, "rbx", 1):
            a.load("rcx", code.given(1))
            a.add_stored("rcx", At(base="rbx"))
            a.add_to_stored(At(base="rcx"), 1)
    table = code.Table([[8 * i] for i in range(items)], done, had)
    places = had.ctypes.data, done.ctypes.data, 0
    made = code.MachineCode(a.code())
    return made.ready(table, *places, most=parts, counts=True), done, had


@pytest.mark.parametrize("parts", [1, 2, 3, 9, 16])
def test_no_part_of_a_workspace_is_had_twice(parts: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        made = [marking(parts, items) for items in (1, 2, 50, 51)]
        together = chain.Chain([call for call, _, _ in made])
        for number in range(1, 20):
            together()
            for _, done, had in made:
                assert (done == number).all()
                assert (had <= 1).all()
                had[...] = 0
    finally:
        torch.set_num_threads(before)


def test_only_neighbours_are_one_call() -> None:
    made, place = adding(), np.zeros(4, np.int64)
    ready = [
        made.ready(code.Table([[8]]), place.ctypes.data, place.ctypes.data, most=1)
        for _ in range(4)
    ]
    calls = [*ready[:2], "between", ready[2], "behind", ready[3]]
    one, *others = chain.chained(calls, lambda c: c if isinstance(c, code.Ready) else None)
    assert isinstance(one, chain.Chain)
    assert others == ["between", ready[2], "behind", ready[3]]


def test_a_call_that_is_ready_holds_what_its_addresses_are_of() -> None:
    """A norm's factors belong to its launch, which a search drops: it read freed memory, and took
    ours for wrong.
    """
    channels = 48
    vector = TensorMeta(shape=(channels,), dtype="float32")
    pixels = TensorMeta(shape=(1, channels, 9, 9), dtype="float32", format="channels_last")
    program = (("batch_norm", (0, 1, 2, 3, 4), {"eps": 1e-5}), ("relu", (5,), {}))
    problem = Problem(
        op="pointwise", inputs=(pixels, *[vector] * 4), outputs=(pixels,), constant=(1, 2, 3, 4),
        attrs={"program": program, "results": (6,)},
    )  # fmt: skip
    x, out = pixels.empty(torch.device("cpu")).normal_(), pixels.empty(torch.device("cpu"))
    constants = {i: torch.rand(channels) + 0.5 for i in problem.constant}
    launch = pointwise_x86.bind(problem, constants)
    held, ready = weakref.ref(launch.numbers), launch.at(x, out=out)
    del launch
    gc.collect()
    assert held() is not None
    ready()
    mean, variance, weight, bias = constants.values()
    torch.testing.assert_close(out, batch_norm(x, mean, variance, weight, bias).relu())
