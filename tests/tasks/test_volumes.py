"""Volumes the whole way: files and labels → dataset → run → plan → labels of a file.

All of it takes some ten seconds of one core.
"""

from __future__ import annotations

import json
import struct
import tracemalloc
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path

import httpx
import nibabel
import numpy as np
import pytest
import tifffile
import torch

from benchmarks.made_volumes import CLASSES, write_volumes
from tessella import api
from tessella.artifacts.dataset import Dataset
from tessella.artifacts.run import Augment
from tessella.core.errors import DataError, UsageError
from tessella.core.volumes import array_in, encoded, read_header, scaled
from tessella.data import ImportSettings, import_images
from tessella.data.blocks import FOREGROUND
from tessella.data.loading import batches
from tessella.nn import zoo
from tessella.nn.windows import SIGMA, over_windows
from tessella.server import Server
from tessella.tasks import Block, LossSettings, named, targets_of
from tests.support.cli import Tessella

TASK = named("volumes")
SIDE, SEEN = 20, 16
SPACING = (2.0, 1.5, 1.0)  # of the one NIfTI file: slices, rows, columns
BAD = {
    "cut.npy": "ends before its values do",
    "four.npy": "4 axes",
    "huge.npy": "too large",
    "wide.npy": "too many voxels",
    "kind.npy": "no numbers",
    "nan.npy": "no numbers",
    "shape.npy": "another shape",
    "class.npy": "number of no class",
    "half.npy": "number of no class",
    "case00_0001.npy": "further modality",
    "alone.npy": "no labels of this name",
    "torn.nii.gz": "cannot be read",
    "script.npz": "several arrays",
}


