"""Which operations are layers: what passes fuse into, quantize and choose a precision for."""

from __future__ import annotations

LAYERS = ("conv2d", "linear")  # with a weight and an epilogue
PRODUCTS = (*LAYERS, "matmul")  # lowering may turn a matmul into a linear layer
