"""Our kernels beside cuBLAS and cuDNN, in one run: ``python -m benchmarks.kernels``.

For each shape our kernels race among themselves; the winner then runs in turn with every peer, cold
L2, in CUDA graphs. cuDNN searches too (``cudnn.benchmark``). A ratio above 1 means that we win.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.report import RESULTS, document, markdown, write
from tessella.core.device import torch_device
from tessella.core.errors import CompileError
from tessella.core.record import to_plain
from tessella.kernels import auction, catalog, problems
from tessella.kernels.auction import OWN, Bid, Terms, look_ahead
from tessella.kernels.limits import Limits, measured
from tessella.kernels.problem import Math, Problem, TensorMeta, memory_format
from tessella.kernels.timing import Run, measure
from tessella.kernels.tuning import TimingCache, Trial
from tessella.kernels.work import flops, nbytes
from tessella.nn import zoo

TARGET = "sm_90"
WRITE_S = 10.0
FAR = 1.3  # as the compiler's auctions
Tensors = list[torch.Tensor]
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


def main() -> None:
    args = _arguments()
    path = Path(args.out or RESULTS / "kernels-sm_90.json")
    torch.backends.cudnn.benchmark = True
    ceilings = measured(TARGET, torch.cuda.get_device_name())
    rows: list[dict[str, Any]] = []
    written = time.monotonic()
    wanted = set(args.families.split(",")) if args.families else set(FAMILIES)
    for name in (name for name in FAMILIES if name in wanted):
        cases = list(FAMILIES[name]())
        for case, near in zip(cases, _compiled(cases, args.seconds), strict=True):
            row = _row(case, near, ceilings, args.seconds)
            rows.append(row)
            print(_line(row), flush=True)
            if time.monotonic() - written > WRITE_S:  # what was measured is kept
                write(path, {**document(TARGET, rows), "limits": to_plain(ceilings)})
                written = time.monotonic()
    write(path, {**document(TARGET, rows), "limits": to_plain(ceilings)})
    print(markdown(*summary(rows)))
    print(markdown(*published(rows)))
    print(f"wrote {path}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", help=f"some of {','.join(FAMILIES)}; default all")
    parser.add_argument("--seconds", type=float, default=0.05, help="a row, about")
    parser.add_argument("--out")
    return parser.parse_args()


def _terms(case: Case, seconds: float) -> Terms:
    """Ours race; in the published table every algorithm is at its best, however far behind."""
    return Terms(
        sources=OWN,
        algorithms=case.algorithms,
        budget_s=seconds / 2,
        far=math.inf if case.published_ms else FAR,
        inspect=True,
    )


def _compiled(cases: Sequence[Case], seconds: float) -> Iterator[Sequence[Bid] | None]:
    """What each auction of a family will run, when it is compiled; later ones compile meanwhile."""
    ahead = look_ahead(
        {case.problem.key: (case.problem, _constants(case)) for case in cases},
        target=TARGET,
        cache=TimingCache(),
        terms=_terms(cases[0], seconds),
    )
    for case in cases:
        near, compiled = ahead.get(case.problem.key, (None, None))
        if compiled:
            compiled.wait()
        yield near


def _constants(case: Case) -> dict[int, torch.Tensor]:
    return {i: _sample(case.problem.inputs[i]) for i in case.problem.constant}


def _sample(meta: TensorMeta) -> torch.Tensor:
    return torch.randn(meta.shape, device=torch_device(TARGET)).to(getattr(torch, meta.dtype))


def _weights(problem: Problem) -> Tensors:
    """As many as drive each other out of the L2."""
    l2_bytes = torch.cuda.get_device_properties("cuda").L2_cache_size
    count = max(8, math.ceil(2 * l2_bytes / problem.inputs[1].nbytes))
    return [_sample(problem.inputs[1]) for _ in range(count)]


def _row(
    case: Case, near: Sequence[Bid] | None, ceilings: Limits, seconds: float
) -> dict[str, Any]:
    problem, device = case.problem, torch_device(TARGET)
    inputs = auction.sample_inputs(problem, device)
    row = {"family": case.family, "name": case.name, "op": problem.op, "shapes": _shapes(problem)}
    try:
        trials = auction.find(
            problem,
            _constants(case),
            target=TARGET,
            terms=_terms(case, seconds),
            inputs=inputs,
            near=near,
        )
    except CompileError as error:
        return {**row, "refused": error.seen}
    best = trials[0]
    weights = _weights(problem) if case.chained else []
    runs = {"ours": _ours(best, problem, inputs, weights)}
    for name, peer in {**case.peers, **case.others}.items():
        runs[name] = _warmed(peer, inputs, weights, problem.math)
    with torch.inference_mode(), _math(problem.math):
        timings = measure(runs, device=device, budget_s=seconds)
    times = {name: round(t.time_us / max(1, len(weights)), 3) for name, t in timings.items()}
    row |= {
        "kernel": best.kernel,
        "config": best.config,
        "workspace_bytes": best.workspace_bytes,
        "inspection": to_plain(best.inspection),
        "times_us": times,
        "algorithms": [_algorithm(trial, case.published_ms) for trial in trials],
        "limit_share": round(ceilings.least_us(problem) / times["ours"], 3),
        "tflops": round((flops(problem) or 0) / times["ours"] * 1e-6, 1),
        "tbytes": round(nbytes(problem) / times["ours"] * 1e-6, 3),
    }
    if case.peers:
        row["ratio"] = round(min(times[peer] for peer in case.peers) / times["ours"], 3)
    return row


def _algorithm(trial: Trial, published_ms: Mapping[str, float]) -> dict[str, Any]:
    """A trial of ours, short."""
    inspection = trial.inspection
    published = published_ms.get(catalog.kernel(trial.kernel).algorithm)
    faster = published and trial.time_us and round(published * 1e3 / trial.time_us, 2)
    return {
        "kernel": trial.kernel,
        "time_us": trial.time_us,
        "workspace_bytes": trial.workspace_bytes,
        "max_rel_error": None if inspection is None else inspection.max_rel_error,
        "refused": trial.refused,
        **({"published_ms": published, "times_faster": faster} if published else {}),
    }


def _ours(best: Trial, problem: Problem, inputs: Tensors, weights: Tensors) -> Run:
    """The kernel that won; once for each weight, if there are several."""
    row, device = catalog.kernel(best.kernel), torch_device(TARGET)
    constants = [{1: weight} for weight in weights] or [{}]
    bound = [auction.bind(row, problem, each, device, best.config) for each in constants]
    buffers = bound[0][1]
    return lambda: [call(*inputs, **buffers) for call, _ in bound]


def _warmed(peer: Peer, inputs: Tensors, weights: Tensors, math: Math) -> Run:
    """The peer on these operands, after the runs in which it searches and allocates."""
    operands = [(*inputs, weight) for weight in weights] or [tuple(inputs)]
    with torch.inference_mode(), _math(math):
        for _ in range(3):
            peer(*operands[0])
    return lambda: [peer(*each) for each in operands]


class _math:
    """float32 products of the libraries rounded as asked; cuDNN's search stays on."""

    def __init__(self, math: Math) -> None:
        self.math = math

    def __enter__(self) -> None:
        torch.backends.cudnn.conv.fp32_precision = self.math
        torch.backends.cuda.matmul.fp32_precision = self.math

    def __exit__(self, *_: object) -> None:
        torch.backends.cudnn.conv.fp32_precision = "ieee"
        torch.backends.cuda.matmul.fp32_precision = "ieee"


