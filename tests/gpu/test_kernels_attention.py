"""Attention on the GPU: right, by whom ever."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.test_attention import ROW, problem


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_agrees_with_float64(dtype: str, causal: bool) -> None:
    asked = problem(dtype, causal=causal)
    q, k, v = (torch.randn(m.shape, device="cuda").to(getattr(torch, dtype)) for m in asked.inputs)
    made = ROW.load().bind(asked, {})(q, k, v)
    right = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=causal)
    tolerance = 2e-3 if dtype == "float16" else 1.5e-2
    assert float((made.double() - right).abs().max() / right.abs().max()) < tolerance
