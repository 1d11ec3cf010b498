"""What maps show in boxes: the operation beside torchvision's ``roi_align``, level by level."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torchvision.ops import roi_align

from tessella.kernels.detect import regions
from tessella.operations.problem import Problem
from tessella.operations.reference.detect import pyramid_roi_align
from tessella.operations.tensor_meta import TensorMeta

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SIZES, STRIDES = (12, 16, 6, 8, 3, 4), (4, 8, 16)


def right(
    maps: list[torch.Tensor], boxes: torch.Tensor, levels: torch.Tensor, side: int, samples: int
) -> torch.Tensor:
    """torchvision's, of each box by itself."""
    told = []
    for image, (boxes_P4, levels_P) in enumerate(zip(boxes, levels, strict=True)):
        for box, level in zip(boxes_P4, levels_P.tolist(), strict=True):
            map, stride = maps[level][image : image + 1], STRIDES[level]
            told.append(roi_align(map, [box[None]], side, 1 / stride, samples, aligned=False)[0])
    return torch.stack(told).unflatten(0, boxes.shape[:2])


def asked(tensors: list[torch.Tensor], dtype: str, **attrs: int) -> Problem:
    value, boxes, _ = tensors
    side = attrs["side"]
    shape = (*boxes.shape[:2], value.shape[2], side, side)
    metas = tuple(
        TensorMeta(shape=tuple(t.shape), dtype=d)
        for t, d in zip(tensors, (dtype, "float32", "int64"), strict=True)
    )
    return Problem(
        op="pyramid_roi_align", inputs=metas, outputs=(TensorMeta(shape=shape, dtype=dtype),),
        attrs={"sizes": SIZES, "strides": STRIDES, **attrs},
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("side", "samples"), [(7, 2), (3, 1), (2, 3)])
def test_the_reference_is_torchvision_s(dtype: torch.dtype, side: int, samples: int) -> None:
    """Also of boxes at the edges, far outside, of no area, and of corners the wrong way round."""
    generator = torch.Generator().manual_seed(side)
    maps = [
        torch.randn(2, 5, h, w, generator=generator, dtype=torch.float64)
        for h, w in zip(SIZES[::2], SIZES[1::2], strict=True)
    ]
    low = torch.rand(2, 20, 2, generator=generator, dtype=torch.float64) * 60 - 10
    boxes = torch.cat([low, low + torch.rand(2, 20, 2, generator=generator).double() * 40], 2)
    boxes[0, 0] = torch.tensor([0, 0, 64, 48])
    boxes[0, 1] = torch.tensor([500, 500, 600, 600])
    boxes[0, 2] = torch.tensor([10, 10, 10, 10])
    boxes[0, 3] = torch.tensor([30, 30, 10, 20])
    boxes[0, 4] = torch.tensor([-4.0, -4.0, 3.0, 3.0])
    levels = torch.randint(0, 3, (2, 20), generator=generator)
    value = torch.cat([m.flatten(2).mT for m in maps], 1).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    asked_of = levels.double() if dtype == torch.float64 else levels  # as what is right is asked
    made = pyramid_roi_align(
        value, boxes.to(wide), asked_of, sizes=SIZES, strides=STRIDES, side=side, samples=samples
    )
    rounded = [m.to(dtype).double() for m in maps]
    wanted = right(rounded, boxes.to(wide).double(), levels, side, samples)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    assert made.dtype == dtype
    torch.testing.assert_close(made.double(), wanted, atol=tolerance, rtol=tolerance)
    if dtype != torch.float32 or not INTERPRETED:
        return
    given = [value, boxes.to(wide), levels]
    problem = asked(given, "float32", side=side, samples=samples)
    assert regions.fits(problem) is None
    apart = torch.cat([torch.full_like(value, torch.nan), value], 2)[..., value.shape[2] :]
    for config in regions.configs(problem)[:2]:
        out = torch.full(wanted.shape, torch.nan)
        made = regions.bind(problem, {}, **config)(apart, *given[1:], out=out)
        torch.testing.assert_close(made.double(), wanted, atol=tolerance, rtol=tolerance)


def test_boxes_that_are_no_numbers_and_levels_that_there_are_not_read_no_other_memory() -> None:
    value = torch.ones(1, 252, 3)
    boxes = torch.tensor([[[float("nan")] * 4, [float("inf")] * 4, [0, 0, 16, 16]]])
    levels = torch.tensor([[0, -7, 99]])
    made = pyramid_roi_align(value, boxes, levels, sizes=SIZES, strides=STRIDES, side=2, samples=2)
    assert (made[0, 2] == 1).all()
    assert ((made == 0) | (made == 1) | made.isnan()).all()
    if INTERPRETED:
        problem = asked([value, boxes, levels], "float32", side=2, samples=2)
        out = torch.full(made.shape, torch.nan)
        with np.errstate(invalid="ignore"):  # the interpreter's infinity less infinity
            assert torch.equal(regions.bind(problem, {})(value, boxes, levels, out=out), made)


@pytest.mark.parametrize(
    ("shapes", "attrs", "what"),
    [
        ([(2, 251, 5), (2, 4, 4), (2, 4)], {}, "251 pixels"),
        ([(2, 252, 5), (1, 4, 4), (2, 4)], {}, "takes pixels"),
        ([(2, 252, 5), (2, 4, 5), (2, 4)], {}, "boxes"),
        ([(2, 252, 5), (2, 4, 4), (2, 3)], {}, "levels"),
        ([(2, 252, 5), (2, 4, 4), (2, 4)], {"strides": (4, 8)}, "2 levels"),
        ([(2, 252, 5), (2, 4, 4), (2, 4)], {"samples": 0}, "less than 1"),
        ([(2, 252, 5), (2, 4, 4), (2, 4)], {"sizes": (12, 16, 6, 8, -3, -4)}, "less than 1"),
    ],
)
def test_operands_that_do_not_fit_are_refused(shapes, attrs, what: str) -> None:
    dtypes = ("float32", "float32", "int64")
    metas = tuple(TensorMeta(shape=s, dtype=d) for s, d in zip(shapes, dtypes, strict=True))
    given = {"sizes": SIZES, "strides": STRIDES, "side": 7, "samples": 2, **attrs}
    outputs = (TensorMeta(shape=(2, 4, 5, 7, 7), dtype="float32"),)
    problem = Problem(op="pyramid_roi_align", inputs=metas, outputs=outputs, attrs=given)
    assert what in str(problem.misfit)
