"""``quantize`` in machine code, bit for bit beside torch's operators."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tessella.device.x86.assembler import InstructionSet
from tessella.kernels import catalog
from tessella.kernels.quant import x86
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta
from tests.support.instructions import isa as isa


def problem(
    shape: tuple[int, ...], form: str = "contiguous", scale: int = 1, shifts: bool = False
) -> Problem:
    x = TensorMeta(shape=shape, dtype="float32", format=form)  # type: ignore[arg-type]
    zero = TensorMeta(shape=(), dtype="int8") if shifts else None
    return Problem(
        op="quantize",
        inputs=(x, TensorMeta(shape=(scale,) if scale > 1 else (), dtype="float32"), zero),
        outputs=(replace(x, dtype="int8"),),
        attrs={"axis": 0, "dtype": "int8"},
        constant=(1, 2) if shifts else (1,),
    )


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("count", [32, 33, 63, 4096, 16384 * 3 + 5])
def test_each_number_is_rounded_half_to_even_and_saturates(
    count: int, threads: int, isa: InstructionSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    x = torch.randn(count, generator=torch.Generator().manual_seed(0)) * 40
    x[:8] = torch.tensor([0.5, 1.5, -2.5, 3e9, -3e9, torch.inf, -torch.inf, 127.5]) * 0.75
    scale = torch.tensor(0.75)
    for zero in (None, -128, 127, -38):
        p = problem((count,), shifts=zero is not None)
        assert catalog.kernel(f"quantize.{isa.name}").refusal(p) is None
        memory = torch.full((count + 64,), 99, dtype=torch.int8)
        given = {} if zero is None else {2: torch.tensor(zero, dtype=torch.int8)}
        x86.bind(p, {1: scale} | given)(x, out=memory[32 : 32 + count])
        right = (torch.div(x, scale).round() + (zero or 0)).clamp(-128, 127).to(torch.int8)
        assert torch.equal(memory[32 : 32 + count], right)
        assert (memory[:32] == 99).all()
        assert (memory[32 + count :] == 99).all()


def test_what_it_leaves_to_others(isa: InstructionSet) -> None:
    refusal = catalog.kernel(f"quantize.{isa.name}").refusal
    assert refusal(problem((2, 8, 4, 4), "channels_last")) is None
    assert "one scale" in str(refusal(problem((4, 8), scale=4)))
    assert "numbers at least" in str(refusal(problem((2 * isa.lanes - 1,))))
    p = problem((2, 8, 4, 4), "channels_last")
    mixed = replace(p, outputs=(replace(p.output, format="contiguous"),))
    assert "one format" in str(refusal(mixed))


@pytest.mark.parametrize("count", [32, 4096 + 45])
def test_each_integer_becomes_its_number(count: int, isa: InstructionSet) -> None:
    x = torch.arange(count).sub(128).to(torch.int8)
    scale, zero = torch.tensor(0.0371), torch.tensor(-128, dtype=torch.int8)
    for shifts in (False, True):
        p = problem((count,), shifts=shifts)
        p = replace(
            p, op="dequantize", inputs=(p.output, *p.inputs[1:]), outputs=(p["input"],),
            attrs={"axis": 0, "dtype": "float32"},
        )  # fmt: skip
        row = catalog.kernel(f"dequantize.{isa.name}")
        assert row.refusal(p) is None
        given = {1: scale, 2: zero} if shifts else {1: scale}
        out = row.load().bind(p, given)(x, out=torch.empty(count))
        assert torch.equal(out, (x.float() - (zero if shifts else 0)) * scale)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", [(1, 3, 4, 4), (2, 3, 67, 129), (3, 3, 5, 7)])
def test_pictures_in_planes_become_pixels(
    shape: tuple[int, ...], threads: int, isa: InstructionSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    p = problem(shape)
    p = replace(p, outputs=(replace(p.output, format="channels_last"),))
    row = catalog.kernel(f"quantize.{isa.name}_picture")
    assert row.refusal(p) is None
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 60
    x.view(-1)[:6] = torch.tensor([3e9, -3e9, torch.inf, -torch.inf, 127.5, 0.375])
    scale, count = torch.tensor(0.75), x.numel()
    memory = torch.full((count + 128,), 99, dtype=torch.int8)
    out = memory[64 : 64 + count].view(shape[0], *shape[2:], 3).permute(0, 3, 1, 2)
    row.load().bind(p, {1: scale})(x, out=out)
    assert torch.equal(out, torch.div(x, scale).round().clamp(-128, 127).to(torch.int8))
    x.view(-1)[0] = torch.nan
    row.load().bind(p, {1: scale})(x, out=out)
    assert out[0, 0, 0, 0] == 127  # as where nothing moves
    assert (memory[:64] == 99).all()
    assert (memory[64 + count :] == 99).all()
    assert "pictures of 3 channels" in str(row.refusal(problem((1, 4, 8, 8))))
