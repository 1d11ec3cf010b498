"""Joined pictures: where each thing is, recomputed from the pixels of its own colour."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from tessella.artifacts.dataset import Dataset
from tessella.artifacts.run import Augment, Recipe, Run
from tessella.core.errors import UsageError
from tessella.core.preprocess import Preprocess
from tessella.data import loading
from tessella.data.augment import only_cuts
from tessella.data.importing import ImportSettings, import_images
from tessella.data.joining import drawn_pieces, made_of, settings_at
from tessella.data.loading import Batch, batches
from tessella.tasks import Moves, Piece, joined, named
from tessella.tasks.detection.examples import VISIBLE
from tessella.tasks.segmentation.examples import target_of
from tessella.training.loop import train
from tessella.training.prepare import describe_run
from tests.support.training import losses

HEIGHT, WIDTH, PICTURES, THINGS = 60, 80, 12, 4
NEAR = 0.8  # of a pixel
FINE = 4  # pixels of the check for one of a picture, so that parts of a pixel are seen
RECORD = Preprocess(height=HEIGHT, width=WIDTH, channels=1, depth=16)
EVERYTHING = Augment(mosaic=1.0, paste=1.0)


def coloured() -> tuple[list[np.ndarray], list[dict]]:
    """Pictures of 16 bits with things in places of a grid, each of a value and a class of its own:
    thing k of all has class k and value 1000 · (k + 1).
    """
    rng = np.random.default_rng(0)
    pictures, rows = [], []
    for number in range(PICTURES):
        pixels = np.zeros((HEIGHT, WIDTH, 1), np.uint16)
        boxes = []
        for thing in range(THINGS):
            left, top = (thing % 2) * 40 + rng.integers(0, 16), (thing // 2) * 30 + rng.integers(12)
            right, bottom = left + rng.integers(8, 24), top + rng.integers(6, 18)
            pixels[top:bottom, left:right] = 1000 * (number * THINGS + thing + 1)
            boxes.append([float(v) for v in (left, top, right, bottom)])
        pictures.append(pixels)
        rows.append({
            "boxes": boxes, "labels": [number * THINGS + k for k in range(THINGS)],
            "crowds": [False] * THINGS, "areas": [1.0] * THINGS, "zoom": 1.0,
            "size": [HEIGHT, WIDTH], "view": [0, 0, HEIGHT, WIDTH],
        })  # fmt: skip
    return pictures, rows


PICTURES_16, ROWS = coloured()
DETECTION, SEGMENTATION = named("detection").examples, named("segmentation").examples
TARGETS = DETECTION.targets(
    pa.chunked_array([pa.array(ROWS, DETECTION.column())]), PICTURES * THINGS
)


def finely(pieces: tuple[Piece, ...]) -> np.ndarray:
    """The joined picture [H · FINE, W · FINE], of which each pixel has a thing's value or none."""
    large = [np.kron(PICTURES_16[p.index], np.ones((FINE, FINE, 1), np.uint16)) for p in pieces]
    sides = ("x", "y", "left", "top", "right", "bottom")
    moved = [replace(p, **{n: FINE * getattr(p, n) for n in sides}) for p in pieces]
    return joined(moved, large, nearest=True)[:, :, 0]


def _around(mask: np.ndarray) -> np.ndarray:
    """The box around what is set, in pixels of a picture; of nothing one that holds for all."""
    y, x = np.nonzero(mask)
    if not len(x):
        return np.array([np.inf, np.inf, -np.inf, -np.inf])
    return np.array([x.min(), y.min(), x.max() + 1, y.max() + 1]) / FINE


