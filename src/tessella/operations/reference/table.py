"""What each operation means: a static table from its name to a plain torch function.

A reference is called ``function(*inputs, **attrs)``: inputs in the operation's order, None where
one is left out. It is right for every floating element type and on the meta device, where it gives
shapes only.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tessella.core.errors import CompileError

_FAMILIES: dict[str, str] = {
    "conv": "conv1d conv2d conv3d conv_transpose2d conv2d_chain conv2d_pool"
    " conv1d_dgrad conv2d_dgrad conv3d_dgrad conv1d_wgrad conv2d_wgrad conv3d_wgrad",
    "gemm": "linear matmul linear_norm",
    "norm": "batch_norm layer_norm group_norm rms_norm local_response_norm",
    "pool": "max_pool2d avg_pool2d adaptive_avg_pool2d",
    "softmax": "softmax log_softmax",
    "reduce": "mean sum amax amin",
    "attention": "scaled_dot_product_attention",
    "transform": "reshape permute rearrange expand cat split slice select pad interpolate embedding"
    " to clone image_to_tensor",
    "pointwise": "add sub mul div pow maximum minimum relu relu6 sigmoid tanh silu gelu"
    " hardswish hardsigmoid mish leaky_relu prelu elu softplus clamp exp log sqrt rsqrt reciprocal"
    " neg abs erf pointwise",
    "quant": "quantize dequantize",
    "fallback": "fallback",
    "user": "user",
}

# operation → "module:function"
REFERENCES: dict[str, str] = {
    op: f"tessella.operations.reference.{family}:{op}"
    for family, ops in _FAMILIES.items()
    for op in ops.split()
}


def family(op: str) -> str:
    """The folder that holds the operation's kernels: ``conv``, ``pointwise``, …"""
    return _entry(op).partition(":")[0].rpartition(".")[2]


@functools.cache
def function(op: str) -> Callable[..., Any]:
    """The reference of ``op``; raises ``CompileError`` if there is none."""
    module, _, name = _entry(op).partition(":")
    return getattr(importlib.import_module(module), name)


def call(
    op: str, inputs: Sequence[torch.Tensor | None], attrs: Mapping[str, Any]
) -> tuple[torch.Tensor, ...]:
    """Run the reference of ``op``: always a tuple, one tensor an output."""
    made = function(op)(*inputs, **attrs)
    return (made,) if isinstance(made, torch.Tensor) else tuple(made)


def _entry(op: str) -> str:
    if op not in REFERENCES:
        raise CompileError("unknown operation", seen=op, fix=f"use one of {', '.join(REFERENCES)}")
    return REFERENCES[op]
