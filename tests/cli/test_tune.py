"""``compile --untuned`` and ``tune``, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

from tessella.artifacts.plan import load_plan
from tests.support.cli import Tessella


def test_a_plan_is_built_untuned_and_tuned_where_it_runs(
    tessella: Tessella, tmp_path: Path
) -> None:
    path = tmp_path / "net.plan"
    built = tessella(
        "compile", "lenet", "--inputs", "image:float32:1x1x28x28", "--out", str(path),
        "--target", "cpu", "--batch", "1", "--untuned",
    )  # fmt: skip
    assert built.code == 0
    assert "untuned: nothing was measured" in built.out
    assert load_plan(path).manifest.untuned
    tuned = tessella("tune", str(path), "--out", str(tmp_path / "b.plan"), "--json")
    assert tuned.code == 0
    assert json.loads(tuned.out)["steps"] == len(load_plan(path).program.buckets[0].steps)
    assert not load_plan(tmp_path / "b.plan").manifest.untuned
    assert load_plan(path).manifest.untuned


def test_a_plan_for_another_machine_is_refused_with_what_to_do(
    tessella: Tessella, tmp_path: Path
) -> None:
    path = tmp_path / "net.plan"
    built = tessella(
        "compile", "lenet", "--inputs", "image:float32:1x1x28x28", "--out", str(path),
        "--target", "sm_75", "--batch", "1", "--untuned",
    )  # fmt: skip
    assert built.code == 0
    refused = tessella("tune", str(path))
    assert refused.code != 0
    assert "rebuild it here" in refused.err
