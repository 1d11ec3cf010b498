"""Activations and norms written out as several operators are one again, with the same answers."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tessella.core.spec import DimRange, TensorSpec
from tessella.graph import capture, interpret
from tessella.graph.graph import Graph
from tessella.graph.onnx.read import read

Tensor = torch.Tensor
Forward = Callable[["Net", Tensor], Tensor | tuple[Tensor, ...]]
WIDTH = 8
SPEC = TensorSpec(name="x", dtype="float32", shape=(DimRange(min=1, opt=2, max=4), 5, WIDTH))


class Net(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.column = nn.Parameter(torch.randn(5, 1))
        self.run = forward

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.run(self, x)


def erf_half(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def tanh_of(x: Tensor, cube: Tensor) -> Tensor:
    return 1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * cube))


def centred(x: Tensor, dim: int | tuple[int, ...] = -1) -> Tensor:
    return x - x.mean(dim, keepdim=True)


def deviation(x: Tensor, eps: float = 1e-5, dim: int | tuple[int, ...] = -1) -> Tensor:
    return (x.pow(2).mean(dim, keepdim=True) + eps).sqrt()


def layer_norm(x: Tensor) -> Tensor:
    return centred(x) / deviation(centred(x))


CASES: dict[str, tuple[Forward, str]] = {
    "gelu": (lambda m, x: x * erf_half(x), "gelu"),
    "gelu, times a half last": (lambda m, x: x * (torch.erf(x * 0.70710678) + 1) * 0.5, "gelu"),
    "gelu, half of x first": (lambda m, x: (x / 2) * (1 + torch.erf(x / 1.41421356)), "gelu"),
    "gelu of a product": (lambda m, x: (y := x * m.weight * x) * erf_half(y), "gelu"),
    "gelu tanh": (lambda m, x: 0.5 * x * tanh_of(x, x**3), "gelu"),
    "gelu tanh, by products": (lambda m, x: x * tanh_of(x, x * (x * x)) * 0.5, "gelu"),
    "gelu tanh, factored": (
        lambda m, x: 0.5 * x * (1 + torch.tanh(x * 0.7978845608 * (1 + 0.044715 * x * x))),
        "gelu",
    ),
    "silu": (lambda m, x: x * torch.sigmoid(x), "silu"),
    "hardswish": (lambda m, x: F.hardsigmoid(x) * x, "hardswish"),
    "hardswish by relu6": (lambda m, x: x * F.relu6(x + 3) / 6, "hardswish"),
    "hardswish by clamp": (lambda m, x: x * (x + 3).clamp(0, 6) * (1 / 6), "hardswish"),
    "mish": (lambda m, x: x * torch.tanh(F.softplus(x)), "mish"),
    "layer norm": (lambda m, x: layer_norm(x) * m.weight + m.bias, "layer_norm"),
    "layer norm, bare": (lambda m, x: layer_norm(x), "layer_norm"),
    "layer norm, no weight": (lambda m, x: m.bias + layer_norm(x), "layer_norm"),
    "layer norm of two axes": (
        lambda m, x: centred(x, (1, 2)) / deviation(centred(x, (1, 2)), 1e-3, (-1, -2)),
        "layer_norm",
    ),
    "layer norm, rsqrt": (
        lambda m, x: (y := centred(x)) * torch.rsqrt((y * y).mean(-1, keepdim=True) + 1e-6),
        "layer_norm",
    ),
    "rms norm": (lambda m, x: m.weight * (x / deviation(x)), "rms_norm"),
    "rms norm, rsqrt": (
        lambda m, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * m.weight,
        "rms_norm",
    ),
}
# these have no operator of their own, or would make another result
OTHERS: dict[str, Forward] = {
    "another factor": lambda m, x: 0.6 * x * (1 + torch.erf(x / math.sqrt(2))),
    "another width": lambda m, x: x * (1 + torch.erf(x / 1.5)) * 0.5,
    "the gate of another": lambda m, x: m.weight * torch.sigmoid(x),
    "squeeze and excite": lambda m, x: x * torch.sigmoid(x.mean(1, keepdim=True)),
    "a quick gelu": lambda m, x: x * torch.sigmoid(1.702 * x),
    "the gate is told too": lambda m, x: (x * (g := torch.sigmoid(x)), g),
    "x squared": lambda m, x: x * x * torch.sigmoid(x),
    "a softplus of its own": lambda m, x: x * torch.tanh(F.softplus(x, beta=2)),
    "a softplus that ends early": lambda m, x: x * torch.tanh(F.softplus(x, threshold=0.1)),
    "a mean of all": lambda m, x: x / (x.pow(2).mean() + 1e-5).sqrt(),
    "a mean of all, kept": lambda m, x: x / (x.pow(2).mean(None, keepdim=True) + 1e-5).sqrt(),
    "half, its mean not": lambda m, x: (
        (y := x.half()) * (y.pow(2).mean(-1, keepdim=True, dtype=torch.float32) + 1e-5).rsqrt()
    ),
    "over other axes": lambda m, x: centred(x, 1) / deviation(centred(x, 1), dim=1),
    "of other deviations": lambda m, x: centred(x) / deviation(x - 1),
    "by a product": lambda m, x: x * deviation(x),
}


def test_a_weight_of_another_type_stays_outside() -> None:
    module = Net(lambda m, x: (y := x.half()) / deviation(y) * m.weight)
    graph = capture(module, [SPEC])
    assert [op for op in ops(graph) if op != "to"] == ["rms_norm", "mul"]
    x = torch.randn(2, 5, WIDTH)
    (answer,) = answers(graph, x)
    torch.testing.assert_close(answer, module(x), rtol=1e-2, atol=1e-2)


def ops(graph: Graph) -> list[str]:
    return [node.op for node in graph.nodes]


def answers(graph: Graph, x: Tensor) -> list[Tensor]:
    return list(interpret(graph, {graph.inputs[0].name: x}).values())


@pytest.mark.parametrize("name", CASES)
def test_is_one_operator(name: str) -> None:
    forward, op = CASES[name]
    module = Net(forward)
    graph = capture(module, [SPEC])
    made = ops(graph)
    assert made[-1] == op
    assert made.count("mul") == (2 if name == "gelu of a product" else 0)
    assert not {"div", "add", "sub", "mean"} & set(made)
    x = torch.randn(3, 5, WIDTH) * 2
    (answer,) = answers(graph, x)
    torch.testing.assert_close(answer, module(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_another_function_stays(name: str) -> None:
    module = Net(OTHERS[name])
    graph = capture(module, [SPEC])
    known = {"gelu", "silu", "hardswish", "mish", "layer_norm", "rms_norm"}
    assert not known & set(ops(graph))
    x = torch.randn(3, 5, WIDTH)
    made, right = answers(graph, x), module(x)
    for one, other in zip(made, right if isinstance(right, tuple) else (right,), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_in_an_old_onnx_file() -> None:
    """As torch writes a block for opset 14: 9 operators a norm, 5 and 8 a GELU, 2 a SiLU."""
    layers = (nn.LayerNorm(WIDTH), nn.GELU(), nn.GELU(approximate="tanh"), nn.SiLU(), nn.Mish())
    module, x, file = nn.Sequential(*layers).eval(), torch.randn(2, 5, WIDTH), io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, (x,), file, opset_version=14, dynamo=False)
    graph = read(file.getvalue())
    assert ops(graph) == ["layer_norm", "gelu", "gelu", "silu", "mish"]
    approximations = [n.attrs["approximate"] for n in graph.nodes if n.op == "gelu"]
    assert approximations == ["none", "tanh"]
    (answer,) = answers(graph, x)
    torch.testing.assert_close(answer, module(x), rtol=1e-4, atol=1e-5)
