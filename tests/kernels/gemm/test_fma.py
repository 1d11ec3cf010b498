"""True float32 by fused multiply-adds: what it refuses, and what it compiles to.

Gluon is not interpreted; its numbers are checked on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tessella.kernels.gemm import fma_sm90
from tests.support.kernels.compile_only import compile_all
from tests.support.problems.products import Case, draw


@pytest.mark.parametrize(("changes", "reason"), [
    ({"dtype": "float16"}, "float32 products only"),
    ({"math": "tf32"}, "TF32 is allowed"),
    ({"out": "int8"}, "not stored as int8"),
])  # fmt: skip
def test_refusals(changes: dict[str, Any], reason: str) -> None:
    problem, *_ = draw(Case(**{"m": 4, "n": 4, "k": 4, "dtype": "float32", **changes}))
    assert reason in (fma_sm90.fits(problem) or "")


def compiled_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Every tile with rows of depth; other layouts and a whole epilogue with the first."""
    same = {"m": 256, "n": 256, "k": 256, "dtype": "float32"}
    whole = {
        "bias": "float32",
        "residual": "float16",
        "scale": True,
        "activation": "gelu",
        "gamma": 3.0,
    }
    kinds = {
        "linear": Case(**same),
        "columns": Case(**same, op="matmul", transpose_a=True),
        "mixed": Case(**same, op="matmul", **whole),
        "odd": Case(m=99, n=98, k=97, dtype="float32", strided=True),
    }
    for kind, case in kinds.items():
        problem, inputs, out = draw(case)
        configs = fma_sm90.configs(problem)
        for config in configs if kind == "linear" else configs[:2]:
            call = fma_sm90.bind(problem, {}, **config)
            given = [t for t in inputs if t is not None]
            yield f"{kind} {config}", functools.partial(call, *given, out=out)


def test_compiles_to_multiply_adds_without_spills() -> None:
    compiled = compile_all("tests.kernels.gemm.test_fma:compiled_cases")
    assert len(compiled) > 8
    for name, (one,) in compiled.items():
        assert one["spilled_bytes"] == 0, name
        assert one["opcodes"]["FFMA"] >= 512, name
        assert one["shared_bytes"] <= 227 * 1024, name
