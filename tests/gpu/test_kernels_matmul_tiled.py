"""Portable and few-row matrix products, and the libraries', on a GPU against float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tessella.kernels.float32_math import float32_math
from tessella.kernels.matmul import aten, cublaslt, skinny, tiled
from tests.kernels.products import Case, assert_exact, assert_right, draw, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

FLOATS = ("float32", "float16", "bfloat16")
FP8 = ("float8_e4m3fn", "float8_e5m2")
FULL: dict[str, Any] = {"scale": True, "activation": "silu", "alpha": 0.5, "beta": -2.0}


def outs(dtype: str) -> tuple[str, ...]:
    """Types of a result."""
    if dtype == "int8":
        return ("int32", "int8", "bfloat16")
    return ("bfloat16", "float32", "float8_e4m3fn") if dtype in FP8 else (dtype,)


def cases(sizes: list[tuple[int, int, int]]) -> list[Case]:
    """Every type, plain and with the whole epilogue."""
    made = []
    for (m, n, k), dtype in itertools.product(sizes, (*FLOATS, "int8", *FP8)):
        for out in outs(dtype):
            same = {"m": m, "n": n, "k": k, "dtype": dtype, "out": out}
            made.append(Case(**same))
            if out != "int32":
                made.append(Case(**same, bias="float32", residual="float16", **FULL))
    return made


def some(module: Any, problem: Any, count: int = 2) -> list[dict[str, Any]]:
    """A few of the configurations, others for other problems: every one costs a compilation."""
    configs = module.configs(problem)
    first = sum(problem.output.shape) + len(problem.output.dtype)
    return [configs[(first + i) % len(configs)] for i in range(min(count, len(configs)))]


def name(case: Case) -> str:
    return f"{case.op}-{case.m}x{case.n}x{case.k}-{case.dtype}-{case.out}-{case.activation}"


ODD = [(33, 70, 45), (1, 1, 1), (256, 384, 512)]
STRANGE = [
    Case(m=0, n=5, k=7),
    Case(m=5, n=7, k=0, bias="float16"),
    Case(m=65, n=3, k=100, op="matmul", batch=(3,), shared=False, transpose_a=True),
    Case(m=65, n=3, k=100, op="matmul", batch=(3,), transpose_b=True, strided=True),
    Case(m=17, n=40, k=33, op="matmul", batch=(2, 3), shared=False, residual="float16", beta=0.5),
    Case(m=17, n=40, k=33, op="matmul", dtype="int8", out="int32", strided=True),
    Case(m=96, n=80, k=96, op="matmul", dtype="int8", out="int32", transpose_a=True),
    Case(m=96, n=80, k=96, op="matmul", dtype="float8_e4m3fn", out="float16", transpose_a=True),
    Case(m=130, n=257, k=300, dtype="float32", math="tf32", bias="float32"),
    Case(m=130, n=257, k=300, dtype="bfloat16", strided=True, residual="bfloat16"),
]


@pytest.mark.parametrize("case", [*cases(ODD), *STRANGE], ids=name)
def test_tiled(case: Case) -> None:
    problem, *_ = draw(case)
    for i, config in enumerate(some(tiled, problem)):
        made, right = run(tiled, case, "cuda", seed=i, config=config)
        assert_right(made, right, case)


@pytest.mark.parametrize("case", cases([(40, 56, 96)]), ids=name)
@pytest.mark.parametrize("module", [tiled, skinny], ids=["tiled", "skinny"])
def test_small_integers_are_exact(module: Any, case: Case) -> None:
    exact = Case(**{**vars(case), "activation": "relu" if case.activation else None})
    problem, *_ = draw(exact)
    for config in some(module, problem, 3):
        assert_exact(*run(module, exact, "cuda", integers=True, config=config))


FEW = [(1, 1000, 2048), (3, 70, 45), (16, 512, 1024), (64, 200, 4096), (33, 1, 17)]


@pytest.mark.parametrize("case", cases(FEW), ids=name)
def test_skinny(case: Case) -> None:
    problem, *_ = draw(case)
    for i, config in enumerate(some(skinny, problem)):
        made, right = run(skinny, case, "cuda", seed=i, config=config, constant=(1,))
        assert_right(made, right, case)


@pytest.mark.parametrize("module", [aten, cublaslt], ids=["aten", "cublaslt"])
@pytest.mark.parametrize("case", [*cases([(48, 64, 96)]), *STRANGE], ids=name)
def test_libraries(module: Any, case: Case) -> None:
    problem, *_ = draw(case, "cuda")
    reason = module.fits(problem)
    if reason is not None:
        pytest.skip(reason)
    with float32_math(case.math):
        made, right = run(module, case, "cuda")
    assert_right(made, right, case)


@pytest.mark.parametrize("module", [tiled, skinny], ids=["tiled", "skinny"])
def test_the_same_every_time(module: Any) -> None:
    case = Case(m=64, n=1024, k=4096)
    problem, *_ = draw(case)
    for config in module.configs(problem):
        first, _ = run(module, case, "cuda", config=config)
        again, _ = run(module, case, "cuda", config=config)
        assert torch.equal(first, again)


def test_in_a_graph() -> None:
    case = Case(m=8, n=512, k=2048, bias="float16", activation="gelu")
    problem, (x, w, bias, *_), out = draw(case, "cuda")
    for config in skinny.configs(problem):
        scratch = torch.empty(
            skinny.workspace_bytes(problem, **config), dtype=torch.uint8, device="cuda"
        )
        buffers = {"out": out, **({"workspace": scratch} if scratch.nbytes else {})}
        call = skinny.bind(problem, {1: w, 2: bias}, **config)
        call(x, **buffers)
        right = out.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call(x, **buffers)
        out.zero_()
        graph.replay()
        assert torch.equal(out, right)
