"""Attention on AMX's tiles, beside float64: rests of rows and keys, masks, views, NaNs, bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from tessella.core.errors import KernelError
from tessella.device.x86 import code
from tessella.kernels import catalog
from tessella.kernels.attention import heads
from tessella.operations.problem import Problem
from tests.support.problems.attentions import Case, draw, exact, put_extremes

GUARD = 64  # bytes around the workspace
ROW = catalog.kernel("scaled_dot_product_attention.amx_bf16")
BFLOAT16 = Case(queries=32, keys=32, width=32, dtype="bfloat16")

pytestmark = pytest.mark.skipif(
    code.instructions() is None or code.refusal("amx_bf16") is not None,
    reason="no tiles of bfloat16 here",
)

CASES = {
    "one block": BFLOAT16,
    "one key": replace(BFLOAT16, keys=1),
    "a key behind a panel": replace(BFLOAT16, queries=33, keys=17, width=64),
    "an odd rest": replace(BFLOAT16, queries=63, keys=45, value_width=96),
    "as a ViT's": replace(BFLOAT16, n=1, heads=3, queries=197, fused=True, width=64),
    "as a BERT's": replace(BFLOAT16, queries=128, keys=128, width=64, mask=(2, 1, 1, 128)),
    "channels by no tile": replace(BFLOAT16, queries=33, keys=19, width=34, value_width=65),
    "channels by half a step": replace(BFLOAT16, width=80, value_width=48, fused=False),
    "as a MobileViT's": replace(BFLOAT16, queries=64, keys=64, width=36, fused=True),
    "negative scale": replace(BFLOAT16, keys=23, scale=-0.7),
    "large numbers": replace(BFLOAT16, keys=40, scale=30.0),
    "nothing but the mean": replace(BFLOAT16, keys=20, scale=0.0),
    "padding of all images": replace(BFLOAT16, n=3, hidden="end", mask=(1, 1, 1, 32)),
    "numbers": replace(BFLOAT16, keys=45, mask=(2, 1, 1, 45), mask_dtype="float32"),
    "numbers of 16 bits": replace(BFLOAT16, keys=45, mask=(2, 1, 1, 45), mask_dtype="bfloat16"),
    "a hidden key behind the rest": replace(
        BFLOAT16, keys=45, mask=(2, 1, 1, 45), hidden="end", scale=18.0
    ),
    "hidden by a large number": replace(
        BFLOAT16, keys=45, mask=(2, 1, 1, 45), mask_dtype="float32", lowest=-3.4e38
    ),
}


def bound(problem: Problem, constants: Mapping[int, torch.Tensor] = {}) -> Any:
    """The kernel, in a workspace of NaNs beside which nothing is written."""
    call, needed = ROW.load().bind(problem, constants), ROW.workspace_bytes(problem, {})
    whole = torch.full((needed + 2 * GUARD,), 255, dtype=torch.uint8)

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = call(*inputs, workspace=whole[GUARD:-GUARD])
        assert (whole[:GUARD] == 255).all()
        assert (whole[-GUARD:] == 255).all()
        return made

    return run


CONSTANT_MASKS = {
    "by window": replace(BFLOAT16, n=6, queries=49, keys=45, mask=(3, 1, 49, 45)),
    "by window and head": replace(
        BFLOAT16, n=6, queries=70, keys=45, mask=(2, 2, 70, 45), mask_dtype="float32"
    ),
    "by head": replace(
        BFLOAT16, mask=(1, 2, 32, 32), mask_dtype="bfloat16", lowest=-3.3e38, hidden="end"
    ),
    "by image and head": replace(BFLOAT16, queries=33, mask=(2, 2, 1, 32), mask_dtype="float32"),
}


@pytest.mark.parametrize("name", CONSTANT_MASKS)
def test_constant_masks_agree_with_float64(name: str) -> None:
    case = CONSTANT_MASKS[name]
    problem, inputs = draw(case)
    assert "or a constant" in (ROW.refusal(problem) or "")
    problem, mask = replace(problem, constant=(3,)), {3: inputs[3]}
    assert ROW.refusal(problem) is None
    made = bound(problem, mask)(*inputs[:3]).double()
    torch.testing.assert_close(made, exact(problem, inputs), rtol=2**-8, atol=6e-3)


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_float64(name: str) -> None:
    problem, inputs = draw(CASES[name])
    assert ROW.refusal(problem) is None
    before, call, right = [t.clone() for t in inputs], bound(problem), exact(problem, inputs)
    for _ in range(2):
        made = call(*inputs)
        assert problem.output.matches(made)
        # the result, and each power, is rounded to eight bits
        torch.testing.assert_close(made.double(), right, rtol=2**-8, atol=6e-3)
        assert (made.double() - right).square().mean().sqrt() < 2e-3
    assert all(map(torch.equal, inputs, before))


def test_threads_share_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, inputs = draw(replace(BFLOAT16, n=3, heads=5, keys=50))
    alone = bound(problem)(*inputs)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert torch.equal(bound(problem)(*inputs), alone)


def test_the_strides_of_a_call_are_those_that_count() -> None:
    problem, inputs = draw(BFLOAT16)
    call, right = bound(problem), exact(problem, inputs)
    for order in ((1, 0, 2, 3), (2, 0, 1, 3), (0, 2, 1, 3), (0, 1, 3, 2)):
        back = torch.tensor(order).argsort().tolist()
        moved = [t.permute(order).contiguous().permute(back) for t in inputs]
        torch.testing.assert_close(call(*moved).double(), right, rtol=2**-8, atol=6e-3)


def test_nans_spread_as_far_as_in_torch() -> None:
    problem, (q, k, v) = draw(replace(BFLOAT16, n=1, heads=1, queries=40, keys=21))
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
        masked = replace(BFLOAT16, keys=21, mask=(2, 1, 1, 21), mask_dtype=mask_dtype)
        problem, inputs = draw(masked)
        put_extremes(inputs)
        right = exact(problem, inputs)
        assert right.isinf().any()
        torch.testing.assert_close(bound(problem)(*inputs).double(), right, rtol=2**-8, atol=6e-3)


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
    problem, inputs = draw(replace(BFLOAT16, mask=(2, 1, 1, 32)))
    with pytest.raises(KernelError, match=f"would leave its {name}"):
        bound(problem)(*inputs)


def test_tensors_that_were_not_promised_are_refused() -> None:
    problem, (q, k, v) = draw(BFLOAT16)
    call = bound(problem)
    for wrong in (k[:, :, 1:], k.float(), k.expand(3, *k.shape)):
        with pytest.raises(KernelError, match="channels lie together"):
            call(q, wrong, v)
    small = torch.empty(ROW.workspace_bytes(problem, {}) - 1, dtype=torch.uint8)
    with pytest.raises(KernelError, match="workspace is too small"):
        ROW.load().bind(problem, {})(q, k, v, workspace=small)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"causal": True}, "see the same keys"),
        ({"mask": (2, 1, 32, 32)}, "a mask of keys"),
        ({"dtype": "float16"}, "bfloat16 throughout"),
        ({"queries": 31}, "32 queries at least"),
        ({"width": 30}, "from 32 channels a head"),
        ({"width": 35}, "an even number"),
        ({"keys": 9000, "width": 128}, "keys and values of a head in"),
    ],
)
def test_what_it_leaves_to_others(changes: dict[str, Any], reason: str) -> None:
    problem, _ = draw(replace(BFLOAT16, **changes))
    assert reason in str(ROW.refusal(problem))
