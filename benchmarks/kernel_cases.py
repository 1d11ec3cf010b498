"""The problems that the kernels' benchmark measures, by family, each with its peers."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tessella.core.device import torch_device
from tessella.kernels import auction, catalog, problems
from tessella.kernels.attention.reference import repeated
from tessella.kernels.auction import Terms
from tessella.kernels.conv.hopper.chain import NEXT_SCALE, NEXT_WEIGHT, SCALE, WEIGHT
from tessella.kernels.problem import Problem, TensorMeta, memory_format
from tessella.kernels.sparse.two_four import TWO_FOUR, prune_two_four
from tessella.nn import zoo

TARGET = "sm_90"
Peer = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One problem with what it is compared with.

    Attributes:
        peers: by name, functions of the problem's operands. The ratio is against the fastest.
        others: timed too, without a part in the ratio.
        algorithms: those of ours that may win; None for all.
        chained: the weight is constant, and the time is that of one of many such products after
            another, each with its own weight, as layers follow each other; none is in the L2.
        published_ms: by algorithm, on a Quadro GV100.
    """

    family: str
    name: str
    problem: Problem
    peers: Mapping[str, Peer]
    others: Mapping[str, Peer] = field(default_factory=dict)
    algorithms: tuple[str, ...] | None = None
    chained: bool = False
    published_ms: Mapping[str, float] = field(default_factory=dict)


def _meta(dtype: str, *shape: int, last: bool = False) -> TensorMeta:
    return TensorMeta(shape=shape, dtype=dtype, format="channels_last" if last else "contiguous")


GEMMS = (
    (1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192),
    (16384, 16384, 16384), (4096, 1024, 16384), (16384, 4096, 1024), (8192, 1024, 4096),
    (1024, 16384, 4096), (2048, 4096, 8192),
)  # fmt: skip


def _gemm(dtype: str) -> Iterator[Case]:
    """x [M, K] times weight [N, K] transposed, as a layer has it."""
    for m, n, k in GEMMS:
        yield Case(
            family=f"gemm {dtype}",
            name=f"{m}x{n}x{k}",
            problem=problems.linear(_meta(dtype, m, k), _meta(dtype, n, k)),
            peers={"cublas": lambda x, w: torch.mm(x, w.t())},
        )


def _gemm_fp8() -> Iterator[Case]:
    one = torch.ones((), device="cuda")
    for fast in (True, False):

        def scaled(x: torch.Tensor, w: torch.Tensor, fast: bool = fast) -> torch.Tensor:
            return torch._scaled_mm(
                x, w.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast
            )

        for m, n, k in GEMMS:
            dtype = "float8_e4m3fn"
            yield Case(
                family="gemm fp8 " + ("fast" if fast else "accurate"),
                name=f"{m}x{n}x{k}",
                problem=problems.linear(
                    _meta(dtype, m, k),
                    _meta(dtype, n, k),
                    out_dtype="bfloat16",
                    fast_accumulation=fast,
                ),
                peers={"cublaslt": scaled},
            )


def _gemm_int8() -> Iterator[Case]:
    for m, n, k in GEMMS:
        yield Case(
            family="gemm int8",
            name=f"{m}x{n}x{k}",
            problem=problems.linear(_meta("int8", m, k), _meta("int8", n, k)),
            peers={"cublaslt": lambda x, w: torch._int_mm(x, w.t())},
        )


def _gemm_fused() -> Iterator[Case]:
    for m, n, k in GEMMS:
        x, w, b = (_meta("float16", *s) for s in ((m, k), (n, k), (n,)))
        yield Case(
            family="gemm bias gelu",
            name=f"{m}x{n}x{k}",
            problem=problems.linear(x, w, b, activation="gelu_tanh"),
            peers={
                "cublaslt + gelu": lambda x, w, b: F.gelu(
                    torch.addmm(b, x, w.t()), approximate="tanh"
                )
            },
            others={
                "cublaslt fused": lambda x, w, b: torch.ops.aten._addmm_activation(
                    b, x, w.t(), use_gelu=True
                )
            },
        )
    for m, n, k in GEMMS:
        x, w, b = (_meta("float16", *s) for s in ((m, k), (n, k), (n,)))
        yield Case(
            family="gemm bias residual relu",
            name=f"{m}x{n}x{k}",
            problem=problems.linear(x, w, b, _meta("float16", m, n), activation="relu"),
            peers={
                "cublaslt + add + relu": lambda x, w, b, r: torch.addmm(b, x, w.t()).add_(r).relu_()
            },
        )


