"""The Hopper matrix product on the GPU, against float64: types, layouts, epilogues, tilings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tessella.kernels.gemm import wgmma
from tessella.operations.epilogue import ACTIVATIONS
from tests.support.problems.products import Case, assert_exact, assert_right, draw, run

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)

ODD = Case(m=300, n=520, k=456)
FULL: dict[str, Any] = {
    "bias": "float32", "residual": "float16", "scale": True, "alpha": 0.5, "beta": -2.0,
}  # fmt: skip
CASES = [
    ODD,
    Case(m=1, n=8, k=8),
    Case(m=129, n=264, k=8),
    Case(m=5000, n=2056, k=200, **FULL),
    Case(m=1000, n=776, k=2000, bias="float16", activation="gelu"),
    replace(ODD, dtype="bfloat16", residual="bfloat16", bias="bfloat16"),
    replace(ODD, out="float32"),
    replace(ODD, dtype="float32", math="tf32", bias="float32", residual="float32"),
    replace(ODD, k=464, n=528, dtype="int8", out="int32"),
    replace(ODD, k=464, n=528, dtype="int8", out="int8", scale=True, bias="float32"),
    replace(ODD, k=464, dtype="int8", out="float16", scale=True),
    *(replace(ODD, activation=name, scale=True) for name in ACTIVATIONS),
    *(
        replace(ODD, k=464, n=528, dtype=f"float8_{kind}", out=out, fast_accumulation=fast)
        for kind in ("e4m3fn", "e5m2")
        for out in ("bfloat16", "float32", f"float8_{kind}")
        for fast in (False, True)
    ),
    *(
        Case(m=264, n=392, k=1032, op="matmul", batch=(2, 3), shared=shared,
             transpose_a=a, transpose_b=b, residual="float16", beta=0.5)
        for a in (False, True) for b in (False, True) for shared in (False, True)
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=repr)
@pytest.mark.parametrize("integers", [False, True], ids=["random", "integers"])
def test_agrees_with_float64(case: Case, integers: bool) -> None:
    assert_right(*run(wgmma, case, "cuda", integers=integers), case)


@pytest.mark.parametrize("case", [
    ODD,
    replace(ODD, dtype="bfloat16", out="float32"),
    replace(ODD, dtype="float8_e4m3fn", k=464, n=528, out="float32", **{**FULL, "residual": None}),
    replace(ODD, dtype="int8", k=464, n=528, out="int8", **{**FULL, "residual": "int8"}),
    replace(ODD, dtype="int8", k=464, n=528, out="int32"),
], ids=repr)  # fmt: skip
def test_small_integers_are_exact(case: Case) -> None:
    assert_exact(*run(wgmma, case, "cuda", integers=True))


@pytest.mark.parametrize("case", [
    replace(ODD, m=1100, n=1000, k=2056, **FULL, activation="silu"),
    replace(ODD, m=1100, n=1008, k=2064, dtype="int8", out="int8", scale=True, residual="int8"),
    replace(ODD, m=1100, n=1008, k=2064, dtype="float8_e4m3fn", out="float16", scale=True),
    replace(ODD, m=264, n=520, op="matmul", batch=(5,), shared=False, transpose_a=True),
], ids=repr)  # fmt: skip
def test_every_configuration(case: Case) -> None:
    """All give the right result, and the same bits each time, split sums included."""
    problem, *_ = draw(case)
    for config in wgmma.configs(problem):
        made, right = run(wgmma, case, "cuda", config=config)
        assert_right(made, right, case)
        again, _ = run(wgmma, case, "cuda", config=config)
        assert torch.equal(made.view(torch.uint8), again.view(torch.uint8))


@pytest.mark.parametrize("schedule", ["cooperative", "staggered", "ping_pong"])
@pytest.mark.parametrize("waves", [0, 1])
def test_split_sums(schedule: str, waves: int) -> None:
    """Ranges of K of all tiles, and of those that a last round of the grid would leave."""
    case = replace(ODD, m=128 * 70, n=256 * 2 + 8, k=1000, **FULL)
    config = {
        "tile_m": 128, "tile_n": 128, "schedule": schedule, "stages": 5, "buffers": 2,
        "split_k": 3, "whole_waves": waves,
    }  # fmt: skip
    assert_right(*run(wgmma, case, "cuda", config=config), case)


@pytest.mark.parametrize("constant", [(1,), (1, 2, 4), (0,)])
def test_constants_are_bound(constant: tuple[int, ...]) -> None:
    assert_right(*run(wgmma, replace(ODD, **FULL), "cuda", constant=constant), ODD)
    turned = Case(m=64, n=96, k=128, op="matmul", dtype="int8", out="int32")
    if constant == (1,):
        problem, (a, b, *_), out = draw(turned, "cuda")
        wgmma.bind(replace(problem, constant=(1,)), {1: b})(a, out=out)
        assert torch.equal(out.double(), a.double() @ b.double())


def test_captured_in_a_graph() -> None:
    problem, (a, b, *_), out = draw(ODD, "cuda")
    call = wgmma.bind(problem, {})
    call(a, b, out=out)
    right = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(a, b, out=out)
    out.fill_(0)
    graph.replay()
    assert torch.equal(out, right)


def test_not_a_number_stays_in_its_row() -> None:
    """Though tiles reach past the edges and share the ring."""
    problem, (a, b, *_), out = draw(ODD, "cuda")
    a[7] = torch.nan
    wgmma.bind(problem, {})(a, b, out=out)
    assert out[7].isnan().all()
    assert not out[:7].isnan().any()
    assert not out[8:].isnan().any()
