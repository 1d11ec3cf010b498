"""Each pass alone: the graph computes the same after it, and has the promised shape."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tessella.compiler.rewrites import (
    assign_layout,
    dead_code,
    drop_no_ops,
    fold_batch_norm,
    fold_constants,
    fuse_epilogue,
    lower_precision,
)
from tessella.core.spec import DimRange, TensorSpec
from tessella.graph import capture, check, interpret
from tessella.graph.graph import Dim, Graph, Node, Value

BATCH = DimRange(min=1, opt=2, max=8)
IMAGE = (TensorSpec(name="image", dtype="float32", shape=(BATCH, 3, 8, 8)),)
ROWS = (TensorSpec(name="rows", dtype="float32", shape=(BATCH, 6)),)


class Net(nn.Module):
    """Layers for the tests, and a forward that a test gives."""

    def __init__(self, forward: Callable[[Net, torch.Tensor], object]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.other = nn.Conv2d(3, 4, 1, bias=False)
        self.norm, self.norm2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False)
        self.linear, self.norm1d = nn.Linear(6, 5), nn.BatchNorm1d(5)
        for norm in (self.norm, self.norm2, self.norm1d):
            nn.init.uniform_(norm.running_mean, -1, 1)
            nn.init.uniform_(norm.running_var, 0.5, 2)
        for norm in (self.norm, self.norm1d):
            nn.init.uniform_(norm.weight, -2, 2)
            nn.init.uniform_(norm.bias, -1, 1)
        self.constant = nn.Parameter(torch.randn(4, 1, 1))
        self._forward = forward

    def forward(self, x: torch.Tensor) -> object:
        return self._forward(self, x)


def captured(forward: Callable[[Net, torch.Tensor], object], inputs=IMAGE) -> Graph:
    return capture(Net(forward), inputs)


def answers(graph: Graph) -> list[torch.Tensor]:
    """The outputs in float64 for three random samples."""
    torch.manual_seed(1)
    inputs = {v.name: torch.randn(3, *map(int, v.shape[1:])) for v in graph.inputs}
    return list(interpret(graph, inputs, upcast=torch.float64).values())


def after(apply: Callable[[Graph], int], graph: Graph, rewrites: int) -> list[str]:
    """Apply a pass, check the graph and its answers and count; returns the operations left."""
    before = answers(graph)
    assert apply(graph) == rewrites
    dead_code.apply(graph)
    check(graph)
    for was, now in zip(before, answers(graph), strict=True):
        torch.testing.assert_close(now, was, rtol=1e-5, atol=1e-6)
    return [n.op for n in graph.nodes]


# --- fold_batch_norm ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forward", "folds", "left"),
    [
        (lambda m, x: m.norm(m.conv(x)), 1, ["conv2d"]),
        (lambda m, x: m.norm(m.other(x)), 1, ["conv2d"]),
        (lambda m, x: m.norm2(m.norm(m.conv(x))), 2, ["conv2d"]),
        # the convolution has a second reader, which wants the result as it is
        (lambda m, x: m.norm(c := m.conv(x)) + c.mean(), 0, None),
        # the graph's user reads it
        (lambda m, x: (c := m.conv(x), m.norm(c)), 0, ["conv2d", "batch_norm"]),
        # behind a sum, an activation or a pool it is no longer the convolution's
        (lambda m, x: m.norm(m.conv(x) + m.other(x)), 0, None),
        (lambda m, x: m.norm(F.relu(m.conv(x))), 0, None),
        # a weight that two layers share must not change for the other
        (lambda m, x: m.norm(m.conv(x)) + m.conv(x * 2), 1, None),
        (lambda m, x: m.norm(m.conv(x)) + m.norm2(m.conv(x * 2)), 2, None),
    ],
)  # fmt: skip
def test_fold_batch_norm(forward, folds: int, left: list[str] | None) -> None:
    ops = after(fold_batch_norm.apply, captured(forward), folds)
    assert left is None or ops == left


def test_fold_batch_norm_into_linear_only_over_its_features() -> None:
    graph = captured(lambda m, x: m.norm1d(m.linear(x)), ROWS)
    assert after(fold_batch_norm.apply, graph, 1) == ["linear"]
    tokens = (TensorSpec(name="tokens", dtype="float32", shape=(BATCH, 5, 6)),)
    graph = captured(lambda m, x: m.norm1d(m.linear(x)), tokens)  # axis 1 has 5 tokens too
    assert after(fold_batch_norm.apply, graph, 0) == ["linear", "batch_norm"]


# --- fuse_epilogue --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forward", "fused", "left"),
    [
        (lambda m, x: F.relu(m.conv(x)), 1, ["conv2d"]),
        (lambda m, x: F.gelu(m.conv(x), approximate="tanh"), 1, ["conv2d"]),
        (lambda m, x: F.leaky_relu(m.conv(x)), 0, ["conv2d", "leaky_relu"]),
        (lambda m, x: m.conv(x) + m.constant, 1, ["conv2d"]),
        (lambda m, x: m.constant + m.other(x), 1, ["conv2d"]),
        # an activation behind views, but for an output of the graph
        (lambda m, x: F.gelu(m.conv(x).flatten(2).transpose(1, 2)) * 2, 1,
         ["conv2d", "reshape", "permute", "mul"]),
        (lambda m, x: F.relu(m.conv(x).flatten(2)), 0, ["conv2d", "reshape", "relu"]),
        (lambda m, x: m.conv(x).flatten(2).chunk(2, 1)[1] * 2, 0, None),  # a reader of two results
        # residual in either order, then the activation
        (lambda m, x: F.relu(m.conv(x) + F.max_pool2d(m.other(x), 1)), 2, None),
        (lambda m, x: F.relu(F.max_pool2d(m.other(x), 1) + m.conv(x)), 2, None),
        (lambda m, x: F.relu(m.conv(x) + m.other(x)), 2, ["conv2d", "conv2d"]),
        # the residual is made after the convolution: the step moves behind it
        (lambda m, x: (c := m.conv(x), r := torch.tanh(m.other(x)), c + r)[-1], 2, None),
        # a scaled, broadcast or repeated sum is no residual
        (lambda m, x: torch.add(m.conv(x), torch.exp(m.other(x)), alpha=2), 0, None),
        (lambda m, x: m.conv(x) + m.other(x).mean((2, 3), keepdim=True), 0, None),
        (lambda m, x: (c := m.conv(x)) + c, 0, ["conv2d", "add"]),
        # nothing comes after an activation
        (lambda m, x: F.relu(m.conv(x)) + torch.exp(m.other(x)), 1, None),
        (lambda m, x: torch.sigmoid(F.relu(m.conv(x))), 1, ["conv2d", "sigmoid"]),
        # the result before the activation is needed elsewhere
        (lambda m, x: F.relu(c := m.conv(x)) + c.mean(), 0, None),
        (lambda m, x: (c := m.conv(x), F.relu(c)), 0, ["conv2d", "relu"]),
        # the activation's result may have many readers
        (lambda m, x: (r := F.relu(m.conv(x)), r.mean((2, 3)), r * 2)[1:], 1, None),
        # a residual that needs the convolution itself would be a loop
        (lambda m, x: (c := m.conv(x)) + torch.exp(c), 0, ["conv2d", "exp", "add"]),
        (lambda m, x: (c := m.conv(x), e := torch.exp(c), m.other(x) + e + c)[-1], 1, None),
    ],
)  # fmt: skip
def test_fuse_epilogue(forward, fused: int, left: list[str] | None) -> None:
    graph = captured(forward)
    ops = after(fuse_epilogue.apply, graph, fused)
    assert left is None or ops == left


def test_fuse_epilogue_of_linear_keeps_names_of_outputs() -> None:
    graph = capture(Net(lambda m, x: F.gelu(m.linear(x))), ROWS, outputs=("scores",))
    assert after(fuse_epilogue.apply, graph, 1) == ["linear"]
    assert [v.name for v in graph.outputs] == ["scores"]


def test_batch_norm_then_residual_then_relu_is_one_step() -> None:
    graph = captured(lambda m, x: F.relu(m.norm(m.conv(x)) + m.norm2(m.other(x))))
    after(fold_batch_norm.apply, graph, 2)
    assert after(fuse_epilogue.apply, graph, 2) == ["conv2d", "conv2d"]
    assert graph.nodes[-1].attrs["activation"] == "relu"
    assert graph.nodes[-1].inputs[3] is graph.nodes[0].output


# --- the small ones -------------------------------------------------------------------------------


def test_fold_constants_but_nothing_that_follows_the_batch() -> None:
    graph = captured(lambda m, x: m.conv(x) * torch.exp(m.constant).reshape(1, 4, 1, 1))
    assert after(fold_constants.apply, graph, 2) == ["conv2d", "mul"]
    graph = captured(lambda m, x: torch.cat([x[:, :1, 0], m.constant.expand(4, 1, 8)[:1]
                                             .expand(x.shape[0], 1, 8)], 1))  # fmt: skip
    ops = after(fold_constants.apply, graph, 2)
    assert "expand" in ops


def test_fold_constants_refuses_to_blow_up() -> None:
    graph = captured(lambda m, x: x.mean() * m.constant.expand(4, 1000, 1000))
    assert "expand" in after(fold_constants.apply, graph, 0)


@pytest.mark.parametrize(
    ("forward", "left"),
    [
        (lambda m, x: x.reshape(x.shape).exp(), ["exp"]),
        (lambda m, x: x.flatten(1).reshape(-1, 4, 48).exp(), ["reshape", "exp"]),
        (lambda m, x: x.permute(0, 2, 3, 1).permute(0, 3, 1, 2).exp(), ["exp"]),
        (lambda m, x: x.permute(0, 2, 3, 1).permute(0, 2, 1, 3).exp(), ["permute", "exp"]),
        (lambda m, x: x.clone().exp().to(torch.float32), ["exp"]),
        (lambda m, x: F.pad(x, (0, 0, 0, 0)).exp(), ["exp"]),
        (lambda m, x: F.interpolate(x, size=x.shape[2:], mode="bilinear").exp(), ["exp"]),
        (lambda m, x: F.pad(x, (0, 0, 0, 1)).exp(), ["pad", "exp"]),
    ],
)
def test_drop_no_ops(forward, left: list[str]) -> None:
    graph = captured(forward)
    before = answers(graph)
    while drop_no_ops.apply(graph):
        dead_code.apply(graph)
    dead_code.apply(graph)
    check(graph)
    torch.testing.assert_close(answers(graph), before)
    assert [n.op for n in graph.nodes if n.output not in graph.outputs or n.op != "clone"] == left


def counted(*shape: int) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(shape)


@pytest.mark.parametrize(
    ("forward", "all_taken"),
    [
        (lambda x: x[counted(4, 1, 1, 1), counted(6)], True),
        (lambda x: x[counted(4, 1), counted(1, 6)], True),
        (lambda x: x[counted(4)], True),
        (lambda x: x[counted(4, 1, 1), counted(2, 3)], True),
        (lambda x: x[counted(4, 1), counted(2, 1, 3)], False),  # axes between each other's
        (lambda x: x[:, :1][counted(4, 1), counted(1)], True),
        (lambda x: x[counted(4), counted(6, 1)], False),  # transposed
        (lambda x: x[counted(4, 1), counted(5)], False),
        (lambda x: x[counted(4, 1), counted(6).flip(0)], False),
        (lambda x: x[:, :4][counted(4), counted(4)], False),  # the diagonal
        (lambda x: x[counted(1), counted(6)], False),
        (lambda x: x[:, counted(6)], False),  # right, but nobody has asked for it
    ],
)
def test_an_index_that_takes_all_is_a_reshape(forward, all_taken: bool) -> None:
    spec = TensorSpec(name="rows", dtype="float32", shape=(4, 6))
    graph = capture(Net(lambda m, x: forward(x).exp()), (spec,))
    fold_constants.apply(graph)
    inputs = {"rows": torch.randn(4, 6)}
    before = interpret(graph, inputs)
    drop_no_ops.apply(graph)
    dead_code.apply(graph)
    check(graph)
    for name, tensor in interpret(graph, inputs).items():
        assert torch.equal(tensor, before[name])
    assert all_taken == all(n.op != "fallback" for n in graph.nodes)


@pytest.mark.parametrize(
    ("forward", "all_taken"),
    [
        (lambda x, n: x[n[:, None, None], counted(6)], True),  # transformers' masks
        (lambda x, n: x[n.view(-1, 1), counted(1, 6)], True),
        (lambda x, n: x[n, x.argmax(1)], False),  # a place in each sample
        (lambda x, n: x[n[:, None], counted(6).flip(0)], False),
    ],
)
def test_an_index_of_every_sample(forward, all_taken: bool) -> None:
    """The batch follows: what is counted is how many samples there are."""
    spec = TensorSpec(name="rows", dtype="float32", shape=(DimRange(min=1, opt=2, max=8), 6))
    module = Net(lambda m, x: forward(x, torch.arange(x.shape[0])).exp())
    graph = capture(module, (spec,))
    fold_constants.apply(graph)
    drop_no_ops.apply(graph)
    dead_code.apply(graph)
    check(graph)
    for batch in (1, 3, 8):
        rows = torch.randn(batch, 6)
        (answer,) = interpret(graph, {"rows": rows}).values()
        assert torch.equal(answer, module(rows))
    assert all_taken == all(n.op != "fallback" for n in graph.nodes)


def test_dead_code() -> None:
    graph = captured(lambda m, x: (m.other(x), m.conv(x)))
    graph.outputs.pop()
    assert after(dead_code.apply, graph, 1) == ["conv2d"]
    assert len(graph.constants) == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_lower_precision_casts_at_the_edges_only(dtype: str) -> None:
    graph = captured(lambda m, x: (m.norm(F.relu(m.conv(x))), torch.softmax(x, 1)))
    right = answers(graph)
    lower_precision.apply(graph, dtype)
    check(graph)
    assert [n.op for n in graph.nodes].count("to") == 3  # the image once, each of two outputs
    assert {v.dtype for v in (*graph.inputs, *graph.outputs)} == {"float32"}
    norm = next(n for n in graph.nodes if n.op == "batch_norm")
    assert {v.dtype for v in norm.inputs[1:]} == {"float32"}  # a float16 variance would overflow
    torch.manual_seed(1)
    made = interpret(graph, {"image": torch.randn(3, 3, 8, 8)})
    for was, now in zip(right, made.values(), strict=True):
        torch.testing.assert_close(now.double(), was, rtol=0.05, atol=0.1)
        assert not torch.equal(now.double(), was)


def test_lower_precision_leaves_unknown_operators_in_float32() -> None:
    """But those that only move numbers: these lie as their neighbours do."""
    graph = captured(lambda m, x: torch.flip(torch.cumsum(m.conv(x), 2), [2]).exp())
    lower_precision.apply(graph, "bfloat16")
    check(graph)
    summed, flipped = (n for n in graph.nodes if n.op == "fallback")
    assert {v.dtype for v in (*summed.inputs, *summed.outputs)} == {"float32"}
    assert {v.dtype for v in (*flipped.inputs, *flipped.outputs)} == {"bfloat16"}


def test_lower_precision_casts_each_of_many_inputs() -> None:
    """What stays float32 are scales and biases, not whatever stands at their positions."""
    values = [Value(f"x{i}", "float32", (Dim(), 2)) for i in range(5)]
    out = Value("out", "float32", (Dim(), 10))
    graph = Graph("cat", values, [out], [Node("cat", tuple(values), (out,), {"dim": 1})])
    lower_precision.apply(graph, "float16")
    check(graph)
    (cat,) = (n for n in graph.nodes if n.op == "cat")
    assert {v.dtype for v in cat.inputs} == {"float16"}


def test_layout_follows_convolutions_and_copies_at_the_border() -> None:
    graph = captured(lambda m, x: (F.relu(m.conv(x)) + m.other(x)).flatten(1).exp())
    formats = assign_layout.apply(graph, "channels_last")
    check(graph)
    found = {n.op: formats[n.output.name] for n in graph.nodes}
    assert found == {
        "to": "channels_last", "conv2d": "channels_last", "relu": "channels_last",
        "add": "channels_last", "reshape": "contiguous", "exp": "contiguous",
    }  # fmt: skip
    assert [n.op for n in graph.nodes].count("to") == 1  # both convolutions read one copy


def test_pixels_with_their_channels_together_are_channels_last_without_a_copy() -> None:
    """As ConvNeXt writes its blocks: a norm over the channels, between convolutions."""

    def block(m: Net, x: torch.Tensor) -> torch.Tensor:
        y = F.layer_norm(m.conv(x).permute(0, 2, 3, 1), (4,)).permute(0, 3, 1, 2)
        return m.conv(y[:, :3]).permute(0, 1, 3, 2)

    graph = captured(block)
    formats = assign_layout.apply(graph, "channels_last")
    found = [(n.op, formats[n.output.name]) for n in graph.nodes if n.op in ("permute", "to")]
    assert found == [
        ("to", "channels_last"),  # the image
        ("permute", "contiguous"),
        ("permute", "channels_last"),
        ("to", "channels_last"),  # a cut of its channels
        ("permute", "strided"),
    ]


def test_layout_needs_no_copy_of_one_channel() -> None:
    torch.manual_seed(0)
    grey = (TensorSpec(name="image", dtype="float32", shape=(BATCH, 1, 8, 8)),)
    graph = capture(nn.Conv2d(1, 4, 3), grey)
    assign_layout.apply(graph, "channels_last")
    assert [n.op for n in graph.nodes] == ["conv2d"]


@pytest.mark.parametrize(("shown", "expected"), [(False, "strided"), (True, "contiguous")])
def test_heads_cut_out_of_one_layers_result_are_read_where_they_lie(
    shown: bool, expected: str
) -> None:
    """Those of a fused layer, by attention; another reader wants them dense."""

    def attention(m: Net, x: torch.Tensor) -> torch.Tensor:
        parts = [p.view(x.shape[0], 4, 2, 3).transpose(1, 2) for p in x.split(6, 2)]
        made = F.scaled_dot_product_attention(*parts)
        return made + parts[0].exp() + parts[1].exp() + parts[2].exp() if shown else made

    tokens = (TensorSpec(name="tokens", dtype="float32", shape=(BATCH, 4, 18)),)
    graph = captured(attention, tokens)
    formats = assign_layout.apply(graph, "contiguous")
    cuts = [n.output.name for n in graph.nodes if n.op == "reshape"]
    assert [formats[name] for name in cuts] == [expected] * 3
