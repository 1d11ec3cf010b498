"""Pictures that nobody has labelled: imported to be drawn on, and learned from what was drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from tessella.artifacts.run import Recipe
from tessella.core.errors import DataError, UsageError
from tessella.data.importing import ImportSettings, import_images
from tessella.studio.drawn import Drawn
from tessella.studio.import_form import Settings
from tessella.training.prepare import describe_run

SIZE = 32
SQUARE = [4, 6, 12, 6, 12, 20, 4, 20]
DRAWN: dict[str, tuple[str, str, Any, str]] = {  # a thing may be called background, too
    "detection": ("centernet", "cat background", [[4, 6, 12, 20, 1, 0]], "train.json"),
    "instances": (
        "mask_rcnn", "cat background", [{"label": 1, "polygon": SQUARE, "crowd": 0}], "train.json"
    ),
    "segmentation": (
        "unet", "background cat dog", [{"label": 2, "polygon": SQUARE}], "train"
    ),
}  # fmt: skip


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    (tmp_path / "photos" / "more").mkdir(parents=True)
    for number in range(5):
        name = tmp_path / "photos" / ("more" if number > 2 else "") / f"{number}.png"
        cv2.imwrite(str(name), np.full((SIZE, SIZE, 3), 40 * number, np.uint8))
    return tmp_path / "photos"


def grey_of(png: bytes) -> int:
    pixels = cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_GRAYSCALE)
    assert pixels is not None
    return int(pixels[0, 0])


@pytest.mark.parametrize("task", DRAWN)
def test_what_is_drawn_is_exported_without_the_other_pictures(
    pictures: Path, tmp_path: Path, task: str
) -> None:
    network, classes, things, made = DRAWN[task]
    names = tmp_path / "names.txt"
    names.write_text(classes.replace(" ", "\n"))
    settings = ImportSettings(task=task, size=SIZE, holdout=0.2, labels=names)
    dataset = import_images(pictures, tmp_path / "data", settings)
    argv = Settings.of(dataset).spec(str(pictures), "again").argv
    assert argv[argv.index("--labels") + 1] == str(names)
    assert dataset.classes == tuple(classes.split())
    assert (len(dataset.train), len(dataset.val)) == (4, 1)
    with pytest.raises(DataError, match="nothing is labelled"):
        describe_run(Recipe(network=network, dataset=str(dataset.path)))

    drawn = Drawn(tmp_path / "annotations")
    with pytest.raises(UsageError, match="nothing is drawn yet"):
        drawn.export(dataset, tmp_path / "out")
    drawn.save(dataset, "train", 1, things)
    drawn.save(dataset, "train", 3, [])  # somebody says that there is nothing
    files = drawn.export(dataset, tmp_path / "out")
    assert files == {"train": tmp_path / "out" / made}
    again = import_images(
        files["train"], tmp_path / "again", ImportSettings(task=task, size=SIZE, holdout=0.0)
    )
    assert again.classes == dataset.classes
    assert again.info.splits["train"].class_counts[-2:] == (0, 1)
    shown = [grey_of(example.content) for example in again.train]
    assert shown == [grey_of(dataset.train[index].content) for index in (1, 3)]
    assert describe_run(Recipe(network=network, dataset=str(again.path))).labels == again.classes


def test_a_folder_with_other_files_is_not_taken_for_unlabelled(
    pictures: Path, tmp_path: Path
) -> None:
    (pictures / "more" / "3.xml").write_text("<annotation/>")
    settings = ImportSettings(task="detection", size=SIZE, labels=("cat",))
    with pytest.raises(DataError, match="no annotations here"):
        import_images(pictures, tmp_path / "data", settings)
