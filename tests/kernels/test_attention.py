"""Attention: ours against float64, how it compiles for the GPU, and what cuDNN's takes."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessella.core.errors import UsageError
from tessella.device import launch
from tessella.kernels import catalog, find
from tessella.kernels.attention import aten, flash, flash_sm90, windows
from tessella.operations import problems
from tessella.operations.epilogue import store
from tessella.operations.problem import Problem
from tessella.operations.table import operation
from tessella.operations.tensor_meta import TensorMeta
from tests.support.emulators import gluon_roles
from tests.support.kernels.compile_only import compile_all
from tests.support.problems.attentions import (
    BY_WINDOW,
    CASES,
    COMPILED,
    HOPPER,
    IN_A_WINDOW,
    LARGE,
    QUANTIZED,
    WINDOWS,
    Case,
    draw,
    exact,
    run,
)

CUDNN = catalog.kernel("scaled_dot_product_attention.cudnn")

# what the interpreter takes: warps and stages count for nothing
TILE = {"tile_m": 32, "tile_n": 32, "num_warps": 4, "num_stages": 2}
ONE = {"run": 1, "num_warps": 4, "num_stages": 1}


@pytest.mark.parametrize("name", CASES)
def test_portable_agrees_with_float64(name: str) -> None:
    run(flash, CASES[name], config=TILE)


@pytest.mark.parametrize("name", BY_WINDOW)
@pytest.mark.parametrize("module", [flash, windows, aten])
def test_a_mask_for_every_few_windows(module: Any, name: str) -> None:
    """Windows n, n + M, … have one mask; torch has no such thing, its kernel gets a longer one."""
    case = BY_WINDOW[name]
    if module is aten:  # its own rule for rows that see nothing and masks of another type
        mask_dtype = "bool" if case.mask_dtype == "bool" else "float32"
        case = replace(case, dtype="float32", mask_dtype=mask_dtype, lowest=-100.0)
    run(module, case)


@pytest.mark.parametrize("name", IN_A_WINDOW)
@pytest.mark.parametrize("run_of", [1, 4])
def test_windows_agree_with_float64(name: str, run_of: int) -> None:
    case = IN_A_WINDOW[name]
    run(windows, replace(case, n=case.n * 3 if case.batched and not case.mask else case.n),
        config={**ONE, "run": run_of})  # fmt: skip


@pytest.mark.parametrize("case", [
    Case(n=5, queries=49, keys=49, width=32, mask=(1, 2, 49, 49), mask_dtype="float16"),
    Case(dtype="float32", width=3),
    Case(dtype="bfloat16", causal=True),
    Case(width=100, heads=4, groups=2),
    Case(keys=0),
    Case(scale=-0.3),
    Case(width=32, gamma=50.0, out="int8"),
], ids=repr)  # fmt: skip
def test_windows_take_any_type_and_width(case: Case) -> None:
    run(windows, case, config={**ONE, "run": 2})


def test_windows_far_apart() -> None:
    """Offsets inside a window that 32 bits do not hold; of the memory three pages are touched."""
    problem, (q, k, v) = draw(Case(n=1, queries=2, keys=3))
    memory = torch.empty((2 << 30) + 32, dtype=torch.float16)
    far = memory.as_strided(k.shape, (32, 16, 1 << 30, 1)).copy_(k)
    made = windows.bind(problem, {})(q, far, v)
    assert torch.equal(made, windows.bind(problem, {})(q, k, v))
    assert (made.double() - exact(problem, [q, k, v])).abs().max() < 2e-3


def test_windows_refuse_what_is_no_window() -> None:
    assert "64 queries and keys at most" in str(windows.fits(draw(Case(queries=65))[0]))


@pytest.mark.parametrize("case", [
    Case(dtype="float32"),
    Case(dtype="float32", math="tf32", causal=True),
    Case(dtype="float32", mask=(2, 1, 1, 45), mask_dtype="float32"),
    Case(dtype="bfloat16"),
    Case(dtype="bfloat16", mask=(2, 1, 1, 45), mask_dtype="bfloat16"),
    Case(width=200, heads=1),
    Case(width=3, dtype="float32"),
    Case(keys=0),
    Case(queries=0),
    Case(n=0),
    Case(scale=-0.3),
], ids=repr)  # fmt: skip
def test_portable_takes_any_type_and_width(case: Case) -> None:
    run(flash, case)


@pytest.mark.parametrize("name", QUANTIZED)
def test_portable_writes_codes(name: str) -> None:
    run(flash, QUANTIZED[name], config=TILE)


def test_portable_codes_of_any_width() -> None:
    run(flash, Case(width=3, dtype="float32", gamma=50.0, out="int8"))


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_the_reference_rounds_what_torch_makes(dtype: str) -> None:
    """More than quantized values hold saturates; without a type nothing is rounded."""
    problem, inputs = draw(Case(gamma=800.0, out=dtype))
    stored = getattr(torch, dtype)
    (made,) = operation(problem.op).call([t.double() for t in inputs], problem.attrs)
    right = store(exact(problem, inputs), stored)
    assert made.dtype == stored
    assert torch.equal(made.double(), right.double())
    plain = {n: a for n, a in problem.attrs.items() if n != "dtype"}
    (made,) = operation(problem.op).call([t.double() for t in inputs], plain)
    unrounded = exact(*draw(Case(gamma=800.0)))
    torch.testing.assert_close(made, unrounded, rtol=1e-12, atol=1e-12)
    assert made.abs().max() > 448


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    st.builds(
        Case,
        n=st.just(1),
        queries=st.integers(1, 60),
        keys=st.integers(1, 60),
        width=st.integers(1, 40),
        causal=st.booleans(),
        dtype=st.sampled_from(("float32", "float16")),
        format=st.sampled_from(("strided", "contiguous")),
    )
)
def test_portable_is_right_for_any_sizes(case: Case) -> None:
    run(flash, case, config={**TILE, "tile_m": 16})


def test_broadcast_operands_are_read_where_they_lie() -> None:
    problem, (q, k, v) = draw(Case(groups=1))
    shared = replace(problem, attrs={**problem.attrs, "enable_gqa": False})
    made = flash.bind(shared, {})(q, k, v)
    torch.testing.assert_close(made.double(), exact(shared, [q, k, v]), rtol=0, atol=2e-3)


def test_a_constant_mask_is_bound() -> None:
    problem, (q, k, v, mask) = draw(CASES["a mask for each query"])
    bound = flash.bind(replace(problem, constant=(3,)), {3: mask})
    right = exact(problem, [q, k, v, mask])
    torch.testing.assert_close(bound(q, k, v).double(), right, rtol=0, atol=2e-3)


@pytest.mark.parametrize("out", [None, "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("module", [flash, flash_sm90])
def test_heads_of_a_token_lie_side_by_side(
    module: Any, out: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "launch", lambda *args, **named: None)
    problem, inputs = draw(Case(fused=True, width=32, out=out))
    assert module.fits(problem) is None
    made = module.bind(problem, {})(*inputs)
    assert problem.output.matches(made)
    assert made.transpose(1, 2).is_contiguous()  # the layer after reads it as it is


# --- the kernel for Hopper ------------------------------------------------------------------------

TILINGS: tuple[dict[str, Any], ...] = (
    {},
    {"tile_n": 64, "stages": 2, "run": 1},
    {"tile_n": 64, "stages": 8, "run": 4, "ping_pong": True},
    {"tile_n": 128, "stages": 5, "run": 2},
)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", HOPPER)
def test_hopper_agrees_with_float64(monkeypatch: pytest.MonkeyPatch, name: str, seed: int) -> None:
    """Roles in turns on NumPy, three blocks, whatever the ring."""
    monkeypatch.setattr(flash_sm90, "launch", functools.partial(gluon_roles.run, seed=seed))
    monkeypatch.setattr(flash_sm90, "multiprocessors", lambda: 3)
    case = HOPPER[name]
    for tiling in TILINGS if "many" in name else TILINGS[:1]:
        run(flash_sm90, case, config=tiling)


def test_a_ring_of_one_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values of a tile are awaited before those of the tile before it are given back."""
    monkeypatch.setattr(flash_sm90, "launch", gluon_roles.run)
    with pytest.raises(gluon_roles.Deadlock):
        run(flash_sm90, HOPPER["many tiles"], config={"tile_n": 64, "stages": 1, "run": 1})


