"""Matrix products beside cuBLAS, cuBLASLt and cuSPARSELt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F

from benchmarks.cases.case import Case, Peer, best, drawn, meta, operand
from tessella.kernels.sparse.two_four import TWO_FOUR
from tessella.operations import problems

GEMMS = (
    (1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192),
    (16384, 16384, 16384), (4096, 1024, 16384), (16384, 4096, 1024), (8192, 1024, 4096),
    (1024, 16384, 4096), (2048, 4096, 8192),
)  # fmt: skip


def plain(dtype: str) -> Iterator[Case]:
    """Product of x [M, K] and weight [N, K] transposed, as in a linear layer."""
    for m, n, k in GEMMS:
        yield Case(
            family=f"gemm {dtype}",
            name=f"{m}x{n}x{k}",
            problem=problems.linear(meta(dtype, m, k), meta(dtype, n, k)),
            peers={"cublas": lambda x, w: torch.mm(x, w.t())},
        )


def fp8() -> Iterator[Case]:
    one = torch.ones((), device="cuda")
    for fast in (True, False):

        def scaled(x: torch.Tensor, w: torch.Tensor, fast: bool = fast) -> torch.Tensor:
            return torch._scaled_mm(
                x, w.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast
            )

        for m, n, k in GEMMS:
            dtype = "float8_e4m3fn"
            yield Case(
                family="gemm fp8 " + ("fast" if fast else "accurate"),
                name=f"{m}x{n}x{k}",
                problem=problems.linear(
                    meta(dtype, m, k),
                    meta(dtype, n, k),
                    out_dtype="bfloat16",
                    fast_accumulation=fast,
                ),
                peers={"cublaslt": scaled},
            )


def int8() -> Iterator[Case]:
    for m, n, k in GEMMS:
        yield Case(
            family="gemm int8",
            name=f"{m}x{n}x{k}",
            problem=problems.linear(meta("int8", m, k), meta("int8", n, k)),
            peers={"cublaslt": lambda x, w: torch._int_mm(x, w.t())},
        )


def fused() -> Iterator[Case]:
    for m, n, k in GEMMS:
        x, w, b = (meta("float16", *s) for s in ((m, k), (n, k), (n,)))
        yield Case(
            family="gemm bias gelu",
            name=f"{m}x{n}x{k}",
            problem=problems.linear(x, w, b, activation="gelu_tanh"),
            peers={
                "cublaslt + gelu": lambda x, w, b: F.gelu(
                    torch.addmm(b, x, w.t()), approximate="tanh"
                )
            },
            others={
                "cublaslt fused": lambda x, w, b: torch.ops.aten._addmm_activation(
                    b, x, w.t(), use_gelu=True
                )
            },
        )
    for m, n, k in GEMMS:
        x, w, b = (meta("float16", *s) for s in ((m, k), (n, k), (n,)))
        yield Case(
            family="gemm bias residual relu",
            name=f"{m}x{n}x{k}",
            problem=problems.linear(x, w, b, meta("float16", m, n), activation="relu"),
            peers={
                "cublaslt + add + relu": lambda x, w, b, r: torch.addmm(b, x, w.t()).add_(r).relu_()
            },
        )


def thin() -> Iterator[Case]:
    for n, k in ((4096, 4096), (4096, 16384), (16384, 4096), (11008, 4096), (1024, 1024)):
        for m in (1, 4, 16, 64):
            yield Case(
                family="gemm M <= 64",
                name=f"{m}x{n}x{k}",
                problem=problems.linear(
                    meta("float16", m, k), meta("float16", n, k), constant=(1,)
                ),
                peers={"cublas": lambda x, w: torch.mm(x, w.t())},
                chained=True,
            )


def sparse(dtype: str) -> Iterator[Case]:
    """2:4 weights, beside a dense weight of the same shape and cuSPARSELt with its search."""
    dense: Peer = torch._int_mm if dtype == "int8" else torch.mm
    for m, n, k in GEMMS:
        problem = problems.linear(meta(dtype, m, k), meta(dtype, n, k), constant=(1,))
        problem = replace(problem, attrs={**problem.attrs, "sparsity": TWO_FOUR})
        weight = drawn(operand(problem, 1))
        yield Case(
            family=f"gemm 2:4 {dtype}",
            name=f"{m}x{n}x{k}",
            problem=problem,
            algorithms=("sparse",),
            peers={
                "cublas, dense": lambda x, w=weight: dense(x, w.t()),
                "cusparselt": best(problem, ("cusparselt",)),
            },
        )


def float32() -> Iterator[Case]:
    for math_name in ("ieee", "tf32"):
        for m, n, k in ((1024, 1024, 1024), (4096, 4096, 4096), (8192, 8192, 8192)):
            yield Case(
                family=f"gemm float32 {math_name}",
                name=f"{m}x{n}x{k}",
                problem=problems.linear(
                    meta("float32", m, k), meta("float32", n, k), math=math_name
                ),
                peers={"cublas": lambda x, w: torch.mm(x, w.t())},
            )
