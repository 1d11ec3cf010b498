"""Operations that move, cut, join or reinterpret elements, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from tessella.operations import rearrangement
from tessella.operations.operation import row

Tensor = torch.Tensor


def reshape(input: Tensor, *, shape: Sequence[int]) -> Tensor:
    return input.reshape(tuple(shape))


def permute(input: Tensor, *, dims: Sequence[int]) -> Tensor:
    return input.permute(tuple(dims))


def rearrange(
    input: Tensor,
    *,
    sizes: Sequence[int],
    rolls: Sequence[tuple[Sequence[int], int]],
    dims: Sequence[int],
    shape: Sequence[int],
) -> Tensor:
    """Axes are cut into parts, some parts are rolled, all are permuted and joined to other axes.

    Windows of an image [N, H, W, C], 3 pixels further on, are ``sizes`` (N, H/7, 7, W/7, 7, C),
    ``rolls`` (((1, 2), H - 3), ((3, 4), W - 3)), ``dims`` (0, 1, 3, 2, 4, 5), and what puts them
    back rolls (((1, 3), 3), ((2, 4), 3)).

    Args:
        sizes: of the parts, in the input's order: each axis is the product of some.
        rolls: parts, by position, that are counted as one axis, the first outermost, and by how
            many places that axis is rolled: what was at 0 is at the shift then.
        dims: the parts' new order; ``shape``: each axis is the product of some in that order.

    Raises:
        ValueError: the attributes do not fit the input or each other.
    """
    rearrangement.require(input.shape, sizes, rolls, dims, shape)
    made = input.reshape(tuple(sizes))
    for axes, shift in rolls:
        made = _rolled(made, tuple(axes), shift)
    return made.permute(tuple(dims)).reshape(tuple(shape))


def _rolled(input: Tensor, axes: tuple[int, ...], shift: int) -> Tensor:
    order = (*axes, *(d for d in range(input.dim()) if d not in axes))
    front = input.permute(order)
    flat = front.flatten(0, len(axes) - 1)
    place = len(flat) - shift
    turned = torch.cat((flat[place:], flat[:place])).reshape(front.shape)
    return turned.permute([order.index(d) for d in range(input.dim())])


def expand(input: Tensor, *, shape: Sequence[int]) -> Tensor:
    return input.expand(tuple(shape))


def cat(*inputs: Tensor, dim: int) -> Tensor:
    return torch.cat(inputs, dim)


def split(input: Tensor, *, sizes: Sequence[int], dim: int) -> tuple[Tensor, ...]:
    """One output for each of ``sizes``, which sum to the axis."""
    return torch.split(input, list(sizes), dim)


def slice(input: Tensor, *, dim: int, start: int, end: int | None, step: int) -> Tensor:
    """Elements start, start + step, … before ``end`` (None: to the end of the axis)."""
    made: Tensor = torch.ops.aten.slice.Tensor(input, dim, start, end, step)
    return made


def select(input: Tensor, *, dim: int, index: int) -> Tensor:
    return input.select(dim, index)


def pad(input: Tensor, *, pad: Sequence[int], mode: str, value: float | None) -> Tensor:
    """``pad``: (before, after) pairs, the last axis first. ``mode``: constant, reflect, …"""
    return F.pad(input, list(pad), mode, value)


def interpolate(
    input: Tensor,
    *,
    size: Sequence[int] | None,
    scale_factor: Sequence[float] | None,
    mode: str,
    align_corners: bool | None,
    antialias: bool,
) -> Tensor:
    """Resize the spatial axes of [N, C, ...], to ``size`` or by ``scale_factor``."""
    if input.dtype == torch.int8 and mode == "nearest":  # torch copies bytes of uint8 alone
        input = input.view(torch.uint8)
        made = interpolate(
            input, size=size, scale_factor=scale_factor, mode=mode, align_corners=align_corners,
            antialias=antialias,
        )  # fmt: skip
        return made.view(torch.int8)
    return F.interpolate(
        input,
        size=None if size is None else list(size),
        scale_factor=None if scale_factor is None else list(scale_factor),
        mode=mode,
        align_corners=align_corners,
        antialias=antialias,
    )


def embedding(input: Tensor, weight: Tensor) -> Tensor:
    """input [...] of row numbers, weight [rows, E] → [..., E]."""
    return F.embedding(input, weight)


def to(input: Tensor, *, dtype: str) -> Tensor:
    """The same numbers in another element type."""
    return input.to(getattr(torch, dtype))


def clone(input: Tensor) -> Tensor:
    """A copy, contiguous."""
    return input.clone(memory_format=torch.contiguous_format)


def image_to_tensor(
    input: Tensor, *, gain: Sequence[float], offset: Sequence[float], dtype: str
) -> Tensor:
    """``input · gain + offset``, uint8 [N, H, W, C] → ``dtype`` [N, C, H, W], as images are made.

    Product and sum are each rounded to float32, like ``core.preprocess.normalize``; only then comes
    the element type. ``gain`` and ``offset`` have one float32 a channel.
    """
    if input.dim() != 4 or not len(gain) == len(offset) == input.shape[3]:
        raise ValueError(f"{len(gain)} gains, {len(offset)} offsets for {tuple(input.shape)}")
    scaled = input.float() * input.new_tensor(gain, dtype=torch.float32)
    scaled = scaled + input.new_tensor(offset, dtype=torch.float32)
    return scaled.permute(0, 3, 1, 2).to(getattr(torch, dtype)).contiguous()


ROWS = (
    row(reshape, "input", "shape", view=True),
    row(permute, "input", "dims", view=True),
    row(rearrange, "input", "sizes rolls dims shape"),  # a copy, where the two above are views
    row(expand, "input", "shape", view=True),
    row(slice, "input", "dim start end step", view=True),
    row(select, "input", "dim index", aten="select.int", view=True),
    row(split, "input", "sizes dim", view=True, many=True),
    row(cat, "", "dim", variadic=True),
    row(pad, "input", "pad mode value", aten="pad.default"),
    row(interpolate, "input", "size scale_factor mode align_corners antialias"),
    row(embedding, "input weight"),
    row(to, "input", "dtype", aten="to.dtype", elementwise=True),
    row(clone, "input"),
    row(image_to_tensor, "input", "gain offset dtype"),
)
