"""Detection the whole way: annotations → dataset → run → plan → server, box by box."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnxruntime as ort
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as v2

from tessella import api
from tessella.artifacts.run import Augment
from tessella.core.errors import DataError, UsageError
from tessella.core.preprocess import Preprocess, fit
from tessella.core.task import TaskRecord
from tessella.core.tiles import Tiles
from tessella.data import ImportSettings, import_images
from tessella.data.augment import augmented
from tessella.quickstart.scattered import write_scattered
from tessella.server import Server
from tessella.tasks import Found, Moves, Query, Request, Targets, View, named, still, targets_of
from tessella.tasks.detection.examples import overlap
from tests.support.cli import Tessella

TASK = named("detection")
SIZE = 64


def boxes_of(path: Path) -> dict[str, list[tuple[str, list[float]]]]:
    """The truth in a COCO file: by the picture's name its labels, and boxes x0 y0 x1 y1."""
    plain = json.loads(path.read_text())
    names = {c["id"]: c["name"] for c in plain["categories"]}
    files = {i["id"]: i["file_name"] for i in plain["images"]}
    found: dict[str, list[tuple[str, list[float]]]] = {name: [] for name in files.values()}
    for thing in plain["annotations"]:
        x, y, w, h = thing["bbox"]
        found[files[thing["image_id"]]].append((names[thing["category_id"]], [x, y, x + w, y + h]))
    return found


def placed(targets: Targets, moves: Moves | None = None) -> np.ndarray:
    """The boxes of the first picture, moved: of a batch those rows that are one."""
    (rows,) = targets.batch(np.arange(1), None if moves is None else [moves])
    return rows[rows[:, 4] >= 0]


@pytest.fixture(scope="module")
def way(tmp_path_factory: pytest.TempPathFactory):
    """Folder of the pictures, dataset, run and the path of a plan: a toy, which learns a little.

    How good it gets is ``benchmarks.detection``'s, and a plan of chosen kernels the quick start's.
    """
    here = tmp_path_factory.mktemp("detection")
    train, val = write_scattered(
        here / "pictures", count=32, val=8, size=SIZE, most=2, sides=(24, 32), digits=(0, 1)
    )
    settings = ImportSettings(task="detection", size=SIZE, val_folder=val)
    dataset = import_images(train, here / "data", settings)
    run = api.train(
        "centernet", dataset, out=here / "run", epochs=8, batch_size=8, val_interval=8,
        network_options={"backbone": "test_resnet", "width": 16},
        solver={"name": "adamw", "lr": 4e-3},
    )  # fmt: skip
    api.compile(run, batch=(1, 1, 2), untuned=True).save(here / "net.plan")
    return here / "pictures", dataset, run, here / "net.plan"


