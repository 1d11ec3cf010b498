"""From a name to a ``Network`` record, and from the record to its module."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from tessella.artifacts.checkpoint import Answering, Network
from tessella.core.errors import UsageError
from tessella.nn import prototxt
from tessella.nn.zoo import (
    centernet,
    d_fine,
    mask_rcnn,
    retinanet,
    rf_detr,
    smp_network,
    standard,
    timm_network,
    user_module,
)
from tessella.nn.zoo import dense as pixelwise
from tessella.nn.zoo.catalog import ANSWERING, BOXES, DENSE, MASKS, STANDARD, VOLUMES, describe
from tessella.nn.zoo.lenet import LeNet
from tessella.nn.zoo.timm_network import TIMM
from tessella.nn.zoo.unet3d import LEVELS, UNet3d
from tessella.tasks.instances.head import CELLS

_ANSWERS: dict[str, Answering] = {  # by kind
    "dense": "pixels", "boxes": "boxes", "masks": "masks", "volumes": "voxels"
}  # fmt: skip
_FOR = {
    "picture": "for the picture", "pixels": "for each pixel", "boxes": "for boxes",
    "masks": "for boxes with masks", "voxels": "for each voxel of a volume",
}  # fmt: skip
CLASSES = 1000  # of a network that nobody trained
CLASSES_OF_BOXES = 80  # of one that answers with boxes
Scalar = str | int | float | bool | None


def network(
    name: str,
    *,
    classes: int,
    channels: int | None = None,
    size: int | tuple[int, ...] | None = None,
    options: dict[str, Scalar] | None = None,
    answers: Answering = "picture",
) -> Network:
    """The record of a network; missing arguments take the network's usual values.

    Args:
        name: a standard name (``names()``), ``timm/NAME``, ``file.py:Class`` or ``net.prototxt``;
            a file is read now and its text becomes part of the record.
        classes: number of outputs.
        channels: channels of the input.
        size: height and width of the input in pixels, or one number for both; of volumes slices,
            height and width.
        options: further keyword arguments of the network.
        answers: what the outputs are wanted for: see ``artifacts.checkpoint.Network``.

    Raises:
        UsageError: an unknown name, one that answers the other way, a file that cannot be read, or
            an input that is too small.
    """
    source = _read_source(name)
    usual = _usual_input(name, source)
    sides = usual[1:] if size is None else (size, size) if isinstance(size, int) else size
    if answers == "voxels" and len(sides) == 2:
        sides = (sides[0], *sides)
    *slices, height, width = sides
    record = Network(
        name=name,
        classes=classes,
        channels=usual[0] if channels is None else channels,
        height=height,
        width=width,
        options=dict(options or {}),
        source=source,
        dense=answers == "pixels",
        boxes=answers == "boxes",
        masks=answers == "masks",
        slices=slices[0] if slices else None,
    )
    _check(record)
    return record


def build(network: Network, *, pretrained: bool = False, trust_code: bool = False) -> nn.Module:
    """The module of a record, in training mode: ``[N, channels, height, width]`` to logits, or
    with ``slices`` ``[N, channels, slices, height, width]``.

    Logits are ``[N, classes]``, or those of each pixel where the record is ``dense``; with
    ``boxes`` or ``masks`` it answers with these, and with its loss where it is given targets, too.
    The weights are drawn from torch's default generator, so ``torch.manual_seed`` decides them.

    Args:
        pretrained: start from the weights that the network's library publishes; a head of another
            number of classes stays random.
        trust_code: run the record's Python code although no file here has the same text.

    Raises:
        UsageError: the record names no network, its options or input do not fit, its code is not
            trusted, or its pretrained weights cannot be had.
    """
    _check(network)
    kind, options = _kind(network.name), cast(dict[str, Any], network.options)
    sizes = {"classes": network.classes, "channels": network.channels}
    area = {"height": network.height, "width": network.width}
    if pretrained and kind in ("python", "prototxt", "lenet", "volumes"):
        raise pixelwise.unpublished(network.name)
    if (of_library := _of_library(network.name, kind)) is not None:
        return of_library(network, pretrained=pretrained)
    if kind == "volumes":
        return UNet3d(**sizes, **options)
    if kind == "lenet":
        return LeNet(**sizes, **area)
    if kind == "boxes":
        return centernet.CenterNet(
            classes=network.classes, channels=network.channels, pretrained=pretrained, **options
        )
    if kind == "prototxt":
        return prototxt.build(network.source or "", **sizes, **area)
    if kind == "python":
        module = user_module.build(network, trust_code=trust_code)
    else:
        module = timm_network.build(network, pretrained=pretrained)
    _check_output(module, network)
    return module


def _of_library(name: str, kind: str) -> Callable[..., nn.Module] | None:
    """The function that builds a network of torchvision or another library; None of any other."""
    for build, names in (
        (smp_network.build, smp_network.NETWORKS), (d_fine.build, d_fine.DETECTORS),
        (rf_detr.build, rf_detr.DETECTORS), (retinanet.build, retinanet.BACKBONES),
    ):  # fmt: skip
        if name in names:
            return build
    by_kind = {"dense": pixelwise.build, "masks": mask_rcnn.build, "standard": standard.build}
    return by_kind.get(kind)


def untrained(name: str, shape: tuple[Any, ...] | None = None) -> tuple[nn.Module, tuple[int, ...]]:
    """A network by its name, or what a function of a user's file makes: in evaluation mode.

    A network gets 1,000 classes, and weights that are the same each time. A function, as a class,
    may take ``classes``, ``channels``, ``height``, ``width`` and ``size``.

    Args:
        shape: shape of one input without the batch; of an image: channels, height, width.

    Returns:
        The module, and the shape of the image that it usually takes.
    """
    answers = answering(name)
    axes = 4 if answers == "voxels" else 3
    known = shape and len(shape) == axes and all(isinstance(n, int) for n in shape)
    shape = shape if known else None
    channels, size = (None, None) if shape is None else (shape[0], shape[1:])
    classes = CLASSES_OF_BOXES if answers in ("boxes", "masks") else CLASSES
    record = network(name, classes=classes, channels=channels, size=size, answers=answers)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = user_module.call(record) if _kind(name) == "python" else build(record)
    return made.eval(), (record.channels, *record.sides)


def answering(name: str) -> Answering:
    """What the outputs of a network of this name are for; those of a user's own: the picture."""
    return _ANSWERS.get(_kind(name), "picture")


