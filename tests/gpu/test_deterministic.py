"""Trainings on a GPU, killed at random steps, have the curve of one that was not, to the bit."""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tessella.artifacts.run import Augment, Recipe, Run, Solver
from tessella.core.events import Event
from tessella.training.loop import train
from tests.support.training import curve, recipe, write_dataset

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
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


def train_until(recipe: Recipe, out: Path, step: float) -> None:
    def emit(event: Event) -> None:
        if event.kind == "metric" and event.step >= step:
            os.kill(os.getpid(), signal.SIGKILL)

    train(recipe, out, resume=True, emit=emit)


def trained(context: Any, recipe: Recipe, out: Path, steps: Sequence[int]) -> list[int | None]:
    """One process after another trains on until it is killed, the last one to the end; how each
    ended."""
    ends = []
    for step in (*steps, math.inf):
        child = context.Process(target=train_until, args=(recipe, out, step))
        child.start()
        child.join(100)
        child.kill()
        ends.append(child.exitcode)
    return ends


@pytest.mark.parametrize(
    ("precision", "fuse", "kills"), [("fp32", False, 1), ("bf16", True, 2), ("fp16", True, 2)]
)
def test_killed_at_random_steps_it_is_the_same_training(
    tmp_path, monkeypatch, precision, fuse, kills
):
    """Four trainings beside each other, each killed so often: 20 times in all three cases."""
    # the server's count of GPUs must not begin CUDA, of which a fork could make no use
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    context = multiprocessing.get_context("forkserver")  # which imports torch once
    context.set_forkserver_preload(["tessella.training.loop", "torch._dynamo", "triton"])
    pool = "nn.MaxPool2d(2)" if fuse else "nn.AvgPool2d(2)"
    asked = settings(tmp_path, pool, precision=precision, fuse=fuse)
    drawn = random.SystemRandom()
    lanes = [sorted(drawn.sample(range(1, 24), kills)) for _ in range(4)]
    with ThreadPoolExecutor(5) as threads:
        whole = threads.submit(trained, context, asked, tmp_path / "whole", [])
        folders = [tmp_path / str(number) for number in range(len(lanes))]
        ends = threads.map(partial(trained, context, asked), folders, lanes)
        assert whole.result() == [0]
        assert list(ends) == [[-signal.SIGKILL] * kills + [0]] * len(lanes)
    expected = Run(tmp_path / "whole")
    weights = expected.latest().weights()
    assert len(curve(expected)) > 24
    for folder in folders:
        assert curve(Run(folder)) == curve(expected)
        found = Run(folder).latest().weights()
        assert all(torch.equal(found[name], weights[name]) for name in weights)