def _gemm_thin() -> Iterator[Case]:
    for n, k in ((4096, 4096), (4096, 16384), (16384, 4096), (11008, 4096), (1024, 1024)):
        for m in (1, 4, 16, 64):
            yield Case(
                family="gemm M <= 64",
                name=f"{m}x{n}x{k}",
                problem=problems.linear(
                    _meta("float16", m, k), _meta("float16", n, k), constant=(1,)
                ),
                peers={"cublas": lambda x, w: torch.mm(x, w.t())},
                chained=True,
            )


def _gemm_sparse(dtype: str) -> Iterator[Case]:
    """2:4 weights, beside a dense weight of the same shape and cuSPARSELt with its search."""
    dense: Peer = torch._int_mm if dtype == "int8" else torch.mm
    for m, n, k in GEMMS:
        problem = problems.linear(_meta(dtype, m, k), _meta(dtype, n, k), constant=(1,))
        problem = replace(problem, attrs={**problem.attrs, "sparsity": TWO_FOUR})
        weight = drawn(problem.inputs[1])
        yield Case(
            family=f"gemm 2:4 {dtype}",
            name=f"{m}x{n}x{k}",
            problem=problem,
            algorithms=("sparse",),
            peers={
                "cublas, dense": lambda x, w=weight: dense(x, w.t()),
                "cusparselt": _best(problem, ("cusparselt",)),
            },
        )


def _gemm_float32() -> Iterator[Case]:
    for math_name in ("ieee", "tf32"):
        for m, n, k in ((1024, 1024, 1024), (4096, 4096, 4096), (8192, 8192, 8192)):
            yield Case(
                family=f"gemm float32 {math_name}",
                name=f"{m}x{n}x{k}",
                problem=problems.linear(
                    _meta("float32", m, k), _meta("float32", n, k), math=math_name
                ),
                peers={"cublas": lambda x, w: torch.mm(x, w.t())},
            )


# --- convolutions ---------------------------------------------------------------------------------

Layer = tuple[int, int, int, int, int, int]  # C, H, K, R, stride, padding
NHWC = ("implicit_gemm", "pointwise")  # the other algorithms are far behind at these sizes
NETWORKS = ("resnet50", "vgg16", "googlenet")


def layers(name: str) -> list[Layer]:
    """The distinct convolutions of a network at 224×224, without its first layer."""
    network = zoo.network(name, classes=1000)
    found: dict[Layer, None] = {}

    def note(module: torch.nn.Conv2d, inputs: tuple[torch.Tensor, ...], _: object) -> None:
        _, channels, height, _ = inputs[0].shape
        window = (module.kernel_size[0], module.stride[0], module.padding[0])
        if channels > 3:
            found[(channels, height, module.out_channels, *window)] = None

    with torch.device("meta"):
        net = zoo.build(network).eval()
        for module in net.modules():
            if isinstance(module, torch.nn.Conv2d):
                module.register_forward_hook(note)
        net(torch.empty(1, 3, 224, 224))
    return list(found)


def _title(n: int, layer: Layer) -> str:
    c, h, k, r, stride, _ = layer
    return f"N{n} {c}->{k} {r}x{r}@{h}" + (f" s{stride}" if stride > 1 else "")


def _operands(n: int, layer: Layer, dtype: str) -> tuple[TensorMeta, TensorMeta, tuple[int, ...]]:
    c, h, k, r, stride, padding = layer
    size = (h + 2 * padding - r) // stride + 1
    x, w = _meta(dtype, n, c, h, h, last=True), _meta(dtype, k, c, r, r, last=True)
    return x, w, (n, k, size, size)


