"""The tensors that kernels are tried on."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import torch

from tessella.core.memory import empty_bytes
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta, memory_format

POOL = 1_000_003  # numbers that are drawn; a prime
POOLS = 4
DRAWN = 1 << 12  # numbers of a smaller tensor are its own


def sample_inputs(
    problem: Problem,
    device: torch.device,
    strides: Mapping[int, tuple[int, ...]] | None = None,
) -> list[torch.Tensor]:
    """Every input that is not a constant: normal numbers, int8 over its range, indices zero.

    Half of bools are true. Where a problem says so, numbers are their magnitudes.

    Args:
        strides: by position, the strides of views, where the problem does not say them.
    """
    generator = torch.Generator(device).manual_seed(0)
    pools = iter(range(len(problem.inputs)))

    def sample(meta: TensorMeta) -> torch.Tensor:
        dtype = getattr(torch, meta.dtype)
        if dtype == torch.int8:
            made = torch.randint(
                -127, 128, meta.shape, generator=generator, dtype=dtype, device=device
            )
            if problem.attr("non_negative"):
                made.abs_()
        elif dtype.is_floating_point:
            made = _normal(meta, generator, next(pools))
            if problem.attr("non_negative"):
                made.abs_()
        elif dtype == torch.bool:
            made = torch.rand(meta.shape, generator=generator, device=device) > 0.5
        else:
            made = torch.zeros(meta.shape, dtype=dtype)
        if meta.strides is not None:
            return meta.empty(device).copy_(made)
        return made.to(device, dtype).contiguous(
            memory_format=memory_format(meta.format, len(meta.shape))
        )

    def view(meta: TensorMeta, steps: tuple[int, ...]) -> torch.Tensor:
        extent = 1 + sum(max(0, d - 1) * s for d, s in zip(meta.shape, steps, strict=True))
        flat = sample(TensorMeta(shape=(extent,), dtype=meta.dtype))
        return flat.as_strided(meta.shape, steps)

    known = strides or {}
    return [
        view(meta, known[i]) if i in known else sample(meta)
        for i, meta in enumerate(problem.inputs)
        if meta is not None and i not in problem.constant
    ]


def place(meta: TensorMeta, device: torch.device) -> torch.Tensor:
    """Where a result goes: memory with any content that lies as in an arena."""
    if meta.strides is not None:
        return meta.empty(device)
    dtype = getattr(torch, meta.dtype)
    flat = empty_bytes(math.prod(meta.shape) * dtype.itemsize, device).view(dtype)
    if meta.format != "channels_last":
        return flat.view(meta.shape)
    images, channels, *pixels = meta.shape
    return flat.view(images, *pixels, channels).movedim(-1, 1)


def _normal(meta: TensorMeta, generator: torch.Generator, pool: int) -> torch.Tensor:
    """Normal numbers, dense in the order of the format, a slice's as its whole is.

    Of a large tensor on a CPU those of a pool, again and again: drawing them takes longer there
    than many a kernel. The pool's length is prime, so that images and rows are not alike.

    Args:
        pool: its number: operands have different ones.
    """
    count, device = math.prod(meta.shape), generator.device
    if device.type != "cpu" or count <= DRAWN:
        return torch.randn(meta.shape, generator=generator, device=device)
    flat = empty_bytes(4 * count, device).view(torch.float32)
    drawn = _pool(pool % POOLS)
    for start in range(0, count, POOL):
        flat[start : start + POOL] = drawn[: count - start]
    if meta.format == "contiguous" or meta.pixel_pitch is None:
        return flat.view(meta.shape)
    images, channels, *pixels = meta.shape
    return flat.view(images, *pixels, channels).permute(0, 3, 1, 2)


@functools.lru_cache(maxsize=POOLS)
def _pool(number: int) -> torch.Tensor:
    """Kept: to draw one takes 6 ms (an EPYC), more than many a search of ours runs kernels."""
    return torch.randn(POOL, generator=torch.Generator().manual_seed(number))


def expose_errors(inputs: Sequence[torch.Tensor]) -> bool:
    """Whether a wrong kernel shows on these numbers: all finite, and no operand all zero."""
    with torch.no_grad():
        sums = [float(t.float().abs().sum()) for t in inputs]
    return all(map(math.isfinite, sums)) and 0.0 not in sums[:2]


def joined(
    problem: Problem, inputs: Sequence[torch.Tensor], device: torch.device
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The inputs of a ``cat`` and its result: inputs that are in place already are its slices."""
    out, start, parts = problem.output.empty(device), 0, []
    for position, tensor in enumerate(inputs):
        size = tensor.shape[problem.attrs["dim"]]
        place = out.narrow(problem.attrs["dim"], start, size)
        parts.append(place.copy_(tensor) if position in problem.in_place else tensor)
        start += size
    return parts, out
