"""Boxes over pictures: where the target has them, and the network's beside the truth."""

from __future__ import annotations

import io
import re
from base64 import b64decode
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from xml.etree import ElementTree

import cv2
import numpy as np
import pytest
from PIL import Image
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tessella import api
from tessella.artifacts.dataset import Dataset
from tessella.artifacts.run import Augment
from tessella.core.events import silent
from tessella.core.preprocess import decode
from tessella.core.record import canonical_json, to_plain
from tessella.data.importing import ImportSettings, import_images
from tessella.data.joining import drawn_pieces, made_of
from tessella.quickstart.scattered import write_scattered
from tessella.studio.boxes import svg
from tessella.studio.charts import shorten
from tessella.tasks import named, targets_of
from tessella.tasks.detection.errors import match
from tessella.tasks.thing import Thing
from tests.support.studio.browsing import enter, fit, go, resize, see, until
from tests.support.studio.served import Served, serve, stop
from tests.support.studio.workspaces import write_box_answers

OVERLAY = "data:image/svg+xml;base64,"
RECT = "{http://www.w3.org/2000/svg}rect"
TEXT = "{http://www.w3.org/2000/svg}text"


@pytest.fixture(scope="module")
def detecting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A studio on a dataset with boxes and a run that has learned nothing."""
    root = tmp_path_factory.mktemp("boxes") / "work"
    train, val = write_scattered(root / "pictures", count=6, val=3, size=64, digits=(0, 1))
    settings = ImportSettings(task="detection", size=64, val_folder=val)
    dataset = import_images(train, root / "datasets" / "digits", settings)
    api.train(
        "centernet", dataset, out=root / "runs" / "digits", epochs=1, batch_size=6,
        network_options={"backbone": "test_resnet", "width": 8}, emit=silent,
    )  # fmt: skip
    process, served = serve(root, scheduler=False)
    yield served
    stop(process)


def frames(source: str) -> list[list[float]]:
    """The boxes of an overlay, x y width height, without the grounds of names."""
    drawing = ElementTree.fromstring(b64decode(source.removeprefix(OVERLAY)))
    rects = [r for r in drawing.iter(RECT) if r.get("fill") == "none"]
    return [[float(r.get(n, "")) for n in ("x", "y", "width", "height")] for r in rects]


def boxes_of(root: Path, split: str) -> list[list[list[float]]]:
    rows = [e.label["boxes"] for e in Dataset(root / "datasets" / "digits").split(split)]
    return [[[x0, y0, x1 - x0, y1 - y0] for x0, y0, x1, y1 in boxes] for boxes in rows]


def test_a_dataset_s_pictures_have_their_boxes(detecting: Served) -> None:
    with closing(detecting.client()) as client:
        page = client.get("/data", params={"dataset": "datasets/digits"}).text
        assert "tessella sweep centernet" in client.get("/search").text  # a network of the task
    overlays = re.findall(rf"{re.escape(OVERLAY)}[A-Za-z0-9+/=]+", page)
    seen = sorted(box for source in overlays for box in frames(source))
    wanted = sorted(box for boxes in boxes_of(detecting.root, "train") for box in boxes)
    assert len(overlays) == 6
    assert seen == [pytest.approx(box, abs=0.01) for box in wanted]


def test_a_training_is_shown_as_it_sees_its_pictures(detecting: Served) -> None:
    """A mosaic with its boxes, which frame what its own targets say; a wrong setting is told."""
    dataset = Dataset(detecting.root / "datasets" / "digits")
    record, targets = dataset.preprocess, targets_of(dataset.train)
    changes = Augment(mosaic=1.0)

    def pixels_of(index: int) -> np.ndarray:
        return decode(dataset.train[index].content, record)

    pieces = drawn_pieces(changes, record, (0, 0), 4, targets)
    seen, moves = made_of(4, pieces, pixels_of, changes, record, (0, 0))
    query = {"dataset": "datasets/digits", "index": 4}
    with closing(detecting.client()) as client:
        told = canonical_json(to_plain(changes))
        response = client.get("/pictures/trained", params={**query, "changes": told})
        shown = np.asarray(Image.open(io.BytesIO(response.content))).astype(int)
        for wrong in ('{"mosaic": 3}', "[]", '{"cut": 1}', "{"):
            refused = client.get("/pictures/trained", params={**query, "changes": wrong})
            assert (refused.status_code, "Traceback" in refused.text) == (400, False)
        page = client.get("/train", params={"dataset": "datasets/digits"}).text
    assert page.count("/pictures/trained") >= 6
    framed = np.zeros(shown.shape[:2], bool)
    for x0, y0, x1, y1, _, _ in targets.batch(np.array([4]), [moves])[0] * [64, 64, 64, 64, 1, 1]:
        left, top, right, bottom = round(x0), round(y0), round(x1) - 1, round(y1) - 1
        framed[top : bottom + 1, [left, right]] = framed[[top, bottom], left : right + 1] = True
    differs = (shown != seen).any(axis=2)
    assert len(pieces) == 4
    assert differs.any()
    assert differs.sum() > 0.7 * framed.sum()
    assert not (differs & ~cv2.dilate(framed.astype(np.uint8), np.ones((3, 3))).astype(bool)).any()


@pytest.mark.browser
def test_boxes_lie_over_their_picture_and_beside_the_truth(detecting: Served, chromium) -> None:
    enter(chromium, detecting, "/image?dataset=datasets/digits&split=val&index=1")
    picture, overlay = until(
        lambda: (
            (found := chromium.find_elements(By.CSS_SELECTOR, ".boxed img"))
            and len(found) == 2
            and all(chromium.execute_script("return arguments[0].naturalWidth", f) for f in found)
            and found
        )
    )
    assert picture.rect == overlay.rect
    sizes = "return [arguments[0].naturalWidth, arguments[0].naturalHeight]"
    assert chromium.execute_script(sizes, picture) == chromium.execute_script(sizes, overlay)
    go(chromium, detecting, "/explore?run=runs/digits")
    until(lambda: chromium.find_elements(By.CSS_SELECTOR, ".thumb"))[0].click()
    pair = until(
        lambda: (
            (found := chromium.find_elements(By.CSS_SELECTOR, ".beside .boxed"))
            and len(found) == 2
            and found
        ),
        60,
    )
    truth = pair[1].find_element(By.CSS_SELECTOR, "img.boxes").get_attribute("src")
    wanted = boxes_of(detecting.root, "val")[0]
    assert sorted(frames(truth)) == [pytest.approx(box, abs=0.01) for box in sorted(wanted)]


def slide(chromium, label: str, *keys: str) -> None:
    script = "document.querySelector(`[aria-label='${arguments[0]}'] [tabindex]`).focus()"
    chromium.execute_script(script, label)
    ActionChains(chromium).send_keys(*keys).perform()


@pytest.mark.browser
def test_errors_of_a_detector_follow_the_sliders_without_a_network(
    detecting: Served, chromium
) -> None:
    """Missed, taken for another class, and told of nothing; and the same from the functions."""
    dataset = Dataset(detecting.root / "datasets" / "digits")
    checkpoint = api.open_checkpoint(detecting.root / "runs" / "digits")
    rows = write_box_answers(detecting.root, checkpoint, dataset)
    seen = match(rows, targets_of(dataset.val), 0.5)

    def counts(threshold: float) -> dict[str, int]:
        return seen.report(dataset.classes, np.full(2, threshold)).errors

    def chips() -> list[str]:
        found = chromium.find_elements(By.CSS_SELECTOR, ".kinds button")
        return [chip.text for chip in found]

    resize(chromium, 1280, 900)
    enter(chromium, detecting, "/explore?run=runs/digits")
    see(chromium, "Find things in a picture")
    chromium.execute_script("document.querySelector('.kinds').scrollIntoView()")
    slide(chromium, "Least score", *[Keys.PAGE_DOWN] * 12, Keys.ARROW_RIGHT)
    low, high = counts(0.02), counts(0.99)
    assert low["false"] == 3
    assert low["class"] > 0
    assert high["missed"] > low["missed"]
    until(lambda: f"false {low['false']}" in chips() and f"missed {low['missed']}" in chips())
    next(c for c in chromium.find_elements(By.CSS_SELECTOR, ".kinds button")
         if c.text.startswith("false")).click()  # fmt: skip
    tiles = until(
        lambda: (found := chromium.find_elements(By.CSS_SELECTOR, ".plain-tile"))
        and len(found) == 3 and all("false" in t.text for t in found) and found
    )  # fmt: skip
    tiles[0].send_keys(Keys.ENTER)
    pair = until(lambda: len(p := chromium.find_elements(By.CSS_SELECTOR, ".beside .boxed")) == 2
                 and p)  # fmt: skip
    told, there = (p.find_element(By.CSS_SELECTOR, "img.boxes").get_attribute("src") for p in pair)
    assert sorted(frames(there)) in [
        [pytest.approx(b, abs=0.01) for b in sorted(boxes)]
        for boxes in boxes_of(detecting.root, "val")
    ]
    assert len(frames(told)) == len(frames(there))  # one is missed, and one is of nothing
    for width in (1280, 390):
        resize(chromium, width, 900)
        fit(chromium, width, "errors")
    slide(chromium, "Least score", *[Keys.PAGE_UP] * 12)
    until(lambda: f"missed {high['missed']}" in chips() and "false 0" in chips())


def test_a_class_of_any_name_is_text() -> None:
    name = "<script>alert(1)</script>\"'&"
    thing = Thing(box=(90.0, 1.0, 99.0, 20.0), name=name, color=(1, 2, 3))
    drawing = ElementTree.fromstring(svg([thing], (80, 100), names=True))
    assert [t.text for t in drawing.iter(TEXT)] == [shorten(name, 20)]
    assert {child.tag for child in drawing} == {RECT, TEXT}
    (ground,) = (r for r in drawing.iter(RECT) if r.get("fill") != "none")
    assert float(ground.get("y", "")) == 1.0  # no room above
    assert drawing.get("viewBox") == "0 0 100 80"
    two = ElementTree.fromstring(svg([thing, thing], (80, 100), names=True))
    frames_first = [child.get("fill") == "none" for child in two]
    assert frames_first == [True, True, False, False, False, False]  # no frame cuts a name


def test_a_name_that_no_xml_can_have_hides_no_box() -> None:
    thing = Thing(box=(1.0, 1.0, 5.0, 5.0), name="a\x0bb\x00\ud800\uffff\tü", color=(1, 2, 3))
    drawing = ElementTree.fromstring(svg([thing], (9, 9), names=True).encode())
    assert [t.text for t in drawing.iter(TEXT)] == ["ab\tü"]


def test_what_a_detection_tells_and_what_it_learns_from_are_things() -> None:
    answers = named("detection").answers
    target = {"boxes": [[1.0, 2.0, 5.0, 9.0]] * 2, "labels": [1, 0], "crowds": [False, True]}
    assert [t.name for t in answers.marked(target, ("a", "b"))] == ["b", "a (crowd)"]
    told = [{"index": 1, "label": None, "score": 0.25, "box": [1.0, 2.0, 5.0, 9.0]}]
    assert answers.things(told) == (
        Thing(box=(1.0, 2.0, 5.0, 9.0), name="1 0.25", color=answers.COLORS[1]),
    )
    assert named("classification").answers.marked(0, ("a",)) == ()
