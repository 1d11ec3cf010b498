"""What counts as a kernel's right answer where results are rounded to eight bits, or infinite."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tessella.operations import problems
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta, meta_of
from tessella.search.inspection import (
    deviates,
    deviation,
    exact_answers,
    inspect,
    some_images,
    too_far,
    wrong,
)

FP8 = ("float8_e4m3fn", "float8_e5m2")


def linear(out: str, gamma: float = 1.0) -> Problem:
    a, b = (TensorMeta(shape=(rows, 32), dtype="float8_e4m3fn") for rows in (8, 4))
    made = problems.linear(a, b, out_dtype=out)
    return replace(made, attrs={**made.attrs, "gamma": gamma})


def looked_at(problem: Problem, made: torch.Tensor, exact: torch.Tensor) -> str | None:
    return wrong(inspect(lambda: made, [exact], None, sliced=False), problem)


@pytest.mark.parametrize("out", FP8)
def test_rounding_to_fp8_is_no_error(out: str) -> None:
    """The worst case: the largest value lies between two that the type has."""
    dtype, problem = getattr(torch, out), linear(out)
    mantissa = 1 + 2.0 ** -(4 if out == "float8_e4m3fn" else 3)
    exact = torch.tensor([mantissa, -0.5, 0.0], dtype=torch.float64)
    assert looked_at(problem, exact.to(dtype), exact) is None
    assert "deviates" in str(looked_at(problem, (exact * 1.25).to(dtype), exact))


@pytest.mark.parametrize("out", FP8)
def test_fp8_saturates(out: str) -> None:
    """Products of ones, 32 each, times a factor that takes them out of the type's range."""
    problem = linear(out, gamma=2.0**14)
    ones = torch.ones(8, 32, dtype=torch.float8_e4m3fn)
    (exact,) = exact_answers(problem, {}, [ones, ones[:4]])
    largest = torch.finfo(getattr(torch, out)).max
    assert exact.shape == (8, 4)
    assert exact.eq(largest).all()


@pytest.mark.parametrize("largest", [2, 9, 40, 127])
def test_a_step_of_int8_is_no_error_however_small_the_others_are(largest: int) -> None:
    """Sums of 16-bit products differ by their order: some of millions lie at a tie."""
    shapes = ((8, 32), (4, 32))
    problem = problems.linear(
        *(TensorMeta(shape=shape, dtype="float16") for shape in shapes), out_dtype="int8"
    )
    exact = torch.tensor([largest, -1, 0], dtype=torch.float64)
    one, two = (exact.clone(), exact.clone())
    one[2] += 1
    two[0] -= 2
    assert looked_at(problem, exact.to(torch.int8), exact) is None
    assert looked_at(problem, one.to(torch.int8), exact) is None
    assert "deviates" in str(looked_at(problem, two.to(torch.int8), exact))


def test_the_steps_of_numbers_too_small_for_float16_are_no_error() -> None:
    """Activations vanish in a network that nobody has trained: no kernel is to blame."""
    shapes = ((8, 32), (4, 32))
    problem = problems.linear(*(TensorMeta(shape=shape, dtype="float16") for shape in shapes))
    exact = torch.tensor([2e-6, -1.03e-6, 0.0], dtype=torch.float64)
    made = exact.to(torch.float16)
    assert (made.double() - exact).abs().max() > 0.01 * exact.max()
    assert looked_at(problem, made, exact) is None
    assert "deviates" in str(looked_at(problem, made + 2e-6, exact))


def test_many_wrong_steps_are_no_ties() -> None:
    """Codes of 0 and 1, of which a kernel makes zeros only."""
    problem = problems.linear(
        *(TensorMeta(shape=shape, dtype="float16") for shape in ((8, 32), (4, 32))),
        out_dtype="int8",
    )
    exact = (torch.arange(1000) % 2).double()
    flipped = exact.clone()
    flipped[::200] += 1
    assert looked_at(problem, flipped.to(torch.int8), exact) is None
    assert "deviates" in str(looked_at(problem, torch.zeros(1000, dtype=torch.int8), exact))


