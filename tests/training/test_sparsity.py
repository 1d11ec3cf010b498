"""2:4 sparse training: the accuracy comes back, zeros stay, and a resumed training is the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from tessella.artifacts.dataset import DatasetInfo, write_info
from tessella.artifacts.run import Recipe, Run, Solver
from tessella.artifacts.shards import Example, SplitWriter
from tessella.core.errors import TrainError
from tessella.core.policies import Policy
from tessella.core.preprocess import Preprocess, encode
from tessella.kernels.sparse.two_four import is_two_four
from tessella.tasks import column_of, named
from tessella.training.loop import train
from tessella.training.solver import optimizer_for
from tessella.training.sparsity import keep_zeros, prune, sparse_weights
from tests.support.training import curve

NETWORK = """
from torch import nn

class Net(nn.Module):
    def __init__(self, classes, channels, height, width):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 32, 1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 16, classes),
        )

    def forward(self, x):
        return self.layers(x)
"""
SPARSE = {"layers.3.weight", "layers.7.weight", "layers.10.weight"}
ACCURACY = "val/accuracy"


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """scikit-learn's handwritten digits: 1,097 to learn from, 700 that judge."""
    data, folder = load_digits(), tmp_path_factory.mktemp("digits")
    order = np.random.default_rng(0).permutation(len(data.target))
    names = tuple(str(d) for d in range(10))
    splits, hashed = {}, ""
    for split, places in (("train", order[:1097]), ("val", order[1097:])):
        writer = SplitWriter(folder, split, column_of(named("classification"), names))
        for i in places:
            image = (data.images[i] * 15.9).astype(np.uint8)[:, :, None]
            example = Example(content=encode(image), label=int(data.target[i]), path=f"{i}.png")
            writer.add(example)
        splits[split] = writer.close()
        hashed += writer.row_hashes.hexdigest()[:32]
    write_info(
        folder,
        DatasetInfo(
            name="digits", classes=names, splits=splits, source="scikit-learn",
            preprocess=Preprocess(height=8, width=8, channels=1, mean=(0.5,), std=(0.25,)),
            content_hash=hashed, created="2026-01-01T00:00:00+00:00",
        ),
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def settings(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    source = tmp_path_factory.mktemp("network") / "net.py"
    source.write_text(NETWORK)
    return Recipe(
        network=f"{source}:Net", dataset=str(digits), epochs=3.0, batch_size=32,
        solver=Solver(name="nesterov", lr=0.05), policy=Policy(name="cosine"), keep_last=4,
    )  # fmt: skip


@pytest.fixture(scope="module")
def dense(settings: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(settings, tmp_path_factory.mktemp("dense") / "run")


@pytest.fixture(scope="module")
def again(settings: Recipe, dense: Run) -> Recipe:
    """The same settings, from the trained network."""
    return replace(settings, sparsity="2:4", init=str(dense.latest().path))


@pytest.fixture(scope="module")
def sparse(again: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(again, tmp_path_factory.mktemp("sparse") / "run")


def test_the_accuracy_is_kept_and_every_checkpoint_is_two_four(dense: Run, sparse: Run) -> None:
    before = dense.latest().info.metrics[ACCURACY]
    after = sparse.latest().info.metrics[ACCURACY]
    assert before > 0.95
    assert after >= before - 0.005
    assert len(sparse.checkpoints()) == 3
    zeros: dict[str, torch.Tensor] = {}
    for checkpoint in sparse.checkpoints():
        weights = checkpoint.weights()
        assert {name for name, w in weights.items() if w.dim() > 1 and is_two_four(w)} == SPARSE
        for name in SPARSE:
            zero = weights[name] == 0
            assert 0.5 <= float(zero.float().mean()) < 0.52
            assert torch.equal(zeros.setdefault(name, zero), zero)  # nothing wanders
        momentum, _ = checkpoint.training_state()
        for name in SPARSE:
            assert not momentum[f"{name}/momentum_buffer"][zeros[name]].any()
    assert any("2:4" in e.text for e in sparse.events() if e.kind == "phase")


def test_a_resumed_training_is_the_same(again: Recipe, sparse: Run, tmp_path: Path) -> None:
    class Stopped(Exception):
        pass

    def stop(event) -> None:
        if event.kind == "metric" and (event.step or 0) >= 50:
            raise Stopped

    with pytest.raises(Stopped):
        train(again, tmp_path / "run", emit=stop)
    resumed = train(again, tmp_path / "run", resume=True)
    assert curve(resumed) == curve(sparse)
    ours, theirs = (r.latest().weights() for r in (resumed, sparse))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adadelta", "adam", "adamw", "rmsprop"])
def test_every_optimizer_leaves_zeros_zero(name: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Conv1d(16, 4, 1), nn.Flatten())
    prune(module)
    optimizer = optimizer_for(module, Solver(name=name, lr=0.1, momentum=0.9, weight_decay=0.1))
    keep_zeros(module, optimizer)
    zeros = {n: w == 0 for n, w in sparse_weights(module).items()}
    assert set(zeros) == {"0.weight", "2.weight"}
    before = module[0].weight.detach().clone()
    for _ in range(5):
        optimizer.zero_grad()
        module(torch.randn(3, 16, 16)).square().mean().backward()
        optimizer.step()
    for n, w in sparse_weights(module).items():
        assert is_two_four(w)
        assert not w[zeros[n]].any()
        for value in optimizer.state[w].values():
            if isinstance(value, torch.Tensor) and value.shape == w.shape:
                assert not value[zeros[n]].any()
    assert not torch.equal(module[0].weight[~zeros["0.weight"]], before[~zeros["0.weight"]])


def test_a_network_without_such_layers_is_refused() -> None:
    with pytest.raises(TrainError, match="2:4"):
        prune(nn.Sequential(nn.Linear(8, 8), nn.Conv2d(16, 16, 1, groups=2)))
