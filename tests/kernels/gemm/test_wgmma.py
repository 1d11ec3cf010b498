"""The Hopper matrix product: what it takes and refuses, and how it compiles for the GPU."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from tessella.core.errors import KernelError
from tessella.kernels.gemm import wgmma
from tessella.kernels.shared.matrix_product import Sizes, sizes
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta
from tests.support.emulators import gluon_roles
from tests.support.kernels.compile_only import compile_all
from tests.support.problems import products
from tests.support.problems.products import Case, draw

BIG = Case(m=1000, n=1024, k=1536)
CASES = {
    "float16": BIG,
    "bfloat16, every transpose": replace(BIG, dtype="bfloat16", op="matmul", transpose_a=True),
    "tf32": replace(BIG, dtype="float32", math="tf32", bias="float32"),
    "int8 to int32": replace(BIG, dtype="int8", out="int32"),
    "int8 to int8": replace(
        BIG, dtype="int8", out="int8", scale=True, bias="float32", residual="int8"
    ),
    "int8, gelu, int8": replace(
        BIG, dtype="int8", out="int8", scale=True, bias="float32", activation="gelu", gamma=40.0
    ),
    "int8, silu, int8": replace(
        BIG, dtype="int8", out="int8", scale=True, bias="float32", activation="silu", gamma=40.0
    ),
    "fp8, gelu, fp8": replace(
        BIG,
        dtype="float8_e4m3fn",
        out="float8_e4m3fn",
        scale=True,
        bias="float32",
        activation="gelu",
        gamma=40.0,
    ),
    "fp8, fast": replace(BIG, dtype="float8_e4m3fn", out="bfloat16", fast_accumulation=True),
    "fp8, accurate": replace(BIG, dtype="float8_e5m2", out="float8_e5m2"),
    "float16 to float32": replace(BIG, n=1000, out="float32", bias="float16"),
    "gelu": replace(BIG, bias="float16", activation="gelu"),
    "relu and residual": replace(BIG, bias="float32", residual="float16", activation="relu"),
    "few tiles": replace(BIG, m=128, n=512, k=16384),
}
OPCODES = {"int8": "IGMMA", "float8_e4m3fn": "QGMMA", "float8_e5m2": "QGMMA"}


def problem(**changes: Any) -> Problem:
    return draw(replace(BIG, m=8, **changes))[0]


def meta(m: int, n: int, k: int) -> Problem:
    """A large linear layer, without its tensors."""
    shapes = ((m, k), (n, k))
    inputs = tuple(TensorMeta(shape=shape, dtype="float16") for shape in shapes)
    return Problem(op="linear", inputs=inputs, outputs=(TensorMeta(shape=(m, n), dtype="float16"),))


@pytest.mark.parametrize("name", CASES)
def test_takes(name: str) -> None:
    assert wgmma.fits(draw(CASES[name])[0]) is None


@pytest.mark.parametrize(("changes", "reason"), [
    ({"dtype": "float32"}, "ieee"),
    ({"dtype": "int32"}, "int32"),
    ({"out": "int32"}, "int32"),
    ({"dtype": "int8", "out": "int32", "bias": "float32"}, "bare"),
    ({"k": 1001}, "first factor are not multiples of 16 bytes"),
    ({"n": 1001}, "result are not multiples of 16 bytes"),
    ({"dtype": "int8", "op": "matmul"}, "along K; the second factor"),
    ({"dtype": "int8", "op": "matmul", "transpose_a": True, "transpose_b": True}, "along K; the f"),
    ({"strided": True}, "dense"),
    ({"residual": "float32"}, "like the result"),
    ({"k": 0}, "empty"),
    ({"activation": "swoosh"}, "swoosh"),
])  # fmt: skip
def test_refuses(changes: dict[str, Any], reason: str) -> None:
    assert reason in (wgmma.fits(problem(**changes)) or "")


SMALL = Case(m=88, n=200, k=200)
QUANTIZED = replace(SMALL, dtype="int8", n=208, k=208, out="int8")
PLAYED = {
    "whole tiles": (SMALL, {}),
    "every transpose": (replace(SMALL, op="matmul", transpose_a=True, transpose_b=True), {}),
    "a batch": (replace(SMALL, op="matmul", batch=(3,), shared=False), {}),
    "the epilogue": (
        replace(SMALL, scale=True, bias="float32", residual="float16", activation="relu"),
        {},
    ),
    "a factor behind the activation": (
        replace(SMALL, scale=True, bias="float32", activation="relu", gamma=0.25),
        {},
    ),
    "split, a factor": (
        replace(SMALL, scale=True, activation="relu", gamma=0.25),
        {"split_k": 2, "whole_waves": 1},
    ),
    "int8, a factor": (
        replace(QUANTIZED, scale=True, residual="int8", activation="relu", gamma=0.25),
        {"buffers": 1},
    ),
    "one buffer": (replace(SMALL, residual="float16"), {"buffers": 1}),
    "int8": (replace(SMALL, dtype="int8", n=208, k=208, out="int32"), {}),
    "int8, rows of B spread": (
        replace(QUANTIZED, n=192, k=272, scale=True, bias="float32", residual="int8"),
        {"buffers": 1},
    ),
    "int8, small sums": (
        replace(QUANTIZED, n=192, scale=True, bias="float32", activation="relu", gamma=0.25),
        {"buffers": 1},
    ),
    "int8, rows spread, no clamp": (
        replace(QUANTIZED, n=320, scale=True, bias="float32", activation="hardsigmoid", gamma=40.0),
        {"buffers": 1},
    ),
    "split": (replace(SMALL, bias="float32"), {"split_k": 2, "whole_waves": 1}),
    "all split": (replace(SMALL, residual="float16"), {"split_k": 3}),
}


@pytest.mark.parametrize("schedule", ["cooperative", "staggered", "ping_pong", "paired"])
@pytest.mark.parametrize("name", PLAYED)
def test_roles_in_any_order_make_the_product(
    name: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two multiprocessors, with rings of two and of three stages."""
    case, changes = PLAYED[name]
    monkeypatch.setattr(wgmma, "multiprocessors", lambda: 2)
    for seed in range(2):
        monkeypatch.setattr(wgmma, "launch", functools.partial(gluon_roles.run, seed=seed))
        tiling = wgmma.Tiling(tile_m=32, tile_n=128, schedule=schedule, stages=2 + seed, buffers=2)
        config = asdict(replace(tiling, **changes))
        made, right = products.run(wgmma, case, integers=True, seed=seed, config=config)
        products.assert_exact(made, right)


