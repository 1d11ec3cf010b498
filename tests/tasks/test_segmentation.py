"""Semantic segmentation the whole way: masks and outlines → dataset → run → plan → server."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from sklearn import metrics

from tessella import api
from tessella.annotations import rle
from tessella.artifacts.run import Augment
from tessella.core.errors import DataError, UsageError
from tessella.core.preprocess import Preprocess, fit
from tessella.data import ImportSettings, examine, images, import_images
from tessella.data.augment import augmented
from tessella.data.listing import Listing, list_images
from tessella.server import Server
from tessella.tasks import Found, LossSettings, Query, Request, View, named, still
from tessella.tasks.segmentation.examples import IGNORED, decoded, encoded, target_of
from tests.support.cli import Tessella

TASK = named("segmentation")
CLASSES = ("ground", "red", "green")
COUNT, HEIGHT, WIDTH = 60, 32, 40


def write_pictures(folder: Path) -> Path:
    """Pictures of red and green rectangles on noise: their masks, and as COCO's outlines."""
    rng = np.random.default_rng(0)
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    things, entries = [], []
    for number in range(COUNT):
        pixels = rng.integers(0, 90, (HEIGHT, WIDTH, 3)).astype(np.uint8)
        mask = np.zeros((HEIGHT, WIDTH), np.uint8)
        for label in rng.permutation(2)[: rng.integers(1, 3)].tolist():
            h, w = rng.integers(8, 16, 2).tolist()
            y, x = int(rng.integers(0, HEIGHT - h)), int(rng.integers(0, WIDTH - w))
            pixels[y : y + h, x : x + w] %= 90  # what was there before lies below
            pixels[y : y + h, x : x + w, label] += 150
            mask[y : y + h, x : x + w] = label + 1
            outline = [x, y, x + w, y, x + w, y + h, x, y + h]
            things.append({
                "image_id": number, "category_id": label, "segmentation": [outline],
                "bbox": [x, y, w, h],
            })  # fmt: skip
        Image.fromarray(pixels).save(folder / "images" / f"{number}.png")
        Image.fromarray(mask).save(folder / "masks" / f"{number}.png")
        entries.append({"id": number, "file_name": f"images/{number}.png",
                       "height": HEIGHT, "width": WIDTH})  # fmt: skip
    categories = [{"id": k, "name": name} for k, name in enumerate(CLASSES[1:])]
    plain = {"images": entries, "categories": categories, "annotations": things}
    (folder / "outlines.json").write_text(json.dumps(plain))
    (folder / "classes.txt").write_text("\n".join(CLASSES))
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("segmentation") / "pictures")


SETTINGS = ImportSettings(task="segmentation", size=(HEIGHT, WIDTH), holdout=0.25)


@pytest.fixture(scope="module")
def way(pictures: Path):
    """Dataset, run and the path of a plan."""
    here = pictures.parent
    dataset = import_images(pictures, here / "data", SETTINGS)
    run = api.train(
        "unet", dataset, out=here / "run", epochs=20, batch_size=9, network_options={"width": 8},
        solver={"name": "adamw", "lr": 5e-3}, augment={"flip": True}, val_interval=5,
    )  # fmt: skip
    api.compile(run, batch=(1, 2, 4), untuned=True).save(here / "net.plan")
    return dataset, run, here / "net.plan"


