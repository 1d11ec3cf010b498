"""The import that a dataset's page offers makes the same dataset once more."""

from __future__ import annotations

import json
from pathlib import Path

from tessella.artifacts.dataset import Dataset
from tessella.data.importing import ImportSettings, import_images
from tessella.studio.import_form import Settings
from tests.support.pictures.folders import write_folder_of


def test_a_dataset_says_how_it_was_split(tmp_path: Path) -> None:
    for name in ("train pictures", "other"):
        write_folder_of(tmp_path / name, {"a": 4, "b": 4})
    settings = ImportSettings(size=8, val_folder=tmp_path / "other", seed=3, name="x")
    made = import_images(tmp_path / "train pictures", tmp_path / "out", settings)
    argv = Settings.of(made).spec("train pictures", "again").argv
    assert argv[argv.index("--val-folder") + 1] == str(tmp_path / "other")
    assert argv[argv.index("--seed") + 1] == "3"
    assert "--holdout" not in argv


def test_a_description_that_somebody_else_wrote(tmp_path: Path) -> None:
    """What is no setting of a split, or of another type, is left out."""
    write_folder_of(tmp_path / "pictures", {"a": 4, "b": 4})
    import_images(tmp_path / "pictures", tmp_path / "out", ImportSettings(size=8, name="x"))
    path = tmp_path / "out" / "dataset.json"
    plain = json.loads(path.read_text())
    plain["settings"] = {"holdout": "all", "seed": [1], "val_folder": 7, "name": "y", "test": 0.5}
    path.write_text(json.dumps(plain))
    argv = Settings.of(Dataset(tmp_path / "out")).spec("pictures", "again").argv
    assert argv[argv.index("--test") + 1] == "0.5"
    assert "--val-folder" not in argv
