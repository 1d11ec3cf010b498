"""Convolution in plain Triton: numbers in the interpreter, code compiled for a Hopper GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessella.device.launch import watching
from tessella.kernels import catalog
from tessella.kernels.conv import channelwise, tiles
from tessella.operations.epilogue import ACTIVATIONS
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import MEMORY_FORMATS, TensorMeta
from tests.support.kernels.compile_only import compile_all
from tests.support.problems.convolutions import Case, check, draw, right, run
from tests.support.problems.portable_convolutions import (
    ALGORITHMS,
    CASES,
    DEPTHWISE_CASES,
    LAST,
    SHAPES,
    interpreted,
    row,
    strip_of,
)

# Which values meet is seen in whole numbers, exactly; how they are rounded, once for each type
# and each way of a sum to its result.
ROUNDED = (
    "plain", "odd last", "depthwise", "depthwise half", "depthwise 7", "depthwise pairs",
    "float16", "int8", "int8 factor", "whole epilogue", "factor", "argument last", "one axis",
)  # fmt: skip


@interpreted
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_float64(algorithm: str, name: str) -> None:
    case = CASES[name]
    kernel = row(algorithm, case)
    refused = kernel.load().fits(case.problem)
    if refused is not None:
        assert name == "view", refused
        return
    check(kernel, case, integers=True)
    if name in ROUNDED:
        check(kernel, case)


@interpreted
@pytest.mark.parametrize("name", DEPTHWISE_CASES)
def test_depthwise_agrees_with_float64(name: str) -> None:
    check(row("direct", DEPTHWISE_CASES[name]), DEPTHWISE_CASES[name])


@interpreted
@pytest.mark.parametrize("shape", [*SHAPES, (4, 3, 3)])
def test_depthwise_strips(shape: tuple[int, int, int]) -> None:
    """Images that strips do not divide, and above and below which there are rows of padding."""
    for name, rows in (("argument", 3), ("int8 sums", 2), ("far beside", 5), ("strided", 99)):
        case = DEPTHWISE_CASES[name]
        check(row("direct", case), case, strip_of(case, shape, rows), integers=True)


@interpreted
@pytest.mark.parametrize("rows", [1, 2, 4, 99])
@pytest.mark.parametrize("name", ["7", "dilated last", "pairs", "view", "three axes"])
def test_depthwise_rows(name: str, rows: int) -> None:
    case = DEPTHWISE_CASES[name]
    check(row("direct", case), case, strip_of(case, (2, 2, 1), rows), integers=True)


@interpreted
def test_depthwise_tensors_of_many_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets of 64 bits, and more blocks than an axis of a grid has."""
    monkeypatch.setattr(tiles, "is_wide", lambda *_: True)
    monkeypatch.setattr(channelwise, "MOST_BLOCKS", 2)
    for case in (DEPTHWISE_CASES["far beside"], CASES["depthwise half"], CASES["depthwise int8"]):
        for shape in ((2, 2, 1), (2, 2, 0)):
            check(row("direct", case), case, strip_of(case, shape, 3), integers=True)


@interpreted
def test_depthwise_sums_of_the_largest_codes_are_exact() -> None:
    """49 products of -128 and -128, added up in float32."""
    case = Case(x=(1, 4, 7, 7), w=(4, 1, 7, 7), groups=4, dtype="int8", out="int32", x_format=LAST)
    operands = draw(case)
    operands[0].fill_(-128)
    operands[1].fill_(-128)
    operands[1][:, :, 3, 3] = -127
    made = run(row("direct", case), case, operands)
    assert made.tolist() == [[[[49 * 128 * 128 - 128]]] * 4]


@interpreted
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str) -> None:
    case = Case(x=(1, 4, 5, 5), w=(6, 4, 3, 3), activation=activation, bias="float32")
    check(catalog.kernel("conv2d.implicit_gemm"), case)


