"""The network of a recipe with ``quantize``: the compiler makes it, not training."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from tessella.artifacts.checkpoint import Checkpoint
from tessella.artifacts.run import RunInfo
from tessella.core.errors import UsageError
from tessella.graph.onnx.write import write_bytes
from tessella.graph.quantization_aware import QuantizationAware

# From a run's record, and the checkpoint that it is resumed from, if any.
Quantizer = Callable[[RunInfo, Checkpoint | None], QuantizationAware]


def quantized(
    info: RunInfo, quantizer: Quantizer | None, start: Checkpoint | None = None
) -> QuantizationAware | None:
    """The network with its roundings, on the CPU; None where the recipe wants none.

    It is made before ``precision.arithmetic`` is set, as torch.export refuses to run within that.

    Raises:
        UsageError: nothing is given that makes it.
    """
    if info.recipe.quantize == "none":
        return None
    if quantizer is None:
        raise UsageError(
            "quantization-aware training needs the compiler, which is not at hand here",
            seen=f"quantize={info.recipe.quantize!r}",
            fix="start it by tessella train or tessella.train; a sweep cannot",
        )
    return quantizer(info, start)


def roundings(module: nn.Module) -> bytes | None:
    """The graph of a network that trains with roundings, for its checkpoint; None of others."""
    return write_bytes(module.graph()) if isinstance(module, QuantizationAware) else None
