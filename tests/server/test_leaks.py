"""A model that is loaded and asked, unloaded or replaced, again and again leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.leaks import CHANGES, measure
from tests.support.networks import captured, plan


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("plans") / "lenet.plan"
    plan(captured("lenet")).save(made)
    return made


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_grows_with_cycles_of_load_and_infer(path: Path, change: str) -> None:
    before, then, after = measure(path, (8, 16, 16), change=change)
    assert after["descriptors"] <= before["descriptors"]
    # a pool that is shared may have one more at work: one left by each cycle would be 16
    assert after["threads"] - before["threads"] < 6
    # A plan's weights and arena are 1.8 MB and its machine code is mapped: 16 of them would show.
    assert after["mappings"] - before["mappings"] < 16
    # The heap may keep some 20 MB from one cycle on, for good: what is left by each grows in both.
    grown = [b["rss_kb"] - a["rss_kb"] for a, b in ((before, then), (then, after))]
    assert min(grown) < 8 * 1800