def test_the_whole_way(way, pictures: Path, tessella: Tessella) -> None:
    dataset, run, plan = way
    assert dataset.classes == CLASSES
    checkpoint = api.open_checkpoint(run)
    assert checkpoint.info.metrics["val/miou"] > 0.85
    assert checkpoint.info.network.dense
    report = api.verify(plan, against=run, data=dataset)
    assert report.agreement == 1.0
    assert report.score == "miou"
    assert report.plan_score == pytest.approx(checkpoint.info.metrics["val/miou"], abs=1e-3)
    files = [pictures / "images" / dataset.val[i].path for i in range(3)]
    told = api.answer(api.load(plan), files)
    for i, answer in enumerate(told):
        truth, seen = decoded(dataset.val[i].label["mask"]), np.zeros((HEIGHT, WIDTH), np.uint8)
        for entry in answer:
            counts = rle.expanded(entry["mask"]["counts"].encode())
            inside = rle.mask_of(counts, *entry["mask"]["size"]).astype(bool)
            assert entry["share"] == pytest.approx(inside.mean())
            seen[inside] = CLASSES.index(entry["label"])
        assert (seen == truth).mean() > 0.9
    with Server({"net": plan}) as server, httpx.Client(base_url=server.url) as client:
        for file, answer in zip(files, told, strict=True):
            reply = client.post("/v2/models/net/segment", content=file.read_bytes())
            assert reply.json()["predictions"] == [answer]
        wrong = client.post("/v2/models/net/classify", content=files[0].read_bytes())
    assert wrong.status_code == 404
    api.export(run, pictures.parent / "net.onnx")
    again = api.compile(pictures.parent / "net.onnx", batch=1, untuned=True)
    assert again.manifest.task.name == "segmentation"
    assert api.answer(again, files[:1])[0][0]["label"] == told[0][0]["label"]
    assert "share of the picture" in tessella("run", plan, files[0]).out
    assert "IoU" in tessella("run", plan, "--data", dataset.path).out


def test_masks_and_outlines_are_the_same_dataset(way, pictures: Path, tmp_path: Path) -> None:
    dataset = import_images(pictures / "outlines.json", tmp_path / "data", SETTINGS)
    assert dataset.classes == ("background", "red", "green")
    one, other = (
        {Path(e.path).name: e.label for s in d.info.splits for e in d.split(s)}
        for d in (dataset, way[0])
    )
    assert one == other
    assert sum(s.count for s in dataset.info.splits.values()) == COUNT


def test_a_background_that_annotations_name_is_the_first_class(
    way, pictures: Path, tmp_path: Path
) -> None:
    plain = json.loads((pictures / "outlines.json").read_text())
    for thing in plain["annotations"]:
        thing["category_id"] *= 2
    names = ("red", "Background", "green")
    plain["categories"] = [{"id": k, "name": name} for k, name in enumerate(names)]
    whole = {"category_id": 1, "segmentation": [[0, 0, WIDTH, 0, WIDTH, HEIGHT, 0, HEIGHT]]}
    plain["annotations"] += [{**whole, "image_id": number} for number in range(COUNT)]
    (tmp_path / "outlines.json").write_text(json.dumps(plain))
    settings = replace(SETTINGS, image_root=pictures)
    dataset = import_images(tmp_path / "outlines.json", tmp_path / "data", settings)
    assert dataset.classes == ("background", "red", "green")
    one, other = (
        {Path(e.path).name: e.label for s in d.info.splits for e in d.split(s)}
        for d in (dataset, way[0])
    )
    assert one == other


def test_boxes_without_masks_are_refused(pictures: Path, tmp_path: Path) -> None:
    plain = json.loads((pictures / "outlines.json").read_text())
    for thing in plain["annotations"][40:]:
        del thing["segmentation"]
    path = pictures / "boxes.json"
    path.write_text(json.dumps(plain))
    notes = import_images(path, tmp_path / "one", SETTINGS).info.notes
    assert any("have a box and no mask" in note for note in notes)
    for thing in plain["annotations"][:40]:
        del thing["segmentation"]
    plain["annotations"][0]["segmentation"] = {"size": [3, 3], "counts": [9]}
    path.write_text(json.dumps(plain))
    with pytest.raises(DataError, match=r"have no masks.*1 problem in.*a mask of"):
        import_images(path, tmp_path / "none", SETTINGS)


