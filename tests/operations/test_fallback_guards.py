"""Integer quotients and remainders have a value for every divisor, the same as Python's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from tessella import graph, runtime
from tessella.core.spec import DimRange, TensorSpec
from tessella.operations.table import operation
from tests.support.networks import plan

INTEGERS = (-(2**63), -(2**63) + 1, -7, -1, 0, 1, 2, 7, 2**63 - 1)
LEAST = {"int64": -(2**63), "int32": -(2**31), "int8": -128, "uint8": 0}


def _trunc(a: int, b: int) -> int:
    return (abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1)


RIGHT = {
    "aten::floor_divide": lambda a, b: a // b,
    "aten::remainder": lambda a, b: a % b,
    "aten::fmod": lambda a, b: a - b * _trunc(a, b),
    "aten::div floor": lambda a, b: a // b,
    "aten::div trunc": _trunc,
}
TENSOR = {"aten::remainder": ".Tensor", "aten::fmod": ".Tensor", "aten::div": ".Tensor_mode"}
SCALAR = {"aten::div": ".Scalar_mode"}


def wrapped(value: int, dtype: str) -> int:
    bits = 8 * getattr(torch, dtype).itemsize
    return (value - LEAST[dtype]) % (1 << bits) + LEAST[dtype]


@pytest.mark.parametrize("dtype", LEAST)
@pytest.mark.parametrize("name", RIGHT)
def test_every_divisor(name: str, dtype: str) -> None:
    target, _, mode = name.partition(" ")
    kwargs = {"rounding_mode": mode} if mode else {}
    values = sorted({wrapped(v, dtype) for v in INTEGERS})
    a = torch.tensor([a for a in values for _ in values], dtype=getattr(torch, dtype))
    b = torch.tensor([b for _ in values for b in values], dtype=getattr(torch, dtype))

    def right(x: int, y: int) -> int:
        return 0 if y == 0 else wrapped(RIGHT[name](x, y), dtype)

    def call(suffix: str, tensors: list[torch.Tensor], other: Any) -> list[int]:
        args = [{"input": 0}, other]
        attrs = {"target": target + suffix, "args": args, "kwargs": kwargs}
        (made,) = operation("fallback").call(tensors, attrs)
        assert made.dtype == a.dtype
        return list(made.tolist())

    wanted = [right(x, y) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    assert call(TENSOR.get(target, ""), [a, b], {"input": 1}) == wanted
    for y in (0, -1) if LEAST[dtype] else (0,):
        suffix = SCALAR.get(target, ".Scalar")
        assert call(suffix, [a], y) == [right(x, y) for x in a.tolist()]


def test_floating_point_is_divided_as_ever() -> None:
    x = torch.tensor([1.0, -1.0, 0.0])
    attrs = {"target": "aten::remainder.Scalar", "args": [{"input": 0}, 0.0], "kwargs": {}}
    (made,) = operation("fallback").call([x], attrs)
    assert made.isnan().all()


class Quotient(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.div(a, b, rounding_mode="trunc")


def test_a_client_divides_by_what_it_likes() -> None:
    """A bucket's empty places are zeros too, and divide."""
    batch = DimRange(min=1, opt=4, max=4)
    specs = [TensorSpec(name=n, dtype="int64", shape=(batch, 2)) for n in "ab"]
    made = plan(graph.capture(Quotient().eval(), specs, outputs=("c",)), (1, 4, 4))
    with runtime.load(made) as engine:
        a = torch.tensor([[-(2**63), 7], [-7, 5], [math.comb(60, 30), 1]])
        b = torch.tensor([[-1, 0], [2, -1], [2, 1]])
        wanted = [[-(2**63), 0], [-3, -5], [math.comb(60, 30) // 2, 1]]
        assert engine(a=a, b=b)["c"].tolist() == wanted
