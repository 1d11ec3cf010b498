"""1×1 convolutions over the pixels' rows, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tessella.kernels.conv.libraries import onednn_linear
from tessella.operations.epilogue import ACTIVATIONS
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta

pytestmark = pytest.mark.instructions


def problem_of(shape: tuple[int, ...], out: int, dtype: str, activation: str | None) -> Problem:
    n, c, h, w = shape
    return Problem(
        op="conv2d",
        inputs=(
            TensorMeta(shape=shape, dtype=dtype, format="channels_last"),
            TensorMeta(shape=(out, c, 1, 1), dtype=dtype),
            TensorMeta(shape=(out,), dtype=dtype),
            None,
        ),
        outputs=(TensorMeta(shape=(n, out, h, w), dtype=dtype, format="channels_last"),),
        attrs={"stride": [1, 1], "padding": [0, 0], "dilation": [1, 1], "groups": 1,
               "activation": activation},
        constant=(1, 2),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("shape", [(2, 24, 5, 7), (1, 3, 1, 1), (3, 1, 4, 4)])
def test_agrees_with_float64(shape: tuple[int, ...], activation: str | None, dtype: str) -> None:
    torch.manual_seed(0)
    asked, kind = problem_of(shape, 17, dtype, activation), getattr(torch, dtype)
    if dtype == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU has no bfloat16 instructions")
    assert onednn_linear.fits(asked) is None
    x = torch.randn(shape).to(kind).contiguous(memory_format=torch.channels_last)
    weight, bias = torch.randn(17, shape[1], 1, 1).to(kind), torch.randn(17).to(kind)
    made = onednn_linear.bind(asked, {1: weight, 2: bias})(x)
    right = F.conv2d(x.double(), weight.double(), bias.double())
    right = right if activation is None else ACTIVATIONS[activation](right)
    assert asked.output.matches(made)
    error = (made.double() - right).abs().max() / right.abs().max()
    assert error < {"float32": 1e-6, "bfloat16": 1e-2}[dtype]


def test_what_it_does_not_take() -> None:
    right = problem_of((2, 24, 5, 7), 24, "float32", None)
    weight = TensorMeta(shape=(24, 24, 3, 3), dtype="float32")
    x = replace(right.inputs[0], format="contiguous")
    for other, why in (
        (replace(right, inputs=(right.inputs[0], weight, None, None)), "1×1 filters"),
        (replace(right, attrs={**right.attrs, "stride": [2, 2]}), "stride 1"),
        (replace(right, attrs={**right.attrs, "padding": [1, 1]}), "no padding"),
        (replace(right, inputs=(*right.inputs[:3], right.outputs[0])), "residual"),
        (replace(right, inputs=(x, *right.inputs[1:])), "channels_last"),
    ):
        assert why in onednn_linear.fits(other)
