"""Pictures whose names are no UTF-8, in annotations, masks and volumes: imported under a text."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tessella.artifacts.dataset import Dataset
from tessella.core.tiles import Tiles
from tessella.data import ImportSettings, cut, import_images


@pytest.mark.parametrize("task", ["detection", "segmentation", "volumes"])
def test_names_that_are_no_utf8_are_told_in_text(task: str, tmp_path: Path) -> None:
    """Those on disk, which JSON can say too, and halves of characters, which no file is called."""
    odd, shown = os.fsdecode(b"gr\xfc.png"), "gr\\xfc.png"
    for name in ("images", "labels", "masks"):
        (tmp_path / name).mkdir()
    if task == "volumes":
        odd, shown = odd.replace("png", "npy"), shown.replace("png", "npy")
    for n, name in enumerate(("a" + odd[-4:], odd)):
        if task == "volumes":
            np.save(tmp_path / "images" / name, np.full((8, 8, 8), n))
            np.save(tmp_path / "labels" / name, np.full((8, 8, 8), n, np.uint8))
        else:
            Image.new("RGB", (8, 8), (n, 9, 9)).save(tmp_path / "images" / name)
            Image.new("L", (8, 8), n).save(tmp_path / "masks" / name)
    source = tmp_path
    if task == "detection":
        names = ("a.png", odd, "\ud800.png")
        pictures = [
            {"id": n, "file_name": f"images/{name}", "height": 8, "width": 8}
            for n, name in enumerate(names)
        ]
        things = [
            {"id": n, "image_id": n, "category_id": 1, "bbox": [1, 1, 5, 5]} for n in range(3)
        ]
        source, classes = tmp_path / "a.json", [{"id": 1, "name": "half \udc41"}]
        made = {"images": pictures, "categories": classes, "annotations": things}
        source.write_text(json.dumps(made))
        assert images_cut(source, tmp_path / "tiles")
    settings = ImportSettings(task=task, size=8, holdout=0.0)
    dataset = import_images(source, tmp_path / "data", settings)
    stored = [e.path for e in Dataset(tmp_path / "data").train]
    assert {Path(path).name for path in stored} == {"a" + odd[-4:], shown}
    if task == "detection":
        assert dataset.classes == ("half \\udc41",)
        assert [Path(s.path).name for s in dataset.info.skipped] == ["\\ud800.png"]


def images_cut(source: Path, out: Path) -> bool:
    """Whether its tiles are imported, in groups of one picture each."""
    cut(source, out, Tiles(height=8, width=8, overlap=0), task="detection")
    found = import_images(out, out.parent / "cut", ImportSettings(task="detection", size=8))
    return sum(len(found.split(name)) for name in found.info.splits) == 2
