"""Torchvision's AlexNet, GoogLeNet, VGG, ResNets and networks for pixels: any channels, classes.

torchvision is imported when one is built: it takes as long as torch itself, and a LeNet does
without.
"""

from __future__ import annotations

import urllib.error
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tessella.artifacts.checkpoint import Network
from tessella.core.errors import UsageError

Weights = dict[str, Tensor]

# GoogLeNet's published weights expect (x − 0.5) / 0.5 of a pixel x; all others expect ImageNet's
# mean and standard deviation. These bring the second to the first.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def _kaiming(conv: nn.Conv2d) -> None:
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)


def _narrow(conv: nn.Conv2d) -> None:
    nn.init.trunc_normal_(conv.weight, std=0.01, a=-2, b=2)


def _torch_default(conv: nn.Conv2d) -> None:
    """``nn.Conv2d`` has initialized itself."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How one of torchvision's networks is adapted.

    Attributes:
        first: path of the first convolution.
        heads: paths of the last layers, one weight a class.
        initialize: how the network initializes its convolutions, for a first one of other channels.
        fixed: keyword arguments that we always pass.
    """

    first: str
    heads: tuple[str, ...]
    initialize: Callable[[nn.Conv2d], None]
    fixed: dict[str, Any] = field(default_factory=dict)


# by torchvision's names
ARCHITECTURES: dict[str, Architecture] = {
    "alexnet": Architecture(first="features.0", heads=("classifier.6",), initialize=_torch_default),
    "googlenet": Architecture(
        first="conv1.conv",
        heads=("fc",),
        initialize=_narrow,
        fixed={"aux_logits": False, "transform_input": False, "init_weights": True},
    ),
    "vgg16": Architecture(first="features.0", heads=("classifier.6",), initialize=_kaiming),
    **{
        name: Architecture(first="conv1", heads=("fc",), initialize=_kaiming)
        for name in ("resnet18", "resnet50", "resnet152")
    },
    **{
        name: Architecture(
            first="backbone.conv1",
            heads=("classifier.4",),
            initialize=_kaiming,
            fixed={"weights_backbone": None},
        )
        for name in ("fcn_resnet50", "deeplabv3_resnet50")
    },
    "lraspp_mobilenet_v3_large": Architecture(
        first="backbone.0.0",
        heads=("classifier.low_classifier", "classifier.high_classifier"),
        initialize=_kaiming,
        fixed={"weights_backbone": None},
    ),
}


def build(record: Network, *, pretrained: bool) -> nn.Module:
    """The network with fresh weights, or with torchvision's, the head aside where classes differ.

    Raises:
        UsageError: the pretrained weights cannot be fetched.
    """
    from torchvision import models

    architecture = ARCHITECTURES[record.name]
    module: nn.Module = models.get_model(
        record.name, num_classes=record.classes, **architecture.fixed, **record.options
    )
    if record.channels != 3:
        replace_first(module, architecture, record.channels)
    if pretrained:
        _load_published(module, architecture, record.name)
    return module


def replace_first(module: nn.Module, architecture: Architecture, channels: int) -> None:
    """A new first convolution, for pictures of so many channels."""
    old = module.get_submodule(architecture.first)
    assert isinstance(old, nn.Conv2d)
    assert isinstance(old.padding, tuple)
    new = nn.Conv2d(
        channels,
        old.out_channels,
        _pair(old.kernel_size),
        stride=_pair(old.stride),
        padding=_pair(old.padding),
        bias=old.bias is not None,
    )
    architecture.initialize(new)
    parent, _, attribute = architecture.first.rpartition(".")
    setattr(module.get_submodule(parent), attribute, new)


def _pair(sides: tuple[int, ...]) -> tuple[int, int]:
    height, width = sides
    return height, width


# --- published weights --------------------------------------------------------------------------


