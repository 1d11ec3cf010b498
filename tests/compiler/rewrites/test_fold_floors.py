"""A factor and a sum behind a ReLU are the layer's: the same numbers, fewer steps."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tessella.compiler import passes, pipeline
from tessella.compiler.rewrites import fold_floors, fuse_epilogue
from tessella.core.spec import DimRange, TensorSpec
from tessella.graph import capture, check, interpret
from tessella.kernels import catalog
from tessella.operations import problems
from tessella.operations.tensor_meta import TensorMeta, meta_of
from tessella.search.find import bind
from tests.support.quantized import calibrated, graph_of

ONE = DimRange(min=1, opt=1, max=1)
# convolutions of each kind that a CPU has machine code for: weight, window
LAYERS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "of pixels": ((37, 20, 1, 1), {}),
    "of windows": ((32, 16, 3, 3), {"padding": (1, 1)}),
    "by channel": ((20, 1, 5, 5), {"padding": (2, 2), "groups": 20}),
}
KNOWN = ("conv2d.onednn", "conv2d.onednn_linear", "conv2d.amx_bf16")  # as to zero


class Learned(nn.Module):
    """A convolution, and behind its ReLU a factor and a sum that a network has learned."""

    def __init__(self, factor: torch.Tensor, term: torch.Tensor, *, turned: bool = False) -> None:
        super().__init__()
        self.conv, self.turned = nn.Conv2d(3, 32, 3, padding=1), turned
        self.factor, self.term = nn.Parameter(factor), nn.Parameter(term)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.conv(x).relu()
        return self.term + y * self.factor if self.turned else self.factor * y + self.term


@pytest.mark.parametrize(
    ("factor", "term", "folds"),
    [
        ([1.5], [-0.25], True),
        ([0.5], [0.75], True),
        ([2.0], [0.0], True),
        ([-1.0], [0.5], False),  # lower numbers would be the higher ones
        ([0.0], [0.5], False),
        ([1.5], [float("inf")], False),
        ([1e38], [0.5], False),  # the weights would have no end
        ([[[1.5]], [[2.5]]] * 16, [0.5], False),  # a number for each channel
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_the_numbers_stay(
    factor: list[float], term: list[float], folds: bool, turned: bool
) -> None:
    torch.manual_seed(0)
    module = Learned(torch.tensor(factor), torch.tensor(term), turned=turned).eval()
    graph = capture(module, [TensorSpec(name="x", dtype="float32", shape=(ONE, 3, 7, 6))])
    fuse_epilogue.apply(graph)
    assert fold_floors.apply(graph, "cpu") == folds
    check(graph)
    assert [n.op for n in graph.nodes] == (["conv2d"] if folds else ["conv2d", "mul", "add"])
    x = torch.randn(1, 3, 7, 6)
    right = module.double()(x.double())
    made = interpret(graph, {"x": x})[graph.outputs[0].name]
    torch.testing.assert_close(made.double(), right, rtol=1e-5, atol=1e-5)
    assert fold_floors.apply(graph, "cpu") == 0


class Parted(nn.Module):
    """A convolution whose result has two parts behind its ReLU, as MixNet's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.conv(x).relu().chunk(2, 1)
        return first - second


def test_parts_of_a_layer_s_result_are_left_alone() -> None:
    graph = capture(Parted(), [TensorSpec(name="x", dtype="float32", shape=(ONE, 3, 7, 6))])
    fuse_epilogue.apply(graph)
    assert fold_floors.apply(graph, "cpu") == 0
    assert [n.op for n in graph.nodes][:2] == ["conv2d", "split"]