def zooms(pieces: tuple[Piece, ...]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for piece in pieces:
        found.setdefault(piece.index, []).append(piece.zoom)
    return found


@pytest.mark.parametrize(
    "settings",
    [Augment(mosaic=1.0), Augment(paste=1.0), EVERYTHING],
    ids=["mosaic", "paste", "both"],
)
@pytest.mark.parametrize("mirrored", [False, True])
def test_each_thing_is_where_its_colour_is(settings: Augment, mirrored: bool) -> None:
    whole, crowds = 0, 0
    pixel = np.ones((FINE, FINE), np.uint8)
    for seed in range(3):
        for index in range(PICTURES):
            pieces = drawn_pieces(settings, RECORD, (seed, 3), index, TARGETS)
            shown = finely(pieces)
            moves = Moves(top=0, left=0, height=HEIGHT, width=WIDTH, pieces=pieces)
            if mirrored:  # and cut: the other moves see one picture
                moves = replace(moves, top=7, left=9, height=40, width=50, mirror=True, flip=True)
                shown = shown[7 * FINE : 47 * FINE, 9 * FINE : 59 * FINE][::-1, ::-1]
            boxes = TARGETS.batch(np.array([index]), [moves])[0].astype(np.float64)
            boxes = boxes[boxes[:, 4] >= 0]
            boxes[:, [0, 2]] *= moves.width
            boxes[:, [1, 3]] *= moves.height
            labels = boxes[:, 4].astype(int)
            seen = np.unique(shown[shown > 0]).astype(int) // 1000 - 1
            for label in {*labels.tolist(), *seen.tolist()}:
                rows = boxes[labels == label]
                mine = (shown == 1000 * (label + 1)).astype(np.uint8)
                (zoom, *others) = zooms(pieces)[label // THINGS]
                if not len(rows):  # less than a pixel is no thing
                    x0, y0, x1, y1 = _around(mine)
                    assert others or min(x1 - x0, y1 - y0) <= 1 + NEAR
                    continue
                # where a thing is there twice, its boxes together have all of its pixels
                low, high = rows[:, :2].min(0), rows[:, 2:4].max(0)
                every, sure = _around(mine), _around(cv2.morphologyEx(mine, cv2.MORPH_OPEN, pixel))
                if not others:  # nor is it shown again, perhaps as a sliver that is left out
                    assert (low <= sure[:2] + NEAR).all()
                    assert (high >= sure[2:] - NEAR).all()
                if not (mirrored and settings.paste):  # a box that is cut again may be too large
                    assert (low >= every[:2] - NEAR).all()
                    assert (high <= every[2:] + NEAR).all()
                if others:
                    continue
                if len(rows) == 1 and not (mirrored and settings.paste):
                    x0, y0, x1, y1 = ROWS[label // THINGS]["boxes"][label % THINGS]
                    share = mine.sum() / ((x1 - x0) * (y1 - y0) * (FINE * zoom) ** 2)
                    if abs(share - VISIBLE) > 0.05:
                        assert bool(rows[0, 5]) == (share < VISIBLE)
                    whole, crowds = whole + 1, crowds + int(rows[0, 5])
    assert whole > 50 or (mirrored and settings.paste)
    assert crowds > 2 or mirrored


def test_pixels_and_masks_of_a_mosaic_move_alike() -> None:
    """Whoever interpolates makes edges softer, and moves none of them."""
    masks = [pixels[:, :, 0] // 1000 for pixels in PICTURES_16]
    rows = [target_of(mask.astype(np.uint8)) for mask in masks]
    column = pa.chunked_array([pa.array(rows, SEGMENTATION.column())])
    targets = SEGMENTATION.targets(column, PICTURES * THINGS + 1)
    settings = Augment(mosaic=1.0, flip=True, flip_vertical=True)
    record = replace(RECORD, crop=(48, 64))
    for index in range(PICTURES):
        pieces = drawn_pieces(settings, record, (5, 1), index, targets)
        assert len({piece.index for piece in pieces}) > 1
        pixels, moves = made_of(index, pieces, PICTURES_16.__getitem__, settings, record, (5, 1))
        (mask,) = targets.batch(np.array([index]), [moves])
        assert mask.shape == pixels.shape[:2] == (48, 64)
        near = np.ones((5, 5), np.uint8)
        edges = cv2.dilate(mask, near) != cv2.erode(mask, near)
        same = np.abs(pixels[:, :, 0].astype(int) - 1000 * mask.astype(int)) <= 2
        assert same[~edges].mean() > 0.99


# --- as a part of loading -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Pictures with masks of three classes."""
    root, rng = tmp_path_factory.mktemp("joining"), np.random.default_rng(0)
    for name in ("images", "masks"):
        (root / "s" / name).mkdir(parents=True)
    for number in range(14):
        mask = np.kron(rng.integers(0, 3, (4, 5)), np.ones((8, 8))).astype(np.uint8)
        pixels = np.stack([mask * 90 + 20] * 3, axis=2).astype(np.uint8)
        Image.fromarray(pixels).save(root / "s" / "images" / f"{number}.png")
        Image.fromarray(mask).save(root / "s" / "masks" / f"{number}.png")
    settings = ImportSettings(task="segmentation", size=(32, 40), holdout=0.3, workers=1)
    return import_images(root / "s", root / "d", settings)


def drawn(dataset: Dataset, *, start: int = 0, epoch: int = 2, **options) -> list[Batch]:
    settings = Augment(mosaic=0.7, rotation=5, color=0.2)
    return list(
        batches(
            dataset.train, dataset.preprocess, batch_size=4, seed=9, epoch=epoch, start=start,
            augment=settings, training=True, **options,
        )
    )  # fmt: skip


def test_threads_processes_and_a_late_start_make_the_same_batches(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch is a function of seed, epoch and place, also in which pictures are joined."""
    usual = drawn(dataset)
    others = [drawn(dataset, workers=2)]  # threads, as the split is kept decoded
    loading._DECODED.clear()
    monkeypatch.setattr(loading, "DECODE_ONCE_BYTES", 0)
    others.append(drawn(dataset, workers=2))  # processes
    others.append([*usual[:1], *drawn(dataset, start=1)])
    for made in others:
        assert len(made) == len(usual) == 3
        for one, other in zip(made, usual, strict=True):
            np.testing.assert_array_equal(one.pixels.numpy(), other.pixels.numpy())
            np.testing.assert_array_equal(one.labels.numpy(), other.labels.numpy())
    again = drawn(dataset, epoch=3)
    assert any((a.labels != b.labels).any() for a, b in zip(again, usual, strict=True))


def test_a_resumed_training_joins_the_same_pictures(dataset: Dataset, tmp_path: Path) -> None:
    """Of which the last epoch has none: the losses are those of a training that was not stopped."""
    recipe = Recipe(
        network="unet", dataset=str(dataset.path), epochs=3, batch_size=5, seed=4,
        augment=Augment(mosaic=0.8, join_until=0.5), network_options={"width": 4}, keep_last=9,
    )  # fmt: skip
    whole = train(recipe, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for later in Run(tmp_path / "cut").checkpoints()[1:]:
        shutil.rmtree(later.path)
    resumed = train(recipe, tmp_path / "cut", resume=True)
    assert losses(resumed) == losses(whole)
    other = replace(recipe, augment=Augment(mosaic=0.8, join_until=1.0))
    longer = losses(train(other, tmp_path / "longer"))
    assert longer[:4] == losses(whole)[:4]
    assert longer[4:] != losses(whole)[4:]


def test_the_last_epochs_join_nothing() -> None:
    settings = Augment(mosaic=0.5, paste=0.2, flip=True, join_until=0.75)
    at = [settings_at(settings, epoch=epoch, epochs=8) for epoch in range(8)]
    assert at[:6] == [settings] * 6
    assert at[6:] == [Augment(flip=True, join_until=0.75)] * 2
    assert only_cuts(at[7])
    assert not only_cuts(at[0])
    assert settings_at(Augment(mosaic=1, join_until=0), epoch=0, epochs=8).mosaic == 0


@pytest.mark.parametrize(
    "wrong", [{"mosaic": 1.2}, {"paste": -0.1}, {"join_until": 2}, {"mosaic": float("nan")}]
)
def test_shares_beyond_one_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="shares, 0 to 1"):
        Augment(**wrong)


def test_a_task_that_cannot_be_joined_says_so(dataset: Dataset, tmp_path: Path) -> None:
    recipe = Recipe(network="unet", dataset=str(dataset.path), augment=Augment(paste=0.5))
    with pytest.raises(UsageError, match=r"segmentation cannot be joined.*\n?.*mosaic only"):
        describe_run(recipe)
    rng = np.random.default_rng(0)
    for number in range(8):
        folder = tmp_path / "s" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (8, 8), np.uint8)).save(folder / f"{number}.png")
    made = import_images(tmp_path / "s", tmp_path / "d", ImportSettings(size=8, holdout=0.25))
    recipe = Recipe(network="lenet", dataset=str(made.path), augment=Augment(mosaic=0.5))
    with pytest.raises(UsageError, match="leave mosaic"):
        describe_run(recipe)