def _load_published(module: nn.Module, architecture: Architecture, name: str) -> None:
    from torchvision import models

    published = fetch(models.get_model_weights(name).DEFAULT, name)
    if name == "googlenet":
        published = fold_input_transform(published)
    first = f"{architecture.first}.weight"
    own = module.state_dict()
    published[first] = spread_channels(published[first], own[first].shape[1])
    fitting = {k: v for k, v in published.items() if k in own and v.shape == own[k].shape}
    left_out = own.keys() - fitting.keys()
    head = {f"{place}.{kind}" for place in architecture.heads for kind in ("weight", "bias")}
    # Files from before PyTorch 0.4.1 lack batch norm's step counter, which inference never reads.
    if odd := {k for k in left_out - head if not k.endswith("num_batches_tracked")}:
        raise UsageError(
            f"the published weights of {name} do not fit this torchvision's {name}",
            seen=", ".join(sorted(odd)[:5]),
            fix="update torchvision, or train from random weights",
        )
    module.load_state_dict(fitting, strict=False)


def fetch(weights: Any, name: str) -> Weights:
    """Torchvision's weights from its cache or server, loaded without unpickling code."""
    try:
        return dict(weights.get_state_dict(progress=False, check_hash=True, weights_only=True))
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        raise UsageError(
            f"the pretrained weights of {name} could not be fetched",
            seen=f"{error} at {weights.url}",
            fix=f"go online once, or put that file into {torch.hub.get_dir()}/checkpoints, "
            "or start from random weights or one of your checkpoints",
        ) from error


def spread_channels(weight: Tensor, channels: int) -> Tensor:
    """A first convolution's weights ``[O, 3, kh, kw]`` for other input channels.

    One channel gets the sum, so that a grey image answers as its RGB repetition did; more repeat
    the three in turn, scaled so that the response keeps its size.
    """
    if channels == weight.shape[1]:
        return weight
    if channels == 1:
        return weight.sum(1, keepdim=True)
    turn = torch.arange(channels) % weight.shape[1]
    return weight[:, turn] * (weight.shape[1] / channels)


def fold_input_transform(published: Weights) -> Weights:
    """GoogLeNet's input transform ``a·x + b`` folded into its first convolution and batch norm.

    Exact but for the three border pixels, where padding is zero before and after; and it spares a
    checkpoint the flag that says whether its network transforms.
    """
    mean, std = torch.tensor(IMAGENET_MEAN), torch.tensor(IMAGENET_STD)
    weight = published["conv1.conv.weight"]
    scale, shift = std / 0.5, (mean - 0.5) / 0.5
    response = (weight * shift.view(1, 3, 1, 1)).sum((1, 2, 3))
    return {
        **published,
        "conv1.conv.weight": weight * scale.view(1, 3, 1, 1),
        "conv1.bn.running_mean": published["conv1.bn.running_mean"] - response,
    }


def load_detector(
    network: nn.Module, known: dict[str, str], name: str, channels: int, heads: tuple[str, ...]
) -> None:
    """What torchvision's authors learned from COCO; the last layers of classes stay random.

    Args:
        known: torchvision's names of the networks that have such weights, by ours.
        heads: how the names of the last layers' weights begin.

    Raises:
        UsageError: nobody publishes weights for this network, or they cannot be had.
    """
    from torchvision import models

    if name not in known:
        raise UsageError(
            "nobody publishes weights for this network",
            seen=name,
            fix=f"use {', '.join(known)}, or start from one of your checkpoints",
        )
    published = fetch(models.get_model_weights(known[name]).DEFAULT, name)
    own = network.state_dict()
    first = "backbone.body.conv1.weight"
    published[first] = spread_channels(published[first], channels)
    for place in [k for k in published if k.endswith("running_var")]:
        # theirs adds nothing to a variance that is frozen, where torch's batch norm adds 1e-5
        published[place] = (published[place] - 1e-5).clamp(min=0)
    fitting = {k: v for k, v in published.items() if k in own and v.shape == own[k].shape}
    fitting = {k: v for k, v in fitting.items() if not k.startswith(heads)}
    left_out = {k for k in own.keys() - fitting.keys() if not k.endswith("num_batches_tracked")}
    if odd := {k for k in left_out if not k.startswith(heads)}:
        raise UsageError(
            f"the published weights of {name} do not fit this torchvision's",
            seen=", ".join(sorted(odd)[:5]),
            fix="update torchvision, or train from random weights",
        )
    network.load_state_dict(fitting, strict=False)
