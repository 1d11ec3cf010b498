"""Caffe's network text: read (``layers``, to draw it) and built as a torch module (``build``).

Data layers, losses and learning-rate multipliers are ignored.
"""

from tessella.nn.prototxt.definition import LayerSummary, input_shape, layers
from tessella.nn.prototxt.network import CaffeNet, build

__all__ = ["CaffeNet", "LayerSummary", "build", "input_shape", "layers"]
