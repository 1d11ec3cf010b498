"""The portable matrix product, interpreted, against float64; and compiled for the GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessella.kernels.gemm import tiled
from tessella.operations.epilogue import ACTIVATIONS
from tests.support.kernels.compile_only import compile_all
from tests.support.problems.products import Case, assert_exact, assert_right, draw, run

FULL: dict[str, Any] = {
    "bias": "float32", "residual": "float16", "scale": True, "alpha": 0.5, "beta": -2.0,
}  # fmt: skip


@pytest.mark.parametrize("case", [
    Case(m=70, n=33, k=45, dtype="float32"),
    Case(m=70, n=33, k=45, dtype="float32", math="tf32"),
    Case(m=70, n=33, k=45),
    Case(m=70, n=33, k=45, dtype="bfloat16"),
    Case(m=70, n=33, k=45, dtype="float8_e4m3fn", out="float32"),
    Case(m=70, n=33, k=45, dtype="float8_e5m2", out="float16", fast_accumulation=True),
    Case(m=70, n=33, k=45, dtype="int8", out="int8", scale=True, bias="float32"),
    *(Case(m=5, n=6, k=7, activation=name, **FULL) for name in (None, *ACTIVATIONS)),
    *(Case(m=5, n=6, k=7, gamma=3.0, activation=name, **FULL) for name in (None, "gelu")),
    Case(m=70, n=33, k=45, dtype="int8", out="int8", activation="gelu", gamma=0.02, scale=True),
    Case(m=1, n=1, k=1),
    Case(m=0, n=5, k=7),
    Case(m=5, n=0, k=7),
    Case(m=5, n=6, k=0, bias="float16"),
    Case(m=5, n=6, k=7, op="matmul", batch=(2, 0)),
    Case(m=17, n=20, k=33, op="matmul", batch=(2, 3), residual="float16", beta=0.5),
    Case(m=17, n=20, k=33, op="matmul", batch=(2, 3), shared=False, transpose_a=True),
    Case(m=17, n=20, k=33, op="matmul", batch=(3,), transpose_a=True, strided=True),
], ids=repr)  # fmt: skip
def test_agrees_with_float64(case: Case) -> None:
    assert_right(*run(tiled, case), case)


@pytest.mark.parametrize("constant", [(), (1,), (1, 2, 4), (0,)])
def test_constants_are_bound(constant: tuple[int, ...]) -> None:
    case = Case(m=5, n=6, k=7, **FULL)
    assert_right(*run(tiled, case, constant=constant), case)


@pytest.mark.parametrize(("dtype", "out"), [
    ("float32", "float32"), ("float16", "float32"), ("bfloat16", "float32"), ("int8", "int8"),
    ("int8", "float16"), ("float8_e4m3fn", "float32"),
])  # fmt: skip
@pytest.mark.parametrize("activation", [None, "relu"])
def test_small_integers_are_exact(dtype: str, out: str, activation: str | None) -> None:
    case = Case(m=40, n=56, k=96, dtype=dtype, out=out, activation=activation, **FULL)
    assert_exact(*run(tiled, case, integers=True))
    assert_exact(*run(tiled, replace(case, gamma=0.25), integers=True))


def test_int32_is_bit_exact() -> None:
    case = Case(m=40, n=56, k=900, dtype="int8", out="int32")
    assert_exact(*run(tiled, case))


@pytest.mark.parametrize("index", range(6))
def test_every_tile_size(index: int) -> None:
    case = Case(m=150, n=144, k=112, bias="float16")
    config = tiled.configs(draw(case)[0])[index]
    assert_right(*run(tiled, case, config=config), case)


def test_rounding_to_int8_is_half_to_even() -> None:
    # ½ · (1 … 7) · 1: every other product lies between two integers
    x = torch.arange(1, 8, dtype=torch.int8)[:, None]
    case = Case(m=7, n=1, k=1, dtype="int8", out="int8", alpha=0.5)
    problem, *_ = draw(case)
    out = torch.zeros(7, 1, dtype=torch.int8)
    tiled.bind(problem, {})(x, torch.ones(1, 1, dtype=torch.int8), out=out)
    assert out[:, 0].tolist() == [0, 1, 2, 2, 2, 3, 4]


@st.composite
def cases(draw_from: st.DrawFn) -> Case:
    """Odd sizes, types, transposes, batches, strides and epilogues."""
    pick = draw_from
    size, flag = st.integers(0, 40), st.booleans()
    dtype = pick(st.sampled_from(["float32", "float16", "bfloat16", "int8"]))
    op = pick(st.sampled_from(["linear", "matmul"]))
    strided = pick(flag)
    most = 1 if strided else 2
    batch = tuple(pick(st.lists(st.integers(0, 3), max_size=most))) if op == "matmul" else ()
    element = st.sampled_from([None, "float32", "float16"])
    return Case(
        m=pick(size), n=pick(size), k=pick(size), op=op, batch=batch, dtype=dtype, strided=strided,
        out=pick(st.sampled_from(["float32", "int8"])) if dtype == "int8" else dtype,
        shared=pick(flag) or op == "linear" or not batch,
        transpose_a=op == "matmul" and pick(flag), transpose_b=op == "matmul" and pick(flag),
        bias=pick(element), residual=pick(element), scale=pick(flag),
        activation=pick(st.sampled_from([None, "relu", "gelu"])),
        alpha=pick(st.sampled_from([1.0, -0.5])), beta=pick(st.sampled_from([1.0, 0.0, 2.0])),
    )  # fmt: skip


@settings(max_examples=60, deadline=None, derandomize=True)
@given(case=cases(), seed=st.integers(0, 99))
def test_any_problem_is_right(case: Case, seed: int) -> None:
    tile = {"tile_m": 16, "tile_n": 16, "tile_k": 32, "num_warps": 4, "num_stages": 3}
    assert_right(*run(tiled, case, seed=seed, config=tile), case)


@pytest.mark.parametrize(("changes", "reason"), [
    ({"dtype": "float64"}, "float64 products"),
    ({"dtype": "int8", "out": "int32", "bias": "float32"}, "plain product"),
    ({"out": "int32"}, "not stored as int32"),
])  # fmt: skip
def test_refusals(changes: dict[str, Any], reason: str) -> None:
    problem, *_ = draw(Case(m=4, n=4, k=4, **changes))
    assert reason in (tiled.fits(problem) or "")


def compiled_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Every tile of each unit that multiplies, and the first two of what else there is of it."""
    plain = {"m": 256, "n": 256, "k": 256}
    kinds = {
        "ieee": Case(**plain, dtype="float32"),
        "tf32": Case(**plain, dtype="float32", math="tf32"),
        "half": Case(**plain, bias="float16", activation="relu"),
        "gelu": Case(**plain, bias="float16", activation="gelu"),
        "odd": Case(m=100, n=99, k=98, dtype="bfloat16", residual="bfloat16"),
        "int8": Case(**plain, dtype="int8", out="int8", scale=True, bias="float32"),
        "quantized": Case(
            **plain, dtype="int8", out="int8", scale=True, activation="gelu", gamma=3.0
        ),
        "fp8": Case(**plain, dtype="float8_e4m3fn", out="bfloat16"),
        "fast": Case(**plain, dtype="float8_e4m3fn", out="bfloat16", fast_accumulation=True),
    }
    for kind, case in kinds.items():
        problem, inputs, out = draw(case)
        for config in tiled.configs(problem)[: None if kind in ("ieee", "half", "int8") else 2]:
            call = tiled.bind(problem, {}, **config)
            tile = f"{kind} {config['tile_m']}"
            present = [t for t in inputs if t is not None]
            yield f"{tile} {config}", functools.partial(call, *present, out=out)


@pytest.fixture(scope="module")
def compiled() -> dict[str, list[dict[str, Any]]]:
    return compile_all("tests.kernels.gemm.test_tiled:compiled_cases")


def test_nothing_spills(compiled: dict[str, list[dict[str, Any]]]) -> None:
    assert len(compiled) > 20
    spilled = {name: one["spilled_bytes"] for name, (one,) in compiled.items()}
    assert not any(spilled.values()), spilled
    assert all(one["shared_bytes"] <= 227 * 1024 for (one,) in compiled.values())


UNITS = {
    "ieee": "FFMA", "tf32": "HGMMA", "half": "HGMMA", "gelu": "HGMMA", "odd": "HGMMA",
    "int8": "IGMMA", "quantized": "IGMMA", "fp8": "QGMMA", "fast": "QGMMA",
}  # fmt: skip


@pytest.mark.parametrize("kind", UNITS)
def test_products_run_on_the_right_units(
    compiled: dict[str, list[dict[str, Any]]], kind: str
) -> None:
    large = [n for n in compiled if n.startswith((f"{kind} 128", f"{kind} 64"))]
    assert large
    for name in large:
        assert compiled[name][0]["opcodes"].get(UNITS[kind], 0) > 0, name