def test_bad_masks_are_listed(pictures: Path, tmp_path: Path) -> None:
    bad = {
        "0": (np.full((HEIGHT, WIDTH), 256, np.uint16), "number of no class"),
        "1": (np.eye(HEIGHT, WIDTH, dtype=np.uint8)[:, :, None] * [1, 0, 0], "one channel of 8"),
        "2": (np.zeros((HEIGHT, WIDTH - 1), np.uint8), "another size"),
        "3": (np.full((HEIGHT, WIDTH), 3, np.uint8), "number of no class"),
        "4": (b"\x89PNG\r\n\x1a\nxx", "no PNG"),
        "5": (None, "no mask 5.png"),
    }
    for kind in ("images", "masks"):
        (tmp_path / "s" / kind).mkdir(parents=True)
        for number in range(12):
            content = (pictures / kind / f"{number}.png").read_bytes()
            (tmp_path / "s" / kind / f"{number}.png").write_bytes(content)
    (tmp_path / "s" / "classes.txt").write_text("\n".join(CLASSES))
    for stem, (content, _) in bad.items():
        file = tmp_path / "s" / "masks" / f"{stem}.png"
        if isinstance(content, np.ndarray):
            Image.fromarray(content.astype(np.uint16 if stem == "0" else np.uint8)).save(file)
        elif content is None:
            file.unlink()
        else:
            file.write_bytes(content)
    dataset = import_images(tmp_path / "s", tmp_path / "data", SETTINGS)
    reasons = {Path(s.path).stem: s.reason for s in dataset.info.skipped}
    assert set(reasons) == set(bad)
    for stem, (_, reason) in bad.items():
        assert reason in reasons[stem]
    held = sum(s.count for s in dataset.info.splits.values())
    assert held == 12 - len(bad)


def test_a_palette_s_indices_are_the_classes(tmp_path: Path) -> None:
    mask = np.arange(HEIGHT * WIDTH).reshape(HEIGHT, WIDTH).astype(np.uint8) % 2
    found = TASK.examples.find(_request(tmp_path, mask, np.zeros((HEIGHT, WIDTH, 3), np.uint8)))
    paletted = Image.fromarray(mask)
    paletted.putpalette([200, 0, 0, 0, 200, 0])
    assert paletted.mode == "P"
    (source,) = found.sources
    paletted.save(source.label.file)
    record = Preprocess(height=HEIGHT, width=WIDTH, channels=3)
    stored = TASK.examples.stored(source.label, source.file, record)
    np.testing.assert_array_equal(decoded(stored["mask"]), mask)


PALETTE = {"background": (0, 0, 0), "road": (128, 64, 128), "car": (0, 0, 142)}


def test_masks_are_drawn_where_the_network_saw_them() -> None:
    """Of a picture that was padded to a square, and of one whose middle alone was seen."""
    shown = np.full((40, 80, 3), 7, np.uint8)
    for resize, crop, seen in (("fill", None, (0, 40, 0, 80)), ("crop", None, (0, 40, 20, 60))):
        record = Preprocess(height=16, width=16, channels=3, resize=resize, crop=crop)  # type: ignore[arg-type]
        scores = np.zeros((1, 2, 16, 16), np.float32)
        scores[:, 1, :, 8:] = 1.0  # the right half is of the second class
        query = Query(views=(View(height=40, width=80, record=record),))
        (told,) = TASK.answers.answer(scores, ("ground", "red"), TASK.record(), query)
        made = TASK.answers.drawn(shown, told)
        wanted = np.zeros((40, 80), bool)
        wanted[seen[0] : seen[1], (seen[2] + seen[3]) // 2 : seen[3]] = True
        assert made is not None
        np.testing.assert_array_equal((made != shown).any(axis=2), wanted)
    (told,) = TASK.answers.answer(scores, ("ground", "red"), TASK.record(), Query())
    assert TASK.answers.drawn(shown, told) is None


@pytest.mark.parametrize("form", ["colours", "white", "deep", "grey as colour"])
def test_masks_as_other_tools_write_them(tmp_path: Path, form: str) -> None:
    """CVAT's colours by its labelmap.txt, 0 and 255, 16 bits, and grey in three channels."""
    mask = (np.arange(HEIGHT * WIDTH).reshape(HEIGHT, WIDTH) % 3).astype(np.uint8)
    shown: dict[str, np.ndarray] = {
        "colours": np.array(list(PALETTE.values()), np.uint8)[mask],
        "white": np.where(mask == 1, 255, 0).astype(np.uint8),
        "deep": mask.astype(np.uint16),
        "grey as colour": np.repeat(mask[:, :, None], 3, axis=2),
    }
    for name in ("JPEGImages", "SegmentationClass"):
        (tmp_path / name).mkdir()
    pixels = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "JPEGImages" / "a.jpg")
    Image.fromarray(shown[form]).save(tmp_path / "SegmentationClass" / "a.png")
    if form == "colours":
        lines = [f"{name}:{','.join(map(str, color))}::" for name, color in PALETTE.items()]
        (tmp_path / "labelmap.txt").write_text(
            "\n".join(["# label:color_rgb:parts:actions", *lines])
        )
    request = replace(_request(tmp_path / "unused", mask, mask), source=tmp_path, labels=None)
    found = TASK.examples.find(request)
    (source,) = found.sources
    record = Preprocess(height=HEIGHT, width=WIDTH, channels=3)
    stored = TASK.examples.stored(source.label, source.file, record)
    wanted = (mask == 1).astype(np.uint8) if form == "white" else mask
    np.testing.assert_array_equal(decoded(stored["mask"]), wanted)
    names = {"colours": tuple(PALETTE), "white": ("class 0", "class 1")}
    assert found.classes == names.get(form, ("class 0", "class 1", "class 2"))
    assert bool(found.notes) == (form == "white")
    if form == "colours":
        pixels[0, 0] = 1, 2, 3
        Image.fromarray(pixels).save(source.label.file)
        with pytest.raises(DataError, match="colour of no class"):
            TASK.examples.stored(source.label, source.file, record)


