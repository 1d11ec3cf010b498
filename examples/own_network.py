"""A network of one's own, trained and compiled by its file's name.

    tessella train examples/own_network.py:Mixer datasets/flowers --out runs/mixer
    tessella compile runs/mixer --out mixer.plan

Tessella calls the class with the keywords that it accepts: classes, channels, height, width, size.
The file must stand alone: its text is kept in the checkpoint, and run again only if unchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Mixer(nn.Module):
    """Patches, then rounds of mixing over places and over channels (Tolstikhin et al. 2021)."""

    def __init__(
        self, *, classes: int, channels: int, height: int, width: int, dim: int = 48, depth: int = 2
    ) -> None:
        super().__init__()
        patch = 4
        places = (height // patch) * (width // patch)
        self.embed = nn.Conv2d(channels, dim, patch, stride=patch)
        self.blocks = nn.Sequential(*(MixerBlock(places, dim) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, image: Tensor) -> Tensor:
        tokens = self.embed(image).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(tokens)).mean(1))


class MixerBlock(nn.Module):
    def __init__(self, places: int, dim: int) -> None:
        super().__init__()
        self.over_places = nn.Sequential(
            nn.Linear(places, 2 * places), nn.GELU(), nn.Linear(2 * places, places)
        )
        self.over_channels = nn.Sequential(
            nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)
        )
        self.norm_places, self.norm_channels = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, tokens: Tensor) -> Tensor:
        mixed = self.over_places(self.norm_places(tokens).transpose(1, 2)).transpose(1, 2)
        tokens = tokens + mixed
        return tokens + self.over_channels(self.norm_channels(tokens))


if __name__ == "__main__":
    network = Mixer(classes=10, channels=3, height=32, width=32)
    print(network(torch.randn(2, 3, 32, 32)).shape)
