"""Folders and lists become datasets: the same ones for any number of workers, bad files or not."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest
import tifffile
from PIL import Image

import tessella as ts
from tessella.artifacts.dataset import Dataset
from tessella.core.confined import Budget
from tessella.core.errors import DataError, UsageError
from tessella.core.events import Event
from tessella.core.headers import bits_of
from tessella.core.preprocess import decode
from tessella.data import images, importing, reading
from tessella.data.importing import ImportSettings, import_images
from tests.support.pictures.encoded import png
from tests.support.pictures.folders import write_folder_of, write_picture
from tests.support.pictures.hostile import peak_bytes, scans_of, tiff_of

SMALL = ImportSettings(size=8, holdout=0.25, workers=1)


def rows(dataset: Dataset) -> dict[str, list[tuple[str, int, bytes]]]:
    return {
        name: [(e.path, e.label, e.content) for e in dataset.split(name)]
        for name in dataset.info.splits
    }


def test_a_folder_becomes_a_dataset(tmp_path: Path) -> None:
    source = write_folder_of(tmp_path / "pets", {"cat": 12, "dog": 8})
    events: list[Event] = []
    dataset = import_images(source, tmp_path / "out", SMALL, emit=events.append)
    info = Dataset(tmp_path / "out").info
    assert info == dataset.info
    assert (info.name, info.classes, info.source) == ("pets", ("cat", "dog"), str(source))
    assert info.splits["train"].class_counts == (9, 6)
    assert info.splits["val"].class_counts == (3, 2)
    assert (info.skipped, info.duplicates, info.notes) == ((), (), ())
    for split in (dataset.train, dataset.val):
        for example in split:
            pixels = decode(example.content, info.preprocess)
            assert np.array_equal(pixels, np.asarray(Image.open(source / example.path)))
            assert info.classes[example.label] == example.path.split("/")[0]
    assert [e.name for e in events if e.kind == "phase"] == ["find", "import"]
    last = [e for e in events if e.kind == "progress"][-1]
    assert last.values == {"done": 20, "total": 20}


def test_mean_and_std_are_those_of_the_training_split(tmp_path: Path) -> None:
    source = write_folder_of(tmp_path / "s", {"a": 30, "b": 30})
    for depth in (8, 16):
        dataset = import_images(source, tmp_path / f"{depth}", replace(SMALL, depth=depth))
        record = dataset.preprocess
        pixels = np.stack([decode(e.content, record) for e in dataset.train]).astype(np.float64)
        pixels /= 2**depth - 1
        assert np.abs(record.mean - pixels.mean(axis=(0, 1, 2))).max() < 1e-12
        assert np.abs(record.std - pixels.std(axis=(0, 1, 2))).max() < 1e-12


@pytest.mark.parametrize("workers", [2, 5])
def test_workers_and_places_decide_nothing(
    tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_folder_of(tmp_path / "one" / "s", {"a": 150, "b": 90})
    (source / "a" / "bad.png").write_bytes(b"no image")
    one = import_images(source, tmp_path / "out1", SMALL)
    monkeypatch.chdir(tmp_path / "one")
    two = import_images("s", tmp_path / "out2", replace(SMALL, workers=workers))
    assert rows(one) == rows(two)
    told = [replace(d.info, source="", created="") for d in (one, two)]
    assert told[0] == told[1]
    for name in os.listdir(one.path):
        if name.endswith(".arrow"):
            assert (one.path / name).read_bytes() == (two.path / name).read_bytes()


def test_the_seed_decides_what_is_held_out(tmp_path: Path) -> None:
    source = write_folder_of(tmp_path / "s", {"a": 20, "b": 20})
    hashes = [
        import_images(source, tmp_path / f"{i}", replace(SMALL, seed=seed)).info.content_hash
        for i, seed in enumerate((0, 0, 1))
    ]
    assert hashes[0] == hashes[1] != hashes[2]


def test_bad_files_are_listed_and_skipped(tmp_path: Path) -> None:
    source = write_folder_of(tmp_path / "s", {"a": 6, "b": 6})
    whole = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)).save(
        whole, "JPEG"
    )
    bad = {
        "a/zero.png": b"",
        "a/text.jpg": b"this is no picture",
        "a/huge.png": png(30_000, 30_000, 8, 2, b""),
        "b/cut.jpg": whole.getvalue()[: len(whole.getvalue()) // 2],
        "b/cut.png": (source / "b" / "000.png").read_bytes()[:-60],
    }
    for name, content in bad.items():
        (source / name).write_bytes(content)
    (source / "b" / "gone.png").symlink_to("nowhere")
    events: list[Event] = []
    info = import_images(source, tmp_path / "out", SMALL, emit=events.append).info
    reasons = {file.path: file.reason for file in info.skipped}
    assert set(reasons) == {*bad, "b/gone.png"}
    assert "0 bytes" in reasons["a/zero.png"]
    assert "pixels" in reasons["a/huge.png"]
    assert info.skipped_count == 6
    assert sum(s.count for s in info.splits.values()) == 12
    assert any("6 files" in e.text for e in events if e.kind == "warning")
    assert not any(str(tmp_path) in reason for reason in reasons.values())


KILLED = """
import os, signal, sys
from tessella.data import importing
from tessella.data.importing import ImportSettings, import_images

