"""Images decoded by processes: the bits, order and errors of one thread, and nothing is left."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from tessella.artifacts.dataset import Dataset
from tessella.artifacts.run import Augment
from tessella.core.errors import DataError, TrainError
from tessella.data import filling, loading
from tessella.data.filling import Fillers
from tessella.data.importing import ImportSettings, import_images
from tessella.data.loading import Batch, batches

STRONG = Augment(flip=True, flip_vertical=True, rotation=30, scale=0.2, noise=0.05, color=0.3)
CUTS = Augment(flip=True)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """JPEG files of all samplings, also progressive and grey, kept as they are; and a PNG."""
    root, rng = tmp_path_factory.mktemp("filling"), np.random.default_rng(0)
    for number in range(44):
        sides = rng.integers(20, 40, 2)
        pixels = rng.integers(0, 256, (*sides, 3), np.uint8)
        image = Image.fromarray(pixels).resize((31, 27) if number % 4 else (int(sides[1]), 30))
        image = image.convert("L") if number % 7 == 3 else image
        folder = root / "s" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        how = {"quality": 85, "subsampling": number % 3, "progressive": number % 5 == 0}
        if number == 5:
            image.save(folder / f"{number}.png")
        else:
            image.save(folder / f"{number}.jpg", **how)
    settings = ImportSettings(
        size=(24, 28), crop=(20, 22), holdout=0.2, store="original", resize="crop", workers=1
    )
    return import_images(root / "s", root / "d", settings)


@pytest.fixture(autouse=True)
def image_by_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "DECODE_ONCE_BYTES", 0)
    monkeypatch.setattr(loading, "AT_ONCE", 4)


@pytest.fixture(scope="module")
def fillers():
    with closing(Fillers(4)) as made:
        yield made
        assert len(made) > 0  # they were asked
        assert processes()
    assert not processes()


@pytest.fixture
def before(fillers: Fillers) -> list[psutil.Process]:
    """The processes of other tests."""
    return processes()


def processes(others: Sequence[psutil.Process] = ()) -> list[psutil.Process]:
    """Those of this one that fill, without some."""
    found = []
    for one in psutil.Process().children(recursive=True):
        try:
            if one not in others and "tessella.data.filling_process" in one.cmdline():
                found.append(one)
        except psutil.Error:  # it has just ended
            pass
    return found


def memories() -> int:
    """How many shared memories this process has; they have no place in /dev/shm."""
    links = []
    for one in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # that of the listing itself
            links.append(os.readlink(one))
    return sum(link.startswith("/memfd:tessella") for link in links)


def all_of(dataset: Dataset, **options: object) -> list[Batch]:
    defaults = {"batch_size": 10, "training": True, "augment": CUTS, "epoch": 3}
    return list(batches(dataset.train, dataset.preprocess, **{**defaults, **options}))


def assert_same(one: list[Batch], two: list[Batch]) -> None:
    assert len(one) == len(two)
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a.indices, b.indices)
        assert torch.equal(a.labels, b.labels)
        assert torch.equal(a.pixels, b.pixels)
        assert torch.equal(a.images, b.images)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {}, {"for_gpu": True}, {"augment": STRONG}, {"augment": None, "training": False},
        {"start": 2, "augment": STRONG}, {"start": 1, "for_gpu": True},
        {"rank": 1, "world": 2, "seed": 2**64 - 1},
    ],
    ids=str,
)  # fmt: skip
def test_processes_decide_nothing(
    dataset: Dataset, fillers: Fillers, workers: int, options: dict[str, object]
) -> None:
    alone = all_of(dataset, **options)
    assert_same(alone, all_of(dataset, workers=workers, fillers=fillers, **options))


def test_evaluation_is_the_record_of_each_file(dataset: Dataset, fillers: Fillers) -> None:
    """Against ``Preprocess`` of the stored bytes, without anything of the loading."""
    seen = 0
    for batch in all_of(dataset, training=False, workers=2, fillers=fillers):
        for image, index in zip(batch.images, batch.indices.tolist(), strict=True):
            assert np.array_equal(image, dataset.preprocess(dataset.train[index].content))
            seen += 1
    assert seen == len(dataset.train)


def test_little_memory_takes_more_orders(
    dataset: Dataset, fillers: Fillers, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = all_of(dataset, augment=STRONG)
    monkeypatch.setattr(filling, "SHARED_BYTES", 3000)  # two images of 20 × 22, and one larger
    assert_same(alone, all_of(dataset, augment=STRONG, workers=2, fillers=fillers))


def test_records_of_other_sizes_share_the_processes(dataset: Dataset, fillers: Fillers) -> None:
    for sides in ((64, 48), (8, 8), (70, 70)):
        record = replace(dataset.preprocess, height=sides[0], width=sides[1], crop=None)
        alone, apart = (
            list(batches(dataset.train, record, batch_size=7, training=True, augment=CUTS, **how))
            for how in ({}, {"workers": 2, "fillers": fillers})
        )
        assert_same(alone, apart)


def test_processes_decode_all_also_of_shards_that_are_not_held_open(
    dataset: Dataset, fillers: Fillers, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = all_of(dataset)
    monkeypatch.setattr(loading, "fitted", None)  # this process decodes nothing
    monkeypatch.setattr("tessella.artifacts.dataset.MOST_FILES", 0)
    assert_same(alone, all_of(Dataset(dataset.path), workers=2, fillers=fillers))


def test_where_nothing_is_decoded_no_process_starts(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ImportSettings(size=24, crop=20, holdout=0.0, store="pixels", workers=1)
    raw = import_images(dataset.info.source, tmp_path / "raw", settings)
    with closing(Fillers(4)) as mine:
        all_of(raw, augment=None, training=False, workers=2, fillers=mine)
        all_of(raw, for_gpu=True, workers=2, fillers=mine)
        monkeypatch.setattr(loading, "DECODE_ONCE_BYTES", 1 << 20)
        all_of(Dataset(dataset.path), augment=STRONG, workers=2, fillers=mine)
        assert len(mine) == 0


# --- errors ---------------------------------------------------------------------------------------


def damaged(dataset: Dataset, to: Path, *places: int) -> Dataset:
    """A copy whose pictures at some places end early: their second half is zeros."""
    to.mkdir()
    for file in dataset.path.iterdir():
        content = bytearray(file.read_bytes())
        for place in places:
            path, *_, begin, nbytes = dataset.train.where(place)
            if Path(path).name == file.name:
                content[begin : begin + nbytes] = bytes(nbytes // 8).rjust(nbytes, b"\xff")
        (to / file.name).write_bytes(content)
    return Dataset(to, deep=False)


def test_a_damaged_picture_gives_the_same_error(
    dataset: Dataset, tmp_path: Path, before: list[psutil.Process]
) -> None:
    broken = damaged(dataset, tmp_path / "d", 7, 19)
    errors = []
    for workers in (0, 3):
        with pytest.raises(DataError, match="split cannot be decoded") as caught:
            all_of(broken, workers=workers, training=False)
        errors.append(caught.value.to_json())
    assert errors[0] == errors[1]
    assert "image 7 of the train split" in str(errors[0]["wrong"])
    assert not processes(before)


def test_a_killed_process_ends_the_run_with_words(
    dataset: Dataset, before: list[psutil.Process]
) -> None:
    shared = memories()
    with closing(Fillers(2)) as mine:
        while len(mine) < 2:  # who is killed before it has begun ends with other words
            all_of(dataset, batch_size=4, workers=2, fillers=mine)
        stream = batches(
            dataset.train, dataset.preprocess, batch_size=4, training=True, augment=CUTS,
            workers=2, fillers=mine,
        )  # fmt: skip
        next(stream)
        assert memories() > shared
        stopped = processes(before)
        for one in stopped:
            one.suspend()

        def kill() -> None:
            until = time.monotonic() + 60
            while len(mine) and time.monotonic() < until:  # threads have not asked for them yet
                time.sleep(0.01)
            for one in stopped:
                one.send_signal(signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.raises(TrainError, match=r"process that decodes images has ended.*SIGKILL"):
            list(stream)
        killer.join()
    assert not processes(before)
    gc.collect()
    assert memories() == shared


def test_a_process_that_is_killed_while_it_is_idle_is_replaced(
    dataset: Dataset, before: list[psutil.Process]
) -> None:
    alone = all_of(dataset)
    with closing(Fillers(2)) as mine:
        for _ in range(2):
            assert_same(alone, all_of(dataset, workers=2, fillers=mine))
            for one in processes(before):
                one.send_signal(signal.SIGKILL)
            while any(f.is_alive for f in mine._pool.idle):
                time.sleep(0.01)
    assert not processes(before)


def test_a_dataset_that_another_one_replaced_is_read_as_it_was_opened(
    dataset: Dataset, tmp_path: Path
) -> None:
    settings = ImportSettings(size=24, crop=20, holdout=0.0, store="pixels", workers=1)
    opened = import_images(dataset.info.source, tmp_path / "a", settings)
    alone = all_of(opened, augment=STRONG)
    (tmp_path / "a").rename(tmp_path / "b")
    shutil.copytree(tmp_path / "b", tmp_path / "a")
    for place in range(len(opened.train)):  # other pixels at the same places
        path, *_, begin, nbytes = opened.train.where(place)
        half = begin + nbytes // 2
        with open(path, "r+b") as file:
            file.seek(half)
            file.write(bytes(255 - b for b in os.pread(file.fileno(), begin + nbytes - half, half)))
    assert_same(alone, all_of(opened, augment=STRONG, workers=2))


def test_a_reader_that_stops_leaves_no_process(
    dataset: Dataset, before: list[psutil.Process]
) -> None:
    stream = batches(
        dataset.train, dataset.preprocess, batch_size=4, training=True, augment=CUTS, workers=2
    )
    next(stream)
    assert processes(before)
    stream.close()
    assert not processes(before)


PARENT = """
import sys, time
import numpy as np
from tessella.artifacts.dataset import Dataset
from tessella.data.filling import Fillers, Wanted

data = Dataset(sys.argv[1])
record = data.preprocess
out = np.empty((4, record.height, record.width, record.channels), np.uint8)
fillers = Fillers(4)
fillers.fill(data.train, range(4), Wanted(record, True, None, (0, 0)), out)
print(fillers._pool.idle[0]._process._popen.pid, flush=True)
time.sleep(60)
"""


def test_a_process_ends_with_its_parent(dataset: Dataset) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(dataset.path)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    filler = psutil.Process(int(parent.stdout.readline()))
    assert "tessella.data.filling_process" in filler.cmdline()
    parent.kill()
    parent.communicate()
    for _ in range(6000):
        if not filler.is_running() or filler.status() == psutil.STATUS_ZOMBIE:
            break
        time.sleep(0.01)
    else:
        pytest.fail("it lives on")


def test_it_needs_neither_torch_nor_arrow() -> None:
    """16 of them start at once, where each would take 300 MB and seconds."""
    asked = "import sys, tessella.data.filling_process; print(*sys.modules)"
    made = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert {"torch", "pyarrow", "cv2", "scipy"}.isdisjoint(made.stdout.split())
