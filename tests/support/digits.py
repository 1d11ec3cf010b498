"""A small network that real digits train, and what it reads."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from tessella.core.spec import DimRange, TensorSpec

TRAIN = 900  # of 1,797 handwritten digits; the others calibrate and judge
BATCH = DimRange(min=16, opt=16, max=16)
IMAGE = TensorSpec(name="image", dtype="float32", shape=(BATCH, 1, 8, 8))


@functools.cache
def shuffled() -> tuple[torch.Tensor, torch.Tensor]:
    """Images [1797, 1, 8, 8] around zero, and labels, in an order that is always the same."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1
    return images[order], torch.tensor(data.target)[order]


class Net(nn.Module):
    """Six layers, two of which read one value."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.second = nn.Conv2d(1, 16, 3, 1, 1), nn.Conv2d(16, 16, 3, 1, 1)
        self.left, self.right = nn.Conv2d(16, 16, 3, 1, 1), nn.Conv2d(16, 16, 1)
        self.third, self.last = nn.Conv2d(16, 32, 3, 2, 1), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.second(F.relu(self.stem(x))))
        x = F.relu(self.left(x) + self.right(x))
        return self.last(F.relu(self.third(x)).mean((2, 3)))
