"""Linear in machine code, beside float64: rows of any number of axes, residuals, activations."""

from __future__ import annotations

import pytest
import torch

from tessella.device.x86 import code
from tessella.device.x86.assembler import AVX2, InstructionSet
from tessella.kernels import catalog
from tessella.kernels.gemm import x86
from tessella.kernels.shared import x86_tiles
from tessella.operations import problems
from tessella.operations.epilogue import ACTIVATIONS
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta
from tests.support.instructions import isa as isa

TOLERANCES = {"float32": 1e-5, "bfloat16": 1e-2}


def problem(
    rows: tuple[int, ...], channels: int, made: int, dtype: str, *, residual: bool, activation: str
) -> Problem:
    x = TensorMeta(shape=(*rows, channels), dtype=dtype)
    weight, bias = (TensorMeta(shape=shape, dtype=dtype) for shape in ((made, channels), (made,)))
    added = TensorMeta(shape=(*rows, made), dtype=dtype) if residual else None
    return problems.linear(x, weight, bias, added, activation=activation, constant=(1, 2))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_beside_float64(isa: InstructionSet, activation: str, residual: bool, dtype: str) -> None:
    if dtype == "bfloat16" and not code.has_bfloat16():
        pytest.skip("this CPU has no bfloat16 instructions")
    row = catalog.kernel(f"linear.{isa.name}")
    generator = torch.Generator().manual_seed(0)
    for rows, channels, made in (((1,), 40, 48), ((3, 7), 772, 96), ((2, 5, 4), 1024, 32)):
        p = problem(rows, channels, made, dtype, residual=residual, activation=activation)
        assert row.refusal(p) is None
        x, weight, bias, *added = (
            torch.randn(m.shape, generator=generator).to(getattr(torch, dtype))
            for m in p.inputs
            if m is not None
        )
        weight = (weight.float() * channels**-0.5).to(weight.dtype)
        right = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
        right = right + added[0].double() if added else right
        right = right if activation is None else ACTIVATIONS[activation](right)
        for config in x86.configs(p):
            out = torch.full_like(right, torch.nan, dtype=x.dtype)
            assert x86.bind(p, {1: weight, 2: bias}, **config)(x, *added, out=out) is out
            assert (out.double() - right).abs().max() / right.abs().max() < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_few_numbers_a_row(isa: InstructionSet, activation: str | None, dtype: str) -> None:
    if dtype == "bfloat16" and not code.has_bfloat16():
        pytest.skip("this CPU has no bfloat16 instructions")
    row = catalog.kernel(f"linear.{isa.name}_few")
    generator = torch.Generator().manual_seed(0)
    for rows, channels, made in (((1,), 501, isa.lanes - 1), ((3, 70), 500, 2), ((2,), 3, 1)):
        p = problem(rows, channels, made, dtype, residual=False, activation=activation)
        assert row.refusal(p) is None
        x, weight, bias = (
            torch.randn(m.shape, generator=generator).to(getattr(torch, dtype))
            for m in p.inputs[:3]
            if m is not None
        )
        right = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
        right = right if activation is None else ACTIVATIONS[activation](right)
        memory = torch.full((right.numel() + 64,), torch.nan, dtype=x.dtype)
        out = memory[32 : 32 + right.numel()].view(right.shape)
        row.load().bind(p, {1: weight, 2: bias})(x, out=out)
        assert (out.double() - right).abs().max() / right.abs().max() < TOLERANCES[dtype]
        assert memory[:32].isnan().all()
        assert memory[32 + right.numel() :].isnan().all()
        plain = problems.linear(p["input"], p["weight"], constant=(1,))
        row.load().bind(plain, {1: weight})(x, out=out)
        right = torch.nn.functional.linear(x.double(), weight.double())
        assert (out.double() - right).abs().max() / right.abs().max() < TOLERANCES[dtype]
    many = problem((1,), 32, isa.lanes, dtype, residual=False, activation="relu")
    assert f"fewer than {isa.lanes}" in str(row.refusal(many))
    added = problem((1,), 32, 4, dtype, residual=True, activation="relu")
    assert "no residual" in str(row.refusal(added))


def test_what_it_leaves_to_others(isa: InstructionSet) -> None:
    row = catalog.kernel(f"linear.{isa.name}")
    p = problem((4,), 32, 64, "float32", residual=False, activation="relu")
    assert row.refusal(p) is None
    scaled = problems.linear(*p.inputs[:3], alpha=0.5, constant=(1, 2))
    assert row.refusal(scaled) == "no scale, alpha, beta or gamma"
    assert "constants" in str(row.refusal(problems.linear(*p.inputs[:3])))


def test_many_rows_meet_all_panels_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    if code.instructions() is None or code.refusal(code.require_instructions().name) is not None:
        pytest.skip("no machine code here")
    monkeypatch.setattr(code, "instructions", lambda: AVX2)
    monkeypatch.setattr(x86_tiles, "FAR_BYTES", {AVX2: 1})
    p = problem((100,), 1400, 48, "float32", residual=False, activation="relu")
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(m.shape, generator=generator) for m in p.inputs[:3] if m)
    bound = x86.bind(p, {1: weight, 2: bias}, vectors=3)
    rows = bound.items._numbers[
        :, [x86_tiles.PLACES // code.NUMBER, x86_tiles.WEIGHT // code.NUMBER]
    ]
    begins = (rows - rows[0]).tolist()
    panel = 1400 * 24 * 4
    block = 48 * 4  # of the table of places: half of the rows, by tiles of four
    assert begins == [[0, 0], [0, panel], [block, 0], [block, panel]]
    right = torch.nn.functional.linear(x.double(), weight.double(), bias.double()).relu()
    made = bound(x, out=torch.full((100, 48), torch.nan))
    assert (made.double() - right).abs().max() / right.abs().max() < TOLERANCES["float32"]
