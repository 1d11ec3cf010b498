"""Layers with a GELU or the like write int8 and fp8, where a kernel of the target can."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from tessella.compiler import passes, pipeline
from tessella.compiler.calibration import Calibration
from tessella.compiler.choices import variants
from tessella.compiler.passes import PASSES, request_for, run
from tessella.compiler.precision import assign
from tessella.compiler.rewrites import fuse_requantization
from tessella.core.spec import DimRange, TensorSpec
from tessella.device.x86 import code
from tessella.graph import capture, check, interpret
from tessella.graph.graph import Graph, Node, Value
from tessella.kernels import catalog
from tessella.kernels.shared import onednn
from tests.support.choices import problem_of
from tests.support.networks import captured
from tests.support.quantized import Block, calibrated, graph_of

ACTIVATIONS = {
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU(approximate="tanh"),
    "silu": nn.SiLU(),
    "hardswish": nn.Hardswish(),
    "sigmoid": nn.Sigmoid(),
    "tanh": nn.Tanh(),
}


class Mlp(nn.Module):
    """Half a block of a ViT: norm, two layers and what they are added to; ``width`` between."""

    def __init__(self, act: nn.Module, width: int = 128) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.act = nn.LayerNorm(32), act
        self.up, self.down = nn.Linear(32, width), nn.Linear(width, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Conv2d(16, 48, 3, padding=1), nn.Conv2d(48, 16, 1)
        self.wide = nn.Conv2d(48, 48, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        silu = nn.functional.silu
        return self.b(silu(self.wide(silu(self.a(x))))).mean((2, 3))


def stages(
    graph: Graph, kind: str, found: Calibration, target: str, **precisions: str
) -> tuple[Graph, Graph]:
    """The graph that says what is rounded, and the one whose kernels are chosen."""
    exact = pipeline.optimized(graph)
    assignment = assign(exact, kind, precisions, target, found)
    request = request_for(exact, assignment, found)
    rounded = run(exact, request, after="optimize", until="lower")
    return rounded, run(rounded, request, after="lower", until="fuse")


def rescaled(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes if "gamma" in n.attrs]


def assert_alike(rounded: Graph, made: Graph, *shape: int) -> None:
    x = {"x": torch.randn(3, *shape, generator=torch.Generator().manual_seed(2))}
    right, fused = (interpret(graph, x)["scores"] for graph in (rounded, made))
    assert (fused - right).abs().max() <= 0.02 * right.abs().max()


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_block_has_one_step_fewer(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(Mlp(ACTIVATIONS[name]), 5, 32)
    found = calibrated(graph, 5, 32, kinds=(kind,))
    rounded, made = stages(graph, kind, found, "sm_90")
    (layer,) = rescaled(made)
    assert layer.attrs["activation"] == name
    assert layer.output.dtype == layer.attrs["dtype"] == layer.inputs[0].dtype
    assert "quantize" not in {n.op for n in made.nodes}  # the other one is the norm's
    with monkeypatch.context() as without:
        without.setattr(passes, "PASSES", [p for p in PASSES if p.name != "fuse_requantization"])
        _, before = stages(graph, kind, found, "sm_90")
    assert not rescaled(before)
    assert len(made.nodes) == len(before.nodes) - 1
    assert_alike(rounded, made, 5, 32)


INT8 = ("avx2", "avx2_vnni", "avx512_vnni", "amx_int8")  # what layers of int8 are written in


@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_where_only_the_last_resort_could_nothing_changes(target: str) -> None:
    graph = graph_of(Mlp(nn.GELU()), 5, 32)
    found = replace(calibrated(graph, 5, 32), zero_points={})  # as of a layer before others
    rounded, made = stages(graph, "int8", found, "cpu")
    # its layers of int8 have the factor: with AVX2 alone where calibration leaves weights 7 bits
    ours = any(code.refusal(isa) is None for isa in INT8)
    assert bool(rescaled(made)) == ours
    assert bool(fuse_requantization.apply(rounded.copy(), target)) == (ours and target == "cpu")
    for value, tensor in list(rounded.constants.items()):  # of 8 bits, as other tools write them
        if tensor.dtype == torch.int8:
            rounded.constants[value] = torch.full_like(tensor, 100)
    takes_any = target == "cpu" and ours and not onednn.narrow_sums()
    assert bool(fuse_requantization.apply(rounded, target)) == takes_any


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_convolutions_in_a_row_stay_on_codes(target: str) -> None:
    graph = graph_of(Convolutions(), 16, 6, 6)
    rounded, made = stages(graph, "int8", calibrated(graph, 16, 6, 6), target)
    assert len(rescaled(made)) == 2
    assert_alike(rounded, made, 16, 6, 6)


def test_a_gpu_without_fp8_has_no_such_layers() -> None:
    """Kernels are asked about the target, whatever GPU this machine has."""
    graph = graph_of(Convolutions(), 16, 6, 6)
    found = calibrated(graph, 16, 6, 6, kinds=("fp8",))
    assert rescaled(stages(graph, "fp8", found, "sm_89")[1])
    assert not rescaled(stages(graph, "fp8", found, "sm_80")[1])


def test_channels_are_padded_for_tiles_of_16_bytes() -> None:
    graph = graph_of(Mlp(nn.Sigmoid(), width=40), 5, 32)
    rounded, made = stages(graph, "int8", calibrated(graph, 5, 32), "sm_90")
    (layer,) = rescaled(made)
    assert layer.output.shape[-1] == 48
    assert_alike(rounded, made, 5, 32)


def by_hand(
    zero: int = 0, scale: tuple[float, ...] = (0.02,), dtype: str = "int8", also: str = ""
) -> Graph:
    """gelu of a layer on int8, rounded; ``also``: read twice, a result, or a sum with something."""
    spec = TensorSpec(name="x", dtype="float32", shape=(DimRange(min=1, opt=2, max=4), 32))
    graph = capture(nn.Linear(32, 32).eval(), (spec,), outputs=("y",))
    (node,) = graph.nodes
    (x,) = graph.inputs
    x.dtype = "int8"
    quantized = torch.randint(-9, 9, (32, 32), dtype=torch.int8)
    factor = graph.add_constant("factor", torch.rand(32))
    residual = Value("before", "float32", x.shape) if also == "sum" else None
    node.inputs = (x, graph.add_constant("quantized", quantized), node.inputs[2], residual, factor)
    node.attrs |= {"activation": "gelu", "dtype": "float32"}
    numbers = graph.add_constant("scale", torch.tensor(scale))
    zeros = graph.add_constant("zero", torch.tensor(zero, dtype=torch.int8)) if zero else None
    made = Value("z", dtype, node.output.shape)
    attrs = {"axis": 1, "dtype": dtype}
    graph.nodes.append(Node("quantize", (node.output, numbers, zeros), (made,), attrs))
    if residual is not None:
        back = Node("to", (x,), (residual,), {"dtype": "float32"})
        graph.nodes.insert_first(back)
    if also == "reader":
        seen = Value("seen", "float32", node.output.shape)
        graph.nodes.append(Node("relu", (node.output,), (seen,), {}))
        graph.outputs = [made, seen]
    else:
        graph.outputs = [made, node.output] if also == "result" else [made]
    graph.constants = {v: t for v, t in graph.constants.items() if v in _read(graph)}
    check(graph)
    return graph


def _read(graph: Graph) -> set[Value | None]:
    return {v for n in graph.nodes for v in n.inputs}


@pytest.mark.parametrize(("changes", "fused"), [
    ({}, 1),
    ({"zero": 4}, 0),
    ({"scale": tuple(0.01 + i / 100 for i in range(32))}, 0),
    ({"scale": (1e-39,)}, 0),  # no factor that float32 holds
    ({"dtype": "float8_e4m3fn"}, 0),
    ({"also": "reader"}, 0),
    ({"also": "result"}, 0),
    ({"also": "sum"}, 0),
], ids=repr)  # fmt: skip
def test_what_stays_a_step(changes: dict[str, object], fused: int) -> None:
    graph = by_hand(**changes)
    assert fuse_requantization.apply(graph, "sm_90") == fused
    check(graph)
    assert ("quantize" in {n.op for n in graph.nodes}) == (not fused)


# ── 16 bits, and a pooling between ────────────────────────────────────────────────────────────────


class Stem(nn.Module):
    """A network's beginning: too few channels for int8, a pooling, then a quantized layer."""

    def __init__(
        self, pool: nn.Module, act: nn.Module, channels: int = 3, wide: int = 16, groups: int = 1
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(channels, wide, 5, stride=2, padding=2, groups=groups)
        self.act, self.pool, self.then = act, pool, nn.Conv2d(wide, 16, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.then(self.pool(self.act(self.first(x)))).mean((2, 3))


def before_and_after(
    graph: Graph, kind: str, found: Calibration, monkeypatch: pytest.MonkeyPatch, **precisions: str
) -> tuple[Graph, Graph]:
    """What is measured without the pass, and with it."""
    with monkeypatch.context() as without:
        without.setattr(passes, "PASSES", [p for p in PASSES if p.name != "fuse_requantization"])
        _, before = stages(graph, kind, found, "sm_90", **precisions)
    return before, stages(graph, kind, found, "sm_90", **precisions)[1]


def ops(graph: Graph) -> list[str]:
    return [n.op for n in graph.nodes]


POOLS = {
    "resnet": nn.MaxPool2d(3, stride=2, padding=1),
    "plain": nn.MaxPool2d(2),
    "ceil": nn.MaxPool2d(3, stride=2, ceil_mode=True),
    "dilated": nn.MaxPool2d(2, stride=1, padding=1, dilation=2),
    "long": nn.MaxPool2d((1, 4), stride=(1, 3), padding=(0, 2)),
}


@pytest.mark.parametrize("act", [nn.ReLU(), nn.Identity(), nn.SiLU(), nn.Tanh()], ids=repr)
@pytest.mark.parametrize("pool", POOLS)
def test_the_first_layer_writes_what_a_pooling_leaves_to_round(
    pool: str, act: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes of the largest number and the largest code are one; padding never wins, below zero
    either.
    """
    graph = graph_of(Stem(POOLS[pool], act), 3, 26, 22)
    before, made = before_and_after(graph, "int8", calibrated(graph, 3, 26, 22), monkeypatch)
    assert ops(before)[:4] == ["to", "conv2d", "pointwise", "conv2d"]  # the pool rounds
    assert ops(made)[:4] == ["to", "conv2d", "max_pool2d", "conv2d"]
    first, pooled = made.nodes[1:3]
    assert first.inputs[0].dtype == "float16"
    assert (first.output.dtype, pooled.output.dtype) == ("int8", "int8")
    assert pooled.output.name == before.nodes[2].output.name
    x = {"x": 2 * torch.randn(3, 3, 26, 22, generator=torch.Generator().manual_seed(2))}
    right, fused = (interpret(g, x, upcast=torch.float64)["scores"] for g in (before, made))
    assert torch.equal(right, fused)
    assert_alike(before, made, 3, 26, 22)


@pytest.mark.parametrize("target", ["sm_80", "sm_120"])
def test_the_first_layer_stays_the_libraries_where_no_kernel_is_written_for_the_gpu(
    target: str,
) -> None:
    """They write neither int8 nor fp8: nobody has measured a portable kernel beside them there."""
    graph = graph_of(Stem(POOLS["resnet"], nn.ReLU()), 3, 26, 22)
    _, made = stages(graph, "int8", calibrated(graph, 3, 26, 22), target)
    assert ops(made)[:4] == ["to", "conv2d", "pointwise", "conv2d"]


@pytest.mark.parametrize(("kind", "channels"), [("int8", 3), ("fp8", 3), ("int8", 16)])
def test_without_a_pooling_too(kind: str, channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first layer, or filters that read one channel each."""
    groups = channels if channels == 16 else 1
    graph = graph_of(Stem(nn.Identity(), nn.ReLU(), channels, groups=groups), channels, 16, 16)
    found = calibrated(graph, channels, 16, 16, kinds=(kind,))
    before, made = before_and_after(graph, kind, found, monkeypatch)
    assert ops(before)[:4] == ["to", "conv2d", "quantize", "conv2d"]
    assert ops(made) == [*ops(before)[:2], *ops(before)[3:]]
    x = {"x": torch.randn(3, channels, 16, 16, generator=torch.Generator().manual_seed(2))}
    right, fused = (interpret(g, x, upcast=torch.float64)["scores"] for g in (before, made))
    torch.testing.assert_close(right, fused, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("stem", "kind"), [
    ({}, "fp8"),  # no kernel has a maximum of fp8
    ({"channels": 16, "groups": 4}, "int8"),  # libraries are faster than portable kernels
    ({"channels": 32}, "int8"),  # so is the layer on 16 bits, without this one's factor
], ids=str)  # fmt: skip
def test_a_first_layer_that_would_lose_a_kernel_stays(
    stem: dict[str, int], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    channels = stem.get("channels", 3)
    graph = graph_of(Stem(nn.MaxPool2d(2), nn.ReLU(), **stem), channels, 16, 16)
    first = pipeline.optimized(graph).nodes[0].output.name
    found = calibrated(graph, channels, 16, 16, kinds=(kind,))
    before, made = before_and_after(graph, kind, found, monkeypatch, **{first: "fp16"})
    assert ops(made) == ops(before)
    assert not rescaled(made)


class ByChannel(nn.Module):
    """Filters of one channel each, whose results the next ones and a layer read, and all a last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.each = nn.ModuleList([nn.Conv2d(16, 16, 3, padding=1, groups=16) for _ in range(2)])
        self.mix, self.last = nn.Conv2d(16, 16, 1), nn.Conv2d(32, 16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.each[0](x).relu()
        second = self.each[1](self.mix(first)).relu()
        return self.last(torch.cat([first, second], 1)).mean((2, 3))


def test_what_is_rounded_for_one_layer_is_joined_rounded_for_another() -> None:
    graph = graph_of(ByChannel(), 16, 9, 8)
    rounded, made = stages(graph, "int8", calibrated(graph, 16, 9, 8), "sm_90")
    assert "quantize" not in ops(made)
    (joined,) = (n for n in made.nodes if n.op == "cat")
    assert joined.output.dtype == "int8"
    x = {"x": torch.randn(3, 16, 9, 8, generator=torch.Generator().manual_seed(2))}
    right, near = (interpret(g, x, upcast=torch.float64)["scores"] for g in (rounded, made))
    assert (near - right).norm() <= 2e-2 * right.norm()


@pytest.mark.parametrize("kind", ["int8", "fp32"])
def test_a_cpus_first_layer_in_float32_writes_int8(kind: str) -> None:
    graph = graph_of(Stem(nn.MaxPool2d(2), nn.ReLU()), 3, 16, 16)
    first = pipeline.optimized(graph).nodes[0].output.name
    _, made = stages(graph, kind, calibrated(graph, 3, 16, 16), "cpu", **{first: "fp32"})
    ours = kind == "int8" and any(code.refusal(isa) is None for isa in ("avx2", "avx512"))
    assert bool(rescaled(made)) == ours
    assert ("quantize" in ops(made)) == (kind == "int8" and not ours)


@pytest.mark.parametrize("name", ["resnet18", "googlenet", "alexnet"])
def test_hoppers_kernels_take_it(name: str) -> None:
    graph = captured(name)
    shape = [int(d) for d in graph.inputs[0].shape[1:]]
    _, made = stages(graph, "int8", calibrated(graph, *shape), "sm_90")
    laid_out, formats = variants.with_layout(made, "channels_last")
    for batch in (1, 128):
        concrete = laid_out.at_batch(batch)
        nodes = {n.op: n for n in reversed(concrete.nodes)}  # the first of each
        for op, id in {"conv2d": "direct.sm90", "max_pool2d": "windows"}.items():
            problem = problem_of(concrete, nodes[op], formats)
            assert problem.output.dtype == "int8"
            assert problem.output.has("channels_last")
            assert catalog.kernel(f"{op}.{id}").refusal(problem) is None


def pooled(
    zero: int = 0, scale: tuple[float, ...] = (0.02,), read: str = "", residual: bool = False
) -> Graph:
    """A convolution on float16, its pooling, rounded; ``read``: what else is a result."""
    spec = TensorSpec(name="x", dtype="float32", shape=(DimRange(min=1, opt=2, max=4), 3, 8, 8))
    network = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.MaxPool2d(2))
    graph = capture(network.eval(), (spec,), outputs=("y",))
    conv, pool = graph.nodes
    for value in (*graph.inputs, *graph.constants, conv.output, pool.output):
        value.dtype = "float16"
    graph.constants = {v: t.half() for v, t in graph.constants.items()}
    if residual:
        other = Value("other", "float16", conv.output.shape)
        graph.inputs.append(other)
        conv.inputs = (*conv.inputs[:3], other)
    numbers = graph.add_constant("scale", torch.tensor(scale))
    zeros = graph.add_constant("zero", torch.tensor(zero, dtype=torch.int8)) if zero else None
    made = Value("z", "int8", pool.output.shape)
    attrs = {"axis": 1, "dtype": "int8"}
    graph.nodes.append(Node("quantize", (pool.output, numbers, zeros), (made,), attrs))
    also = {"conv": [conv.output], "pool": [pool.output]}
    graph.outputs = [made, *also.get(read, [])]
    check(graph)
    return graph


@pytest.mark.parametrize(("changes", "fused"), [
    ({}, 1),
    ({"zero": 4}, 0),
    ({"scale": tuple(0.01 + i / 100 for i in range(16))}, 0),
    ({"scale": (1e-39,)}, 0),
    ({"read": "conv"}, 0),
    ({"read": "pool"}, 0),
    ({"residual": True}, 0),
], ids=repr)  # fmt: skip
def test_what_stays_behind_a_pooling(changes: dict[str, object], fused: int) -> None:
    graph = pooled(**changes)
    before = graph.copy()
    assert fuse_requantization.apply(graph, "sm_90") == fused
    check(graph)
    assert ("quantize" in ops(graph)) == (not fused)
    generator = torch.Generator().manual_seed(3)
    x = {
        v.name: torch.randn(2, *map(int, v.shape[1:]), generator=generator).half()
        for v in graph.inputs
    }
    made, right = (interpret(g, x, upcast=torch.float64)["z"] for g in (graph, before))
    assert torch.equal(made, right)


# ── attention ─────────────────────────────────────────────────────────────────────────────────────


def attention_of(graph: Graph) -> Node:
    (node,) = [n for n in graph.nodes if n.op == fuse_requantization.ATTENTION]
    return node


@pytest.mark.parametrize("code", ["int8", "fp8"])
@pytest.mark.parametrize("kind", ["rows", "torch", "padded"])
def test_attention_writes_codes(kind: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its heads only views are taken, and the layer behind reads them."""
    graph = graph_of(Block(kind), 5, 64)
    found = calibrated(graph, 5, 64, kinds=(code,))
    before, made = before_and_after(graph, code, found, monkeypatch)
    dtype = {"int8": "int8", "fp8": "float8_e4m3fn"}[code]
    node, plain = attention_of(made), attention_of(before)
    assert (plain.output.dtype, node.output.dtype) == ("float16", dtype)
    assert node.attrs == {**plain.attrs, "dtype": dtype, "gamma": node.attrs["gamma"]}
    assert list(map(repr, node.inputs)) == list(map(repr, plain.inputs))
    place = made.nodes.index(node)
    moves, layer = made.nodes[place + 1 : place + 3], made.nodes[place + 3]
    assert [n.op for n in (*moves, layer)] == ["permute", "reshape", "linear"]
    assert {n.output.dtype for n in moves} == {dtype} == {layer.inputs[0].dtype}
    assert layer.inputs[0] is moves[-1].output
    assert len(made.nodes) == len(before.nodes) - 1
    assert "quantize" in ops(before)[place:]
    assert "quantize" not in ops(made)[place:]
    x = {"x": torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(2))}
    right, fused = (interpret(g, x, upcast=torch.float64)["scores"] for g in (before, made))
    torch.testing.assert_close(right, fused, rtol=1e-12, atol=1e-12)
    assert_alike(before, made, 5, 64)


def test_hoppers_attention_takes_it_where_heads_become_rows() -> None:
    graph = graph_of(Block(), 5, 64)
    _, made = stages(graph, "fp8", calibrated(graph, 5, 64, kinds=("fp8",)), "sm_90")
    laid_out, formats = variants.with_layout(made, "contiguous")
    concrete = laid_out.at_batch(8)
    place = concrete.nodes.index(attention_of(concrete))
    asked = [problem_of(concrete, n, formats) for n in concrete.nodes[place : place + 4]]
    assert [p.output.format for p in asked] == ["strided", "strided", "contiguous", "contiguous"]
    refusals = {row.id: row.refusal(asked[0]) for row in catalog.candidates(asked[0].op, "sm_90")}
    assert {id.partition(".")[2] for id, why in refusals.items() if why is None} == {
        "flash.sm90", "flash", "windows", ""  # the last is the reference
    }  # fmt: skip
    for problem, id in zip(asked[1:3], ("permute.view", "reshape.view"), strict=True):
        assert catalog.kernel(id).refusal(problem) is None
    # as the kernels lay it out, no view of it moves anything
    heads = torch.zeros(8, 5, 2, 32, dtype=torch.float8_e4m3fn).transpose(1, 2)
    rows = heads
    for problem, id in zip(asked[1:3], ("permute.view", "reshape.view"), strict=True):
        rows = catalog.kernel(id).load().bind(problem, {})(rows)
    assert rows.data_ptr() == heads.data_ptr()
    assert asked[2].output.matches(rows)


@pytest.mark.parametrize(("changes", "precisions"), [
    ({"kind": "read"}, {}),  # 16 bits are wanted too
    ({"width": 8}, {}),  # rows of 8 bytes: what is written for Hopper would be lost
    ({}, {fuse_requantization.ATTENTION: "fp32"}),
], ids=str)  # fmt: skip
def test_attention_that_stays(
    changes: dict[str, object], precisions: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    block = Block(**changes)
    graph = graph_of(block, 5, 2 * block.width)
    found = calibrated(graph, 5, 2 * block.width)
    names = {n.op: n.output.name for n in pipeline.optimized(graph).nodes}
    chosen = {names[op]: precision for op, precision in precisions.items()}
    before, made = before_and_after(graph, "int8", found, monkeypatch, **chosen)
    assert ops(made) == ops(before)
    assert not rescaled(made)
    assert "quantize" in ops(made)[ops(made).index(fuse_requantization.ATTENTION) :]


@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_attention_stays_where_no_kernel_writes_codes(target: str) -> None:
    graph = graph_of(Block(), 5, 64)
    found = calibrated(graph, 5, 64)
    rounded, made = stages(graph, "int8", found, "cpu")
    assert not rescaled(made)
    _, narrow = stages(graph, "int8", found, "sm_90")
    assert rescaled(narrow)
    assert fuse_requantization.apply(rounded.copy(), target) == 0
