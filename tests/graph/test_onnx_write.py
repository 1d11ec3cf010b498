"""Graphs written as ONNX: checked by onnx, run by ONNX Runtime, and read again."""

from __future__ import annotations

import importlib
import struct
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tessella.compiler.pipeline import optimized
from tessella.core.errors import CompileError, UsageError
from tessella.core.spec import DimRange, TensorSpec
from tessella.graph import Graph, capture, interpret
from tessella.graph.build import Builder
from tessella.graph.onnx import read, write
from tessella.graph.onnx.exports import EXPORTS
from tessella.nn import zoo
from tessella.operations.table import OPERATIONS

Tensors = dict[str, torch.Tensor]

BATCH = DimRange(min=1, opt=2, max=4)


def runtime(path: Path, inputs: Tensors) -> list[torch.Tensor]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    made = session.run(None, {name: t.numpy() for name, t in inputs.items()})
    return [torch.from_numpy(array) for array in made]


def goes_round(graph: Graph, inputs: Tensors, path: Path, opset: int, tol: float = 1e-5) -> Graph:
    """Written and run elsewhere, and written and read again: the same answers."""
    write(graph, path, opset=opset)
    right = interpret(graph, inputs, upcast=torch.float64)
    again = read(path)
    assert [(v.name, v.dtype, v.shape) for v in again.inputs] == [
        (v.name, v.dtype, v.shape) for v in graph.inputs
    ]
    back = interpret(again, inputs)
    for value, theirs in zip(graph.outputs, runtime(path, inputs), strict=True):
        wanted = right[value.name].to(getattr(torch, value.dtype))
        torch.testing.assert_close(theirs, wanted, rtol=tol, atol=tol)
        torch.testing.assert_close(back[value.name], wanted, rtol=tol, atol=tol)
    return again


class Function(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs)


def images(batch: int = 3) -> Tensors:
    return {"x": torch.randn(batch, 4, 6, 8, generator=torch.Generator().manual_seed(0))}


W = torch.randn(6, 2, 3, 3, generator=torch.Generator().manual_seed(1))
T = torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(1))
V = torch.randn(5, 8, generator=torch.Generator().manual_seed(2))
C = torch.rand(4, generator=torch.Generator().manual_seed(3)) + 0.5
PLACES = torch.tensor([2, 0, 3])


def attention(x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, x + 1, x * 2, **kwargs)