@interpreted
@pytest.mark.parametrize("algorithm", ALGORITHMS[:3])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("splits", [2, 4])
def test_a_split_depth_is_added_up(algorithm: str, last: bool, splits: int) -> None:
    config = {"pixels": 32, "filters": 16, "depth": 16, "splits": splits}
    case = Case(
        x=(1, 32, 5, 5), w=(24, 32, 3, 3), x_format=LAST if last else "contiguous", bias="float32",
        residual=True, activation="relu",
    )  # fmt: skip
    for constant in (True, False):
        varied = replace(case, constant=constant)
        check(row(algorithm, case), varied, {**config, "pack": not constant}, integers=True)
    check(row(algorithm, case), replace(case, residual=False, floor=-2.0), config, integers=True)
    both = replace(case, floor=-2.0).problem
    assert row(algorithm, case).refusal(both) == "a floor stands where a residual has its factor"


@interpreted
def test_columns_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """More pixels than the columns hold at once: the last part is smaller, and splits are added."""
    from tessella.kernels.conv import gemm

    case = Case(x=(2, 4, 18, 18), w=(8, 4, 3, 3), bias="float32", padding=1)
    monkeypatch.setattr(gemm, "MOST_BYTES", 300 * 4 * 48)
    tile = {"pixels": 64, "filters": 16, "depth": 16}
    assert gemm._pixels_at_once(case.problem) == 256
    for last in (False, True):
        for splits in (1, 2):
            varied = replace(case, x_format=LAST if last else "contiguous")
            check(row("gemm", case), varied, {**tile, "splits": splits}, integers=True)