def test_of_many_images_some_tell_whether_a_kernel_is_right() -> None:
    """The first, one between and the last: one that is wrong, or not written, shows."""
    torch.manual_seed(0)
    x, weight = torch.randn(8, 3, 6, 5), torch.randn(4, 3, 3, 3)
    metas = [TensorMeta(shape=tuple(t.shape), dtype="float32") for t in (x, weight)]
    problem = replace(problems.conv(*metas, padding=1), constant=(1,))
    images = some_images(problem)
    assert images == [0, 4, 7]
    assert some_images(replace(problem, constant=())) is None
    assert some_images(problems.linear(metas[0], TensorMeta(shape=(2, 5), dtype="float32"))) is None
    right = torch.nn.functional.conv2d(x.double(), weight.double(), padding=1)
    exact = exact_answers(problem, {1: weight}, [x], images)
    torch.testing.assert_close(exact[0], right[images])
    out = torch.empty(right.shape)

    def error(written: slice, factor: float = 1.0) -> float:
        def run() -> torch.Tensor:
            out[written] = factor * right[written].float()
            return out

        return deviation(run, exact, out, sliced=False, images=images)

    assert too_far(error(slice(8)), problem) is None
    assert too_far(error(slice(7)), problem) is not None
    assert too_far(error(slice(8), 1.01), problem) is not None


def test_infinities_that_should_be_there_are_no_error() -> None:
    """A constant mask has them: each of its sums is infinite or what it was, in any kernel."""
    problem = linear("float32")
    exact = torch.tensor([2.0, -math.inf, math.inf, math.nan], dtype=torch.float64)
    made = exact.float()
    assert looked_at(problem, made, exact) is None
    assert looked_at(problem, made[1:], exact[1:]) is None
    for at, other in ((0, 3.0), (0, math.nan), (1, math.inf), (1, -2.0), (3, 0.0)):
        wrong_there = made.clone()
        wrong_there[at] = other
        assert "deviates" in str(looked_at(problem, wrong_there, exact))


def test_a_program_may_round_on_its_way() -> None:
    """float32 → bfloat16, plus whole numbers, → float32: no kernel is to be blamed for it."""
    torch.manual_seed(0)
    x, places = torch.randn(64), torch.arange(64)
    program = (("to", (0,), {"dtype": "bfloat16"}), ("add", (2, 1), {"scalar": None, "alpha": 1}),
               ("to", (3,), {"dtype": "float32"}))  # fmt: skip
    problem = Problem(
        op="pointwise",
        inputs=(meta_of(x), meta_of(places)),
        outputs=(meta_of(x),),
        attrs={"program": program, "results": (4,)},
    )
    exact = exact_answers(problem, {}, [x, places])
    made = (x.bfloat16() + places).float()
    assert not torch.allclose(made.double(), exact[0], rtol=1e-3)
    assert deviates(problem, [made], exact) is None
    assert deviates(problem, [made + 6], exact)


@pytest.mark.parametrize(
    ("target", "args", "numbers", "right", "wrong"),
    [
        ("topk", (3,), [2, 1, 2, 0, 1], ([0, 2, 1], [2, 0, 4]),
         ([0, 0, 1], [0, 2, 3], [1, 0, 2], [0, 2, 5], [0, 2, -1])),
        ("topk", (3,), [math.nan, math.inf, math.inf, 1], ([0, 1, 2], [0, 2, 1]), ([1, 0, 2],)),
        ("sort", (-1, True), [0, 1, 0], ([1, 0, 2], [1, 2, 0]), ([1, 0, 0], [0, 1, 2])),
        ("max.dim", (1, True), [2, 1, 2], ([0], [2]), ([1], [3])),
        ("min.dim", (1,), [-1, -1, 2], (0, 1), (2, -1)),
    ],
)  # fmt: skip
def test_of_equal_numbers_any_may_be_told_but_each_once(
    target: str, args: tuple[Any, ...], numbers: list[float], right: Any, wrong: Any
) -> None:
    x = torch.tensor([numbers]).half()
    name, _, overload = target.partition(".")
    values, places = getattr(getattr(torch.ops.aten, name), overload or "default")(x, *args)
    problem = Problem(
        op="fallback",
        inputs=(meta_of(x),),
        outputs=(meta_of(values), meta_of(places)),
        attrs={"target": f"aten::{target}", "args": ({"input": 0}, *args), "kwargs": {}},
    )
    exact = exact_answers(problem, {}, [x])
    for told in (places, *(torch.tensor([at]) for at in right)):
        assert deviates(problem, [values, told], exact) is None
    for told in wrong:
        assert "deviates" in str(deviates(problem, [values, torch.tensor([told])], exact))
    assert "deviates" in str(deviates(problem, [-1 - values, places], exact))
