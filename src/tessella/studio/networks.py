"""The networks that forms offer first for each task, until the command line has told its own."""

from __future__ import annotations

# DIGITS' users look for these first.
STANDARD = ("lenet", "alexnet", "googlenet", "vgg16", "resnet18", "resnet50", "resnet152")
FIRST = {
    "detection": ("centernet",), "segmentation": ("unet",), "instances": ("mask_rcnn",),
    "volumes": ("unet3d",),
}  # fmt: skip


def first_networks(task: str) -> tuple[str, ...]:
    """The networks that are offered for a task."""
    return FIRST.get(task, STANDARD)


def usual_network(task: str) -> str:
    """The network that a form begins with."""
    return FIRST.get(task, ("resnet18",))[0]
