"""The product of few rows, interpreted, against float64; and compiled for the GPU."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessella.kernels.gemm import skinny, skinny_sm90
from tessella.operations.epilogue import ACTIVATIONS
from tests.support.kernels.compile_only import compile_all
from tests.support.problems.products import Case, assert_exact, assert_right, draw, run

FULL: dict[str, Any] = {
    "bias": "float32", "residual": "float16", "scale": True, "alpha": 0.5, "beta": -2.0,
}  # fmt: skip
SMALL = {"tile_n": 16, "tile_k": 32, "splits": 1, "num_warps": 4, "num_stages": 4}


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("case", [
    *(Case(m=m, n=33, k=200) for m in (1, 7, 16, 33, 64)),
    Case(m=3, n=33, k=200, dtype="float32"),
    Case(m=3, n=33, k=200, dtype="bfloat16"),
    Case(m=3, n=33, k=200, dtype="float8_e4m3fn", out="float32"),
    Case(m=3, n=33, k=200, dtype="int8", out="int8", scale=True, bias="float32"),
    Case(m=3, n=33, k=200, dtype="int8", out="int8", scale=True, activation="gelu", gamma=0.02),
    Case(m=3, n=33, k=200, dtype="int8", out="int32"),
    *(Case(m=5, n=6, k=70, activation=name, **FULL) for name in (None, *ACTIVATIONS)),
    Case(m=1, n=1, k=1),
    Case(m=0, n=5, k=70),
    Case(m=5, n=0, k=70),
    Case(m=5, n=6, k=0, bias="float16"),
    Case(m=3, n=20, k=33, op="matmul", batch=(2, 3), residual="float16", beta=0.5),
    Case(m=3, n=20, k=33, op="matmul", transpose_a=True, transpose_b=True),
    Case(m=3, n=20, k=33, op="matmul", strided=True),
], ids=repr)  # fmt: skip
def test_agrees_with_float64(case: Case, splits: int) -> None:
    assert_right(*run(skinny, case, config={**SMALL, "splits": splits}), case)


@pytest.mark.parametrize(("dtype", "out"), [
    ("float32", "float32"), ("float16", "float32"), ("bfloat16", "float32"), ("int8", "int8"),
    ("int8", "float16"), ("float8_e4m3fn", "float32"),
])  # fmt: skip
@pytest.mark.parametrize("splits", [1, 3])
def test_small_integers_are_exact(dtype: str, out: str, splits: int) -> None:
    case = Case(m=16, n=40, k=96, dtype=dtype, out=out, activation="relu", **FULL)
    for gamma in (1.0, 0.25):
        made = run(skinny, replace(case, gamma=gamma), integers=True,
                   config={**SMALL, "splits": splits})  # fmt: skip
        assert_exact(*made)


@pytest.mark.parametrize("m", [1, 12, 64])
def test_every_configuration(m: int) -> None:
    case = Case(m=m, n=80, k=600, bias="float16")
    problem, *_ = draw(case)
    configs = skinny.configs(problem)
    assert any(config["splits"] > 1 for config in configs)
    for config in configs:
        assert_right(*run(skinny, case, config=config), case)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    m=st.integers(0, 64), n=st.integers(0, 50), k=st.integers(0, 150), splits=st.integers(1, 6),
    dtype=st.sampled_from(["float32", "float16", "int8"]), strided=st.booleans(),
    transpose_a=st.booleans(), transpose_b=st.booleans(), scale=st.booleans(),
    bias=st.sampled_from([None, "float32"]), residual=st.sampled_from([None, "float16"]),
)  # fmt: skip
def test_any_problem_is_right(splits: int, **changes: Any) -> None:
    case = Case(op="matmul", out="float32", **changes)
    assert_right(*run(skinny, case, config={**SMALL, "splits": splits}), case)


@pytest.mark.parametrize(("changes", "reason"), [
    ({"m": 65}, "at most 64 rows"),
    ({"m": 4, "op": "matmul", "batch": (2,), "shared": False}, "not 2 of 4"),
    ({"m": 4, "dtype": "float64"}, "float64 products"),
])  # fmt: skip
def test_refusals(changes: dict[str, Any], reason: str) -> None:
    problem, *_ = draw(Case(n=4, k=4, **changes))
    assert reason in (skinny.fits(problem) or "")


@pytest.mark.parametrize(("changes", "reason"), [
    ({"dtype": "float32"}, "16-bit products only"),
    ({"dtype": "int8", "out": "int8"}, "16-bit products only"),
    ({"k": 68}, "multiple of 16 bytes"),
    ({"op": "matmul"}, "K innermost"),
    ({"strided": True}, "dense"),
    ({"m": 0}, "nothing to stream"),
])  # fmt: skip
def test_refusals_on_hopper(changes: dict[str, Any], reason: str) -> None:
    problem, *_ = draw(Case(**{"m": 4, "n": 64, "k": 64, **changes}))
    assert reason in (skinny_sm90.fits(problem) or "")


def compiled_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """A few configurations for one row, and for the largest number of rows; the first one for
    other results of the same products.
    """
    kinds = {
        "one": Case(m=1, n=256, k=2048, bias="float16", activation="gelu"),
        "half": Case(m=64, n=256, k=2048, residual="float16"),
        "wide": Case(m=64, n=256, k=2048, out="float32", bias="float16"),
        "int8": Case(m=64, n=256, k=2048, dtype="int8", out="int8", scale=True, bias="float32"),
        "quantized": Case(m=64, n=256, k=2048, out="int8", activation="gelu", gamma=3.0),
        "fp8": Case(m=64, n=256, k=2048, dtype="float8_e4m3fn", out="bfloat16"),
    }
    for (kind, case), module in itertools.product(kinds.items(), (skinny, skinny_sm90)):
        problem, inputs, out = draw(case)
        if module.fits(problem) is not None:
            continue
        configs = module.configs(problem)[::3]
        for config in configs if kind in ("one", "half", "int8") else configs[:1]:
            call = module.bind(problem, {1: inputs[1]}, **config)
            scratch = torch.empty(module.workspace_bytes(problem, **config), dtype=torch.uint8)
            given = [t for i, t in enumerate(inputs) if t is not None and i != 1]
            name = f"{kind} {module.__name__.rpartition('.')[2]} {config}"
            yield name, functools.partial(call, *given, out=out, workspace=scratch)


@pytest.fixture(scope="module")
def compiled() -> dict[str, list[dict[str, Any]]]:
    return compile_all("tests.kernels.gemm.test_skinny:compiled_cases")


def test_nothing_spills(compiled: dict[str, list[dict[str, Any]]]) -> None:
    assert len(compiled) >= 12
    launches = {f"{name} {i}": one for name, made in compiled.items() for i, one in enumerate(made)}
    assert not {name: one for name, one in launches.items() if one["spilled_bytes"]}
    assert all(one["shared_bytes"] <= 227 * 1024 for one in launches.values())


@pytest.mark.parametrize(("kind", "opcode"), [
    ("one", "HGMMA"), ("half", "HGMMA"), ("int8", "IGMMA"), ("fp8", "QGMMA"),
])  # fmt: skip
def test_products_run_on_tensor_cores(
    compiled: dict[str, list[dict[str, Any]]], kind: str, opcode: str
) -> None:
    large = [n for n in compiled if n.startswith(kind) and ("'tile_n': 64" in n or "sm90" in n)]
    assert any("sm90" in name for name in large) == (opcode == "HGMMA")
    for name in large:
        assert compiled[name][0]["opcodes"].get(opcode, 0) > 0, name
        assert "sm90" not in name or compiled[name][0]["opcodes"]["UTMALDG"] > 0, name
