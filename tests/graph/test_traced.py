"""What torch.export alone refuses, and what a refusal says: ``graph.traced`` and ``capture``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from tessella.core.errors import CompileError
from tessella.core.spec import DimRange, TensorSpec
from tessella.graph import capture, interpret

BATCH = DimRange(min=1, opt=2, max=8)


def spec(name: str, *shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=(BATCH, *shape))


class Function(nn.Module):
    def __init__(self, function: Any, *modules: nn.Module) -> None:
        super().__init__()
        self.function, self.inner = function, nn.ModuleList(modules)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*self.inner, *inputs)


def agrees(module: nn.Module, specs: list[TensorSpec]) -> None:
    """The graph says at two batch sizes what the module says."""
    graph = capture(module.eval(), specs)
    for n in (1, 5):
        torch.manual_seed(n)
        given = {
            s.name: torch.randint(0, 4, s.at(n)) if s.dtype == "int64" else torch.randn(s.at(n))
            for s in specs
        }
        torch.testing.assert_close(interpret(graph, given)["output"], module(*given.values()))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 0, -5])
def test_bags_of_embeddings(mode: str, padding: int | None) -> None:
    bag = nn.EmbeddingBag(5, 3, mode=mode, padding_idx=padding)
    words = [spec("x", 6, dtype="int64")]
    if mode == "max" and padding is not None:
        with pytest.raises(CompileError, match="EmbeddingBag of this kind"):
            capture(bag, words)
        return
    agrees(bag, words)
    if mode == "sum":
        weighted = Function(lambda b, x, w: b(x, per_sample_weights=w), bag)
        agrees(weighted, [*words, spec("w", 6)])


def test_classes_are_counted() -> None:
    agrees(Function(lambda x: F.one_hot(x, 4).sum(1)), [spec("x", 6, dtype="int64")])
    with pytest.raises(CompileError, match="one_hot") as raised:
        capture(Function(lambda x: x + torch.histc(x, 4, 0, 3).sum()), [spec("x", 6)])
    assert "one_hot" in str(raised.value.fix)


def test_a_transformer_with_a_mask() -> None:
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    network = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    agrees(
        Function(lambda t, a, b: t(a, b, tgt_mask=mask), network),
        [spec("a", 4, 8), spec("b", 5, 8)],
    )


def test_complex_products_stay_complex() -> None:
    """They were computed as float64, of the real parts alone, and nothing said so."""
    weight = torch.randn(6, 6, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    agrees(Function(lambda x: (x.to(torch.complex64) @ weight).abs()), [spec("x", 6)])
    agrees(Function(lambda x: F.linear(x.to(torch.complex64), weight).abs()), [spec("x", 6)])


def quantized() -> nn.Module:
    layer = nn.Sequential(torch.ao.quantization.QuantStub(), nn.Linear(6, 3))
    layer.qconfig = torch.ao.quantization.default_qconfig
    prepared = torch.ao.quantization.prepare(layer.eval())
    prepared(torch.randn(2, 6))
    return torch.ao.quantization.convert(prepared)


@pytest.mark.filterwarnings("ignore")  # torch deprecates its own quantization
@pytest.mark.parametrize(
    ("make", "fix"),
    [
        (lambda: Function(lambda x: x[0][torchvision.ops.nms(x[0], x[0, :, 0], 0.5)]), "nms"),
        (lambda: Function(lambda x: x * 2 if bool((x.sum() > 0).all()) else x), "fixed"),
        (quantized, "precision='int8'"),
    ],
    ids=["nms", "branch", "quantized"],
)
def test_a_refusal_says_what_to_do(make: Any, fix: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CompileError) as raised:
        capture(make(), [spec("x", 7, 4) if fix == "nms" else spec("x", 6)])
    assert fix in str(raised.value.fix)
    assert len(str(raised.value)) < 800
    said = capfd.readouterr()
    assert "torch.ops.aten" not in said.out + said.err


def test_len_of_a_tensor_is_the_open_batch() -> None:
    """As Hugging Face's detectors ask for it; afterwards Python's own is back."""
    agrees(Function(lambda x: x.reshape(len(x), -1) + len([1, 2])), [spec("x", 3, 2)])
    assert "len" not in globals()


def test_products_with_a_row_and_extremes_without_places() -> None:
    row = torch.tensor([1.0, -2.0, 0.5])
    agrees(Function(lambda x: F.linear(x, row)), [spec("x", 4, 3)])
    agrees(Function(lambda x: x.max(-1).values + x.min(1, keepdim=True)[0]), [spec("x", 4, 4)])
    agrees(Function(lambda x: x.max(1).indices), [spec("x", 4, 4)])
    captured = capture(Function(lambda x: x.max(-1).values), [spec("x", 4)])
    assert [node.op for node in captured.nodes] == ["amax"]
