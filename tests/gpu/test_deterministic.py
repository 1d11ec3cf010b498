"""Trainings on a GPU, killed at random steps, have the curve of one that was not, to the bit."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from pathlib import Path

import pytest
import torch

from tessella.artifacts.run import Augment, Recipe, Solver
from tessella.core.events import Event
from tessella.training.loop import train
from tests.support.training import curve, recipe, write_dataset

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
KILLS = 5
NETWORK = """
from torch import nn

class Net(nn.Module):
    def __init__(self, classes, channels, height, width):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 32, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU(), {pool},
            nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.SiLU(), nn.Flatten(),
            nn.Dropout(0.3), nn.Linear(800, classes),
        )

    def forward(self, x):
        return self.layers(x)
"""


def settings(folder: Path, pool: str, **changes) -> Recipe:
    """24 steps with a checkpoint after every second, and a last batch that is smaller."""
    (folder / "net.py").write_text(NETWORK.format(pool=pool))
    return recipe(
        write_dataset(folder / "stripes", train=46, val=12), network=f"{folder / 'net.py'}:Net",
        deterministic=True, epochs=5, snapshot_interval=0.4, augment=Augment(flip=True, noise=0.05),
        solver=Solver(name="adamw", lr=0.01), **changes,
    )  # fmt: skip


def train_until(recipe: Recipe, out: Path, step: int) -> None:
    def emit(event: Event) -> None:
        if event.kind == "metric" and event.step >= step:
            os.kill(os.getpid(), signal.SIGKILL)

    train(recipe, out, resume=True, emit=emit)


@pytest.mark.parametrize(("precision", "fuse"), [("fp32", False), ("bf16", True), ("fp16", True)])
def test_killed_at_random_steps_it_is_the_same_training(tmp_path, precision, fuse):
    pool = "nn.MaxPool2d(2)" if fuse else "nn.AvgPool2d(2)"
    asked = settings(tmp_path, pool, precision=precision, fuse=fuse)
    whole = train(asked, tmp_path / "whole")
    context = multiprocessing.get_context("forkserver")  # which imports torch once, without CUDA
    context.set_forkserver_preload(["tessella.training.loop"])
    killed = 0
    for step in sorted(random.SystemRandom().sample(range(1, 24), KILLS)):
        child = context.Process(target=train_until, args=(asked, tmp_path / "run", step))
        child.start()
        child.join(100)
        killed += child.exitcode == -signal.SIGKILL
    resumed = train(asked, tmp_path / "run", resume=True)
    assert killed == KILLS
    assert curve(resumed) == curve(whole)
    expected = whole.latest().weights()
    assert all(torch.equal(v, expected[k]) for k, v in resumed.latest().weights().items())
