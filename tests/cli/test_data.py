"""``tessella data doctor``: findings are listed, a fix is a new dataset."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tessella.artifacts.dataset import Dataset
from tessella.cli import data
from tessella.core.events import Emit, Event
from tessella.data import examine, images
from tessella.data.importing import import_images
from tests.support.cli import Tessella


def test_a_stopped_import_is_told_and_goes_on_or_is_discarded(
    tessella: Tessella, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(80):
        path = tmp_path / "pictures" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), number).save(path)
    out, left = tmp_path / "my data", tmp_path / ".my data.import"

    def stopped(*size: str) -> str:
        """What is said when Ctrl-C comes as the first images are there."""

        def interrupted(event: Event) -> None:
            if event.kind == "progress":
                raise KeyboardInterrupt

        def ours(*given: Any, emit: Emit) -> Dataset:
            return import_images(*given, emit=lambda e: (emit(e), interrupted(e))[0])

        with monkeypatch.context() as patch:
            patch.setattr(data, "import_images", ours)
            answer = tessella("data", "import", tmp_path / "pictures", "--out", out, *size)
        assert answer.code == 130
        return answer.err

    command = f"tessella data discard '{out}'"
    said = stopped()
    assert "the same command goes on there" in said
    assert command in said
    assert "begins anew" in stopped("--size", "16")
    assert left.is_dir()
    assert command in tessella("train", "lenet", out, "--out", tmp_path / "run").err
    assert tessella("data", "discard", out, "--json").json["removed_bytes"] > 0
    assert not left.exists()
    assert "no stopped import" in tessella("data", "discard", out).err
    stopped()
    for path in (tmp_path / "pictures").rglob("[4-9]?.png"):  # few are read in one go
        path.unlink()
    assert tessella("data", "import", tmp_path / "pictures", "--out", out).code == 0
    assert not left.exists()


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
