"""Small networks and their input specs, for the tests of this folder."""

from __future__ import annotations

import torch
from torch import nn

from tessella.core.spec import DimRange, TensorSpec

BATCH = DimRange(min=1, opt=2, max=8)


def image(
    *size: int, dtype: str = "float32", batch: DimRange | int = BATCH
) -> tuple[TensorSpec, ...]:
    """One input ``image``, where nothing else is said with a dynamic batch."""
    return (TensorSpec(name="image", dtype=dtype, shape=(batch, *size)),)


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 32),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(32, 10),
    )


class Residual(nn.Module):
    """A residual block and a head, with batch statistics that are not the default."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.down = nn.Conv2d(3, 8, 1)
        self.head = nn.Linear(8, 4)
        nn.init.uniform_(self.norm.running_mean, -1, 1)
        nn.init.uniform_(self.norm.running_var, 0.5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv(x)) + self.down(x))
        return self.head(x.mean((2, 3)))


class Attention(nn.Module):
    """One transformer block on image patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1)
        n, length, width = x.shape
        q, k, v = (
            self.qkv(self.norm(x)).reshape(n, length, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + mixed.transpose(1, 2).reshape(n, length, width)
        return (x + self.mlp(x))[:, 0]
