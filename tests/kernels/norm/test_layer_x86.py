"""Layer norms in machine code beside float64: rows of any length, large means, what is left out."""

from __future__ import annotations

import pytest
import torch

from tessella.device.x86 import code
from tessella.device.x86.assembler import InstructionSet
from tessella.kernels import catalog
from tessella.operations.problem import Problem
from tessella.operations.reference.norm import layer_norm
from tessella.operations.tensor_meta import TensorMeta
from tests.support.instructions import isa as isa

pytestmark = pytest.mark.instructions


def agrees(
    isa: InstructionSet, shape: tuple[int, ...], dtype: str = "float32", *, beside: str = "wb",
    axes: int = 1, mean: float = 0.5,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(len(shape))
    inner = shape[-axes:]
    x, y = (TensorMeta(shape=shape, dtype=dtype) for _ in range(2))
    vector = TensorMeta(shape=inner, dtype=dtype)
    constant = tuple(i for i, name in ((1, "w"), (2, "b")) if name in beside)
    p = Problem(
        op="layer_norm", inputs=(x, *(vector if i in constant else None for i in (1, 2))),
        outputs=(y,), attrs={"normalized_shape": inner, "eps": 1e-5}, constant=constant,
    )  # fmt: skip
    row = catalog.kernel(f"layer_norm.{isa.name}")
    assert row.refusal(p) is None, row.refusal(p)
    numbers = torch.randn(shape, generator=generator) + mean
    given = numbers.to(getattr(torch, dtype))
    constants = {i: torch.randn(inner, generator=generator).to(given.dtype) for i in constant}
    doubles = [t if t is None else t.double() for t in map(constants.get, (1, 2))]
    right = layer_norm(given.double(), *doubles, **p.attrs)
    call, out = row.load().bind(p, constants), torch.full_like(given, torch.nan)
    for _ in range(2):
        assert call(given, out=out) is out
        near = 2**-8 if dtype == "bfloat16" else 1e-5 * max(1.0, abs(mean))
        torch.testing.assert_close(out.double(), right, rtol=near, atol=near)
        given, out = given.clone(), given  # the result may lie where the input was


@pytest.mark.parametrize("columns", [1, 5, 8, 40, 96, 197, 256, 300, 768])
def test_rows_of_any_length(columns: int, isa: InstructionSet) -> None:
    agrees(isa, (3, 7, columns))
    if code.has_bfloat16():
        agrees(isa, (3, 7, columns), "bfloat16")


def test_many_rows_of_several_axes_with_and_without_weight_and_bias(isa: InstructionSet) -> None:
    for beside in ("", "w", "b", "wb"):
        agrees(isa, (2, 21, 4, 75), beside=beside, axes=2)


def test_a_large_mean_costs_no_more_digits_than_it_has(isa: InstructionSet) -> None:
    agrees(isa, (4, 768), mean=1000.0)


@pytest.mark.parametrize("columns", [7, 300, 1000])
def test_constant_rows_are_zero_and_a_nan_stays_one(columns: int, isa: InstructionSet) -> None:
    meta = TensorMeta(shape=(5, columns), dtype="float32")
    p = Problem(
        op="layer_norm", inputs=(meta, None, None), outputs=(meta,),
        attrs={"normalized_shape": (columns,), "eps": 1e-12},
    )  # fmt: skip
    x = torch.randn(5, columns, generator=torch.Generator().manual_seed(1))
    x[0], x[1], x[2], x[3, -1] = 3.0, 100.0, 12345.678, torch.nan
    made = catalog.kernel(f"layer_norm.{isa.name}").load().bind(p, {})(x, out=torch.empty_like(x))
    right = torch.layer_norm(x.double(), (columns,), eps=1e-12)
    assert (made[:3] == 0).all()
    torch.testing.assert_close(made[3:].double(), right[3:], equal_nan=True, rtol=1e-5, atol=1e-5)


def test_what_is_no_row_of_constants_is_refused(isa: InstructionSet) -> None:
    row = catalog.kernel(f"layer_norm.{isa.name}")
    x, w = (TensorMeta(shape=s, dtype="float32") for s in ((2, 8, 4, 4), (8, 4, 4)))
    last = TensorMeta(shape=x.shape, dtype="float32", format="channels_last")
    attrs = {"normalized_shape": (8, 4, 4), "eps": 1e-5}
    p = Problem(op="layer_norm", inputs=(last, None, None), outputs=(last,), attrs=attrs)
    assert row.refusal(p) == "needs contiguous rows"
    p = Problem(op="layer_norm", inputs=(x, w, None), outputs=(x,), attrs=attrs)
    assert row.refusal(p) == "weight and bias must be constants"