def test_the_whole_way(way, tessella: Tessella, tmp_path: Path) -> None:
    folder, dataset, run, plan = way
    checkpoint = api.open_checkpoint(run)
    assert checkpoint.info.metrics["train/overlap"] > 0.4  # 0.60 with three seeds
    assert len(checkpoint.info.task.numbers["threshold"]) == 2
    report = api.verify(plan, against=run, data=dataset)
    assert report.agreement == 1.0
    assert report.max_abs_diff < 1e-3
    assert report.plan_score == pytest.approx(checkpoint.info.metrics["val/map"], abs=1e-3)
    truth = boxes_of(folder / "val.json")
    files = [folder / example.path for example in dataset.val]
    told = api.answer(api.load(plan), files)
    whole = Tiles(height=SIZE, width=SIZE, overlap=0)  # a picture is one tile
    assert api.answer(api.load(plan), files, tiles=whole) == told
    hits = 0
    for file, answer in zip(files, told, strict=True):
        for label, box in truth[f"images/{file.name}"]:
            alike = [a["box"] for a in answer if a["label"] == label]
            hits += bool(alike and overlap(np.array([box]), np.array(alike)).max() > 0.5)
    assert hits > 0
    with Server({"net": plan}) as server, httpx.Client(base_url=server.url) as client:
        for file, answer in zip(files[:4], told, strict=False):
            reply = client.post("/v2/models/net/detect", content=file.read_bytes())
            assert reply.json()["predictions"] == [answer]
        file = next(f for f, answer in zip(files, told, strict=True) if answer)
        drawn = client.post("/v2/models/net/detect?draw=1", content=file.read_bytes())
        wrong = client.post("/v2/models/net/segment", content=file.read_bytes())
    assert wrong.status_code == 404
    assert drawn.headers["content-type"] == "image/png"
    drawing = ("--draw", tmp_path / "out.png", "--tile", SIZE, "--overlap", 8)
    assert "score" in tessella("run", plan, file, *drawing).out
    assert "could not be written" in tessella("run", plan, file, file, *drawing).err  # no folder
    assert "--json" in tessella("run", plan, file, "--out", tmp_path / "told.json").err
    odd = tmp_path / os.fsdecode(b"p\xff1.png")
    shutil.copy(file, odd)
    (shown,) = tessella("run", plan, odd, "--json").json["images"]
    assert shown["image"].endswith("p\\xff1.png")
    odd.write_bytes(b"no picture")
    (shown,) = tessella("run", plan, odd, "--json").json["images"]
    assert "p\\xff1.png" in f"{shown['wrong']} {shown['seen']}"
    one, other = (
        np.asarray(Image.open(f)) for f in (io.BytesIO(drawn.content), tmp_path / "out.png")
    )
    np.testing.assert_array_equal(one, other)
    assert (one != np.asarray(Image.open(file))).any()
    api.export(run, tmp_path / "net.onnx")
    pixels = torch.from_numpy(api.open_checkpoint(run).info.preprocess(file.read_bytes())[None])
    session = ort.InferenceSession(str(tmp_path / "net.onnx"), providers=["CPUExecutionProvider"])
    (made,) = session.run(None, {session.get_inputs()[0].name: pixels.numpy()})
    eager = api.eager_predictor(checkpoint)(pixels)
    assert (TASK.head.aligned(torch.from_numpy(made), eager) - eager).abs().max() < 1e-4
    rows = tmp_path / "rows.npy"
    assert "AP at 0.5" in tessella("run", plan, "--data", dataset.path, "--rows", rows).out
    found = api.evaluate(plan, dataset, split="val", threshold=0.3, overlap=0.6, resamples=1)
    assert TASK.errors is not None
    seen = TASK.errors.match(np.load(rows), targets_of(dataset.val), 0.6)
    assert found.errors == seen.report(dataset.classes, np.full(2, 0.3))
    usual = TASK.errors.match(np.load(rows), targets_of(dataset.val), 0.5)
    losses = usual.losses(np.full(2, 0.3), len(dataset.val))
    wrong = sorted(losses[losses > 0], reverse=True)
    assert [m.loss for m in found.mistakes] == pytest.approx(wrong)
    assert found.to_json()["errors"]["overlap"] == 0.6
    with pytest.raises(UsageError, match=r"between 0\.15 and 1"):
        api.evaluate(plan, dataset, split="val", overlap=0.0)


def column_of(rows: list[Any]) -> pa.ChunkedArray:
    return pa.chunked_array([pa.array(rows, TASK.examples.column())])


def row(boxes: list[list[float]], labels: list[int], **others: Any) -> dict[str, Any]:
    """A target of a picture of 40 × 60 pixels, all of which a network sees."""
    areas = [(x1 - x0) * (y1 - y0) for x0, y0, x1, y1 in boxes]
    return {
        "boxes": boxes, "labels": labels, "crowds": [False] * len(boxes), "areas": areas,
        "zoom": 1.0, "size": [40, 60], "view": [0, 0, 40, 60], **others,
    }  # fmt: skip


