"""A fixture that keeps the timings of tests out of the user's cache."""

from pathlib import Path

import pytest

from tessella.search import functional, report


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    for module in (functional, report):
        monkeypatch.setattr(module, "CACHE_FOLDER", folder)
    monkeypatch.setattr(functional, "_ready", {})
    return folder