@pytest.mark.parametrize("named_classes", [True, False])
def test_255_means_the_same_in_all_parts(tmp_path: Path, named_classes: bool) -> None:
    """Alone beside 0 it is the second class, beside 1 it is none: not both in one dataset."""
    values = {"train": (0, 1, 255), "white": (0, 255), "ones": (0, 1), "black": (0, 0)}
    for name, shown in values.items():
        mask = np.resize(np.array(shown, np.uint8), (4, 6))
        _request(tmp_path / name, mask, np.zeros((4, 6, 3), np.uint8))
        if named_classes:
            (tmp_path / name / "classes.txt").write_text("ground\nroad\n")

    def listed(train: str, val: str, test: str = "black") -> Listing:
        return list_images(
            tmp_path / train, task=TASK, labels=None, image_root=None, val=tmp_path / val,
            test=tmp_path / test, seed=0,
        )  # fmt: skip

    for parts in (("train", "white"), ("white", "ones"), ("ones", "black", "white")):
        with pytest.raises(DataError, match=r"different ways.*255 is"):
            listed(*parts)
    assert not any(s.label.binary for s in listed("train", "ones").sources)
    assert [s.label.binary for s in listed("white", "white").sources] == [True, True, False]


@pytest.mark.parametrize(
    "line", ["c255:255,1,1::", "d:0,0,0::", f"d:{'1' * 5000},2,3::", "d:²,2,3"]
)
def test_a_labelmap_is_bounded(tmp_path: Path, line: str) -> None:
    """255 classes at most, a colour once, and numbers of three digits."""
    black = np.zeros((HEIGHT, WIDTH), np.uint8)
    request = replace(_request(tmp_path, black, black), labels=None)
    lines = [f"c{k}:{k},0,0::" for k in range(255 if line.startswith("c") else 2)]
    (tmp_path / "labelmap.txt").write_text("\n".join(lines))
    assert len(TASK.examples.find(request).classes) == len(lines)
    (tmp_path / "labelmap.txt").write_text("\n".join([*lines, line]))
    what = "more than 255 classes" if len(lines) == 255 else "no class with a colour"
    with pytest.raises(DataError, match=what):
        TASK.examples.find(request)


@pytest.mark.parametrize(
    ("masks", "what"),
    [
        ([np.full((4, 6), 3, np.uint8)], "mask 0 has the number of no class"),
        ([np.zeros((4, 6), np.uint8), np.zeros((4, 5), np.uint8)], "differ in size"),
        ([np.zeros((4, 6, 3), np.uint8)], "not one channel"),
        ([b"no picture"], "mask"),
    ],
)
def test_a_dataset_s_broken_masks_are_refused(masks, what: str) -> None:
    contents = [m if isinstance(m, bytes) else encoded(m) for m in masks]
    rows = [{"mask": content, "classes": [0]} for content in contents]
    column = pa.chunked_array([pa.array(rows, TASK.examples.column())])
    targets = TASK.examples.targets(column, 3)
    with pytest.raises(DataError, match=what):
        targets.batch(np.arange(len(masks)))