def coco_of(things: list[Any], told: list[Any], images: int, classes: int, folder: Path) -> Any:
    """What pycocotools says."""
    plain = {"info": {}, "images": [{"id": i} for i in range(images)], "annotations": things,
             "categories": [{"id": k} for k in range(classes)]}  # fmt: skip
    (folder / "truth.json").write_text(json.dumps(plain))
    known = COCO(str(folder / "truth.json"))
    run = COCOeval(known, known.loadRes(told), "bbox")
    run.evaluate()
    run.accumulate()
    run.summarize()
    return run


@pytest.mark.parametrize(("zoom", "digits"), [(1.0, 9), (20.0, 9), (1.0, 1)])
def test_measures_are_pycocotools(zoom: float, digits: int, tmp_path: Path) -> None:
    """On 40 pictures with crowds, doubles, misses, boxes of each size, and perhaps equal scores."""
    rng = np.random.default_rng(3)
    classes, pictures, rows, outputs = 3, [], [], []
    for _ in range(40):
        count = int(rng.integers(0, 6))
        low = rng.uniform(0, 25, (count, 2))
        boxes = np.concatenate([low, low + rng.uniform(3, 14, (count, 2))], axis=1)
        labels = rng.integers(0, classes, count)
        crowds = rng.random(count) < 0.1
        made = row(boxes.tolist(), labels.tolist(), zoom=zoom, crowds=crowds.tolist())
        made["areas"] = [area * zoom for area in made["areas"]]
        rows.append(made)
        found = np.zeros((100, 4 + classes), np.float32)
        others = rng.uniform(0, 20, (3, 4))
        others[:, 2:] += 20
        noisy = np.concatenate([boxes, boxes[:2], others])
        noisy = noisy + rng.normal(size=noisy.shape)
        found[: len(noisy), :4] = noisy / [60, 40, 60, 40]
        said = np.concatenate([labels, labels[:2], rng.integers(0, classes, 3)])
        scores = rng.uniform(0.1, 1, len(noisy)).round(digits)
        found[np.arange(len(noisy)), 4 + said] = scores
        outputs.append(found)
        pictures.append((boxes, labels, crowds))
    targets = TASK.examples.targets(column_of(rows), classes)
    made_of = TASK.metrics.rows(torch.from_numpy(np.stack(outputs)), None, classes).numpy()
    report = TASK.metrics.measure(made_of, targets, ("a", "b", "c"))

    side = zoom**0.5
    things, told = [], []
    for image, (boxes, labels, crowds) in enumerate(pictures):
        for box, label, crowd in zip(boxes * side, labels.tolist(), crowds.tolist(), strict=True):
            w, h = float(box[2] - box[0]), float(box[3] - box[1])
            things.append({"id": len(things) + 1, "image_id": image, "category_id": label,
                           "bbox": [*box[:2].tolist(), w, h], "area": w * h,
                           "iscrowd": int(crowd)})  # fmt: skip
        for *place, score, k in made_of[image].reshape(-1, 6).astype(np.float64).tolist():
            x0, y0, x1, y1 = (np.array(place) * [60, 40, 60, 40] * side).tolist()
            told += [{
                "image_id": image, "category_id": int(k), "bbox": [x0, y0, x1 - x0, y1 - y0],
                "score": score,
            }] * (score > 0)  # fmt: skip
    run = coco_of(things, told, len(pictures), classes, tmp_path)
    names = ("map", "map50", "map75", "small", "medium", "large")
    seen = [report.values.get(name, -1.0) for name in names]
    np.testing.assert_allclose(seen, run.stats[:6], atol=1e-6)
    assert report.recall == pytest.approx(run.stats[8], abs=1e-6)
    precision = run.eval["precision"][:, :, :, 0, 2]
    for k, told_of in enumerate(report.classes):
        assert told_of.average_precision == pytest.approx(precision[:, :, k].mean(), abs=1e-6)
        assert told_of.at_half == pytest.approx(precision[0, :, k].mean(), abs=1e-6)
        assert 0.1 <= told_of.threshold <= 1

    # Drawn anew, an image counts as often as it is drawn: so many images with the same things.
    drawn = np.bincount(rng.integers(0, len(pictures), len(pictures)), minlength=len(pictures))
    copies = np.repeat(np.arange(len(pictures)), drawn).tolist()
    again = [[{**one, "image_id": new} for new, old in enumerate(copies) for one in every
              if one["image_id"] == old] for every in (things, told)]  # fmt: skip
    for number, thing in enumerate(again[0], start=1):
        thing["id"] = number
    run = coco_of(*again, len(copies), classes, tmp_path)
    values = report.resampled(np.stack([np.ones(len(drawn)), drawn], axis=1).astype(np.float64))
    seen = [values[name][1] for name in (*names, "recall")]
    np.testing.assert_allclose(
        np.nan_to_num(seen, nan=-1), [*run.stats[:6], run.stats[8]], atol=1e-9
    )
    for name, value in report.values.items():
        assert values[name][0] == pytest.approx(value, abs=1e-12)


