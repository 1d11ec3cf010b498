"""Convolution by Fourier transforms: numbers in the interpreter, code compiled for a Hopper GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessella.kernels import catalog
from tessella.kernels.conv.fourier import dft, fft_tiling
from tessella.operations.epilogue import ACTIVATIONS
from tests.support.kernels.compile_only import compile_all
from tests.support.problems.convolutions import Case, draw, run
from tests.support.problems.fourier import (
    BOTH,
    CASES,
    EPILOGUE,
    LAST,
    PLAIN,
    TILES,
    WHOLE,
    assert_right,
)

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="numbers are tests/gpu's where there is one"
)


def small(row: catalog.Kernel, case: Case, tile: int = 16) -> dict[str, Any]:
    """A configuration that the interpreter can run: small blocks."""
    if row is TILES:
        return {"tile": tile, "block_k": 16, "block_m": 16}
    return {"block_k": 16, "block_m": 16 if case.x[0] > 8 else 1 << (case.x[0] - 1).bit_length()}


# the transforms


def test_a_product_of_spectra_is_a_correlation() -> None:
    """Without the kernels: rows wrap around with the sign reversed, columns as they are."""
    period, device = 6, torch.device("cpu")
    points, frequencies = tuple(range(period)), range(period)
    x, w = torch.randn(2, period, period, dtype=torch.float64)
    rows = dft.width_matrix(period, points, (period, period), device).double()
    columns = dft.height_matrix(period, points, frequencies, (12, 12), device).double()
    back = dft.height_inverse(period, frequencies, points, (12, 12), device).double()
    out = dft.width_inverse(period, points, (period, period), device).double()

    def spectrum(image: torch.Tensor) -> torch.Tensor:
        of_rows = (image @ rows).view(period, 3, 2).transpose(0, 1).reshape(3, -1)
        return torch.view_as_complex((of_rows @ columns).view(3, period, 2))

    product = torch.view_as_real(spectrum(x) * spectrum(w).conj()).reshape(3, -1)
    made = (product @ back).view(3, period, 2).transpose(0, 1).reshape(period, -1) @ out
    for p in range(period):
        for q in range(period):
            signs = torch.tensor([1.0 if q + s < period else -1.0 for s in range(period)])
            moved = x.roll((-p, -q), (0, 1)) * signs
            assert abs(float((moved * w).sum() - made[p, q])) < 1e-5


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("tile", [10, 26, 32])
def test_tiles_cover_every_output_once(tile: int, stride: int) -> None:
    case = Case(x=(2, 3, 41, 50), w=(4, 3, 5, 3), stride=stride, padding=2, dilation=(2, 1))
    cut = fft_tiling.Cut.of(case.problem, tile)
    for axis in range(2):
        outputs, kept = case.problem.output.shape[2 + axis], cut.kept[axis]
        assert (cut.grid[axis] - 1) * kept < outputs <= cut.grid[axis] * kept
        # the last output's filter ends inside the tile
        assert (kept - 1) * stride + (9, 3)[axis] <= tile


# numbers


@interpreted
@BOTH
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_float64(row: catalog.Kernel, name: str) -> None:
    case = CASES[name]
    assert_right(row, case, small(row, case))


@interpreted
@pytest.mark.parametrize("side", range(1, 12))
def test_every_filter(side: int) -> None:
    """On even and on odd frequencies, with tiles that are no power of two."""
    case = Case(x=(1, 1, 16, 19), w=(2, 1, side, side), padding=side // 2)
    assert_right(TILES, case, small(TILES, case, tile=side + 9 + (side + 1) % 2))


@interpreted
@pytest.mark.parametrize(("tile", "stride"), [(8, 1), (14, 1), (32, 1), (32, 2), (30, 2)])
def test_every_tile(tile: int, stride: int) -> None:
    """Of a tile of 32 with filters of 3 both halves of the rows are kept."""
    case = Case(x=(1, 1, 33, 31), w=(2, 1, 3, 3), padding=1, stride=stride, constant=False)
    assert_right(TILES, case, small(TILES, case, tile=tile))


@interpreted
def test_several_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """More tiles than the workspace holds at once; the last pass is smaller."""
    monkeypatch.setattr(fft_tiling, "PASS_NUMBERS", 1)
    case = Case(x=(3, 2, 22, 20), w=(3, 2, 3, 3), padding=1, bias="float32", residual=True)
    config = small(TILES, case, tile=12)
    assert fft_tiling.Cut.of(case.problem, 12).tiles == 18  # 16, and 2
    assert_right(TILES, case, config)


@interpreted
@BOTH
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(row: catalog.Kernel, activation: str) -> None:
    case = Case(x=(1, 2, 4, 4), w=(3, 2, 3, 3), padding=1, activation=activation, **EPILOGUE)
    assert_right(row, case, small(row, case, tile=8))


@interpreted
@BOTH
def test_a_residual_times_zero_is_not_read(row: catalog.Kernel) -> None:
    case = replace(PLAIN, residual=True, beta=0.0)
    operands = draw(case)
    operands[3].fill_(torch.inf)
    assert torch.isfinite(run(row, case, operands, small(row, case))).all()


@interpreted
@settings(max_examples=8, deadline=None)
@given(st.data())
def test_fuzzed(data: st.DataObject) -> None:
    def pair(low: int, high: int) -> tuple[int, int]:
        return data.draw(st.integers(low, high)), data.draw(st.integers(low, high))

    taps, dilation, padding = pair(1, 4), pair(1, 3), pair(0, 3)
    reach = [(t - 1) * d + 1 for t, d in zip(taps, dilation, strict=True)]
    image = [max(side, r - 2 * p) for side, r, p in zip(pair(1, 14), reach, padding, strict=True)]
    channels, formats = data.draw(st.integers(1, 6)), st.sampled_from(["contiguous", LAST])
    case = Case(
        x=(data.draw(st.integers(1, 2)), channels, *image),
        w=(data.draw(st.integers(1, 6)), channels, *taps),
        stride=pair(1, 3),
        padding=padding,
        dilation=dilation,
        x_format=data.draw(formats),
        out_format=data.draw(formats),
        constant=data.draw(st.booleans()),
    )
    row = data.draw(st.sampled_from([WHOLE, TILES]))
    assert_right(row, case, small(row, case))


# refusals and sizes


@pytest.mark.parametrize(("case", "reason"), [
    (Case(x=(1, 4, 5, 5), w=(4, 2, 3, 3), groups=2), "one group"),
    (Case(x=(1, 4, 9), w=(4, 4, 3)), "two spatial axes"),
    (replace(PLAIN, dtype="int8"), "not int8"),
    (replace(PLAIN, out="int8"), "not int8"),
])  # fmt: skip
@BOTH
def test_refuses_with_a_reason(row: catalog.Kernel, case: Case, reason: str) -> None:
    problem = case.problem
    refused = row.load().fits(problem) or "accepted"
    assert reason in refused or (len(case.x) == 3 and "axes" in refused)


def test_refuses_what_is_too_large() -> None:
    wide = Case(x=(1, 4, 80, 80), w=(4, 4, 12, 3), dilation=3).problem
    assert "32 pixels, not 34" in (TILES.load().fits(wide) or "accepted")
    assert WHOLE.load().fits(wide) is None
    large = Case(x=(1, 4, 80, 1023), w=(4, 4, 3, 3), padding=2).problem
    assert "1024" in (WHOLE.load().fits(large) or "accepted")
    assert TILES.load().fits(large) is None
    many = Case(x=(1, 512, 224, 224), w=(512, 512, 3, 3), padding=1).problem
    assert "2³¹" in (WHOLE.load().fits(many) or "accepted")
    assert TILES.load().fits(many) is None


@pytest.mark.parametrize("constant", [True, False])
def test_workspace_is_counted(constant: bool) -> None:
    case = Case(x=(1, 128, 128, 128), w=(128, 128, 11, 11), padding=5, constant=constant)
    problem = case.problem
    of_filters = 0 if constant else 128 * 128
    config = {"tile": 26, "block_k": 128, "block_m": 64}  # 8 × 8 tiles, each of 16 × 16 outputs
    assert TILES.workspace_bytes(problem, config) == 8 * 26 * 13 * (2 * 64 * 128 + of_filters)
    config = {"block_k": 128, "block_m": 1}
    numbers = 133 * 67 * (2 * 128 + of_filters)  # spectra, and between the passes of one
    numbers += 67 * 128 * max(128, 0 if constant else 11 * 128)
    assert 0 <= WHOLE.workspace_bytes(problem, config) - 8 * numbers < 1024


@BOTH
def test_offers_configurations(row: catalog.Kernel) -> None:
    for case in (PLAIN, replace(CASES["11x11"], constant=False), CASES["many images"]):
        configs = row.configs(case.problem)
        assert 1 <= len(configs) <= 12
        assert len({str(c) for c in configs}) == len(configs)
        assert all(row.workspace_bytes(case.problem, c) > 0 for c in configs)


# code


def compiled_cases() -> Iterator[tuple[str, Callable[[], None]]]:
    """What find tries first, with real sizes."""
    table = Case(x=(1, 128, 128, 128), w=(128, 128, 11, 11), padding=5, constant=False)
    batch = Case(x=(32, 64, 56, 56), w=(64, 64, 5, 5), padding=2, constant=False)
    for name, row, case in (
        ("table", TILES, table),
        ("table 3x3", TILES, replace(table, w=(128, 128, 3, 3), padding=1)),
        ("table last", TILES, replace(table, x_format=LAST, activation="gelu", **EPILOGUE)),
        ("batch half", TILES, replace(batch, dtype="float16")),
        ("whole table", WHOLE, table),
        ("whole batch half", WHOLE, replace(batch, dtype="float16", x_format=LAST)),
    ):
        problem, operands = case.problem, draw(replace(case, x=(0, *case.x[1:])))
        operands[0] = problem.inputs[0].empty(torch.device("cpu"))
        operands[3] = problem.output.empty(torch.device("cpu")) if case.residual else None

        def run_one(row: Any = row, problem: Any = problem, operands: Any = operands) -> None:
            config = row.configs(problem)[0]
            workspace = torch.empty(row.workspace_bytes(problem, config), dtype=torch.uint8)
            call = row.load().bind(problem, {}, **config)
            out = problem.output.empty(torch.device("cpu"))
            call(*(t for t in operands if t is not None), out=out, workspace=workspace)

        yield name, run_one


def test_compiles_for_hopper() -> None:
    found = compile_all("tests.kernels.conv.test_fft:compiled_cases")
    for name, launches in found.items():
        for one in launches:
            assert one["spilled_bytes"] == 0, (name, one)
            on_tensor_cores = bool({"HMMA", "HGMMA"} & set(one["opcodes"]))
            assert on_tensor_cores == ("half" in name and one["kernel"] == "_product"), (name, one)
    assert [one["kernel"] for one in found["table"]] == [
        "_forward", "_forward", "_product", "_inverse",
    ]  # fmt: skip
