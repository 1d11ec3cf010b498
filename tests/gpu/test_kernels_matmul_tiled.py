"""Portable and few-row matrix products, and the libraries', on a GPU against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tessella.device.float32_math import float32_math
from tessella.kernels.gemm import aten, cublaslt, fma_sm90, skinny, skinny_sm90, tiled
from tests.support.problems.products import Case, assert_exact, assert_right, draw, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

FLOATS = ("float32", "float16", "bfloat16")
FP8 = ("float8_e4m3fn", "float8_e5m2")
FULL: dict[str, Any] = {"scale": True, "activation": "silu", "alpha": 0.5, "beta": -2.0}


def outs(dtype: str) -> tuple[str, ...]:
    """Types of a result."""
    if dtype == "int8":
        return ("int32", "int8")
    return ("bfloat16", "float8_e4m3fn") if dtype in FP8 else (dtype,)


def every_type(m: int, n: int, k: int, **changes: Any) -> list[Case]:
    """Every type, plain or with the whole epilogue."""
    made = []
    for i, dtype in enumerate((*FLOATS, "int8", *FP8)):
        for j, out in enumerate(outs(dtype)):
            full = (i + j) % 2 and out != "int32"
            whole = {"bias": "float32", "residual": "float16", **FULL} if full else {}
            made.append(Case(m=m, n=n, k=k, dtype=dtype, out=out, **whole, **changes))
    return made


def one_config(module: Any, problem: Any) -> dict[str, Any]:
    """One of the configurations, another for other problems: every one costs a compilation."""
    configs = module.configs(problem)
    return configs[(sum(problem.output.shape) + len(problem.output.dtype)) % len(configs)]


def name(case: Case) -> str:
    return f"{case.op}-{case.m}x{case.n}x{case.k}-{case.dtype}-{case.out}-{case.activation}"


REFUSED = {
    *((skinny_sm90, dtype) for dtype in ("float32", "int8", *FP8)),
    *((fma_sm90, dtype) for dtype in ("float16", "bfloat16", "int8", *FP8)),
}
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


@pytest.mark.parametrize("case", [*every_type(33, 70, 45), *every_type(256, 384, 512), *STRANGE],
                         ids=name)  # fmt: skip
def test_tiled(case: Case) -> None:
    config = one_config(tiled, draw(case)[0])
    assert_right(*run(tiled, case, "cuda", config=config), case)


@pytest.mark.parametrize("case", [
    Case(m=33, n=70, k=45, dtype="float32"),
    Case(m=260, n=384, k=512, dtype="float32", bias="float32", residual="float16", **FULL),
    Case(m=65, n=3, k=100, dtype="float32", op="matmul", batch=(3,), shared=False),
    Case(m=64, n=260, k=96, dtype="float32", op="matmul", transpose_a=True),
    Case(m=64, n=260, k=96, dtype="float32", op="matmul", batch=(3,), strided=True),
    Case(m=5, n=0, k=3, dtype="float32"),
    Case(m=5, n=7, k=0, dtype="float32", bias="float16", out="bfloat16"),
], ids=name)  # fmt: skip
def test_fma(case: Case) -> None:
    for config in fma_sm90.configs(draw(case)[0]):
        assert_right(*run(fma_sm90, case, "cuda", config=config), case)


@pytest.mark.parametrize("case", every_type(40, 56, 96), ids=name)
@pytest.mark.parametrize("module", [tiled, skinny, skinny_sm90, fma_sm90],
                         ids=["tiled", "skinny", "skinny_sm90", "fma"])  # fmt: skip
def test_small_integers_are_exact(module: Any, case: Case) -> None:
    exact = replace(case, activation="relu" if case.activation else None)
    problem, *_ = draw(exact)
    if module.fits(problem) is not None:
        assert (module, case.dtype) in REFUSED
        return
    config = one_config(module, problem)
    assert_exact(*run(module, exact, "cuda", integers=True, config=config))


@pytest.mark.parametrize("case", [
    *every_type(3, 70, 45), *every_type(64, 200, 4096), Case(m=1, n=1000, k=2048),
    Case(m=16, n=512, k=1024, bias="float16"), Case(m=33, n=1, k=17), Case(m=0, n=4, k=4),
    Case(m=3, n=70, k=64, op="matmul"), Case(m=3, n=70, k=64, op="matmul", strided=True),
    Case(m=3, n=70, k=64, op="matmul", transpose_b=True, dtype="int8", out="int32"),
], ids=name)  # fmt: skip
@pytest.mark.parametrize("constant", [(), (1,)], ids=["", "constant"])
@pytest.mark.parametrize("module", [skinny, skinny_sm90], ids=["skinny", "sm90"])
def test_skinny(module: Any, constant: tuple[int, ...], case: Case) -> None:
    problem, *_ = draw(case)
    reason = module.fits(replace(problem, constant=constant))
    if reason is not None:
        pytest.skip(reason)
    config = one_config(module, problem)
    assert_right(*run(module, case, "cuda", config=config, constant=constant), case)


@pytest.mark.parametrize("module", [aten, cublaslt], ids=["aten", "cublaslt"])
@pytest.mark.parametrize("case", [
    *every_type(48, 64, 96), *STRANGE,
    Case(m=48, n=64, k=96, dtype="int8", out="float16", scale=True),
    Case(m=48, n=64, k=96, dtype="float8_e4m3fn", out="bfloat16", bias="bfloat16", alpha=0.5),
    Case(m=48, n=64, k=96, bias="float16", activation="relu"),
    Case(m=48, n=64, k=96, bias="float16", activation="gelu_tanh", op="matmul", transpose_a=True),
], ids=name)  # fmt: skip
def test_libraries(module: Any, case: Case) -> None:
    reason = module.fits(draw(case, "cuda")[0])
    if reason is not None:
        pytest.skip(reason)
    with float32_math(case.math):
        assert_right(*run(module, case, "cuda"), case)


@pytest.mark.parametrize("module", [tiled, skinny, skinny_sm90],
                         ids=["tiled", "skinny", "sm90"])  # fmt: skip
def test_the_same_every_time(module: Any) -> None:
    case = Case(m=64, n=1024, k=4096)
    for config in module.configs(draw(case)[0])[:3]:
        first, _ = run(module, case, "cuda", config=config)
        again, _ = run(module, case, "cuda", config=config)
        assert torch.equal(first, again)


@pytest.mark.parametrize("module", [skinny, skinny_sm90], ids=["skinny", "sm90"])
def test_a_chain_in_a_graph(module: Any) -> None:
    """Each product asks for its weights before its input is there, and must wait for that."""
    case = Case(m=8, n=1024, k=1024, activation="relu")
    problem, (x, *_), out = draw(case, "cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    weights = torch.randn(24, 1024, 1024, generator=generator, device="cuda").half() / 24
    for config in module.configs(problem)[:4]:
        needed = module.workspace_bytes(problem, **config)
        scratch = torch.empty(needed, dtype=torch.uint8, device="cuda")
        buffers = [torch.empty_like(out) for _ in weights]
        calls = [module.bind(problem, {1: w}, **config) for w in weights]

        def run_all(calls: Any = calls, buffers: Any = buffers, scratch: Any = scratch) -> None:
            before = x
            for call, made in zip(calls, buffers, strict=True):
                before = call(before, out=made, **({"workspace": scratch} if len(scratch) else {}))

        run_all()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run_all()
        for _ in range(5):
            for made in buffers:
                made.fill_(77)
            graph.replay()
            before = x
            for w, made in zip(weights, buffers, strict=True):
                right = (before.double() @ w.double().T).relu()
                error = (made.double() - right).abs().max() / right.abs().max()
                assert error < 1e-3, config
                before = made