def test_a_split_without_answers_or_without_things_has_measures() -> None:
    nothing = np.zeros((2, TASK.metrics.width(2)), np.float32)
    one = TASK.examples.targets(column_of([row([[1, 1, 9, 9]], [0]), row([], [])]), 2)
    report = TASK.metrics.measure(nothing, one, ("a", "b"))
    assert report.map == 0.0
    assert report.classes[1].average_precision is None
    none = TASK.examples.targets(column_of([row([], []), row([], [])]), 2)
    assert TASK.metrics.measure(nothing, none, ("a", "b")).map == 0.0


@pytest.mark.parametrize("resize", ["squash", "crop", "fill", "half_crop"])
@pytest.mark.parametrize("crop", [None, (24, 28)])
def test_boxes_move_with_their_picture_and_back(resize: str, crop, tmp_path: Path) -> None:
    """A bright rectangle, fitted: its box is where the light is; and the view leads back."""
    shown = np.zeros((70, 90, 3), np.uint8)
    x0, y0, x1, y1 = 30, 22, 58, 47
    shown[y0:y1, x0:x1] = 255
    Image.fromarray(shown).save(tmp_path / "a.png")
    plain = {
        "images": [{"id": 1, "file_name": "a.png", "height": 70, "width": 90}],
        "categories": [{"id": 1, "name": "light"}],
        "annotations": [{"image_id": 1, "category_id": 1, "bbox": [x0, y0, x1 - x0, y1 - y0]}],
    }
    (tmp_path / "a.json").write_text(json.dumps(plain))
    request = Request(
        source=tmp_path / "a.json", labels=None, image_root=None, by_folder=_no_folder
    )
    (source,) = TASK.examples.find(request).sources
    record = Preprocess(height=32, width=36, channels=3, resize=resize, crop=crop)  # type: ignore[arg-type]
    target = TASK.examples.stored(source.label, source.file, record)
    targets = TASK.examples.targets(column_of([target]), 1)
    moves = still(record)
    (box,) = placed(targets, moves)
    np.testing.assert_array_equal(placed(targets)[0], box)
    assert box[4:].tolist() == [0, 0]
    seen = fit(shown, record)[moves.top :, moves.left :][: moves.height, : moves.width, 0] / 255
    sides = [moves.width, moves.height] * 2
    np.testing.assert_allclose(_light(seen), box[:4] * sides, atol=0.75)
    view = View(height=70, width=90, record=record)
    back = view.in_picture(np.array([box[:4]], np.float64))
    np.testing.assert_allclose(back, [[x0, y0, x1, y1]], atol=1e-3)
    assert target["areas"] == [(x1 - x0) * (y1 - y0)]


def _no_folder(path: Path) -> Found:
    raise AssertionError(path)


def _light(seen: np.ndarray) -> list[float]:
    """The box of what is bright, to parts of a pixel: by how much of a row and a column is."""
    rows, columns = seen.max(1), seen.max(0)
    y, x = np.flatnonzero(rows > 0.6), np.flatnonzero(columns > 0.6)
    return [float(x[0]), float(y[0]), float(x[-1] + 1), float(y[-1] + 1)]


