"""Means of measures of which some have nothing to count."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def mean_known(values_MS: Floats) -> Floats:
    """The mean of each column without its NaNs, [S]; NaN where there is nothing else."""
    known_MS = ~np.isnan(values_MS)
    sums_S = np.where(known_MS, values_MS, 0.0).sum(axis=0)
    return np.where(known_MS.any(axis=0), sums_S / np.maximum(known_MS.sum(axis=0), 1), np.nan)