def _shapes(problem: Problem) -> str:
    return " ".join("x".join(map(str, t.shape)) for t in problem.inputs[:2] if t is not None)


def _line(row: Mapping[str, Any]) -> str:
    if "refused" in row:
        return f"{row['family']:14} {row['name']:28} refused: {row['refused'][:120]}"
    times = "  ".join(f"{name} {time:.1f}" for name, time in row["times_us"].items())
    return (
        f"{row['family']:14} {row['name']:28} {row.get('ratio', 0):5.2f}x  {times} µs"
        f"  {row['limit_share']:.0%}  {row['kernel']} {row['config']}"
    )


def summary(rows: list[dict[str, Any]]) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    """A line a family: the geometric mean of its ratios, the worst, and how many were refused."""
    head = (
        "family",
        "shapes",
        "ratio (geometric mean)",
        "worst",
        "best",
        "share of limit",
        "refused",
    )
    lines: list[tuple[object, ...]] = []
    for family in dict.fromkeys(row["family"] for row in rows):
        mine = [row for row in rows if row["family"] == family]
        ran = [row for row in mine if row.get("ratio")]
        if not ran:
            continue
        ratios = [row["ratio"] for row in ran]
        mean = math.exp(sum(math.log(ratio) for ratio in ratios) / len(ratios))
        share = sorted(row["limit_share"] for row in ran)[len(ran) // 2]
        lines.append(
            (family, len(ran), f"{mean:.2f}", f"{min(ratios):.2f}", f"{max(ratios):.2f}",
             f"{share:.0%}", len(mine) - len(ran))
        )  # fmt: skip
    return head, lines


def published(rows: list[dict[str, Any]]) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    """Each algorithm beside its published time."""
    head = ("filter", "kernel", "ms", "GV100 ms", "times faster", "workspace MB", "error")
    lines: list[tuple[object, ...]] = [
        (row["name"], a["kernel"], f"{a['time_us'] / 1e3:.3f}", a.get("published_ms", ""),
         a.get("times_faster", ""), f"{a['workspace_bytes'] / 1e6:.2f}",
         f"{a['max_rel_error']:.1e}")
        for row in rows
        if row["family"].startswith("conv FP32")
        for a in row.get("algorithms", [])
        if a["time_us"]
    ]  # fmt: skip
    return head, lines


# --- matrix products ------------------------------------------------------------------------------


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
    """INT8 with everything fused, beside the same layer in FP16 by cuDNN."""
    for layer in layers("resnet50"):
        x, w, out = _operands(128, layer, "int8")
        window = {"stride": layer[4], "padding": layer[5]}
        vector = _meta("float32", out[1])
        half = {
            name: torch.randn(meta.shape, device="cuda")
            .half()
            .to(memory_format=memory_format(meta.format, 4))
            for name, meta in (("x", x), ("w", w))
        }
        conv = _conv_peer(**window)
        problem = problems.conv(
            x, w, vector, _meta("int8", *out, last=True), vector,
            activation="relu", out_dtype="int8", **window,
        )  # fmt: skip
        peers: dict[str, Mapping[str, Peer]] = {
            "cuDNN fp16": {"cudnn": lambda *_, conv=conv, half=half: conv(half["x"], half["w"])}
        }
        if importlib.util.find_spec("cudnn"):  # its graph interface is a package of its own
            peers["cuDNN int8"] = {"cudnn": _candidate(problem, "cudnn_graph")}
        for name, peer in peers.items():
            yield Case(
                family=f"conv int8 fused, vs {name}",
                name=f"resnet50 {_title(128, layer)}",
                problem=problem,
                algorithms=NHWC,
                peers=peer,
            )


def _candidate(problem: Problem, algorithm: str) -> Peer:
    """A library that is a candidate of the auction too, at its best for this problem."""
    terms = Terms(algorithms=(algorithm,), budget_s=0.02)
    best = auction.find(problem, {}, target=TARGET, terms=terms)[0]
    row, device = catalog.kernel(best.kernel), torch_device(TARGET)
    call, buffers = auction.bind(row, problem, {}, device, best.config)
    return lambda *inputs: call(*inputs, **buffers)


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


FAMILIES: dict[str, Callable[[], Iterator[Case]]] = {
    "gemm_fp16": lambda: _gemm("float16"),
    "gemm_bf16": lambda: _gemm("bfloat16"),
    "gemm_fp8": _gemm_fp8,
    "gemm_int8": _gemm_int8,
    "gemm_fused": _gemm_fused,
    "gemm_thin": _gemm_thin,
    "gemm_float32": _gemm_float32,
    "conv": lambda: _conv(128, fused=False),
    "conv_n1": lambda: _conv(1, fused=False),
    "conv_fused": lambda: _conv(128, fused=True),
    "stem": _stem,
    "backward": _backward,
    "conv_int8": _conv_int8,
    "published": _published,
}

if __name__ == "__main__":
    main()
