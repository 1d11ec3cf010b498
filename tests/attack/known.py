"""Calls that ended the process, or read memory that nothing had written, before they were checked.

A subject like ``fallback``: each case is run in a child, and says what became of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tests.attack import fallback

LEAST = -(2**63)


def _least() -> torch.Tensor:
    return torch.full((20,), LEAST)


def _minus_one() -> torch.Tensor:
    return torch.full((20,), -1)


def _deformable(groups: int, offset: float) -> tuple[list[torch.Tensor], list[Any]]:
    tensors = [torch.ones(1, 4, 6, 6), torch.ones(2, 4, 3, 3), torch.zeros(1, 18, 6, 6),
               torch.ones(1, 9, 6, 6), torch.zeros(2)]  # fmt: skip
    tensors[2][0, :, 2] = offset
    inputs: list[Any] = [{"input": i} for i in range(5)]
    return tensors, [*inputs, 1, 1, 1, 1, 1, 1, groups, 1, True]


def _calls() -> dict[str, tuple[str, str, list[Any], list[Any], dict[str, Any]]]:
    """By name: ``refused`` or ``answered``; target, tensors and templates."""
    x, image, first = torch.ones(3, 4), torch.ones(1, 1, 3, 3), {"input": 0}
    both = [first, {"input": 1}]
    typed = {
        "aten::sum": [first],
        "aten::softmax.int": [first, 1],
        "aten::log_softmax.int": [first, 1],
        "aten::full_like": [first, 1.0],
        "aten::zeros_like": [first],
        "aten::_to_copy": [first],
    }
    found: dict[str, tuple[str, str, list[Any], list[Any], dict[str, Any]]] = {
        f"{target}, {number} for {name}": ("refused", target, [x], args, {name: number})
        for target, args in typed.items()
        for name, number in (("dtype", 127), ("dtype", 255))
    }
    for target in ("aten::zeros_like", "aten::full_like", "aten::_to_copy"):
        for name in ("layout", "device", "memory_format"):
            found[f"{target}, 127 for {name}"] = (
                "refused", target, [x], typed[target], {name: 127},
            )  # fmt: skip
    zero_groups, nowhere = _deformable(0, 0.0), _deformable(1, float("nan"))
    return found | {
        "view as 63": ("refused", "aten::view.dtype", [x], [first, 63], {}),
        "to 200": ("refused", "aten::to.dtype", [x], [first, 200], {}),
        "a copy in format 127": ("refused", "aten::clone", [x], [first], {"memory_format": 127}),
        "no groups": ("refused", "torchvision::deform_conv2d", *zero_groups, {}),
        "an offset that is no number": ("answered", "torchvision::deform_conv2d", *nowhere, {}),
        "a power of −2⁶³": (
            "refused", "aten::matrix_power", [torch.eye(3)], [first, LEAST], {},
        ),
        "mode 9": (
            "refused", "aten::grid_sampler_2d", [image, torch.zeros(1, 4, 4, 2)],
            [*both, 9, 0, False], {},
        ),
        "edges of mode 9": (
            "refused", "aten::grid_sampler_2d", [image, torch.full((1, 4, 4, 2), 9.0)],
            [*both, 0, 9, False], {},
        ),
        "a scale that is not the sizes'": (
            "refused", "aten::_upsample_bilinear2d_aa", [torch.ones(1, 2, 4, 4)],
            [first, [8, 3], False, 0.5, None], {},
        ),
        "one norm for three rows": (
            "refused", "aten::_weight_norm", [x, torch.ones(1, 1)], [*both, 0], {},
        ),
        "eigenvalues of infinities": (
            "refused", "aten::linalg_eigvals", [torch.full((4, 4), -torch.inf)], [first], {},
        ),
        "a common multiple of −2⁶³": (
            "refused", "aten::lcm", [_least(), torch.full((20,), 5)], both, {},
        ),
        "−2⁶³ / −1": (
            "answered", "aten::div.Tensor_mode", [_least(), _minus_one()], both,
            {"rounding_mode": "trunc"},
        ),
        "−2³¹ / −1": (
            "answered", "aten::div.Tensor_mode",
            [torch.full((20,), -(2**31), dtype=torch.int32), _minus_one().int()], both,
            {"rounding_mode": "trunc"},
        ),
        "−2⁶³ by a number": (
            "answered", "aten::div.Scalar_mode", [_least()], [first, -1],
            {"rounding_mode": "trunc"},
        ),
        "⌊−2⁶³ / −1⌋": ("answered", "aten::floor_divide", [_least(), _minus_one()], both, {}),
        "−2⁶³ mod −1": ("answered", "aten::remainder.Tensor", [_least(), _minus_one()], both, {}),
        "−2⁶³ fmod −1": ("answered", "aten::fmod.Tensor", [_least(), _minus_one()], both, {}),
    }  # fmt: skip


KNOWN = tuple(_calls().items())


def prepare() -> None:
    fallback.prepare()


def case(seed: int, index: int) -> tuple[str, Callable[[], str]]:
    """The call of this number; the seed says nothing."""
    name, (_, target, tensors, args, kwargs) = KNOWN[index]
    return name, functools.partial(fallback.outcome, target, tensors, args, kwargs)
