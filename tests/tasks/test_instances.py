"""Instances the whole way: annotations → dataset → run → plan → server, mask by mask."""

from __future__ import annotations

import asyncio
import io
import json
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnxruntime as ort
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from tessella import api, graph
from tessella.annotations import rle
from tessella.artifacts.run import Augment
from tessella.core.errors import DataError, InputError
from tessella.core.preprocess import Preprocess, fit
from tessella.core.task import TaskRecord
from tessella.data import ImportSettings, import_images
from tessella.data.augment import augmented
from tessella.server import Server
from tessella.studio.boxes import svg
from tessella.tasks import Found, Query, Request, View, named, still, targets_of
from tessella.tasks.instances.cells import CELLS, SIDE, cells_of, counts_of, outlines
from tessella.tasks.instances.errors import match
from tests.support.cli import Tessella
from tests.support.shapes import NAMES, write_shapes

# of pycocotools' decoder with NumPy 2
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
TASK = named("instances")
LEARNED = 56
EPOCHS = 12


def read_mask(answer: dict[str, Any]) -> np.ndarray:
    """The mask of an answer, as the COCO API decodes it."""
    size, counts = answer["mask"]["size"], answer["mask"]["counts"].encode()
    return coco_mask.decode({"size": size, "counts": counts}).astype(bool)


@pytest.fixture(scope="module")
def way(tmp_path_factory: pytest.TempPathFactory):
    """Folder of the pictures, dataset, run and the path of a plan; pictures are not square."""
    here = tmp_path_factory.mktemp("instances")
    how: dict[str, Any] = {"size": (60, 80), "sides": (18, 32)}
    train = write_shapes(here / "pictures", "train", count=16, **how)
    val = write_shapes(here / "pictures", "val", count=4, seed=1, **how)
    settings = ImportSettings(task="instances", size=64, val_folder=val, resize="fill")
    dataset = import_images(train, here / "data", settings)
    run = api.train(
        "mask_rcnn", dataset, out=here / "run", epochs=EPOCHS, batch_size=4, val_interval=EPOCHS,
        network_options={"backbone": "resnet18", "width": 32, "proposals": 40, "detections": 12,
                         "anchor": 8},
        solver={"name": "adamw", "lr": 2e-3},
    )  # fmt: skip
    known: list[graph.Graph] = []

    def once(*args: Any, capture: Any = graph.capture, **settings: Any) -> graph.Graph:
        known[:] = known or [capture(*args, **settings)]
        return known[0]

    with pytest.MonkeyPatch.context() as patch:  # torch.export takes seconds
        patch.setattr(graph, "capture", once)
        api.export(run, here / "net.onnx")
        api.compile(run, batch=(1, 1, 2), untuned=True).save(here / "net.plan")
    return here / "pictures", dataset, run, here / "net.plan"


