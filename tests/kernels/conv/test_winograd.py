"""Winograd convolution: exact matrices, numbers in the interpreter, code compiled for a Hopper."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tessella.device.launch import launch
from tessella.kernels import catalog
from tessella.kernels.conv.winograd import fused, nonfused
from tessella.kernels.conv.winograd.fma import convolve_fma
from tessella.kernels.conv.winograd.product import multiply_fma
from tessella.kernels.conv.winograd.transforms import coefficients, transform
from tessella.operations.epilogue import ACTIVATIONS
from tests.support.emulators import gluon_on_numpy
from tests.support.kernels.compile_only import compile_all
from tests.support.problems.convolutions import Case, draw, right, run
from tests.support.problems.winograd import CASES, FUSED, LAST, PLAIN, STEPS, WHOLE, assert_right

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="numbers are tests/gpu's where there is one"
)


def by_transforms(
    x: torch.Tensor, weight: torch.Tensor, padding: tuple[int, int], m: int
) -> torch.Tensor:
    """The convolution by its transforms in float64, step by step: what the matrices mean.

    x [N, C, H, W], weight [K, C, r, r] → [N, K, P, Q], stride 1.
    """
    f = transform(m, weight.shape[-1])
    at, g, bt = (torch.tensor(coefficients(a), dtype=torch.float64) for a in (f.at, f.g, f.bt))
    extents = [x.shape[2 + i] + 2 * padding[i] - f.r + 1 for i in (0, 1)]
    tiles = [-(-extent // m) for extent in extents]
    h_extra, w_extra = (tiles[i] * m + f.r - 1 - x.shape[2 + i] - padding[i] for i in (0, 1))
    padded = F.pad(x.double(), (padding[1], w_extra, padding[0], h_extra))
    patches = padded.unfold(2, f.n, m).unfold(3, f.n, m)  # N, C, tiles, tiles, n, n
    v = torch.einsum("ai,bj,nchwij->abnchw", bt, bt, patches)
    u = torch.einsum("ai,bj,kcij->abkc", g, g, weight.double())
    products = torch.einsum("abkc,abnchw->abnkhw", u, v)
    y = torch.einsum("ia,jb,abnkhw->nkhiwj", at, at, products)
    return y.flatten(2, 3).flatten(3, 4)[:, :, : extents[0], : extents[1]]


def steps(tile: int, i: int = 32, j: int = 32) -> dict[str, Any]:
    """A configuration that the interpreter can run: small blocks, tl.dot."""
    return {
        "tile": tile, "product": "dot", "block_i": i, "block_j": j, "block_d": 32, "warps": 4,
        "stages": 2,
    }  # fmt: skip


FUSED_SMALL = {
    "product": "dot", "block_t": 32, "block_k": 16, "block_c": 16, "warps": 4, "stages": 2,
}  # fmt: skip


# the matrices


@pytest.mark.parametrize(("m", "r"), [(2, 3), (4, 3), (6, 3), (2, 5), (4, 5)])
def test_one_dimension_is_exact(m: int, r: int) -> None:
    f = transform(m, r)
    data = [Fraction((7 * i + 3) % 11 - 5) for i in range(f.n)]
    taps = [Fraction(2 * i - 3) for i in range(r)]

    def product(matrix: tuple[tuple[Fraction, ...], ...], values: list[Fraction]) -> list[Fraction]:
        return [
            sum((a * b for a, b in zip(row, values, strict=True)), Fraction()) for row in matrix
        ]

    v, u = product(f.bt, data), product(f.g, taps)
    made = product(f.at, [a * b for a, b in zip(u, v, strict=True)])
    assert made == [sum(taps[k] * data[i + k] for k in range(r)) for i in range(m)]


def test_transformed_numbers_stay_in_range() -> None:
    """16-bit types hold the transformed input of anything below a tenth of their largest number."""
    for m in (2, 4):
        longest = max(sum(abs(v) for v in row) for row in transform(m, 3).bt)
        assert longest**2 < 10  # once along each axis


def test_f23_is_made_of_powers_of_two() -> None:
    f = transform(2, 3)
    numbers = {abs(v) for matrix in (f.at, f.g, f.bt) for row in matrix for v in row} - {0}
    assert numbers <= {Fraction(1), Fraction(1, 2), Fraction(1, 4), Fraction(2)}


@pytest.mark.parametrize("m", [2, 4, 6])
@pytest.mark.parametrize("padding", [(0, 0), (2, 1)])
def test_reference_is_the_convolution(m: int, padding: tuple[int, int]) -> None:
    x, weight = torch.randn(2, 3, 9, 12), torch.randn(4, 3, 3, 3)
    expected = F.conv2d(x.double(), weight.double(), padding=padding)
    assert (by_transforms(x, weight, padding, m) - expected).abs().max() < 1e-11


# numbers


@interpreted
@pytest.mark.parametrize("name", CASES)
def test_fused_agrees_with_float64(name: str) -> None:
    assert_right(FUSED, CASES[name], FUSED_SMALL)


@interpreted
@pytest.mark.parametrize("name", CASES)
def test_steps_agree_with_float64(name: str) -> None:
    assert_right(STEPS, CASES[name], steps(2))


@interpreted
@pytest.mark.parametrize("name", ["to last", "float16", "tf32 last"])
def test_large_tiles_agree_with_float64(name: str) -> None:
    assert_right(STEPS, CASES[name], steps(4))


@interpreted
@pytest.mark.parametrize(("tile", "taps", "x_format"), [(6, 3, LAST), (2, 5, "contiguous")])
def test_other_tiles(tile: int, taps: int, x_format: Any) -> None:
    case = Case(x=(1, 5, 9, 8), w=(6, 5, taps, taps), padding=2, x_format=x_format)
    operands = draw(case)
    error = run(STEPS, case, operands, steps(tile)).double() - right(case, operands)
    assert float(error.abs().max() / right(case, operands).abs().max()) < 2e-5


@interpreted
@pytest.mark.parametrize("row", [FUSED, STEPS], ids=lambda row: row.algorithm)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_small_integers_are_exact_in_f23(row: catalog.Kernel, dtype: str) -> None:
    # the matrices of F(2, 3) are powers of two: nothing is rounded
    case = Case(x=(1, 9, 7, 6), w=(5, 9, 3, 3), padding=1, dtype=dtype, out="float32")
    operands = draw(case, integers=True)
    config = FUSED_SMALL if row is FUSED else steps(2)
    assert torch.equal(run(row, case, operands, config).double(), right(case, operands))


@interpreted
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str) -> None:
    case = Case(x=(1, 3, 4, 4), w=(4, 3, 3, 3), padding=1, activation=activation, **WHOLE)
    assert_right(FUSED, case, FUSED_SMALL)


@interpreted
@pytest.mark.parametrize("row", [FUSED, STEPS], ids=lambda row: row.algorithm)
def test_a_residual_times_zero_is_not_read(row: catalog.Kernel) -> None:
    case = replace(PLAIN, residual=True, beta=0.0)
    operands = draw(case)
    operands[3].fill_(float("inf"))
    made = run(row, case, operands, FUSED_SMALL if row is FUSED else steps(2))
    assert torch.isfinite(made).all()


@interpreted
@settings(max_examples=8, deadline=None)
@given(st.data())
def test_fuzzed(data: st.DataObject) -> None:
    size = st.integers(1, 9)
    pads = (data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3)))
    h, w = (max(data.draw(size), 3 - 2 * pad) for pad in pads)
    formats = st.sampled_from(["contiguous", LAST])
    case = Case(
        x=(data.draw(st.integers(1, 2)), data.draw(size), h, w),
        w=(data.draw(size), 0, 3, 3),
        padding=pads,
        x_format=data.draw(formats),
        out_format=data.draw(formats),
        constant=data.draw(st.booleans()),
    )
    case = replace(case, w=(case.w[0], case.x[1], 3, 3))
    row, config = data.draw(st.sampled_from([(FUSED, FUSED_SMALL), (STEPS, steps(2))]))
    assert_right(row, case, config)


# the Gluon kernels' indices, masks and sums, on NumPy


GLUON_STEPS = {
    "tile": 2, "product": "fma", "block_i": 32, "block_j": 32, "block_d": 16, "warps": 1,
    "stages": 2,
}  # fmt: skip
GLUON_FUSED = {
    "product": "fma", "block_t": 32, "block_k": 32, "block_c": 16, "warps": 2, "split": 2,
    "stages": 2,
}  # fmt: skip


def on_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (fused, nonfused):
        monkeypatch.setattr(
            module,
            "launch",
            lambda kernel, *args, **constants: (
                gluon_on_numpy.run if kernel in (convolve_fma, multiply_fma) else launch
            )(kernel, *args, **constants),
        )


@interpreted
@pytest.mark.parametrize(("x_format", "stages"), [("contiguous", 2), ("contiguous", 3), (LAST, 4)])
def test_gluon_product(monkeypatch: pytest.MonkeyPatch, x_format: Any, stages: int) -> None:
    on_numpy(monkeypatch)
    case = Case(x=(1, 33, 7, 5), w=(35, 33, 3, 3), padding=1, x_format=x_format)
    assert_right(STEPS, case, {**GLUON_STEPS, "stages": stages})


@interpreted
@pytest.mark.parametrize(("name", "split"), [("plain", 1), *(
    (name, 2) for name, case in CASES.items() if case.dtype == "float32" and case.math == "ieee"
)])  # fmt: skip
def test_gluon_fused(monkeypatch: pytest.MonkeyPatch, name: str, split: int) -> None:
    on_numpy(monkeypatch)
    assert_right(FUSED, CASES[name], {**GLUON_FUSED, "split": split})


# refusals and sizes


@pytest.mark.parametrize(("case", "reason"), [
    (replace(PLAIN, stride=2), "stride 1"),
    (replace(PLAIN, dilation=2), "dilation 1"),
    (Case(x=(1, 4, 5, 5), w=(4, 2, 3, 3), groups=2), "one group"),
    (Case(x=(1, 4, 5, 5), w=(4, 4, 1, 1)), "a filter of 3x3"),
    (Case(x=(1, 4, 5, 5), w=(4, 4, 3, 1)), "a filter of 3x3"),
    (replace(PLAIN, dtype="int8"), "of one type"),
    (replace(PLAIN, out="int8"), "not int8"),
    (Case(x=(1, 4, 9), w=(4, 4, 3)), "two spatial axes"),
])  # fmt: skip
@pytest.mark.parametrize("row", [FUSED, STEPS], ids=lambda row: row.algorithm)
def test_refuses_with_a_reason(row: catalog.Kernel, case: Case, reason: str) -> None:
    assert reason in (row.load().fits(case.problem) or "accepted")


def test_5x5_is_only_done_in_steps() -> None:
    problem = Case(x=(1, 4, 9, 9), w=(4, 4, 5, 5)).problem
    assert FUSED.load().fits(problem) is not None
    assert STEPS.load().fits(problem) is None


def test_a_workspace_beyond_32_bits_is_refused() -> None:
    case = Case(x=(64, 512, 224, 224), w=(64, 512, 3, 3))
    assert "2^31" in (STEPS.load().fits(case.problem) or "accepted")


def test_workspace_is_counted() -> None:
    case = Case(x=(1, 128, 128, 128), w=(128, 128, 3, 3), padding=1, constant=False)
    problem = case.problem
    config = {**steps(4), "product": "fma", "block_i": 64, "block_j": 64}
    transformed, filters = 36 * 1024 * 128, 36 * 128 * 128
    assert STEPS.workspace_bytes(problem, config) == 4 * (2 * transformed + filters)
    known = replace(case, constant=True).problem
    assert STEPS.workspace_bytes(known, config) == 4 * 2 * transformed
    fused = FUSED.configs(problem)[0]
    assert FUSED.workspace_bytes(problem, fused) == 4 * 16 * 128 * 128
    assert FUSED.workspace_bytes(known, fused) == 0


# code


def compiled_cases() -> Iterator[tuple[str, Callable[[], None]]]:
    """A configuration of each kind, with real sizes."""
    mission = Case(x=(1, 128, 128, 128), w=(128, 128, 3, 3), padding=1, constant=False)
    half = Case(x=(8, 512, 14, 14), w=(512, 512, 3, 3), padding=1, dtype="float16", x_format=LAST)
    for name, row, case in (
        ("fma", STEPS, mission),
        ("fma last", STEPS, replace(mission, x_format=LAST)),
        ("half", STEPS, half),
        ("tf32", STEPS, replace(mission, math="tf32")),
        ("fused fma", FUSED, mission),
        ("fused fma last", FUSED, replace(mission, x_format=LAST, activation="gelu", **WHOLE)),
        ("fused half", FUSED, half),
    ):
        problem, operands = case.problem, draw(replace(case, x=(0, *case.x[1:])))
        operands[0] = torch.empty(case.x).to(operands[0].dtype)
        operands[0] = operands[0].contiguous(memory_format=_memory(case))
        operands[3] = problem.output.empty(torch.device("cpu")) if case.residual else None
        config = row.configs(problem)[0]

        def run_one(
            row: Any = row, case: Case = case, operands: Any = operands, config: Any = config
        ) -> None:
            problem = case.problem
            known = {i: operands[i] for i in problem.constant}
            rest = [t for i, t in enumerate(operands) if t is not None and i not in known]
            workspace = torch.empty(row.workspace_bytes(problem, config), dtype=torch.uint8)
            call = row.load().bind(problem, known, **config)
            call(*rest, out=problem.output.empty(torch.device("cpu")), workspace=workspace)

        yield name, run_one


def _memory(case: Case) -> torch.memory_format:
    return torch.channels_last if case.x_format == LAST else torch.contiguous_format


def test_compiles_for_hopper() -> None:
    found = compile_all("tests.kernels.conv.test_winograd:compiled_cases")
    for name, launches in found.items():
        for one in launches:
            assert one["spilled_bytes"] == 0, (name, one)
    opcodes = {name: [one["opcodes"] for one in launches] for name, launches in found.items()}
    assert len(opcodes["fma"]) == 3
    for name in ("fma", "fma last"):  # 16 numbers of depth at least, all in registers
        assert opcodes[name][1]["FFMA"] >= 512
        assert not {"HMMA", "HGMMA"} & set(opcodes[name][1])
    for name in ("half", "tf32", "fused half"):
        assert any("HGMMA" in one for one in opcodes[name])
    for name in ("fused fma", "fused fma last"):
        assert opcodes[name][-1]["FFMA"] >= 256  # 16 channels: half of them a warp's
        assert not {"HMMA", "HGMMA"} & set(opcodes[name][-1])
