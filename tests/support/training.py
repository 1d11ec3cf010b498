"""What the tests of this folder train on and with."""

from __future__ import annotations

import math
import multiprocessing
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tessella.artifacts.dataset import Dataset, DatasetInfo, Split, write_info
from tessella.artifacts.run import Metric, Recipe, Run, Solver
from tessella.artifacts.shards import Example, SplitWriter
from tessella.core.events import read_events
from tessella.core.preprocess import Preprocess, encode
from tessella.data.loading import batches
from tessella.nn import zoo
from tessella.tasks import Report, column_of, named
from tessella.training import loop
from tessella.training.evaluate import measure, predict_split
from tessella.training.meter import Meter

CLASSES = ("rows", "columns", "checks")
SIZE = 12
VIT = """
from torchvision.models import VisionTransformer

class Small(VisionTransformer):
    def __init__(self, num_classes=3):
        super().__init__(image_size=12, patch_size=4, num_layers=4, num_heads=2, hidden_dim=64,
                         mlp_dim=128, num_classes=num_classes)

    def forward(self, x):
        return super().forward(x.expand(-1, 3, -1, -1))
"""
PREPROCESS = Preprocess(height=SIZE, width=SIZE, channels=1, mean=(0.5,), std=(0.25,))


def picture(label: int, generator: np.random.Generator, size: int = SIZE) -> np.ndarray:
    """size×size×1 uint8: stripes along, across, or both, with a random phase and noise."""
    y, x = np.mgrid[:size, :size] + generator.integers(0, 4, 2)[:, None, None]
    pattern = (y // 2 % 2, x // 2 % 2, (x // 2 + y // 2) % 2)[label % 3]
    noisy = 64 + 128 * pattern + generator.normal(0, 40, (size, size))
    return noisy.clip(0, 255).astype(np.uint8)[:, :, None]


def write_dataset(
    folder: Path, *, labels=None, classes=CLASSES, size: int = SIZE, **counts: int
) -> Path:
    """A dataset with ``counts`` images in each split, labels in turn or as given for ``train``."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    splits = {}
    digest = ""
    for name, count in counts.items():
        writer = SplitWriter(folder, name, column_of(named("classification"), classes))
        for i in range(count):
            label = labels[i] if labels is not None and name == "train" else i % len(classes)
            content = encode(picture(label, generator, size))
            writer.add(Example(content=content, label=label, path=f"{name}/{i}.png"))
        splits[name] = writer.close()
        digest += writer.row_hashes.hexdigest()[: 64 // len(counts)]
    write_info(
        folder,
        DatasetInfo(
            name="stripes",
            classes=classes,
            preprocess=replace(PREPROCESS, height=size, width=size),
            splits=splits,
            source="generated",
            content_hash=digest,
            created="2026-01-01T00:00:00+00:00",
        ),
    )
    return folder


def recipe(dataset: Path, **changes) -> Recipe:
    """LeNet for four epochs of four steps."""
    settings = {
        "network": "lenet",
        "dataset": str(dataset),
        "epochs": 4.0,
        "batch_size": 10,
        "solver": Solver(lr=0.01),
        "seed": 7,
    }
    return Recipe(**{**settings, **changes})


def curve(run: Run) -> list[tuple[int, float, dict[str, float]]]:
    """All that a run measured, but for what depends on the clock."""
    return [(m.step, m.epoch, timeless(m)) for m in run.metrics()]


def timeless(measured: Metric) -> dict[str, float]:
    clock = ("images_per_s", "data_wait")
    return {k: v for k, v in measured.values.items() if k not in clock}


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def losses(run: Run) -> list[float]:
    return [m.values["loss"] for m in run.metrics()]


def losses_by_hand(run: Run, device: str = "cpu", dtype: Any = None) -> list[float]:
    """The losses of a plain loop of torch for a run's recipe, by nesterov and a cosine, on batches
    that it loads itself.

    Args:
        dtype: of autocast; None: none.
    """
    settings, dataset = run.recipe, Dataset(run.recipe.dataset)
    torch.manual_seed(settings.seed)
    module = zoo.build(run.info.network).to(device)
    weights, biases = ([p for p in module.parameters() if (p.ndim > 1) is w] for w in (True, False))
    optimizer = torch.optim.SGD(
        [{"params": weights, "weight_decay": 1e-4}, {"params": biases}],
        lr=settings.solver.lr, momentum=0.9, nesterov=True,
    )  # fmt: skip
    count = -(-len(dataset.train) // settings.batch_size)
    steps, made = int(settings.epochs * count), list[float]()
    for step in range(steps):
        batch = next(
            batches(
                dataset.train, dataset.preprocess, batch_size=settings.batch_size,
                seed=settings.seed, epoch=step // count, start=step % count,
                augment=settings.augment, training=True,
            )
        )  # fmt: skip
        for group in optimizer.param_groups:
            group["lr"] = settings.solver.lr * 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.zero_grad()
        with torch.autocast(device, dtype, enabled=dtype is not None):
            answers = module(batch.images.to(device))
        loss = torch.nn.functional.cross_entropy(answers.float(), batch.labels.to(device))
        loss.backward()
        optimizer.step()
        made.append(loss.item())
    return made


def evaluate(predict: Callable[[Tensor], Tensor], split: Split, **settings: Any) -> Report:
    """What is measured of the answers to a split's images, as a training's validation does it."""
    rows = predict_split(lambda b: predict(b.images), split, PREPROCESS, len(CLASSES), **settings)
    return measure(rows, split, CLASSES)


def tell_late(monkeypatch) -> None:
    """Let losses be told in groups, each a step after its last, as those of a GPU are."""

    class Late(Meter):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            self._on_gpu = True

    stream = SimpleNamespace(record_event=lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(loop, "Meter", Late)


def told_ways(run: Run) -> list[str]:
    """What a training has said of the way of its steps."""
    events, _ = read_events(run.path / "events.jsonl")
    return [e.text for e in events if e.kind == "phase" and e.name == "way"]


def in_two_processes(part: Callable[[int, Path], None], folder: Path) -> None:
    """Run ``part(rank, folder)`` in a process for each of two ranks, to a good end.

    They are not forked from here: threads of autograd that another test began outlive no fork.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tessella.training.loop"])
    processes = [context.Process(target=part, args=(rank, folder)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(200)
    assert [process.exitcode for process in processes] == [0, 0]


def cramp(monkeypatch) -> None:
    """Let convolutions of more than three images find no memory."""
    forward = nn.Conv2d.forward

    def cramped(self, x):
        if len(x) > 3:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")
        return forward(self, x)

    monkeypatch.setattr(nn.Conv2d, "forward", cramped)
