"""The factor behind the activation on the GPU: every kernel that knows it, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tessella import runtime
from tessella.artifacts.plan import from_bytes, to_bytes
from tessella.kernels import catalog
from tessella.kernels.sparse.two_four import TWO_FOUR
from tests.support.gpu_target import TARGET, UNTUNED
from tests.support.networks import plan
from tests.support.problems import convolutions, products
from tests.support.quantized import calibrated, graph_of

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]

QUANTIZED: dict[str, Any] = {
    "int8": {"dtype": "int8", "out": "int8", "scale": True, "bias": "float32", "gamma": 0.02},
    "fp8": {
        "dtype": "float8_e4m3fn", "out": "float8_e4m3fn", "scale": True, "bias": "float32",
        "gamma": 8.0,
    },
    "float16": {"bias": "float16", "residual": "float16", "gamma": 0.3},
    "float16 to int8": {"out": "int8", "scale": True, "gamma": 40.0},
    "float32": {"dtype": "float32", "bias": "float32", "gamma": 0.3},
}  # fmt: skip
PRODUCTS = ("wgmma.sm90", "skinny.sm90", "skinny", "tiled", "fma.sm90")


@pytest.mark.parametrize("activation", ["gelu", "silu", "relu"])
@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("by", PRODUCTS)
def test_products(by: str, kind: str, activation: str) -> None:
    row = catalog.kernel(f"linear.{by}")
    m = 40 if by.startswith("skinny") else 1100
    case = products.Case(m=m, n=528, k=2064, activation=activation, **QUANTIZED[kind])
    problem, *_ = products.draw(case)
    if (reason := row.refusal(problem)) is not None:
        pytest.skip(reason)
    for config in row.configs(problem):
        products.assert_right(*products.run(row.load(), case, "cuda", config=config), case)
    stored = "float32" if kind == "fp8" else case.out  # what fp8 cannot hold would saturate
    exact = replace(case, activation="relu", gamma=0.25, out=stored)
    for config in row.configs(problem):
        made = products.run(row.load(), exact, "cuda", integers=True, config=config)
        products.assert_exact(*made)


@pytest.mark.parametrize("id", ["linear.sparse.sm90", "linear.cusparselt"])
def test_sparse_products(id: str) -> None:
    row = catalog.kernel(id)
    case = products.Case(
        m=304, n=544, k=480, activation="gelu", sparsity=TWO_FOUR, **QUANTIZED["int8"]
    )
    problem = replace(products.draw(case)[0], constant=(1,))
    assert row.refusal(problem) is None
    for config in row.configs(problem)[:5]:
        made = products.run(row.load(), case, "cuda", constant=(1,), config=config)
        products.assert_right(*made, case)


LAST = "channels_last"
LAYER = convolutions.Case(x=(3, 64, 13, 17), w=(128, 64, 3, 3), padding=1, x_format=LAST,
                          w_format=LAST, dtype="int8", scale=True, bias="float32",
                          activation="silu", gamma=3.0)  # fmt: skip
CONVOLUTIONS = {
    "implicit_gemm.sm90": LAYER,
    "pointwise.sm90": replace(LAYER, w=(128, 64, 1, 1), padding=0),
    "direct.sm90": replace(LAYER, x=(3, 3, 13, 17), w=(64, 3, 3, 3)),
    "implicit_gemm": LAYER,
    "implicit_precomp_gemm": LAYER,
    "gemm": LAYER,
    "direct": replace(LAYER, x=(3, 48, 13, 17), w=(48, 1, 3, 3), groups=48, dtype="float16"),
}
CONVOLUTIONS["direct to int8"] = replace(
    CONVOLUTIONS["direct"], w=(48, 1, 5, 5), padding=2, stride=2, out="int8", scale=False
)


@pytest.mark.parametrize("by", CONVOLUTIONS)
def test_convolutions(by: str) -> None:
    row, case = catalog.kernel(f"conv2d.{by.removesuffix(' to int8')}"), CONVOLUTIONS[by]
    sixteen = {"dtype": "float16", "scale": False, "bias": "float16", "gamma": 1.0}
    for changes in (
        {},
        {"activation": "relu", "gamma": 0.25},
        {"activation": "relu", "gamma": 0.25, "floor": -5.5},
        {"activation": "relu", "floor": 2.5, **sixteen},
    ):
        asked = replace(case, **changes)
        assert row.refusal(asked.problem) is None
        for config in row.configs(asked.problem):
            convolutions.check(row, asked, config, device="cuda", integers=True)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.act = nn.LayerNorm(192), nn.GELU()
        self.up, self.down = nn.Linear(192, 768), nn.Linear(768, 192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_plan_rounds_where_it_activates(kind: str) -> None:
    graph = graph_of(Mlp(), 50, 192)
    found = calibrated(graph, 50, 192, kinds=(kind,))
    made = plan(graph, (8, 8, 8), TARGET, precision=kind, calibration=found, untuned=UNTUNED)
    steps = made.program.buckets[0].steps
    (layer,) = [step for step in steps if "gamma" in step.attrs]
    assert layer.attrs["activation"] == "gelu"
    assert catalog.kernel(layer.kernel).last_resort is False
    x = torch.randn(8, 50, 192, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        right = Mlp()(x)
    with runtime.load(from_bytes(to_bytes(made))) as engine:
        scores = engine(x=x)["scores"].float().cpu()
    error = (scores - right).norm() / right.norm()
    assert error <= (0.02 if kind == "int8" else 0.05)
