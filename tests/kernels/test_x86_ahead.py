"""Weights that are asked for ahead: where the pointer begins, and where it stops."""

from __future__ import annotations

import pytest
import torch

from tessella.device.x86 import code
from tessella.device.x86.assembler import AVX2, Assembler, At
from tessella.kernels.shared.x86_ahead import LINE, Ahead


@pytest.mark.parametrize(
    ("nbytes", "tiles", "rounds", "lines"),
    [(10 * LINE, 2, 3, 6), (10 * LINE, 9, 3, 12), (10 * LINE, 5, 2, 10), (100, 3, 1, 2)],
    ids=["before the end", "behind it by a tile's at most", "at it", "within a line"],
)
def test_where_it_stops(nbytes: int, tiles: int, rounds: int, lines: int) -> None:
    if code.instructions() is None or code.refusal(code.require_instructions().name) is not None:
        pytest.skip("no machine code here")
    numbers = torch.zeros(3, dtype=torch.int64)  # step, end, where the pointer is
    step, end, last = (At(base="r13", distance=8 * i) for i in range(3))
    ahead = Ahead(pointer="r15", step=step, end=end)
    a = Assembler(AVX2)
    a.enter()
    a.load("r13", code.given(0))
    a.load("r15", code.given(1))
    ahead.begin(a, nbytes)
    a.set("rbx", tiles)
    with a.counted("tile", "rbx"):
        a.set("rcx", rounds)
        with a.counted("round", "rcx"):
            ahead.line(a)
        ahead.pace(a, "asked", "rax")
    a.store(last, "r15")
    a.leave()
    weight = torch.zeros(nbytes, dtype=torch.uint8)  # nothing lies behind it
    begin = weight.data_ptr()
    items = code.Table([[0]])
    code.MachineCode(a.code()).run(items, numbers.data_ptr(), begin, threads=1)
    assert numbers.tolist()[1:] == [begin + 2 * nbytes, begin + nbytes + lines * LINE]