@pytest.mark.parametrize(("case", "reason"), [
    (Case(dtype="float32"), "float16, bfloat16"),
    (Case(width=20), "multiples of 16 bytes"),
    (Case(width=136), "1 to 128 wide"),
    (Case(keys=0), "empty"),
    (Case(scale=-1.0), "positive scale"),
    (Case(format="channels_last"), "channels_last"),
    (Case(out="int8"), "32, 48, 64"),
    (Case(width=40, out="float8_e4m3fn"), "32, 48, 64"),
    (Case(width=32, out="bfloat16"), "makes float16, int8, float8_e4m3fn"),
])  # fmt: skip
def test_hopper_refuses(case: Case, reason: str) -> None:
    assert reason in flash_sm90.fits(draw(case)[0])


def test_both_refuse_a_mask_that_is_causal_too() -> None:
    problem, _ = draw(CASES["a mask for each query"])
    causal = replace(problem, attrs={**problem.attrs, "is_causal": True})
    for module in (flash, flash_sm90):
        assert "not both" in module.fits(causal)


def test_tilings() -> None:
    bert = Case(n=32, heads=16, queries=384, keys=384, width=64)
    for case in (bert, replace(bert, causal=True), replace(bert, queries=4096, keys=4096)):
        problem = metas(case)
        for config in flash_sm90.configs(problem):
            tiling = flash_sm90.Tiling(**config)
            assert tiling.stages >= 2
            assert tiling.shared_bytes(64, 64) <= 227 * 1024
            tiles = -(-case.keys // tiling.tile_n)
            assert tiling.run == 1 or tiles <= tiling.stages
    first = flash_sm90.configs(metas(bert))[0]
    assert (first["tile_n"], first["run"]) == (128, 3)  # the keys are read once
    assert all(c["run"] == 1 for c in flash_sm90.configs(metas(replace(bert, keys=4096))))
    padded = draw(replace(bert, n=1, width=128, mask=(384,)))[0]
    assert all(c["tile_n"] == 64 for c in flash_sm90.configs(padded))  # registers
    swin = metas(Case(n=128 * 64, heads=3, queries=49, keys=49, width=32))
    assert [c["run"] for c in windows.configs(swin)] == [16, 16, 8, 8, 1, 1]
    assert all(c["run"] == 1 for c in windows.configs(replace(swin, inputs=metas(bert).inputs)))


def metas(case: Case) -> Problem:
    """A problem of this case's sizes, without its tensors."""
    shapes = ((case.queries, case.width), *[(case.keys, case.width)] * 2)
    tensors = [TensorMeta(shape=(case.n, case.heads, *s), dtype=case.dtype) for s in shapes]
    return problems.attention(*tensors, is_causal=case.causal)


# --- how they compile -----------------------------------------------------------------------------

PORTABLE = {
    "by key": COMPILED["by key"],
    "widest": replace(LARGE, width=256, dtype="bfloat16"),
    "int8": COMPILED["int8"],
    "fp8": COMPILED["fp8"],
}


def compiled() -> Iterator[tuple[str, Callable[[], Any]]]:
    """The first tiling of each case; and the portable kernel's first."""
    for name, case in COMPILED.items():
        problem, inputs = draw(case)
        config = flash_sm90.configs(problem)[0]
        call = flash_sm90.bind(problem, {}, **config)
        run = functools.partial(call, *inputs)
        key = f"hopper|{name}|{json.dumps(config)}"
        yield key, functools.partial(_overlapping, run) if name == "by key" else run
    for name, case in PORTABLE.items():
        problem, inputs = draw(case)
        call = flash.bind(problem, {}, **flash.configs(problem)[0])
        yield f"portable|{name}|", functools.partial(call, *inputs)
    for name, case in WINDOWS.items():
        problem, inputs = draw(case)
        every = [{**c, "run": run} for c in windows.configs(problem) for run in (c["run"], 8)]
        # of other masks and results than Swin's: each number of warps once, and each run
        for config in every if name == "swin" or len(every) < 4 else (every[1], every[2]):
            call = windows.bind(problem, {}, **config)
            yield f"windows|{name}|{json.dumps(config)}", functools.partial(call, *inputs)


def _overlapping(run: Callable[[], Any]) -> None:
    """Run, and assert that exponentials are taken before the products of values are waited for.

    ptxas moved the wait before them once: right, and as slow as without any overlap.
    """
    with launch.watching() as launches:
        run()
    (made,) = launches
    launch.record(made)
    order = "".join(re.findall(r"(?<=gsb0, 0x)[01]|(?<=MUFU\.)EX2", made.sass()))
    waits = re.findall(r"1((?:EX2)*)0", order)
    assert len(waits) == 2, order
    assert all(exponentials.count("EX2") >= 64 for exponentials in waits), order


@pytest.fixture(scope="module")
def kernels() -> dict[str, list[dict[str, Any]]]:
    return compile_all("tests.kernels.test_attention:compiled")


@pytest.mark.parametrize("name", COMPILED)
def test_hopper_compiles(kernels: dict[str, list[dict[str, Any]]], name: str) -> None:
    case = COMPILED[name]
    ((key, (made,)),) = ((k, v) for k, v in kernels.items() if k.startswith(f"hopper|{name}|"))
    tiling, opcodes = flash_sm90.Tiling(**json.loads(key.split("|")[2])), made["opcodes"]
    # 128 wide with 128 keys takes all registers: some versions of ptxas spill before the loop
    assert made["spilled_bytes"] <= (16 if name == "wide" else 0)
    assert made["shared_bytes"] <= tiling.shared_bytes(case.width, case.width) <= 227 * 1024
    assert (made["threads"], made["registers"]) == (384, 168)
    # of each consumer: the first product, the loop's two, and the last
    first, second = case.width // 16, tiling.tile_n // 16
    assert opcodes["HGMMA"] == 2 * 2 * (first + second)
    copies = -(-case.width // 64)  # of at most 128 bytes a row
    assert opcodes["UTMALDG"] == 4 * copies
    assert opcodes["UTMASTG"] == 2


@pytest.mark.parametrize("name", PORTABLE)
def test_portable_compiles(kernels: dict[str, list[dict[str, Any]]], name: str) -> None:
    (made,) = kernels[f"portable|{name}|"]
    assert made["spilled_bytes"] == 0
    assert made["shared_bytes"] <= 227 * 1024
    assert made["opcodes"]["HGMMA"] > 0


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_compile(kernels: dict[str, list[dict[str, Any]]], name: str) -> None:
    made = [v for key, (v,) in kernels.items() if key.startswith(f"windows|{name}|")]
    assert len(made) >= 2
    for each in made:
        assert each["spilled_bytes"] == 0
        assert any(op in each["opcodes"] for op in ("HMMA", "HGMMA"))


# --- as people ask for it, and the others' --------------------------------------------------------


def test_people_find_the_fastest() -> None:
    q, k, v = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 4)
    mask = torch.rand(2, 1, 1, 7) > 0.5
    report = find("scaled_dot_product_attention", q, k, v, attn_mask=mask, scale=0.5, budget_s=0)
    assert report.problem.output.shape == (2, 3, 5, 4)
    assert [meta.dtype for meta in report.problem.inputs] == [*["float32"] * 3, "bool"]
    assert report[0].max_rel_error < 1e-5
    assert report[0].tflops > 0


def test_a_problem_of_shapes_that_do_not_go_together_is_told() -> None:
    q, k = (TensorMeta(shape=(2, 3, 5, width), dtype="float32") for width in (8, 16))
    with pytest.raises(UsageError, match="do not go together"):
        problems.attention(q, k, k)


def problem(
    dtype: str = "float16", width: int = 64, length: int = 33, causal: bool = False
) -> Problem:
    return metas(Case(dtype=dtype, width=width, queries=length, keys=length, causal=causal))


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (problem("float32"), "float16 and bfloat16"),
        (problem(width=20), "multiple of 8"),
        (problem(width=256), "at most 128"),
        (problem(length=0), "empty"),
        (replace(problem(), inputs=(*problem().inputs, problem().inputs[0])), "mask"),
    ],
)
def test_what_cudnn_refuses(asked: Problem, reason: str) -> None:
    assert reason in CUDNN.load().fits(asked)


@pytest.mark.parametrize("by", ["aten", "cudnn"])
def test_libraries_write_no_codes(by: str) -> None:
    row = catalog.kernel(f"scaled_dot_product_attention.{by}")
    assert "makes float16, not int8" in (row.refusal(draw(Case(out="int8"))[0]) or "")
    assert "gamma" in (row.refusal(draw(Case(gamma=2.0, out="int8"))[0]) or "")
    assert "gamma" in (row.refusal(draw(Case(gamma=2.0))[0]) or "")


def test_a_factor_of_1_and_the_own_type_are_no_other_problem() -> None:
    (q, k, v), plain = problem().inputs, problem()
    assert problems.attention(q, k, v, gamma=1, out_dtype="float16").key == plain.key
    assert set(plain.attrs) == {"is_causal", "scale", "enable_gqa"}
    quantized = problems.attention(q, k, v, gamma=2, out_dtype="int8")
    assert quantized.output == replace(plain.output, dtype="int8")
    with pytest.raises(UsageError, match="above zero"):
        problems.attention(q, k, v, gamma=0.0)


def test_what_cudnn_takes() -> None:
    assert CUDNN.load().fits(problem("bfloat16", 128)) is None
