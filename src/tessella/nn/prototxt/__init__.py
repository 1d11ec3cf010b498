"""Caffe's network text: read (``layers``, to draw it) and built as a torch module (``build``).

What lies outside a network's function is not taken over: data layers, losses, learning-rate
multipliers.
"""

from tessella.nn.prototxt.definition import LayerSummary, input_shape, layers
from tessella.nn.prototxt.network import CaffeNet, build

__all__ = ["CaffeNet", "LayerSummary", "build", "input_shape", "layers"]
