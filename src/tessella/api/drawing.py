"""A network as a drawing of its graph."""

from __future__ import annotations

import torch

from tessella import graph
from tessella.api.sources import ANY
from tessella.core.spec import TensorSpec


def network_svg(module: torch.nn.Module, shape: tuple[int, ...], *, name: str) -> str:
    """The captured network as SVG, for any batch size.

    Args:
        shape: of one image: channels, height, width.
        name: the drawing's title.

    Raises:
        CompileError: it cannot be captured.
    """
    image = TensorSpec(name="image", dtype="float32", shape=(ANY, *shape))
    return graph.svg(graph.capture(module, (image,), name=name))
