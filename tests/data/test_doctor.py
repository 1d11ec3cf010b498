"""The doctor beside planted copies, leaks and contradictions, and beside pictures without any."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageEnhance
from sklearn.datasets import load_digits

from benchmarks.pictures import glyph
from tessella.artifacts.dataset import Dataset
from tessella.core.errors import UsageError
from tessella.data import examine, images, leave_out
from tessella.data.doctor import Examination, Finding

Change = Callable[[Image.Image], Image.Image]


def jpeg(quality: int) -> Change:
    def change(picture: Image.Image) -> Image.Image:
        stream = io.BytesIO()
        picture.save(stream, "JPEG", quality=quality)
        return Image.open(stream).convert("RGB")

    return change


CHANGES: dict[str, Change] = {
    "equal": lambda p: p,
    "jpeg 75": jpeg(75),
    "jpeg 40": jpeg(40),
    "half": lambda p: p.resize((32, 32), Image.Resampling.BILINEAR),
    "double": lambda p: p.resize((128, 128), Image.Resampling.BICUBIC),
    "cropped": lambda p: p.crop((1, 1, 63, 63)),
    "brighter": lambda p: ImageEnhance.Brightness(p).enhance(1.15),
    "darker": lambda p: ImageEnhance.Brightness(p).enhance(0.85),
    "contrast": lambda p: ImageEnhance.Contrast(p).enhance(1.2),
}


def drawn(number: int) -> Image.Image:
    return Image.fromarray(glyph(number % 4, np.random.default_rng(number)))


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Three classes of 80, 80 and 22 glyphs in training; three copies of each kind."""
    folder = tmp_path_factory.mktemp("planted")
    for part, counts in {"train": (80, 80, 22), "val": (12, 12, 12)}.items():
        for label, count in enumerate(counts):
            (folder / part / f"c{label}").mkdir(parents=True)
            for i in range(count):
                number = (part == "val") * 10_000 + label * 1_000 + i
                drawn(number).save(folder / part / f"c{label}" / f"{number}.png")
    for n, (name, change) in enumerate(CHANGES.items()):
        change(drawn(10 + n)).save(folder / "train" / "c0" / f"copy {name}.png")
        change(drawn(30 + n)).save(folder / "val" / "c0" / f"leak {name}.png")
        change(drawn(50 + n)).save(folder / "train" / "c1" / f"other class {name}.png")
    Image.new("RGB", (64, 64), (90, 90, 90)).save(folder / "train" / "c1" / "blank.png")
    out = folder / "dataset"
    return images(folder / "train", size=64, val_folder=str(folder / "val"), out=out)


def test_every_planted_copy_is_found_and_nothing_else(planted: Dataset) -> None:
    found = {f.kind: f for f in examine(planted, workers=2).findings}
    assert set(found) == {"conflicts", "leaks", "copies", "imbalance", "blank"}
    right = {
        "copies": {
            (f"train:c0/{10 + n}.png", f"train:c0/copy {c}.png") for n, c in enumerate(CHANGES)
        },
        "leaks": {
            (f"train:c0/{30 + n}.png", f"val:c0/leak {c}.png") for n, c in enumerate(CHANGES)
        },
        "conflicts": {
            (f"train:c0/{50 + n}.png", f"train:c1/other class {c}.png")
            for n, c in enumerate(CHANGES)
        },
    }
    for kind, groups in right.items():
        assert set(found[kind].groups) == groups  # type: ignore[index]
    assert found["blank"].groups == (("train:c1/blank.png",),)
    assert "'c1' has 90 training images, 'c2' has 22" in found["imbalance"].text


def test_a_fix_is_a_new_dataset_without_the_findings(planted: Dataset, tmp_path: Path) -> None:
    found = examine(planted)
    gone = found.left_out(("conflicts", "leaks", "copies", "blank"))
    clean = leave_out(planted, gone, tmp_path / "clean")
    assert {f.kind for f in examine(clean).findings} == {"imbalance"}
    assert len(clean.val) == len(planted.val)  # of a leak, training loses its images
    assert len(clean.train) == len(planted.train) - len(gone)
    assert clean.info.content_hash != planted.info.content_hash
    assert {e.path: e.content for e in clean.train}.items() <= {
        e.path: e.content for e in planted.train
    }.items()
    with pytest.raises(UsageError, match="there already"):
        leave_out(planted, gone, tmp_path / "clean")


def test_drawings_of_one_kind_are_no_copies(tmp_path: Path) -> None:
    digits = load_digits()
    for i in range(600):
        folder = tmp_path / "digits" / str(digits.target[i])
        folder.mkdir(parents=True, exist_ok=True)
        pixels = (digits.images[i] * 15.9).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    dataset = images(tmp_path / "digits", size=8, channels=1, out=tmp_path / "dataset")
    alike = [g for f in examine(dataset).findings for g in f.groups]
    assert sum(map(len, alike)) <= 12  # 2 %: of 64 pixels some are as near as copies