class Joined(nn.Module):
    """Three convolutions with such an end, whose results the fourth reads as one, as HGNet's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Conv2d(16, 16, 3, padding=1) for _ in range(3)])
        self.numbers = nn.Parameter(torch.tensor([[1.5, -0.25], [0.5, 0.75], [2.0, -0.5]]))
        self.last = nn.Conv2d(48, 16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [x]
        for layer, (factor, term) in zip(self.layers, self.numbers, strict=True):
            made.append(factor * layer(made[-1]).relu() + term)
        return self.last(torch.cat(made[1:], 1)).mean((2, 3))


@pytest.mark.parametrize("kind", ["fp16", "int8"])
def test_on_a_gpu_layers_write_what_the_next_ones_read(kind: str) -> None:
    graph = graph_of(Joined(), 16, 6, 5)
    found = calibrated(graph, 16, 6, 5, kinds=(kind,)) if kind != "fp16" else None
    exact = pipeline.optimized(graph)
    request = passes.Request(target="sm_90", precision=kind, calibration=found).assigned(exact)
    rounded = passes.run(exact, request, after="optimize", until="lower")
    made = passes.run(rounded, request, after="lower", until="mark")
    layers = [n for n in made.nodes if n.op == "conv2d"]
    assert [n.attrs.get("floor") for n in layers] == [-0.25, 0.75, -0.5, None]
    small = {"fp16": "float16", "int8": "int8"}[kind]
    assert [n.output.dtype for n in layers[:3]] == [small] * 3
    (joined,) = (n for n in made.nodes if n.op == "cat")
    assert joined.output.dtype == small
    assert not {"mul", "add"} & {n.op for n in made.nodes}
    x = torch.randn(2, 16, 6, 5)
    (name,) = (v.name for v in graph.outputs)
    right = interpret(rounded, {"x": x}, upcast=torch.float64)[name]
    near = interpret(made, {"x": x})[name].double()
    assert (near - right).norm() <= 2e-2 * right.norm()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", LAYERS)
def test_every_kernel_that_knows_a_floor_raises_to_it(name: str, dtype: str) -> None:
    shape, window = LAYERS[name]
    torch.manual_seed(0)
    channels = shape[1] * int(window.get("groups", 1))
    kind, near = getattr(torch, dtype), 1e-4 if dtype == "float32" else 2e-2
    x = torch.randn(2, channels, 9, 7).to(kind).to(memory_format=torch.channels_last)
    weight, bias = torch.randn(shape).to(kind), torch.randn(shape[0]).to(kind)
    wide = F.conv2d(x.double(), weight.double(), bias.double(), **window)
    residual = torch.randn(wide.shape).to(kind).to(memory_format=torch.channels_last)
    tried = 0
    for row, floor, added in product(
        catalog.candidates("conv2d", "cpu"), (-0.5, 0.25), (None, residual)
    ):
        problem = problems.conv(
            meta_of(x), meta_of(weight), meta_of(bias), None if added is None else meta_of(added),
            activation="relu", floor=floor, constant=(1, 2), **window,
        )  # fmt: skip
        if (why := row.refusal(problem)) is not None:
            to_zero = replace(problem, attrs={**problem.attrs, "floor": 0.0})
            assert row.refusal(to_zero) or row.id not in KNOWN, why
            continue
        tried += 1
        call, buffers = bind(row, problem, {1: weight, 2: bias}, torch.device("cpu"))
        made = call(*(t for t in (x, added) if t is not None), **buffers).double()
        right = (wide if added is None else wide + added.double()).clamp(min=floor)
        torch.testing.assert_close(made, right, rtol=near, atol=near)
    assert tried


@pytest.mark.parametrize(
    ("floor", "activation", "what"),
    [
        (float("nan"), "relu", "a finite number"),
        (1e39, "relu", "a finite number"),
        ("0.5", "relu", "is a number"),
        (0.5, "silu", "only relu"),
    ],
)
def test_a_stranger_s_floor_is_refused(floor: object, activation: str, what: str) -> None:
    image = TensorMeta(shape=(1, 16, 4, 4), dtype="float32", format="channels_last")
    weight = TensorMeta(shape=(16, 16, 1, 1), dtype="float32")
    asked = problems.conv(image, weight, activation=activation, constant=(1,))
    asked = replace(asked, attrs={**asked.attrs, "floor": floor})
    for row in catalog.candidates("conv2d", "cpu"):
        assert row.isa or what in str(row.refusal(asked)), row.id
