"""Classes of pictures from annotations of boxes, whatever their format."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tessella.annotations import coco, read_annotations
from tessella.core.errors import DataError
from tessella.data import ImportSettings, import_images
from tests.support.cli import Tessella

SIDE = 20
THINGS = {"a": ("cat",), "b": ("cat", "dog", "dog"), "c": (), "d": ("dog",)}
NAMES = ("cat", "dog")
SETTINGS = ImportSettings(task="multilabel", size=8, holdout=0.0)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    (tmp_path / "images").mkdir()
    for name in THINGS:
        pixels = rng.integers(0, 255, (SIDE, SIDE, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{name}.png")
    return tmp_path


def coco_json(root: Path) -> Path:
    images = [
        {"id": k, "file_name": f"images/{n}.png", "height": SIDE, "width": SIDE}
        for k, n in enumerate(THINGS)
    ]
    boxes = [
        {"image_id": k, "category_id": NAMES.index(c), "bbox": [i, 1, 5, 5]}
        for k, names in enumerate(THINGS.values())
        for i, c in enumerate(names)
    ]
    plain = {
        "images": images,
        "categories": [{"id": k, "name": n} for k, n in enumerate(NAMES)],
        "annotations": boxes,
    }
    (root / "annotations.json").write_text(json.dumps(plain))
    return root / "annotations.json"


def yolo_yaml(root: Path) -> Path:
    (root / "labels").mkdir()
    for name, things in THINGS.items():
        lines = [f"{NAMES.index(c)} {0.3 + i / 10} .5 .2 .2" for i, c in enumerate(things)]
        (root / "labels" / f"{name}.txt").write_text("\n".join(lines))
    (root / "data.yaml").write_text("train: images\nnames: [cat, dog]")
    return root / "data.yaml"


def voc_folder(root: Path) -> Path:
    (root / "Annotations").mkdir()
    corners = "<xmin>{}</xmin><ymin>2</ymin><xmax>9</xmax><ymax>9</ymax>"
    for name, things in THINGS.items():
        objects = [
            f"<object><name>{c}</name><bndbox>{corners.format(i + 1)}</bndbox></object>"
            for i, c in enumerate(things)
        ]
        text = f"<annotation><filename>{name}.png</filename>{''.join(objects)}</annotation>"
        (root / "Annotations" / f"{name}.xml").write_text(text)
    return root


def kitti_folder(root: Path) -> Path:
    (root / "labels").mkdir()
    for name, things in THINGS.items():
        lines = [f"{c} 0 0 0 {i} 2 9 9" for i, c in enumerate(things)]
        (root / "labels" / f"{name}.txt").write_text("\n".join(lines))
    return root


@pytest.mark.parametrize("written", [coco_json, yolo_yaml, voc_folder, kitti_folder])
def test_the_classes_of_each_picture_are_imported(pictures: Path, written) -> None:
    source = written(pictures)
    for asked in {source, pictures}:  # the file, and the folder that has it
        dataset = import_images(asked, pictures / f"data {asked.suffix}", SETTINGS)
        assert dataset.classes == NAMES
        targets = {Path(e.path).stem: {NAMES[k] for k in e.label} for e in dataset.train}
        assert targets == {name: set(things) for name, things in THINGS.items()}
        assert not dataset.info.skipped


def test_files_that_name_a_split_are_followed(pictures: Path) -> None:
    yolo_yaml(pictures)
    for place in ("images", "labels"):
        (pictures / "val" / place).mkdir(parents=True)
        (part,) = (pictures / place).glob("d.*")
        part.rename(pictures / "val" / place / part.name)
    text = "train: images\nval: val/images\nnames: [cat, dog]"
    (pictures / "data.yaml").write_text(text)
    settings = ImportSettings(task="multilabel", size=8, holdout=0.5)
    dataset = import_images(pictures, pictures / "data", settings)
    assert [e.path for e in dataset.val] == ["val/images/d.png"]
    assert len(dataset.train) == 3


def test_what_is_broken_is_told_and_the_rest_written_as_coco(
    pictures: Path, tessella: Tessella
) -> None:
    source = yolo_yaml(pictures)
    with (pictures / "labels" / "a.txt").open("a") as file:
        file.write("\n7 .5 .5 .1 .1\n0 9 9 .1 .1\n")
    note = import_images(source, pictures / "data", SETTINGS).info.notes
    assert any("2 problems in the annotations; the first: images/a.png" in n for n in note)
    said = tessella("data", "annotations", source, "--out", pictures / "good.json", "--json")
    assert said.code == 0, said.err
    assert said.json["things"] == {"cat": 2, "dog": 3}
    assert [p["path"] for p in said.json["problems"]] == ["images/a.png"] * 2
    assert "class is unknown: 7" in tessella("data", "annotations", source).out
    again, first = coco.read(pictures / "good.json"), read_annotations(source)
    assert [p.things for p in again.pictures] == [p.things for p in first.pictures]
    assert again.classes == first.classes
    refused = tessella("data", "annotations", pictures / "images")
    assert "no annotations here" in refused.err


def test_crowds_alone_are_refused_where_boxes_are_learned(pictures: Path) -> None:
    source = coco_json(pictures)
    plain = json.loads(source.read_text())
    for thing in plain["annotations"]:
        thing["iscrowd"] = 1
    source.write_text(json.dumps(plain))
    settings = ImportSettings(task="detection", size=8, holdout=0.0)
    with pytest.raises(DataError, match="nothing but crowds"):
        import_images(source, pictures / "data", settings)
    plain["annotations"][0]["iscrowd"] = 0
    source.write_text(json.dumps(plain))
    assert len(import_images(source, pictures / "data", settings).train) == len(THINGS)


def test_a_folder_with_several_files_is_refused(pictures: Path) -> None:
    (pictures / "annotations").mkdir()
    for name in ("one", "two"):  # of splits, which their names tell, they would be one dataset
        (pictures / "annotations" / f"{name}.json").write_text("{}")
    with pytest.raises(DataError, match=r"several files.*one\.json"):
        read_annotations(pictures)
