"""Portable convolutions and first layers on a Hopper GPU: right on every shape they take."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tessella.core.architectures import has
from tessella.kernels import catalog
from tests.support.gpu_target import TARGET
from tests.support.problems.convolutions import Case, check, draw, right, run
from tests.support.problems.portable_convolutions import (
    ALGORITHMS,
    CASES,
    DEPTHWISE_CASES,
    LAST,
    row,
    strip_of,
)
from tests.support.problems.portable_convolutions import SHAPES as DEPTHWISE_SHAPES

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)

DTYPES = ("float32", "tf32", "float16", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2")
SHAPES = {
    "layer": Case(x=(2, 64, 14, 15), w=(72, 64, 3, 3), padding=1, bias="float32"),
    "few": Case(x=(1, 128, 7, 7), w=(96, 128, 3, 3), padding=1, residual=True, activation="relu"),
    "strided": Case(x=(3, 32, 17, 13), w=(40, 32, 3, 3), stride=2, padding=1, scale=True),
    "dilated": Case(x=(2, 48, 19, 20), w=(33, 48, 3, 3), dilation=2, activation="gelu"),
    "wide filter": Case(x=(1, 16, 40, 36), w=(24, 16, 11, 11), padding=5),
    "pointwise": Case(x=(2, 80, 9, 9), w=(130, 80, 1, 1), bias="float32", residual=True),
    "few channels": Case(x=(2, 3, 33, 35), w=(64, 3, 7, 7), stride=2, padding=3, activation="relu"),
    "groups": Case(x=(2, 64, 9, 11), w=(64, 16, 3, 3), groups=4, padding=1),
    "depthwise": Case(x=(2, 72, 21, 19), w=(72, 1, 3, 3), groups=72, padding=1, activation="relu6"),
    "depthwise 5": Case(x=(2, 40, 21, 19), w=(80, 1, 5, 5), groups=40, padding=2, stride=2),
    "depthwise stride 2": Case(x=(2, 72, 21, 19), w=(72, 1, 5, 5), groups=72, padding=2, stride=2),
    "depthwise 7": Case(x=(3, 72, 14, 15), w=(72, 1, 7, 7), groups=72, padding=3, bias="float32"),
}


def typed(case: Case, dtype: str) -> Case:
    if dtype == "tf32":
        return replace(case, dtype="float32", math="tf32")
    out = "float16" if dtype.startswith("float8") else None
    return replace(case, dtype=dtype, out=out, scale=case.scale or dtype == "int8")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", CASES)
def test_cases_of_the_interpreter(algorithm: str, name: str) -> None:
    case = CASES[name]
    kernel = row(algorithm, case)
    if kernel.load().fits(case.problem) is None:
        check(kernel, case, device="cuda")
        check(kernel, case, device="cuda", integers=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_element_type(algorithm: str, dtype: str) -> None:
    for name, case in SHAPES.items():
        # one by one loads of small types in NCHW are code of their own
        both = name in ("layer", "few channels", "depthwise")
        for layout in (LAST, "contiguous") if both else (LAST,):
            varied = replace(typed(case, dtype), x_format=layout)
            kernel = row(algorithm, varied)
            if kernel.load().fits(varied.problem) is None:
                for integers in (False, True):
                    try:
                        check(kernel, varied, device="cuda", integers=integers, seed=3)
                    except AssertionError as error:
                        raise AssertionError(f"{name} {layout} integers={integers}") from error


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_configuration(algorithm: str) -> None:
    """Those that find would try, of a constant weight and of one that is an argument."""
    for case in (SHAPES["few"], SHAPES["depthwise"], SHAPES["depthwise 5"]):
        for constant in (True, False):
            varied = replace(case, dtype="float16", x_format=LAST, constant=constant)
            kernel = row(algorithm, varied)
            for config in kernel.configs(varied.problem):
                check(kernel, varied, config, device="cuda", integers=True)


@pytest.mark.parametrize("name", DEPTHWISE_CASES)
def test_depthwise_cases_of_the_interpreter(name: str) -> None:
    case = DEPTHWISE_CASES[name]
    for rows in (1, 3, 99):
        for lines in (0, 1, 2):
            config = strip_of(case, (2, 4, lines), rows)
            check(row("direct", case), case, config, device="cuda", integers=True)


@pytest.mark.parametrize("shape", DEPTHWISE_SHAPES)
@pytest.mark.parametrize("name", ["depthwise", "depthwise 7", "depthwise stride 2"])
def test_depthwise_strips(name: str, shape: tuple[int, int, int]) -> None:
    """Every kernel, with what an activation adds, in strips of a row, of some and of all."""
    for activation, rows in (("silu", 1), ("relu", 4), ("hardswish", 99)):
        case = replace(
            SHAPES[name], dtype="float16", x_format=LAST, activation=activation, residual=True
        )
        config = strip_of(case, shape, rows) | {"warps": 4}
        check(row("direct", case), case, config, device="cuda")


FIRST = {
    "resnet": Case(x=(2, 3, 32, 34), w=(64, 3, 7, 7), stride=2, padding=3, activation="relu"),
    "odd image": Case(x=(3, 3, 33, 31), w=(64, 3, 7, 7), stride=2, padding=3, residual=True),
    "vgg": Case(x=(2, 3, 19, 23), w=(64, 3, 3, 3), padding=1, bias="float32"),
    "alexnet": Case(x=(2, 3, 67, 63), w=(96, 3, 11, 11), stride=4, padding=2, bias="float32"),
    "lenet": Case(x=(5, 1, 28, 28), w=(20, 1, 5, 5), bias="float32"),
    "four channels": Case(
        x=(2, 4, 32, 34), w=(64, 4, 5, 5), padding=2, stride=2, activation="silu"
    ),
    "many filters": Case(x=(1, 3, 16, 16), w=(200, 3, 3, 3), padding=1),
    "rows dilated": Case(x=(1, 2, 16, 16), w=(8, 2, 3, 3), dilation=(2, 1), padding=(2, 0)),
    "one pixel": Case(x=(1, 2, 1, 1), w=(8, 2, 3, 3), padding=1),
    "empty": Case(x=(0, 3, 8, 8), w=(4, 3, 3, 3)),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "tf32", "int8"])
@pytest.mark.parametrize("name", FIRST)
def test_first_layers(name: str, dtype: str) -> None:
    kernel = catalog.kernel("conv2d.direct.sm90")
    formats = (("contiguous", "contiguous"), (LAST, LAST), (LAST, "contiguous"))
    for x_format, out_format in formats:
        for constant in (True, False):
            case = replace(
                typed(FIRST[name], dtype),
                x_format=x_format,
                out_format=out_format,
                constant=constant,
            )
            if name == "many filters" and dtype == "int8":
                case = replace(case, out="float16")
            refused = kernel.load().fits(case.problem)
            if refused is not None:
                assert (name, dtype) == ("alexnet", "tf32"), refused
                continue
            configs = kernel.configs(case.problem)
            every = constant and x_format == out_format == LAST and name in ("resnet", "alexnet")
            for config in configs if every else configs[:1]:
                check(kernel, case, config, device="cuda")
                check(kernel, case, config, device="cuda", integers=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "tf32", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("constant", [True, False])
def test_pointwise(dtype: str, constant: bool) -> None:
    kernel = catalog.kernel("conv2d.pointwise.sm90")
    for x, w in (((1, 64, 7, 7), (96, 64, 1, 1)), ((3, 80, 9, 10), (272, 80, 1, 1))):
        case = Case(x=x, w=w, bias="float32", residual=dtype[:6] != "float8", activation="relu")
        case = replace(typed(case, dtype), x_format=LAST, constant=constant)
        assert kernel.load().fits(case.problem) is None
        for config in kernel.configs(case.problem)[::3]:
            check(kernel, case, config, device="cuda")
            check(kernel, case, config, device="cuda", integers=True)


def test_what_is_beside_an_image_is_no_part_of_a_sum() -> None:
    """Infinity in one pixel reaches the results that read it, and no others."""
    case = Case(x=(1, 3, 20, 20), w=(8, 3, 3, 3), padding=1, x_format=LAST, dtype="float16")
    for name in (*(["direct.sm90"] if has(TARGET, "tma") else []), *ALGORITHMS):
        operands = draw(case, "cuda")
        operands[0].fill_(1.0)[0, :, 9, 5] = torch.inf
        operands[1].fill_(1.0)
        made = run(row(name, case), case, operands)
        assert int(made.isinf().sum()) == 3 * 3 * 8, name
        assert int(made.isnan().sum()) == 0, name


@pytest.mark.parametrize(
    ("algorithm", "case"),
    [*((algorithm, FIRST["resnet"]) for algorithm in (*ALGORITHMS, "direct.sm90")),
     ("direct", SHAPES["depthwise"])],
)  # fmt: skip
def test_misaligned(algorithm: str, case: Case) -> None:
    """Tensors that begin at an odd element of their memory."""
    case = replace(case, x_format=LAST, dtype="float16")
    problem, kernel = case.problem, row(algorithm, case)
    operands = draw(case, "cuda")
    config = kernel.configs(problem)[0]

    def shifted(t: torch.Tensor) -> torch.Tensor:
        memory = torch.full((t.numel() + 2,), 77.0, dtype=t.dtype, device=t.device)
        return memory.as_strided(t.shape, t.stride(), 1).copy_(t)

    out = shifted(problem.output.empty(operands[0].device))
    nbytes = kernel.workspace_bytes(problem, config)
    workspace = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    call = kernel.load().bind(problem, {1: operands[1]}, **config)
    made = call(shifted(operands[0]), out=out, **{"workspace": workspace} if nbytes else {})
    expected = right(case, operands)
    assert float((made - expected).abs().max() / expected.abs().max()) < 2e-3


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_same_every_time(algorithm: str) -> None:
    case = replace(SHAPES["few"], dtype="float16", x_format=LAST)
    operands = draw(case, "cuda")
    first = run(row(algorithm, case), case, operands)
    for _ in range(5):
        assert torch.equal(first, run(row(algorithm, case), case, operands))


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "direct.sm90"])
def test_runs_in_a_graph(algorithm: str) -> None:
    """Captured once, with the weight as an argument, replayed on new values."""
    case = replace(FIRST["resnet"], dtype="float16", x_format=LAST, constant=False)
    problem, kernel = case.problem, row(algorithm, case)
    config = kernel.configs(problem)[0]
    x, w = (t for t in draw(case, "cuda") if t is not None)
    nbytes = kernel.workspace_bytes(problem, config)
    workspace = {"workspace": torch.empty(nbytes, dtype=torch.uint8, device="cuda")}
    out = problem.output.empty(x.device)
    call = kernel.load().bind(problem, {}, **config)
    call(x, w, out=out, **workspace if nbytes else {})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(x, w, out=out, **workspace if nbytes else {})
    x.copy_(torch.randn_like(x))
    w.copy_(torch.randn_like(w))
    graph.replay()
    again = torch.relu(torch.conv2d(x.double(), w.double(), None, 2, 3))
    assert float((out - again).abs().max() / again.abs().max()) < 2e-3
