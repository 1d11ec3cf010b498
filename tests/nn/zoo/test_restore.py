"""From a module to a checkpoint and back: identical logits, and clear words where it cannot be."""

import dataclasses
from pathlib import Path

import pytest
import torch

from tessella.artifacts.checkpoint import Checkpoint, Network, Position, save_checkpoint
from tessella.core.errors import CorruptArtifact, UsageError
from tessella.core.preprocess import Preprocess
from tessella.nn import zoo
from tests.support import prototxts as texts


def saved(folder: Path, network: Network, module: torch.nn.Module) -> Checkpoint:
    return save_checkpoint(
        folder / "checkpoint",
        network=network,
        preprocess=Preprocess(
            height=network.height, width=network.width, channels=network.channels
        ),
        labels=tuple(str(i) for i in range(network.classes)),
        weights=module.state_dict(),
        metrics={},
        position=Position(step=1, epoch=1.0),
    )


OWN = """
from torch import nn
class Net(nn.Sequential):
    def __init__(self, classes, channels):
        super().__init__(nn.Conv2d(channels, 3, 3), nn.Flatten(), nn.LazyLinear(classes))
"""


@pytest.mark.parametrize(
    "name", ["lenet", "resnet18", "googlenet", "timm/resnet10t", "net.prototxt", "net.py:Net"]
)
def test_a_checkpoint_gives_identical_logits(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("net.prototxt").write_text(texts.INCEPTION)
    Path("net.py").write_text(OWN)
    network = zoo.network(name, classes=3, channels=2, size=32)
    module = zoo.build(network)
    x = torch.randn(4, 2, 32, 32)
    module(x)  # moves running statistics away from their initial values
    loaded = zoo.load(saved(tmp_path, network, module))
    assert not loaded.training
    assert torch.equal(loaded(x), module.eval()(x))


def test_code_of_a_checkpoint_needs_trust(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(OWN)
    network = zoo.network("net.py:Net", classes=3, channels=2, size=8)
    module = zoo.build(network).eval()
    checkpoint = saved(tmp_path, network, module)
    Path("net.py").write_text(OWN + "# changed since")
    with pytest.raises(UsageError, match="trust_code=True"):
        zoo.load(checkpoint)
    x = torch.randn(2, 2, 8, 8)
    assert torch.equal(zoo.load(checkpoint, trust_code=True)(x), module(x))


def test_weights_of_another_network_are_corrupt(tmp_path):
    module = zoo.build(zoo.network("lenet", classes=3))
    other = zoo.network("lenet", classes=4)
    with pytest.raises(CorruptArtifact, match=r"fc2.bias has shape \[3\] instead of \[4\].*2 in"):
        zoo.load(saved(tmp_path, other, module))
    resnet = zoo.network("resnet18", classes=3, channels=1, size=28)
    with pytest.raises(CorruptArtifact, match=r"missing|unknown"):
        zoo.load(saved(tmp_path, resnet, module))


def test_init_from_takes_what_fits(tmp_path):
    network = zoo.network("resnet18", classes=3, size=32)
    trained = zoo.build(network)
    checkpoint = saved(tmp_path, network, trained)
    other = zoo.build(dataclasses.replace(network, classes=5))
    head = other.fc.weight.clone()
    left_out = zoo.init_from(other, checkpoint)
    assert left_out == {
        "fc.weight": "shape [5, 512] here, [3, 512] in the checkpoint",
        "fc.bias": "shape [5] here, [3] in the checkpoint",
    }
    assert torch.equal(other.fc.weight, head)
    same = {k: v for k, v in other.state_dict().items() if k not in left_out}
    assert all(torch.equal(v, trained.state_dict()[k]) for k, v in same.items())


def test_init_from_says_when_nothing_fits(tmp_path):
    network = zoo.network("lenet", classes=3)
    checkpoint = saved(tmp_path, network, zoo.build(network))
    with pytest.raises(UsageError, match="no weight of the checkpoint fits"):
        zoo.init_from(zoo.build(zoo.network("resnet18", classes=3, size=32)), checkpoint)
