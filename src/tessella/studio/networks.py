"""The networks that forms offer first for each task, until the command line has told its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tessella.jobs import commands
from tessella.studio.quick import ask

# DIGITS' users look for these first.
STANDARD = ("lenet", "alexnet", "googlenet", "vgg16", "resnet18", "resnet50", "resnet152")
FIRST = {
    "detection": ("centernet",), "segmentation": ("unet",), "instances": ("mask_rcnn",),
    "volumes": ("unet3d",),
}  # fmt: skip

_told: list[dict[str, Any]] = []  # by the command line, once


async def every_network(folder: Path) -> list[dict[str, Any]]:
    """All networks of the zoo, as ``tessella show networks`` tells them: asked once for all pages,
    as it imports torch for three seconds.

    Raises:
        NoAnswer: the command failed.
    """
    if not _told:
        answer = await ask(commands.show_networks().argv, folder=folder)
        _told[:] = answer["networks"]
    return _told


def first_networks(task: str) -> tuple[str, ...]:
    """The networks that are offered for a task."""
    return FIRST.get(task, STANDARD)


def usual_network(task: str) -> str:
    """The network that a form begins with."""
    return FIRST.get(task, ("resnet18",))[0]
