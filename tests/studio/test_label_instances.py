"""The labelling tool for instances: outlined in Chromium, checked, saved, imported again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from tessella.annotations import coco, rle
from tessella.artifacts.dataset import Dataset
from tessella.core.errors import UsageError
from tessella.core.preprocess import Preprocess
from tessella.data.importing import ImportSettings, import_images
from tessella.studio.drawn import Drawn
from tessella.studio.drawn_instances import MOST_THINGS, checked, proposed, stored
from tessella.tasks import View
from tests.support.studio.browsing import enter, fit, press, resize, see, until
from tests.support.studio.labelling import Tool
from tests.support.studio.served import Served, serve, stop

SIZE = 64
CLASSES = ("größe", "<b>two</b>")
TRIANGLE = [1, 1, 40, 5, 20, 50]
WHOLE = rle.compressed(np.array([0, SIZE * SIZE])).decode()
EMPTY = rle.compressed(np.array([SIZE * SIZE])).decode()


def text_of(*rectangles: tuple[int, int, int, int]) -> str:
    """The run lengths of rectangles of rows and columns."""
    mask = np.zeros((SIZE, SIZE), np.uint8)
    for top, bottom, left, right in rectangles:
        mask[top:bottom, left:right] = 1
    return rle.compressed(rle.counts_of(mask)).decode()


THINGS = [
    (1, 0, [10.0, 10, 30, 10, 30, 30, 10, 30]),
    (0, 0, [25.0, 15, 45, 15, 45, 40, 25, 40]),  # over the first one
    (0, 1, text_of((50, 60, 2, 9), (50, 60, 20, 33))),
]


def write_pictures(folder: Path, count: int) -> Path:
    """COCO's JSON beside pictures with two things that overlap, and a crowd in two parts."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    images, entries = [], []
    for i in range(1, count + 1):
        Image.fromarray(rng.integers(0, 99, (SIZE, SIZE, 3), np.uint8)).save(folder / f"{i}.png")
        images.append({"id": i, "file_name": f"{i}.png", "height": SIZE, "width": SIZE})
        for label, crowd, shape in THINGS:
            mask: Any = {"size": [SIZE, SIZE], "counts": shape}
            mask = mask if crowd else [shape]
            entry = {"id": len(entries) + 1, "image_id": i, "category_id": label, "iscrowd": crowd}
            entries.append(entry | {"segmentation": mask})
    categories = [{"id": k, "name": name} for k, name in enumerate(CLASSES)]
    document = {"images": images, "categories": categories, "annotations": entries}
    (folder / "things.json").write_text(json.dumps(document))
    return folder / "things.json"


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A studio on a dataset of instances."""
    root = tmp_path_factory.mktemp("instances") / "work"
    train, val = (write_pictures(root / "pictures" / s, n) for s, n in (("train", 2), ("val", 1)))
    settings = ImportSettings(task="instances", size=SIZE, val_folder=str(val))
    import_images(train, root / "datasets" / "things", settings)
    process, served = serve(root, scheduler=False)
    yield served
    stop(process)


@pytest.mark.parametrize(
    "things",
    [
        None, {"label": 0}, [None], [{"label": 0}], [{"label": 2, "rle": WHOLE}],
        [{"label": 255, "rle": WHOLE}], [{"label": 0, "rle": WHOLE, "crowd": 2}],
        [{"label": 0, "rle": WHOLE, "crowd": True}], [{"label": 0, "rle": EMPTY}],
        [{"label": 0, "polygon": [1, 1, 9, 1, 20, 1.5]}],
        [{"label": 0, "polygon": [1, 1, 9, 9, 9, SIZE + 1], "crowd": 0}],
        [{"label": 0, "polygon": TRIANGLE}] * (MOST_THINGS + 1),
    ],
)  # fmt: skip
def test_what_is_no_list_of_things_is_refused(things: Any) -> None:
    with pytest.raises(UsageError):
        checked(things, len(CLASSES), (SIZE, SIZE))


def test_what_a_network_answers_is_proposed(labelled: Served) -> None:
    """The surest is drawn last; of a class that the dataset has not, or of no pixel, nothing is."""
    mask = {"size": [SIZE, SIZE], "counts": text_of((3, 9, 4, 20))}
    told = [
        {"label": CLASSES[1], "score": 0.9, "mask": mask},
        {"label": "unknown", "score": 0.8, "mask": mask},
        {"label": CLASSES[0], "score": 0.7, "mask": mask},
        {"label": CLASSES[0], "score": 0.6, "mask": {"size": [SIZE, SIZE], "counts": EMPTY}},
    ]
    view = View(height=SIZE, width=SIZE, record=Preprocess(height=32, width=32))
    made = proposed(told, CLASSES, view)
    assert [(t["label"], t["rle"]) for t in made] == [(0, mask["counts"]), (1, mask["counts"])]
    assert checked([dict(t) for t in made], 2, (SIZE, SIZE)) == tuple(made)


def test_versions_stay_and_an_export_is_imported_again(labelled: Served, tmp_path: Path) -> None:
    """Each thing keeps its whole mask, where another lies over it, too, and a crowd stays one."""
    dataset = Dataset(labelled.root / "datasets" / "things")
    drawn = Drawn(tmp_path / "annotations")
    own = [dict(t) for t in stored(dataset, "train", 0)]
    assert [(t["label"], t["crowd"]) for t in own] == [t[:2] for t in THINGS]
    over = {"label": 1, "polygon": [12, 5, 28, 5, 28, 45, 12, 45], "crowd": 0}
    assert drawn.save(dataset, "train", 0, [*own, over], since=0) == 1
    files = drawn.export(dataset, tmp_path / "out")
    assert not coco.read(files["train"]).problems
    settings = ImportSettings(task="instances", size=SIZE, val_folder=str(files["val"]))
    again = import_images(files["train"], tmp_path / "again", settings)
    assert again.classes == dataset.classes
    made = again.split("train")[0].label
    assert made["crowds"] == [0, 0, 1, 0]
    assert [bytes(m).decode() for m in made["masks"]][:3] == [t["rle"] for t in own]
    assert bytes(made["masks"][3]).decode() == text_of((5, 45, 12, 28))
    assert made["boxes"][3] == [12, 5, 28, 45]
    assert again.split("train")[1].label == dataset.split("train")[1].label
    assert again.split("val")[0].label == dataset.split("val")[0].label


@pytest.mark.browser
def test_things_are_outlined_and_told_apart(labelled: Served, chromium) -> None:
    """A thing inside of another is seen, chosen and taken out of it; a zoomed place is the same."""
    dataset = Dataset(labelled.root / "datasets" / "things")
    resize(chromium, 1280, 900)
    enter(chromium, labelled, "/image?dataset=datasets/things&split=train&index=0")
    press(chromium, "Draw outlines")
    tool = Tool(chromium)
    until(lambda: tool.shown()[20, 12] == 120, what="the dataset's own things")
    assert tool.shown()[20, 10] == 255  # an edge
    names = chromium.execute_script(
        "return [...document.querySelectorAll('.editor .name')].map(n => n.textContent)"
    )
    assert names == [CLASSES[1], CLASSES[0], f"{CLASSES[0]} (crowd)"]
    tool.keys("1")
    tool.click((2, 2), (60, 2), (60, 48), (2, 48), (2, 2))  # around all but the crowd
    until(lambda: tool.shown()[45, 5] == 190)
    tool.keys("c", "v")
    tool.click((13, 20))  # what is smaller lies above
    until(lambda: tool.shown()[20, 13] == 190)
    tool.keys("u")  # out of the two others
    for _ in range(3):
        ActionChains(chromium).key_down(Keys.CONTROL).send_keys("z").key_up(Keys.CONTROL).perform()
    until(lambda: tool.shown()[45, 5] == 0)
    for _ in range(3):
        ActionChains(chromium).key_down(Keys.CONTROL).send_keys("y").key_up(Keys.CONTROL).perform()
    tool.keys("+", "+", "+", "a", "2")
    until(lambda: tool.svg.rect["width"] > 1.5 * chromium.execute_script(
        "return document.querySelector('.editor .window').getBoundingClientRect().width"
    ))  # fmt: skip
    tool.click((40, 30), (48, 30), (48, 38), (40, 38), (40, 30))
    tool.keys("-", "-", "-")
    number = str(chromium.find_element("css selector", ".editor").get_attribute("id"))[1:]
    found = [{"label": 1, "rle": text_of(r), "crowd": 0} for r in ((30, 38, 41, 48), (4, 9, 4, 9))]
    chromium.execute_script(f"editing.propose({number}, {json.dumps(found)})")
    tool.keys("p", Keys.ENTER)  # of two proposals one is drawn already
    tool.with_control("s")
    see(chromium, "Saved as version 1")
    (file,) = (labelled.root / ".studio" / "annotations").glob("*.jsonl")
    saved = checked(json.loads(file.read_text())["outlines"], 2, (SIZE, SIZE))
    drawn = Drawn(labelled.root / ".studio" / "annotations")
    assert drawn.of(dataset, "train", 0) == saved
    assert [(t["label"], t["crowd"]) for t in saved] == [
        (1, 0),
        (0, 0),
        (0, 1),
        (0, 1),
        (1, 0),
        (1, 0),
    ]
    masks = [_mask(t) for t in saved]
    assert masks[0].sum() == 400
    assert masks[1].sum() == 500 - 5 * 15
    around = np.zeros((SIZE, SIZE), np.uint8)
    around[2:48, 2:60] = 1
    around[10:30, 10:30] = 0
    assert (masks[3] != around).mean() < 0.05  # but for pixels at the edge
    np.testing.assert_allclose(saved[4]["polygon"], [40, 30, 48, 30, 48, 38, 40, 38], atol=0.2)
    assert masks[5].sum() == 25
    for width in (1280, 390):
        resize(chromium, width, 900)
        fit(chromium, width, "label")
    press(chromium, "Export")
    see(chromium, "tessella data import annotations/things-outlines-1/train.json --out")
    see(chromium, "--task instances")


def _mask(thing: Any) -> Any:
    if "rle" in thing:
        return rle.mask_of(rle.expanded(thing["rle"].encode()), SIZE, SIZE)
    return rle.mask_of(rle.of_polygons([thing["polygon"]], SIZE, SIZE), SIZE, SIZE)