def _kind(name: str) -> str:
    if name == "lenet":
        return "lenet"
    if name in STANDARD:
        return "standard"
    if name in DENSE:
        return "dense"
    if name in BOXES:
        return "boxes"
    if name in MASKS:
        return "masks"
    if name in VOLUMES:
        return "volumes"
    if name.startswith(TIMM):
        return "timm"
    if name.endswith(".prototxt"):
        return "prototxt"
    if ".py:" in name or name.endswith(".py"):
        return "python"
    raise _unknown(name)


def _unknown(name: str) -> UsageError:
    others = timm_network.names()
    ours = [*STANDARD, *DENSE, *BOXES, *MASKS, *VOLUMES]
    known = [*ours, *(TIMM + n for n in others)]
    near = [TIMM + name] if name in others else []
    near += difflib.get_close_matches(name.lower().replace("-", ""), known, n=4, cutoff=0.7)
    return UsageError(
        "there is no network of this name",
        seen=name,
        fix=f"use {' or '.join(list(dict.fromkeys(near))[:4])}"
        if near
        else f"use one of {', '.join(ours)}, timm/NAME, file.py:Class or net.prototxt",
    )


def _read_source(name: str) -> str | None:
    kind = _kind(name)
    if kind not in ("python", "prototxt"):
        return None
    path = user_module.split_name(name)[0] if kind == "python" else Path(name)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            "the network's file cannot be read", seen=f"{path}: {error}", fix="give its path"
        ) from error


