"""What the gradients of a convolution share: what is refused, windows, boxes of pixels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tessella.core.dtype import FLOATS
from tessella.device.hopper import TensorDescriptor
from tessella.device.machine import HOPPER
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta

SHARED_BYTES = HOPPER.shared_bytes_of_block() - 1024  # that is left to barriers and alignment
# a multiprocessor in one clock: products of 16-bit numbers; bytes that the L2 has been seen to give
PRODUCTS, L2_BYTES = 2048, 40
CACHE_BYTES = 40 * 2**20  # of the L2, less what else is in it
MEMORY_BYTES = 2400  # that all of them together get from memory in one clock


WINDOW = ("stride", "padding", "dilation")


class Window(NamedTuple):
    """The filter's movement, each as (rows, columns); constants of the compiler."""

    TAPS: tuple[int, int]
    STRIDE: tuple[int, int]
    PADDING: tuple[int, int]
    DILATION: tuple[int, int]


def window_of(problem: Problem, taps: Sequence[int]) -> Window:
    stride, padding, dilation = (tuple(problem.attrs[name]) for name in WINDOW)
    return Window(tuple(taps), stride, padding, dilation)  # type: ignore[arg-type]


Box = tuple[int, int, int]  # images, rows, columns: each a power of two


def refusal(problem: Problem, x: TensorMeta, weight: TensorMeta, y: TensorMeta) -> str | None:
    """Why the Hopper kernels cannot take a gradient of y = x * weight, or None."""
    attrs = problem.attrs
    if {x.dtype, y.dtype} not in ({"float16"}, {"bfloat16"}):
        return f"multiplies float16 or bfloat16, not {x.dtype} × {y.dtype}"
    if attrs["groups"] != 1:
        return "one group only"
    if len(x.shape) != 4 or not (x.has("channels_last") and y.has("channels_last")):
        return "both images must be channels_last"
    if x.shape[1] % 8 or y.shape[1] % 8:
        return f"channels must be multiples of 8, not {x.shape[1]} and {y.shape[1]}"
    if math.prod(attrs["stride"]) > 4:
        return f"strides up to 2 × 2, not {attrs['stride']}"
    if 0 in (*x.shape, *y.shape, *weight.shape):
        return "there is nothing to multiply"
    if max(math.prod(x.shape) // x.shape[1], math.prod(y.shape) // y.shape[1]) > 2**30:
        return "more than 2³⁰ pixels"
    return None


def boxes(batch: int, image: tuple[int, int], pixels: int) -> list[Box]:
    """Boxes of so many pixels, by how far they reach beyond the images, then by how square they
    are; none that covers a quarter more than the best.
    """
    found = []
    powers = [1 << i for i in range(9)]
    for height, width in itertools.product(powers, powers):
        images = pixels // (width * height)
        if 1 <= images <= 256:
            box = (images, height, width)
            covered = math.prod(-(-n // side) * side for n, side in zip((batch, *image), box))
            found.append((covered, abs(height - width), images, box))
    least = min(found)[0]
    return [box for covered, _, _, box in sorted(found) if covered <= 1.25 * least]


def four(views: Iterable[TensorDescriptor]) -> list[TensorDescriptor]:
    """One, two or four descriptors as four: Triton 3.6 launches no tuple of descriptors."""
    given = list(views)
    return given + given[:1] * (4 - len(given))


def portable_refusal(
    problem: Problem, x: TensorMeta, weight: TensorMeta, y: TensorMeta
) -> str | None:
    """Why the plain Triton kernels cannot take a gradient of y = x * weight, or None."""
    made, types = problem.output, [meta.dtype for meta in problem.given]
    if len(set(types)) != 1 or types[0] not in FLOATS:
        return f"multiplies {', '.join(FLOATS)}, not {' × '.join(types)}"
    if made.dtype not in FLOATS:
        return f"cannot make {made.dtype}"
    if 0 in (*x.shape, *y.shape, *weight.shape):
        return "there is nothing to multiply"
    if max(math.prod(x.shape) // x.shape[1], math.prod(y.shape) // y.shape[1]) > 2**30:
        return "more than 2³⁰ pixels"
    if problem.attrs["groups"] > 65535 or math.prod(weight.shape) >= 2**31:
        return "more than 65535 groups, or 2³¹ weights"
    return None