def _conv(n: int, fused: bool) -> Iterator[Case]:
    for name in NETWORKS:
        for layer in layers(name):
            x, w, out = _operands(n, layer, "float16")
            window = {"stride": layer[4], "padding": layer[5]}
            if not fused:
                yield Case(
                    family=f"conv fp16 N={n}",
                    name=f"{name} {_title(n, layer)}",
                    problem=problems.conv(x, w, **window),
                    peers={"cudnn": _conv_peer(**window)},
                    algorithms=NHWC,
                )
                continue
            bias, residual = _meta("float16", out[1]), _meta("float16", *out, last=True)
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


def _conv_groups() -> Iterator[Case]:
    for c, groups, size, stride in GROUPED:
        yield _grouped("conv fp16 groups N=128", c, groups, size, 3, stride, NHWC)
    for c, size, taps, stride in DEPTHWISE:
        yield _grouped("conv fp16 depthwise N=128", c, c, size, taps, stride, ("direct",))


def _grouped(
    family: str, c: int, groups: int, size: int, taps: int, stride: int, algorithms: tuple[str, ...]
) -> Case:
    """Weights are constants, as in a plan: they are packed once."""
    x = _meta("float16", 128, c, size, size, last=True)
    w = _meta("float16", c, c // groups, taps, taps, last=True)
    window = {"stride": stride, "padding": taps // 2, "groups": groups}
    weight = drawn(w)
    return Case(
        family=family,
        name=f"{_title(128, (c, size, c, taps, stride, taps // 2))} in {groups}",
        problem=problems.conv(x, w, constant=(1,), **window),
        peers={"cudnn": lambda x: F.conv2d(x, weight, **window)},
        algorithms=algorithms,
    )


def _stem() -> Iterator[Case]:
    for n in (1, 128):
        for layer in ((3, 224, 64, 7, 2, 3), (3, 224, 64, 3, 1, 1), (3, 224, 64, 11, 4, 2)):
            x, w, _ = _operands(n, layer, "float16")
            window = {"stride": layer[4], "padding": layer[5]}
            yield Case(
                family="conv stem Ci=3",
                name=_title(n, layer),
                problem=problems.conv(x, w, _meta("float16", 64), activation="relu", **window),
                algorithms=("direct", *NHWC),
                peers={
                    "cudnn fused": lambda x, w, b, s=layer[4], p=layer[5]: (
                        torch.cudnn_convolution_relu(x, w, b, [s, s], [p, p], [1, 1], 1)
                    )
                },
                others={"cudnn": _conv_peer(**window)},
            )


def _backward() -> Iterator[Case]:
    for name in NETWORKS:
        for layer in layers(name):
            x, w, out = _operands(128, layer, "float16")
            dy = _meta("float16", *out, last=True)
            window = {"stride": layer[4], "padding": layer[5]}
            arguments = ([layer[4]] * 2, [layer[5]] * 2, [1, 1], False, [0, 0], 1)

            def dgrad(dy, w, arguments=arguments, shape=x.shape):  # type: ignore[no-untyped-def]
                x = torch.empty(
                    shape, dtype=dy.dtype, device=dy.device, memory_format=torch.channels_last
                )
                return torch.ops.aten.convolution_backward(
                    dy, x, w, None, *arguments, [True, False, False]
                )[0]

            def wgrad(dy, x, arguments=arguments, shape=w.shape):  # type: ignore[no-untyped-def]
                w = torch.empty(
                    shape, dtype=dy.dtype, device=dy.device, memory_format=torch.channels_last
                )
                return torch.ops.aten.convolution_backward(
                    dy, x, w, None, *arguments, [False, True, False]
                )[1]

            yield Case(
                family="conv dgrad fp16",
                name=f"{name} {_title(128, layer)}",
                problem=problems.conv_dgrad(dy, w, x.shape, **window),
                peers={"cudnn": dgrad},
            )
            yield Case(
                family="conv wgrad fp16",
                name=f"{name} {_title(128, layer)}",
                problem=problems.conv_wgrad(dy, x, w.shape[2:], **window),
                peers={"cudnn": wgrad},
            )


def _conv_int8() -> Iterator[Case]:
    """INT8 with everything fused, beside the same layer in FP16 by cuDNN.

    A residual where a bottleneck adds one: behind the 1×1 layer with four times the channels.
    """
    for layer in layers("resnet50"):
        x, w, out = _operands(128, layer, "int8")
        window = {"stride": layer[4], "padding": layer[5]}
        vector = _meta("float32", out[1])
        widens = layer[3:5] == (1, 1) and out[1] == 4 * layer[0]
        residual = _meta("int8", *out, last=True) if widens else None
        half = {
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
            "cuDNN fp16": {"cudnn": lambda *_, conv=conv, half=half: conv(half["x"], half["w"])}
        }
        if importlib.util.find_spec("cudnn"):  # its graph interface is a package of its own
            peers["cuDNN int8"] = {"cudnn": _best(problem, ("cudnn_graph",))}
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
    residual = _meta("float16", *out, last=True) if adds else None
    problem = problems.conv(
        x, w, _meta("float16", out[1]), residual,
        activation="relu", constant=(1, 2), stride=layer[4], padding=layer[5],
    )  # fmt: skip
    run = _best(problem, ("cudnn", "cudnn_graph"))
    operands = [drawn(meta) for meta in (x, residual) if meta]
    return lambda *_: run(*operands)


# channels of x, of the wide result, of the next block's first convolution; pixels
CHAINS = (
    (64, 256, 64, 56), (64, 256, 128, 56), (128, 512, 128, 28), (128, 512, 256, 28),
    (256, 1024, 256, 14), (512, 2048, 512, 7),
)  # fmt: skip


def _chain(n: int, dtype: str) -> Iterator[Case]:
    """ResNet-50: a block's last convolution with its residual, and the first of the next block."""
    for c, k, out, size in CHAINS:
        kind = {"dtype": dtype, "scaled": dtype == "int8"}
        first = _layer(n, c, k, size, residual=True, **kind)
        second = _layer(n, k, out, size, residual=False, **kind)
        halves = [_layer(n, *ends, size, dtype="float16") for ends in ((c, k), (k, out))]
        yield Case(
            family=f"chain {dtype} N={n}",
            name=f"N{n} {c}->{k}->{out} 1x1@{size}",
            problem=problems.conv2d_chain(first, second),
            algorithms=("back_to_back",),
            peers={"ours apart": _apart(first, second), "cudnn fp16 + add + relu": _cudnn(*halves)},
        )


def _pooled(n: int, out: str) -> Iterator[Case]:
    """ResNet's first layer and its pooling, in FP16 to FP16 and to int8."""
    first = problems.conv(
        _meta("float16", n, 3, 224, 224, last=True), _meta("float16", 64, 3, 7, 7, last=True),
        _meta("float16", 64), stride=2, padding=3, activation="relu", constant=(1, 2),
        out_dtype=out, gamma=40.0 if out == "int8" else 1.0,
    )  # fmt: skip
    if out == "int8":
        first = replace(first, attrs={**first.attrs, "dtype": out})
    pool = Problem(
        op="max_pool2d",
        inputs=(first.output,),
        outputs=(_meta(out, n, 64, 56, 56, last=True),),
        attrs={"kernel_size": (3, 3), "stride": (2, 2), "padding": (1, 1), "dilation": (1, 1),
               "ceil_mode": False},
    )  # fmt: skip
    yield Case(
        family=f"conv + pool float16 to {out} N={n}",
        name=f"N{n} 3->64 7x7@224",
        problem=problems.conv2d_pool(first, pool),
        algorithms=("direct",),
        peers={"ours apart": _apart(first, pool, ("direct", "windows"))},
    )


# rows, columns, depth; whether the sum is the next residual, and is written too
NORMED = {
    "BERT-large attention": (12288, 1024, 1024, False),
    "BERT-large feed-forward": (12288, 1024, 4096, False),
    "ViT-B/16 attention": (25216, 768, 768, True),
    "ViT-B/16 feed-forward": (25216, 768, 3072, True),
}


def _normed(dtype: str) -> Iterator[Case]:
    """A layer with its residual, and the layer norm of what it makes."""
    eight = dtype != "float16"
    for name, (m, n, k, keep) in NORMED.items():
        vector = _meta("float32", n)
        first = problems.linear(
            _meta(dtype, m, k), _meta(dtype, n, k), vector, _meta("float16", m, n),
            vector if eight else None, out_dtype="float16", fast_accumulation=eight,
            constant=(1, 2, 4) if eight else (1, 2),
        )  # fmt: skip
        second = Problem(
            op="layer_norm",
            inputs=(first.output, _meta("float16", n), _meta("float16", n)),
            outputs=(first.output,),
            attrs={"normalized_shape": (n,), "eps": 1e-5},
            constant=(1, 2),
        )
        yield Case(
            family=f"linear + norm {dtype}",
            name=f"{name} {m}x{n}x{k}",
            problem=problems.linear_norm(first, second, keep=keep),
            algorithms=("normed",),
            peers={"ours apart": _apart(first, second, ("wgmma", "generated"))},
        )


def _layer(
    n: int, c: int, k: int, size: int, *, dtype: str, residual: bool = False, scaled: bool = False
) -> Problem:
    """A 1×1 convolution with bias and ReLU and constant weights, as a plan has it."""
    vector, out = _meta("float32", k), _meta(dtype, n, k, size, size, last=True)
    return problems.conv(
        _meta(dtype, n, c, size, size, last=True), _meta(dtype, k, c, 1, 1, last=True), vector,
        out if residual else None, vector if scaled else None,
        activation="relu", constant=(1, 2, 4) if scaled else (1, 2),
    )  # fmt: skip


def _apart(first: Problem, second: Problem, algorithms: tuple[str, ...] = NHWC) -> Peer:
    """Both steps one after the other, each by the best of our kernels."""
    calls = [_best(problem, algorithms, auction.OWN) for problem in (first, second)]
    return lambda *inputs: calls[1](calls[0](*inputs))


def _best(
    problem: Problem, algorithms: tuple[str, ...], sources: tuple[str, ...] | None = None
) -> Peer:
    """The fastest of some candidates of the auction, on operands as the auction asks for."""
    constants = drawn_constants(problem)
    terms = Terms(algorithms=algorithms, sources=sources, budget_s=0.02)
    best = auction.find(problem, constants, target=TARGET, terms=terms)[0]
    row, device = catalog.kernel(best.kernel), torch_device(TARGET)
    call, buffers = auction.bind(row, problem, constants, device, best.config)
    return lambda *inputs: call(*inputs, **buffers)


def _cudnn(first: Problem, second: Problem) -> Peer:
    """cuDNN's convolutions in FP16 and what goes on element by element, on operands of its own."""
    x, w, r = (drawn(meta) for meta in (*first.inputs[:2], first.output))
    v = drawn(second.inputs[1])
    b, d = (torch.randn(len(t), device="cuda").half() for t in (w, v))

    def run(*_: torch.Tensor) -> torch.Tensor:
        return F.conv2d(F.conv2d(x, w, b).add_(r).relu_(), v, d).relu_()

    return run


def drawn_constants(problem: Problem) -> dict[int, torch.Tensor]:
    """Weights and vectors as layers have them: int8's scales bring its sums into range."""
    made = {i: drawn(problem.inputs[i]) for i in problem.constant}
    if problem.attr("sparsity") == TWO_FOUR:
        made[WEIGHT] = prune_two_four(made[WEIGHT])
    for weight, scale in ((WEIGHT, SCALE), (NEXT_WEIGHT, NEXT_SCALE)):  # the latter of chains
        if scale in made:
            products = math.prod(problem.inputs[weight].shape[1:])
            made[scale] = made[scale].abs() * (40 / (73 * 73 * products**0.5))
    return made


def drawn(meta: TensorMeta) -> torch.Tensor:
    """Normal numbers, int8 over its range (a deviation of 73), that lie as the problem says."""
    device, dtype = torch_device(TARGET), getattr(torch, meta.dtype)
    if dtype == torch.int8:
        made = torch.randint(-127, 128, meta.shape, dtype=dtype, device=device)
    else:
        made = torch.randn(meta.shape, device=device).to(dtype)
    return made.contiguous(memory_format=memory_format(meta.format, len(meta.shape)))


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


def _published() -> Iterator[Case]:
    for taps in PUBLISHED_MS:
        x, w = _meta("float32", 1, 128, 128, 128), _meta("float32", 128, 128, taps, taps)
        window = {"stride": 1, "padding": taps // 2}
        yield Case(
            family="conv FP32 N=1 128@128",
            name=f"{taps}x{taps}",
            problem=problems.conv(x, w, **window),
            peers={"cudnn": _conv_peer(**window)},
            published_ms=PUBLISHED_MS[taps],
        )


# --- attention ------------------------------------------------------------------------------------

# by name: batch, heads, tokens, width of a head, causal, the mask's shape
ATTENTIONS: dict[str, tuple[int, int, int, int, bool, tuple[int, ...] | None]] = {
    "BERT-large N32 S384": (32, 16, 384, 64, False, None),
    "BERT-large N32 S384 padded": (32, 16, 384, 64, False, (32, 1, 1, 384)),
    "BERT-large N1 S384": (1, 16, 384, 64, False, None),
    "BERT-base N32 S128 padded": (32, 12, 128, 64, False, (32, 1, 1, 128)),
    "ViT-B/16 N128": (128, 12, 197, 64, False, None),
    "ViT-B/16 N1": (1, 12, 197, 64, False, None),
    "Swin-T N128 windows": (128 * 64, 3, 49, 32, False, (1, 3, 49, 49)),
    "Swin-T N128 shifted": (128 * 64, 3, 49, 32, False, (64, 3, 49, 49)),
    "Swin-T N128 stage 3": (128 * 4, 12, 49, 32, False, (4, 12, 49, 49)),
    "GPT-2 N8 S1024": (8, 12, 1024, 64, True, None),
    "GPT-2 N2 S4096": (2, 12, 4096, 64, True, None),
    "128 wide N8 S1024": (8, 16, 1024, 128, True, None),
    "128 wide N2 S4096": (2, 16, 4096, 128, True, None),
    "128 wide N2 S4096 not causal": (2, 16, 4096, 128, False, None),
}


def _attention() -> Iterator[Case]:
    """Heads as layers leave them: those of a token lie side by side."""
    for name, (n, heads, tokens, width, causal, mask) in ATTENTIONS.items():
        operand = TensorMeta(
            shape=(n, heads, tokens, width),
            dtype="float16",
            format="strided",
            strides=(tokens * heads * width, width, heads * width, 1),
        )
        added = None if mask is None else _meta("float16", *mask)
        backends = ("FLASH_ATTENTION", "CUDNN_ATTENTION") if added is None else ()
        yield Case(
            family="attention fp16",
            name=name,
            problem=problems.attention(operand, operand, operand, added, is_causal=causal),
            peers={b: _attention_peer(b, causal) for b in (*backends, "EFFICIENT_ATTENTION")},
            algorithms=("flash", "windows"),
        )


def _attention_peer(backend: str, causal: bool) -> Peer:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *mask: torch.Tensor) -> Any:
        operands = (q, k, v, *(repeated(m, q) for m in mask))
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return F.scaled_dot_product_attention(*operands, is_causal=causal)

    return attend


FAMILIES: dict[str, Callable[[], Iterator[Case]]] = {
    "gemm_fp16": lambda: _gemm("float16"),
    "gemm_bf16": lambda: _gemm("bfloat16"),
    "gemm_fp8": _gemm_fp8,
    "gemm_int8": _gemm_int8,
    "gemm_fused": _gemm_fused,
    "gemm_thin": _gemm_thin,
    "gemm_float32": _gemm_float32,
    "gemm_sparse": lambda: (c for d in ("float16", "int8") for c in _gemm_sparse(d)),
    "conv": lambda: _conv(128, fused=False),
    "conv_n1": lambda: _conv(1, fused=False),
    "conv_fused": lambda: _conv(128, fused=True),
    "conv_groups": _conv_groups,
    "stem": _stem,
    "backward": _backward,
    "conv_int8": _conv_int8,
    "chain": lambda: (c for n in (128, 1) for d in ("float16", "int8") for c in _chain(n, d)),
    "linear_norm": lambda: (c for d in ("float16", "float8_e4m3fn") for c in _normed(d)),
    "conv_pool": lambda: (c for n in (128, 1) for d in ("float16", "int8") for c in _pooled(n, d)),
    "published": _published,
    "attention": _attention,
}
