"""What an operator's schema does not say of its numbers and words: tables, read by people.

A range or a list of words stands here where torch does not check the argument itself, or takes
longer, or more memory, than its result is worth. ``python -m tests.attack fallback`` looks for
what is missing here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

LEAST, MOST = -(2**63), 2**63 - 1  # of any integer
SMALL = 2**31 - 1  # of an integer that is no end of a slice: no axis of a tensor here is longer
MAX_PIECES = 4096  # of a tensor that is split

Range = tuple[int, int]

# By the argument's name, whatever the operator. In a list every number lies in the range.
EVERYWHERE: dict[str, Range] = {
    "groups": (1, 2**16),
    "group": (1, 2**16),
    "num_groups": (1, 2**16),
    "offset_groups": (1, 2**16),
    "chunks": (1, MAX_PIECES),
    "sections": (1, MAX_PIECES),
    "dilation": (1, 2**16),
    "kernel_size": (1, 2**16),
    "stride": (1, 2**16),
    "stride_h": (1, 2**16),
    "stride_w": (1, 2**16),
    "dilation_h": (1, 2**16),
    "dilation_w": (1, 2**16),
    "pad_h": (0, 2**16),
    "pad_w": (0, 2**16),
    "output_padding": (0, 2**16),
    "upscale_factor": (1, 2**16),
    "downscale_factor": (1, 2**16),
    "step": (1, SMALL),
    "start": (LEAST, MOST),
    "end": (LEAST, MOST),
}

# By the operator's name, all its overloads, and the argument's.
OF: dict[str, dict[str, Range]] = {
    "aten::grid_sampler": {"interpolation_mode": (0, 2), "padding_mode": (0, 2)},
    "aten::grid_sampler_2d": {"interpolation_mode": (0, 2), "padding_mode": (0, 2)},
    "aten::grid_sampler_3d": {"interpolation_mode": (0, 2), "padding_mode": (0, 2)},
    "aten::cdist": {"compute_mode": (0, 2)},
    "aten::matrix_power": {"n": (-4096, 4096)},
    "aten::linalg_matrix_power": {"n": (-4096, 4096)},
    "aten::combinations": {"r": (0, 4)},
    "aten::mvlgamma": {"p": (1, 64)},
    "aten::polygamma": {"n": (0, 64)},
    "aten::special_polygamma": {"n": (0, 64)},
    "aten::round": {"decimals": (-30, 30)},
    "aten::special_round": {"decimals": (-30, 30)},
}


def out_of_range(operator: str, name: str, value: Any) -> str | None:
    """Why the integers of an argument, one or a list, cannot be meant; or None.

    Args:
        operator: without its overload, ``aten::roll``.
    """
    low, high = OF.get(operator, {}).get(name) or EVERYWHERE.get(name) or (-SMALL, SMALL)
    for number in value if isinstance(value, list | tuple) else (value,):
        if number is not None and not low <= number <= high:
            return f"{number} is not from {low} to {high}"
    return None


def broken(operator: str, given: Mapping[str, Any], inputs: Sequence[Any]) -> str | None:
    """Why arguments of the schema's types do not go together, or None.

    Args:
        given: templates by the schema's names.
        inputs: what the templates number; only shapes are read.
    """
    check = CHECKS.get(operator)
    return None if check is None else check(given, inputs)


def shape_of(value: Any, inputs: Sequence[Any]) -> tuple[int, ...] | None:
    """The shape of the tensor that a template numbers."""
    return tuple(inputs[value["input"]].shape) if isinstance(value, Mapping) else None


def _pieces(given: Mapping[str, Any], inputs: Sequence[Any]) -> str | None:
    """A split into a tensor for each place of a long axis makes millions of them."""
    shape, axis = shape_of(given["self"], inputs), given.get("dim", 0)
    if not shape or not -len(shape) <= axis < len(shape):
        return None  # torch says so itself
    size = given.get("split_size", 1)
    if type(size) is int and shape[axis] > MAX_PIECES * max(size, 1):
        return f"{shape[axis]} places split into pieces of {size}"
    return None


def _weight_norm(given: Mapping[str, Any], inputs: Sequence[Any]) -> str | None:
    """The norms have a place for each of the axis's; torch reads as many as it wants."""
    (v, g), axis = (shape_of(given[name], inputs) for name in ("v", "g")), given.get("dim", 0)
    if v is None or g is None or not -1 <= axis < len(v):
        return f"an axis {axis} of {v}, norms of the shape {g}"
    wanted = tuple(n if i == axis else 1 for i, n in enumerate(v))
    if g != wanted and (axis >= 0 or math.prod(g) != 1):
        return f"norms of the shape {g}, not {wanted}"
    return None


def _resized(given: Mapping[str, Any], inputs: Sequence[Any]) -> str | None:
    """Scales that are given beside a size are those from one to the other, as torch believes."""
    x, sizes = shape_of(next(iter(given.values())), inputs), given.get("output_size")
    names = ("scales",) if "scales" in given else ("scales_d", "scales_h", "scales_w")
    if x is None or sizes is None:
        return None
    sizes = sizes if isinstance(sizes, list | tuple) else [sizes]
    for axis, name in enumerate(reversed(names), start=1):
        scale = given.get(name)
        if scale is None or axis > min(len(x), len(sizes)):
            continue
        made = float(scale["float"] if isinstance(scale, Mapping) else scale) * x[-axis]
        if not abs(made - sizes[-axis]) <= 1:
            return f"{name} of {scale} from {x[-axis]} to {sizes[-axis]} places"
    return None


Check = Callable[[Mapping[str, Any], Sequence[Any]], str | None]

CHECKS: dict[str, Check] = {
    f"aten::{name}": _pieces
    for name in ("split", "split_copy", "unsafe_split", "unbind", "unbind_copy")
} | {
    f"aten::{name}": _resized
    for name in (
        "upsample_bicubic2d", "upsample_bilinear2d", "upsample_linear1d", "upsample_nearest1d",
        "upsample_nearest2d", "upsample_nearest3d", "upsample_trilinear3d",
        "_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa", "_upsample_nearest_exact1d",
        "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
    )
} | {"aten::_weight_norm": _weight_norm}  # fmt: skip
