"""Boxes of a map's peaks: the reference and NumPy's kernel beside loops over places."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tessella.kernels.detect import numpy_peaks
from tessella.operations.problem import Problem
from tessella.operations.reference.detect import peak_boxes
from tessella.operations.tensor_meta import Format, TensorMeta

CPU = torch.device("cpu")
STEP = {"down": 0.11, "along": 0.07}


def asked(shape: tuple[int, int, int, int], most: int, format: Format) -> Problem:
    n, c, _, _ = shape
    return Problem(
        op="peak_boxes",
        inputs=(TensorMeta(shape=shape, dtype="float32", format=format),),
        outputs=(TensorMeta(shape=(n, most, c - 1), dtype="float32"),),
        attrs={**STEP, "most": most},
    )


def by_loops(told_CHW: np.ndarray, most: int) -> np.ndarray:
    """In float64: one place after another."""
    c, rows, columns = told_CHW.shape
    found = []
    for y in range(rows):
        for x in range(columns):
            around = told_CHW[0, max(0, y - 1) : y + 2, max(0, x - 1) : x + 2]
            if told_CHW[0, y, x] == around.max():
                found.append((told_CHW[0, y, x], y, x))
    out = np.zeros((most, c - 1))
    for row, (centre, y, x) in zip(out, sorted(found, reverse=True), strict=False):
        left, top, right, bottom = 2 * np.exp(np.minimum(told_CHW[1:5, y, x], 6))
        along, down = STEP["along"], STEP["down"]
        row[:4] = [(x + 0.5 - left) * along, (y + 0.5 - top) * down,
                   (x + 0.5 + right) * along, (y + 0.5 + bottom) * down]  # fmt: skip
        row[:4] = row[:4].clip(0, 1)
        share = np.exp(told_CHW[5:, y, x] - told_CHW[5:, y, x].max())
        row[4:] = share / share.sum() / (1 + np.exp(-centre))
    return out


@pytest.mark.parametrize("format", ["contiguous", "channels_last"])
@pytest.mark.parametrize(
    ("size", "most"), [((12, 14), 100), ((24, 17), 20), ((1, 9), 5), ((3, 1), 9)]
)
def test_peaks(size: tuple[int, int], most: int, format: Format) -> None:
    problem = asked((2, 8, *size), most, format)
    assert numpy_peaks.fits(problem) is None
    call = numpy_peaks.bind(problem, {})
    x, out = problem.inputs[0].empty(CPU), problem.output.empty(CPU)
    for seed in range(3):  # the tensors are the same each time, and what lies there is not
        x.copy_(4 * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        right = np.stack([by_loops(one, most) for one in x.double().numpy()])
        assert call(x, out=out) is out
        np.testing.assert_allclose(out, right, atol=2e-6)
        np.testing.assert_allclose(peak_boxes(x, **STEP, most=most), right, atol=2e-6)
        other = x.clone()
        np.testing.assert_array_equal(call(other, out=torch.empty_like(out)), out)


def test_a_number_that_is_none_is_told() -> None:
    problem = asked((1, 7, 6, 6), 10, "channels_last")
    x = torch.randn(1, 7, 6, 6).contiguous(memory_format=torch.channels_last)
    for place in ((0, 0), (3, 5)):
        broken = x.clone()
        broken[0, 0, *place] = torch.nan
        made = numpy_peaks.bind(problem, {})(broken, out=problem.output.empty(CPU))
        assert made.isnan().any()
        assert peak_boxes(broken, **STEP, most=10).isnan().any()


def test_what_is_left_to_others() -> None:
    problem = asked((1, 7, 6, 6), 10, "channels_last")
    half = replace(problem, inputs=(replace(problem.inputs[0], dtype="float16"),))
    assert numpy_peaks.fits(half) == "float32 alone"
    few = replace(problem, inputs=(replace(problem.inputs[0], shape=(1, 5, 6, 6)),))
    assert "a class at least" in str(few.misfit)
