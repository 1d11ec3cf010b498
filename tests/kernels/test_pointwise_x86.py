"""Programs in machine code, beside float64: what is broadcast, what is left of a row, slices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tessella.device.x86.assembler import AVX2, InstructionSet
from tessella.kernels import catalog
from tessella.kernels.pointwise import x86
from tessella.operations.problem import Problem
from tessella.operations.reference.pointwise import pointwise
from tessella.operations.tensor_meta import Format, TensorMeta
from tests.support.instructions import isa as isa

CPU = torch.device("cpu")
Program = tuple[tuple[str, tuple[int | None, ...], dict[str, Any]], ...]


def image(*shape: int, format: Format = "channels_last") -> TensorMeta:
    return TensorMeta(shape=shape, dtype="float32", format=format)


def problem(program: Program, *inputs: TensorMeta, constant: tuple[int, ...] = ()) -> Problem:
    results = (len(inputs) + len(program) - 1,)
    shape = torch.broadcast_shapes(*(m.shape for m in inputs if len(m.shape) > 1))
    like = next(m for m in inputs if m.shape == shape)
    return Problem(
        op="pointwise", inputs=inputs, outputs=(replace(like, strides=None),),
        attrs={"program": program, "results": results}, constant=constant,
    )  # fmt: skip


def drawn(p: Problem, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [m.empty(CPU).copy_(torch.randn(m.shape, generator=generator)) for m in p.given]


def agrees(p: Problem, isa: InstructionSet) -> None:
    assert catalog.kernel(f"pointwise.{isa.name}").refusal(p) is None
    given = drawn(p)
    constants = {i: given[i].abs() for i in p.constant}
    given = [constants.get(i, x) for i, x in enumerate(given)]
    right = pointwise(*(x.double() for x in given), **p.attrs)
    call = x86.bind(p, constants)
    for _ in range(2):
        out = p.output.empty(CPU).fill_(torch.nan)
        free = [x for i, x in enumerate(given) if i not in constants]
        assert call(*free, out=out) is out
        assert isinstance(right, torch.Tensor)
        near = 2**-8 + 1e-3 if p.output.dtype == "bfloat16" else 1e-5
        torch.testing.assert_close(out.double(), right, rtol=near, atol=1e-5 + near / 8)


ADD_RELU: Program = (("add", (0, 1), {"alpha": 1}), ("relu", (2,), {}))
NORM_RELU: Program = (("batch_norm", (0, 1, 2, 3, 4), {"eps": 1e-5}), ("relu", (5,), {}))
GATE: Program = (("sigmoid", (1,), {}), ("mul", (0, 2), {}))
LONG: Program = (
    ("mul", (0, None), {"scalar": 0.5}), ("silu", (0,), {}), ("add", (2, 3), {"alpha": 2}),
    ("gelu", (4,), {"approximate": "none"}), ("sub", (5, 1), {"alpha": 1}),
    ("clamp", (6,), {"min": -2.0, "max": 3.0}), ("div", (7, None), {"scalar": 3.0}),
    ("mul", (7, 8), {}), ("pow", (9, None), {"scalar": 2.0}), ("neg", (10,), {}),
    ("tanh", (11,), {}), ("leaky_relu", (12,), {"negative_slope": 0.1}),
    ("leaky_relu", (13,), {"negative_slope": 1.5}), ("add", (14, 1), {"alpha": 1}),
    ("leaky_relu", (15,), {"negative_slope": -0.5}),
)  # fmt: skip


@pytest.mark.parametrize("columns", [1, 3, 8, 24, 40, 100, 5000])
def test_rows_of_any_length(columns: int, isa: InstructionSet) -> None:
    plain = TensorMeta(shape=(7, columns), dtype="float32")
    agrees(problem(ADD_RELU, plain, plain), isa)
    agrees(problem(LONG, plain, plain), isa)
    agrees(problem(ADD_RELU, plain, TensorMeta(shape=(1, columns), dtype="float32")), isa)
    agrees(problem(GATE, plain, TensorMeta(shape=(7, 1), dtype="float32")), isa)


@pytest.mark.parametrize("channels", [3, 16, 52])
@pytest.mark.parametrize("format", ["contiguous", "channels_last"])
def test_images(channels: int, format: Format, isa: InstructionSet) -> None:
    x = image(2, channels, 5, 7, format=format)
    vector = TensorMeta(shape=(channels,), dtype="float32")
    agrees(problem(NORM_RELU, x, *[vector] * 4, constant=(1, 2, 3, 4)), isa)
    agrees(problem(GATE, x, image(2, channels, 1, 1, format=format)), isa)


def test_bfloat16_beside_float64(isa: InstructionSet) -> None:
    if not x86.code.has_bfloat16():
        pytest.skip("this CPU has no bfloat16 instructions")
    for channels in (3, 16, 40, 100):
        x, gate, pixel = (
            replace(image(2, *size), dtype="bfloat16")
            for size in ((channels, 5, 7), (channels, 1, 1), (1, 5, 7))
        )
        agrees(problem((("mul", (0, 1), {}), ("hardswish", (2,), {})), x, gate), isa)
        agrees(problem(GATE, x, pixel), isa)
        agrees(problem(LONG, x, x), isa)
        vector = TensorMeta(shape=(channels,), dtype="float32")
        agrees(problem(NORM_RELU, x, *[vector] * 4, constant=(1, 2, 3, 4)), isa)


@pytest.mark.parametrize("threads", [2, 5])
def test_torchs_threads_share_the_work(
    threads: int, isa: InstructionSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for shape in ((3, 64, 33, 31), (1, 7, 200, 101)):
        x = image(*shape)
        agrees(problem(ADD_RELU, x, x), isa)
        agrees(problem(GATE, x, image(*shape[:2], 1, 1)), isa)


def test_slices_are_read_and_written_and_nothing_beside_them(isa: InstructionSet) -> None:
    part = image(2, 90, 5, 5).part(1, 36)
    p = problem(ADD_RELU, image(2, 36, 5, 5), image(2, 36, 5, 5))
    sliced = replace(p, inputs=(part, p.inputs[1]), outputs=(part,))
    assert catalog.kernel(f"pointwise.{isa.name}").refusal(sliced) is None
    whole, added = image(2, 90, 5, 5).empty(CPU).fill_(5), drawn(p)[1]
    out = torch.full_like(whole, 7)
    x86.bind(sliced, {})(whole[:, 20:56], added, out=out[:, 30:66])
    assert torch.equal(out[:, 30:66], (added + 5).relu())
    assert (out[:, :30] == 7).all()
    assert (out[:, 66:] == 7).all()


def test_in_place(isa: InstructionSet) -> None:
    p = problem(LONG, image(1, 13, 9, 9), image(1, 13, 9, 9))
    x, y = drawn(p)
    right = x86.bind(p, {})(x, y, out=torch.empty_like(x))
    assert torch.equal(x86.bind(p, {})(x, y, out=x), right)


def test_nans_spread(isa: InstructionSet) -> None:
    p = problem(LONG, image(1, 16, 3, 3), image(1, 16, 3, 3))
    x, y = drawn(p)
    x[0, 3, 1, 1] = torch.nan
    found = x86.bind(p, {})(x, y, out=torch.empty_like(x)).isnan()
    assert found[0, 3, 1, 1]
    assert found.sum() == 1
    ends = torch.tensor([-3e38, -1e37, -200.0, -87.5, 3e38, torch.inf, -torch.inf, torch.nan])
    if isa == AVX2:
        ends[-2] = -1e38  # of minus infinity it makes 0, where others have a NaN
    p = problem((("silu", (0,), {}),), TensorMeta(shape=(1, 8), dtype="float32"))
    tanh = replace(p, attrs={**p.attrs, "program": (("gelu", (0,), {"approximate": "tanh"}),)})
    for one in (p, tanh):
        made = x86.bind(one, {})(ends[None], out=torch.empty(1, 8))
        right = pointwise(ends[None].double(), **one.attrs)
        assert isinstance(right, torch.Tensor)
        torch.testing.assert_close(made.double(), right, rtol=1e-6, atol=2e-36, equal_nan=True)


def test_single_operations(isa: InstructionSet) -> None:
    x, gate = image(1, 24, 6, 6), image(1, 24, 1, 1)
    p = Problem(op="mul", inputs=(x, gate), outputs=(x,), attrs={})
    assert catalog.kernel(f"mul.{isa.name}").refusal(p) is None
    a, b = drawn(p)
    assert torch.equal(x86.bind(p, {})(a, b, out=torch.empty_like(a)), a * b)


def test_what_it_leaves_to_others(isa: InstructionSet) -> None:
    row, x = catalog.kernel(f"pointwise.{isa.name}"), image(1, 16, 3, 3)
    assert row.refusal(problem((("erf", (0,), {}),), x)) == "no machine code for erf"
    assert row.refusal(problem(ADD_RELU, x, image(1, 16, 3, 3, format="contiguous"))) == (
        "numbers of a row lie apart"
    )
    sixteen_bit = replace(x, dtype="float16")
    why = row.refusal(problem(ADD_RELU, sixteen_bit, sixteen_bit))
    assert why == "float32 throughout, or bfloat16 where the processor rounds to it"
