"""Convolutions beside cuDNN."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import TypedDict

import torch
import torch.nn.functional as F

from benchmarks.cases.case import Case, Peer, best, drawn, meta
from tessella.nn import zoo
from tessella.operations import problems
from tessella.operations.tensor_meta import TensorMeta, memory_format

Layer = tuple[int, int, int, int, int, int]  # C, H, K, R, stride, padding


class Window(TypedDict):
    """Stride and padding of a convolution."""

    stride: int
    padding: int


NHWC = ("implicit_gemm", "pointwise")  # the other algorithms are far behind at these sizes
NETWORKS = ("resnet50", "vgg16", "googlenet")


def layers(name: str) -> list[Layer]:
    """The distinct convolutions of a network at 224×224, without its first layer."""
    network = zoo.network(name, classes=1000)
    found: dict[Layer, None] = {}

    def note(module: torch.nn.Conv2d, inputs: tuple[torch.Tensor, ...], _: object) -> None:
        _, channels, height, _ = inputs[0].shape
        window = (module.kernel_size[0], module.stride[0], int(module.padding[0]))
        if channels > 3:
            found[(channels, height, module.out_channels, *window)] = None

    with torch.device("meta"):
        net = zoo.build(network).eval()
        for module in net.modules():
            if isinstance(module, torch.nn.Conv2d):
                module.register_forward_hook(note)
        net(torch.empty(1, 3, 224, 224))
    return list(found)


def _window(layer: Layer) -> Window:
    return {"stride": layer[4], "padding": layer[5]}


def _title(n: int, layer: Layer) -> str:
    c, h, k, r, stride, _ = layer
    return f"N{n} {c}->{k} {r}x{r}@{h}" + (f" s{stride}" if stride > 1 else "")


def _operands(n: int, layer: Layer, dtype: str) -> tuple[TensorMeta, TensorMeta, tuple[int, ...]]:
    c, h, k, r, stride, padding = layer
    size = (h + 2 * padding - r) // stride + 1
    x, w = meta(dtype, n, c, h, h, last=True), meta(dtype, k, c, r, r, last=True)
    return x, w, (n, k, size, size)


def forward(n: int, fused: bool) -> Iterator[Case]:
    for name in NETWORKS:
        for layer in layers(name):
            x, w, out = _operands(n, layer, "float16")
            window = _window(layer)
            if not fused:
                yield Case(
                    family=f"conv fp16 N={n}",
                    name=f"{name} {_title(n, layer)}",
                    problem=problems.conv(x, w, **window),
                    peers={"cudnn": _conv_peer(**window)},
                    algorithms=NHWC,
                )
                continue
            bias, residual = meta("float16", out[1]), meta("float16", *out, last=True)
            conv = _conv_peer(**window)
            yield Case(
                family=f"conv fp16 fused N={n}",
                name=f"{name} {_title(n, layer)}",
                problem=problems.conv(x, w, bias, residual, activation="relu", **window),
                algorithms=NHWC,
                peers={
                    "cudnn + add + relu": lambda x, w, b, r, conv=conv: (
                        conv(x, w, b).add_(r).relu_()
                    )
                },
                others={
                    "cudnn fused": lambda x, w, b, r, s=layer[4], p=layer[5]: (
                        torch.cudnn_convolution_add_relu(x, w, r, 1.0, b, [s, s], [p, p], [1, 1], 1)
                    )
                },
            )


def _conv_peer(stride: int, padding: int) -> Peer:
    return lambda x, w, b=None: F.conv2d(x, w, b, stride, padding)


# channels, groups, pixels, stride of 3×3 filters: ResNeXt-50 32×4d, RegNet-X 1.6GF, RegNet-Y 8GF
GROUPED = (
    (128, 32, 56, 1), (256, 32, 56, 2), (256, 32, 28, 1), (512, 32, 28, 2), (512, 32, 14, 1),
    (1024, 32, 14, 2), (1024, 32, 7, 1), (168, 7, 28, 1), (408, 17, 14, 1), (448, 8, 28, 1),
    (896, 16, 14, 1),
)  # fmt: skip
# channels, pixels, width of the filter, stride: ConvNeXt-T, MobileNetV3-L, EfficientNet-B0
DEPTHWISE = (
    (96, 56, 7, 1), (192, 28, 7, 1), (384, 14, 7, 1), (768, 7, 7, 1), (64, 112, 3, 2),
    (72, 56, 3, 1), (240, 28, 3, 2), (480, 14, 3, 1), (96, 112, 3, 2), (144, 56, 5, 2),
    (240, 28, 5, 1), (672, 14, 5, 1), (960, 7, 5, 1),
)  # fmt: skip


def groups() -> Iterator[Case]:
    for c, groups, size, stride in GROUPED:
        yield _grouped("conv fp16 groups N=128", c, groups, size, 3, stride, NHWC)
    for c, size, taps, stride in DEPTHWISE:
        yield _grouped("conv fp16 depthwise N=128", c, c, size, taps, stride, ("direct",))


def _grouped(
    family: str, c: int, groups: int, size: int, taps: int, stride: int, algorithms: tuple[str, ...]
) -> Case:
    """Weights are constants, as in a plan: they are packed once."""
    x = meta("float16", 128, c, size, size, last=True)
    w = meta("float16", c, c // groups, taps, taps, last=True)
    window: Window = {"stride": stride, "padding": taps // 2}
    weight = drawn(w)
    return Case(
        family=family,
        name=f"{_title(128, (c, size, c, taps, stride, taps // 2))} in {groups}",
        problem=problems.conv(x, w, groups=groups, constant=(1,), **window),
        peers={"cudnn": lambda x: F.conv2d(x, weight, groups=groups, **window)},
        algorithms=algorithms,
    )


def stem() -> Iterator[Case]:
    for n in (1, 128):
        for layer in ((3, 224, 64, 7, 2, 3), (3, 224, 64, 3, 1, 1), (3, 224, 64, 11, 4, 2)):
            x, w, _ = _operands(n, layer, "float16")
            window = _window(layer)
            yield Case(
                family="conv stem Ci=3",
                name=_title(n, layer),
                problem=problems.conv(x, w, meta("float16", 64), activation="relu", **window),
                algorithms=("direct", *NHWC),
                peers={
                    "cudnn fused": lambda x, w, b, s=layer[4], p=layer[5]: (
                        torch.cudnn_convolution_relu(x, w, b, [s, s], [p, p], [1, 1], 1)
                    )
                },
                others={"cudnn": _conv_peer(**window)},
            )


def backward() -> Iterator[Case]:
    for name in NETWORKS:
        for layer in layers(name):
            x, w, out = _operands(128, layer, "float16")
            dy = meta("float16", *out, last=True)
            window = _window(layer)
            yield Case(
                family="conv dgrad fp16",
                name=f"{name} {_title(128, layer)}",
                problem=problems.conv_dgrad(dy, w, x.shape, **window),
                peers={"cudnn": _gradient_peer(layer, x.shape, of_weight=False)},
            )
            yield Case(
                family="conv wgrad fp16",
                name=f"{name} {_title(128, layer)}",
                problem=problems.conv_wgrad(dy, x, w.shape[2:], **window),
                peers={"cudnn": _gradient_peer(layer, w.shape, of_weight=True)},
            )


def _gradient_peer(layer: Layer, shape: tuple[int, ...], *, of_weight: bool) -> Peer:
    """cuDNN's gradient of a layer's weight or input, which has this shape."""
    window = ([layer[4]] * 2, [layer[5]] * 2, [1, 1], False, [0, 0], 1)

    def gradient(dy: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        made = torch.empty(
            shape, dtype=dy.dtype, device=dy.device, memory_format=torch.channels_last
        )
        x, w = (other, made) if of_weight else (made, other)
        gradients: tuple[torch.Tensor, ...] = torch.ops.aten.convolution_backward(
            dy, x, w, None, *window, [not of_weight, of_weight, False]
        )
        return gradients[int(of_weight)]

    return gradient


def int8() -> Iterator[Case]:
    """INT8 with everything fused, beside the same layer in FP16 by cuDNN.

    A bottleneck's last layer, which is 1×1 with four times the channels, has a residual.
    """
    for layer in layers("resnet50"):
        x, w, out = _operands(128, layer, "int8")
        window = _window(layer)
        vector = meta("float32", out[1])
        widens = layer[3:5] == (1, 1) and out[1] == 4 * layer[0]
        residual = meta("int8", *out, last=True) if widens else None
        in_fp16 = {
            name: torch.randn(meta.shape, device="cuda")
            .half()
            .to(memory_format=memory_format(meta.format, 4))
            for name, meta in (("x", x), ("w", w))
        }
        conv = _conv_peer(**window)
        problem = problems.conv(
            x, w, vector, residual, vector,
            activation="relu", out_dtype="int8", constant=(1, 2, 4), **window,
        )  # fmt: skip
        peers: dict[str, Mapping[str, Peer]] = {
            "cuDNN fp16": {
                "cudnn": lambda *_, conv=conv, x=in_fp16["x"], w=in_fp16["w"]: conv(x, w)
            }
        }
        if importlib.util.find_spec("cudnn"):  # its graph interface is a package of its own
            peers["cuDNN int8"] = {"cudnn": best(problem, ("cudnn_graph",))}
        fused = _cudnn_layer(layer, residual is not None)
        for name, peer in peers.items():
            yield Case(
                family=f"conv int8 fused, vs {name}",
                name=f"resnet50 {_title(128, layer)}",
                problem=problem,
                algorithms=NHWC,
                peers=peer,
                others={} if name == "cuDNN int8" else {"cuDNN fp16 with its epilogue": fused},
            )


def _cudnn_layer(layer: Layer, adds: bool) -> Peer:
    """A layer in FP16 with bias, residual and ReLU, by cuDNN's fastest way, on its own operands."""
    x, w, out = _operands(128, layer, "float16")
    residual = meta("float16", *out, last=True) if adds else None
    problem = problems.conv(
        x, w, meta("float16", out[1]), residual,
        activation="relu", constant=(1, 2), **_window(layer),
    )  # fmt: skip
    run = best(problem, ("cudnn", "cudnn_graph"))
    operands = [drawn(meta) for meta in (x, residual) if meta]
    return lambda *_: run(*operands)


# Quadro GV100, published 2020: FP32, N=1, C=K=128, 128×128, NCHW
PUBLISHED_MS = {
    3: {
        "gemm": 0.76, "implicit_gemm": 0.62, "implicit_precomp_gemm": 0.47, "fft": 45.3,
        "fft_tiling": 3.69, "winograd": 0.26, "winograd_nonfused": 2.73,
    },
    11: {
        "gemm": 8.47, "implicit_gemm": 6.82, "implicit_precomp_gemm": 6.58, "fft": 44.7,
        "fft_tiling": 5.13,
    },
}  # fmt: skip


def published() -> Iterator[Case]:
    for taps in PUBLISHED_MS:
        x, w = meta("float32", 1, 128, 128, 128), meta("float32", 128, 128, taps, taps)
        window: Window = {"stride": 1, "padding": taps // 2}
        yield Case(
            family="conv FP32 N=1 128@128",
            name=f"{taps}x{taps}",
            problem=problems.conv(x, w, **window),
            peers={"cudnn": _conv_peer(**window)},
            published_ms=PUBLISHED_MS[taps],
        )
