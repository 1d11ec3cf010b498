"""Pictures of 16 bits a sample reach the network as they are, by every way of storing them.

The values are read from the files a second time by Pillow or tifffile, and all numbers are computed
in float64.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from tessella.artifacts.dataset import Dataset
from tessella.core.preprocess import fitted
from tessella.data.importing import ImportSettings, import_images
from tessella.data.loading import batches

SIDES = (24, 20)
CLASSES = ("ground", "cell")


def write_pictures(folder: Path) -> None:
    """Ten pictures of 12 bits in 16, as microscopes write them, and masks of their bright half."""
    rng = np.random.default_rng(0)
    for name in ("images", "masks", "a", "b"):
        (folder / name).mkdir(parents=True)
    for number in range(10):
        pixels = rng.integers(100, 4096, SIDES, np.uint16)
        mask = (pixels > 2000).astype(np.uint8)
        for place in (folder / "images", folder / "ab"[number % 2]):
            if number % 3:
                Image.fromarray(pixels).save(place / f"{number}.png")
            else:
                tifffile.imwrite(place / f"{number}.tif", pixels, photometric="minisblack")
        Image.fromarray(mask).save(folder / "masks" / f"{number}.png")
    (folder / "classes.txt").write_text("\n".join(CLASSES))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deep") / "pictures"
    write_pictures(folder)
    return folder


def read_again(path: Path) -> np.ndarray:
    if path.suffix == ".tif":
        return tifffile.imread(path)
    with Image.open(path) as image:
        assert image.mode == "I;16"
        return np.asarray(image)


def imported(pictures: Path, out: Path, task: str, **settings: object) -> tuple[Dataset, Path]:
    """The dataset, and the folder that its pictures' names are relative to."""
    source = pictures
    if task == "classification":
        source = out.parent / "source"
        source.mkdir()
        for name in "ab":
            (source / name).symlink_to(pictures / name)
    chosen = ImportSettings(size=SIDES, channels=1, holdout=0.2, task=task, workers=1, **settings)
    root = source if task == "classification" else source / "images"
    return import_images(source, out, chosen), root


@pytest.mark.parametrize(
    ("task", "store"),
    [("classification", "png"), ("classification", "original"), ("segmentation", "pixels")],
)
def test_what_the_network_sees_is_what_the_files_hold(pictures, tmp_path, task, store):
    dataset, root = imported(pictures, tmp_path / "out", task, depth=16, store=store)
    record = dataset.preprocess
    assert not dataset.info.notes or "16 bits" not in " ".join(dataset.info.notes)
    trained = np.stack([read_again(root / e.path) for e in dataset.train]) / 65535
    assert record.mean == pytest.approx((trained.mean(),), rel=1e-6)
    assert record.std == pytest.approx((trained.std(),), rel=1e-5)
    for split in (dataset.train, dataset.val):
        (batch,) = batches(split, record, batch_size=16, augment=None, training=False)
        paths = [root / split[i].path for i in batch.indices.tolist()]
        right = np.stack([read_again(path) for path in paths])
        assert np.array_equal(batch.pixels.numpy()[..., 0], right)
        expected = (right / 65535 - record.mean[0]) / record.std[0]
        np.testing.assert_allclose(batch.images.numpy()[:, 0], expected, rtol=0, atol=2e-5)
        if task == "segmentation":
            masks = np.asarray(batch.labels).reshape(right.shape)
            assert np.array_equal(masks, right > 2000)
        for path, pixels in zip(paths, right, strict=True):  # as a server gets them
            assert np.array_equal(fitted(path.read_bytes(), record)[..., 0], pixels)


def test_samples_of_other_kinds_are_refused_with_what_to_do(pictures, tmp_path):
    source = tmp_path / "kinds"
    for name in "ab":
        (source / name).mkdir(parents=True)
        for file in (pictures / name).iterdir():
            (source / name / file.name).write_bytes(file.read_bytes())
    flat = np.full(SIDES, 7)
    for kind in (np.int16, np.uint32, np.float32):
        tifffile.imwrite(source / "a" / f"{np.dtype(kind).name}.tif", flat.astype(kind))
    chosen = ImportSettings(size=SIDES, channels=1, depth=16, workers=1)
    dataset = import_images(source, tmp_path / "out", chosen)
    assert sum(s.count for s in dataset.info.splits.values()) == 10
    refused = {file.path: str(file) for file in dataset.info.skipped}
    assert sorted(refused) == ["a/float32.tif", "a/int16.tif", "a/uint32.tif"]
    for said in refused.values():
        assert "convert it to 8- or 16-bit unsigned samples" in said