importing.PROGRESS_SECONDS = 0  # told after each part

def emit(event):
    if event.kind == "progress" and event.values["done"] >= int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)

import_images(sys.argv[1], sys.argv[2], ImportSettings(size=8, holdout=0.25), emit=emit)
"""


def test_a_killed_import_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the parts that were joined, whose bytes are compared with their hashes first."""
    source = write_folder_of(tmp_path / "s", {"a": 150, "b": 90})
    (source / "a" / "bad.png").write_bytes(b"no image")
    whole = import_images(source, tmp_path / "whole", SMALL)
    for far in (1, 100):  # twice
        command = [sys.executable, "-c", KILLED, source, tmp_path / "out", str(far)]
        assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    events: list[Event] = []
    monkeypatch.setattr(importing, "PROGRESS_SECONDS", 0.0)
    again = import_images(source, tmp_path / "out", SMALL, emit=events.append)
    (behind,) = (e.text for e in events if "goes on behind" in e.text)
    assert 100 <= int(behind.split()[3]) < 241
    told = [replace(d.info, created="") for d in (whole, again)]
    assert told[0] == told[1]
    assert rows(whole) == rows(again)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "s", "whole"]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pictures, and what an import that was killed left of them."""
    folder = tmp_path_factory.mktemp("killed")
    source = write_folder_of(folder / "s", {"a": 60, "b": 60})
    command = [sys.executable, "-c", KILLED, source, folder / "out", "60"]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    return folder


@pytest.mark.parametrize("what", ["a byte", "a line", "a file", "settings"])
def test_what_is_left_of_an_import_is_not_trusted(tmp_path: Path, killed: Path, what: str) -> None:
    left = tmp_path / ".out.import"
    shutil.copytree(killed / ".out.import", left)
    shard, journal = left / "train-00000.arrow", left / "journal.jsonl"
    if what == "a byte":
        content = bytearray(shard.read_bytes())
        content[content.index(b"IDAT") + 10] ^= 1
        shard.write_bytes(content)
    elif what == "a line":
        journal.write_text(journal.read_text().replace('"sha256": "', '"sha256": "00', 1))
    elif what == "a file":
        shard.unlink()
    settings = replace(SMALL, channels=1) if what == "settings" else SMALL
    events: list[Event] = []
    again = import_images(killed / "s", tmp_path / "out", settings, emit=events.append)
    assert not any("goes on behind" in e.text for e in events)
    for split in (again.train, again.val):
        for example in split:
            pixels = decode(example.content, again.preprocess)
            with Image.open(killed / "s" / example.path) as theirs:
                assert what == "settings" or np.array_equal(pixels, np.asarray(theirs))
    assert sum(s.count for s in again.info.splits.values()) == 120


def test_one_import_into_a_folder_at_a_time(tmp_path: Path) -> None:
    source = write_folder_of(tmp_path / "s", {"a": 40, "b": 40})

    def again(event: Event) -> None:
        if event.kind == "progress":
            with pytest.raises(UsageError, match="another process imports"):
                import_images(source, tmp_path / "out", SMALL)

    import_images(source, tmp_path / "out", SMALL, emit=again)
    assert Dataset(tmp_path / "out").info.splits["train"].count == 60


@pytest.mark.parametrize("few", [1, 64], ids=["by processes", "by threads"])
def test_hostile_files_are_listed_with_their_reasons(
    few: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would take the import down, in memory or for minutes; the others are imported."""
    monkeypatch.setattr(reading, "FEW", few)
    budget = Budget(pixels=1 << 26, nbytes=128 << 20, seconds=1.0)
    monkeypatch.setattr(reading, "BUDGET", budget)
    source = write_folder_of(tmp_path / "s", {"a": 3, "b": 3})
    hostile = {
        "nothing.tif": (tiff_of(0, 2_000_000_000), "no pixels"),
        "large.png": (png(8_192, 8_192, 8, 2, b""), "more than 134,217,728 bytes"),
        "larger.png": (png(9_000, 9_000, 8, 2, b""), "more than 67,108,864 pixels"),
        "slow.jpg": (scans_of(2_048, 8_000), "longer than 1 s"),
    }
    for name, (content, _) in hostile.items():
        (source / "a" / name).write_bytes(content)
    before = peak_bytes()
    dataset = import_images(source, tmp_path / "out", SMALL)
    assert sum(s.count for s in dataset.info.splits.values()) == 6
    reasons = {Path(f.path).name: f.reason for f in dataset.info.skipped}
    assert set(reasons) == set(hostile)
    for name, (_, why) in hostile.items():
        assert why in reasons[name]
    assert peak_bytes() - before < 100 << 20