def _usual_input(name: str, source: str | None) -> tuple[int, int, int]:
    """Channels, height and width of a network where the user gives none."""
    kind = _kind(name)
    if kind == "timm":
        timm_network.require_known(name.removeprefix(TIMM))
        return timm_network.default_input(name.removeprefix(TIMM))
    if kind == "prototxt":
        return prototxt.input_shape(source or "") or (3, 224, 224)
    if kind == "python":
        return (3, 224, 224)
    known = describe(name)
    return (known.channels, known.size, known.size)


def _check(network: Network) -> None:
    if min(network.classes, network.channels, *network.sides) < 1:
        raise UsageError(
            "classes, channels and size of a network are at least 1",
            seen=f"classes={network.classes}, channels={network.channels}, "
            f"size={'×'.join(map(str, network.sides))}",
        )
    kind = _kind(network.name)
    own = _ANSWERS.get(kind, "picture")
    if network.answers != own and kind != "python":
        raise UsageError(
            f"this network answers {_FOR[own]}, and the task asks {_FOR[network.answers]}",
            seen=network.name,
            fix=f"use {', '.join(ANSWERING[network.answers])}, or a network of your own",
        )
    if kind in ("lenet", "standard", "dense", "boxes", "masks", "volumes"):
        _check_standard(network)
    elif kind == "prototxt" and network.options:
        raise UsageError(
            "a prototxt takes no options", seen=", ".join(network.options), fix="edit its text"
        )


def _check_standard(network: Network) -> None:
    known = describe(network.name)
    if unknown := [o for o in network.options if o not in known.options]:
        raise UsageError(
            f"{known.title} does not take this option",
            seen=", ".join(unknown),
            fix=f"it takes {', '.join(known.options) or 'none'}",
        )
    unit = 1 << (int(network.options.get("levels") or LEVELS) - 1)
    if network.slices is not None and any(side % unit for side in network.sides):
        raise UsageError(
            f"the sides of an input of {known.title} are multiples of {unit}",
            seen="×".join(map(str, network.sides)),
            fix="import with another size, or give network_options={'levels': 4} or less",
        )
    if network.slices is not None and all(side == unit for side in network.sides):
        raise UsageError(
            "the last level would have one voxel, of which an instance norm learns nothing",
            seen="×".join(map(str, network.sides)),
            fix="import with a larger size, or give network_options={'levels': ...} one less",
        )
    if min(network.height, network.width) < known.smallest_size:
        raise UsageError(
            f"the input is too small for {known.title}",
            seen=f"{network.height}×{network.width}",
            fix=f"use at least {known.smallest_size}×{known.smallest_size}, or another network",
        )


def _check_output(module: nn.Module, network: Network) -> None:
    """Check that a module from outside returns logits for one black input."""
    first = next(module.parameters(), None)
    x = torch.zeros(1, network.channels, *network.sides)
    x = x if first is None else x.to(first.device)
    training = module.training
    try:
        with torch.no_grad():
            y: Any = module.eval()(x)
    except Exception as error:
        raise UsageError(
            f"{network.name} cannot take this input",
            seen=f"{list(x.shape)}: {type(error).__name__}: {str(error)[:300]}",
            fix="change the input's size or channels, or correct the network",
        ) from error
    module.train(training)
    shape = list(y.shape) if isinstance(y, torch.Tensor) else type(y).__name__
    fix = "return one number a class, without softmax"
    if network.boxes or network.masks:
        places = y.shape[1] if isinstance(y, torch.Tensor) and y.dim() == 3 else "P"
        masks = CELLS if network.masks else 0
        tail: list[Any] = [places, 4 + network.classes + masks]
        fix = "return x0 y0 x1 y1 in fractions of the input and a probability a class for each box"
        fix += f", and {masks} of its cells" if masks else ""
    else:
        each = network.dense or network.slices is not None
        tail = [network.classes, *(network.sides if each else [])]
    if shape != [1, *tail]:
        kind = "masks" if network.masks else "boxes" if network.boxes else "logits"
        wanted = ", ".join(map(str, ["N", *tail]))
        raise UsageError(
            f"{network.name} does not return {kind} of shape [{wanted}]",
            seen=f"{shape} for an input of shape {list(x.shape)}",
            fix=fix,
        )
