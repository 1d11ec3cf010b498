"""Statistics of group norms in machine code, beside float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tessella.device.x86.assembler import InstructionSet
from tessella.kernels import catalog
from tessella.kernels.norm import x86_groups
from tests.support.instructions import isa as isa
from tests.support.problems.groups import EPS, check, problem

# one vector and many, parts that end early, groups of one, some and all channels
SHAPES = [
    ((1, 16, 9, 15, 17), 16), ((2, 48, 33, 31), 6), ((1, 160, 20, 21), 1), ((3, 32, 2, 2, 2), 32),
    ((2, 2048, 3, 3), 32),
]  # fmt: skip


@pytest.mark.parametrize("threads", [1, 3])
def test_what_is_normalized_is_as_in_float64(
    threads: int, isa: InstructionSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for shape, groups in SHAPES:
        for affine in (True, False):
            asked = problem(shape, groups, dtype="float32", affine=affine)
            assert catalog.kernel(f"group_factors.{isa.name}").refusal(asked) is None
            check(asked, {}, kernel=x86_groups)


def test_nothing_cancels_far_from_zero(isa: InstructionSet) -> None:
    check(problem((1, 32, 33, 31), 2, dtype="float32"), {}, far=1000.0, kernel=x86_groups)


@pytest.mark.parametrize("place", [0, 512, 1023])
def test_an_odd_pixel_costs_no_digits(place: int, isa: InstructionSet) -> None:
    """Where a thread's pixels begin, in their middle and at their end."""
    asked = problem((1, 16, 32, 64), 16, dtype="float32", affine=False)
    x = asked.inputs[0].empty(torch.device("cpu")).normal_()
    x[0, :, place // 64, place % 64] = 3000.0
    factor, shift = x86_groups.bind(asked, {})(x)
    right = torch.nn.functional.group_norm(x.double(), 16, eps=EPS)
    assert (x.double() * factor + shift - right).abs().max() < 1e-5 * right.abs().max()


def test_it_says_what_it_does_not_take(isa: InstructionSet) -> None:
    row = catalog.kernel(f"group_factors.{isa.name}")
    assert "float32" in str(row.refusal(problem((1, 16, 3, 3), 2)))
    asked = problem((1, 20, 3, 3), 2, dtype="float32")
    assert "channels by" in str(row.refusal(asked))
    asked = problem((1, 16, 3, 3), 2, dtype="float32", format="contiguous")
    assert "lie together" in str(row.refusal(asked))
    asked = problem((1, 16, 3, 3), 2, dtype="float32")
    assert "must be constants" in str(row.refusal(replace(asked, constant=(1,))))
