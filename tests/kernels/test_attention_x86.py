"""Attention in machine code, beside float64: every rest of rows and keys, views, NaNs, bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from tessella.core.errors import KernelError
from tessella.device.x86 import code
from tessella.device.x86.assembler import AVX2
from tessella.kernels import catalog
from tessella.kernels.attention import heads
from tessella.operations.problem import Problem
from tests.support.instructions import isa as isa
from tests.support.problems import attentions
from tests.support.problems.attentions import Case, exact, put_extremes

pytestmark = pytest.mark.usefixtures("isa")
GUARD = 64  # bytes around the workspace

CASES = {
    "one row and key": Case(n=1, heads=1, queries=1, keys=1),
    "rest of keys": Case(queries=6, keys=5, width=32),
    "whole panels": Case(queries=12, keys=32, width=48),
    "a panel and one": Case(queries=7, keys=17, value_width=64),
    "as a ViT's": Case(n=1, heads=3, queries=197, fused=True, width=64),
    "wide values": Case(queries=13, keys=50, width=16, value_width=80),
    "channels by no vector": Case(queries=13, width=17, value_width=27),
    "channels by half a panel": Case(queries=5, keys=33, width=24, value_width=9, fused=False),
    "negative scale": Case(queries=11, keys=23, scale=-0.7),
    "large numbers": Case(queries=9, keys=40, scale=30.0),
    "nothing but the mean": Case(queries=5, keys=20, scale=0.0),
    "padding": Case(queries=8, mask=(2, 1, 1, 45)),
    "padding of all images": Case(n=3, keys=32, hidden="end", mask=(1, 1, 1, 32)),
    "numbers": Case(mask=(2, 1, 1, 45), mask_dtype="float32"),
    "a hidden key behind the rest": Case(mask=(2, 1, 1, 45), hidden="end", scale=18.0),
    "hidden by a large number": Case(mask=(2, 1, 1, 45), mask_dtype="float32", lowest=-3.4e38),
}


def draw(case: Case) -> tuple[Problem, list[torch.Tensor]]:
    """The case's problem, with as many vectors a head as it has with AVX2."""
    times = code.require_instructions().lanes // AVX2.lanes
    values = None if case.value_width is None else case.value_width * times
    return attentions.draw(replace(case, width=case.width * times, value_width=values))


def row() -> catalog.Kernel:
    name = code.require_instructions().name
    return catalog.kernel(f"scaled_dot_product_attention.{name}")


def bound(problem: Problem, constants: Mapping[int, torch.Tensor] = {}) -> Any:
    """The kernel, in a workspace of NaNs beside which nothing is written."""
    call, needed = row().load().bind(problem, constants), row().workspace_bytes(problem, {})
    whole = torch.full((needed + 2 * GUARD,), 255, dtype=torch.uint8)

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = call(*inputs, workspace=whole[GUARD:-GUARD])
        assert (whole[:GUARD] == 255).all()
        assert (whole[-GUARD:] == 255).all()
        return made

    return run


# constants: for some images each head has one, or all heads, or all images; for queries or all
CONSTANT_MASKS = {
    "by window": Case(n=6, mask=(3, 1, 50, 45)),
    "by window and head": Case(n=6, mask=(2, 2, 50, 45), mask_dtype="float32"),
    "by head": Case(mask=(1, 2, 50, 45), mask_dtype="float32", lowest=-3.4e38),
    "by query": Case(n=3, queries=13, keys=33, mask=(1, 1, 13, 33), hidden="end"),
    "of three axes": Case(mask=(2, 50, 45), mask_dtype="float32"),
    "by image and head": Case(mask=(2, 2, 1, 45), mask_dtype="float32"),
}


