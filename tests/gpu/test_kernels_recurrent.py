"""Recurrent layers on a GPU: every kernel beside the reference, and whole networks as plans."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tessella import compiler, graph, runtime
from tessella.core.spec import DimRange, TensorSpec
from tests.support.gpu_target import TARGET, UNTUNED
from tests.support.problems.recurrent import TOLERANCES, kernels_that_agree

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)
OPS = ("lstm", "gru", "rnn")


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("n", [1, 15])
def test_kernels_agree_with_the_reference(n: int, dtype: torch.dtype) -> None:
    fitted = kernels_that_agree(n, dtype, target=TARGET)
    assert fitted >= {f"{op}.{by}" for op in OPS for by in ("cudnn", "steps")}


class Tagger(nn.Module):
    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(2 * layer.hidden_size, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x)[0])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_plan_answers_as_torch(kind: type[nn.RNNBase], precision: str) -> None:
    """Two layers in both directions, for any number of samples up to eight."""
    torch.manual_seed(0)
    layer = kind(32, 64, num_layers=2, bidirectional=True, batch_first=True)
    module = Tagger(layer).eval()
    spec = TensorSpec(name="x", dtype="float32", shape=(DimRange(min=1, opt=8, max=8), 20, 32))
    plan = compiler.compile_graph(
        graph.capture(module, [spec]),
        target=TARGET,
        batch=DimRange(min=1, opt=8, max=8),
        precision=precision,
        about=compiler.About(built_from="tagger", rebuild="none"),
        measuring=compiler.Measuring(untuned=UNTUNED),
    )
    x = torch.randn(5, 20, 32)
    with torch.no_grad():
        right = module(x)
    with runtime.load(plan) as engine:
        (made,) = engine(x=x.cuda()).values()
    error = (made.cpu().float() - right).abs().max() / right.abs().max()
    assert error < (1e-4 if precision == "fp32" else 1e-2)
