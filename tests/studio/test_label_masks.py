"""The labelling tool for masks: drawn in Chromium, checked, saved as versions, imported again."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image, ImageDraw
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tessella.annotations import coco, rle
from tessella.artifacts.dataset import Dataset
from tessella.core.errors import UsageError
from tessella.core.preprocess import Preprocess, centre_crop
from tessella.core.preprocess import fit as fitted
from tessella.data.importing import ImportSettings, import_images
from tessella.studio.drawn import Drawn, Overtaken
from tessella.studio.drawn_masks import (
    MOST_POINTS,
    MOST_THINGS,
    checked,
    painted,
    proposed,
    stored,
    things_of,
)
from tessella.tasks import Query, View, named
from tessella.tasks.segmentation.answers import taught
from tessella.tasks.segmentation.examples import IGNORED, decoded
from tests.support.studio.browsing import enter, fit, go, press, resize, see, until
from tests.support.studio.labelling import Tool
from tests.support.studio.served import Served, serve, stop

PLAY = (Path(__file__).parents[1] / "support" / "studio" / "labelling.js").read_text()
SIZE = 64
CLASSES = ("background", "größe", "<b>two</b>")
WHOLE = rle.compressed(np.array([0, SIZE * SIZE])).decode()
TRIANGLE = [1, 1, 40, 5, 20, 50]

Mask = npt.NDArray[np.uint8]


def write_pictures(folder: Path, count: int) -> Path:
    """Pictures with masks of two patches, and one of pixels that have no class."""
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    (folder / "classes.txt").write_text("".join(f"{name}\n" for name in CLASSES))
    rng = np.random.default_rng(0)
    for i in range(count):
        pixels = rng.integers(0, 99, (SIZE, SIZE, 3), np.uint8)
        mask = np.zeros((SIZE, SIZE), np.uint8)
        mask[2:8, 50 : 60 - i] = 1
        mask[10:16, 50:60] = 2
        mask[60:, :4] = IGNORED
        Image.fromarray(pixels).save(folder / "images" / f"a b {i}.png")
        Image.fromarray(mask).save(folder / "masks" / f"a b {i}.png")
    return folder


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A studio on a dataset with masks."""
    root = tmp_path_factory.mktemp("masks") / "work"
    train, val = (write_pictures(root / "pictures" / s, n) for s, n in (("train", 2), ("val", 1)))
    settings = ImportSettings(task="segmentation", size=SIZE, val_folder=str(val))
    import_images(train, root / "datasets" / "shapes", settings)
    process, served = serve(root, scheduler=False)
    yield served
    stop(process)