@pytest.mark.parametrize("seed", range(4))
def test_boxes_are_augmented_as_torchvision_does(seed: int) -> None:
    """Rotation and zoom about the centre, a crop and mirrors; and where the light is."""
    rng = np.random.default_rng(seed)
    size, box = (60, 80), np.array([[30.0, 20.0, 46.0, 36.0]])
    moves = Moves(top=5, left=9, height=48, width=60, mirror=bool(seed % 2), flip=seed > 1,
                  angle=float(rng.uniform(-20, 20)), zoom=float(rng.uniform(0.8, 1.2)))  # fmt: skip
    moved, made_of = moves.boxes(box, size)
    assert set(made_of.tolist()) == {0}
    wanted = tv_tensors.BoundingBoxes(box, format="XYXY", canvas_size=size, dtype=torch.float64)
    wanted = v2.affine(wanted, angle=-moves.angle, translate=[0, 0], scale=moves.zoom, shear=[0, 0])
    wanted = v2.crop(wanted, moves.top, moves.left, moves.height, moves.width)
    if moves.mirror:
        wanted = v2.horizontal_flip(wanted)
    if moves.flip:
        wanted = v2.vertical_flip(wanted)
    np.testing.assert_allclose(moved[0], wanted[0].numpy(), atol=0.02)


def test_what_a_mirrored_border_shows_again_is_a_thing_again() -> None:
    """Zoomed out, the border mirrors outwards; a thing beside it is there twice."""
    shown = np.zeros((40, 60, 1), np.uint8)
    shown[10:20, 2:12] = 255
    targets = TASK.examples.targets(column_of([row([[2, 10, 12, 20]], [0])]), 1)
    record = Preprocess(height=40, width=60, channels=1)
    for seed in range(40):
        drawn = np.random.default_rng(seed)
        seen, moves = augmented(shown, Augment(scale=0.3), record, drawn)
        boxes = placed(targets, moves)
        lit = seen[:, :, 0] > 128
        inside = np.zeros_like(lit)
        for x0, y0, x1, y1, _, _ in boxes * [60, 40, 60, 40, 1, 1]:
            inside[round(y0) : round(y1), round(x0) : round(x1)] = True
        assert (lit == inside).mean() > 0.98
    far = Moves(top=0, left=0, height=40, width=60, zoom=0.7)
    assert len(placed(targets, far)) == 2


def test_what_is_hardly_seen_is_a_crowd() -> None:
    targets = TASK.examples.targets(column_of([row([[0, 0, 20, 20], [30, 5, 50, 25]], [0, 1])]), 2)
    moves = Moves(top=0, left=16, height=40, width=40)
    boxes = placed(targets, moves)
    np.testing.assert_allclose(boxes[:, 4:], [[0, 1], [1, 0]])
    np.testing.assert_allclose(boxes[0, :4], [0, 0, 4 / 40, 20 / 40])


@pytest.mark.parametrize(
    ("others", "what"),
    [
        ({"labels": [2]}, "no class"),
        ({"boxes": [[5.0, 5.0, 70.0, 9.0]]}, "outside"),
        ({"boxes": [[5.0, 5.0, 5.0, 9.0]]}, "outside"),
        ({"boxes": [[5.0, 5.0, float("nan"), 9.0]]}, "outside"),
        ({"boxes": [[5.0, 5.0, 9.0]]}, "4 numbers"),
        ({"boxes": [[5.0, None, 9.0, 9.0]]}, "numbers"),
        ({"boxes": None}, "without boxes"),
        ({"crowds": []}, "crowds"),
        ({"areas": [float("inf")]}, "outside"),
        ({"size": [0, 60]}, "no size"),
        ({"view": [0, 0, 41, 60]}, "view"),
        ({"zoom": 0.0}, "view"),
    ],
)
def test_a_dataset_s_broken_boxes_are_refused(others: dict[str, Any], what: str) -> None:
    broken = {**row([[5.0, 5.0, 9.0, 9.0]], [0]), **others}
    with pytest.raises(ValueError, match=what):
        TASK.examples.targets(column_of([broken]), 2)


