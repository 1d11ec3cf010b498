"""A sixth task is a folder: nothing else in the house knows its name."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

import tessella.tasks
from tessella import api
from tessella.core.errors import UsageError
from tessella.data.importing import ImportSettings, import_images
from tessella.server import Server
from tessella.tasks import counted_names, folders, named, names
from tessella.tasks import task as parts
from tests.support.toy_tasks import order

SIZE = 12
BUILT_IN = (
    "classification", "detection", "instances", "multilabel", "regression", "segmentation",
    "volumes",
)  # fmt: skip


PROTOCOLS = {
    p.__name__.lower(): p
    for p in (parts.Examples, parts.Head, parts.Loss, parts.Metrics, parts.Answers, parts.Charts)
}


@pytest.fixture
def with_order(monkeypatch):
    """The folder of tests/support/toy_tasks, beside those of the house."""
    monkeypatch.setattr(
        tessella.tasks, "__path__", [*tessella.tasks.__path__, str(Path(order.__file__).parents[1])]
    )
    folders.verbs.cache_clear()
    yield
    for known in (folders.named, folders.verbs):
        known.cache_clear()


def test_a_task_is_its_folder(with_order):
    assert set(names()) == {*BUILT_IN, "order"}
    with pytest.raises(UsageError, match=r"no such task.*order"):
        folders.named("../classification")
    assert (counted_names("regression", 1), counted_names("detection", 2)) == (
        "1 number",
        "2 classes",
    )


@pytest.mark.parametrize("name", [*BUILT_IN, "order"])
def test_a_folder_has_the_parts_that_their_protocols_name(with_order, name):
    for part, protocol in PROTOCOLS.items():
        module = getattr(named(name), part)
        for value in inspect.get_annotations(protocol):
            assert hasattr(module, value), f"{name}/{part}.py has no {value}"
        for function, asked in inspect.getmembers(protocol, inspect.isfunction):
            if not function.startswith("_"):
                has = list(inspect.signature(getattr(module, function)).parameters)
                wanted = list(inspect.signature(asked).parameters)[1:]
                assert has == wanted, f"{name}/{part}.py: {function}"
    share = named(name).loss.STEP_MEASURE  # a training's beside a validation's
    assert not share.endswith("accuracy") or share in named(name).charts.PERCENT


def test_imports_of_images_and_the_studio_need_no_torch():
    """An import starts in 0.25 s instead of 1.4 s, the studio holds 150 MB instead of 670."""
    code = (
        "import sys; from tessella.data import ImportSettings;"
        "from tessella.tasks import column_of, named, names;"
        "[(column_of(named(n), ('a',)), named(n).answers, named(n).charts, named(n).errors)"
        " for n in names()];"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_folder_alone_goes_the_whole_way(with_order, tmp_path, monkeypatch):
    """``order`` ranks pictures by brightness; learned from pairs of neighbours in a batch."""
    pictures, rng = tmp_path / "pictures", np.random.default_rng(0)
    pictures.mkdir()
    grey = rng.permutation(80)
    lines = ["path,rank"]
    for number, level in enumerate(grey.tolist()):
        noise = rng.integers(0, 10, (SIZE, SIZE, 3))
        Image.fromarray((noise + 3 * level).astype(np.uint8)).save(pictures / f"{number}.png")
        lines.append(f"{number}.png,{level}")
    (pictures / "ranks.csv").write_text("\n".join(lines))
    settings = ImportSettings(task="order", size=SIZE, holdout=0.25)
    dataset = import_images(pictures / "ranks.csv", tmp_path / "data", settings)
    solver = {"name": "adamw", "lr": 3e-3}
    run = api.train("lenet", dataset, out=tmp_path / "run", epochs=6, batch_size=15, solver=solver)
    assert api.open_checkpoint(run).info.metrics["val/concordance"] > 0.9
    api.compile(run, batch=(1, 2, 4)).save(tmp_path / "net.plan")
    report = api.verify(tmp_path / "net.plan", against=run, data=dataset)
    assert report.agreement == 1.0
    assert report.score == "concordance"
    with Server({"net": tmp_path / "net.plan"}) as server, httpx.Client() as client:
        picture = (pictures / "0.png").read_bytes()
        told = client.post(f"{server.url}/v2/models/net/rank", content=picture).json()
    assert json.dumps(told["predictions"]) == json.dumps(
        api.answer(api.load(tmp_path / "net.plan"), [pictures / "0.png"])
    )
    monkeypatch.undo()  # a machine without the folder
    folders.named.cache_clear()
    with pytest.raises(UsageError, match=r"no such task.*order"):
        Server({"net": tmp_path / "net.plan"})