FUNCTIONS: dict[str, Any] = {
    "conv1d": lambda x: F.conv1d(x.flatten(2), W[..., 0], C.repeat(2)[:6], groups=2, stride=2),
    "conv2d": lambda x: F.conv2d(x, W, None, (1, 2), 1, (2, 1), 2),
    "conv3d": lambda x: F.conv3d(x[:, None], W[:, :1, None]),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x, T, None, 2, 1, 1),
    "conv_transpose3d": lambda x: F.conv_transpose3d(
        x[..., None], T[..., None], None, (2, 2, 1), (1, 1, 0), (1, 1, 0)
    ),
    "linear": lambda x: (F.linear(x, V, V[:, 0]), F.linear(x.mean((1, 2)), V)),
    "matmul": lambda x: x @ x.transpose(-1, -2),
    "batch_norm": lambda x: F.batch_norm(x, C, C * 2),
    "layer_norm": lambda x: (F.layer_norm(x, (6, 8)), F.layer_norm(x, (8,), V[0], V[1])),
    "group_norm": lambda x: (F.group_norm(x, 2), F.group_norm(x, 2, C, C)),
    "rms_norm": lambda x: (F.rms_norm(x, (8,), V[0]), F.rms_norm(x, (6, 8), None, 1e-5)),
    "local_response_norm": lambda x: F.local_response_norm(x, 3, k=2.0),
    "max_pool2d": lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
    "avg_pool2d": lambda x: (
        F.avg_pool2d(x, 2, padding=1, count_include_pad=False),
        F.avg_pool2d(x, 2, divisor_override=3),
    ),
    "adaptive_avg_pool2d": lambda x: (
        F.adaptive_avg_pool2d(x, 1),
        F.adaptive_avg_pool2d(x, (4, 3)),
    ),
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "scaled_dot_product_attention": lambda x: (
        attention(x, is_causal=True),
        attention(x, attn_mask=x @ x.mT > -9.0),
        attention(x, attn_mask=x[:, :1, :, :6], scale=0.1),
    ),
    "mean": lambda x: (x.mean(), x.mean((2, 3), keepdim=True)),
    "sum": lambda x: (x.sum(1), x.sum()),
    "amax": lambda x: x.amax((1, 2)),
    "amin": lambda x: x.amin(-1, keepdim=True),
    "relu": F.relu,
    "relu6": F.relu6,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": F.silu,
    "gelu": lambda x: (F.gelu(x), F.gelu(x, approximate="tanh")),
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "mish": F.mish,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "elu": lambda x: (F.elu(x, 0.5), F.selu(x), F.celu(x, 2.0)),
    "softplus": lambda x: (F.softplus(x), F.softplus(x, 2.0)),
    "clamp": lambda x: (x.clamp(-0.5, 0.25), x.clamp(max=0.1)),
    "exp": torch.exp,
    "log": lambda x: (x.abs() + 0.1).log(),
    "sqrt": lambda x: x.abs().sqrt(),
    "rsqrt": lambda x: (x.abs() + 0.1).rsqrt(),
    "reciprocal": lambda x: (x.abs() + 0.1).reciprocal(),
    "neg": torch.neg,
    "abs": torch.abs,
    "erf": torch.erf,
    "sin": lambda x: (9 * x).sin(),
    "cos": lambda x: (9 * x).cos(),
    "to": lambda x: (x.double(), (x * 3).to(torch.int32)),
    "prelu": lambda x: (F.prelu(x, C), F.prelu(x, C[:1])),
    "add": lambda x: (x + 1, torch.add(x, x, alpha=2)),
    "sub": lambda x: (1 - x, torch.sub(x, C[:, None, None], alpha=0.5)),
    "mul": lambda x: x * 2 * x,
    "div": lambda x: (x / 3, x.to(torch.int32) / 3),
    "pow": lambda x: (x**2, x.abs() ** (x + 1)),
    "maximum": lambda x: torch.maximum(x, -x),
    "minimum": lambda x: torch.minimum(x, x * 2),
    "reshape": lambda x: (x.flatten(1), x.reshape(-1, 8), x.reshape(x.shape[0] * 2, -1, 8)),
    "permute": lambda x: x.permute(0, 2, 3, 1).contiguous(),
    "expand": lambda x: C[None].expand(x.shape[0], 4) + x.mean((2, 3)),
    "slice": lambda x: (x[:, 1:3, ::2], x[:, :, 2:] + x[:, :, :-2]),
    "select": lambda x: x[:, 2],
    "split": lambda x: tuple(x.split([1, 3], 1)),
    "cat": lambda x: torch.cat([x, x.abs()], 1),
    "pad": lambda x: (F.pad(x, (1, 0, 2, 1), value=0.5), F.pad(x, (1, 2, 1, 2), mode="reflect")),
    "interpolate": lambda x: (
        F.interpolate(x, scale_factor=2),
        F.interpolate(x, size=(9, 12), mode="bilinear"),
        F.interpolate(x, size=(9, 12), mode="bicubic", align_corners=True),
    ),
    "peak_boxes": lambda x: tuple(
        torch.ops.tessella.peak_boxes(torch.cat([x, x.exp()], 1), down=0.2, along=0.1, most=most)
        for most in (4, 60)
    ),
    "deformable_attention": lambda x: torch.ops.tessella.deformable_attention(
        x.flatten(2),
        x[:, :3, 0, :4].sigmoid(),
        x.flatten(2)[:, :3, :12],
        x.flatten(2)[:, :3, :6],
        heads=2,
        sizes=[1, 2, 2, 1],
        points=[2, 1],
        spread=0.5,
    ),
    "lstm": nn.Sequential(nn.Flatten(2), nn.LSTM(48, 5, 2, bidirectional=True, batch_first=True)),
    "gru": nn.Sequential(nn.Flatten(2), nn.GRU(48, 5, bias=False, batch_first=True)),
    "rnn": nn.Sequential(nn.Flatten(2), nn.RNN(48, 5, nonlinearity="relu", batch_first=True)),
    "embedding": lambda x: F.embedding((x > 0).to(torch.int64), V),
    "clone": lambda x: (x, x * 1.0),
    "fallback": lambda x: (
        x.roll((1, -2), (2, 3)),
        x.flip(2, 3),
        x.index_select(1, PLACES),
        x[:, PLACES],
        torch.where(x > 0.5, x, -x),
        x.repeat(1, 1, 2, 1),
        x.cumsum(1),
        x.argmax(2),
        x.triu(1),
        torch.einsum("ncij,ncjk->ncik", x, x.mT),
        F.pad(x, (1, 0), value=float("-inf")).amax(3),
        2.0**x,
        torch.sin(x).floor(),
        torch.div((9 * x).to(torch.int64), 4, rounding_mode="floor"),
        (9 * x).to(torch.int64) % -4,
        x.masked_fill(x > 0, -2.0),
        (x > -1).all(2),
        (x > -1).all(-1, keepdim=True),
    ),
}