@pytest.mark.parametrize(
    ("task", "targets", "same", "other"),
    [
        ("multilabel", ["cat", "cat|dog", "dog"], "dog|cat", "cat"),
        ("regression", ["1,", "2,30", "3,40"], "2.05,30", "3,30"),
    ],
)
def test_every_task_says_what_contradicts(
    tmp_path: Path, task: str, targets: list[str], same: str, other: str
) -> None:
    """Picture 1 twice with the same target, or nearly so, and picture 2 with another one."""
    rows = [f"{n}.png,{targets[n % 3]}" for n in range(30)]
    for n in range(30):
        pixels = np.random.default_rng(n).integers(0, 255, (16, 16, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{n}.png")
    shutil.copy(tmp_path / "1.png", tmp_path / "same.png")
    shutil.copy(tmp_path / "2.png", tmp_path / "other.png")
    rows += [f"same.png,{same}", f"other.png,{other}"]
    header = {"multilabel": "path,labels", "regression": "path,x,y"}[task]
    (tmp_path / "a.csv").write_text("\n".join([header, *rows]))
    dataset = images(tmp_path / "a.csv", task=task, size=16, holdout=0.0, out=tmp_path / "data")
    found = examine(dataset)
    groups = {f.kind: f.groups for f in found.findings}
    assert groups["copies"] == (("train:1.png", "train:same.png"),)
    assert groups["conflicts"] == (("train:2.png", "train:other.png"),)
    assert "imbalance" not in groups
    again = leave_out(dataset, (), tmp_path / "again")
    assert again.info.content_hash == dataset.info.content_hash
    clean = leave_out(dataset, found.left_out(("conflicts",)), tmp_path / "clean")
    assert clean.info.task == dataset.info.task
    assert {e.path: str(e.label) for e in clean.train} == {
        e.path: str(e.label) for e in dataset.train if e.path not in ("2.png", "other.png")
    }


def test_a_dataset_without_images_or_training_is_examined_or_refused(tmp_path: Path) -> None:
    for i in range(12):
        pixels = np.random.default_rng(i).integers(0, 255, (16, 16, 3)).astype(np.uint8)
        (tmp_path / "s" / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "s" / "ab"[i % 2] / f"{i}.png")
    path = images(tmp_path / "s", size=16, holdout=0.5, out=tmp_path / "data").path / "dataset.json"
    plain = json.loads(path.read_text())
    del plain["splits"]["train"]
    path.write_text(json.dumps(plain))
    assert examine(Dataset(tmp_path / "data")).findings == ()
    plain["splits"] = {}
    path.write_text(json.dumps(plain))
    with pytest.raises(UsageError, match="no images"):
        examine(Dataset(tmp_path / "data"))


def test_shapes_among_strokes_are_copies_only_if_their_strokes_are_too(tmp_path: Path) -> None:
    """Discs of one size in nearly one place: their looks are those of copies, not their details."""
    source = tmp_path / "s"
    changes = [
        change for name, change in CHANGES.items() if name != "cropped"
    ]  # moves all there is
    for i in range(60):
        rng = np.random.default_rng(i)
        picture = Image.new("RGB", (96, 96), tuple(rng.integers(120, 200, 3)))
        draw = ImageDraw.Draw(picture)
        x, y = rng.uniform(46, 50, 2)
        draw.ellipse((x - 25, y - 25, x + 25, y + 25), fill=(20 + 180 * (i % 2), 20, 60))
        for x, y, dx, dy in rng.integers((0, 0, -30, -30), (96, 96, 30, 30), (8, 4)):
            draw.line((x, y, x + dx, y + dy), fill=tuple(rng.integers(40, 220, 3)), width=2)
        folder = source / "ab"[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        picture.save(folder / f"{i}.png")
        if i < len(changes):
            changes[i](picture).save(folder / f"{i} copy.png")
    dataset = images(source, size=64, holdout=0.0, out=tmp_path / "dataset")
    found = {f.kind: f.groups for f in examine(dataset).findings}
    copies = {(f"train:{'ab'[i % 2]}/{i} copy.png", f"train:{'ab'[i % 2]}/{i}.png")
              for i in range(len(changes))}  # fmt: skip
    assert {tuple(sorted(group)) for group in found["copies"]} == copies
    assert set(found) == {"copies"}


def test_tiny_classes_and_odd_sizes_are_listed_and_left_out(tmp_path: Path) -> None:
    source = tmp_path / "s"
    for i in range(70):
        name = "few" if i < 5 else "many" if i < 40 else "more"
        rng = np.random.default_rng(i)
        pixels = rng.integers(0, 255, (24, 32, 3) if i % 2 else (32, 24, 3)).astype(np.uint8)
        (source / name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(source / name / f"{i}.png")
    for name, size in {"banner": (320, 20), "icon": (6, 6), "poster": (200, 160)}.items():
        pixels = np.random.default_rng(size[0]).integers(0, 255, (*size, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(source / "more" / f"{name}.png")
    dataset = images(source, size=16, holdout=0.2, out=tmp_path / "dataset")
    odd = {place.partition("/")[2]: sides for place, sides in dataset.info.odd_sizes}
    assert odd == {"banner.png": "320×20", "icon.png": "6×6", "poster.png": "200×160"}
    found = examine(dataset)
    groups = {f.kind: f.groups for f in found.findings}
    assert len(groups["sizes"]) == 3
    (few,) = groups["tiny"]
    assert len(few) == 5
    clean = leave_out(dataset, found.left_out(("tiny", "sizes")), tmp_path / "clean")
    assert clean.classes == ("many", "more")
    assert {f.kind for f in examine(clean).findings} == set()
    assert clean.info.odd_sizes == ()
    assert clean.info.splits["train"].class_counts == (28, 25)
    for split in ("train", "val"):
        for example in clean.split(split):
            assert example.path.startswith(clean.classes[example.label])


def test_a_leak_between_validation_and_test_is_left_out_of_validation() -> None:
    group = ("val:a/1.png", "test:a/1.png")
    finding = Finding(kind="leaks", text="", groups=(group, ("train:a/2.png", "val:a/2.png")))
    gone = Examination(images=4, findings=(finding,)).left_out(("leaks",))
    assert gone == {"val:a/1.png", "train:a/2.png"}