def test_answers_are_in_the_picture_s_pixels_and_reach_their_thresholds() -> None:
    output = np.zeros((1, 100, 6), np.float32)
    output[0, 0] = [0.25, 0.5, 0.5, 1.0, 0.9, 0.35]
    output[0, 1] = [0.0, 0.0, 0.5, 0.5, 0.1, 0.6]
    about = TaskRecord(name="detection", score="map", numbers={"threshold": (0.5, 0.4)})
    view = View(height=200, width=400, record=Preprocess(height=40, width=40, resize="fill"))
    (told,) = TASK.answers.answer(output, ("a", "b"), about, Query(views=(view,)))
    assert [(a["label"], round(a["score"], 4)) for a in told] == [("a", 0.9), ("b", 0.6)]
    np.testing.assert_allclose(told[0]["box"], [100, 100, 200, 200], atol=1e-3)  # cut at the edge
    (more,) = TASK.answers.answer(output, ("a", "b"), about, Query(threshold=0.3, top=2))
    assert [a["label"] for a in more] == ["a", "b"]
    np.testing.assert_allclose(more[0]["box"], [0.25, 0.5, 0.5, 1.0])
    (every,) = TASK.answers.answer(output, ("a", "b"), about, Query(threshold=0.0))
    assert len(every) == 4
    moved = output.copy()
    moved[0, 0, :4] += 0.004
    assert TASK.answers.same(output, moved, about).tolist() == [True]
    moved[0, 0, 0] += 0.1
    assert TASK.answers.same(output, moved, about).tolist() == [False]
    assert TASK.answers.same(output, output[:, ::-1], about).tolist() == [True]


def test_rows_are_compared_in_one_order() -> None:
    torch.manual_seed(0)
    right = torch.rand(2, 100, 7)
    right = TASK.head.finish(right, {})
    shuffled = right[:, torch.randperm(100)] + 1e-5
    assert (TASK.head.aligned(shuffled, right) - right).abs().max() < 2e-5
    few, many = right.clone(), right.clone()
    few[:, :4], many[:, :30] = torch.rand(2, 4, 7), torch.rand(2, 30, 7)
    assert (TASK.head.aligned(few, right) - right).abs().max() == 0
    assert (TASK.head.aligned(many, right) - right).abs().max() > 0.1


def test_networks_of_other_answers_are_refused(way, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"asks for boxes.*unet.*centernet"):
        api.train("unet", way[1], out=tmp_path / "run")


def test_annotations_without_things_are_refused(way, tmp_path: Path) -> None:
    plain = json.loads((way[0] / "val.json").read_text())
    (way[0] / "none.json").write_text(json.dumps({**plain, "annotations": []}))
    with pytest.raises(DataError, match="name no things"):
        import_images(way[0] / "none.json", tmp_path / "data", ImportSettings(task="detection"))


def test_a_resumed_training_is_the_same(way, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "batch_size": 8, "network_options": {"backbone": "timm/test_resnet", "width": 16},
        "val_interval": 0.5, "snapshot_interval": 0.4, "augment": {"flip": True, "scale": 0.2},
        "policy": {"name": "fixed", "warmup": 0.0},
    }  # fmt: skip
    whole = api.train("centernet", way[1], out=tmp_path / "a", epochs=0.8, **settings)
    api.train("centernet", way[1], out=tmp_path / "b", epochs=0.4, **settings)
    again = api.train("centernet", way[1], out=tmp_path / "b", epochs=0.8, resume=True, **settings)
    one, other = (run.latest().weights() for run in (whole, again))
    assert all(torch.equal(one[name], other[name]) for name in one)