def write_bad(folder: Path) -> None:
    """Files that are each wrong in another way, with labels that would do."""
    good, labels = np.zeros((4, 4, 4), np.float32), np.zeros((4, 4, 4), np.uint8)
    images = {
        "cut.npy": None, "four.npy": np.zeros((2, 4, 4, 4)), "kind.npy": good.astype(complex),
        "nan.npy": np.full_like(good, np.nan), "huge.npy": None, "wide.npy": None,
        "shape.npy": np.zeros((4, 4, 5)), "class.npy": good, "half.npy": good,
        "case00_0001.npy": good, "alone.npy": good,
    }  # fmt: skip
    for name, values in images.items():
        np.save(folder / "imagesTr" / name, good if values is None else values)
        if name not in ("alone.npy", "case00_0001.npy"):
            np.save(folder / "labelsTr" / name, labels)
    np.save(folder / "labelsTr" / "class.npy", labels + 9)
    np.save(folder / "labelsTr" / "half.npy", np.full((4, 4, 4), 0.5 + len(CLASSES)))
    cut = folder / "imagesTr" / "cut.npy"
    cut.write_bytes(cut.read_bytes()[:-8])
    head = np.lib.format.header_data_from_array_1_0(good) | {"shape": (1 << 10, 1 << 10, 1 << 10)}
    with (folder / "imagesTr" / "huge.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, head)
        file.truncate(file.tell() + 4 * (1 << 30))  # a hole: it takes no disk
    wide = np.lib.format.header_data_from_array_1_0(labels) | {"shape": (1 << 10, 1 << 10, 1 << 9)}
    with (folder / "imagesTr" / "wide.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, wide)
        file.truncate(file.tell() + (1 << 29))
    np.savez(folder / "imagesTr" / "script.npz", one=good, other=good)
    for name in ("script", "torn"):
        np.save(folder / "labelsTr" / f"{name}.npy", labels)
    whole = folder / "whole.nii.gz"
    noise = np.random.default_rng(0).normal(size=(4, 4, 4)).astype(np.float32)
    nibabel.save(nibabel.Nifti1Image(noise, np.eye(4)), whole)
    (folder / "imagesTr" / "torn.nii.gz").write_bytes(whole.read_bytes()[:-60])
    whole.unlink()


@pytest.fixture(scope="module")
def way(tmp_path_factory: pytest.TempPathFactory):
    """Folder, dataset and run of small volumes, of which one is NIfTI."""
    here = tmp_path_factory.mktemp("volumes")
    folder = write_volumes(here / "made", count=6, side=SIDE)
    images, labels = folder / "imagesTr", folder / "labelsTr"
    affine = np.diag([*reversed(SPACING), 1.0])
    volume = np.load(images / "case05_0000.npy")
    nibabel.save(nibabel.Nifti1Image(volume.transpose(), affine), images / "case05_0000.nii.gz")
    found = np.load(labels / "case05.npy").transpose()
    nibabel.save(nibabel.Nifti1Image(found.astype(np.float64), affine), labels / "case05.nii.gz")
    (images / "case05_0000.npy").unlink()
    (labels / "case05.npy").unlink()
    write_bad(folder)
    dataset = import_images(
        folder, here / "data", ImportSettings(task="volumes", size=SEEN, holdout=0.34)
    )
    run = api.train(
        "unet3d", dataset, out=here / "run", epochs=4, batch_size=2, val_interval=4,
        augment={"flip": True, "color": 0.1}, network_options={"width": 4, "levels": 2},
        solver={"name": "adamw", "lr": 2e-2},
    )  # fmt: skip
    return folder, dataset, run


def test_good_volumes_are_stored_and_bad_ones_listed(way) -> None:
    folder, dataset, _ = way
    told = {file.path: file.reason for file in dataset.info.skipped}
    assert set(told) == set(BAD)
    assert {name for name in BAD if BAD[name] not in told[name]} == set()
    assert dataset.classes == CLASSES
    counts = {name: split.count for name, split in dataset.info.splits.items()}
    assert counts["train"] + counts["val"] == 6
    for split in (dataset.train, dataset.val):
        for index, example in enumerate(split):
            stem = example.path.removesuffix("_0000.npy").removesuffix("_0000.nii.gz")
            if example.path.endswith(".nii.gz"):
                image = nibabel.load(folder / "imagesTr" / example.path).get_fdata().T
                labels = nibabel.load(folder / "labelsTr" / f"{stem}.nii.gz").get_fdata().T
                assert tuple(example.label["spacing"]) == SPACING
            else:
                image = np.load(folder / "imagesTr" / example.path)
                labels = np.load(folder / "labelsTr" / f"{stem}.npy")
            low, high = np.percentile(image, [0.5, 99.5])
            right = np.clip((image - low) / (high - low), 0, 1) * 65535
            stored = array_in(split.view(index), "uint16")[..., 0]
            assert np.abs(stored - right).max() <= 0.51
            assert (targets_of(split).batch(np.array([index]))[0] == labels).all()
    again = Dataset(dataset.path)  # every hash fits
    assert again.preprocess.hash == dataset.preprocess.hash
    assert again.preprocess.input_shape == (1, SEEN, SEEN, SEEN)


def test_a_run_a_plan_and_labels_in_files(way, tessella: Tessella, tmp_path: Path) -> None:
    folder, dataset, run = way
    plan = tmp_path / "net.plan"
    tessella("compile", run.path, "--batch", "1", "--untuned", "--out", plan)
    verified = api.verify(plan, against=run, data=dataset)
    assert verified.agreement == 1.0
    assert verified.max_abs_diff < 1e-4
    report = api.evaluate_split(api.open_checkpoint(run), dataset)
    assert verified.plan_score == pytest.approx(report.values["dice"], abs=1e-4)
    told = json.loads(
        tessella("evaluate", plan, "--data", dataset.path, "--split", "val", "--json").out
    )
    assert told["measures"]["dice"]["value"] == pytest.approx(report.values["dice"], abs=1e-4)
    measured = [folder / "imagesTr" / example.path for example in dataset.val]
    files = [*measured, folder / "imagesTr" / "case05_0000.nii.gz"]
    made = json.loads(tessella("run", plan, *files, "--out", tmp_path / "labels", "--json").out)
    common, both = np.zeros(len(CLASSES)), np.zeros(len(CLASSES))
    for index, entry in enumerate(made["volumes"]):
        path = Path(entry["labels"])
        if path.suffix == ".npy":
            found = np.load(path)
        else:
            image = nibabel.load(path)
            found = np.asarray(image.dataobj).T
            assert np.allclose(image.affine, nibabel.load(files[index]).affine)
        assert sum(one["voxels"] for one in entry["answer"]) == SIDE**3
        if index >= len(measured):
            continue
        truth = targets_of(dataset.val).batch(np.array([index]))[0]
        for k in range(len(CLASSES)):
            common[k] += ((found == k) & (truth == k)).sum()
            both[k] += (found == k).sum() + (truth == k).sum()
    one = tmp_path / "one.npy"
    stored = ("--data", dataset.path, "--split", "val", "--index", 1, "--out", one)
    (told,) = json.loads(tessella("run", plan, *stored, "--json").out)["volumes"]
    assert told["answer"][0]["voxels"] == made["volumes"][1]["answer"][0]["voxels"]
    assert np.array_equal(np.load(one), np.load(made["volumes"][1]["labels"]))
    assert "no such volume" in tessella("run", plan, *stored[:5], 9, "--json").out
    assert "volume of --data's split" in tessella("run", plan, files[0], *stored[4:], "--json").out
    spaced = api.segment(api.load(plan), dataset.val[1])  # there is no file to look at
    spaced.save(tmp_path / "one.nii.gz")
    assert np.array_equal(np.asarray(nibabel.load(tmp_path / "one.nii.gz").dataobj).T, np.load(one))
    right = (2 * common / np.maximum(both, 1))[1:].mean()  # the report's, from the written files
    assert report.values["dice"] == pytest.approx(right, abs=1e-3)
    whole = api.segment(api.load(plan), files[-1])
    voxel = float(np.prod(whole.header.spacing))
    assert voxel == 3
    assert sum(one["volume"] for one in whole.answer()) == pytest.approx(SIDE**3 * voxel)
    with pytest.raises(UsageError, match="segment"):
        api.answer(plan, files[:1])
    with Server({"net": plan}) as server, httpx.Client(base_url=server.url) as client:
        refused = client.post("/v2/models/net/segment", content=files[0].read_bytes())
        other = client.post("/v2/models/net/classify", content=files[0].read_bytes())
    assert (refused.status_code, other.status_code) == (400, 404)
    assert "of volumes" in refused.text
    assert all("arrays" in r.text and "/v2/models/net/infer" in r.text for r in (refused, other))
    with pytest.raises(DataError, match="another shape"):  # where two are named by hand
        TASK.examples.stored(
            TASK.examples.find(_request(folder)).sources[0].label,
            str(folder / "imagesTr" / "shape.npy"),
            dataset.preprocess,
        )


def _request(folder: Path):
    from tessella.tasks import Request

    return Request(source=folder, labels=None, image_root=None, by_folder=None)  # type: ignore[arg-type]


def test_labels_move_along(way) -> None:
    """Values that are their labels stay so, mirrored and cut; things are seen more often."""
    dataset = way[1]
    split = dataset.train
    changes = Augment(flip=True, flip_vertical=True)
    record = replace(dataset.preprocess, height=8, width=8, volume=replace(
        dataset.preprocess.volume, slices=8))  # fmt: skip
    seen = []
    for epoch in range(40):
        batch = next(
            batches(split, record, batch_size=4, epoch=epoch, augment=changes, training=True)
        )
        for index, pixels, labels in zip(batch.indices, batch.pixels, batch.labels, strict=True):
            whole = array_in(split.view(int(index)), "uint16")[..., 0]
            truth = targets_of(split).batch(np.array([int(index)]))[0]
            pairs = {*zip(whole.ravel().tolist(), truth.ravel().tolist(), strict=True)}
            made = zip(
                pixels.numpy().ravel().tolist(), labels.numpy().ravel().tolist(), strict=True
            )
            assert {pair for pair in made if 0 < pair[0] < 65535} <= pairs  # clipped ones are many
            seen.append(bool((labels > 0).any()))
    again = next(batches(split, record, batch_size=4, epoch=39, augment=changes, training=True))
    assert torch.equal(again.pixels, batch.pixels)
    assert np.mean(seen) > FOREGROUND


def test_a_block_of_a_volume_that_is_smaller() -> None:
    volume = np.arange(2 * 3 * 4).reshape(2, 3, 4)
    block = Block(first=(-1, 0, 1), sides=(4, 2, 3), mirrored=(2,))
    made = block.of(volume, outside=99)
    assert (made[[0, 3]] == 99).all()
    assert (made[1:3] == volume[:, :2, 1:][..., ::-1]).all()


def test_windows_are_weighed_towards_their_middle() -> None:
    """Beside sums in float64, place by place; and a network that looks at one voxel is itself."""
    sides, shape = (4, 4, 6), (5, 8, 6)
    one = torch.nn.Conv3d(1, 2, 1)
    images = torch.randn(1, 1, *shape)
    assert torch.allclose(over_windows(one, images, sides, outside=0.0), one(images), atol=1e-5)
    place = torch.rand(1, 1, *sides)  # an answer that depends on where in the window it is
    made = over_windows(lambda x: x * place, images, sides, outside=0.0)[0, 0].double().numpy()
    axes = [np.exp(-0.5 * ((np.arange(s) - (s - 1) / 2) / (s * SIGMA)) ** 2) for s in sides]
    weight = np.maximum(np.einsum("a,b,c->abc", *axes), 1e-3)
    sums, weights = np.zeros(shape), np.zeros(shape)
    for z in (0, 1):
        for y in (0, 2, 4):
            part = np.s_[z : z + 4, y : y + 4]
            told = images[0, 0].double().numpy()[part] * place[0, 0].double().numpy()
            sums[part] += told * weight
            weights[part] += weight
    assert np.allclose(made, sums / weights, atol=1e-5)
    small = over_windows(one, images[..., :3], sides, outside=-1.0)
    assert torch.allclose(small, one(images[..., :3]), atol=1e-5)


def test_the_loss_is_cross_entropy_and_dice() -> None:
    rng = np.random.default_rng(0)
    scores, truth = rng.normal(size=(2, 3, 4, 4, 4)), rng.integers(0, 3, (2, 4, 4, 4))
    truth[0, 0] = 255
    shares = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    known = truth != 255
    entropy = [
        -np.log(np.take_along_axis(p, np.where(k, t, 0)[None], 0)[0])[k].mean()
        for p, t, k in zip(shares, truth, known, strict=True)
    ]
    dice = []  # of each volume and class
    for p, t, k in zip(shares, truth, known, strict=True):
        dice += [2 * p[c][k & (t == c)].sum() / (p[c][k].sum() + (t == c).sum()) for c in range(3)]
    made = TASK.loss.loss(
        torch.from_numpy(scores), torch.from_numpy(truth.astype(np.uint8)), LossSettings()
    )
    assert float(made) == pytest.approx(np.mean(entropy) + 1 - np.mean(dice), rel=1e-4)


def test_what_cannot_work_is_refused(way, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="multiples of 16"):
        zoo.network("unet3d", classes=2, size=(24, 32, 32), answers="voxels")
    with pytest.raises(UsageError, match="for each voxel"):
        zoo.network("unet3d", classes=2, size=32)
    with pytest.raises(UsageError, match="not turned"):
        api.train("unet3d", way[1], out=tmp_path / "run", augment={"rotation": 10.0},
                  network_options={"levels": 2})  # fmt: skip
    with pytest.raises(UsageError, match="window"):
        ImportSettings(task="segmentation", window=(0.0, 1.0))
    with pytest.raises(DataError, match="no stored volume"):
        array_in(encoded(np.zeros((2, 2, 2), np.float32)), "uint16")
    with pytest.raises(DataError, match="no file of a volume"):
        read_header(tmp_path)
    assert scaled(np.full((1, 2, 2), 7), None).max() == 0  # a volume of one value
    with pytest.raises(UsageError, match="would have one voxel"):
        zoo.network("unet3d", classes=2, size=(16, 16, 16), answers="voxels")


def test_a_window_of_its_own_is_that_of_all_columns() -> None:
    rng = np.random.default_rng(0)
    values = np.zeros((64, 512, 512), np.int16)
    values[:, :, 100:130] = rng.integers(100, 200, (64, 512, 30))
    high = np.percentile(values, 99.5)
    made = scaled(values, None)[0, :, 100:130]
    assert np.abs(made - (values[0, :, 100:130] / high).clip(0, 1) * 65535).max() < 0.02 * 65535


def test_what_a_header_promises_takes_no_memory(tmp_path: Path) -> None:
    """A header of 300 MB packed to little, and a strip that unpacks to more than its page."""
    with zipfile.ZipFile(tmp_path / "long.npz", "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr(
            "data.npy", b"\x93NUMPY\x02\x00" + struct.pack("<I", 3 << 24) + bytes(3 << 24)
        )
    tracemalloc.start()
    with pytest.raises(DataError):
        read_header(tmp_path / "long.npz")
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()
    strip = np.zeros((64, 64), np.uint8)
    tifffile.imwrite(tmp_path / "full.tif", np.stack([strip, strip]), compression="zlib")
    assert read_header(tmp_path / "full.tif").shape == (2, 64, 64)
    with tifffile.TiffFile(tmp_path / "full.tif") as file:
        at, count = file.pages[0].dataoffsets[0], file.pages[0].databytecounts[0]
    bomb = zlib.compress(bytes(1 << 20), 9)[:count]
    content = bytearray((tmp_path / "full.tif").read_bytes())
    content[at : at + len(bomb)] = bomb
    (tmp_path / "full.tif").write_bytes(content)
    with pytest.raises(DataError, match="larger than its page"):
        read_header(tmp_path / "full.tif")