def test_constant_factors_are_turned() -> None:
    case = Case(m=16, n=32, k=48, dtype="int8", out="int32", op="matmul")
    made, *_ = draw(case)
    assert wgmma.fits(made) is not None
    assert wgmma.fits(replace(made, constant=(1,))) is None


def test_what_is_multiplied() -> None:
    def of(**changes: Any) -> Sizes:
        return sizes(draw(replace(Case(m=16, n=24, k=32), **changes))[0])

    plain = of()
    assert (plain.batch, plain.m, plain.n, plain.k) == (1, 16, 24, 32)
    assert of(batch=(2, 3)) == replace(plain, m=96)
    assert of(op="matmul", batch=(2, 3)) == replace(plain, m=96)  # one B for all: rows
    turned = of(op="matmul", batch=(2, 3), transpose_a=True)
    assert turned == replace(plain, batch=6, folded=False)
    assert not of(op="matmul", batch=(2, 3), shared=False).shared


def test_a_residual_that_counts_for_nothing_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(SMALL, residual="float16", beta=0.0)
    made, (a, b, _, residual, _), out = draw(case, integers=True)
    assert a is not None
    assert b is not None
    assert residual is not None
    monkeypatch.setattr(wgmma, "launch", gluon_roles.run)
    call = wgmma.bind(made, {}, **wgmma.configs(made)[0])
    call(a, b, residual.fill_(torch.nan), out=out)
    products.assert_exact(out, a.double() @ b.double().T)


