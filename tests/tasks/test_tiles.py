"""Large pictures in tiles: cut for an import, and answers to tiles joined to one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO

from tessella.api import predicting
from tessella.core.errors import ArtifactError, DataError, UsageError
from tessella.core.preprocess import Preprocess, fit
from tessella.core.tiles import Tiles
from tessella.data import ImportSettings, cut, import_images
from tessella.tasks import Query, View, named
from tessella.tasks.instances.cells import CELLS, SIDE, cells_of
from tests.support.cli import Tessella
from tests.support.shapes import NAMES, write_shapes

# of pycocotools' decoder with NumPy 2
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
HEIGHT, WIDTH, OVERLAP = 100, 120, 40  # no thing is larger than what tiles share
TILES = Tiles(height=HEIGHT, width=WIDTH, overlap=OVERLAP)
SIZE = (230, 310)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    return write_shapes(folder, "large", count=4, size=SIZE, sides=(16, 38), most=14)


def truth_of(source: Path, number: int) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """Label, box x0 y0 x1 y1 and mask of each thing of a picture, as the COCO API reads them."""
    known = COCO(str(source))
    found = []
    for thing in known.loadAnns(known.getAnnIds(imgIds=[number])):
        x, y, w, h = thing["bbox"]
        found.append((thing["category_id"], np.array([x, y, x + w, y + h]), known.annToMask(thing)))
    return found


def place_of(name: str) -> tuple[int, int, int]:
    """Number of the picture, top and left."""
    number, *_, top, left = Path(name).stem.split("-")
    return int(number), int(top), int(left)


@pytest.mark.parametrize("task", ["detection", "instances", "segmentation"])
def test_tiles_show_what_the_pictures_show_and_a_holdout_tears_none_apart(
    source: Path, task: str, tmp_path: Path
) -> None:
    made = cut(source, tmp_path / "tiles", TILES, task=task)
    rows, columns = (0, 43, 87, 130), (0, 63, 127, 190)
    assert (made.pictures, made.tiles, made.skipped) == (4, 4 * 16, ())
    settings = ImportSettings(task=task, size=(HEIGHT, WIDTH), holdout=0.25, store="pixels")
    dataset = import_images(tmp_path / "tiles", tmp_path / "data", settings)
    numbers = {s: {place_of(e.path)[0] for e in dataset.split(s)} for s in ("train", "val")}
    assert sorted(map(len, numbers.values())) == [1, 3]
    assert not numbers["train"] & numbers["val"]
    pictures = sorted((source.parent / "images").glob("*.png"))
    truth = {n: truth_of(source, n) for n in range(4)}
    seen = set()
    for example in (e for s in numbers for e in dataset.split(s)):
        number, top, left = place_of(example.path)
        seen.add((top, left))
        window = slice(top, top + HEIGHT), slice(left, left + WIDTH)
        shown = np.asarray(Image.open(pictures[number]))[window]
        pixels = np.frombuffer(example.content[-shown.size :], np.uint8).reshape(shown.shape)
        np.testing.assert_array_equal(pixels, shown)
        if task == "segmentation":
            mask = np.asarray(Image.open(tmp_path / "tiles" / "masks" / Path(example.path).name))
            wanted = np.zeros(SIZE, np.uint8)
            for label, _, thing in truth[number]:
                wanted[thing > 0] = label + 1
            np.testing.assert_array_equal(mask, wanted[window])
            continue
        parts = [(k, m[window], m.sum()) for k, _, m in truth[number] if m[window].any()]
        assert example.label["labels"] == [k for k, _, _ in parts]
        assert example.label["crowds"] == [bool(m.sum() < 0.3 * n) for _, m, n in parts]
        for (_, mask, _), box in zip(parts, example.label["boxes"], strict=True):
            x, y, w, h = coco_mask.toBbox(coco_mask.encode(np.asfortranarray(mask)))
            assert box == pytest.approx([x, y, x + w, y + h])
        if task == "instances":
            for (_, mask, _), text in zip(parts, example.label["masks"], strict=True):
                read = coco_mask.decode({"size": [HEIGHT, WIDTH], "counts": text})
                np.testing.assert_array_equal(read, mask)
    assert seen == {(row, column) for row in rows for column in columns}


def joined(task: str, outputs: Any, classes: tuple[str, ...], size: tuple[int, int]) -> Any:
    """The answer to a picture whose tiles a network answers so."""
    record = Preprocess(height=HEIGHT, width=WIDTH, channels=3)
    view, ways = View(height=HEIGHT, width=WIDTH, record=record), named(task).tiles
    assert ways is not None
    about = classes, named(task).record()
    return ways.joined(outputs, TILES, size, view, about, Query(threshold=0.5))


def told(source: Path, number: int, task: str) -> Iterator[tuple[int, int, np.ndarray]]:
    """What a network that knows everything tells of each tile: of what a tile shows of things."""
    truth = truth_of(source, number)
    for top, left in TILES.places(*SIZE):
        window = slice(top, top + HEIGHT), slice(left, left + WIDTH)
        if task == "segmentation":
            scores = np.zeros((1, 3, HEIGHT, WIDTH), np.float32)
            scores[:, 0] = 0.5
            for label, _, mask in truth:
                scores[0, label + 1] += mask[window]
            yield top, left, scores
            continue
        rows = np.zeros((1, 100, 4 + 2 + CELLS * (task == "instances")), np.float32)
        for place, (label, _, mask) in enumerate(t for t in truth if t[2][window].any()):
            shown = np.asfortranarray(mask[window])
            x, y, w, h = coco_mask.toBbox(coco_mask.encode(shown)).tolist()
            rows[0, place, :4] = np.array([x, y, x + w, y + h]) / [WIDTH, HEIGHT, WIDTH, HEIGHT]
            # the surest is not always the whole one
            rows[0, place, 4 + label] = 0.7 + 0.2 * np.sin(top + left + place)
            if task == "instances":
                rows[0, place, -CELLS:] = cells_of(shown, (x, y, x + w, y + h), SIDE).ravel()
        yield top, left, rows


@pytest.mark.parametrize("task", ["detection", "instances"])
def test_a_thing_in_several_tiles_is_told_once_and_whole(source: Path, task: str) -> None:
    for number in range(4):
        answer = joined(task, told(source, number, task), NAMES, SIZE)
        truth = truth_of(source, number)
        assert len(answer) == len(truth) > 3
        assert [a["score"] for a in answer] == sorted((a["score"] for a in answer), reverse=True)
        for label, box, mask in truth:
            (one,) = [a for a in answer if np.abs(np.array(a["box"]) - box).max() < 1.01]
            assert one["label"] == NAMES[label]
            if task == "instances":
                drawn = coco_mask.decode(one["mask"])
                assert (drawn & mask).sum() > 0.9 * (drawn | mask).sum()


def test_what_no_tile_shows_whole_is_joined_of_its_parts() -> None:
    """A bar that is wider than a tile, and a neighbour of its class that is another thing."""
    bar, other = (20.0, 40.0, 170.0, 60.0), (20.0, 70.0, 50.0, 90.0)
    outputs = []
    for top, left in TILES.places(100, 200):
        rows = np.zeros((1, 100, 4 + 1 + CELLS), np.float32)
        for place, (x0, y0, x1, y1) in enumerate((bar, other)):
            shown = np.array([x0 - left, y0, x1 - left, y1]).clip(0, [120, 100, 120, 100])
            if shown[2] > shown[0]:
                rows[0, place, :4] = shown / [120, 100, 120, 100]
                rows[0, place, 4], rows[0, place, -CELLS:] = 0.9 - 0.001 * left, 1.0
        outputs.append((top, left, rows))
    first, second = joined("instances", outputs, ("bar",), (100, 200))
    np.testing.assert_allclose(first["box"], bar, atol=1e-3)
    np.testing.assert_allclose(second["box"], other, atol=1e-3)
    wanted = np.zeros((100, 200), np.uint8)
    wanted[40:60, 20:170] = 1
    np.testing.assert_array_equal(coco_mask.decode(first["mask"]), wanted)


def test_the_classes_of_pixels_are_those_of_the_tiles(source: Path) -> None:
    classes = ("background", *NAMES)
    answer = joined("segmentation", told(source, 0, "segmentation"), classes, SIZE)
    wanted, seen = np.zeros((2, *SIZE), np.uint8)
    for label, _, mask in truth_of(source, 0):
        wanted[mask > 0] = label + 1
    for one in answer:
        seen[coco_mask.decode(one["mask"]) > 0] = one["index"]
    np.testing.assert_array_equal(seen, wanted)
    assert sum(a["share"] for a in answer) == pytest.approx(1.0)


def test_many_channels_of_16_bits_and_pictures_smaller_than_a_tile(
    tessella: Tessella, tmp_path: Path
) -> None:
    values = np.random.default_rng(0).integers(0, 1 << 16, (50, 150, 5)).astype(np.uint16)
    (tmp_path / "in").mkdir()
    tifffile.imwrite(
        tmp_path / "in" / "a.tif", values, photometric="minisblack", planarconfig="contig"
    )
    plain = {
        "images": [{"id": 1, "file_name": "a.tif", "height": 50, "width": 150}],
        "categories": [{"id": 1, "name": "x"}],
        "annotations": [{"image_id": 1, "category_id": 1, "bbox": [100, 10, 20, 30]}],
    }
    (tmp_path / "in" / "a.json").write_text(json.dumps(plain))
    made = cut(tmp_path / "in" / "a.json", tmp_path / "tiles", TILES)
    assert (made.tiles, made.things, made.skipped) == (2, 2, ())
    ran = tessella("data", "tiles", tmp_path / "in" / "a.json", "--out", tmp_path / "told")
    assert "--channels 5 --depth 16" in ran.err
    settings = ImportSettings(task="detection", size=(HEIGHT, WIDTH), channels=5, depth=16,
                              holdout=0.0, store="pixels")  # fmt: skip
    dataset = import_images(tmp_path / "tiles", tmp_path / "data", settings)
    for example, left in zip(dataset.train, (0, 30), strict=True):
        assert place_of(example.path) == (0, 0, left)
        pixels = tifffile.imread(tmp_path / "tiles" / example.path)
        np.testing.assert_array_equal(pixels[:50], values[:, left : left + WIDTH])
        assert (pixels[50:] == 1 << 15).all()
        x0 = 100.0 - left
        assert example.label["boxes"] == [[x0, 10.0, min(x0 + 20, WIDTH), 40.0]]


def test_what_cannot_be_cut_is_said(source: Path, tessella: Tessella, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="overlap by less"):
        Tiles(height=64, width=32, overlap=32)
    with pytest.raises(UsageError, match="more than 65,536 tiles"):
        Tiles(height=8, width=8, overlap=7).places(1000, 1000)
    with pytest.raises(UsageError, match="answers that have a place"):
        cut(source, tmp_path / "out", TILES, task="regression")
    lost = tmp_path / "lost.json"
    lost.write_text(source.read_text())
    with pytest.raises(DataError, match="no picture could be cut"):
        cut(lost, tmp_path / "out", TILES)
    assert not (tmp_path / "out").exists()
    ran = tessella("data", "tiles", source, "--out", tmp_path / "out", "--size", "100x120",
                   "--overlap", "40")  # fmt: skip
    assert "4 pictures in 64 tiles" in ran.out
    with pytest.raises(UsageError, match="there already"):
        cut(source, tmp_path / "out", TILES)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("picture,group\n", "does not begin with its columns"),
        ("path,group\nimages/a.png,x\na,b,c\n", "line 3 has 3 cells"),
        (f"path,group\na,{'x' * 200_000}\n", "field larger than field limit"),
        ("path,group\na.png,x\n", r"names no picture.*'a.png'.*'images/large-000.png'"),
    ],
)
def test_groups_that_would_hold_nothing_together_are_refused(
    source: Path, text: str, told: str
) -> None:
    file = source.parent / "groups.csv"
    file.write_text(text)
    settings = ImportSettings(task="detection")
    try:
        with pytest.raises(DataError, match=f"(?s)groups.csv.*{told}"):
            import_images(source, source.parent / "no", settings)
        file.write_text("path,group\nimages/large-000.png,x\nlost.png,x\n")
        made = import_images(source, source.parent / "data" / str(len(text)), settings)
    finally:
        file.unlink()
    assert any("1 of 2 paths in groups.csv" in note for note in made.info.notes)


def test_a_disk_that_is_full_leaves_no_folder(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "write_bytes", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(ArtifactError, match="could not be written"):
        cut(source, tmp_path / "out", TILES)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("resize", ["squash", "fill"])
def test_a_tile_of_another_shape_than_the_input_lies_where_it_was_fitted(resize: Any) -> None:
    record = Preprocess(height=64, width=64, channels=3, resize=resize)
    tiles = Tiles(height=48, width=96, overlap=16)
    truth = np.kron(np.random.default_rng(0).integers(0, 3, (8, 10)), np.ones((12, 24))).astype(
        np.uint8
    )
    outputs = []
    for top, left in tiles.places(*truth.shape):
        shown = fit(truth[top : top + 48, left : left + 96, None] * 100, record)[:, :, 0]
        scores = -abs(shown / 100 - np.arange(3)[:, None, None])[None].astype(np.float32)
        outputs.append((top, left, scores))
    view, ways = View(height=48, width=96, record=record), named("segmentation").tiles
    assert ways is not None
    about = ("a", "b", "c"), named("segmentation").record()
    seen = np.zeros_like(truth)
    for one in ways.joined(outputs, tiles, truth.shape, view, about, Query()):
        seen[coco_mask.decode(one["mask"]) > 0] = one["index"]
    inner = np.kron(np.ones((8, 10)), np.pad(np.ones((6, 16)), ((3, 3), (4, 4)))) > 0
    np.testing.assert_array_equal(seen[inner], truth[inner])  # away from where classes meet


def test_a_network_that_sees_part_of_a_tile_is_refused() -> None:
    record = Preprocess(height=64, width=64, channels=3, resize="crop")
    tiles, task = Tiles(height=48, width=96, overlap=16), named("segmentation")
    pixels = np.zeros((96, 200, 3), np.uint8)
    about = ("a", "b"), task.record()
    with pytest.raises(UsageError, match="sees no whole tile"):
        predicting._of_tiles(lambda _: 1 / 0, pixels, tiles, record, task, about, None)  # type: ignore[arg-type,return-value]
