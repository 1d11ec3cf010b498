"""What networks pool on a CPU, and torch's answers."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st

from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import Format, TensorMeta
from tests.support.problems.pools import maximum, problem

CPU = torch.device("cpu")
SAME = maximum((3, 3), (1, 1))
CEIL = maximum((3, 3), (2, 2), (0, 0), ceil_mode=True)
HALF = maximum((2, 2), (2, 2), (0, 0))

# height and width, window: GoogLeNet's, ResNet's, VGG's, YOLO's
NETWORKS: dict[str, tuple[int, dict[str, Any]]] = {
    "googlenet 112": (112, CEIL),
    "googlenet 56": (56, CEIL),
    "googlenet 28 same": (28, SAME),
    "googlenet 28": (28, CEIL),
    "googlenet 14 same": (14, SAME),
    "googlenet 14": (14, maximum((2, 2), (2, 2), (0, 0), ceil_mode=True)),
    "googlenet 7 same": (7, SAME),
    "resnet 112": (112, maximum()),
    "vgg 224": (224, HALF),
    "vgg 14": (14, HALF),
    "yolo 5": (13, maximum((5, 5), (1, 1), (2, 2))),
    "yolo 9": (13, maximum((9, 9), (1, 1), (4, 4))),
    "yolo 13": (13, maximum((13, 13), (1, 1), (6, 6))),
}


def numbers(meta: TensorMeta, seed: int = 0) -> torch.Tensor:
    """Codes from end to end, or numbers of which some are no numbers or infinite."""
    generator = torch.Generator().manual_seed(seed)
    if meta.dtype == "int8":
        drawn = torch.randint(-128, 128, meta.shape, generator=generator)
    else:
        drawn = 40 * torch.randn(meta.shape, generator=generator)
        chance = torch.rand(meta.shape, generator=generator)
        drawn[chance < 0.3] = -torch.inf
        drawn[chance < 0.02] = torch.inf
        drawn[chance < 0.01] = torch.nan
    return meta.empty(CPU).copy_(drawn)


def pooled(asked: Problem, x: torch.Tensor) -> torch.Tensor:
    """torch's, of a contiguous copy; int8, which it counts pixels in, as int32."""
    a = asked.attrs
    wide = x.contiguous().to(torch.int32) if x.dtype == torch.int8 else x.contiguous()
    window = [a[n] for n in ("kernel_size", "stride", "padding", "dilation", "ceil_mode")]
    return torch.max_pool2d(wide, *window).to(x.dtype)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Any window that torch takes: larger than the image, and mostly beside it, too."""
    shape = tuple(draw(st.integers(1, most)) for most in (3, 4, 12, 12))
    kernel = draw(st.integers(1, 13)), draw(st.integers(1, 13))
    window = maximum(
        kernel,
        (draw(st.integers(1, 6)), draw(st.integers(1, 6))),
        (draw(st.integers(0, kernel[0] // 2)), draw(st.integers(0, kernel[1] // 2))),
        ceil_mode=draw(st.booleans()),
    )
    padded = [n + 2 * p for n, p in zip(shape[2:], window["padding"], strict=True)]
    assume(all(n >= k for n, k in zip(padded, kernel, strict=True)))
    dtype = draw(st.sampled_from(("float32", "bfloat16", "int8")))
    format: Format = draw(st.sampled_from(("channels_last", "contiguous")))
    return problem("max_pool2d", shape, window, dtype, format)
