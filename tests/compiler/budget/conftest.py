"""A small network trained on real digits, and others of them that judge."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tessella.compiler.budget import Labelled, mixes, of_tensors
from tests.support.digits import TRAIN, Net, shuffled


@pytest.fixture(scope="package", autouse=True)
def bfloat16_is_offered() -> Iterator[None]:
    """On every processor, also without instructions for it: the searches here do not time it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixes, "slowdown", lambda kind, target: 1.0)
        yield


@pytest.fixture(scope="package")
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    return shuffled()


@pytest.fixture(scope="package")
def net(digits: tuple[torch.Tensor, torch.Tensor]) -> Net:
    """Trained in float64: in float32 the number of threads decided what it learned."""
    torch.manual_seed(0)
    (images, labels), net = (t[:TRAIN] for t in digits), Net().double()
    images = images.double()
    solver = torch.optim.AdamW(net.parameters(), 1e-2)
    policy = torch.optim.lr_scheduler.OneCycleLR(solver, 1e-2, total_steps=10 * 18)
    for _ in range(10):
        for batch in torch.randperm(TRAIN).split(50):
            solver.zero_grad()
            F.cross_entropy(net(images[batch]), labels[batch]).backward()
            solver.step()
            policy.step()
    return net.float().eval()


@pytest.fixture(scope="package")
def judging(digits: tuple[torch.Tensor, torch.Tensor]) -> Labelled:
    images, labels = (t[TRAIN:] for t in digits)
    paths = [f"digit-{i}.png" for i in range(len(labels))]
    return of_tensors({"image": images}, labels, paths=paths, classes=[f"«{d}»" for d in range(10)])


@pytest.fixture(scope="package")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("times") / "times.jsonl"
