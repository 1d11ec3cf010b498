"""A user's own module: how it is called, and when its code may run."""

import dataclasses
from pathlib import Path

import pytest
import torch

from tessella.core.errors import UsageError
from tessella.nn import zoo

NET = """
from __future__ import annotations
from dataclasses import dataclass
import torch
from torch import nn

@dataclass
class Width:
    value: int

class Net(nn.Module):
    def __init__(self, classes: int, channels: int = 3, *, size, width: int = 4):
        super().__init__()
        self.size, self.width = size, Width(width)
        self.conv = nn.Conv2d(channels, width, 3)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.conv(x).mean((2, 3)))

class Anything(nn.Module):
    def __init__(self, **given):
        super().__init__()
        self.given = given
        features = given["channels"] * given["height"] * given["width"]
        self.head = nn.Linear(features, given["classes"])

    def forward(self, x):
        return self.head(x.flatten(1))

class Wrong(Anything):
    def forward(self, x):
        return x

class Broken(Anything):
    def forward(self, x):
        raise KeyError("oops")

class Needy(nn.Module):
    def __init__(self, classes, depth):
        super().__init__()

def function(**given):
    return nn.Identity()
"""


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "net.py"
    path.write_text(NET)
    return path


def test_the_class_gets_the_arguments_that_it_names(file):
    network = zoo.network(f"{file}:Net", classes=5, channels=2, size=(9, 7), options={"width": 6})
    assert network.source == NET
    net = zoo.build(network)
    assert (net.size, net.width.value) == ((9, 7), 6)
    assert net.training
    assert net(torch.zeros(3, 2, 9, 7)).shape == (3, 5)


def test_a_class_that_takes_anything_gets_everything(file):
    network = zoo.network(f"{file}:Anything", classes=5, channels=2, size=4, options={"extra": "x"})
    assert zoo.build(network).given == {
        "classes": 5, "channels": 2, "height": 4, "width": 4, "size": (4, 4), "extra": "x",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Net", {"depth": 3}, r"Net\(classes.*unknown option depth"),
        ("Needy", {}, "no value for depth"),
        ("Missing", {}, "no torch module of that name.*use one of Net, Anything, Wrong"),
        ("function", {}, "no torch module of that name"),
        ("Wrong", {}, r"logits of shape \[N, 5\].*\[1, 3, 8, 8\]"),
        ("Broken", {}, "cannot take this input.*KeyError"),
    ],
)
def test_what_is_wrong_with_a_class_is_said(file, name, options, message):
    with pytest.raises(UsageError, match=message):
        zoo.build(zoo.network(f"{file}:{name}", classes=5, size=8, options=options))


def test_code_that_does_not_run_is_explained(tmp_path):
    path = tmp_path / "net.py"
    path.write_text("import no_such_module_here")
    with pytest.raises(UsageError, match=r"could not be run.*no_such_module_here.*stand alone"):
        zoo.build(zoo.network(f"{path}:Net", classes=2))
    with pytest.raises(UsageError, match="name file and class"):
        zoo.network(str(path), classes=2)


def test_code_runs_only_if_the_same_text_is_here_or_trusted(file):
    network = zoo.network(f"{file}:Net", classes=5, size=8)
    marker = file.parent / "ran"
    brought = dataclasses.replace(network, source=f"open({str(marker)!r}, 'w').close()\n{NET}")
    with pytest.raises(
        UsageError, match=r"brings Python code.*another text lies there.*trust_code"
    ):
        zoo.build(brought)
    file.unlink()
    with pytest.raises(UsageError, match="no such file here"):
        zoo.build(network)
    assert not marker.exists()
    assert zoo.build(network, trust_code=True)(torch.zeros(1, 3, 8, 8)).shape == (1, 5)


def test_a_record_cannot_call_what_a_file_imports(tmp_path):
    """A checkpoint that names a file of this machine, its text, and a command as an option."""
    path = tmp_path / "tool.py"
    path.write_text("from subprocess import Popen\nfrom torch.nn import Linear\n")
    for name in ("Popen", "Linear"):
        network = zoo.network(f"{path}:{name}", classes=2, options={"args": "true"})
        with pytest.raises(UsageError, match="defines no torch module"):
            zoo.build(network)
