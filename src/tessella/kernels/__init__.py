"""Matrix products, convolutions and the other layers, each by several kernels: the fastest wins."""

from tessella.kernels.functional import (
    conv1d,
    conv2d,
    conv2d_dgrad,
    conv2d_wgrad,
    conv3d,
    linear,
    matmul,
)
from tessella.kernels.report import find

__all__ = [
    "conv1d",
    "conv2d",
    "conv2d_dgrad",
    "conv2d_wgrad",
    "conv3d",
    "find",
    "linear",
    "matmul",
]
