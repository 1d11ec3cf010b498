"""What pages show of each task: small pictures, slices, masks of answers, forms, requests, and what
a dataset without a validation split has instead of errors. All of it takes some four seconds.
"""

from __future__ import annotations

import io
import re
import shutil
from base64 import b64decode
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.made_volumes import write_volumes
from tessella.annotations import rle
from tessella.artifacts.checkpoint import Network, Position, save_checkpoint
from tessella.artifacts.run import Recipe, RunInfo, write_run
from tessella.core.decoding import Decoder
from tessella.core.record import digest
from tessella.core.volumes import array_in
from tessella.data.importing import ImportSettings, import_images
from tessella.studio import pictures
from tessella.studio.boxes import masks_of
from tessella.studio.drawn_masks import things_of
from tessella.studio.import_form import Settings
from tessella.studio.serving import Histogram
from tessella.studio.serving_load import Load, to_watch
from tessella.tasks import named, names, targets_of
from tessella.tasks.instances.cells import CELLS, SIDE
from tests.support.pictures.folders import write_folder_of
from tests.support.shapes import write_shapes
from tests.support.studio.served import Served
from tests.support.studio.workspaces import make_plan, make_run, write_report


def seen(content: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(content)))


def test_a_page_of_large_pictures_asks_for_small_ones(
    client: httpx.Client, studio: Served, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    for number, kind in enumerate("abab"):
        pixels = np.kron(rng.integers(0, 256, (40, 40, 3)), np.ones((16, 16, 1))).astype(np.uint8)
        (tmp_path / kind).mkdir(exist_ok=True)
        Image.fromarray(np.roll(pixels, 1, axis=1)).save(tmp_path / kind / f"{number}.png")
    settings = ImportSettings(size=640, holdout=0.5, workers=1)
    made = import_images(tmp_path, studio.root / "datasets" / "large", settings)
    ref = "datasets/large"
    page = client.get("/data", params={"dataset": ref}).text
    address = pictures.example_address(made, ref, "train", 0, pictures.THUMB)
    assert address.replace("&", "&amp;") in page or address in page
    whole = seen(client.get(pictures.example_address(made, ref, "train", 0)).content)
    small = seen(client.get(address).content)
    assert (whole.shape, small.shape) == ((640, 640, 3), (320, 320, 3))
    means = whole.reshape(320, 2, 320, 2, 3).mean(axis=(1, 3))
    assert np.abs(means - small).max() <= 0.5
    shutil.rmtree(made.path)


def test_a_volume_is_seen_slice_by_slice_with_its_labels(tmp_path: Path) -> None:
    settings = ImportSettings(task="volumes", size=8, holdout=0.5, workers=1)
    made = import_images(
        write_volumes(tmp_path / "in", count=2, side=12), tmp_path / "out", settings
    )
    labels = np.load(
        tmp_path / "in" / "labelsTr" / Path(made.train[0].path).name.replace("_0000", "")
    )
    grey = array_in(made.train[0].content, "uint16")[..., 0] >> 8
    with closing(Decoder(processes=1)) as decoder:
        for at, place in ((2, 2), (7, 7), (-1, 6), (99, 6)):
            plain, drawn = (
                pictures._stored(made, "train", 0, decoder, drawn=drawn, at=at).astype(int)
                for drawn in (False, True)
            )
            assert np.abs(plain[..., 0] - grey[place]).max() <= 1
            colored = (drawn != plain).any(axis=2)
            assert not colored[labels[place] == 0].any()
            assert colored[labels[place] != 0].mean() > 0.9


def test_an_answer_about_each_pixel_lies_over_its_picture_as_a_drawing_of_it() -> None:
    rng = np.random.default_rng(0)
    picture = rng.integers(0, 256, (30, 40, 3)).astype(np.uint8)
    mask = rng.integers(0, 3, (30, 40)).astype(np.uint8)
    told = [
        {"index": k, "label": str(k), "share": 0.3, "box": [0.0, 0.0, 40.0, 30.0],
         "mask": {"size": [30, 40], "counts": rle.compressed(rle.counts_of(mask == k)).decode()}}
        for k in range(3)
    ]  # fmt: skip
    answers = named("segmentation").answers
    over = seen(b64decode(masks_of(answers, told, (30, 40)).partition(",")[2])).astype(float)
    share = over[:, :, 3:] / 255
    laid = picture * (1 - share) + over[:, :, :3] * share
    assert np.abs(laid - answers.taught(picture, mask, ())).max() <= 2
    large = masks_of(answers, [{**t, "box": [0, 0, 4000, 3000]} for t in told], (3000, 4000))
    assert seen(b64decode(large.partition(",")[2])).shape == (768, 1024, 4)
    assert masks_of(answers, [], (30, 40)) == ""


def test_patches_of_a_mask_are_its_pixels() -> None:
    mask = np.kron(np.random.default_rng(1).integers(0, 3, (5, 7)), np.ones((4, 6))).astype(
        np.uint8
    )
    painted = np.zeros_like(mask)
    for thing in things_of(mask, 0):
        inside = rle.mask_of(rle.expanded(thing["rle"].encode()), *mask.shape).astype(bool)
        assert not painted[inside].any()
        painted[inside] = thing["label"]
    assert np.array_equal(painted, mask)


def test_every_task_is_imported_from_the_form(client: httpx.Client) -> None:
    page = client.get("/data").text
    assert all(named(name).title in page for name in names())
    settings = Settings(task="detection", val_folder=" pictures/val.json ", holdout=0.2)
    argv = settings.spec("pictures/train.json", "datasets/cars").argv
    assert argv[argv.index("--task") + 1] == "detection"
    assert argv[argv.index("--val-folder") + 1] == "pictures/val.json"
    assert "--holdout" not in argv
    assert "--val-folder" not in Settings(val_folder="").spec("pictures", "datasets/x").argv
    volumes = Settings(task="volumes", size="32x64x64").spec("scans", "datasets/y").argv
    assert volumes[volumes.index("--size") + 1] == "32x64x64"
    assert "--resize" not in volumes


@pytest.mark.parametrize(("task", "verb"), [("detection", "detect"), ("regression", "predict")])
def test_a_request_to_try_asks_what_the_plan_answers(
    client: httpx.Client, studio: Served, task: str, verb: str
) -> None:
    path = studio.root / "plans" / "asked.plan"
    plan = make_plan(path, built_from=str(studio.root / "runs" / "first"))
    count = len(plan.manifest.labels)
    numbers = {"threshold": (0.5,) * count, "mean": (0.0,) * count, "std": (1.0,) * count}
    known = {"detection": ("threshold",), "regression": ("mean", "std")}[task]
    record = named(task).record({name: numbers[name] for name in known})
    replace(plan, manifest=replace(plan.manifest, task=record)).save(path)
    page = client.get("/plan", params={"plan": "plans/asked.plan"}).text
    path.unlink()
    assert f"/v2/models/asked/{verb} --data-binary" in page


def test_a_dataset_without_validation_is_told_and_evaluated_where_it_can_be(
    client: httpx.Client, studio: Served, tmp_path: Path
) -> None:
    settings = ImportSettings(size=28, channels=1, holdout=0.0, workers=1)
    folder = write_folder_of(tmp_path / "all", {"a": 3, "b": 3})
    made = import_images(folder, studio.root / "datasets" / "whole", settings)
    run = studio.root / "runs" / "whole"
    make_run(run, dataset="datasets/whole", epochs=1, steps=2)
    for file in (run / "run.json", *run.glob("checkpoints/*/checkpoint.json")):
        file.write_text(file.read_text().replace("ab" * 32, made.info.content_hash))
    explored = client.get("/explore", params={"run": "runs/whole"}).text
    judged = client.get("/evaluate", params={"run": "runs/whole"})
    for path in (run, made.path):
        shutil.rmtree(path)
    assert "no validation split" in explored
    assert judged.status_code == 200
    assert "--split train" in judged.text


def test_the_model_that_is_asked_is_shown_until_another_is_chosen() -> None:
    def load(answered: float) -> Load:
        return Load(
            answered=answered, refused=0, failed=0, samples=0, busy=0, of_best=0, waiting=0,
            whole=Histogram(), stages={}, batches=Histogram(), doors={}, clients={},
        )  # fmt: skip

    a, b = ("a", "1"), ("b", "1")
    assert to_watch({a: load(0), b: load(0)}, None) == a
    assert to_watch({a: load(0), b: load(3)}, a) == b
    assert to_watch({a: load(1), b: load(3)}, a) == a
    assert to_watch({a: load(0), b: load(0)}, b) == b
    assert to_watch({a: load(0)}, b) == a


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # pycocotools'
def test_errors_of_instances_are_shown_with_their_outlines(
    client: httpx.Client, studio: Served, tmp_path: Path
) -> None:
    """A network that tells all masks of a picture but the first, of which no weight is needed."""
    task, root = named("instances"), studio.root
    shapes = write_shapes(tmp_path, "shapes", count=4, size=(64, 64), sides=(16, 24))
    settings = ImportSettings(task="instances", size=64, holdout=0.5, workers=1)
    dataset = import_images(shapes, root / "datasets" / "shapes", settings)
    classes, batch = len(dataset.classes), targets_of(dataset.val).batch(np.arange(2))
    outputs = np.zeros((2, 100, 4 + classes + CELLS), np.float32)
    for output, things in zip(outputs, batch, strict=True):
        for row, thing in enumerate(t for t in things[1:] if t[4] >= 0):
            cells = thing[6:].reshape(SIDE, 2, SIDE, 2).mean(axis=(1, 3)).ravel()
            output[row, :4], output[row, 4 + int(thing[4])] = thing[:4], 0.9
            output[row, -CELLS:] = cells
    rows = task.metrics.rows(torch.from_numpy(outputs), None, classes).numpy()
    about = {
        "network": Network(
            name="mask_rcnn", classes=classes, channels=3, height=64, width=64, masks=True,
            options={},
        ),
        "preprocess": dataset.preprocess, "labels": dataset.classes, "task": task.record(),
        "dataset_hash": dataset.info.content_hash,
    }  # fmt: skip
    recipe = Recipe(network="mask_rcnn", dataset="datasets/shapes")
    run = root / "runs" / "shapes"
    run.mkdir()
    write_run(run, RunInfo(recipe=recipe, created="2026-11-27T10:05:00", **about))  # type: ignore[arg-type]
    made = save_checkpoint(
        run / "checkpoints" / "step-00000001", weights={"x": torch.zeros(1)},
        metrics={"val/map": 0.5}, position=Position(step=1, epoch=1.0), **about,  # type: ignore[arg-type]
    )  # fmt: skip
    report = task.metrics.measure(rows, targets_of(dataset.val), dataset.classes)
    ref = made.path.relative_to(root.resolve()).as_posix()
    key = digest([ref, made.info.files["model.safetensors"].sha256])[:24]
    write_report(root, "evaluations", key, report.to_json())
    np.save(root / ".studio" / "evaluations" / f"{key}.npy", rows)
    page = client.get("/explore", params={"run": "runs/shapes"}).text
    assert "missed 2" in page
    assert "all errors 2" in page
    drawings = [b64decode(d) for d in re.findall(r"data:image/svg\+xml;base64,([\w+/=]+)", page)]
    assert sum(b"<path" in drawing for drawing in drawings) >= 2  # both, with the masks they have
    shutil.rmtree(run)
    shutil.rmtree(dataset.path)
