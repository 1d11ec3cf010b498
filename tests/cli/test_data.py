"""``tessella data doctor``: findings are listed, a fix is a new dataset."""

from __future__ import annotations

import shutil
from pathlib import Path

from tessella.artifacts.dataset import Dataset
from tessella.data import examine, images
from tests.support.cli import Tessella


def test_the_doctor_lists_and_fixes(tessella: Tessella, blobs: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(blobs, tmp_path / "blobs")
    shutil.copy(folder / "above" / "3.png", folder / "above" / "30.png")
    shutil.copy(folder / "above" / "4.png", folder / "below" / "40.png")
    images(folder, size=12, channels=1, holdout=0.2, out=tmp_path / "data")
    said = tessella("data", "doctor", tmp_path / "data", "--json")
    assert said.code == 0, said.err
    kinds = {finding["kind"]: finding["groups"] for finding in said.json["findings"]}
    assert [sorted(place.split(":")[1] for place in group) for group in kinds["conflicts"]] == [
        ["above/4.png", "below/40.png"]
    ]
    assert "below/40.png" in tessella("data", "doctor", tmp_path / "data").out
    fix = ("--fix", "conflicts", "--out", tmp_path / "clean")
    fixed = tessella("data", "doctor", tmp_path / "data", *fix)
    assert fixed.code == 0, fixed.err
    assert "conflicts" not in {f.kind for f in examine(Dataset(tmp_path / "clean")).findings}
    assert "say where" in tessella("data", "doctor", tmp_path / "data", "--fix", "leaks").err
    trained = tessella("train", "lenet", folder, "--out", tmp_path / "run")
    assert f"tessella data import {folder} --out" in trained.err
    refused = tessella(
        "data", "doctor", tmp_path / "data", "--fix", "imbalance", "--out", tmp_path / "x"
    )
    assert "cannot be fixed by leaving images out" in refused.err