@pytest.mark.parametrize(
    "things",
    [
        None, {"label": 1}, [None], [{"label": 1}],
        [{"label": 1, "rle": WHOLE, "polygon": TRIANGLE}], [{"label": 3, "rle": WHOLE}],
        [{"label": True, "rle": WHOLE}], [{"label": -1, "rle": WHOLE}],
        [{"label": 1, "rle": "ü"}], [{"label": 1, "rle": WHOLE[:-1]}], [{"label": 1, "rle": 7}],
        [{"label": 1, "polygon": [1, 1, 9, 9]}], [{"label": 1, "polygon": [*TRIANGLE, 1]}],
        [{"label": 1, "polygon": [1, 1, 9, 9, 9, SIZE + 1]}],
        [{"label": 1, "polygon": [-1, 1, 9, 9, 9, 1]}],
        [{"label": 1, "polygon": [1, 1, 9, 9, 9, float("nan")]}],
        [{"label": 1, "polygon": [1, 1, 9, 9, 9, "1"]}],
        [{"label": 1, "polygon": [1, 1] * (MOST_POINTS + 1)}],
        [{"label": 1, "polygon": [0, 0, SIZE, SIZE] * (MOST_POINTS // 2)}] * 40,
        [{"label": 1, "rle": WHOLE}] * (MOST_THINGS + 1),
    ],
)  # fmt: skip
def test_what_is_no_list_of_things_is_refused(things: Any) -> None:
    with pytest.raises(UsageError):
        checked(things, len(CLASSES), (SIZE, SIZE))


def test_a_dataset_is_shown_with_its_masks(labelled: Served) -> None:
    """Each pixel of a class but the first is coloured, and no other."""
    client = labelled.client()
    page = client.get("/image", params={"dataset": "datasets/shapes", "split": "val"}).text
    assert "drawn=true" in page
    query = {"dataset": "datasets/shapes", "split": "val", "index": 0}
    plain, drawn = (
        np.asarray(Image.open(io.BytesIO(client.get("/pictures/example", params=asked).content)))
        for asked in (query, query | {"drawn": "true"})
    )
    (example,) = Dataset(labelled.root / "datasets" / "shapes").val
    changed = (plain != drawn).any(axis=2)
    np.testing.assert_array_equal(changed, decoded(example.label["mask"]) > 0)
    client.close()


def test_a_picture_too_large_for_so_many_things_is_refused() -> None:
    text = rle.compressed(np.array([1 << 28])).decode()
    with pytest.raises(UsageError, match="at most 8 things"):
        checked([{"label": 1, "rle": text}] * 9, 2, (1 << 14, 1 << 14))


def test_a_mask_becomes_things_and_a_mask_again() -> None:
    """Exactly, in patches of their own, or one thing a class where there are too many patches."""
    mask = np.random.default_rng(0).choice([0, 1, 2, IGNORED], (40, 30), p=[0.9, 0.04, 0.04, 0.02])
    for ragged in (mask.astype(np.uint8), mask.repeat(3, 0).astype(np.uint8)[:, :9]):
        for classes, ground in ((CLASSES, 0), (("sky", "road", "car"), IGNORED)):
            things = things_of(ragged, ground)
            assert len(things) > len(np.unique(ragged)) - 1
            assert (painted(things, classes, ragged.shape) == ragged).all()
            assert checked([dict(t) for t in things], 3, ragged.shape) == things
    noise = np.random.default_rng(0).integers(0, 3, (64, 64), np.uint8)
    assert [t["label"] for t in things_of(noise, 0)] == [1, 2]
    assert (painted(things_of(noise, 0), CLASSES, noise.shape) == noise).all()


def test_what_a_network_answers_is_proposed_in_the_datasets_classes_and_size() -> None:
    told = np.zeros((1, 3, 128, 128), np.float32)
    told[0, 0] = 0.5
    told[0, 1, 16:48, 16:48] = told[0, 2, 80:112, 80:120] = 1
    told[0, 1, 120, 2] = 1  # a speck
    answers = named("segmentation").answers
    labels = ("background", "unknown", "<b>two</b>")
    query = Query()
    (answer,) = answers.answer(told, labels, None, query)
    record = Preprocess(height=128, width=128)
    (thing,) = proposed(answer, CLASSES, View(height=64, width=64, record=record))
    expected = np.zeros((64, 64), np.uint8)
    expected[40:56, 40:60] = 2
    assert (painted([thing], CLASSES, (64, 64)) == expected).all()
    (answer,) = answers.answer(told, CLASSES, None, query)
    large = View(height=512, width=512, record=record)
    assert [t["label"] for t in proposed(answer, CLASSES, large)] == [1, 2]


@pytest.mark.parametrize(
    ("size", "record"),
    [
        ((256, 256), Preprocess(height=256, width=256, crop=(224, 192))),
        ((64, 128), Preprocess(height=128, width=128, resize="fill")),
        ((128, 64), Preprocess(height=160, width=128, resize="fill", crop=(144, 96))),
        ((64, 128), Preprocess(height=96, width=96, resize="crop")),
    ],
)
def test_a_proposal_lies_where_the_network_saw_it(
    size: tuple[int, int], record: Preprocess
) -> None:
    """A rectangle is found by its brightness in what preprocessing makes of its picture."""
    drawn = np.zeros(size, np.uint8)
    drawn[size[0] // 3 : size[0] // 2, size[1] // 3 : size[1] // 2] = 1
    seen = centre_crop(fitted(np.repeat(255 * drawn[..., None], 3, axis=2), record), record)
    bright = seen[..., 0] > 191  # padding is grey
    told = [
        {"label": name, "mask": {"size": bright.shape, "counts": counts}}
        for name, inside in ((CLASSES[1], bright), (CLASSES[2], seen[..., 0] == 127))
        for counts in [rle.compressed(rle.counts_of(inside.astype(np.uint8))).decode()]
    ]
    things = proposed(told, CLASSES, View(height=size[0], width=size[1], record=record))
    found = painted(things, CLASSES, size)
    assert_near(found == 1, drawn == 1)
    assert not (found == 2).any()  # of the padding nothing is proposed


def test_versions_stay_and_an_export_is_imported_again(labelled: Served, tmp_path: Path) -> None:
    dataset = Dataset(labelled.root / "datasets" / "shapes")
    drawn = Drawn(tmp_path / "annotations")
    own = [dict(t) for t in stored(dataset, "train", 0)]
    assert sorted(t["label"] for t in own) == [1, 2, IGNORED]
    square = {"label": 2, "polygon": [10, 10, 30, 10, 30, 30, 10, 30]}
    hole = {"label": 0, "polygon": [15, 15, 20, 15, 20, 20, 15, 20]}
    over = {"label": 1, "polygon": [25, 10, 40, 10, 40, 30, 25, 30]}
    assert drawn.save(dataset, "train", 0, [*own, square, hole, over], since=0) == 1
    with pytest.raises(Overtaken, match="version 1"):
        drawn.save(dataset, "train", 0, own, since=0)
    assert drawn.save(dataset, "train", 1, own, since=0) == 2  # another picture
    assert drawn.save(dataset, "train", 1, [], since=2) == 3
    assert drawn.of(dataset, "train", 1, version=0) == stored(dataset, "train", 1)
    files = drawn.export(dataset, tmp_path / "out")
    settings = ImportSettings(task="segmentation", size=SIZE, val_folder=str(files["val"]))
    again = import_images(files["train"], tmp_path / "again", settings)
    assert again.classes == dataset.classes
    expected = decoded(dataset.split("train")[0].label["mask"]).copy()
    expected[10:30, 10:30] = 2
    expected[15:20, 15:20] = 0
    expected[10:30, 25:40] = 1
    assert (decoded(again.split("train")[0].label["mask"]) == expected).all()
    assert not decoded(again.split("train")[1].label["mask"]).any()
    assert again.split("val")[0].label["mask"] == dataset.split("val")[0].label["mask"]

    read = coco.read(tmp_path / "out" / "train.json")
    assert not read.problems
    assert read.classes == CLASSES[1:]
    counted = np.zeros((3, SIZE, SIZE), int)
    for thing in read.pictures[0].things:
        counts = coco.mask_counts(thing, read.pictures[0])
        counted[0 if thing.crowd else thing.label + 1] += rle.mask_of(counts, SIZE, SIZE)
    for label, value in ((0, IGNORED), (1, 1), (2, 2)):
        assert (counted[label] == (expected == value)).all()


# --- in Chromium ------------------------------------------------------------------------------


def versions(root: Path) -> list[list[dict[str, Any]]]:
    files = list((root / ".studio" / "annotations").glob("*.jsonl"))
    return [json.loads(line)["masks"] for file in files for line in file.read_text().splitlines()]


def mask_of(things: list[dict[str, Any]]) -> Mask:
    return painted(checked(things, len(CLASSES), (SIZE, SIZE)), CLASSES, (SIZE, SIZE))


def assert_near(found: npt.NDArray[np.bool_], drawn: npt.NDArray[np.bool_]) -> None:
    """The same but for pixels at the edge of either."""
    kernel = np.ones((3, 3), np.uint8)
    least = cv2.erode(drawn.astype(np.uint8), kernel, borderValue=0).astype(bool)
    most = cv2.dilate(drawn.astype(np.uint8), kernel).astype(bool)
    assert least.any()
    assert (found >= least).all()
    assert (found <= most).all()


@pytest.mark.browser
def test_outlines_and_strokes_are_drawn_changed_undone_and_saved(labelled: Served, chromium):
    """What is saved is what Pillow draws of the same points, but for the pixels at the edge."""
    dataset = Dataset(labelled.root / "datasets" / "shapes")
    own = decoded(dataset.split("train")[0].label["mask"])
    resize(chromium, 1280, 900)
    enter(chromium, labelled, "/image?dataset=datasets/shapes&split=train&index=0")
    press(chromium, "Draw masks")
    tool = Tool(chromium)
    until(lambda: ((tool.shown() > 0) == (own > 0)).all(), what="the dataset's own mask")
    for x, y in ((52, 4), (52, 12)):  # in the colours that pictures have elsewhere
        ink = f"getContext('2d').getImageData({x}, {y}, 1, 1).data"
        script = f"return [...document.querySelector('canvas').{ink}]"
        black = taught(np.zeros((1, 1, 3), np.uint8), own[y : y + 1, x : x + 1], CLASSES)
        assert np.abs(chromium.execute_script(script)[:3] - 2.0 * black[0, 0]).max() <= 5

    corners = [(5.0, 5.0), (40.0, 8.0), (44.0, 30.0), (20.0, 45.0), (4.0, 30.0)]
    tool.keys("3")
    tool.click(*corners, corners[0])
    until(lambda: tool.count() == 4)
    tool.with_control("z")
    until(lambda: tool.count() == 3)
    tool.with_control("y")
    until(lambda: tool.count() == 4)
    tool.keys("v")  # a point is dragged, another is deleted, and comes back
    tool.drag(corners[1], (36.0, 20.0))
    corners[1] = (36.0, 20.0)
    tool.keys(".", Keys.DELETE)
    tool.with_control("z")

    tool.keys("b", Keys.ESCAPE, "2", *"[[[[[[", "]", "]", "]", "]")
    width = float(
        chromium.find_element(By.CSS_SELECTOR, "[aria-label^=Width]").get_attribute("value")
    )
    assert 3 <= width <= 9
    path = [(8.0, 55.0), (30.0, 52.0), (50.0, 40.0)]
    tool.drag(*path)
    until(lambda: tool.shown()[52, 30] > 0)
    tool.keys("e", Keys.ESCAPE)
    tool.drag((20.0, 30.0), (24.0, 30.0))  # of the outline: it becomes pixels
    until(lambda: tool.shown()[30, 22] == 0)
    tool.with_control("z")
    until(lambda: tool.shown()[30, 22] > 0)
    tool.with_control("s")
    see(chromium, "Saved as version 1")
    saved = versions(labelled.root)[0]
    assert [t["label"] for t in saved[-2:]] == [2, 1]
    np.testing.assert_allclose(saved[-2]["polygon"], np.ravel(corners), atol=0.2)

    outline, stroke = (Image.new("1", (SIZE, SIZE)) for _ in range(2))
    ImageDraw.Draw(outline).polygon([(x - 0.5, y - 0.5) for x, y in corners], fill=1)
    pen = ImageDraw.Draw(stroke)
    pen.line([(x - 0.5, y - 0.5) for x, y in path], fill=1, width=round(width), joint="curve")
    for x, y in path:
        box = (x - width / 2, y - width / 2, x + width / 2 - 1, y + width / 2 - 1)
        pen.ellipse(box, fill=1)
    found = mask_of(saved)
    assert_near(mask_of(saved[-1:]) == 1, np.asarray(stroke))
    assert_near(mask_of(saved[-2:-1]) == 2, np.asarray(outline))
    assert (found[own > 0] == own[own > 0]).all()
    for width in (1280, 390):
        resize(chromium, width, 900)
        fit(chromium, width, "label")
    press(chromium, "Export")
    see(chromium, "tessella data import annotations/shapes-masks-1/train --out")


@pytest.mark.browser
def test_the_keyboard_alone_and_a_networks_proposals(labelled: Served, chromium) -> None:
    enter(chromium, labelled, "/label?dataset=datasets/shapes&split=val&index=0")
    tool = Tool(chromium)
    until(lambda: tool.count() == 3)
    up, left, down = Keys.ARROW_UP, Keys.ARROW_LEFT, Keys.ARROW_DOWN
    tool.keys("a", " ", *[up] * 9, " ", *[left] * 9, " ", *[down] * 9, " ", Keys.BACKSPACE, " ",
              Keys.ENTER)  # fmt: skip
    until(lambda: tool.count() == 4)
    tool.keys("n", "p", left, "3", "2")
    number = str(chromium.find_element(By.CSS_SELECTOR, ".editor").get_attribute("id"))[1:]
    two = np.zeros((2, SIZE, SIZE), np.uint8)
    two[0, 40:50, 40:50] = two[1, 40:50, 2:9] = 1
    things = [{"label": 2, "rle": rle.compressed(rle.counts_of(m)).decode()} for m in two]
    chromium.execute_script(f"editing.propose({number}, {json.dumps(things)})")
    until(lambda: tool.count() == 6)
    tool.keys("p", Keys.ENTER)  # the last one, accepted; the other is only proposed
    tool.keys("n", "n", "b", *"[" * 60, *[up] * 4, " ")  # a pixel into the second thing
    until(lambda: tool.shown()[28, 23] == 190)
    before = len(versions(labelled.root))
    tool.with_control("s")
    see(chromium, f"Saved as version {before + 1}")
    saved = mask_of(versions(labelled.root)[-1])
    expected = decoded(Dataset(labelled.root / "datasets" / "shapes").split("val")[0].label["mask"])
    expected = expected.copy()
    expected[23:32, 22:31] = 1  # of nine pixels, moved one to the left
    expected[40:50, 2:9] = 2
    expected[28, 23] = 2  # above the patch: what was painted last is seen
    assert (saved == expected).all()


@pytest.mark.browser
def test_no_work_is_lost(labelled: Served, chromium) -> None:
    """Another window's save is told of and kept, and what a closed window had can be restored."""
    dataset = Dataset(labelled.root / "datasets" / "shapes")
    enter(chromium, labelled, "/label?dataset=datasets/shapes&split=train&index=1")
    tool = Tool(chromium)
    until(lambda: tool.count() == 3)
    other = Drawn(labelled.root / ".studio" / "annotations")
    triangle = [{"label": 2, "polygon": TRIANGLE}]
    number = other.save(dataset, "train", 1, triangle)
    tool.click((30, 30), (50, 30), (50, 50), (30, 30))
    until(lambda: tool.count() == 4)
    tool.with_control("s")
    see(chromium, f"Version {number} of this picture is newer")
    assert len(versions(labelled.root)) == number
    press(chromium, "Save mine as the newest")
    see(chromium, f"Saved as version {number + 1}")
    kept = versions(labelled.root)
    assert kept[number - 1] == triangle
    assert len(kept[number]) == 4

    until(lambda: not chromium.find_elements(By.CSS_SELECTOR, ".q-dialog__backdrop"))
    tool.click((5, 40), (15, 40), (15, 50), (5, 40))
    until(lambda: tool.count() == 5)
    until(
        lambda: (
            chromium.execute_script(
                "return Object.keys(localStorage).filter(k => k.startsWith('tessella ')).length"
            )
            == 1
        )
    )
    assert other.save(dataset, "train", 1, triangle) == number + 2  # the draft knows nothing of it
    go(chromium, labelled, "/label?dataset=datasets/shapes&split=train&index=1")
    see(chromium, "Work on this picture was not saved.")
    tool = Tool(chromium)
    until(lambda: tool.count() == 1)
    press(chromium, "Restore it")
    until(lambda: tool.count() == 5)
    tool.with_control("s")
    see(chromium, f"Version {number + 2} of this picture is newer")
    assert len(versions(labelled.root)) == number + 2
    press(chromium, "Save mine as the newest")
    see(chromium, f"Saved as version {number + 3}")
    until(
        lambda: (
            chromium.execute_script(
                "return Object.keys(localStorage).filter(k => k.startsWith('tessella ')).length"
            )
            == 0
        )
    )


@pytest.mark.browser
def test_what_comes_in_between_costs_no_work(labelled: Served, chromium) -> None:
    """Saves that are not answered yet, keys during a drag, open outlines, drafts on offer."""
    enter(chromium, labelled, "/label?dataset=datasets/shapes&split=train&index=0")
    Tool(chromium)
    chromium.execute_async_script(
        "const script = document.createElement('script');"
        "script.onload = arguments[0]; script.src = '/static/boxes.js';"
        "document.head.append(script)"
    )
    said, three = chromium.execute_async_script(PLAY)
    sent, dirty, words = said["open"]
    assert (sent, dirty) == (0, True)
    assert "an outline is open" in words
    assert said["closed"] == [{"label": 1, "polygon": [5, 5, 30, 5, 30, 30]}]
    assert (said["many"], said["back"], said["all"]) == (True, True, False)
    moved = [[7, 6], [20, 20], [40, 40]]
    assert said["dragged"] == [[moved[1:], moved]] * 2
    assert (said["beside"], said["on"]) == (["label", "polygon"], ["label", "rle"])
    assert said["kept"]
    assert said["restored"] == [3, three]
    assert said["left"] is None
    assert said["since"] == [7, 9]


@pytest.mark.browser
def test_a_training_is_offered_what_draws_masks(labelled: Served, chromium: Chrome) -> None:
    """The first network of the form is one that the dataset's task can be learned by."""
    enter(chromium, labelled)
    go(chromium, labelled, "/train?dataset=datasets/shapes")
    see(chromium, "tessella train unet datasets/shapes")