@interpreted
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_without_weight_a_residual_is_not_read(algorithm: str) -> None:
    case = Case(x=(1, 4, 5, 5), w=(6, 4, 3, 3), residual=True, beta=0.0)
    operands = draw(case)
    operands[3].fill_(torch.inf)
    made = run(row(algorithm, case), case, operands)
    expected = right(replace(case, residual=False), [*operands[:3], None, None])
    torch.testing.assert_close(made.double(), expected, rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_what_is_beside_an_image_is_no_part_of_a_sum() -> None:
    """Infinity and NaN reach the pixels that read them, and no others."""
    case = Case(x=(1, 16, 6, 6), w=(4, 16, 3, 3), padding=1)
    x = torch.ones(case.x)
    x[0, 0, 0, 0], x[0, 15, 5, 5] = torch.inf, torch.nan
    w = torch.ones(case.w)
    for algorithm in ALGORITHMS:
        module = row(algorithm, case).load()
        config = module.configs(case.problem)[0]
        nbytes = row(algorithm, case).workspace_bytes(case.problem, config)
        workspace = {"workspace": torch.full((nbytes,), 0xFF, dtype=torch.uint8)} if nbytes else {}
        out = torch.empty(case.problem.output.shape)
        made = module.bind(case.problem, {1: w}, **config)(x, out=out, **workspace)
        assert made.isinf().sum() == 4 * 4, algorithm  # 2 × 2 pixels of four filters
        assert made.isnan().sum() == 4 * 4, algorithm


sizes = st.integers(1, 7)


@st.composite
def cases(draw: Callable[[Any], Any]) -> Case:
    """Any convolution of small numbers whose result is not empty."""
    axes = draw(st.sampled_from([1, 2, 2, 2, 3]))
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    channels, filters = draw(st.integers(1, 9)), draw(st.integers(1, 6))
    taps = tuple(draw(st.integers(1, 4 if axes < 3 else 2)) for _ in range(axes))
    dilation = tuple(draw(st.integers(1, 2)) for _ in range(axes))
    padding = tuple(draw(st.integers(0, 3)) for _ in range(axes))
    extent = tuple(
        draw(st.integers(max(1, d * (t - 1) + 1 - 2 * p), 8 if axes < 3 else 4 + t))
        for t, d, p in zip(taps, dilation, padding, strict=True)
    )
    formats = st.sampled_from(["contiguous", LAST]) if axes == 2 else st.just("contiguous")
    return Case(
        x=(draw(st.integers(0, 2)), channels * groups, *extent),
        w=(filters * groups, channels, *taps),
        groups=groups,
        stride=tuple(draw(st.integers(1, 3)) for _ in range(axes)),
        padding=padding,
        dilation=dilation,
        dtype=draw(st.sampled_from(["float32", "float32", "int8", "float16"])),
        x_format=draw(st.sampled_from(["strided"]) | formats | formats | formats),
        w_format=draw(formats),
        out_format=draw(formats),
        bias=draw(st.sampled_from([None, "float32"])),
        residual=draw(st.booleans()),
        scale=draw(st.booleans()),
        constant=draw(st.booleans()),
    )


@interpreted
@given(case=cases(), algorithm=st.sampled_from(ALGORITHMS))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_any_small_convolution(case: Case, algorithm: str) -> None:
    kernel = row(algorithm, case)
    refused = kernel.load().fits(case.problem)
    if refused is not None:
        assert case.x_format == "strided", refused
        return
    check(kernel, case, integers=True)


def test_refusals() -> None:
    case = Case(x=(1, 8, 5, 5), w=(8, 8, 3, 3))
    problem = case.problem
    rows = {name: catalog.kernel(f"conv2d.{name}") for name in ALGORITHMS}
    fits = {name: row.load().fits for name, row in rows.items()}
    named = replace(problem, attrs={**problem.attrs, "padding": "same"})
    for name in ALGORITHMS:
        assert fits[name](problem) is None
        assert rows[name].refusal(named) == "padding must be numbers"
        assert "int32" in fits[name](replace(case, out="int32").problem)
        mixed = (problem.inputs[0], replace(problem.inputs[1], dtype="float16"))
        assert "one element type" in fits[name](replace(problem, inputs=mixed))
        double = tuple(TensorMeta(shape=t.shape, dtype="float64") for t in problem.inputs[:2])
        assert "float64" in fits[name](replace(problem, inputs=double))
    wide = Case(x=(1, 2, 40, 40), w=(2, 2, 40, 1)).problem
    assert "more than 32 taps" in fits["implicit_precomp_gemm"](wide)
    huge = Case(x=(2**16, 1, 2**8, 2**8), w=(1, 1, 1, 1), dtype="float16").problem
    assert all("pixels" in fit(huge) for fit in fits.values())


def test_the_first_configuration_fills_the_machine() -> None:
    """Few pixels: the depth is cut; many: it is not."""
    few = Case(x=(1, 512, 7, 7), w=(512, 512, 3, 3), dtype="float16", x_format=LAST).problem
    many = Case(x=(64, 64, 56, 56), w=(64, 64, 3, 3), dtype="float16", x_format=LAST).problem
    configs = catalog.kernel("conv2d.implicit_gemm").configs
    assert configs(few)[0]["splits"] > 1
    assert configs(many)[0]["splits"] == 1
    assert len(configs(few)) <= 12


def test_depthwise_strips_fit_the_problem() -> None:
    """Many images: strips are images; one: they are rows. Tiles divide the filters."""

    def depthwise(n: int, channels: int, size: int, taps: tuple[int, int], **more: Any) -> Problem:
        padding = (taps[0] // 2, taps[1] // 2)
        return Case(
            x=(n, channels, size, size), w=(channels, 1, *taps), groups=channels, padding=padding,
            dtype="float16", x_format=LAST, **more,
        ).problem  # fmt: skip

    configs = catalog.kernel("conv2d.direct").configs
    many, few = (configs(depthwise(n, 384, 14, (7, 7)))[0] for n in (128, 1))
    assert (many["rows"], many["columns"]) == (14, 7)
    assert (few["rows"], few["lines"]) == (1, 0)
    first = configs(depthwise(128, 72, 56, (3, 3)))[0]
    assert first["values"] * first["vectors"] == 72  # rows of 72 do not begin at sectors
    first = configs(depthwise(128, 144, 56, (3, 3)))[0]
    assert 144 % (first["values"] * first["vectors"]) == 0
    assert first["values"] * first["vectors"] % 16 == 0  # whole sectors
    for taps in ((1, 1), (3, 3), (5, 5), (7, 7), (49, 1), (1, 49)):
        for channels in (95, 96):
            for more in ({}, {"stride": 2}, {"dilation": 2}):
                found = configs(depthwise(4, channels, 130, taps, **more))
                assert 1 <= len(found) <= channelwise.MOST_CONFIGS + 1
                assert len({tuple(one.values()) for one in found}) == len(found)
                for one in found:
                    assert channels % (one["values"] * one["vectors"]) == 0


# ------------------------------------------------------------------ compiled, where no GPU is
MISSION = Case(x=(1, 128, 128, 128), w=(128, 128, 3, 3), padding=1)
LAYER = Case(x=(128, 64, 56, 56), w=(64, 64, 3, 3), padding=1, x_format=LAST, dtype="float16")
STEM = Case(
    x=(128, 3, 224, 224), w=(64, 3, 7, 7), stride=2, padding=3, x_format=LAST, dtype="float16",
    bias="float32", activation="relu",
)  # fmt: skip
DEPTHWISE = Case(x=(8, 144, 56, 56), w=(144, 1, 3, 3), groups=144, padding=1, x_format=LAST,
                 dtype="float16")  # fmt: skip
CONVNEXT = Case(x=(128, 384, 14, 14), w=(384, 1, 7, 7), groups=384, padding=3, x_format=LAST,
                dtype="float16", bias="float16")  # fmt: skip
MOBILENET = Case(x=(128, 72, 56, 56), w=(72, 1, 5, 5), groups=72, padding=2, stride=2,
                 x_format=LAST, dtype="float16", bias="float16", activation="relu")  # fmt: skip
EFFICIENTNET = Case(x=(1, 480, 14, 14), w=(480, 1, 5, 5), groups=480, padding=2, x_format=LAST,
                    dtype="float16", bias="float16", activation="silu")  # fmt: skip
COMPILED = {
    "gemm float32": ("gemm", MISSION),
    "implicit_gemm float32": ("implicit_gemm", MISSION),
    "implicit_precomp_gemm float32": ("implicit_precomp_gemm", MISSION),
    "implicit_gemm float32 last": ("implicit_gemm", replace(MISSION, x_format=LAST)),
    "gemm float16": ("gemm", LAYER),
    "implicit_gemm float16": ("implicit_gemm", LAYER),
    "implicit_gemm float16 first": ("implicit_gemm", replace(LAYER, x_format="contiguous")),
    "implicit_precomp_gemm bfloat16": ("implicit_precomp_gemm", replace(LAYER, dtype="bfloat16")),
    "implicit_gemm tf32": ("implicit_gemm", replace(LAYER, dtype="float32", math="tf32")),
    "implicit_gemm int8": ("implicit_gemm", replace(LAYER, dtype="int8", scale=True)),
    "implicit_gemm int8 factor": (
        "implicit_gemm",
        replace(LAYER, dtype="int8", scale=True, activation="silu", gamma=3.0),
    ),
    "implicit_gemm fp8": ("implicit_gemm", replace(LAYER, dtype="float8_e4m3fn")),
    "direct depthwise": ("direct", DEPTHWISE),
    "direct depthwise first": ("direct", replace(DEPTHWISE, x_format="contiguous")),
    "direct depthwise 7": ("direct", CONVNEXT),
    "direct depthwise 5 stride 2": ("direct", MOBILENET),
    "direct depthwise 5 one image": ("direct", EFFICIENTNET),
    "direct depthwise 5 images": ("direct", replace(EFFICIENTNET, x=(128, 480, 14, 14))),
    "direct depthwise silu": ("direct", replace(DEPTHWISE, activation="silu", bias="float32")),
    "direct depthwise gelu": ("direct", replace(DEPTHWISE, activation="gelu")),
    "direct depthwise int8": ("direct", replace(DEPTHWISE, dtype="int8", scale=True)),
    "direct depthwise argument": ("direct", replace(DEPTHWISE, stride=2, constant=False)),
    "direct float32": ("direct", MISSION),
    "stem float16": ("direct.sm90", STEM),
    "stem float16 first": ("direct.sm90", replace(STEM, x_format="contiguous")),
    "stem int8": ("direct.sm90", replace(STEM, dtype="int8", scale=True)),
    "stem tf32": ("direct.sm90", replace(STEM, dtype="float32", math="tf32")),
    "stem factor": ("direct.sm90", replace(STEM, activation="silu", gamma=3.0)),
    "stem quantized": ("direct.sm90", replace(STEM, out="int8", bias="float16", gamma=3.0)),
    "stem quantized bfloat16": (
        "direct.sm90",
        replace(STEM, dtype="bfloat16", out="int8", bias="bfloat16", gamma=3.0),
    ),
    "stem quantized fp8": ("direct.sm90", replace(STEM, out="float8_e4m3fn", gamma=3.0)),
    "stem argument": ("direct.sm90", replace(STEM, constant=False)),
}


def compiled_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Names, and calls that launch, for ``compile_all``."""
    for name, (algorithm, case) in COMPILED.items():
        yield name, lambda algorithm=algorithm, case=case: launch_once(algorithm, case)
    yield "layers", launch_layers


def launch_layers() -> None:
    """Layers that differ in nothing but sizes share a kernel, which is compiled once."""
    shape, layers = (2, 4, 1), ((128, 72, 56, 33), (1, 480, 14, 1), (3, 16, 112, 7))
    with watching() as launches:
        for n, channels, size, rows in layers:
            case = replace(DEPTHWISE, x=(n, channels, size, size + 1), w=(channels, 1, 3, 3),
                           groups=channels)  # fmt: skip
            launch_once("direct", case, strip_of(case, shape, rows) | {"warps": 4})
    assert len({one.compiled.hash for one in launches}) == 1, "compiled for each layer"


def launch_once(algorithm: str, case: Case, config: dict[str, Any] | None = None) -> None:
    problem = case.problem
    kernel = row(algorithm, case)
    assert kernel.load().fits(problem) is None
    config = config or kernel.configs(problem)[0]

    def empty(meta: TensorMeta) -> torch.Tensor:
        made = torch.empty(meta.shape, dtype=getattr(torch, meta.dtype))
        return made.contiguous(memory_format=MEMORY_FORMATS[meta.format])

    operands = {i: empty(m) for i, m in enumerate(problem.inputs) if m is not None}
    constants = {i: operands.pop(i) for i in problem.constant}
    nbytes = kernel.workspace_bytes(problem, config)
    workspace = {"workspace": torch.empty(nbytes, dtype=torch.uint8)} if nbytes else {}
    call = kernel.load().bind(problem, constants, **config)
    call(*operands.values(), out=empty(problem.output), **workspace)


@pytest.fixture(scope="module")
def compiled() -> dict[str, list[dict[str, Any]]]:
    return compile_all("tests.kernels.conv.test_portable:compiled_cases")


def test_nothing_spills(compiled: dict[str, list[dict[str, Any]]]) -> None:
    for name in COMPILED:
        for kernel in compiled[name]:
            assert kernel["spilled_bytes"] == 0, (name, kernel)
            assert kernel["opcodes"].get("LDL", 0) == 0, (name, kernel)
            assert kernel["shared_bytes"] <= 227 * 1024


@pytest.mark.parametrize(
    ("name", "opcode", "least"),
    [
        ("implicit_gemm float32", "FFMA", 1024),
        ("implicit_precomp_gemm float32", "FFMA", 1024),
        ("gemm float32", "FFMA", 1024),
        ("direct depthwise 7", "FFMA", 7 * 49),  # columns × taps: of a step
        ("gemm float16", "HGMMA", 4),
        ("implicit_gemm float16", "HGMMA", 4),
        ("implicit_gemm tf32", "HGMMA", 4),
        ("implicit_gemm int8", "IGMMA", 2),
        ("implicit_gemm fp8", "QGMMA", 2),
        ("stem float16", "HGMMA", 11),  # 7 runs of three granules, two a product
        ("stem float16", "UTMASTG", 1),
        ("stem quantized", "HGMMA", 11),
        ("stem quantized", "UTMASTG", 1),
        ("stem int8", "IGMMA", 7),
        ("stem tf32", "HGMMA", 21),
    ],
)
def test_the_right_units_multiply(
    compiled: dict[str, list[dict[str, Any]]], name: str, opcode: str, least: int
) -> None:
    assert compiled[name][-1]["opcodes"].get(opcode, 0) >= least
