"""Batches: the order, the slices, exact resume, and the bits of ``core.preprocess``."""

from __future__ import annotations

import io
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as tv

from tessella.artifacts.dataset import Dataset, Split
from tessella.artifacts.run import Augment
from tessella.core.errors import DataError, UsageError
from tessella.core.preprocess import Preprocess, decode, encode, fit, stored_pixels
from tessella.data import loading
from tessella.data.importing import ImportSettings, import_images
from tessella.data.loading import Batch, batches, steps_per_epoch
from tests.support.pictures.folders import write_folder_of

STRONG = Augment(flip=True, flip_vertical=True, rotation=30, scale=0.2, noise=0.05, color=0.3)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    root = tmp_path_factory.mktemp("loading")
    source = write_folder_of(root / "s", {"a": 30, "b": 23})
    settings = ImportSettings(size=(12, 10), crop=(8, 9), holdout=0.2, workers=1)
    return import_images(source, root / "d", settings)


@pytest.fixture(params=["decoded once", "image by image"])
def split(
    dataset: Dataset, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Split:
    if request.param == "image by image":
        monkeypatch.setattr(loading, "DECODE_ONCE_BYTES", 0)
    return dataset.train


def all_of(split: Split, dataset: Dataset, **options: object) -> list[Batch]:
    defaults = {"batch_size": 8, "training": True, "augment": None}
    return list(batches(split, dataset.preprocess, **{**defaults, **options}))


def same(one: list[Batch], two: list[Batch]) -> bool:
    return len(one) == len(two) and all(
        torch.equal(a.images, b.images) and torch.equal(a.labels, b.labels)
        and torch.equal(a.indices, b.indices)
        for a, b in zip(one, two, strict=True)
    )  # fmt: skip


def indices_of(some: list[Batch]) -> list[int]:
    return [i for batch in some for i in batch.indices.tolist()]


# --- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
def test_without_augmentation_every_bit_is_that_of_the_record(
    split: Split, dataset: Dataset, training: bool
) -> None:
    seen = 0
    for batch in all_of(split, dataset, training=training):
        assert batch.images.dtype == torch.float32
        assert batch.images.is_contiguous()
        assert batch.images.shape[1:] == dataset.preprocess.input_shape
        for image, label, index in zip(batch.images, batch.labels, batch.indices, strict=True):
            example = split[int(index)]
            assert np.array_equal(image.numpy(), dataset.preprocess(example.content))
            assert label == example.label
            seen += 1
    assert seen == (48 if training else len(split))


def test_fit_does_nothing_to_what_is_stored(dataset: Dataset) -> None:
    for example in dataset.train:
        pixels = decode(example.content, dataset.preprocess)
        assert fit(pixels, dataset.preprocess) is pixels


# --- order --------------------------------------------------------------------------------------


def test_evaluation_is_in_order_and_sees_each_image_once(split: Split, dataset: Dataset) -> None:
    some = all_of(split, dataset, training=False)
    assert indices_of(some) == list(range(len(split)))
    assert [len(b.labels) for b in some] == [8] * 5 + [2]


def test_an_epoch_is_a_permutation_filled_up_from_its_start(split: Split, dataset: Dataset) -> None:
    assert len(split) == 42
    some = all_of(split, dataset)
    order = indices_of(some)
    assert len(some) == steps_per_epoch(42, 8) == 6
    assert sorted(order[:42]) == list(range(42))
    assert order[42:] == order[: 48 - 42]


def test_seed_and_epoch_decide_the_order(split: Split, dataset: Dataset) -> None:
    orders = {
        (seed, epoch): tuple(indices_of(all_of(split, dataset, seed=seed, epoch=epoch)))
        for seed in (0, 1, -1, 2**64 - 2)
        for epoch in (0, 1)
    }
    assert len(set(orders.values())) == len(orders)
    assert orders[0, 1] == tuple(indices_of(all_of(split, dataset, epoch=1, augment=STRONG)))


def test_a_batch_larger_than_the_split_repeats_it(split: Split, dataset: Dataset) -> None:
    (batch,) = all_of(split, dataset, batch_size=100)
    order = batch.indices.tolist()
    assert order[:42] == order[42:84]
    assert order[84:] == order[:16]


# --- slices, resume, workers --------------------------------------------------------------------


@pytest.mark.parametrize("augment", [None, Augment(), STRONG])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_the_global_batch(
    split: Split, dataset: Dataset, world: int, augment: Augment | None
) -> None:
    whole = all_of(split, dataset, augment=augment, epoch=3)
    ranks = [
        all_of(split, dataset, augment=augment, epoch=3, rank=r, world=world) for r in range(world)
    ]
    for step, batch in enumerate(whole):
        parts = [ranks[r][step] for r in range(world)]
        assert {len(p.labels) for p in parts} == {8 // world}
        assert torch.equal(torch.cat([p.images for p in parts]), batch.images)
        assert torch.equal(torch.cat([p.labels for p in parts]), batch.labels)


def test_ranks_evaluate_each_image_once(split: Split, dataset: Dataset) -> None:
    seen = [indices_of(all_of(split, dataset, training=False, rank=r, world=4)) for r in range(4)]
    assert sorted(i for indices in seen for i in indices) == list(range(42))


@pytest.mark.parametrize("start", [0, 1, 5, 6])
def test_a_resumed_epoch_goes_on_with_the_same_bits(
    split: Split, dataset: Dataset, start: int
) -> None:
    whole = all_of(split, dataset, augment=STRONG, epoch=2, rank=1, world=2)
    rest = all_of(split, dataset, augment=STRONG, epoch=2, rank=1, world=2, start=start)
    assert same(whole[start:], rest)


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_decide_nothing(split: Split, dataset: Dataset, workers: int) -> None:
    for options in ({"augment": STRONG}, {"augment": None}, {"training": False}):
        alone = all_of(split, dataset, **options)
        assert same(alone, all_of(split, dataset, workers=workers, **options))


def test_threads_end_when_the_reader_stops(split: Split, dataset: Dataset) -> None:
    stream = batches(
        split, dataset.preprocess, batch_size=4, augment=None, training=True, workers=2
    )
    assert len(next(stream).labels) == 4
    stream.close()


# --- augmentation -------------------------------------------------------------------------------


def test_augmentation_differs_by_epoch_and_image_but_not_by_place(
    split: Split, dataset: Dataset
) -> None:
    by_size = {
        size: {
            int(i): image
            for b in all_of(split, dataset, augment=STRONG, batch_size=size)
            for i, image in zip(b.indices, b.images, strict=True)
        }
        for size in (8, 21)
    }
    assert all(torch.equal(by_size[8][i], by_size[21][i]) for i in range(42))
    later = all_of(split, dataset, augment=STRONG, epoch=1)
    for batch in later:
        for i, image in zip(batch.indices.tolist(), batch.images, strict=True):
            assert not torch.equal(image, by_size[8][i])


def test_evaluation_ignores_augmentation(split: Split, dataset: Dataset) -> None:
    plain = all_of(split, dataset, training=False)
    assert same(plain, all_of(split, dataset, training=False, augment=STRONG))


def test_only_a_random_crop_by_default(split: Split, dataset: Dataset) -> None:
    """Each training image is a part of the stored one, and all of the places occur."""
    whole = replace(dataset.preprocess, crop=None)
    places = set()
    for epoch in range(6):
        for batch in all_of(split, dataset, augment=Augment(), epoch=epoch):
            for image, i in zip(batch.images, batch.indices.tolist(), strict=True):
                stored = torch.from_numpy(whole(split[i].content))
                found = [
                    (top, left)
                    for top in range(5)
                    for left in range(2)
                    if torch.equal(image, stored[:, top : top + 8, left : left + 9])
                ]
                assert len(found) == 1
                places.add(found[0])
    assert places == {(top, left) for top in range(5) for left in range(2)}


def test_mirrors_are_those_of_torchvision(dataset: Dataset) -> None:
    whole = replace(dataset.preprocess, crop=None)
    counts = {"plain": 0, "mirrored": 0}
    for epoch in range(4):
        for batch in batches(
            dataset.train,
            whole,
            batch_size=42,
            epoch=epoch,
            augment=Augment(flip=True),
            training=True,
        ):
            for image, i in zip(batch.images, batch.indices.tolist(), strict=True):
                plain = torch.from_numpy(whole(dataset.train[i].content))
                mirrored = torch.equal(image, tv.horizontal_flip(plain))
                assert mirrored or torch.equal(image, plain)
                counts["mirrored" if mirrored else "plain"] += 1
    assert 50 < counts["mirrored"] < 118  # of 168: five standard deviations about the half


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "augment", [None, Augment(), Augment(flip=True, flip_vertical=True), STRONG], ids=str
)
def test_what_the_gpu_cuts_is_what_the_host_cuts(
    split: Split,
    dataset: Dataset,
    training: bool,
    augment: Augment | None,
) -> None:
    """A batch for a GPU has whole images, which are changed where they are scaled; on a host to the
    bit as without one (``tests/kernels/pictures`` has what the GPU makes).
    """
    settings = {"augment": augment, "training": training, "epoch": 3, "workers": 2}
    here, there = (all_of(split, dataset, for_gpu=for_gpu, **settings) for for_gpu in (False, True))
    assert same(here, there)
    assert all(b.cuts is not None and b.pixels.shape[1:3] == (12, 10) for b in there)
    assert all((b.changes is not None) == (training and augment == STRONG) for b in there)


@pytest.mark.parametrize("damage", ["cut", "flipped", "turned", "other size", "palette"])
def test_a_png_that_import_did_not_write_is_read_as_any_other(damage: str) -> None:
    """OpenCV ignores what Pillow sees; what it reads quickly is what both read alike."""
    pixels = np.random.default_rng(0).integers(0, 256, (12, 10, 3), np.uint8)
    record, content = Preprocess(height=12, width=10), encode(pixels)
    assert np.array_equal(stored_pixels(content, record), pixels)
    if damage == "cut":
        content = content[: len(content) // 2]
    elif damage == "flipped":
        content = content[:60] + bytes([content[60] ^ 0xFF]) + content[61:]
    else:
        out, image = io.BytesIO(), Image.fromarray(pixels)
        exif = Image.Exif()
        exif[0x0112] = 6
        image = image.resize((10, 13)) if damage == "other size" else image
        image = image.quantize(8) if damage == "palette" else image
        image.save(out, "PNG", **({"exif": exif} if damage == "turned" else {}))
        content = out.getvalue()
    made = stored_pixels(content, record)
    if made is not None:  # a damaged file that both can still read
        assert np.array_equal(made, decode(content, record))


# --- errors and speed ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad", [{"batch_size": 0}, {"batch_size": 9, "world": 2}, {"rank": 2, "world": 2}, {"rank": -1}]
)
def test_settings_that_cannot_work(dataset: Dataset, bad: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="multiple of the number of processes"):
        all_of(dataset.train, dataset, **bad)


def test_an_image_that_cannot_be_decoded_is_named(dataset: Dataset) -> None:
    broken = Dataset(dataset.path).train
    column = [bytes(example.content) for example in broken]

    class Cut:
        def __getattr__(self, name: str) -> object:
            return getattr(broken, name)

        def __len__(self) -> int:
            return len(broken)

        def content(self, index: int) -> bytes:
            return column[index][:40] if index == 7 else column[index]

        def __getitem__(self, index: int) -> object:
            return replace(broken[index], content=self.content(index))

    with pytest.raises(DataError, match="image 7 of the train split") as caught:
        list(batches(Cut(), dataset.preprocess, batch_size=8, augment=None, training=False))
    assert broken[7].path in str(caught.value)


def test_tiny_images_cost_little(dataset: Dataset) -> None:
    """Below 40 µs an image, by far: an epoch of the quick start must not wait for its images."""
    all_of(dataset.train, dataset)
    best = min(_seconds(dataset) for _ in range(5))
    assert best / (42 * 20) < 40e-6


def _seconds(dataset: Dataset) -> float:
    """Of the processor, whatever else the machine does."""
    began = time.process_time()
    for epoch in range(20):
        all_of(dataset.train, dataset, epoch=epoch)
    return time.process_time() - began


# --- stored pixels --------------------------------------------------------------------------------


@pytest.mark.parametrize(("channels", "depth"), [(3, 8), (1, 8), (3, 16), (1, 16), (5, 8)])
def test_stored_as_pixels_they_are_the_same_pictures(
    channels: int, depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PPM and PGM of the record's size are read where they lie; other tools open them, too."""
    rng = np.random.default_rng(0)
    for i in range(8):
        path = tmp_path / "s" / "ab"[i % 2] / f"{i}.tif"
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = np.uint8 if depth == 8 else np.uint16
        pixels = rng.integers(0, 1 << depth, (9, 11, channels), kind)
        if channels == 5:
            tifffile.imwrite(path, pixels, photometric="minisblack", planarconfig="contig")
        else:
            tifffile.imwrite(path, pixels.squeeze(), photometric="rgb" if channels > 1 else None)
    settings = ImportSettings(size=(9, 11), channels=channels, depth=depth, holdout=0.0)
    compressed = import_images(tmp_path / "s", tmp_path / "png", settings)
    raw = import_images(tmp_path / "s", tmp_path / "raw", replace(settings, store="pixels"))
    assert raw.info.import_hash != compressed.info.import_hash
    if channels != 5 and depth == 8:
        monkeypatch.setattr(loading, "fitted", None)  # nothing is decoded
    monkeypatch.setattr(loading, "DECODE_ONCE_BYTES", 0)
    (seen,) = all_of(raw.train, raw)
    for pixels, index in zip(seen.pixels.numpy(), seen.indices.tolist(), strict=True):
        content = raw.train[index].content
        assert np.array_equal(pixels, decode(content, raw.preprocess))
        assert np.array_equal(pixels, decode(compressed.train[index].content, raw.preprocess))
        if channels == 3 and depth == 8:
            assert np.array_equal(pixels, np.asarray(Image.open(io.BytesIO(content))))
        assert stored_pixels(content[:-1], raw.preprocess) is None
