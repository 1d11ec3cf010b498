"""A U-Net of volumes, as nnU-Net and MLPerf's have it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tessella.core.errors import UsageError

LEVELS = 5
WIDTH = 32  # channels of its first level
MOST = 320  # channels of any level
SLOPE = 0.01  # of the leaky ReLU


class UNet3d(nn.Module):
    """A U-Net of two convolutions a level, with instance norm and leaky ReLU: ``[N, channels, D, H,
    W]`` to logits ``[N, classes, D, H, W]``, whose sides are multiples of 2 ** (levels − 1).

    Args:
        width: channels of the first level; each further one has twice as many, 320 at most.
        levels: how many there are; each halves the sides of the one before.
    """

    def __init__(
        self, *, classes: int, channels: int, width: int = WIDTH, levels: int = LEVELS
    ) -> None:
        super().__init__()
        if not (width >= 1 and 2 <= levels <= 8):
            raise UsageError(
                "a U-Net of volumes has a width and two to eight levels",
                seen=f"width={width}, levels={levels}",
            )
        widths = [min(width << level, MOST) for level in range(levels)]
        sources = zip([channels, *widths[:-1]], widths, strict=True)
        self.down = nn.ModuleList(_block(a, b, 1 + (n > 0)) for n, (a, b) in enumerate(sources))
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.grow = nn.ModuleList(nn.ConvTranspose3d(a, b, 2, stride=2) for a, b in pairs)
        self.up = nn.ModuleList(_block(2 * b, b, 1) for _, b in pairs)
        self.head = nn.Conv3d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        for block in self.down:
            x = block(x)
            seen.append(x)
        seen.pop()
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat([seen.pop(), grow(x)], 1))
        logits: Tensor = self.head(x)
        return logits


def _block(channels: int, width: int, stride: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for source, step in ((channels, stride), (width, 1)):
        conv = nn.Conv3d(source, width, 3, stride=step, padding=1, bias=False)
        nn.init.kaiming_normal_(conv.weight, a=SLOPE)
        layers += [conv, nn.InstanceNorm3d(width, affine=True), nn.LeakyReLU(SLOPE, inplace=True)]
    return nn.Sequential(*layers)
