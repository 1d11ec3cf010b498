"""What a network says of a volume beside its labels, slice by slice. Takes some three seconds."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from benchmarks.made_volumes import CLASSES, write_volumes
from tessella import api
from tessella.artifacts.dataset import Dataset
from tessella.artifacts.run import Run
from tessella.core.events import silent
from tessella.core.record import digest
from tessella.data.importing import ImportSettings, import_images
from tessella.jobs import commands
from tessella.studio.workspace import best_checkpoint
from tessella.tasks import targets_of
from tests.support.cli import context
from tests.support.studio.served import Served
from tests.support.studio.workspaces import write_report

SIDE = 12
PAGE = {"run": "runs/scans", "split": "val", "index": "0"}
SAYS, THERE, DIFFER = "What the network says", "What is there", "Where they differ"


@pytest.fixture(scope="module")
def scans(studio: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dataset]:
    """A dataset of two volumes, and a run that has learned nothing."""
    made = write_volumes(tmp_path_factory.mktemp("made"), count=2, side=SIDE)
    settings = ImportSettings(task="volumes", size=8, holdout=0.5, workers=1)
    dataset = import_images(made, studio.root / "datasets" / "scans", settings)
    api.train(
        "unet3d", dataset, out=studio.root / "runs" / "scans", epochs=1, batch_size=1,
        network_options={"width": 4, "levels": 2}, emit=silent,
    )  # fmt: skip
    yield dataset
    shutil.rmtree(studio.root / "runs" / "scans")
    shutil.rmtree(dataset.path)


@pytest.fixture
def place(studio: Served, scans: Dataset) -> Iterator[Path]:
    """Where the studio keeps what the network says of the first volume."""
    chosen = best_checkpoint(Run(studio.root / "runs" / "scans"))
    ref = chosen.path.relative_to(studio.root.resolve()).as_posix()
    weights = chosen.info.files["model.safetensors"].sha256
    key = digest([ref, weights, scans.info.content_hash, "val", 0])[:24]
    yield studio.root / ".studio" / "segmented" / f"{key}.npy"
    shutil.rmtree(studio.root / ".studio" / "segmented")


def picture_of(page: str, alt: str) -> str:
    """The address of the picture on a page that is called so."""
    (found,) = re.findall(rf'"src":"([^"]*)","alt":"{alt}"', page)
    return str(found)


def seen(client: httpx.Client, address: str) -> np.ndarray:
    answer = client.get(address)
    assert answer.status_code == 200, answer.text
    return np.asarray(Image.open(io.BytesIO(answer.content)).convert("RGB")).astype(int)


def test_labels_stand_beside_those_of_the_network_slice_by_slice(
    client: httpx.Client, scans: Dataset, place: Path
) -> None:
    page = unescape(client.get("/explore", params=PAGE).text)
    assert "Not segmented yet" in page
    assert "--split val --index 0 --out labels.npy" in page
    truth = targets_of(scans.val).batch(np.array([0]))[0]
    said = truth.copy()
    said[3] = (truth[3] + 1) % len(CLASSES)  # wrong everywhere, so that it is shown first
    said[5, 2:6, 2:6] = 0  # a part of it is wrong
    np.save(place, said)
    page = unescape(client.get("/explore", params=PAGE).text)
    assert f"slice 4 of {SIDE}: 100.00 % differ" in page
    assert all(name in page for name in CLASSES)  # the colors' meaning
    asked = {name: picture_of(page, name) for name in (SAYS, THERE, DIFFER)}
    plain = asked[THERE].replace("&drawn=true", "")
    for at in (3, 5, 7):
        shown = {
            name: seen(client, address.replace("&at=3", f"&at={at}"))
            for name, address in asked.items()
        }
        grey = seen(client, plain.replace("&at=3", f"&at={at}"))
        wrong = said[at] != truth[at]
        assert np.array_equal((shown[DIFFER] != grey).any(axis=2), wrong)
        red = shown[DIFFER][wrong] - grey[wrong] // 2
        assert (red[:, 0] > 120).all()
        assert (red[:, 1:] < 30).all()
        assert np.array_equal((shown[SAYS] != grey).any(axis=2), said[at] != 0)
        assert np.array_equal((shown[SAYS] != shown[THERE]).any(axis=2), wrong)
    assert (said[5] != truth[5]).any()


def test_labels_of_another_volume_are_told(client: httpx.Client, place: Path) -> None:
    place.parent.mkdir(exist_ok=True)
    np.save(place, np.zeros((SIDE, SIDE, SIDE - 1), np.uint8))
    page = unescape(client.get("/explore", params=PAGE).text)
    assert "The labels cannot be read: the labels have another shape" in page
    assert "Segment it" in page
    told = {"dataset": "datasets/scans", "split": "val", "index": 0}
    assert client.get("/pictures/example", params={**told, "told": place.stem}).status_code == 400
    assert client.get("/pictures/example", params={**told, "told": "../../x"}).status_code == 400
    assert "no such image" in client.get("/explore", params={**PAGE, "index": "7"}).text


def test_the_page_asks_what_the_command_does() -> None:
    spec = commands.segment("runs/a", "datasets/b", split="val", index=3, out="labels.npy")
    asked = context(spec.argv).params
    assert (asked["model"], asked["data"]) == (Path("runs/a"), Path("datasets/b"))
    assert (asked["split"], asked["index"], asked["out"]) == ("val", 3, Path("labels.npy"))
    assert not asked["images"]


def test_measures_of_each_class_stand_where_it_errs(
    client: httpx.Client, studio: Served, scans: Dataset
) -> None:
    chosen = best_checkpoint(Run(studio.root / "runs" / "scans"))
    ref = chosen.path.relative_to(studio.root.resolve()).as_posix()
    key = digest([ref, chosen.info.files["model.safetensors"].sha256])[:24]
    report = api.evaluate_split(chosen, scans).to_json()
    write_report(studio.root, "evaluations", key, report)
    page = unescape(client.get("/explore", params={"run": "runs/scans"}).text)
    for of_class in report["classes"]:
        assert of_class["label"] in page
        assert f"{of_class['iou']:.3f}" in page
    (studio.root / ".studio" / "evaluations" / f"{key}.json").unlink()
