"""Networks that answer for each pixel: a U-Net, and torchvision's segmentation networks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessella.artifacts.checkpoint import Network
from tessella.core.errors import UsageError
from tessella.nn.zoo import standard

LEVELS, MOST_LEVELS = 5, 8  # of a U-Net
WIDTH = 32  # channels of its first level


def build(record: Network, *, pretrained: bool) -> nn.Module:
    """The network: ``[N, channels, H, W]`` to logits ``[N, classes, H, W]``.

    Raises:
        UsageError: the pretrained weights cannot be fetched, or nobody publishes any.
    """
    if record.name == "unet":
        if pretrained:
            raise unpublished(record.name)
        options: dict[str, Any] = record.options
        return UNet(classes=record.classes, channels=record.channels, **options)
    return Upsampled(standard.build(record, pretrained=pretrained))


def unpublished(name: str) -> UsageError:
    """The error where pretrained weights are asked for and there are none."""
    return UsageError(
        "nobody publishes weights for this network",
        seen=name,
        fix="start from random weights, or from one of your checkpoints",
    )


class Upsampled(nn.Module):
    """One of torchvision's networks, which name their output: its logits alone."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.network(x)["out"]
        return logits


class UNet(nn.Module):
    """A U-Net with batch norm: four halvings, and back with what each level saw.

    Args:
        width: channels of the first level; each further one has twice as many.
        levels: how many there are, each of half the size of the one before: fewer for small things
            in small pictures, which learn earlier then.
    """

    def __init__(
        self, *, classes: int, channels: int, width: int = WIDTH, levels: int = LEVELS
    ) -> None:
        super().__init__()
        if not (width >= 1 and 1 <= levels <= MOST_LEVELS):
            raise UsageError(
                f"a U-Net has a width and one to {MOST_LEVELS} levels",
                seen=f"width={width}, levels={levels}",
            )
        widths = [width << level for level in range(levels)]
        sources = [channels, *widths[:-1]]
        self.down = nn.ModuleList(_block(a, b) for a, b in zip(sources, widths, strict=True))
        pairs = list(zip(reversed(widths[1:]), reversed(widths[:-1]), strict=True))
        self.narrow = nn.ModuleList(nn.Conv2d(a, b, 1) for a, b in pairs)
        self.up = nn.ModuleList(_block(2 * b, b) for _, b in pairs)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            seen.append(x)
        seen.pop()
        for narrow, block in zip(self.narrow, self.up, strict=True):
            skip = seen.pop()
            x = F.interpolate(narrow(x), size=skip.shape[-2:], mode="nearest")
            x = block(torch.cat([skip, x], 1))
        logits: Tensor = self.head(x)
        return logits


def _block(channels: int, width: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for source in (channels, width):
        conv = nn.Conv2d(source, width, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
        layers += [conv, nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)