def test_nothing_left_is_an_error_that_leaves_nothing_behind(tmp_path: Path) -> None:
    source = write_folder_of(tmp_path / "s", {"a": 3, "b": 3})
    for path in source.glob("b/*"):
        path.write_bytes(b"bad")
    with pytest.raises(DataError, match=r"too few images can be read.*two classes") as caught:
        import_images(source, tmp_path / "out" / "d", SMALL)
    assert "b/000.png" in str(caught.value)
    for path in source.glob("a/*"):
        path.write_bytes(b"bad")
    with pytest.raises(DataError, match="no image is left"):
        import_images(source, tmp_path / "out" / "d", SMALL)
    assert list((tmp_path / "out").iterdir()) == []


def test_one_class_is_not_enough(tmp_path: Path) -> None:
    source = write_folder_of(tmp_path / "s", {"only": 3})
    with pytest.raises(DataError, match="at least two classes") as caught:
        import_images(source, tmp_path / "out", SMALL)
    assert "'only'" in str(caught.value)
    assert caught.value.fix


def test_duplicates_across_splits_are_told(tmp_path: Path) -> None:
    write_folder_of(tmp_path / "train", {"a": 4, "b": 4})
    write_folder_of(tmp_path / "val", {"a": 2, "b": 2}, first_seed=100)
    write_picture(tmp_path / "val" / "b" / "leak.bmp", 1)  # train's a/001.png in another format
    write_picture(tmp_path / "train" / "a" / "twice.png", 0)  # in one split: harmless
    settings = replace(SMALL, val_folder=tmp_path / "val")
    info = import_images(tmp_path / "train", tmp_path / "out", settings).info
    assert info.splits["train"].count == 9
    assert info.splits["val"].count == 5
    assert info.duplicates == (("train:a/001.png", "val:b/leak.bmp"),)
    assert info.duplicate_count == 1
    assert any("two splits" in note for note in info.notes)


def test_separate_folders_share_the_classes(tmp_path: Path) -> None:
    write_folder_of(tmp_path / "train", {"a": 2, "b": 2, "c": 2})
    write_folder_of(tmp_path / "test", {"c": 2}, first_seed=50)
    settings = replace(SMALL, holdout=0.0, test_folder=str(tmp_path / "test"))
    dataset = import_images(tmp_path / "train", tmp_path / "out", settings)
    assert dataset.test.labels.tolist() == [2, 2]
    assert any("no validation split" in note for note in dataset.info.notes)
    write_folder_of(tmp_path / "test", {"d": 1}, first_seed=60)
    with pytest.raises(DataError, match="a class that training has not") as caught:
        import_images(tmp_path / "train", tmp_path / "out2", settings)
    assert "'d'" in str(caught.value)


def test_imbalance_and_tiny_classes_are_told(tmp_path: Path) -> None:
    source = write_folder_of(tmp_path / "s", {"many": 40, "few": 4, "one": 1})
    events: list[Event] = []
    info = import_images(source, tmp_path / "out", SMALL, emit=events.append).info
    text = " | ".join(info.notes)
    assert "'many' has 30 training images, 'one' has 1" in text
    assert "one image alone, which goes to training: 'one'" in text
    assert [e.text for e in events if e.kind == "warning"] == list(info.notes)