@pytest.mark.parametrize("name", CASES)
def test_configurations(name: str) -> None:
    made, *_ = draw(CASES[name])
    configs = wgmma.configs(made)
    assert 2 <= len(configs) <= 12
    assert len({repr(config) for config in configs}) == len(configs)
    product, width = sizes(made), 128 // getattr(torch, made.inputs[0].dtype).itemsize
    for config in configs:
        tiling = wgmma.Tiling(**config)
        assert tiling.residents * (tiling.shared_bytes() + 1024) <= 228 * 1024
        tiles = -(-product.m // tiling.tile_m) * -(-product.n // tiling.tile_n)
        split = 0 if tiling.split_k == 1 else tiles - 132 * tiling.whole_waves
        assert wgmma.workspace_bytes(made, **config) == (
            4 * tiling.split_k * split * tiling.tile_m * tiling.tile_n
        )
        assert tiling.split_k == 1 or split > 0
        tiles_k = -(-product.k // width)
        each = -(-tiles_k // tiling.split_k)
        assert (tiling.split_k - 1) * each < tiles_k  # no range of K is empty


def test_k_is_split_where_tiles_do_not_fill_the_machine() -> None:
    few = wgmma.configs(draw(CASES["few tiles"])[0])[0]
    assert few["split_k"] > 1
    assert few["whole_waves"] == 0
    many = wgmma.configs(meta(m=4096, n=4096, k=4096))[0]
    assert many["split_k"] == 1
    just_too_many = wgmma.configs(meta(m=5120, n=5120, k=5120))[0]  # 6 rounds and 8 tiles
    assert just_too_many["split_k"] > 1
    assert just_too_many["whole_waves"] == 6


def test_a_misaligned_tensor_is_told() -> None:
    made, (a, b, *_), out = draw(Case(m=16, n=32, k=64))
    shifted = torch.empty(16 * 64 + 1, dtype=a.dtype)[1:].view(16, 64)
    with pytest.raises(KernelError, match="not aligned to 16 bytes"):
        wgmma.bind(made, {})(shifted, b, out=out)


def compiled() -> Iterator[tuple[str, Callable[[], Any]]]:
    """The six most promising configurations of one case, the first of the others; a paired one."""
    for name, case in CASES.items():
        made, inputs, out = draw(replace(case, m=8, n=64, k=2048))
        given = [t for t in inputs if t is not None]
        configs = wgmma.configs(draw(case)[0])
        paired = [config for config in configs if config["schedule"] == "paired"]
        for config in (*configs[: 6 if name == "float16" else 1], *paired[:1]):
            space = torch.empty(wgmma.workspace_bytes(made, **config), dtype=torch.uint8)
            call = wgmma.bind(made, {}, **config)
            yield (
                f"{name}|{json.dumps(config)}",
                functools.partial(call, *given, out=out, workspace=space),
            )


@pytest.fixture(scope="module")
def kernels() -> dict[str, list[dict[str, Any]]]:
    return compile_all("tests.kernels.gemm.test_wgmma:compiled")


@pytest.mark.parametrize("name", CASES)
def test_compiles(kernels: dict[str, list[dict[str, Any]]], name: str) -> None:
    case = CASES[name]
    launches = {key: made for key, made in kernels.items() if key.startswith(f"{name}|")}
    assert launches
    for key, (product, *sums) in launches.items():
        opcodes = product["opcodes"]
        paired = json.loads(key.split("|")[1])["schedule"] == "paired"
        assert product["spilled_bytes"] == 0, key
        assert product["shared_bytes"] <= (113 if paired else 227) * 1024, key
        wanted = (256, 128) if paired else (384, 168)
        assert (product["threads"], product["registers"]) == wanted, key
        # one instruction: K of 32 bytes, 64 rows a warpgroup, and 256 (s8: 128) columns
        config = wgmma.Tiling(**json.loads(key.split("|")[1]))
        columns = min(config.tile_n, 128 if case.dtype == "int8" else 256)
        each = 4 * (config.tile_m // 64) * (config.tile_n // columns)
        copies = {"cooperative": 0.5, "staggered": 1, "ping_pong": 2, "paired": 1}[config.schedule]
        assert opcodes[OPCODES.get(case.dtype, "HGMMA")] == copies * each, key
        assert opcodes["UTMALDG"] >= 2 + (config.schedule == "staggered"), key
        pieces = config.tile_n * getattr(torch, case.out or case.dtype).itemsize // 128
        assert opcodes["UTMASTG"] >= config.consumers * max(1, pieces), key
        assert not {"LDL", "STL"} & set(opcodes), key
        assert bool(sums) == (config.split_k > 1), key
