"""Pictures from planes of float32 to pixels of bfloat16, bit for bit beside torch's; subnormal
numbers become 0 here, and none is drawn."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tessella.core.errors import KernelError
from tessella.device.x86 import code
from tessella.kernels import catalog
from tessella.kernels.transform import x86_picture
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta

ROW = catalog.kernel("to.picture")
pytestmark = pytest.mark.skipif(
    code.refusal("avx512_bf16") is not None, reason="this processor does not round to bfloat16"
)


def problem(*shape: int) -> Problem:
    x = TensorMeta(shape=shape, dtype="float32")
    out = replace(x, dtype="bfloat16", format="channels_last")
    return Problem(op="to", inputs=(x,), outputs=(out,), attrs={"dtype": "bfloat16"})


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", [(2, 3, 4, 4), (3, 3, 5, 7), (2, 3, 127, 131)])
def test_each_number_is_torchs(
    shape: tuple[int, ...], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    p = problem(*shape)
    assert ROW.refusal(p) is None
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x[0, :, 0, :3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    whole = torch.full((x.numel() + 64,), 7, dtype=torch.bfloat16)
    out = whole[32:-32].view(shape[0], *shape[2:], 3).permute(0, 3, 1, 2)
    x86_picture.bind(p, {})(x, out=out)
    torch.testing.assert_close(out, x.bfloat16(), rtol=0, atol=0, equal_nan=True)
    assert (whole[:32] == 7).all()
    assert (whole[-32:] == 7).all()


def test_what_it_leaves_to_others() -> None:
    p = problem(2, 3, 8, 8)
    assert "three channels" in str(ROW.refusal(problem(2, 4, 8, 8)))
    assert "nothing to move" in str(ROW.refusal(problem(0, 3, 8, 8)))
    assert "16 pixels" in str(ROW.refusal(problem(2, 3, 3, 5)))
    planes = replace(p.output, format="contiguous")
    assert "from planes" in str(ROW.refusal(replace(p, outputs=(planes,))))
    assert "makes bfloat16" in str(ROW.refusal(replace(p, outputs=(p["input"],))))


def test_a_result_that_is_too_small_is_refused() -> None:
    p = problem(2, 3, 8, 8)
    smaller = replace(p, outputs=(replace(p.output, shape=(1, 3, 8, 8)),))
    with pytest.raises(KernelError, match="would leave its result"):
        x86_picture.bind(smaller, {})
