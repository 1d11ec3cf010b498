"""Networks of other people: a few compiled here, all of them by the committed run."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torchvision

from benchmarks.coverage import FAMILIES, measure, networks
from benchmarks.report import RESULTS

# Channels shuffled; convolutions and attention; attention over keys that are reduced in space.
FEW = ("shufflenet_v2_x0_5", "mobilevit_xxs", "pvt_v2_b0")


@pytest.mark.parametrize("name", FEW)
def test_a_network_compiles_and_agrees(name: str) -> None:
    (network,) = (n for n in networks() if n.name == name)
    row = measure(network, "cpu")
    assert row["agrees"], row
    assert not row["fallbacks"]


def test_the_committed_run_is_complete() -> None:
    rows = json.loads((RESULTS / "coverage-cpu.json").read_text())["rows"]
    assert [row["network"] for row in rows if not row["agrees"]] == []
    families = Counter(row["source"].partition(",")[0] for row in rows)
    known = set(torchvision.models.list_models(module=torchvision.models))
    assert known <= {row["network"] for row in rows if row["source"] == "torchvision"}
    assert families["timm"] == len(FAMILIES) >= 25
    assert families["transformers"] == 4
