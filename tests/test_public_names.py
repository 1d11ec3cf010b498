"""What a person meets at the prompt: names that Tab completes, help, and objects that say what
they are.
"""

from __future__ import annotations

import pydoc
import rlcompleter
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import tessella as ts
from tessella.artifacts.plan import Plan
from tessella.core.preprocess import encode
from tessella.core.spec import TensorSpec

VERBS = (
    "calibrate", "compile", "evaluate", "export", "load", "pareto", "quantization_aware", "serve",
    "size", "sweep", "train", "tune", "verify",
)  # fmt: skip


def test_dir_lists_the_public_names_and_no_others() -> None:
    assert [n for n in dir(ts) if not n.startswith("__")] == sorted((*VERBS, "data", "kernels"))
    for room in (ts.data, ts.kernels):
        assert [n for n in dir(room) if not n.startswith("__")] == sorted(room.__all__)


def test_names_are_listed_before_torch_is_imported() -> None:
    script = "import sys, tessella; print(*dir(tessella)); assert 'torch' not in sys.modules"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert set(VERBS) <= set(ran.stdout.split())


def test_tab_completes_them() -> None:
    completer = rlcompleter.Completer({"ts": ts})
    assert (completer.complete("ts.comp", 0) or "").startswith("ts.compile")
    assert (completer.complete("ts.kernels.lin", 0) or "").startswith("ts.kernels.linear")


def test_help_lists_every_verb_with_what_it_does() -> None:
    text = pydoc.plain(pydoc.render_doc(ts))
    for verb in VERBS:
        assert f"\n    {verb}(" in text, verb
        assert f"        {verb} " in text, verb


@pytest.fixture(scope="module")
def plan() -> Plan:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    x = TensorSpec(name="x", dtype="float32", shape=(1, 4))
    return ts.compile(module.eval(), inputs=[x], batch=(1, 2, 2), target="reference")


def test_a_plan_says_what_it_is_in_a_line(plan: Plan) -> None:
    shown = repr(plan)
    assert "\n" not in shown
    assert len(shown) < 200
    assert shown.startswith("<plan of Sequential for reference (")
    assert shown.endswith("fp32, batches 1, 2: 1 step, 60 bytes of weights>")
    assert str(plan).splitlines()[0] in shown


def test_an_engine_says_what_it_is(plan: Plan) -> None:
    with ts.load(plan) as engine:
        shown = repr(engine)
        assert shown == (
            "<Engine of Sequential on cpu, fp32, batches 1, 2:"
            " x: float32[1..2..2, 4] → output: float32[1..2..2, 3]>"
        )
    assert repr(engine).endswith(", closed>")


def test_a_dataset_and_its_splits_and_a_run_say_what_they_are(tmp_path: Path) -> None:
    for label in ("dark", "light"):
        (tmp_path / "images" / label).mkdir(parents=True)
        for index in range(4):
            value = 20 * index + (100 if label == "light" else 0)
            pixels = np.full((8, 8, 1), value, np.uint8)
            (tmp_path / "images" / label / f"{index}.png").write_bytes(encode(pixels))
    dataset = ts.data.images(
        tmp_path / "images", size=8, channels=1, holdout=0.25, out=tmp_path / "dataset"
    )
    assert repr(dataset) == "<Dataset 'images': 2 classes, train 6, val 2>"
    where = tmp_path / "dataset"
    assert repr(dataset.train) == f"<Split 'train' of {where}: 6 images, 2 classes>"
    run = ts.train("lenet", dataset, out=tmp_path / "run", epochs=1, batch_size=6)
    assert repr(run) == f"<Run lenet on {where}: {tmp_path / 'run'}>"
    assert repr(run.latest()).startswith("<Checkpoint lenet @ step 1: ")
