"""Torch's and cuBLASLt's rows take the whole problem, or say why not; here as far as a CPU goes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tessella.kernels.gemm import aten, cublaslt
from tests.support.problems.products import Case, assert_exact, assert_right, draw, run

pytestmark = pytest.mark.instructions

FULL: dict[str, Any] = {
    "bias": "float32", "residual": "float32", "alpha": 0.5, "beta": -2.0, "activation": "relu",
}  # fmt: skip
SAME: dict[str, Any] = {"m": 24, "n": 16, "k": 32, "dtype": "float32"}


@pytest.mark.parametrize("transposes", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("epilogue", [
    {}, {"alpha": 0.5}, {"bias": "float32"}, {"residual": "float32", "beta": 0.5},
    {"residual": "float32", "beta": 0.0}, FULL, {**FULL, "scale": True},
], ids=lambda e: "-".join(e) or "plain")  # fmt: skip
def test_aten(
    transposes: tuple[bool, bool], batch: tuple[int, ...], shared: bool, epilogue: dict[str, Any]
) -> None:
    a, b = transposes
    case = Case(
        **SAME, op="matmul", batch=batch, shared=shared or not batch,
        transpose_a=a, transpose_b=b, **epilogue,
    )  # fmt: skip
    assert_right(*run(aten, case), case)


@pytest.mark.parametrize("constant", [(), (1,), (1, 2)])
@pytest.mark.parametrize("bias", ["float32", "bfloat16"])
def test_aten_linear(constant: tuple[int, ...], bias: str) -> None:
    case = Case(m=5, n=6, k=7, dtype="bfloat16", bias=bias, residual="float32", beta=2.0)
    assert_right(*run(aten, case, constant=constant), case)


@pytest.mark.parametrize("case", [
    Case(m=24, n=16, k=32, dtype="int8", out="int32"),
    Case(m=24, n=16, k=32, dtype="int8", out="int32", op="matmul", transpose_b=True),
    Case(m=24, n=16, k=32, dtype="int8", out="int8", scale=True, **FULL),
], ids=repr)  # fmt: skip
def test_int8_is_exact(case: Case) -> None:
    assert_exact(*run(cublaslt, case, integers=True))


def test_fused_bias_and_relu() -> None:
    case = Case(**SAME, bias="float32", activation="relu")
    assert_right(*run(cublaslt, case), case)


@pytest.mark.parametrize("residual", [None, "float16"])
def test_sums_of_fp8_beyond_float16_keep_their_scale(
    residual: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of 8 bits have numbers up to 448, whose products are scaled down behind the sum."""

    def multiplied(a: torch.Tensor, b: torch.Tensor, *scales: torch.Tensor, **how: Any) -> Any:
        """As a GPU does: oneDNN has no products of FP8 for processors with AVX2."""
        return (a.double() @ b.double() * math.prod(map(float, scales))).to(how["out_dtype"])

    monkeypatch.setattr(torch, "_scaled_mm", multiplied)
    case = Case(m=24, n=16, k=64, dtype="float8_e4m3fn", out="float16", scale=True,
                bias="float32", residual=residual)  # fmt: skip
    problem, (a, b, bias, other, scale), out = draw(case)
    a, b = ((100 * x.float()).to(x.dtype) for x in (a, b))
    made = cublaslt.bind(problem, {})(
        *[x for x in (a, b, bias, other, scale / 100) if x is not None], out=out
    )
    right = (a.double() @ b.double().mT) * (scale / 100) + bias + (0 if other is None else other)
    assert right.abs().max() < 65504 < (a.double() @ b.double().mT).abs().max()
    torch.testing.assert_close(
        made.double(), right, rtol=2e-3, atol=2e-3 * float(right.abs().max())
    )


@pytest.mark.parametrize(("module", "changes", "reason"), [
    (aten, {"dtype": "int8"}, "no int8"),
    (aten, {"out": "float16"}, "one element type"),
    (aten, {"strided": True}, "makes contiguous"),
    (cublaslt, {}, "a bias must be there"),
    (cublaslt, {"bias": "float32", "residual": "float32"}, "is not fused"),
    (cublaslt, {"bias": "float32", "alpha": 2.0}, "alpha is not fused"),
    (cublaslt, {"bias": "float32", "activation": "silu"}, "fuses relu and gelu_tanh only"),
    (cublaslt, {"dtype": "int8", "out": "int32", "m": 16}, "M > 16"),
    (cublaslt, {"dtype": "float8_e5m2", "out": "float16"}, "e5m2 with e4m3"),
    (cublaslt, {"dtype": "float8_e4m3fn", "out": "float16", "k": 33}, "multiples of 16"),
    (cublaslt, {"dtype": "float8_e4m3fn", "out": "float16", "op": "matmul"}, "K innermost"),
    (cublaslt, {"op": "matmul", "batch": (2,), "shared": False}, "not a batch"),
])  # fmt: skip
def test_refusals(module: Any, changes: dict[str, Any], reason: str) -> None:
    problem, *_ = draw(Case(**{**SAME, **changes}))
    assert reason in (module.fits(problem) or "")
