"""``interpolate`` of channels_last pictures: the kernel beside torch's own, in every configuration.

Without a GPU Triton's interpreter runs it; tests/gpu has no more of it than this.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tessella.kernels.transform import resize, resize_rows
from tessella.operations.problem import Problem
from tessella.operations.reference.transform import interpolate
from tessella.operations.tensor_meta import TensorMeta

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
runs = pytest.mark.skipif(
    DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs a GPU, or Triton's interpreter",
)
SIZES = {  # of a picture, and of what is made
    "twice": ((2, 5, 4, 6), (8, 12)),
    "thrice and once": ((1, 20, 3, 5), (9, 5)),
    "odd": ((2, 3, 7, 5), (11, 16)),
    "smaller": ((1, 8, 9, 9), (4, 3)),
    "one pixel": ((1, 4, 1, 1), (3, 2)),
    "many channels": ((1, 260, 1, 2), (2, 4)),
    "to one": ((1, 3, 4, 4), (1, 1)),
}


def asked(
    name: str, mode: str, corners: bool | None, dtype: str = "float32", **more: Any
) -> Problem:
    shape, made = SIZES[name]
    attrs = {"size": made, "scale_factor": None, "mode": mode, "align_corners": corners,
             "antialias": False, **more}  # fmt: skip
    metas = [
        TensorMeta(shape=s, dtype=dtype, format="channels_last")
        for s in (shape, (*shape[:2], *made))
    ]
    return Problem(op="interpolate", inputs=(metas[0],), outputs=(metas[1],), attrs=attrs)


@runs
@pytest.mark.parametrize("mode", ["corners", "middles", "nearest"])
@pytest.mark.parametrize("name", SIZES)
def test_every_configuration_makes_what_torch_makes(name: str, mode: str) -> None:
    dtype = "float16" if name == "twice" else "float32"
    if (name, mode) == ("thrice and once", "nearest"):
        dtype = "int8"
    corners = None if mode == "nearest" else mode == "corners"
    problem = asked(name, "nearest" if mode == "nearest" else "bilinear", corners, dtype)
    if mode == "nearest" and name in ("odd", "smaller", "to one"):
        assert resize_rows.fits(problem) == "each pixel as often as the others, 16 times at most"
        return
    assert resize_rows.fits(problem) is None
    x = torch.randn(problem["input"].shape, generator=torch.Generator().manual_seed(0))
    x = (x * 40).to(DEVICE, getattr(torch, dtype)).to(memory_format=torch.channels_last)
    right = interpolate(x.double(), **problem.attrs)
    wide = (*problem.output.shape[2:], problem.output.shape[1] + 7)
    for config in resize_rows.configs(problem):
        out = problem.output.empty(x.device).fill_(99)
        assert resize_rows.bind(problem, {}, **config)(x, out=out) is out
        error = (out.double() - right).abs().max() / right.abs().max()
        assert error < (2e-6 if dtype == "float32" else 1e-3)
        whole = torch.full((x.shape[0], *wide), 77.0, dtype=x.dtype, device=x.device)
        whole = whole.permute(0, 3, 1, 2)  # a slice of the channels of a larger tensor
        part = TensorMeta(shape=tuple(whole.shape), dtype=dtype, format="channels_last")
        sliced = Problem(
            op="interpolate", inputs=problem.inputs, attrs=problem.attrs,
            outputs=(part.part(1, problem.output.shape[1]),),
        )  # fmt: skip
        resize_rows.bind(sliced, {}, **config)(x, out=whole[:, : problem.output.shape[1]])
        assert torch.equal(whole[:, : problem.output.shape[1]], out)
        assert (whole[:, problem.output.shape[1] :] == 77).all()


@pytest.mark.parametrize("kernel", [resize, resize_rows])
def test_a_scale_that_makes_whole_sizes_is_a_size(kernel: Any) -> None:
    whole = asked("twice", "bilinear", False, size=None, scale_factor=(2.0, 2.0))
    assert kernel.fits(whole) is None
    rounded = asked("odd", "bilinear", False, size=None, scale_factor=(1.6, 3.3))
    assert "no whole size" in kernel.fits(rounded)