@pytest.mark.parametrize(
    "row", [None, {"mask": None, "classes": [0]}, {"mask": b"", "classes": None}]
)
def test_a_row_without_a_mask_is_refused(row) -> None:
    column = pa.chunked_array([pa.array([row], TASK.examples.column())])
    with pytest.raises(ValueError, match="without a mask"):
        TASK.examples.targets(column, 3)


@pytest.mark.parametrize("resize", ["squash", "crop", "fill", "half_crop"])
@pytest.mark.parametrize("crop", [None, (20, 24)])
def test_a_mask_moves_with_its_picture(pictures: Path, resize: str, crop, tmp_path: Path) -> None:
    """The picture of a mask, fitted and augmented, beside the mask that came the other way."""
    rng = np.random.default_rng(0)
    record = Preprocess(height=28, width=36, channels=3, resize=resize, crop=crop)  # type: ignore[arg-type]
    settings = Augment(flip=True, flip_vertical=True, rotation=20.0, scale=0.2)
    column, drawn = [], []
    for number in range(8):
        size = (48, 80) if number % 2 else (70, 40)
        mask = np.zeros(size, np.uint8)
        mask[8:30, 10:35] = 1
        shown = np.repeat(mask[:, :, None] * np.uint8(255), 3, axis=2)
        (source,) = TASK.examples.find(_request(tmp_path, mask, shown)).sources
        column.append(TASK.examples.stored(source.label, source.file, record))
        drawn.append(fit(shown, record))
    targets = TASK.examples.targets(pa.chunked_array([pa.array(column, TASK.examples.column())]), 2)
    for change in (False, True):
        pixels, moves = [], []
        for picture in drawn:
            if change:
                made, moved = augmented(picture, settings, record, rng)
            else:
                moved = still(record)
                made = picture[moved.top :, moved.left :][: moved.height, : moved.width]
            pixels.append(made)
            moves.append(moved)
        masks = targets.batch(np.arange(8), moves)
        for made, mask in zip(pixels, masks, strict=True):
            assert made.shape[:2] == mask.shape
            clear = (mask != IGNORED) & ((made[..., 0] < 40) | (made[..., 0] > 215))
            assert clear.mean() > 0.25
            assert ((made[..., 0] > 128) == (mask == 1))[clear].mean() > 0.985


def _request(folder: Path, mask: np.ndarray, shown: np.ndarray) -> Request:
    """What an import asks of a folder with one picture and its mask."""
    for name, pixels in (("images", shown), ("masks", mask)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / name / "a.png")
    return Request(
        source=folder,
        labels=("a", "b"),
        image_root=None,
        by_folder=lambda path: Found(classes=(), sources=()),
    )


@pytest.mark.parametrize("classes", [2, 5])
def test_measures_are_scikit_learns(classes: int) -> None:
    rng = np.random.default_rng(classes)
    truth = rng.integers(0, classes, (6, 9, 11)).astype(np.uint8)
    logits = rng.normal(size=(6, classes, 9, 11)).astype(np.float32)
    np.put_along_axis(logits, truth[:, None].astype(np.int64), 1.5, axis=1)
    truth[:, :2] = IGNORED
    if classes > 2:
        truth[truth == 3] = 0  # a class that does not occur …
        logits[:, 4] = -20  # … and one that is never said
    column = pa.chunked_array([pa.array([target_of(m) for m in truth], TASK.examples.column())])
    parts = [slice(0, 4), slice(4, 6)]
    rows = torch.cat([
        TASK.metrics.rows(torch.from_numpy(logits[p]), torch.from_numpy(truth[p]), classes)
        for p in parts
    ])  # fmt: skip
    labels = tuple(map(str, range(classes)))
    found = TASK.metrics.measure(rows.numpy(), TASK.examples.targets(column, classes), labels)
    known = truth != IGNORED
    true, said = truth[known], logits.argmax(1)[known]
    every = list(range(classes))
    iou = metrics.jaccard_score(true, said, labels=every, average=None, zero_division=0)
    dice = metrics.f1_score(true, said, labels=every, average=None, zero_division=0)
    np.testing.assert_allclose([c.iou for c in found.classes], iou, atol=1e-12)
    np.testing.assert_allclose([c.dice for c in found.classes], dice, atol=1e-12)
    assert found.miou == pytest.approx(iou.mean())
    assert found.pixel_accuracy == pytest.approx(metrics.accuracy_score(true, said))
    assert [c.support for c in found.classes] == [int((true == k).sum()) for k in every]


