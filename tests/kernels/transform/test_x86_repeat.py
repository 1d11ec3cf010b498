"""``interpolate`` to whole multiples in machine code beside torch's own, equal to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tessella.device.x86 import code
from tessella.kernels.transform import resize, x86_repeat
from tessella.operations.problem import Problem
from tessella.operations.reference.transform import interpolate
from tessella.operations.tensor_meta import TensorMeta, meta_of

CASES = {  # element type, shape, and how often each pixel is written down and along
    "a vector and a rest": ("float32", (2, 23, 3, 5), (2, 2)),
    "many vectors": ("bfloat16", (1, 300, 4, 3), (1, 3)),
    "bytes": ("int8", (2, 70, 5, 4), (2, 2)),
    "a vector": ("int8", (1, 64, 3, 7), (3, 1)),
    "less than a vector of AVX-512": ("int8", (1, 37, 40, 30), (2, 2)),
    "less than any vector": ("int8", (1, 5, 3, 2), (2, 4)),
}


def asked(name: str) -> tuple[Problem, torch.Tensor]:
    dtype, shape, (down, along) = CASES[name]
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 50).to(
        getattr(torch, dtype), memory_format=torch.channels_last
    )
    size = (shape[2] * down, shape[3] * along)
    meta = TensorMeta(shape=shape, dtype=dtype, format="channels_last")
    attrs = {"size": size, "scale_factor": None, "mode": "nearest", "align_corners": None,
             "antialias": False}  # fmt: skip
    made = replace(meta, shape=(*shape[:2], *size))
    return Problem(op="interpolate", inputs=(meta,), outputs=(made,), attrs=attrs), x


@pytest.mark.parametrize("name", CASES)
def test_what_torch_makes_also_in_a_slice_of_channels(name: str) -> None:
    problem, x = asked(name)
    right = x.float().repeat_interleave(CASES[name][2][0], 2).repeat_interleave(
        CASES[name][2][1], 3
    )  # fmt: skip
    assert torch.equal(interpolate(x, **problem.attrs).float(), right)
    if x.dtype == torch.int8:
        assert resize.fits(problem) is None
        out = problem.output.empty(x.device)
        assert torch.equal(resize.bind(problem, {})(x, out=out).float(), right)
    why = x86_repeat.fits(problem)
    if x.shape[1] * x.element_size() < code.require_instructions().vector_bytes and why:
        assert "bytes at least" in why
        return
    assert why is None
    out = problem.output.empty(x.device).fill_(7)
    assert x86_repeat.bind(problem, {})(x, out=out) is out
    assert torch.equal(out.float(), right)
    channels = x.shape[1]
    wide = torch.full((x.shape[0], channels + 9, *x.shape[2:]), 3, dtype=x.dtype)
    wide = wide.contiguous(memory_format=torch.channels_last)
    wide[:, 4 : 4 + channels] = x
    whole = torch.full((x.shape[0], channels + 6, *problem.output.shape[2:]), 7, dtype=x.dtype)
    whole = whole.contiguous(memory_format=torch.channels_last)
    metas = [meta_of(t).part(1, channels) for t in (wide, whole)]
    there = replace(problem, inputs=(metas[0],), outputs=(metas[1],))
    assert x86_repeat.fits(there) is None
    x86_repeat.bind(there, {})(wide[:, 4 : 4 + channels], out=whole[:, 2 : 2 + channels])
    assert torch.equal(whole[:, 2 : 2 + channels].float(), right)
    assert (whole[:, :2] == 7).all()
    assert (whole[:, 2 + channels :] == 7).all()


def test_what_is_no_repetition_is_left_to_others() -> None:
    problem, _ = asked("bytes")
    odd = replace(problem.output, shape=(2, 70, 11, 8))
    assert "as often as the others" in str(x86_repeat.fits(replace(problem, outputs=(odd,))))
    mixed = replace(problem, attrs={**problem.attrs, "mode": "bilinear"})
    assert "the nearest pixel" in str(x86_repeat.fits(mixed))
    assert resize.fits(mixed) == "int8 of the nearest pixel alone"
    planes = replace(problem.output, format="contiguous")
    assert "channels_last" in str(x86_repeat.fits(replace(problem, outputs=(planes,))))