@pytest.mark.parametrize("name", CONSTANT_MASKS)
def test_constant_masks_agree_with_float64(name: str) -> None:
    case = CONSTANT_MASKS[name]
    problem, inputs = draw(replace(case, dtype="float32"))
    assert "or a constant" in (row().refusal(problem) or "")
    problem, mask = replace(problem, constant=(3,)), {3: inputs[3]}
    assert row().refusal(problem) is None
    made = bound(problem, mask)(*inputs[:3]).double()
    torch.testing.assert_close(made, exact(problem, inputs), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_float64(name: str) -> None:
    problem, inputs = draw(replace(CASES[name], dtype="float32"))
    assert row().refusal(problem) is None
    before, call, right = [t.clone() for t in inputs], bound(problem), exact(problem, inputs)
    for _ in range(2):
        made = call(*inputs)
        assert problem.output.matches(made)
        # a power of a score of a hundred is off by as many roundings
        atol = 5e-5 if name in ("a hidden key behind the rest", "large numbers") else 1e-5
        torch.testing.assert_close(made.double(), right, rtol=0, atol=atol)
    assert all(map(torch.equal, inputs, before))


def test_threads_share_the_heads() -> None:
    problem, inputs = draw(Case(n=3, heads=5, dtype="float32"))
    alone, before = bound(problem)(*inputs), torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        assert torch.equal(bound(problem)(*inputs), alone)
    finally:
        torch.set_num_threads(before)


def test_the_strides_of_a_call_are_those_that_count() -> None:
    problem, inputs = draw(Case(dtype="float32"))
    call, right = bound(problem), exact(problem, inputs)
    for order in ((0, 1, 2, 3), (1, 0, 2, 3), (2, 0, 1, 3), (0, 2, 1, 3), (0, 1, 3, 2)):
        back = torch.tensor(order).argsort().tolist()
        moved = [t.permute(order).contiguous().permute(back) for t in inputs]
        torch.testing.assert_close(call(*moved).double(), right, rtol=0, atol=1e-5)


def test_nans_spread_as_far_as_in_torch() -> None:
    problem, (q, k, v) = draw(Case(n=1, heads=1, queries=8, keys=21, dtype="float32"))
    call = bound(problem)
    for tensor, place in ((q, (0, 0, 3, 1)), (k, (0, 0, 20, 0)), (v, (0, 0, 4, 9))):
        kept = tensor[place].item()
        tensor[place] = torch.nan
        expected = exact(problem, [q, k, v]).isnan()
        assert expected.any()
        assert torch.equal(call(q, k, v).isnan(), expected)
        tensor[place] = kept
    assert not call(q, k, v).isnan().any()
    for mask_dtype in ("bool", "float32"):  # of the last image no key is seen
        masked = Case(keys=21, dtype="float32", mask=(2, 1, 1, 21), mask_dtype=mask_dtype)
        problem, inputs = draw(masked)
        put_extremes(inputs)
        right = exact(problem, inputs)
        assert right.isinf().any()
        torch.testing.assert_close(bound(problem)(*inputs).double(), right, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["queries", "keys", "values", "result", "mask"])
@pytest.mark.parametrize("by", [-8, 1 << 24])
def test_a_table_that_leads_out_of_a_tensor_is_refused(
    name: str, by: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = heads.items

    def moved(*args: Any) -> Any:
        table = built(*args)
        column = ("queries", "keys", "values", "result", "mask").index(name)
        table[0 if by < 0 else -1, column] += by
        return table

    monkeypatch.setattr(heads, "items", moved)
    problem, inputs = draw(Case(dtype="float32", mask=(2, 1, 1, 45)))
    with pytest.raises(KernelError, match=f"would leave its {name}"):
        bound(problem)(*inputs)


def test_tensors_that_were_not_promised_are_refused() -> None:
    problem, (q, k, v) = draw(Case(dtype="float32"))
    call = bound(problem)
    call(q, k, v)
    for wrong in (k[:, :, 1:], k.double(), k > 0, k.expand(3, *k.shape)):
        with pytest.raises(KernelError, match="channels lie together"):
            call(q, wrong, v)
    shorter = torch.empty_like(k)
    shorter.untyped_storage().resize_(shorter.nbytes - 4)  # its sizes say more than there is
    with pytest.raises(KernelError, match="would leave its keys"):
        bound(problem)(q, shorter, v)
    needed = row().workspace_bytes(problem, {})
    small = torch.empty(needed - 1, dtype=torch.uint8)
    with pytest.raises(KernelError, match="workspace is too small"):
        row().load().bind(problem, {})(q, k, v, workspace=small)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case(causal=True), "see the same keys"),
        (Case(groups=1), "each head has its own"),
        (Case(mask=(2, 1, 50, 45)), "a mask of keys"),
        (Case(mask=(45,)), "a mask of keys"),
        (Case(n=4, mask=(2, 1, 1, 45)), "a mask of keys"),
        (Case(mask=(2, 1, 1, 45), mask_dtype="float16"), "a mask of keys"),
        (Case(dtype="float16"), "float32 throughout"),
        (Case(gamma=5.0), "gamma"),
        (Case(format="contiguous"), "side by side"),
        (Case(batched=False), "images, heads, rows"),
        (Case(width=7), "channels a head to 256"),
        (Case(width=272), "channels a head to 256"),
        (Case(keys=8000, queries=1, width=64), "keys and values of a head in"),
    ],
)
def test_what_it_leaves_to_others(case: Case, reason: str) -> None:
    problem, _ = draw(case if case.dtype == "float16" and reason.startswith("float32") else
                      replace(case, dtype="float32"))  # fmt: skip
    assert reason in (row().refusal(problem) or "")