def test_a_list_with_names_that_look_like_paths(tmp_path: Path) -> None:
    write_folder_of(tmp_path / "img", {"x": 8})
    lines = [f"img/x/{i:03d}.png\t{'../../etc' if i % 2 else '<b>&'}" for i in range(8)]
    (tmp_path / "list.txt").write_text("\n".join(lines))
    settings = replace(SMALL, name="../../evil")
    dataset = import_images(tmp_path / "list.txt", tmp_path / "deep" / "out", settings)
    assert dataset.classes == ("../../etc", "<b>&")
    assert dataset.info.name == "../../evil"
    assert {e.path for s in (dataset.train, dataset.val) for e in s} == {
        line.split("\t")[0] for line in lines
    }
    assert sorted(p.name for p in tmp_path.iterdir()) == ["deep", "img", "list.txt"]


def test_16_bit_and_many_channels(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    kept = {}
    for i in range(8):
        kept[f"{'ab'[i % 2]}/{i}.tif"] = pixels = rng.integers(0, 65536, (6, 7, 5), np.uint16)
        path = tmp_path / "s" / "ab"[i % 2] / f"{i}.tif"
        path.parent.mkdir(parents=True, exist_ok=True)
        tifffile.imwrite(path, pixels, photometric="minisblack", planarconfig="contig")
    settings = replace(SMALL, size=(6, 7), channels=5, depth=16)
    dataset = import_images(tmp_path / "s", tmp_path / "out", settings)
    assert sum(s.count for s in dataset.info.splits.values()) == 8
    for example in (*dataset.train, *dataset.val):
        assert np.array_equal(decode(example.content, dataset.preprocess), kept[example.path])
    assert not [note for note in dataset.info.notes if "16 bits" in note]


@pytest.mark.parametrize("ending", ["png", "tif", "pgm"])
def test_bits_that_are_not_kept_are_told(ending: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for number, bits in enumerate((16, 16, 8, 8)):
        kind = np.uint16 if bits == 16 else np.uint8
        pixels = rng.integers(0, 1 << bits, (8, 9), dtype=kind)
        path = tmp_path / "s" / "ab"[number % 2] / f"{number}.{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        if ending == "pgm":  # as Netpbm writes it: the high byte first
            head = b"P5\n# grey\n9 8\n%d\n" % ((1 << bits) - 1)
            path.write_bytes(head + pixels.astype(pixels.dtype.newbyteorder(">")).tobytes())
        else:
            Image.fromarray(pixels).save(path)
    assert [bits_of(p.read_bytes()) for p in sorted((tmp_path / "s").rglob("*.*"))] == [16, 8] * 2
    info = import_images(tmp_path / "s", tmp_path / "out", replace(SMALL, channels=1)).info
    (note,) = (note for note in info.notes if "16 bits" in note)
    assert note == "2 files of 16 bits a sample stored with 8: depth=16 keeps them"


@pytest.mark.parametrize("ending", ["png", "jpg", "bmp"])
def test_pictures_that_are_enlarged_are_told(ending: str, tmp_path: Path) -> None:
    """Those of which both sides more than double; one that is narrow, or turned, is none."""
    sizes = {"a/large": (40, 30), "a/tiny": (7, 5), "b/half": (16, 16), "b/narrow": (60, 4)}
    for name, size in sizes.items():
        write_picture(tmp_path / "s" / f"{name}.{ending}", len(name), size=size)
    settings = replace(SMALL, size=32, holdout=0.0)
    (note,) = (n for n in import_images(tmp_path / "s", tmp_path / "out", settings).info.notes
               if "as large as stored" in n)  # fmt: skip
    assert note == f"1 picture less than half as large as stored: 'a/tiny.{ending}'"


def test_one_of_something_is_told_as_one(tmp_path: Path) -> None:
    source = write_folder_of(tmp_path / "s", {"a": 6, "b": 6})
    (source / "a" / "bad.png").write_bytes(b"no picture")
    dataset = import_images(source, tmp_path / "out", replace(SMALL, holdout=0.0))
    assert "1 file skipped: it cannot be used" in dataset.info.notes
    assert "2 classes" in repr(dataset)


def test_a_constant_channel_can_still_be_normalized(tmp_path: Path) -> None:
    for i in range(4):
        path = tmp_path / "s" / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (40 * i, 7, 0)).save(path)
    dataset = import_images(tmp_path / "s", tmp_path / "out", SMALL)
    assert dataset.preprocess.std[1:] == (1.0, 1.0)
    assert "channel 2 has the same value everywhere" in dataset.info.notes


def test_hugging_face_datasets_opens_the_shards(tmp_path: Path) -> None:
    source = write_folder_of(tmp_path / "s", {"cat": 6, "dog": 6})
    dataset = import_images(source, tmp_path / "out", SMALL)
    (shard,) = dataset.info.splits["train"].shards
    table = datasets.Dataset.from_file(str(dataset.path / shard))
    assert table.features["label"].names == ["cat", "dog"]
    assert isinstance(table.features["image"], datasets.Image)
    assert len(table) == len(dataset.train)
    for row, example in zip(table, dataset.train, strict=True):
        assert row["label"] == example.label
        assert np.array_equal(
            np.asarray(row["image"]), np.asarray(Image.open(source / example.path))
        )


def test_an_existing_folder_is_never_replaced(tmp_path: Path) -> None:
    source = write_folder_of(tmp_path / "s", {"a": 3, "b": 3})
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        import_images(source, precious, SMALL)
    assert (precious / "thesis.txt").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    import_images(source, tmp_path / "empty", SMALL)
    with pytest.raises(UsageError, match="exists already"):
        import_images(source, tmp_path / "empty", SMALL)


@pytest.mark.parametrize(
    "bad",
    [
        {"holdout": 1.0},
        {"holdout": 0.6, "test": 0.4},
        {"test": -0.1},
        {"workers": 0},
        {"resize": "stretch"},
        {"size": 0},
        {"crop": 300},
    ],
)
def test_settings_that_cannot_work(bad: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        ImportSettings(**bad)


# --- ts.data.images -----------------------------------------------------------------------------


def test_images_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_folder_of(tmp_path / "my flowers", {"a": 4, "b": 4})
    monkeypatch.chdir(tmp_path)
    first = ts.data.images(source, size=8, holdout=0.25)
    assert first.path == Path("datasets/my-flowers")
    created = (first.path / "dataset.json").read_bytes()
    again = ts.data.images(source, size=8, holdout=0.25, workers=2)
    assert again.info == first.info
    assert (first.path / "dataset.json").read_bytes() == created
    for change in ({"size": 9}, {"seed": 1}, {"resize": "fill"}, {"store": "png"}):
        with pytest.raises(UsageError, match="other files or settings"):
            ts.data.images(source, **{"size": 8, "holdout": 0.25, **change})
    as_png = ts.data.images(source, size=8, holdout=0.25, store="png", out="png")
    assert ts.data.images(source, size=8, holdout=0.25, out="png").info == as_png.info
    write_picture(source / "a" / "new.png", 99)
    with pytest.raises(UsageError, match="other files or settings"):
        ts.data.images(source, size=8, holdout=0.25)
    elsewhere = ts.data.images(source, size=8, name="../x/<y>", out=None)
    assert elsewhere.path == Path("datasets/x-y")


# --- memory -------------------------------------------------------------------------------------

_MEASURE = """
import json, re, sys
from tessella.data.importing import ImportSettings, import_images

def peak_bytes():  # not ru_maxrss, which counts what the parent held before exec
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

source, out, few = sys.argv[1:]
settings = ImportSettings(size=64, workers=2)
import_images(few, out + "/few", settings)
before = peak_bytes()
import_images(source, out + "/many", settings)
print(json.dumps([before, peak_bytes()]))
"""


def write_noise(root: Path, count: int) -> Path:
    """``count`` different pictures of 64 × 64, quickly: a BMP is a header and any bytes."""
    write_picture(root / "x" / "one.bmp", 0, size=(64, 64))
    header = (root / "x" / "one.bmp").read_bytes()[:54]
    rng = np.random.default_rng(count)
    (root / "y").mkdir()
    for i in range(count):
        (root / "xy"[i % 2] / f"{i}.bmp").write_bytes(header + rng.bytes(64 * 64 * 3))
    return root


def test_an_import_holds_no_set_in_memory(tmp_path: Path) -> None:
    """Peak memory of 1,000 images and of 2,000: the difference is what an image costs."""
    few, many = write_noise(tmp_path / "few", 1000), write_noise(tmp_path / "many", 2000)
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(many), str(tmp_path / "out"), str(few)],
        capture_output=True,
        text=True,
        check=True,
    )
    before, after = json.loads(done.stdout)
    assert Dataset(tmp_path / "out" / "many").info.duplicate_count == 0
    assert after - before < 2000 * 64 * 64 * 3 / 3  # noise does not compress: it is not held
    assert before + (after - before) / 1000 * 100_000 < 1e9


