"""A captured graph computes what the module computes, at every batch size; else it says why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from tessella.core.errors import CompileError, UsageError
from tessella.core.spec import DimRange, TensorSpec
from tessella.graph import Dim, Graph, capture, interpret
from tests.support.graphs import BATCH, Attention, Residual, image, lenet

NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "lenet": (lenet, (1, 28, 28)),
    "residual": (Residual, (3, 8, 8)),
    "attention": (Attention, (3, 16, 16)),
    "vgg-like": (
        lambda: nn.Sequential(
            torchvision.models.vgg.make_layers([8, "M", 16, 16, "M"], batch_norm=True),
            nn.AdaptiveAvgPool2d((7, 7)),
            nn.Flatten(),
            nn.Linear(16 * 49, 10),
        ),
        (3, 16, 16),
    ),
    "resnet18": (torchvision.models.resnet18, (3, 32, 32)),
    "googlenet": (
        lambda: torchvision.models.googlenet(init_weights=False, aux_logits=False),
        (3, 32, 32),
    ),
    "mobilenet_v3_small": (torchvision.models.mobilenet_v3_small, (3, 32, 32)),
    "vit": (
        lambda: timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10),
        (3, 32, 32),
    ),
    "convnext": (
        lambda: timm.create_model("convnext_atto", depths=(1, 1, 2, 1), num_classes=10),
        (3, 32, 32),
    ),
    "swin": (
        lambda: torchvision.models.SwinTransformer(
            patch_size=[4, 4],
            embed_dim=12,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=[3, 3],
            num_classes=10,
        ),
        (3, 32, 32),
    ),
}


def operators(graph: Graph) -> Counter[str]:
    """How often each operation occurs; a fallback counts under its operator's name."""
    return Counter(n.attrs["target"] if n.op == "fallback" else n.op for n in graph.nodes)


