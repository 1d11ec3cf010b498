"""A standard network: the two rows that make torchvision's DenseNet-121 a network of Tessella.

docs/add-a-network.md explains them; tests/examples/test_adding.py adds them and builds it.
"""

from __future__ import annotations

from torch import nn

from tessella.nn.zoo.catalog import Description
from tessella.nn.zoo.standard import Architecture

# The row in nn/zoo/catalog.py: what a person reads before choosing it.
DESCRIPTION = Description(
    title="DenseNet-121",
    year=2016,
    paper="Huang et al., Densely connected convolutional networks, arXiv:1608.06993",
    size=224,
    channels=3,
    smallest_size=29,
)


def kaiming(conv: nn.Conv2d) -> None:
    nn.init.kaiming_normal_(conv.weight)  # torchvision's DenseNet does this, too


# The row in nn/zoo/standard.py: how torchvision's network is adapted.
ARCHITECTURE = Architecture(
    first="features.conv0",
    heads=("classifier",),
    initialize=kaiming,
)
