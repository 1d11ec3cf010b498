"""Mixup and CutMix: images that are two at once, and a loss that says so.

Which step mixes how is a function of (seed, step). Each image is mixed with its neighbour in the
batch, whose order is random already.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from tessella.artifacts.run import Augment
from tessella.data.augment import MIX_STREAM, generator


@dataclass(frozen=True, kw_only=True)
class Mix:
    """How a step's images are mixed.

    Attributes:
        share: of the image itself, 0 to 1; the rest is its neighbour's.
        window: top, left, height and width, as shares of an image, of what a CutMix replaces; None
            for a mixup. ``share`` follows from the pixels that are replaced.
    """

    share: float
    window: tuple[float, float, float, float] | None = None


def drawn_mix(augment: Augment, *, seed: int, step: int) -> Mix | None:
    """The mix of a step, or None where images are not mixed.

    The share is drawn from Beta(α, α) with α = ``mixup`` (Zhang et al. 2018) or ``cutmix`` (Yun et
    al. 2019); where both are set, each step draws one of the two.
    """
    if not (augment.mixup or augment.cutmix):
        return None
    rng = generator(seed, 0, MIX_STREAM, step)
    cut = bool(augment.cutmix) and (not augment.mixup or rng.random() < 0.5)
    alpha = augment.cutmix if cut else augment.mixup
    share = float(rng.beta(alpha, alpha))
    if not cut:
        return Mix(share=share)
    side = math.sqrt(1 - share)
    return Mix(share=share, window=(float(rng.random()), float(rng.random()), side, side))


def mixed(images: Tensor, mix: Mix) -> tuple[Tensor, float]:
    """Images [N, C, H, W], each mixed with the one before it, and the share that is its own."""
    others = images.roll(1, 0)
    if mix.window is None:
        return images.lerp(others, 1 - mix.share), mix.share
    height, width = images.shape[-2:]
    down, right, tall, wide = mix.window
    middle_y, middle_x = int(down * height), int(right * width)
    half_y, half_x = int(tall * height / 2), int(wide * width / 2)
    top, bottom = max(middle_y - half_y, 0), min(middle_y + half_y, height)
    left, end = max(middle_x - half_x, 0), min(middle_x + half_x, width)
    made = images.clone()
    made[:, :, top:bottom, left:end] = others[:, :, top:bottom, left:end]
    return made, 1 - (bottom - top) * (end - left) / (height * width)
