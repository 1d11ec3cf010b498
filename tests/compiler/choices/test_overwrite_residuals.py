"""Sums that are made where their residual lies: only where nothing else needs it, plan or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tessella import runtime
from tessella.artifacts.plan import Plan
from tessella.compiler.choices import variants
from tessella.core.errors import ArtifactError
from tessella.core.spec import TensorSpec
from tessella.execution.liveness import Use, dying
from tessella.kernels.conv.libraries import onednn_sum
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta
from tests.support.networks import build

pytestmark = pytest.mark.instructions

IMAGE = TensorSpec(name="image", dtype="float32", shape=(1, 64, 20, 20))
SUM = "conv2d.onednn_sum"


class Block(nn.Module):
    """Two convolutions and a sum; what becomes of the residual differs."""

    def __init__(self, finish: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first = nn.Conv2d(64, 64, 3, padding=1)
        self.second = nn.Conv2d(64, 64, 3, padding=1)
        self.finish = finish

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.first(x))
        return self.finish(x, F.relu(self.second(torch.sigmoid(x)) + x)).flatten(1)


def plan_of(finish: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> tuple[Plan, nn.Module]:
    torch.manual_seed(0)
    module = Block(finish).eval()
    with pytest.MonkeyPatch.context() as patch:  # no sums in the other layout, faster or not
        patch.setattr(variants, "layouts_to_try", lambda *asked: ("channels_last",))
        return build(module, IMAGE), module


def kernels(plan: Plan) -> list[str]:
    return [s.kernel for s in plan.program.buckets[-1].steps if s.op == "conv2d"]


CASES: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], bool]] = {
    "nothing reads it": (lambda x, y: y * 2.0, True),
    "it is read later": (lambda x, y: y * 2.0 + x, False),
    "a view of it is read later": (lambda x, y: y * x[:, :, ::2, ::2].mean((2, 3), True), False),
    "a view of a view": (lambda x, y: y.flatten(1) * x.permute(0, 2, 3, 1).flatten(1), False),
}


@pytest.mark.parametrize("case", CASES)
def test_only_where_nothing_needs_the_residual(case: str) -> None:
    finish, may = CASES[case]
    plan, module = plan_of(finish)
    assert (SUM in {c.kernel for c in plan.tuning if c.refused is None}) is may
    assert (SUM in kernels(plan)) <= may  # the faster wins
    engine = runtime.load(plan)
    for count in (1, 3):
        x = torch.randn(count, 64, 20, 20)
        right = module.double()(x.double()).detach()
        module.float()
        for _ in range(2):  # and again: what was overwritten was no constant
            made = engine(image=x)["scores"]
            assert (made - right).abs().max() / right.abs().max() < 1e-5


def test_a_plan_cannot_take_what_is_needed() -> None:
    """The kernel's name is changed in a plan that needs the residual: loading finds out itself."""
    plan, _ = plan_of(CASES["it is read later"][0])

    def hostile(bucket):  # type: ignore[no-untyped-def]
        steps = tuple(
            replace(s, kernel=SUM) if s.op == "conv2d" and s.inputs[3] is not None else s
            for s in bucket.steps
        )
        assert steps != bucket.steps
        return replace(bucket, steps=steps)

    program = replace(plan.program, buckets=tuple(map(hostile, plan.program.buckets)))
    with pytest.raises(ArtifactError, match="the residual is needed afterwards"):
        runtime.load(replace(plan, program=program))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", [None, "relu"])
def test_the_kernel_against_float64(dtype: str, activation: str | None) -> None:
    torch.manual_seed(1)
    kind = getattr(torch, dtype)
    x, residual = (
        torch.randn(2, 8, 9, 7).to(kind).contiguous(memory_format=torch.channels_last)
        for _ in range(2)
    )
    weight, bias = torch.randn(8, 8, 3, 3).to(kind) / 8, torch.randn(8).to(kind)
    meta = TensorMeta(shape=(2, 8, 9, 7), dtype=dtype, format="channels_last")
    problem = Problem(
        op="conv2d",
        inputs=(meta, TensorMeta(shape=(8, 8, 3, 3), dtype=dtype),
                TensorMeta(shape=(8,), dtype=dtype), meta),
        outputs=(meta,),
        attrs={"stride": [1, 1], "padding": [1, 1], "dilation": [1, 1], "groups": 1,
               "activation": activation},
        constant=(1, 2),
        dying=(3,),
    )  # fmt: skip
    right = F.conv2d(x.double(), weight.double(), bias.double(), padding=1) + residual.double()
    right = right if activation is None else right.relu()
    if dtype == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        assert "no bfloat16" in onednn_sum.fits(problem)
        return
    assert onednn_sum.fits(problem) is None
    made = onednn_sum.bind(problem, {1: weight, 2: bias})(x, residual)
    assert made.data_ptr() == residual.data_ptr()
    assert meta.matches(made)
    error = (made.double() - right).abs().max() / right.abs().max()
    assert error < {"float32": 1e-6, "bfloat16": 1e-2}[dtype]
    for other, wrong in (
        (replace(problem, dying=()), "needed afterwards"),
        (replace(problem, inputs=problem.inputs[:3]), "no residual"),
        (replace(problem, attrs={**problem.attrs, "activation": "silu"}), "not fused"),
    ):
        assert wrong in onednn_sum.fits(other)


def test_which_operands_die() -> None:
    steps = [
        (("image",), ("a",), False),
        (("a",), ("b",), True),  # a view
        (("a", "w"), ("c",), False),
        (("c", "b"), ("d",), False),  # the last use of a too, through its view
        (("d", "d"), ("e",), False),  # twice: no place to write to
        (("e", "c2"), ("out",), False),
    ]
    found = dying([Use(*step) for step in steps], {"image", "w", "out", "c2"})
    assert found == [(), (), (), (0, 1), (), (0,)]
