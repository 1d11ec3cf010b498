"""U-Net, DeepLabV3+ and SegFormer of segmentation-models-pytorch on any of its or timm's backbones.

The import of that library takes seconds, so it happens when one of them is built.
"""

from __future__ import annotations

import torch
from torch import nn

from tessella.artifacts.checkpoint import Network
from tessella.core.errors import UsageError
from tessella.nn.zoo import timm_network

# By name: the library's class, and the usual backbone.
NETWORKS = {
    "unet_backbone": ("Unet", "resnet34"),
    "deeplabv3plus": ("DeepLabV3Plus", "resnet50"),
    "segformer": ("Segformer", "mit_b0"),
}
STEP = 32  # height and width are multiples of the coarsest features' stride


def build(record: Network, *, pretrained: bool) -> nn.Module:
    """The network: ``[N, channels, H, W]`` to logits ``[N, classes, H, W]``.

    Raises:
        UsageError: the library is not installed, sides that are no multiples of ``STEP``, a
            backbone that there is not or that has not the features, or weights that cannot be had.
    """
    name, height, width = record.name, record.height, record.width
    if height % STEP or width % STEP:
        raise UsageError(
            f"height and width of {name} are multiples of {STEP}",
            seen=f"{height}×{width}",
            fix=f"--size {max(STEP, round(height / STEP) * STEP)}",
        )
    try:
        import httpx
        import segmentation_models_pytorch as library
    except ImportError as error:
        raise UsageError(
            f"{name} needs segmentation-models-pytorch, which is not installed",
            seen=error,
            fix="pip install 'tessella[segmentation]'",
        ) from error
    kind, usual = NETWORKS[name]
    backbone = str(record.options.get("backbone", usual)).removeprefix("timm/")
    encoder = backbone
    if backbone not in library.encoders.encoders:
        timm_network.require_known(backbone)  # any other name would be fetched from a hub
        encoder = f"tu-{backbone}"
    try:
        module: nn.Module = getattr(library, kind)(
            encoder,
            encoder_weights="imagenet" if pretrained else None,
            in_channels=record.channels,
            classes=record.classes,
        )
        with torch.no_grad():
            made = module.eval()(torch.zeros(1, record.channels, height, width))
    except (OSError, httpx.HTTPError) as error:
        raise UsageError(
            f"the pretrained weights of {backbone} could not be fetched",
            seen=str(error)[:200],
            fix="go online once, or start from random weights or one of your checkpoints",
        ) from error
    except Exception as error:
        raise UsageError(
            f"{backbone} cannot be a backbone of {name}",
            seen=f"{type(error).__name__}: {str(error)[:200]}",
            fix=f"take another one, as {usual}",
        ) from error
    if tuple(made.shape[2:]) != (height, width):
        raise UsageError(
            f"{backbone} cannot be a backbone of {name}",
            seen=f"features that lead to {tuple(made.shape[2:])} of {height}×{width}",
            fix=f"take another one, as {usual}",
        )
    return module.train()
