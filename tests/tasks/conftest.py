"""The command line in this process."""

from __future__ import annotations

import pytest

from tests.support.cli import Tessella, in_process


@pytest.fixture
def tessella(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tessella:
    return in_process(monkeypatch, capsys)
