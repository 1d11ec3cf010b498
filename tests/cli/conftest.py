"""The command line in this process: ``tessella("show", path)`` gives exit code and output."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tessella.core.preprocess import encode
from tests.support.cli import Tessella, in_process


@pytest.fixture
def tessella(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tessella:
    return in_process(monkeypatch, capsys)


@pytest.fixture(scope="session")
def blobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two classes, bright above and bright below, 20 images each."""
    folder = tmp_path_factory.mktemp("cli") / "blobs"
    noise = np.random.default_rng(0)
    for label, rows in (("above", slice(0, 6)), ("below", slice(6, 12))):
        for index in range(20):
            image = noise.integers(0, 60, (12, 12, 1))
            image[rows] += 150
            path = folder / label / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encode(image.astype(np.uint8)))
    return folder