def test_progress_is_told_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "PROGRESS_SECONDS", 0.0)
    source = write_folder_of(tmp_path / "s", {"a": 5, "b": 5})
    events: list[Event] = []
    import_images(source, tmp_path / "out", SMALL, emit=events.append)
    done = [e.values["done"] for e in events if e.kind == "progress"]
    assert done == list(range(1, 11))


def test_the_folders_train_and_val_are_splits(tmp_path: Path) -> None:
    """As many datasets come; not a classification of "train" and "val"."""
    for part, count in {"Train": 20, "valid": 4}.items():
        for i in range(count):
            folder = tmp_path / "flowers" / part / ("rose", "tulip")[i % 2]
            folder.mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng(i + 100 * count).integers(0, 255, (8, 8, 3))
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.png")
    dataset = images(tmp_path / "flowers", size=8, out=tmp_path / "out")
    assert dataset.classes == ("rose", "tulip")
    assert {n: s.count for n, s in dataset.info.splits.items()} == {"train": 20, "val": 4}
    assert any("splits, not classes: Train/ (train), valid/ (val)" in n for n in dataset.info.notes)
    assert dataset.info.name == "flowers"
    again = images(tmp_path / "flowers", size=8, out=tmp_path / "out")
    assert again.info == dataset.info
    (tmp_path / "flowers" / "daisy").mkdir()  # another folder: then they are classes
    other = images(tmp_path / "flowers", size=8, out=tmp_path / "classes")
    assert other.classes == ("Train", "valid")
    part = images(
        tmp_path / "flowers" / "Train", size=8, val_folder=str(tmp_path / "flowers" / "valid"),
        out=tmp_path / "part",
    )  # fmt: skip
    assert part.info.name == "flowers"
    assert part.info.settings["val_folder"] == str(tmp_path / "flowers" / "valid")
    rows = [f"Train/{c}/{i}.png,{c}\n" for i, c in enumerate(["rose", "tulip"] * 10)]
    for name, wanted in {"labels": "flowers", "spring": "spring"}.items():
        file = tmp_path / "flowers" / f"{name}.csv"
        file.write_text("path,label\n" + "".join(rows))
        assert images(file, size=8, out=tmp_path / name).info.name == wanted


