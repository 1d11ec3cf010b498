"""Quantization-aware training on a GPU: its plan there says on each image what evaluation did."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import tessella as ts
from tessella import api, compiler, runtime
from tessella.artifacts.dataset import Dataset
from tessella.data.loading import batches
from tessella.graph.interpret import interpret
from tessella.runtime.graphs import GraphedBucket
from tessella.training.precision import arithmetic
from tests.support.training import write_dataset

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
BATCH = 60
NETWORK = """
from torch import nn

class Block(nn.Module):
    def __init__(self, channels, made):
        super().__init__()
        self.first, self.second = nn.Conv2d(channels, made, 3, 2, 1), nn.Conv2d(made, made, 3, 1, 1)
        self.norm, self.past = nn.BatchNorm2d(made), nn.Conv2d(channels, made, 1, 2)

    def forward(self, x):
        return (self.second(self.norm(self.first(x)).relu()) + self.past(x)).relu()

class Net(nn.Sequential):
    def __init__(self, classes, channels, height, width):
        super().__init__(
            nn.Conv2d(channels, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU(), Block(16, 32),
            Block(32, 32), nn.Upsample(scale_factor=2), nn.Conv2d(32, 32, 3, 1, 1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, classes),
        )
"""


def test_every_answer_is_that_of_the_evaluation(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(NETWORK)
    dataset = write_dataset(tmp_path / "stripes", train=300, val=600)
    name, usual = f"{tmp_path / 'net.py'}:Net", {"batch_size": 20}
    run = ts.train(name, dataset, out=tmp_path / "float", epochs=4, **usual)
    rounded = ts.train(
        name, dataset, out=tmp_path / "int8", epochs=1, quantize="int8", init=str(run.path), **usual
    )
    plan = ts.compile(rounded, batch=BATCH, untuned=True)
    assert plan.manifest.precision == "int8"
    found = ts.verify(plan, against=rounded, data=dataset)
    assert found.agreement == 1.0
    score = api.open_checkpoint(rounded).info.metrics["val/accuracy"]
    assert found.plan_score == pytest.approx(score)
    with arithmetic("fp32"):  # as in the evaluation: torch's own default rounds what cuDNN reads
        each = differing(plan, rounded, dataset, monkeypatch)
    apart = torch.cat([steps for _, steps in each])
    told = Counter[str]()
    assert any(name.startswith("interpolate") for name, _ in each)  # the nearest pixel, in int8
    for name, steps in each:
        told[name] += int((steps > 0).sum())
    print("\nintegers that differ, of all:", int((apart > 0).sum()), len(apart))
    assert len(apart) > 1_000_000
    assert int(apart.max()) <= 1, told
    assert int((apart > 0).sum()) <= 1e-4 * len(apart), told


@torch.no_grad()
def differing(
    plan: Any, run: Any, dataset: Any, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[str, torch.Tensor]]:
    """How far each integer between the layers is from the one that the evaluation computes, by
    tensors and batches.
    """
    kept = []  # what graphs are recorded of: its steps run one by one
    graphed = GraphedBucket.__init__

    def keep(self: Any, bound: Any, *rest: Any, **more: Any) -> None:
        kept.append(bound)
        graphed(self, bound, *rest, **more)

    monkeypatch.setattr(GraphedBucket, "__init__", keep)
    whole = runtime.load(plan).bound(BATCH)
    bucket = next((bound for bound in kept if bound.batch == BATCH), whole)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    net = compiler.read_quantized(api.open_checkpoint(run).quantized()).to(device)
    apart = []
    data = Dataset(dataset)
    for batch in batches(data.val, data.preprocess, batch_size=BATCH, augment=None, training=False):
        seen: dict[str, torch.Tensor] = {}

        def watch(node: Any, read: Any, made: Any, seen: dict[str, torch.Tensor] = seen) -> None:
            seen.update(zip((v.name for v in node.outputs), made, strict=True))

        images = batch.images.to(device)
        lowered = net._compiled(device)
        interpret(lowered, {lowered.inputs[0].name: images}, once=True, watch=watch)
        for bound, made in bucket.stepwise([images]):
            for name, tensor in zip(bound.step.outputs, made, strict=True):
                if tensor.dtype == torch.int8:
                    steps = (tensor.int() - seen[name].int()).abs().flatten().cpu()
                    apart.append((f"{bound.step.op} {name}", steps))
    return apart
