"""Deformable attention: the reference and every kernel beside loops over points, in float64."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tessella.kernels.detect import sampled, summed_bags, x86
from tessella.operations.problem import Problem
from tessella.operations.reference.detect import deformable_attention
from tessella.operations.tensor_meta import TensorMeta
from tests.support.kernels.compile_only import compile_all
from tests.support.problems.looks import asked, by_loops, drawn

CASES: dict[str, dict[str, Any]] = {
    "levels of unequal points": {"heads": 2, "depth": 4, "sizes": (3, 5, 2, 2), "points": (3, 1)},
    "one pixel": {"heads": 1, "depth": 3, "sizes": (1, 1), "points": (2,)},
    "more than a vector": {"heads": 2, "depth": 36, "sizes": (4, 3, 2, 2), "points": (9, 12)},
    "three levels": {"heads": 3, "depth": 5, "sizes": (7, 2, 3, 4, 1, 6), "points": (1, 2, 3)},
}


@pytest.mark.parametrize("module", [None, summed_bags, sampled, x86])
@pytest.mark.parametrize("name", CASES)
def test_points_are_seen_as_loops_see_them(name: str, module: ModuleType | None) -> None:
    """Boxes in the middle, at the edge and far outside of the picture."""
    problem = asked(images=2, queries=9, **CASES[name])
    tensors = drawn(problem)
    right = by_loops([t.double().numpy() for t in tensors], problem.attrs)
    if module is None:
        made = deformable_attention(*tensors, **problem.attrs)
    else:
        assert module.fits(problem) is None
        call, out = module.bind(problem, {}), torch.full(problem.output.shape, torch.nan)
        call(*(torch.full_like(t, 2.0) for t in tensors), out=out)  # what was there before is gone
        made = call(*tensors, out=out)
        assert made is out
    np.testing.assert_allclose(made.numpy(), right, atol=3e-6)


def test_rows_may_lie_apart_as_parts_of_one_product_do() -> None:
    problem = asked(images=2, queries=9, **CASES["three levels"])
    value, boxes, offsets, scores = drawn(problem)
    metas = list(problem.inputs)
    parts = []
    for position, tensor in ((0, value), (2, offsets), (3, scores)):
        whole = torch.cat([torch.full_like(tensor, torch.nan), tensor], 2)
        parts.append(whole[:, :, tensor.shape[2] :])
        meta = TensorMeta(shape=tuple(whole.shape), dtype="float32")
        metas[position] = meta.part(2, tensor.shape[2])
    apart = dataclasses.replace(problem, inputs=tuple(metas))
    assert sampled.fits(apart) is None
    made = sampled.bind(apart, {})(
        parts[0], boxes, *parts[1:], out=torch.empty(problem.output.shape)
    )
    right = by_loops([t.double().numpy() for t in (value, boxes, offsets, scores)], problem.attrs)
    np.testing.assert_allclose(made.numpy(), right, atol=3e-6)
    unknown = dataclasses.replace(metas[0], strides=None)
    apart = dataclasses.replace(problem, inputs=(unknown, *problem.inputs[1:]))
    assert "dense rows" in str(sampled.fits(apart))


@pytest.mark.parametrize("module", [summed_bags, x86])
@pytest.mark.parametrize("place", [torch.nan, torch.inf, -1e30])
def test_a_place_that_is_none_reads_nobody_s_memory(place: float, module: ModuleType) -> None:
    problem = asked(images=1, queries=3, **CASES["three levels"])
    tensors = drawn(problem)
    tensors[1][0, 1, :2] = place
    right = deformable_attention(*tensors, **problem.attrs)
    made = module.bind(problem, {})(*tensors, out=torch.empty_like(right))
    np.testing.assert_allclose(made[:, ::2], right[:, ::2], atol=3e-6)


@pytest.mark.parametrize("score", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_scores_that_are_no_numbers_spread_in_their_head_alone(score: float) -> None:
    """And a point whose score is infinitely low is not seen, whatever lies there."""
    problem = asked(images=1, queries=3, **CASES["more than a vector"])
    tensors = drawn(problem)
    tensors[0] *= 1e37
    tensors[3][0, 1, 18] = score
    right = deformable_attention(*(t.double() for t in tensors), **problem.attrs)
    made = x86.bind(problem, {})(*tensors, out=torch.empty(problem.output.shape))
    torch.testing.assert_close(made.double(), right, rtol=1e-5, atol=3e-6 * 1e37, equal_nan=True)


def test_gradients_of_the_reference_are_those_of_differences() -> None:
    problem = asked(images=1, queries=3, **CASES["levels of unequal points"])
    tensors = [t.double().requires_grad_() for t in drawn(problem)]
    assert torch.autograd.gradcheck(lambda *t: deformable_attention(*t, **problem.attrs), tensors)


@pytest.mark.parametrize(
    ("operand", "shape", "attrs", "what"),
    [
        (1, (2, 9, 2), {}, "boxes has the shape"),
        (2, (2, 9, 8), {}, "offsets has the shape"),
        (3, (2, 8, 8), {}, "scores has the shape"),
        (0, (2, 20, 8), {}, "are not those of maps"),
        (0, (2, 19, 8), {"heads": 3}, "heads of 8 channels"),
        (0, (2, 19, 8), {"points": (4,)}, "levels without a size"),
        (0, (2, 19, 8), {"points": (4, 0)}, "are not those of maps"),
    ],
)
def test_operands_of_strangers_belong_together(
    operand: int, shape: tuple[int, ...], attrs: dict[str, Any], what: str
) -> None:
    problem: Problem = asked(images=2, queries=9, **CASES["levels of unequal points"])
    assert problem.misfit is None
    broken = asked(
        images=2, queries=9, replaced={operand: shape}, attrs=attrs,
        **CASES["levels of unequal points"],
    )  # fmt: skip
    assert what in str(broken.misfit)


def on_hopper() -> Iterator[tuple[str, Callable[[], object]]]:
    """D-FINE-S's, in both precisions: 12 points of 32 channels."""
    for dtype, most in (("float32", 1), ("float16", 1)):
        problem = asked(images=2, queries=300, heads=8, depth=32, sizes=(8, 8, 4, 4, 2, 2),
                        points=(3, 6, 3), dtype=dtype)  # fmt: skip
        tensors, out = drawn(problem), problem.output.empty(torch.device("cpu"))
        for config in sampled.configs(problem)[:most]:
            call = sampled.bind(problem, {}, **config)
            yield f"{dtype} {config}", functools.partial(call, *tensors, out=out)


def test_compiled_for_hopper_nothing_spills() -> None:
    for launches in compile_all(f"{__name__}:on_hopper").values():
        (launch,) = launches
        assert launch["spilled_bytes"] == 0
