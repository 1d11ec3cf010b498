"""The table of the standard networks, for a person who chooses one."""

from __future__ import annotations

from dataclasses import dataclass

from tessella.artifacts.checkpoint import Answering
from tessella.core.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Description:
    """A standard network.

    Attributes:
        title: what people call it.
        year, paper: when it appeared, and where.
        size: height and width of its usual input, in pixels; of volumes slices, too.
        channels: channels of its usual input.
        smallest_size: the smallest height and width that its layers can take.
        options: what ``Network.options`` may hold.
    """

    title: str
    year: int
    paper: str
    size: int
    channels: int
    smallest_size: int
    options: tuple[str, ...] = ()


def _dense(title: str, year: int, paper: str, smallest_size: int, *options: str) -> Description:
    return Description(
        title=title,
        year=year,
        paper=paper,
        size=256,
        channels=3,
        smallest_size=smallest_size,
        options=options,
    )


def _resnet(layers: int) -> Description:
    return Description(
        title=f"ResNet-{layers}",
        year=2015,
        paper="He et al., Deep residual learning for image recognition, arXiv:1512.03385",
        size=224,
        channels=3,
        smallest_size=1,
        options=("zero_init_residual",),
    )


STANDARD: dict[str, Description] = {
    "lenet": Description(
        title="LeNet",
        year=1998,
        paper="LeCun et al., Gradient-based learning applied to document recognition",
        size=28,
        channels=1,
        smallest_size=8,
    ),
    "alexnet": Description(
        title="AlexNet",
        year=2014,
        paper="Krizhevsky, One weird trick for parallelizing CNNs, arXiv:1404.5997",
        size=224,
        channels=3,
        smallest_size=63,
        options=("dropout",),
    ),
    "googlenet": Description(
        title="GoogLeNet",
        year=2014,
        paper="Szegedy et al., Going deeper with convolutions, arXiv:1409.4842",
        size=224,
        channels=3,
        smallest_size=15,
        options=("dropout",),
    ),
    "vgg16": Description(
        title="VGG-16",
        year=2014,
        paper="Simonyan and Zisserman, Very deep convolutional networks, arXiv:1409.1556",
        size=224,
        channels=3,
        smallest_size=32,
        options=("dropout",),
    ),
    "resnet18": _resnet(18),
    "resnet50": _resnet(50),
    "resnet152": _resnet(152),
}

# Networks that answer for each pixel.
DENSE: dict[str, Description] = {
    "unet": _dense(
        "U-Net",
        2015,
        "Ronneberger et al., U-Net: convolutional networks for biomedical image segmentation, "
        "arXiv:1505.04597",
        16,
        "levels",
        "width",
    ),
    "fcn_resnet50": _dense(
        "FCN with ResNet-50",
        2014,
        "Long et al., Fully convolutional networks for semantic segmentation, arXiv:1411.4038",
        32,
    ),
    "deeplabv3_resnet50": _dense(
        "DeepLabV3 with ResNet-50",
        2017,
        "Chen et al., Rethinking atrous convolution for semantic image segmentation, "
        "arXiv:1706.05587",
        32,
    ),
    "lraspp_mobilenet_v3_large": _dense(
        "LR-ASPP with MobileNetV3",
        2019,
        "Howard et al., Searching for MobileNetV3, arXiv:1905.02244",
        32,
    ),
    "unet_backbone": _dense(
        "U-Net on a backbone",
        2015,
        "Ronneberger et al., U-Net: convolutional networks for biomedical image segmentation, "
        "arXiv:1505.04597",
        32,
        "backbone",
    ),
    "deeplabv3plus": _dense(
        "DeepLabV3+",
        2018,
        "Chen et al., Encoder-decoder with atrous separable convolution for semantic image "
        "segmentation, arXiv:1802.02611",
        32,
        "backbone",
    ),
    "segformer": _dense(
        "SegFormer",
        2021,
        "Xie et al., SegFormer: simple and efficient design for semantic segmentation with "
        "transformers, arXiv:2105.15203",
        32,
        "backbone",
    ),
}


def _d_fine(size: str) -> Description:
    return Description(
        title=f"D-FINE-{size}",
        year=2024,
        paper="Peng et al., D-FINE: redefine regression task in DETRs as fine-grained "
        "distribution refinement, arXiv:2410.13842",
        size=640,
        channels=3,
        smallest_size=32,
    )


def _rf_detr(size: str, side: int) -> Description:
    return Description(
        title=f"RF-DETR-{size}",
        year=2025,
        paper="Robinson et al., RF-DETR: neural architecture search for real-time detection "
        "transformers, arXiv:2511.09554",
        size=side,
        channels=3,
        smallest_size=32,
    )


def _retinanet(layers: int) -> Description:
    return Description(
        title=f"RetinaNet with ResNet-{layers}",
        year=2017,
        paper="Lin et al., Focal loss for dense object detection, arXiv:1708.02002",
        size=640,
        channels=3,
        smallest_size=1,
        options=("anchor",),
    )


# Networks that answer with boxes.
BOXES: dict[str, Description] = {
    "centernet": Description(
        title="CenterNet",
        year=2019,
        paper="Zhou et al., Objects as points, arXiv:1904.07850",
        size=512,
        channels=3,
        smallest_size=32,
        options=("backbone", "width"),
    ),
    **{f"d_fine_{size.lower()}": _d_fine(size) for size in "NSM"},
    **{
        f"rf_detr_{size.lower()}": _rf_detr(size, side)
        for size, side in (("N", 384), ("S", 512), ("M", 576))
    },
    **{f"retinanet_r{layers}": _retinanet(layers) for layers in (18, 50)},
}

# Networks that answer with boxes and a mask for each.
MASKS: dict[str, Description] = {
    "mask_rcnn": Description(
        title="Mask R-CNN",
        year=2017,
        paper="He et al., Mask R-CNN, arXiv:1703.06870",
        size=640,
        channels=3,
        smallest_size=32,
        options=("anchor", "backbone", "detections", "proposals", "width"),
    )
}

# Networks of volumes, which answer for each voxel.
VOLUMES: dict[str, Description] = {
    "unet3d": Description(
        title="U-Net of volumes",
        year=2016,
        paper="Çiçek et al., 3D U-Net, arXiv:1606.06650; Isensee et al., nnU-Net, arXiv:1809.10486",
        size=128,
        channels=1,
        smallest_size=4,
        options=("levels", "width"),
    )
}

# The networks by what their outputs are for.
ANSWERING: dict[Answering, dict[str, Description]] = {
    "picture": STANDARD, "pixels": DENSE, "boxes": BOXES, "masks": MASKS,
    "voxels": VOLUMES,
}  # fmt: skip


def names() -> tuple[str, ...]:
    """The standard networks, small to large."""
    return tuple(STANDARD)


def describe(name: str) -> Description:
    """The description of a standard network; raises ``UsageError`` with the known names."""
    known = {**STANDARD, **DENSE, **BOXES, **MASKS, **VOLUMES}
    if name not in known:
        raise UsageError(
            "only the standard networks have a description",
            seen=name,
            fix=f"use one of {', '.join(known)}",
        )
    return known[name]
