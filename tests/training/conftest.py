"""Small datasets that can be learned in seconds, written without the importer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tessella.training import choosing
from tests.support.training import write_dataset


@pytest.fixture(scope="package", autouse=True)
def _one_thread_of_a_cpu():
    """Bit-for-bit comparisons need the same number of threads everywhere, and no GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _own_times_of_steps(tmp_path, monkeypatch):
    """Not those that the user's trainings have left."""
    monkeypatch.setattr(choosing, "CACHE_FOLDER", tmp_path / "remembered")


@pytest.fixture(scope="session")
def dataset(tmp_path_factory) -> Path:
    """Three classes of 12×12 grey stripes in noise: 40 training and 18 validation images."""
    return write_dataset(tmp_path_factory.mktemp("stripes"), train=40, val=18)


@pytest.fixture
def noise() -> np.random.Generator:
    return np.random.default_rng(0)
