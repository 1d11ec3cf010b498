"""The ``rebuild`` of a plan is run as it is printed, and gives a plan with equal steps."""

from __future__ import annotations

import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tessella as ts
from tessella import api
from tessella.api import requests
from tessella.artifacts.build import BuildRequest
from tessella.artifacts.plan import load_plan
from tessella.core.errors import UsageError
from tessella.core.preprocess import Preprocess
from tessella.core.spec import TensorSpec
from tessella.data.importing import ImportSettings, import_images

ODD = "a b's \"$(c)"
NETS = """
import torch

class Net(torch.nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(channels, 4, 3)
        self.fc = torch.nn.Linear(4, 2)

    def forward(self, picture):
        return self.fc(self.conv(picture).relu().mean((2, 3)))

def grey():
    return Net(1)

def words():
    return 3
"""


@pytest.fixture(scope="module")
def odd(blobs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of odd names with a run, its dataset, an ONNX file and a user's module."""
    folder = tmp_path_factory.mktemp("rebuild") / ODD
    settings = ImportSettings(size=12, channels=1, holdout=0.25)
    dataset = import_images(blobs, folder / "data 1", settings)
    api.train("lenet", dataset, out=folder / "run 1", epochs=0.2, batch_size=10)
    api.export(folder / "run 1", folder / "n 1.onnx")
    (folder / "my nets.py").write_text(NETS)
    return folder


PICTURE = (TensorSpec(name="picture", dtype="float32", shape=(1, 1, 8, 10)),)
RECORD = Preprocess(height=14, width=13, channels=1, crop=(12, 12), mean=(0.5,), std=(0.25,))


@pytest.mark.parametrize(
    ("source", "settings"),
    [
        ("run 1", {"precision": "int8", "calibration": "data 1", "calibration_samples": 8,
                   "precisions": {"scores": "fp32"}, "input": "uint8"}),
        ("n 1.onnx", {"precision": "bf16", "batch": (1, 2, 2), "preprocess": RECORD,
                      "input": "uint8"}),
        ("my nets.py:grey", {"inputs": PICTURE, "batch": (1, 2, 4)}),
    ],
)  # fmt: skip
def test_the_command_of_a_plan_runs_and_gives_its_steps(
    odd: Path, tmp_path: Path, source: str, settings: dict
) -> None:
    settings = {"batch": (2,), "target": "reference"} | settings
    if "calibration" in settings:
        settings["calibration"] = str(odd / settings["calibration"])
    request = BuildRequest(source=str(odd / source), out=str(tmp_path / "first.plan"), **settings)
    api.build(request)
    first = load_plan(tmp_path / "first.plan")
    words = shlex.split(first.manifest.rebuild)
    assert words[:2] == ["tessella", "compile"]
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    again = load_plan(tmp_path / words[words.index("--out") + 1])
    assert again.manifest == first.manifest
    assert again.program == first.program
    for name, tensor in first.weights.items():
        assert torch.equal(again.weights[name], tensor)


def test_python_says_the_same_as_the_command_line(odd: Path) -> None:
    """Settings of both kinds come to one record, and a plan says it."""
    given = {"batch": 2, "target": "reference", "precision": "bf16"}
    plan = ts.compile(odd / "n 1.onnx", **given)
    request = BuildRequest(
        source=str(odd / "n 1.onnx"), batch=(2,), target="reference", precision="bf16"
    )
    assert plan.manifest.rebuild == request.rebuild()


def test_a_module_in_memory_has_a_line_of_python_that_rebuilds_it() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
    spec = TensorSpec(name="x", dtype="float32", shape=(1, 4))
    plan = ts.compile(module, inputs=[spec], batch=(1, 2, 2), target="reference", precision="bf16")
    line = plan.manifest.rebuild
    assert line.endswith("# in Python: module is of the class Sequential")
    again = eval(line, {"tessella": ts, "module": module, "TensorSpec": TensorSpec})
    assert again.manifest == plan.manifest
    assert again.program == plan.program


def test_a_class_of_a_file_is_asked_for_its_channels(odd: Path) -> None:
    plan = api.compile(f"{odd}/my nets.py:Net", inputs=PICTURE, target="reference", batch=2)
    assert plan.manifest.inputs[0].shape == (2, 1, 8, 10)
    same = api.compile(f"{odd}/my nets.py:grey", inputs=PICTURE, target="reference", batch=2)
    assert torch.equal(plan.weights["fc.weight"], same.weights["fc.weight"])  # one seed


def test_a_file_that_makes_no_module_is_a_users_mistake(odd: Path) -> None:
    with pytest.raises(UsageError, match="makes no torch module"):
        api.compile(f"{odd}/my nets.py:words", inputs=PICTURE, target="reference")
    with pytest.raises(UsageError, match="defines no torch module"):
        api.compile(f"{odd}/my nets.py:torch", inputs=PICTURE, target="reference")


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("my.kernels", "tessella --import my.kernels compile lenet --out lenet.plan"),
        ("tessella_user_0123", "tessella compile lenet --out lenet.plan"),  # the source's own file
        ("__main__", "tessella.compile('lenet', "),  # nothing that a command could import
    ],
)
def test_a_plan_with_kernels_of_a_users_own_names_their_module(module: str, command: str) -> None:
    settings = {"source": "lenet", "batch": 1, "target": "reference"}
    plan = ts.compile(**settings)
    needing = replace(plan, manifest=replace(plan.manifest, imports={"my::op": module}))
    assert (
        requests.compile_call(**settings).with_imports(needing).manifest.rebuild.startswith(command)
    )
