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