def test_the_loss_by_hand_and_a_batch_is_the_mean_of_its_parts() -> None:
    logits = torch.randn(4, 3, 5, 6)
    truth = torch.randint(0, 3, (4, 5, 6)).to(torch.uint8)
    truth[0, :3] = IGNORED
    truth[1] = IGNORED
    p = torch.log_softmax(logits.double(), 1)
    by_hand = []
    for n in range(4):
        known = truth[n] != IGNORED
        own = p[n].gather(0, truth[n].long().clamp(max=2)[None])[0]
        entropy = -own[known].sum() / max(int(known.sum()), 1)
        said = p[n].exp()
        dice = [
            2 * said[k][truth[n] == k].sum() / (said[k][known].sum() + (truth[n] == k).sum())
            for k in range(3)
            if (truth[n] == k).any()
        ]
        by_hand.append(entropy + (1 - torch.stack(dice).mean() if dice else 0.0))
    whole = TASK.loss.loss(logits, truth, LossSettings())
    assert whole.item() == pytest.approx(torch.stack(by_hand).mean().item(), rel=1e-6)
    halves = [TASK.loss.loss(logits[h], truth[h], LossSettings()) for h in (slice(2), slice(2, 4))]
    assert whole.item() == pytest.approx(torch.stack(halves).mean().item(), rel=1e-6)


def test_networks_for_pictures_and_for_pixels_are_told_apart(way, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"asks for each pixel.*lenet.*unet"):
        api.train("lenet", way[0], out=tmp_path / "run")


def test_the_doctor_compares_masks(pictures: Path, tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "s")
    for copy, original in (("same", 0), ("other", 1)):
        for kind in ("images", "masks"):
            content = (folder / kind / f"{original}.png").read_bytes()
            (folder / kind / f"{copy}.png").write_bytes(content)
    Image.fromarray(np.full((HEIGHT, WIDTH), 2, np.uint8)).save(folder / "masks" / "other.png")
    dataset = import_images(folder, tmp_path / "data", replace(SETTINGS, holdout=0.0))
    groups = {f.kind: f.groups for f in examine(dataset).findings}
    assert groups["copies"] == (("train:0.png", "train:same.png"),)
    assert groups["conflicts"] == (("train:1.png", "train:other.png"),)


def test_a_changed_mask_is_another_dataset(tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "s")
    settings = {"task": "segmentation", "size": (HEIGHT, WIDTH), "out": tmp_path / "data"}
    first = images(folder, **settings)
    assert images(folder, **settings).info == first.info
    Image.fromarray(np.ones((HEIGHT, WIDTH), np.uint8)).save(folder / "masks" / "0.png")
    with pytest.raises(UsageError, match="other"):
        images(folder, **settings)


@pytest.mark.parametrize(
    ("task", "first", "said"),
    [
        ("segmentation", "background", "cup 20 %, cat 5 %, background 75 %"),
        ("segmentation", "road", "road 75 %, cup 20 %, cat 5 %"),
        ("volumes", "air", "cup 20 %, cat 5 %, air 75 %"),
    ],
)
def test_what_is_of_interest_is_told_first(task: str, first: str, said: str) -> None:
    mask = np.zeros((4, 5, 5), np.uint8)
    mask[:, 0], mask[0, 1] = 2, 1
    given = mask if task == "volumes" else mask.reshape(20, 5)
    target = {"mask": named(task).examples.encoded(given)}
    assert named(task).answers.truth(target, (first, "cat", "cup", "dog")) == said
