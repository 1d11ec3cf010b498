"""Planes to pixels in machine code, beside torch's copy: to the last bit, but for bfloat16
below the normal numbers, which become 0.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tessella.device.x86 import code
from tessella.device.x86.assembler import AVX512
from tessella.kernels import catalog
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta

CPU = torch.device("cpu")


def problem(shape: tuple[int, ...], dtype: str = "float32", made: str = "float32") -> Problem:
    x = TensorMeta(shape=shape, dtype=dtype)
    y = TensorMeta(shape=shape, dtype=made, format="channels_last")
    return Problem(op="to", inputs=(x,), outputs=(y,), attrs={"dtype": made})


@pytest.mark.parametrize("made", ["float32", "bfloat16"])
@pytest.mark.parametrize("threads", [1, 3])
def test_each_number_of_channels(made: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if code.instructions() != AVX512 or (made == "bfloat16" and not code.has_bfloat16()):
        pytest.skip(f"this CPU makes no {made} so")
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    row = catalog.kernel("to.avx512_planes")
    for channels in (2, 3, 4):
        for size in ((4, 4), (5, 7), (48, 96)):
            p = problem((2, channels, *size), made=made)
            assert row.refusal(p) is None
            x = torch.randn(p["input"].shape, generator=torch.Generator().manual_seed(0))
            x[0, 0, 0, :3] = torch.tensor([torch.inf, torch.nan, 1e-40])
            out = p.output.empty(CPU).fill_(7)
            row.load().bind(p, {})(x, out=out)
            right = p.output.empty(CPU).copy_(x)
            small = 1e-37 if made == "bfloat16" else 0.0
            torch.testing.assert_close(out, right, rtol=0, atol=small, equal_nan=True)


def test_what_it_leaves_to_others() -> None:
    if code.instructions() != AVX512:
        pytest.skip("written for AVX-512")
    refusal = catalog.kernel("to.avx512_planes").refusal
    assert "2, 3, 4 channels" in str(refusal(problem((1, 5, 8, 8))))
    assert "of float32" in str(refusal(problem((1, 3, 8, 8), "bfloat16", "float32")))
    assert "16 pixels" in str(refusal(problem((1, 3, 3, 5))))
    known = replace(problem((1, 3, 8, 8)), constant=(0,))
    assert "no constants" in str(refusal(known))
