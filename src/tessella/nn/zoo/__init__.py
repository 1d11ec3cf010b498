"""The networks that a name can mean: standard ones, every timm name, a user's own file, Caffe text.

``network(name, classes=…)`` fills in a ``Network`` record, ``build(network)`` makes its module, and
``load(checkpoint)`` the trained one. A module takes ``[N, channels, height, width]`` float32 and
returns logits ``[N, classes]``, or those of each pixel, ``[N, classes, height, width]``.
"""

from tessella.nn.zoo.build import answering, build, network, untrained
from tessella.nn.zoo.catalog import ANSWERING, Description, describe, names
from tessella.nn.zoo.restore import init_from, load
from tessella.nn.zoo.stage import Stage, stages

__all__ = [
    "ANSWERING", "Description", "Stage", "answering", "build", "describe", "init_from", "load",
    "names", "network", "stages", "untrained",
]  # fmt: skip