# written only where a plan is made: bytes of images, chains, generated kernels, and a user's own
LATER = {
    "image_to_tensor",
    "quantize",
    "dequantize",
    "conv2d_chain",
    "conv2d_pool",
    "linear_norm",
    "group_factors",
    "rearrange",
    "pointwise",
    "user",
    *(f"conv{axes}d_{kind}" for axes in (1, 2, 3) for kind in ("dgrad", "wgrad")),
}

BY_ITSELF = {"nms", "pyramid_roi_align"}  # go out as many operators: tried below


def test_every_operation_is_tried() -> None:
    assert set(FUNCTIONS) == set(OPERATIONS) - LATER - BY_ITSELF
    later = {"image_to_tensor", "quantize", "dequantize", *BY_ITSELF}
    assert set(EXPORTS) - later == set(FUNCTIONS) - {"fallback"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_operations(name: str, tmp_path: Path) -> None:
    spec = TensorSpec(name="x", dtype="float32", shape=(BATCH, 4, 6, 8))
    graph = capture(Function(FUNCTIONS[name]), [spec])
    assert name == "clone" or name in {n.op for n in graph.nodes}
    for opset in (17, 21):
        goes_round(graph, images(), tmp_path / "net.onnx", opset)


@pytest.mark.parametrize(
    ("name", "size"), [("googlenet", 64), ("resnet18", 64), ("timm/convnext_atto", 64)]
)
def test_networks_of_the_zoo(name: str, size: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = zoo.network(name, classes=7, size=size)
    shape = (network.channels, network.height, network.width)
    graph = capture(
        zoo.build(network), [TensorSpec(name="x", dtype="float32", shape=(BATCH, *shape))]
    )
    again = goes_round(graph, {"x": torch.randn(2, *shape)}, tmp_path / "net.onnx", 17, 1e-4)
    ops = [n.op for n in graph.nodes if n.op in ("conv2d", "linear", "batch_norm", "max_pool2d")]
    assert [
        n.op for n in again.nodes if n.op in ("conv2d", "linear", "batch_norm", "max_pool2d")
    ] == ops


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_roundings_go_round(dtype: str, tmp_path: Path) -> None:
    build = Builder("rounded")
    x = build.input(TensorSpec(name="x", dtype="float32", shape=(BATCH, 4, 6, 8)), dynamic=True)
    scale = build.constant("scale", torch.tensor(0.03))
    zero = build.constant("zero", torch.tensor(7, dtype=getattr(torch, dtype)))
    scales = build.constant("scales", C * 0.02)
    quantized = build.one("quantize", [x, scale, zero], axis=1, dtype=dtype)
    back = build.one("dequantize", [quantized, scale, zero], axis=1, dtype="float32")
    each = build.one("quantize", [back, scales], axis=1, dtype="int8")
    again = build.one("dequantize", [each, scales], axis=1, dtype="float32")
    graph = build.finish([again], ["y"])
    read_back = goes_round(graph, images(), tmp_path / "net.onnx", 17)
    assert [n.op for n in read_back.nodes] == ["quantize", "dequantize"] * 2


def test_bytes_of_images_go_out(tmp_path: Path) -> None:
    build = Builder("bytes")
    x = build.input(TensorSpec(name="x", dtype="uint8", shape=(BATCH, 6, 8, 3)), dynamic=True)
    numbers = {"gain": (0.5, 0.25, 2.0), "offset": (1.0, -1.0, 0.0), "dtype": "float32"}
    graph = build.finish([build.one("image_to_tensor", [x], **numbers)], ["y"])
    images = torch.randint(0, 256, (2, 6, 8, 3), dtype=torch.uint8)
    goes_round(graph, {"x": images}, tmp_path / "net.onnx", 17)


def test_what_the_compiler_fused_goes_out_too(tmp_path: Path) -> None:
    """Residual and activation inside a layer are operators of their own again."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.gelu(self.b(F.relu(self.a(x) + x)))

    spec = TensorSpec(name="x", dtype="float32", shape=(BATCH, 4, 6, 8))
    graph = optimized(capture(Block(), [spec]))
    assert [n.attrs["activation"] for n in graph.nodes] == ["relu", "gelu"]
    goes_round(graph, images(), tmp_path / "net.onnx", 17)


def suppressed(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Boxes and scores of a picture's numbers, with thresholds, groups and more than there are."""
    boxes = torch.cat([x[:, :, 0, :2], x[:, :, 0, :2] + x[:, :, 1, :2].abs()], 2)
    scores, groups = x[:, :, 2:5, 0].mT, (x[:, :, 1, 1] > 0).to(torch.int64)
    asked = (None, None, 3), (None, 0.1, 6), (groups, None, 4)
    return tuple(
        torch.ops.tessella.nms(
            boxes, scores, marks, iou_threshold=0.2, score_threshold=least, most=most
        )
        for marks, least, most in asked
    )


def test_boxes_that_stay_go_out_as_a_table(tmp_path: Path) -> None:
    """ONNX has a list of all of them, which is no value of a graph: it does not come back."""
    spec = TensorSpec(name="x", dtype="float32", shape=(BATCH, 4, 6, 8))
    graph = capture(Function(suppressed), [spec])
    write(graph, tmp_path / "net.onnx")
    session = onnxruntime.InferenceSession(
        tmp_path / "net.onnx", providers=["CPUExecutionProvider"]
    )
    x = torch.randn(3, 4, 6, 8)
    x[:, 1, 2:5, 0] = -torch.inf  # no box, whatever threshold there is
    made = session.run(None, {"x": x.numpy()})
    right = suppressed(x)
    assert not (right[0] == 1).any()
    assert [one.tolist() for one in made] == [one.tolist() for one in right]
    assert (right[1] == -1).any()
    again = read(tmp_path / "net.onnx")
    assert [n.op for n in again.nodes if n.op == "nms"] == ["nms"] * 3
    assert [one.tolist() for one in interpret(again, {"x": x}).values()] == [
        one.tolist() for one in right
    ]
    model = onnx.load(tmp_path / "net.onnx")
    limit = next(t for t in model.graph.initializer if t.raw_data == struct.pack("<f", 0.2))
    limit.raw_data = struct.pack("<f", 0.9)  # by a tool that changes the file
    with pytest.raises(CompileError, match="NonMaxSuppression"):
        read(model.SerializeToString())
    limit.raw_data = struct.pack("<f", 0.2)
    model.graph.node[-1].name += "!"
    with pytest.raises(CompileError, match="NonMaxSuppression"):
        read(model.SerializeToString())
    strange = onnx.load(tmp_path / "net.onnx")
    strange.graph.node[-1].domain = "tessella"
    strange.opset_import.add(domain="tessella", version=1)
    with pytest.raises(CompileError, match="has no operators in files"):
        read(strange.SerializeToString())
    (said,) = (p for p in model.metadata_props if p.key == "tessella.operations")
    for broken, why in (('{"said": 3}', "cannot be read"), ("x" * 2_000_000, "too long")):
        said.value = broken
        with pytest.raises(CompileError, match=why):
            read(model.SerializeToString())


def seen_in_boxes(x: torch.Tensor) -> torch.Tensor:
    """What two maps show in boxes of a picture's numbers, one of which no box may look at."""
    value = torch.cat([x.flatten(2).mT, x[:, :, ::2, ::2].flatten(2).mT], 1)
    low = x[:, :, :2, 0].abs() * 4
    boxes = torch.cat([low, low + x[:, :, 2:4, 1].abs() * 9], 2)
    levels = (x[:, :, 0, 1] > 0).to(torch.int64)
    return torch.ops.tessella.pyramid_roi_align(
        value, boxes, levels, sizes=(6, 8, 3, 4), strides=(1, 2), side=3, samples=2
    )


def test_what_boxes_show_goes_out_level_by_level(tmp_path: Path) -> None:
    """A level's boxes are a list as long as there are some, which is no value of a graph."""
    spec = TensorSpec(name="x", dtype="float32", shape=(BATCH, 4, 6, 8))
    for opset in (17, 21):
        write(capture(Function(seen_in_boxes), [spec]), tmp_path / "net.onnx", opset=opset)
        session = onnxruntime.InferenceSession(
            tmp_path / "net.onnx", providers=["CPUExecutionProvider"]
        )
        x = torch.randn(3, 4, 6, 8)
        for given in (x, x.abs()):  # of the second no box looks at the first map
            (made,) = session.run(None, {"x": given.numpy()})
            torch.testing.assert_close(torch.from_numpy(made), seen_in_boxes(given))
            (back,) = interpret(read(tmp_path / "net.onnx"), {"x": given}).values()
            torch.testing.assert_close(back, seen_in_boxes(given))


def test_equal_graphs_are_equal_files(tmp_path: Path) -> None:
    spec = TensorSpec(name="x", dtype="float32", shape=(BATCH, 4, 6, 8))
    for name in ("a.onnx", "b.onnx"):
        write(capture(Function(FUNCTIONS["conv2d"]), [spec]), tmp_path / name)
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


def test_large_constants_lie_beside_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("tessella.graph.onnx.write")
    monkeypatch.setattr(module, "_ONE_FILE", 1 << 10)
    spec = TensorSpec(name="x", dtype="float32", shape=(BATCH, 64))
    graph = capture(nn.Linear(64, 64), [spec])
    for _ in range(2):  # the second time over the first
        goes_round(graph, {"x": torch.randn(2, 64)}, tmp_path / "net.onnx", 17)
    assert (tmp_path / "net.onnx.data").stat().st_size < 1.2 * 4 * 64 * 65
    assert onnx.load(tmp_path / "net.onnx", load_external_data=False).ByteSize() < 2000


def test_what_onnx_cannot_say_is_named_at_once(tmp_path: Path) -> None:
    spec = TensorSpec(name="x", dtype="float32", shape=(BATCH, 4, 6, 8))
    graph = capture(Function(lambda x: (torch.lgamma(x), torch.digamma(x.abs()))), [spec])
    with pytest.raises(CompileError, match="aten::digamma, aten::lgamma"):
        write(graph, tmp_path / "net.onnx")
    with pytest.raises(UsageError, match="Seen: 22"):
        write(graph, tmp_path / "net.onnx", opset=22)
    assert not list(tmp_path.iterdir())
