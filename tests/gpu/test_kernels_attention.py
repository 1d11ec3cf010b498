"""Attention on the GPU against float64: masks, causal, odd lengths, views, tilings; the same bits.

``-k portable`` runs what cannot hang; the kernel for Hopper has barriers of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tessella import runtime
from tessella.artifacts.plan import from_bytes, to_bytes
from tessella.device.streams import capturing
from tessella.kernels import catalog
from tessella.kernels.attention import flash, flash_sm90, windows
from tessella.kernels.gemm import wgmma
from tests.support.gpu_target import TARGET
from tests.support.networks import plan
from tests.support.problems import products
from tests.support.problems.attentions import (
    BY_WINDOW,
    CASES,
    COMPILED,
    HOPPER,
    IN_A_WINDOW,
    QUANTIZED,
    TOLERANCE,
    WINDOWS,
    Case,
    draw,
    exact,
    run,
)
from tests.support.quantized import Block, calibrated, graph_of

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)

BERT = Case(n=32, heads=16, queries=384, keys=384, width=64)
LARGE = {
    "BERT-large": BERT,
    "BERT-large, padded": replace(BERT, mask=(32, 1, 1, 384), mask_dtype="float16"),
    "BERT-large, padded at the end": replace(
        BERT, mask=(32, 1, 1, 384), mask_dtype="float16", lowest=-65504.0, hidden="end"
    ),
    "ViT-B": Case(n=64, heads=12, queries=197, width=64, fused=True),
    "GPT-2": Case(n=2, heads=12, queries=1024, keys=1024, width=64, causal=True),
    "GPT-2, long": Case(n=1, heads=4, queries=4096, keys=4096, width=128, causal=True),
    "few queries": Case(n=1, heads=200, queries=5, keys=4000, width=64),
    "many queries": Case(n=3, heads=5, queries=4000, keys=5, width=64),
    "groups": Case(n=2, heads=32, groups=8, queries=777, keys=777, width=128, causal=True),
}
FP8 = {"out": "float8_e4m3fn", "gamma": 100.0}
LARGE_CODES = {
    "BERT-large, fp8": replace(BERT, **FP8),
    "BERT-large, int8": replace(BERT, out="int8", gamma=100.0),
    "BERT-large, padded, fp8": replace(LARGE["BERT-large, padded"], **FP8),
    "ViT-B, fp8": replace(LARGE["ViT-B"], **FP8),
    "GPT-2, fp8": replace(LARGE["GPT-2"], **FP8),
    "fp8, saturated": replace(LARGE["ViT-B"], out="float8_e4m3fn", gamma=2000.0),
    "three axes, fp8": Case(batched=False, width=48, **FP8),
}
LARGE |= LARGE_CODES


@pytest.mark.parametrize("name", [*CASES, *QUANTIZED, *LARGE])
def test_portable_agrees_with_float64(name: str) -> None:
    case = {**CASES, **QUANTIZED, **LARGE}[name]
    for config in flash.configs(draw(case, "cuda")[0]):
        run(flash, case, "cuda", config)


@pytest.mark.parametrize("case", [
    Case(dtype="float32"),
    Case(dtype="float32", math="tf32", causal=True),
    Case(dtype="float32", width=256),
    Case(dtype="bfloat16", mask=(2, 1, 1, 45), mask_dtype="bfloat16"),
    Case(width=200),
    Case(width=3, dtype="float32"),
    Case(keys=0),
    Case(queries=0),
], ids=repr)  # fmt: skip
def test_portable_takes_any_type_and_width(case: Case) -> None:
    for config in flash.configs(draw(case, "cuda")[0]):
        run(flash, case, "cuda", config)


ALL_WINDOWS = {
    **WINDOWS, **IN_A_WINDOW, **BY_WINDOW,
    "swin, 128 images": replace(WINDOWS["swin"], n=128 * 64),
}  # fmt: skip


@pytest.mark.parametrize("name", ALL_WINDOWS)
def test_windows_agree_with_float64(name: str) -> None:
    case = ALL_WINDOWS[name]
    for config in windows.configs(draw(case, "cuda")[0]):
        run(windows, case, "cuda", config)
        run(windows, case, "cuda", {**config, "run": 3})


@pytest.mark.parametrize("name", BY_WINDOW)
def test_portable_takes_a_mask_for_every_few_windows(name: str) -> None:
    for config in flash.configs(draw(BY_WINDOW[name], "cuda")[0]):
        run(flash, BY_WINDOW[name], "cuda", config)


@hopper
@pytest.mark.parametrize("name", [*HOPPER, *LARGE, *COMPILED])
def test_hopper_agrees_with_float64(name: str) -> None:
    case = {**HOPPER, **LARGE, **COMPILED}[name]
    for config in flash_sm90.configs(draw(case, "cuda")[0]):
        run(flash_sm90, case, "cuda", config)


@hopper
@pytest.mark.parametrize("module", [flash, flash_sm90], ids=["portable", "hopper"])
@pytest.mark.parametrize("name", ["BERT-large, padded", "ViT-B", "GPT-2", "BERT-large, fp8"])
def test_the_same_bits_every_time(module: Any, name: str) -> None:
    problem, inputs = draw(LARGE[name], "cuda")
    call = module.bind(problem, {}, **module.configs(problem)[0])
    first = call(*inputs)
    assert all(torch.equal(_bytes(first), _bytes(call(*inputs))) for _ in range(20))


def _bytes(made: torch.Tensor) -> torch.Tensor:
    return made.contiguous().view(torch.uint8)


@hopper
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_in_a_plan_it_writes_what_the_layer_behind_reads(kind: str) -> None:
    block = Block().eval()
    graph = graph_of(block, 50, 64)
    found = calibrated(graph, 50, 64, kinds=(kind,))
    made = plan(graph, (8, 8, 8), TARGET, precision=kind, calibration=found)
    steps = made.program.buckets[0].steps
    (place,) = [i for i, s in enumerate(steps) if s.op == "scaled_dot_product_attention"]
    assert steps[place].attrs["dtype"] == {"int8": "int8", "fp8": "float8_e4m3fn"}[kind]
    assert catalog.kernel(steps[place].kernel).algorithm in ("flash", "windows")
    assert [s.op for s in steps[place + 1 : place + 4]] == ["permute", "reshape", "linear"]
    x = torch.randn(8, 50, 64, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        right = block(x) - x
    with runtime.load(from_bytes(to_bytes(made))) as engine:
        scores = engine(x=x)["scores"].float().cpu() - x
    assert (scores - right).norm() / right.norm() <= {"int8": 0.03, "fp8": 0.08}[kind]


@pytest.mark.parametrize("module", [flash, flash_sm90], ids=["portable", "hopper"])
def test_in_a_graph_after_another_kernel(module: Any) -> None:
    """Launches overlap: what the kernel before wrote is read."""
    problem, (q, k, v) = draw(LARGE["ViT-B"], "cuda")
    call, scaled = module.bind(problem, {}), torch.empty_like(v)
    call(q, k, v)  # compiled before it is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.mul(v, 2, out=scaled)
        made = call(q, k, scaled)
    for seed in range(3):
        v.copy_(draw(LARGE["ViT-B"], "cuda", seed=seed)[1][2])
        graph.replay()
        right = 2 * exact(problem, [q, k, v])
        assert (made.double() - right).abs().max() / right.abs().max() < TOLERANCE["float16"]


@hopper
@pytest.mark.timeout(60)
def test_in_a_graph_behind_products_that_let_it_start() -> None:
    """All its blocks end, with the same results: some of BERT's waited for ever once."""
    product, (a, b, bias, *_), out = products.draw(
        products.Case(m=32 * 384, n=1024, k=1024, bias="float16"), "cuda"
    )
    (*_, whole) = (c for c in wgmma.configs(product) if not wgmma.workspace_bytes(product, **c))
    multiply = wgmma.bind(product, {}, **whole)
    case = replace(BERT, mask=(32, 1, 1, 384), hidden="none")
    problem, (_, k, v, mask) = draw(case, "cuda")

    def check(config: dict[str, Any]) -> None:  # its graph ends before the next is captured
        attend = flash_sm90.bind(problem, {}, **config)

        def run_both() -> torch.Tensor:
            q = multiply(a, b, bias, out=out).view(32, 384, 16, 64).transpose(1, 2)
            return attend(q, k, v, mask)

        right = run_both().clone()
        with torch.inference_mode(), capturing() as graph:
            made = [run_both() for _ in range(8)]
        for _ in range(10):
            graph.replay()
        assert all(torch.equal(one, right) for one in made), config

    for config in flash_sm90.configs(problem):
        check(config)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_cudnn_agrees_with_float64(dtype: str, causal: bool) -> None:
    row = catalog.kernel("scaled_dot_product_attention.cudnn")
    run(row.load(), Case(dtype=dtype, causal=causal, keys=50), "cuda")
