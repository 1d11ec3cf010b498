"""The special functions of Hopper epilogues, in NumPy's float32, against float64."""

from __future__ import annotations

import numpy as np
import torch

from tessella.kernels.epilogue import gluon_device as epilogue_device
from tests.support.emulators import gluon_on_numpy


def test_gelu_is_right_on_both_sides_of_zero() -> None:
    x = np.concatenate([np.linspace(-12, 12, 100_001), [-1e4, 1e4, -0.0, 1e-30]]).astype(np.float32)
    names = {**gluon_on_numpy.NAMES, "gl": gluon_on_numpy.Language(0, 1, 4)}
    made = gluon_on_numpy.function(epilogue_device.gelu, names)(x.view(gluon_on_numpy.Array))
    exact = torch.tensor(x, dtype=torch.float64)
    right = (0.5 * exact * torch.erfc(-exact / 2**0.5)).numpy()
    error = np.abs(np.asarray(made, dtype=np.float64) - right)
    near = np.abs(x) < 4
    assert (error[near] <= 1e-4 * np.abs(right[near])).all()
    assert (error[~near] <= 2e-5 + 1e-7 * np.abs(x[~near])).all()
    assert np.isnan(gluon_on_numpy.function(epilogue_device.gelu, names)(
        np.array([np.nan], np.float32).view(gluon_on_numpy.Array)
    )).all()  # fmt: skip


def test_a_floor_stands_where_a_residual_has_its_factor() -> None:
    torch.manual_seed(0)
    rows, scale, bias = torch.randn(8, 16), torch.rand(16), torch.randn(16)
    names = {**gluon_on_numpy.NAMES, "gl": gluon_on_numpy.Language(0, 1, 4)}
    tensors = (t.numpy().view(gluon_on_numpy.Array) for t in (rows, scale, bias))
    finish = gluon_on_numpy.function(epilogue_device.finish, names)
    made = finish(*tensors, None, 1.0, -0.25, 3.0, "floor", np.dtype("f4"))
    right = 3 * (rows.double() * scale + bias).clamp(min=-0.25)
    np.testing.assert_allclose(np.asarray(made), right.numpy(), rtol=1e-5, atol=1e-5)
