"""2:4 sparse layers on the GPU: ours and cuSPARSELt's against float64, whole numbers exactly."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from tessella import kernels
from tessella.kernels import catalog
from tessella.kernels.sparse import cusparselt, wgmma
from tessella.kernels.sparse.two_four import TWO_FOUR, prune_two_four
from tessella.operations.epilogue import ACTIVATIONS
from tessella.operations.problem import Problem
from tessella.search.find import SearchOptions, find
from tests.support.gpu_target import TARGET
from tests.support.problems.convolutions import Case as Convolution
from tests.support.problems.products import Case, assert_exact, assert_right, draw, run

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)

ODD = Case(m=300, n=520, k=464, sparsity=TWO_FOUR)
INT8 = replace(ODD, k=480, dtype="int8")
FULL: dict[str, Any] = {
    "bias": "float32", "residual": "float16", "scale": True, "alpha": 0.5, "beta": -2.0,
}  # fmt: skip
CASES = [
    Case(m=64, n=64, k=64, sparsity=TWO_FOUR),  # one block, and not a whole stage
    Case(m=32, n=64, k=128, sparsity=TWO_FOUR),
    Case(m=1, n=4, k=16, sparsity=TWO_FOUR),
    ODD,
    replace(ODD, m=5000, n=2052, k=208, **FULL),
    replace(ODD, m=1000, n=776, k=2000, bias="float16", activation="gelu"),
    replace(ODD, dtype="bfloat16", residual="bfloat16", bias="bfloat16"),
    replace(ODD, out="float32", batch=(3,)),
    replace(INT8, out="int32"),
    replace(INT8, out="int8", scale=True, bias="float32", residual="int8", beta=0.5),
    replace(INT8, out="float16", scale=True, activation="silu"),
    *(replace(ODD, activation=name, scale=True) for name in ACTIVATIONS),
]
LIBRARY = [
    replace(ODD, m=304, n=528, bias="float16", activation="relu"),
    replace(ODD, m=304, n=528, dtype="bfloat16", residual="bfloat16", scale=True),
    replace(INT8, m=304, n=544, out="int32"),
    replace(INT8, m=304, n=544, out="int8", scale=True, bias="float32"),
]


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_ours_agrees_with_float64(case: Case) -> None:
    assert_right(*run(wgmma, case, "cuda", constant=(1,)), case)


@pytest.mark.parametrize("case", LIBRARY, ids=repr)
def test_the_library_agrees_with_float64(case: Case) -> None:
    assert_right(*run(cusparselt, case, "cuda", constant=(1,)), case)


@pytest.mark.parametrize("case", [
    ODD,
    replace(ODD, dtype="bfloat16", out="float32"),
    replace(ODD, out="float32", **{**FULL, "residual": "float32"}),
    replace(INT8, out="int32"),
    replace(INT8, out="int8", **{**FULL, "residual": "int8"}),
], ids=repr)  # fmt: skip
@pytest.mark.parametrize("config", wgmma.TILINGS, ids=repr)
def test_whole_numbers_are_exact_in_every_tiling(case: Case, config: Any) -> None:
    assert_exact(*run(wgmma, case, "cuda", integers=True, constant=(1,), config=vars(config)))


@pytest.mark.parametrize("seed", range(30))
def test_drawn_shapes(seed: int) -> None:
    """Edges in every axis, tilings at random; two runs give the same bits."""
    rng = random.Random(seed)
    dtype = rng.choice(["float16", "bfloat16", "int8"])
    step = 32 if dtype == "int8" else 16
    case = Case(
        m=rng.randint(1, 700), n=4 * rng.randint(1, 200), k=step * rng.randint(1, 60),
        dtype=dtype, out="int32" if dtype == "int8" else "float32", sparsity=TWO_FOUR,
    )  # fmt: skip
    config = vars(rng.choice(wgmma.TILINGS))
    made, right = run(wgmma, case, "cuda", integers=True, seed=seed, constant=(1,), config=config)
    assert_exact(made, right)
    again, _ = run(wgmma, case, "cuda", integers=True, seed=seed, constant=(1,), config=config)
    assert torch.equal(made, again)


@pytest.mark.parametrize("kernel", [wgmma, cusparselt])
@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_a_convolution_by_pixels(kernel: Any, dtype: str) -> None:
    case = Convolution(
        x=(4, 64, 14, 14), w=(96, 64, 1, 1), dtype=dtype, x_format="channels_last",
        out="float32" if dtype == "float16" and kernel is wgmma else dtype, bias="float32",
        scale=dtype == "int8", activation="relu",
    )  # fmt: skip
    problem = replace(case.problem, attrs={**case.problem.attrs, "sparsity": TWO_FOUR})
    assert kernel.fits(problem) is None
    x = torch.randint(-3, 4, (4, 64, 14, 14), device="cuda").to(getattr(torch, dtype))
    x = x.contiguous(memory_format=torch.channels_last)
    weight = prune_two_four(torch.randint(-3, 4, (96, 64, 1, 1), device="cuda").to(x.dtype))
    bias = torch.randint(-3, 4, (96,), device="cuda").float()
    scale = torch.full((96,), 0.25, device="cuda")
    out = problem.output.empty(x.device)
    made = kernel.bind(problem, {1: weight})(x, bias, *([scale] if case.scale else []), out=out)
    sums = torch.einsum("nchw,kc->nkhw", x.double(), weight.double().flatten(1))
    sums = sums * 0.25 if case.scale else sums
    right = torch.relu(sums + bias.double()[:, None, None])
    right = right.round().clamp(-128, 127) if dtype == "int8" else right
    assert float((made.double() - right).abs().max()) <= (0 if kernel is wgmma else 0.5)


def sparse_and_dense(m: int, n: int, k: int, dtype: str) -> tuple[float, float]:
    """Best times in µs: of the sparse kernels, and of all others."""
    out = "int32" if dtype == "int8" else dtype
    problem, (x, weight, *_), _ = draw(
        Case(m=m, n=n, k=k, dtype=dtype, out=out, sparsity=TWO_FOUR), "cuda"
    )
    problem: Problem = replace(problem, constant=(1,))
    times: dict[bool, float] = {}
    names = {row.algorithm for row in catalog.candidates("linear", TARGET)}
    trials = find(
        problem, {1: weight}, target=TARGET, inputs=[x],
        options=SearchOptions(algorithms=names, budget_s=0.1),
    )  # fmt: skip
    for trial in trials:
        sparse = catalog.kernel(trial.kernel).sparse
        if trial.time_us is not None:
            times.setdefault(sparse, trial.time_us)
        print(f"{m}×{n}×{k} {dtype} {trial.kernel} {trial.time_us} {trial.config} {trial.refused}")
    return times[True], times[False]


@pytest.mark.parametrize("dtype", ["float16", "int8"])
@pytest.mark.parametrize("shape", [(8192, 8192, 8192), (4096, 1024, 16384), (25088, 1024, 256)])
def test_beside_dense(shape: tuple[int, int, int], dtype: str) -> None:
    """A figure to read (-s); large products must not be slower than dense ones."""
    sparse, dense = sparse_and_dense(*shape, dtype)
    print(f"{shape} {dtype}: {dense / sparse:.2f} times the best dense kernel")
    if min(shape) == 8192:
        assert sparse < dense


def test_find_shows_both() -> None:
    x = torch.randn(256, 512, device="cuda").half()
    weight = prune_two_four(torch.randn(1024, 512, device="cuda").half())
    report = kernels.find(
        "linear", x, weight, constant_weight=True, algorithms=["sparse", "cusparselt", "cublaslt"]
    )
    ran = {f.algorithm: f for f in report if f.refused is None}
    assert {"sparse", "cusparselt"} <= set(ran)
    assert 0 < ran["sparse"].registers <= 168
    assert all(f.max_rel_error is not None and f.max_rel_error < 2e-3 for f in ran.values())