def agree(
    module: nn.Module, graph: Graph, *size: int, batches: tuple[int, ...] = (1, 2, 5)
) -> None:
    """The graph and the module give the same results, in value, shape and element type."""
    for batch in batches:
        x = torch.randn(batch, *size)
        with torch.no_grad():
            want = module(x)
        wanted = want if isinstance(want, tuple) else (want,)
        got = interpret(graph, {"image": x})
        for have, expected in zip(got.values(), wanted, strict=True):
            torch.testing.assert_close(have, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_capture_computes_what_the_network_computes(name: str) -> None:
    torch.manual_seed(0)
    make, size = NETWORKS[name]
    module = make().eval()
    graph = capture(module, image(*size))
    agree(module, graph, *size)
    assert graph.outputs[0].shape[0] == Dim()


def test_layers_stay_whole_and_keep_their_names() -> None:
    graph = capture(Attention(), image(3, 16, 16))
    count = operators(graph)
    assert count["linear"] == 3
    assert count["layer_norm"] == count["scaled_dot_product_attention"] == count["gelu"] == 1
    assert not [op for op in count if op.startswith("aten::")]
    convolution = graph.nodes[0]
    assert (convolution.op, convolution.layer) == ("conv2d", "patches")
    assert [v.name for v in convolution.inputs if v] == ["image", "patches.weight", "patches.bias"]
    assert convolution.inputs[3] is None
    assert convolution.attrs["activation"] is None


def test_batch_norm_stays_whole_and_dropout_is_gone() -> None:
    assert operators(capture(Residual(), image(3, 8, 8))) == {
        "conv2d": 2, "batch_norm": 1, "add": 1, "relu": 1, "mean": 1, "linear": 1,
    }  # fmt: skip
    assert "dropout" not in str(operators(capture(lenet(), image(1, 28, 28))))


def test_constants_are_the_module_s_parameters() -> None:
    module = Residual()
    graph = capture(module, image(3, 8, 8))
    state = module.state_dict()
    assert {v.name for v in graph.constants} == set(state) - {"norm.num_batches_tracked"}
    for value, tensor in graph.constants.items():
        assert tensor.data_ptr() == state[value.name].data_ptr()


def test_the_module_keeps_its_mode() -> None:
    module = lenet()
    module[0].eval()
    capture(module, image(1, 28, 28))
    assert module.training
    assert module[7].training
    assert not module[0].training


class Calls(nn.Module):
    """A network made of one function."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


FUNCTIONS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], set[str]]] = {
    "nearest": (lambda x: F.interpolate(x, scale_factor=2.0), {"interpolate"}),
    "bilinear": (lambda x: F.interpolate(x, size=(9, 11), mode="bilinear"), {"interpolate"}),
    "antialias": (
        lambda x: F.interpolate(x, scale_factor=1.5, mode="bicubic", antialias=True),
        {"interpolate"},
    ),
    "stack": (lambda x: torch.stack([x, x * 2], 1), {"mul", "reshape", "cat"}),
    "batch as a number": (lambda x: x * x.shape[0] + x.shape[0], {"mul", "add"}),
    "roll": (lambda x: x.roll((1, -2, 0), (1, 2, 3)), {"slice", "cat"}),
    "vector norm": (lambda x: x.norm(dim=(1, -1)), {"mul", "sum", "sqrt"}),
    "normalize": (lambda x: F.normalize(x), {"mul", "sum", "sqrt", "clamp", "expand", "div"}),
    "adaptive_avg_pool1d": (
        lambda x: F.adaptive_avg_pool1d(x.flatten(2), 5),
        {"reshape", "adaptive_avg_pool2d"},
    ),
    "repeat_interleave": (lambda x: x.repeat_interleave(3, -2), {"reshape", "expand"}),
    "selu": (F.selu, {"elu"}),
    "celu": (lambda x: F.celu(x, 0.5), {"elu"}),
    "rsub": (lambda x: 2 - x, {"neg", "add"}),
    "reciprocal": (lambda x: 2 / (x + 5), {"add", "reciprocal", "mul"}),
    "power": (lambda x: x.square() + x.pow(3), {"mul", "pow", "add"}),
    "a product and a quotient are added": (
        lambda x: torch.addcmul(x, x[:, :1], x, value=3).addcdiv(x, x.exp(), value=0.5),
        {"slice", "mul", "exp", "div", "add"},
    ),
    "bounds": (lambda x: F.relu6(x) + x.clamp(min=0), {"relu6", "clamp", "add"}),
    "softmax in double": (lambda x: F.softmax(x, -1, dtype=torch.float64), {"softmax"}),
    "movedim": (
        lambda x: x.unflatten(2, (2, 4)).movedim(1, -1).transpose(1, 2).mT,
        {"reshape", "permute"},
    ),
    "slices": (lambda x: x[:, :, ::2, -3:-1], {"slice"}),
    "whole slices vanish": (lambda x: x[:, :, :9, 0:] * 2, {"mul"}),
    "a slice of the batch": (lambda x: x[:1] + 1, {"slice", "add"}),
    "select": (lambda x: x[:, 0] + x[:, -1], {"select", "add"}),
    "split": (lambda x: x.split([1, 2], 1)[1] + x.chunk(3, 1)[0], {"split", "add"}),
    "zeros that follow the batch": (
        lambda x: torch.cat([x, torch.zeros(x.shape[0], 1, 8, 8)], 1),
        {"expand", "cat"},
    ),
    "a constant made in forward": (lambda x: x + torch.arange(8), {"add"}),
    "element types": (lambda x: x.half().float().to(torch.float32), {"to"}),
    "reductions": (
        lambda x: x.sum() + x.mean((1, 3), keepdim=True) + x.amax(1, keepdim=True),
        {"sum", "mean", "amax", "add"},
    ),
    "local response": (lambda x: F.local_response_norm(x, 2, 0.3, 0.6), {"local_response_norm"}),
    "instance norm": (F.instance_norm, {"group_norm"}),
    "instance norm of running statistics": (
        lambda x: F.instance_norm(
            x, torch.tensor([0.5, 9.0, -1.0]), torch.tensor([2.0, 0.1, 1.0]), use_input_stats=False
        ),
        {"batch_norm"},
    ),
    "permute twice": (lambda x: x.transpose(1, 2).flip(3).permute(0, 2, 1, 3),
                      {"permute", "aten::flip"}),
    "prelu": (lambda x: F.prelu(x, torch.tensor([0.1, 0.2, 0.3])), {"prelu"}),
    "transposed convolution": (
        lambda x: F.conv_transpose2d(x, torch.ones(3, 2, 2, 2), stride=2),
        {"conv_transpose2d"},
    ),
    "same, odd kernel": (lambda x: F.conv2d(x, torch.ones(2, 3, 3, 3), padding="same"), {"conv2d"}),
    "same, even kernel": (
        lambda x: F.conv2d(x, torch.ones(2, 3, 2, 4), padding="same", dilation=3),
        {"pad", "conv2d"},
    ),
    "ceil": (lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True), {"max_pool2d"}),
    "average": (lambda x: F.avg_pool2d(x, 3, 2, 1, True, False), {"avg_pool2d"}),
    # what has no operation of ours
    "roll of all": (lambda x: torch.roll(x, 1), {"aten::roll"}),
    "infinity": (
        lambda x: x.masked_fill(x > 0, float("-inf")).amax((2, 3)),
        {"aten::gt.Scalar", "aten::masked_fill.Scalar", "amax"},
    ),
    "infinite padding": (lambda x: F.pad(x, (1, 1), value=float("inf")), {"aten::pad"}),
    "einsum": (lambda x: torch.einsum("nchw,nkhw->nck", x, x), {"aten::einsum"}),
    "grid sample": (
        lambda x: F.grid_sample(x, torch.zeros(x.shape[0], 4, 4, 2), align_corners=False),
        {"expand", "aten::grid_sampler"},
    ),
    "index": (lambda x: x[:, [2, 0]], {"aten::index.Tensor"}),
    "batch in a template": (
        lambda x: x.repeat(1, 2, 1, 1).roll(x.shape[0], 2),
        {"aten::repeat", "aten::roll"},
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    torch.manual_seed(0)
    function, expected = FUNCTIONS[name]
    module = Calls(function).eval()
    graph = capture(module, image(3, 8, 8))
    assert set(operators(graph)) == expected
    agree(module, graph, 3, 8, 8)


def test_several_outputs_are_flattened_and_named() -> None:
    def function(x: torch.Tensor) -> Any:
        values, indices = torch.topk(x, 2, dim=1)
        return {"values": values, "rest": (indices, None, x.max(1)[0])}

    module = Calls(function)
    graph = capture(module, image(3, 4, 4), outputs=["values", "indices", "largest"])
    assert [v.name for v in graph.outputs] == ["values", "indices", "largest"]
    x = torch.randn(2, 3, 4, 4)
    got = interpret(graph, {"image": x})
    torch.testing.assert_close(got["values"], x.topk(2, dim=1)[0])
    torch.testing.assert_close(got["indices"], x.topk(2, dim=1)[1])
    torch.testing.assert_close(got["largest"], x.amax(1))
    keys = [v.name for v in capture(module, image(3, 4, 4)).outputs]
    assert keys == ["values", "rest.0", "rest.2"]


def test_outputs_without_usable_keys_are_counted() -> None:
    for made in (lambda x: (x + 1, x + 2), lambda x: {"image": x + 1, "more": x + 2}):
        graph = capture(Calls(made), image(3, 4, 4))
        assert [v.name for v in graph.outputs] == ["output", "output_1"]


def test_an_input_that_is_an_output_is_copied() -> None:
    graph = capture(Calls(lambda x: (x, x + 1, x)), image(3, 4, 4))
    assert [n.op for n in graph.nodes] == ["add", "clone", "clone"] or [
        n.op for n in graph.nodes
    ] == ["clone", "add", "clone"]
    x = torch.randn(3, 3, 4, 4)
    got = interpret(graph, {"image": x})
    for name, want in {"output": x, "output_1": x + 1, "output_2": x}.items():
        torch.testing.assert_close(got[name], want)


def test_two_inputs_share_the_batch() -> None:
    class Two(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return torch.cat([a, b.float()], 1) * a.shape[0]

    specs = (
        TensorSpec(name="a", dtype="float32", shape=(BATCH, 3)),
        TensorSpec(name="b", dtype="int64", shape=(BATCH, 2)),
    )
    graph = capture(Two(), specs)
    a, b = torch.randn(4, 3), torch.arange(8).reshape(4, 2)
    got = interpret(graph, {"a": a, "b": b})["output"]
    torch.testing.assert_close(got, Two()(a, b))


def test_a_batch_that_no_memory_holds_is_refused() -> None:
    many = DimRange(min=10**14, opt=10**14, max=10**14)
    with pytest.raises(UsageError, match="not enough memory for one batch"):
        capture(nn.Linear(3, 2), [TensorSpec(name="a", dtype="float32", shape=(many, 3))])


def test_half_precision_and_embeddings() -> None:
    module = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 3)).half().eval()
    spec = TensorSpec(name="image", dtype="int64", shape=(BATCH, 5))
    graph = capture(module, [spec])
    assert operators(graph) == {"embedding": 1, "linear": 1}
    assert graph.outputs[0].dtype == "float16"
    x = torch.randint(0, 10, (3, 5))
    torch.testing.assert_close(interpret(graph, {"image": x})["output"], module(x))


# ── what cannot be captured ───────────────────────────────────────────────────────────────────────


def three_halves(x: torch.Tensor) -> torch.Tensor:
    return x.sum() + torch.zeros((3 * x.shape[0] + 4) // 2)


def halves(x: torch.Tensor) -> torch.Tensor:
    return x[: (x.shape[0] + 1) // 2] * 2


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (three_halves, "not a multiple of the batch"),
        (halves, "cannot be captured"),
        (lambda x: x + torch.arange(x.shape[0]).reshape(-1, 1, 1, 1), "from the batch size alone"),
        (lambda x: x[:, torch.arange(x.shape[0]) % 2], "from the batch size alone"),
        (lambda x: x if x.sum() > 0 else -x, "cannot be captured"),
        (lambda x: x[x > 0], "size in the network"),
        (lambda x: x.reshape(2, 96), "cannot be captured"),
        (lambda x: F.dropout(x, 0.5), "drops values at random"),
        (lambda x: x + torch.randn(8), "random numbers"),
        (lambda x: x + torch.rand_like(x), "draws random numbers"),
        (lambda x: F.batch_norm(x, None, None, training=True), "mixes the images"),
        (lambda x: x.shape[0], "must return tensors"),
        (lambda x: x.numpy(), "cannot be captured"),
    ],
)
def test_what_cannot_be_captured_is_said(
    function: Callable[[torch.Tensor], Any], message: str
) -> None:
    with pytest.raises(CompileError) as caught:
        capture(Calls(function), image(3, 8, 8))
    assert message in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert len(str(caught.value)) < 900


def test_a_fixed_batch_takes_shapes_that_are_no_line() -> None:
    graph = capture(Calls(halves), image(3, 8, 8, batch=5))
    assert graph.outputs[0].shape == (3, 3, 8, 8)
    x = torch.randn(5, 3, 8, 8)
    torch.testing.assert_close(interpret(graph, {"image": x})["output"], halves(x))
    reshaped = capture(Calls(lambda x: x.reshape(2, 96)), image(3, 8, 8, batch=1))
    assert reshaped.inputs[0].shape == (1, 3, 8, 8)


def test_what_is_asserted_of_numbers_is_not_part_of_a_graph() -> None:
    """As Hugging Face's detectors do: what the assertion reads goes with it."""

    def asserts(x: torch.Tensor) -> torch.Tensor:
        sizes = torch.arange(3)
        torch._check((sizes.sum() == 3).all().item())
        torch._check(torch.ops.aten._is_all_true(x == x).item())
        return x + 1

    assert operators(capture(Calls(asserts), image(3))) == {"add": 1}


def test_state_that_changes_is_refused() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            return x + self.calls

    with pytest.raises(CompileError, match=r"changes its own buffers.*calls"):
        capture(Counts(), image(3))


def test_usage() -> None:
    ranged = TensorSpec(name="x", dtype="float32", shape=(1, DimRange(min=1, opt=2, max=3)))
    with pytest.raises(UsageError, match="only dimension 0"):
        capture(nn.ReLU(), [ranged])
    with pytest.raises(UsageError, match="2 names, 1 outputs"):
        capture(nn.ReLU(), image(3), outputs=["a", "b"])
    with pytest.raises(CompileError, match="names of their own"):
        capture(nn.ReLU(), image(3), outputs=["image"])