def test_equal_pictures_in_a_class_and_in_two_are_told(tmp_path: Path) -> None:
    for i in range(66):
        name = "a" if i < 41 else "b" if i < 60 else "c"
        (tmp_path / "s" / name).mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(i).integers(0, 255, (8, 8, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / "s" / name / f"{i}.png")
    for source, copy in {"a/1": "a/one", "a/2": "b/two", "a/3": "c/three"}.items():
        shutil.copy(tmp_path / "s" / f"{source}.png", tmp_path / "s" / f"{copy}.png")
    notes = " | ".join(images(tmp_path / "s", size=8, holdout=0.0, out=tmp_path / "o").info.notes)
    assert "2 images with an equal one in another class" in notes
    assert "1 image twice or more in one class" in notes
    assert "fewer than 20 training images have: 'c' (7)" in notes
    assert "'a' has 42 training images, 'c' has 7" in notes


def test_copies_of_a_jpeg_with_other_metadata_are_told(tmp_path: Path) -> None:
    """By default they are stored as they are; a progressive one is not."""
    for i, split in enumerate(("train", "val")):
        for name in "ab":
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for k in range(2):
                pixels = np.random.default_rng([i, ord(name), k]).integers(0, 256, (8, 8, 3))
                image = Image.fromarray(pixels.astype(np.uint8))
                image.save(folder / f"{k}.jpg", progressive=k == 1)
    file = (tmp_path / "train" / "a" / "0.jpg").read_bytes()
    noted = file[:2] + b"\xff\xfe\x00\x06note" + file[2:]
    (tmp_path / "val" / "a" / "copy.jpg").write_bytes(noted)
    settings = replace(SMALL, val_folder=tmp_path / "val")
    dataset = import_images(tmp_path / "train", tmp_path / "out", settings)
    assert dataset.info.duplicates == (("train:a/0.jpg", "val:a/copy.jpg"),)
    kept = {e.path: e.content.startswith(b"\xff\xd8") for e in dataset.train}
    assert kept == {f"{name}/{k}.jpg": k == 0 for name in "ab" for k in range(2)}
