"""What Winograd's two algorithms share: when they are defined, how a problem falls into tiles."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tessella.core.dtype import FLOATS
from tessella.kernels.conv.winograd.transforms import Transform, transform
from tessella.operations.epilogue import ACTIVATIONS
from tessella.operations.problem import Problem

LARGEST_INT32 = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """A convolution cut into tiles of m × m outputs.

    Attributes:
        f: F(m, r) along both axes.
        image, out: height and width of input and output.
        padding: zeros above and to the left.
        down, across: tiles of one image.
    """

    f: Transform
    batch: int
    channels: int
    filters: int
    image: tuple[int, int]
    out: tuple[int, int]
    padding: tuple[int, int]

    @classmethod
    def of(cls, problem: Problem, m: int) -> Tiling:
        x, weight = problem["input"], problem["weight"]
        return cls(
            f=transform(m, weight.shape[-1]),
            batch=x.shape[0],
            channels=x.shape[1],
            filters=weight.shape[0],
            image=(x.shape[2], x.shape[3]),
            out=(problem.output.shape[2], problem.output.shape[3]),
            padding=tuple(problem.attrs["padding"]),
        )

    @property
    def down(self) -> int:
        return -(-self.out[0] // self.f.m)

    @property
    def across(self) -> int:
        return -(-self.out[1] // self.f.m)

    @property
    def count(self) -> int:
        """Tiles of all images."""
        return self.batch * self.down * self.across

    @property
    def products(self) -> int:
        """Products of one tile and channel."""
        return self.f.n**2


def refusal(problem: Problem, taps: tuple[int, ...]) -> str | None:
    """Why Winograd's algorithm is not defined for the problem; None where it is.

    Args:
        taps: the extents of square filters that the algorithm knows.
    """
    x, weight, attrs = problem["input"], problem["weight"], problem.attrs
    epilogue = problem.epilogue
    if len(x.shape) != 4:
        return "winograd needs two spatial axes"
    for name in ("stride", "dilation"):
        if set(attrs[name]) != {1}:
            return f"winograd needs {name} 1"
    if attrs["groups"] != 1:
        return "winograd needs one group"
    if weight.shape[2] != weight.shape[3] or weight.shape[2] not in taps:
        wanted = " or ".join(f"{r}x{r}" for r in taps)
        return f"winograd needs a filter of {wanted}"
    if x.shape[1] == 0:
        return "winograd needs input channels"
    if x.dtype not in FLOATS or weight.dtype != x.dtype:
        return "winograd needs input and weight of one type: float32, float16 or bfloat16"
    if problem.output.dtype not in FLOATS:
        return f"makes float32, float16 or bfloat16, not {problem.output.dtype}"
    added = (epilogue.bias, epilogue.residual, epilogue.scale)
    if any(meta is not None and meta.dtype not in FLOATS for meta in added):
        return "bias, residual and scale must be floating point"
    if epilogue.activation not in (None, *ACTIVATIONS):
        return f"does not know the activation {epilogue.activation}"
    if max(math.prod(x.shape), math.prod(problem.output.shape)) > LARGEST_INT32:
        return "more than 2^31 elements"
    return None
