"""``tessella --device cuda:1 VERB``: one GPU is seen, or the machine's are named."""

from __future__ import annotations

import os

import pytest

from tessella.core.errors import UsageError
from tests.support.cli import Tessella


def test_the_command_hides_the_other_gpus(
    tessella: Tessella, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    refused = tessella("--device", "cuda:1", "show", "networks")
    assert refused.code == UsageError.exit_code
    assert "no GPU cuda:1" in refused.err
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    for words in (("--device", "cpu", "show", "networks"), ("show", "networks", "--device=cpu")):
        assert tessella(*words, "--json").code == 0
        assert os.environ.pop("CUDA_VISIBLE_DEVICES") == ""