def test_the_whole_way(
    way, tessella: Tessella, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, dataset, run, plan = way
    checkpoint = api.open_checkpoint(run)
    metrics = checkpoint.info.metrics
    assert metrics["val/map50"] > 0.3
    assert metrics["val/box_map50"] > 0.3
    assert len(checkpoint.info.task.numbers["threshold"]) == 2
    report = api.verify(plan, against=run, data=dataset)
    assert report.agreement == 1.0
    assert report.max_abs_diff < 2e-3
    assert report.plan_score == pytest.approx(metrics["val/map"], abs=1e-3)
    files = [folder / example.path for example in dataset.val]
    told = api.answer(api.load(plan), files)
    truth = json.loads((folder / "val.json").read_text())
    numbers = {image["file_name"]: image["id"] for image in truth["images"]}
    hits, things = 0, 0
    for example, answer in zip(dataset.val, told, strict=True):
        for thing in truth["annotations"]:
            if thing["image_id"] != numbers[example.path]:
                continue
            shape = thing["segmentation"]
            known = coco_mask.frPyObjects(shape, 60, 80) if isinstance(shape, list) else [shape]
            mask = coco_mask.decode(known)[..., 0].astype(bool)
            alike = [read_mask(a) for a in answer if a["label"] == NAMES[thing["category_id"]]]
            hits += any((m & mask).sum() > 0.7 * (m | mask).sum() for m in alike)
            things += 1
    assert hits >= things / 4  # in the pictures' own pixels
    made_in_loop = []

    def watched(*asked: Any, answer: Any = TASK.answers.answer) -> list[Any]:
        made_in_loop.append(asyncio._get_running_loop() is not None)
        return answer(*asked)

    monkeypatch.setattr(TASK.answers, "answer", watched)
    with Server({"net": plan}) as server, httpx.Client(base_url=server.url) as client:
        for file, answer in zip(files[:2], told, strict=False):
            reply = client.post("/v2/models/net/segment", content=file.read_bytes())
            assert reply.json()["predictions"] == [answer]
        file = next(f for f, answer in zip(files, told, strict=True) if answer)
        drawn = client.post("/v2/models/net/segment?draw=1", content=file.read_bytes())
        wrong = client.post("/v2/models/net/detect", content=file.read_bytes())
    assert wrong.status_code == 404
    assert made_in_loop == [False] * 3  # other requests do not wait for masks
    assert "pixels" in tessella("run", plan, file, "--draw", tmp_path / "out.png").out
    one, other = (
        np.asarray(Image.open(f)) for f in (io.BytesIO(drawn.content), tmp_path / "out.png")
    )
    np.testing.assert_array_equal(one, other)
    inside = read_mask(told[files.index(file)][0])
    assert (one != np.asarray(Image.open(file)))[inside].any(axis=1).mean() > 0.9
    pixels = torch.from_numpy(checkpoint.info.preprocess(file.read_bytes())[None])
    session = ort.InferenceSession(
        str(plan.with_name("net.onnx")), providers=["CPUExecutionProvider"]
    )
    (made,) = session.run(None, {session.get_inputs()[0].name: pixels.numpy()})
    eager = api.eager_predictor(checkpoint)(pixels)
    assert (TASK.head.aligned(torch.from_numpy(made), eager) - eager).abs().max() < 1e-3
    assert "AP at 0.5" in tessella("run", plan, "--data", dataset.path).out
    again = tmp_path / "again.json"
    tessella("data", "annotations", folder / "val.json", "--out", again)
    assert import_images(again, tmp_path / "data", ImportSettings(
        task="instances", size=64, resize="fill", image_root=folder, holdout=0.0
    )).train.column.to_pylist() == dataset.val.column.to_pylist()  # fmt: skip


def column_of(rows: list[Any]) -> pa.ChunkedArray:
    return pa.chunked_array([pa.array(rows, TASK.examples.column())])


def row(drawn: list[np.ndarray], labels: list[int], **others: Any) -> dict[str, Any]:
    """A target of a picture of 40 × 60 pixels, all of which a network sees."""
    boxes = []
    for mask in drawn:
        x, y, w, h = coco_mask.toBbox(coco_mask.encode(np.asfortranarray(mask))).tolist()
        boxes.append([x, y, x + w, y + h])
    return {
        "boxes": boxes, "labels": labels, "crowds": [False] * len(drawn),
        "areas": [float(m.sum()) for m in drawn], "zoom": 1.0, "size": [40, 60],
        "view": [0, 0, 40, 60],
        "masks": [rle.compressed(rle.counts_of(m)) for m in drawn], **others,
    }  # fmt: skip


def ellipse(rng: np.random.Generator) -> np.ndarray:
    y, x = np.mgrid[:40, :60] + 0.5
    (a, b), angle = rng.uniform(3, 11, 2), rng.uniform(0, 3)
    y, x = y - rng.uniform(8, 32), x - rng.uniform(8, 52)
    u, v = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
    return ((u / a) ** 2 + (v / b) ** 2 < 1).astype(np.uint8)


@pytest.mark.parametrize("zoom", [1.0, 20.0])
def test_measures_are_pycocotools(zoom: float, tmp_path: Path) -> None:
    """On 30 pictures with crowds, doubles and misses, of masks and of boxes."""
    rng = np.random.default_rng(3)
    rows, outputs, things, told = [], [], [], []
    for image in range(30):
        masks = [ellipse(rng) for _ in range(int(rng.integers(0, 5)))]
        labels = rng.integers(0, 3, len(masks)).tolist()
        crowds = (rng.random(len(masks)) < 0.15).tolist()
        areas = [float(m.sum()) * zoom for m in masks]
        rows.append(row(masks, labels, crowds=crowds, areas=areas, zoom=zoom))
        for mask, label, crowd, area in zip(masks, labels, crowds, areas, strict=True):
            shape = coco_mask.encode(np.asfortranarray(mask))
            things.append({
                "id": len(things) + 1, "image_id": image, "category_id": label,
                "segmentation": shape, "area": area, "iscrowd": int(crowd),
                "bbox": coco_mask.toBbox(shape).tolist(),
            })  # fmt: skip
        found = np.zeros((100, 4 + 3 + CELLS), np.float32)
        said = [(m, k) for m, k in zip(masks, labels, strict=True) if rng.random() < 0.8]
        said += [(m, int(rng.integers(3))) for m in masks[:2]] + [(ellipse(rng), 0)]
        for place, (mask, label) in enumerate(said):
            x, y, w, h = coco_mask.toBbox(coco_mask.encode(np.asfortranarray(mask)))
            box = np.clip([x, y, x + w, y + h] + rng.normal(size=4) * 0.8, 0, [60, 40, 60, 40])
            if (box[2:] - box[:2]).min() < 1:
                continue
            cells = np.round(cells_of(mask, box.tolist(), SIDE) * 255) / 255
            score = np.float32(rng.uniform(0.1, 1))
            found[place, :4] = box / [60, 40, 60, 40]
            found[place, 4 + label], found[place, -CELLS:] = score, cells.ravel()
            seen = found[place, :4].astype(np.float64) * [60, 40, 60, 40]
            drawn = rle.mask_of(counts_of(cells, seen.tolist(), (40, 60)), 40, 60)
            told.append({
                "image_id": image, "category_id": label, "score": float(score),
                "segmentation": coco_mask.encode(np.asfortranarray(drawn)),
                "box": [*seen[:2], *(seen[2:] - seen[:2])],
            })  # fmt: skip
        outputs.append(found)
    targets = TASK.examples.targets(column_of(rows), 3)
    measured = TASK.metrics.rows(torch.from_numpy(np.stack(outputs)), None, 3).numpy()
    assert measured.shape == (30, TASK.metrics.width(3))
    report = TASK.metrics.measure(measured, targets, ("a", "b", "c"))

    plain = {"info": {}, "images": [{"id": i, "height": 40, "width": 60} for i in range(30)],
             "annotations": things, "categories": [{"id": k} for k in range(3)]}  # fmt: skip
    known = COCO()
    known.dataset = plain
    known.createIndex()
    answers = known.loadRes([{k: v for k, v in t.items() if k != "box"} for t in told])
    for one in answers.dataset["annotations"]:
        one["area"] *= zoom
    run = COCOeval(known, answers, "segm")
    run.evaluate()
    run.accumulate()
    run.summarize()
    found = match(measured, targets)
    for k, of_class in enumerate(found.report(("a", "b", "c"), np.zeros(3)).classes):
        wanted = run.eval["precision"][0, :, k, 0, 2].mean()
        assert of_class.average_precision == pytest.approx(wanted, abs=1e-9)
        assert of_class.recall == pytest.approx(run.eval["recall"][0, k, 0, 2], abs=1e-12)
    names = ("map", "map50", "map75", "small", "medium", "large")
    seen = [report.values.get(name, -1.0) for name in names]
    np.testing.assert_allclose(seen, run.stats[:6], atol=1e-6)
    assert 0.3 < report.map < 0.95
    of_boxes = [{**{k: t[k] for k in ("image_id", "category_id", "score")}, "bbox": t["box"]}
                for t in told]  # fmt: skip
    run = COCOeval(known, known.loadRes(of_boxes), "bbox")
    run.evaluate()
    run.accumulate()
    run.summarize()
    assert report.values["box_map"] == pytest.approx(run.stats[0], abs=1e-6)


def test_a_wrong_mask_in_the_right_box_is_an_error_that_is_drawn() -> None:
    """Beside a right one, in a picture of which the network sees all but a frame."""
    thing, half = np.zeros((2, 44, 66), np.uint8)
    thing[5:25, 13:43] = 1
    half[5:25, 13:25] = 1  # two fifths of the thing
    told = np.zeros((2, 100, 4 + 2 + CELLS), np.float32)
    for picture, mask in zip(told, (thing, half), strict=True):
        picture[0, :4], picture[0, 5] = np.array([10, 4, 40, 24]) / [60, 40, 60, 40], 0.9
        picture[0, -CELLS:] = cells_of(mask, (13, 5, 43, 25), SIDE).ravel()
    there = row([thing], [1], size=[44, 66], view=[1, 3, 40, 60])
    targets = TASK.examples.targets(column_of([there, there]), 2)
    measured = TASK.metrics.rows(torch.from_numpy(told), None, 2).numpy()
    found = match(measured, targets)
    (error,) = found.listed(np.full(2, 0.5), most=9)
    assert (error.image, error.kind) == (1, "place")
    record = TASK.record({"threshold": (0.5, 0.5)})
    assert TASK.metrics.losses(measured, targets, record, 2).tolist() == [0.0, 1.0]
    for drawn, right in ((found.told_outlines(1), 24.5), (found.thing_outlines(1), 42.5)):
        points = np.reshape(drawn[0], (-1, 2))
        np.testing.assert_allclose(points.min(axis=0), [13.5, 5.5])
        np.testing.assert_allclose(points.max(axis=0), [right, 24.5])


def test_a_split_without_answers_or_things_has_measures_and_no_number_is_seen() -> None:
    nothing = np.zeros((2, TASK.metrics.width(2)), np.float32)
    mask = ellipse(np.random.default_rng(0))
    one = TASK.examples.targets(column_of([row([mask], [0]), row([], [])]), 2)
    assert TASK.metrics.measure(nothing, one, ("a", "b")).map == 0.0
    none = TASK.examples.targets(column_of([row([], []), row([], [])]), 2)
    assert TASK.metrics.measure(nothing, none, ("a", "b")).map == 0.0
    broken = torch.zeros(1, 100, 4 + 2 + CELLS)
    broken[0, 0, -1] = torch.nan  # where no score is
    assert not TASK.metrics.rows(broken, None, 2).isfinite().all()


@pytest.mark.parametrize("seed", range(3))
def test_cells_are_drawn_as_torch_samples_them(seed: int) -> None:
    """Bilinear at the middle of each pixel, which ``grid_sample`` does in float64."""
    rng = np.random.default_rng(seed)
    cells = rng.random((SIDE, SIDE)).astype(np.float32)
    x0, y0 = rng.uniform(-9, 30, 2)
    x1, y1 = x0 + rng.uniform(2, 50), y0 + rng.uniform(2, 40)
    y, x = (torch.arange(n, dtype=torch.float64) + 0.5 for n in (40, 60))
    grid = torch.stack([
        (2 * (x - x0) / (x1 - x0) - 1).expand(40, 60),
        (2 * (y - y0) / (y1 - y0) - 1)[:, None].expand(40, 60),
    ], 2)  # fmt: skip
    told = F.grid_sample(torch.from_numpy(cells).double()[None, None], grid[None],
                         padding_mode="border", align_corners=False)[0, 0]  # fmt: skip
    inside = (grid.abs() <= 1).all(2)
    counts = counts_of(cells, (x0, y0, x1, y1), (40, 60))
    made = rle.mask_of(counts, 40, 60)
    np.testing.assert_array_equal(counts, rle.counts_of(made))  # no run touches another
    clear = (told - 0.5).abs() > 1e-5
    wanted = (told >= 0.5) & inside
    assert inside.any()
    np.testing.assert_array_equal(made[clear.numpy()], wanted.numpy()[clear.numpy()])


def test_a_mask_in_a_large_picture_takes_the_memory_of_its_columns() -> None:
    """A ring in 64 megapixels, for which no array of its pixels is made."""
    y, x = np.mgrid[:SIDE, :SIDE] + 0.5 - SIDE / 2
    cells = ((x**2 + y**2 < 13**2) & (x**2 + y**2 > 6**2)).astype(np.float32)
    tracemalloc.start()
    counts = counts_of(cells, (0.0, 0.0, 8000.0, 8000.0), (8000, 8000))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 40e6
    assert counts.sum() == 8000**2
    assert counts[1::2].sum() / 8000**2 == pytest.approx(cells.mean(), abs=0.01)
    small = counts_of(cells, (0.0, 0.0, 80.0, 80.0), (80, 80))
    assert counts[1::2].sum() / small[1::2].sum() == pytest.approx(10_000, rel=0.01)


def test_a_batch_holds_one_mask_at_a_time() -> None:
    """Forty things in a picture of a megapixel; all masks at once would be 40 MB."""
    mask = np.zeros((1000, 1000), np.uint8)
    mask[5:9, 5:9] = 1
    crowded = {**row([mask], [0]), "size": [1000, 1000], "view": [0, 0, 1000, 1000]}
    many = {k: crowded[k] * 40 for k in ("boxes", "labels", "crowds", "areas", "masks")}
    targets = TASK.examples.targets(column_of([{**crowded, **many}]), 1)
    tracemalloc.start()
    batch = targets.batch(np.arange(1))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert batch.shape == (1, 40, 6 + LEARNED**2)
    assert (batch[..., 6:] == 1).all()
    assert most < 12e6


def test_a_picture_of_too_many_things_is_left_out_and_listed(
    way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = way[0]
    plain = json.loads((folder / "train.json").read_text())
    counts = Counter(thing["image_id"] for thing in plain["annotations"])
    assert set(counts.values()) == {1, 2}
    monkeypatch.setattr(TASK.examples, "MOST", 1)
    settings = ImportSettings(task="instances", size=64, holdout=0.0)
    made = import_images(folder / "train.json", tmp_path / "some", settings)
    assert len(made.train) == list(counts.values()).count(1)
    assert [s.reason for s in made.info.skipped] == (
        ["2 things: instances take 1"] * list(counts.values()).count(2)
    )
    monkeypatch.setattr(TASK.examples, "MOST", 0)
    with pytest.raises(DataError, match="too many things"):
        import_images(folder / "train.json", tmp_path / "none", settings)
    with pytest.raises(ValueError, match="1 things"):
        TASK.examples.targets(column_of([row([MASK], [0])]), 1)


def test_the_share_of_a_cell_is_exact_and_masks_come_back() -> None:
    mask = np.zeros((40, 60), np.uint8)
    mask[10:20, 5:25] = 1
    cells = cells_of(mask, (4.0, 8.5, 25.0, 20.0), 56)
    ends = np.arange(57) / 56
    down = np.diff((8.5 + 11.5 * ends).clip(10, 20)) * 56 / 11.5
    across = np.diff((4 + 21 * ends).clip(5, 25)) * 56 / 21
    np.testing.assert_allclose(cells, np.outer(down, across), atol=1e-5)
    for seed in range(20):
        mask = ellipse(np.random.default_rng(seed))
        x, y, w, h = coco_mask.toBbox(coco_mask.encode(np.asfortranarray(mask))).tolist()
        box = (x, y, x + w, y + h)
        back = rle.mask_of(counts_of(cells_of(mask, box, SIDE), box, (40, 60)), 40, 60)
        assert (back & mask).sum() > 0.97 * (back | mask).sum()


@pytest.mark.parametrize("resize", ["squash", "crop", "fill", "half_crop"])
@pytest.mark.parametrize("crop", [None, (24, 28)])
def test_masks_move_with_their_picture_and_back(resize: str, crop, tmp_path: Path) -> None:
    """A bright ring, fitted: its mask is where the light is; and an answer leads back to it."""
    y, x = np.mgrid[:70, :90]
    far = (y - 34) ** 2 + (x - 43) ** 2
    ring = ((far < 19**2) & (far > 8**2)).astype(np.uint8)
    Image.fromarray(ring * 255).convert("RGB").save(tmp_path / "a.png")
    shape = coco_mask.encode(np.asfortranarray(ring))
    plain = {
        "images": [{"id": 1, "file_name": "a.png", "height": 70, "width": 90}],
        "categories": [{"id": 1, "name": "light"}],
        "annotations": [{
            "image_id": 1, "category_id": 1, "bbox": coco_mask.toBbox(shape).tolist(),
            "segmentation": {"size": [70, 90], "counts": shape["counts"].decode()},
        }],
    }  # fmt: skip
    (tmp_path / "a.json").write_text(json.dumps(plain))
    request = Request(
        source=tmp_path / "a.json", labels=None, image_root=None, by_folder=_no_folder
    )
    (source,) = TASK.examples.find(request).sources
    record = Preprocess(height=48, width=56, channels=3, resize=resize, crop=crop)  # type: ignore[arg-type]
    target = TASK.examples.stored(source.label, source.file, record)
    targets = TASK.examples.targets(column_of([target]), 1)
    moves = still(record)
    ((boxed,),) = targets.batch(np.arange(1), [moves])
    shown = np.asarray(Image.open(tmp_path / "a.png"))
    seen = fit(shown, record)[moves.top :, moves.left :][: moves.height, : moves.width, 0] > 127
    (mask,) = targets.shown(0)  # type: ignore[attr-defined]
    sides = [moves.width, moves.height] * 2
    left, top, right, bottom = (round(v) for v in boxed[:4] * sides)  # around it may be noise
    assert (mask.astype(bool) == seen)[top:bottom, left:right].mean() > 0.95
    output = np.zeros((1, 100, 5 + CELLS), np.float32)
    output[0, 0, :4], output[0, 0, 4] = boxed[:4], 0.9
    output[0, 0, 5:] = boxed[6:].reshape(SIDE, 2, SIDE, 2).mean(axis=(1, 3)).ravel()
    view = View(height=70, width=90, record=record)
    about = TaskRecord(name="instances", score="map")
    ((told,),) = TASK.answers.answer(output, ("light",), about, Query(views=(view,)))
    back = read_mask(told)
    (x0, y0), (x1, y1) = (np.floor(told["box"][:2]), np.ceil(told["box"][2:]))
    x0, y0, x1, y1 = (int(v) for v in (x0, y0, x1, y1))
    part = ring.astype(bool)[y0:y1, x0:x1]
    assert (back[y0:y1, x0:x1] & part).sum() > 0.85 * (back[y0:y1, x0:x1] | part).sum()
    assert back.sum() == back[y0:y1, x0:x1].sum()


def _no_folder(path: Path) -> Found:
    raise AssertionError(path)


def test_masks_are_augmented_with_their_pictures() -> None:
    """Turned, zoomed, cropped and mirrored: cells in their boxes are where the light is."""
    for seed in range(12):
        rng = np.random.default_rng(seed)
        mask = ellipse(rng)
        targets = TASK.examples.targets(column_of([row([mask], [0])]), 1)
        how = Augment(scale=0.2, rotation=25.0, flip=True)
        record = Preprocess(height=40, width=60, channels=1)
        seen, moves = augmented(mask[:, :, None] * 255, how, record, rng)
        made = np.zeros((moves.height, moves.width), bool)
        (boxes,) = targets.batch(np.arange(1), [moves])
        for box in boxes:
            place = (box[:4] * [moves.width, moves.height, moves.width, moves.height]).tolist()
            cells = box[6:].reshape(LEARNED, LEARNED)
            made |= rle.mask_of(counts_of(cells, place, made.shape), *made.shape).astype(bool)
        lit = seen[:, :, 0] > 127
        assert (made & lit).sum() > 0.85 * (made | lit).sum()


def test_a_thing_without_a_mask_is_a_crowd_and_none_with_one_is_refused(way, tmp_path) -> None:
    folder = way[0]
    plain = json.loads((folder / "val.json").read_text())
    plain["annotations"][0]["segmentation"] = []
    (folder / "some.json").write_text(json.dumps(plain))
    settings = ImportSettings(task="instances", size=64, holdout=0.0)
    made = import_images(folder / "some.json", tmp_path / "some", settings)
    crowds = [crowd for target in made.train.column.to_pylist() for crowd in target["crowds"]]
    assert crowds.count(True) == 1
    for thing in plain["annotations"]:
        thing["segmentation"] = []
    (folder / "none.json").write_text(json.dumps(plain))
    with pytest.raises(DataError, match="no masks"):
        import_images(folder / "none.json", tmp_path / "none", settings)


def test_broken_masks_of_annotations_are_listed_and_their_boxes_kept(way, tmp_path: Path) -> None:
    """Of another size, run lengths that lie, no numbers, too few points: each told, none stored."""
    folder = way[0]
    plain = json.loads((folder / "val.json").read_text())
    entry = plain["annotations"][0]
    size = [60, 80]
    broken = [
        {"size": [60, 81], "counts": "0"}, {"size": size, "counts": [4800, 1]},
        {"size": size, "counts": [-1, 4801]}, {"size": size, "counts": [1e300]},
        {"size": size, "counts": "\x7f" * 40}, {"size": size, "counts": "o" * 4000},
        {"size": size, "counts": {"a": 1}}, {"size": [1 << 40, 1 << 40], "counts": "0"},
        [[1, 1, 5]], [[1, 1, 5, 5, 9, "9"]], [[1e308] * 6],
        [[1, 1, 5, 5, 9]], [[-900, 1, 5, 5, 9, 9]],
    ]  # fmt: skip
    plain["annotations"] = [entry] + [
        {**entry, "id": 100 + i, "segmentation": shape, "bbox": [1 + 4 * i, 1, 4, 4]}
        for i, shape in enumerate(broken)
    ]
    (folder / "broken.json").write_text(json.dumps(plain))
    request = Request(
        source=folder / "broken.json", labels=None, image_root=None, by_folder=_no_folder
    )
    found = TASK.examples.find(request)
    things = [thing for source in found.sources for thing in source.label.things]
    assert len(things) == 1 + len(broken)
    assert [bool(t.polygons or t.rle) for t in things] == [True] + [False] * len(broken)
    assert any(f"{len(broken)} problems" in note for note in found.notes)
    assert any(f"{len(broken)} things have a box and no mask" in note for note in found.notes)


MASK = np.zeros((40, 60), np.uint8)
MASK[5:9, 5:9] = 1


@pytest.mark.parametrize(
    ("others", "what"),
    [
        ({"masks": []}, "without a mask each"),
        ({"masks": None}, "without a mask each"),
        ({"masks": [None]}, "without its mask"),
        ({"labels": [2]}, "no class"),
        ({"boxes": [[5.0, 5.0, float("nan"), 9.0]]}, "outside"),
    ],
)
def test_a_dataset_s_broken_targets_are_refused(others: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        TASK.examples.targets(column_of([{**row([MASK], [0]), **others}]), 2)


@pytest.mark.parametrize(
    "text", [b"", b"junk\xff", rle.compressed(np.array([2401])), rle.compressed(np.array([9] * 7))]
)
def test_a_dataset_s_masks_of_another_size_are_told(text: bytes) -> None:
    targets = TASK.examples.targets(column_of([row([MASK], [0], masks=[text])]), 1)
    with pytest.raises(DataError, match="size of its picture"):
        targets.batch(np.arange(1))
    (thing,) = TASK.answers.marked(row([MASK], [0], masks=[text]), ("a",))
    assert thing.outlines == ()


def test_answers_of_any_numbers_are_bounded_by_their_picture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plan may be a stranger's: boxes far outside, the wrong way round or of no area."""
    output = np.full((1, 100, 5 + CELLS), 0.9, np.float32)
    output[0, :5, :4] = [
        [-1e30, -1e30, 1e30, 1e30], [0.9, 0.9, 0.1, 0.1], [0.5, 0.5, 0.5, 0.5],
        [7, 7, 9, 9], [0.0, 0.0, 1.0, 1.0],
    ]  # fmt: skip
    view = View(height=30, width=50, record=Preprocess(height=40, width=40, resize="fill"))
    about = TaskRecord(name="instances", score="map")
    told = TASK.answers.answer(output[:, :5], ("a",), about, Query(views=(view,)))[0]
    masks = [read_mask(a) for a in told]
    assert {m.shape for m in masks} == {(30, 50)}
    assert sorted(int(m.sum()) for m in masks) == [0, 0, 0, 1500, 1500]
    monkeypatch.setattr(TASK.answers, "MOST_COLUMNS", 400)
    with pytest.raises(InputError, match=r"too many masks.*top=8"):
        TASK.answers.answer(output, ("a",), about, Query(views=(view,)))
    assert len(TASK.answers.answer(output, ("a",), about, Query(views=(view,), top=8))[0]) == 8
    (cells,) = TASK.answers.answer(output[:, 4:5], ("a",), about, Query())
    assert read_mask(cells[0]).shape == (SIDE, SIDE)
    assert read_mask(cells[0]).all()


def test_answers_are_compared_by_boxes_and_masks() -> None:
    output = np.zeros((1, 100, 5 + CELLS), np.float32)
    output[0, 0, :5] = [0.25, 0.25, 0.75, 0.75, 0.9]
    output[0, 0, 5 : 5 + CELLS // 2] = 0.9
    about = TaskRecord(name="instances", score="map", numbers={"threshold": (0.5,)})
    assert TASK.answers.same(output, output[:, ::-1], about).tolist() == [True]
    other = output.copy()
    other[0, 0, 5:] = other[0, 0, 5:][::-1]
    assert TASK.answers.same(output, other, about).tolist() == [False]


def test_rows_with_masks_are_compared_in_one_order() -> None:
    torch.manual_seed(0)
    right = TASK.head.finish(torch.rand(2, 100, 7 + CELLS), {})
    shuffled = right[:, torch.randperm(100)] + 1e-5
    assert (TASK.head.aligned(shuffled, right) - right).abs().max() < 2e-5
    few = TASK.head.finish(torch.rand(2, 7, 7 + CELLS), {})
    assert few.shape == right.shape
    assert (few[:, 7:] == 0).all()


def test_the_studio_draws_masks_with_their_holes(way) -> None:
    dataset = way[1]
    (first, *_) = TASK.answers.marked(dataset.val[0].label, dataset.classes)
    assert first.outlines
    drawing = svg([first], (64, 64), names=True)
    assert drawing.count("<path") == 1
    assert 'fill-rule="evenodd"' in drawing
    ring = np.zeros((20, 20), np.uint8)
    ring[2:18, 2:18] = 1
    ring[8:12, 8:12] = 0
    assert len(outlines(ring)) == 2


def test_targets_of_the_dataset_are_those_of_the_annotations(way) -> None:
    targets = targets_of(way[1].val)
    assert len(targets.having(0)) + len(targets.having(1)) >= len(targets)
    batch = targets.batch(np.arange(len(targets)))
    known = batch[batch[:, :, 4] >= 0]
    discs, triangles = (known[known[:, 4] == k][:, 6:].mean() for k in (0, 1))
    assert discs == pytest.approx(np.pi / 4, abs=0.1)
    assert triangles == pytest.approx(0.5, abs=0.1)
