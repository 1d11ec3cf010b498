"""Our CPU kernels beside oneDNN's and torch's: ``python -m benchmarks.cpu_kernels``.

The distinct convolutions of ResNet-50 and GoogLeNet with bias, ReLU and, where they expand, a
residual; max pooling; depthwise convolutions of MobileNetV3 and ConvNeXt; products of ViT, BERT and
ConvNeXt; DenseNet's norms before a convolution. Weights are constant, as in a plan.
``TESSELLA_ISA=avx2`` in front shows what a processor without AVX-512 gains. All kernels of the
catalogue race in interleaved rounds with warm caches; the fastest of ours stands beside the fastest
of the libraries. A ratio above 1 means that we win.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases.case import meta
from benchmarks.cases.conv import layers
from benchmarks.report import RESULTS, document, markdown, write
from tessella.device.x86 import code
from tessella.kernels import catalog
from tessella.operations import problems
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta
from tessella.search import find as search
from tessella.search.find import OWN, SearchOptions
from tessella.search.inputs import sample_inputs

CPU = torch.device("cpu")
# channels, pixels, window, stride, activation: MobileNetV3-L's and ConvNeXt-T's
DEPTHWISE = (
    (16, 112, 3, 1, "relu"), (64, 112, 3, 2, "relu"), (72, 56, 3, 1, "relu"),
    (120, 28, 5, 1, "relu"), (240, 28, 3, 2, "hardswish"), (480, 14, 3, 1, "hardswish"),
    (672, 14, 5, 2, "hardswish"), (960, 7, 5, 1, "hardswish"), (96, 56, 7, 1, None),
    (192, 28, 7, 1, None), (384, 14, 7, 1, None), (768, 7, 7, 1, None),
)  # fmt: skip
# rows an item, channels in and out, activation: ViT-B/16's, BERT-base's and ConvNeXt-T's
PRODUCTS = (
    (197, 768, 2304, None), (197, 768, 3072, "gelu"), (197, 3072, 768, None), (128, 768, 768, None),
    (128, 768, 3072, "gelu"), (3136, 96, 384, "gelu"), (784, 768, 192, None),
    (49, 768, 3072, "gelu"), (1, 2048, 1000, None),
)  # fmt: skip
# channels, pixels, stride, padding of 3×3 windows: GoogLeNet's and ResNet's
POOLS = ((64, 112, 2, 1), (192, 56, 2, 0), (256, 28, 1, 1), (480, 28, 2, 0), (528, 14, 1, 1),
         (832, 7, 1, 1))  # fmt: skip


def main() -> None:
    args = _arguments()
    rows: list[dict[str, Any]] = []
    dtypes = ("float32", "bfloat16") if code.has_bfloat16() else ("float32",)
    for batch in (1, 8):
        for dtype in dtypes:
            for family, name, problem in (
                *_convolutions(batch, dtype),
                *_pools(batch, dtype),
                *_depthwise(batch, dtype),
                *_products(batch, dtype),
                *_norms(batch, dtype),
            ):
                row = _row(family, name, problem, args.seconds)
                rows.append(row)
                outcome = row.get("ratio") or row["refused"]
                print(f"{family:36} {name:34} {row['times_us']} {outcome}", flush=True)
    write(args.out, document("cpu", rows))
    print(markdown(*summary(rows)))
    print(f"wrote {args.out}")


def _convolutions(batch: int, dtype: str) -> Iterator[tuple[str, str, Problem]]:
    for network in ("resnet50", "googlenet"):
        for channels, size, out, taps, stride, padding in layers(network):
            x = meta(dtype, batch, channels, size, size, last=True)
            weight, bias = meta(dtype, out, channels, taps, taps), meta(dtype, out)
            expands = network == "resnet50" and taps == 1 and out == 4 * channels
            residual = meta(dtype, batch, out, size, size, last=True) if expands else None
            problem = problems.conv(
                x, weight, bias, residual, stride=stride, padding=padding, activation="relu",
                constant=(1, 2),
            )  # fmt: skip
            if expands:  # nobody needs it afterwards
                problem = replace(problem, dying=(3,))
            kind = "1×1 + residual" if expands else f"{taps}×{taps}"
            name = f"{channels}->{out} {taps}x{taps}@{size}" + (f" s{stride}" if stride > 1 else "")
            yield f"conv {kind} {dtype} N={batch}", f"{network} {name}", problem


def _pools(batch: int, dtype: str) -> Iterator[tuple[str, str, Problem]]:
    """Max poolings of a ReLU's output, as in these networks."""
    for channels, size, stride, padding in POOLS:
        x = meta(dtype, batch, channels, size, size, last=True)
        made = math.ceil((size + 2 * padding - 3) / stride) + 1
        out = TensorMeta(shape=(batch, channels, made, made), dtype=dtype, format="channels_last")
        attrs = {
            "kernel_size": (3, 3), "stride": (stride, stride), "padding": (padding, padding),
            "dilation": (1, 1), "ceil_mode": True,
            **({"non_negative": True} if dtype == "bfloat16" else {}),
        }  # fmt: skip
        problem = Problem(op="max_pool2d", inputs=(x,), outputs=(out,), attrs=attrs)
        yield f"max pool {dtype} N={batch}", f"{channels} 3x3@{size} s{stride}", problem


def _depthwise(batch: int, dtype: str) -> Iterator[tuple[str, str, Problem]]:
    for channels, size, taps, stride, activation in DEPTHWISE:
        x = meta(dtype, batch, channels, size, size, last=True)
        weight, bias = meta(dtype, channels, 1, taps, taps), meta(dtype, channels)
        problem = problems.conv(
            x, weight, bias, stride=stride, padding=taps // 2, groups=channels,
            activation=activation, constant=(1, 2),
        )  # fmt: skip
        name = f"{channels} {taps}x{taps}@{size}" + (f" s{stride}" if stride > 1 else "")
        yield f"depthwise {dtype} N={batch}", name, problem


def _products(batch: int, dtype: str) -> Iterator[tuple[str, str, Problem]]:
    for rows, channels, out, activation in PRODUCTS:
        x = meta(dtype, batch * rows, channels)
        weight, bias = meta(dtype, out, channels), meta(dtype, out)
        problem = problems.linear(x, weight, bias, activation=activation, constant=(1, 2))
        name = f"{rows} rows {channels}->{out}" + (f" {activation}" if activation else "")
        yield f"linear {dtype} N={batch}", name, problem


def _norms(batch: int, dtype: str) -> Iterator[tuple[str, str, Problem]]:
    """A batch norm and a ReLU that no convolution stands before, as in DenseNet."""
    for channels, size in ((128, 56), (512, 28), (896, 14), (1024, 7)):
        x, vector = meta(dtype, batch, channels, size, size, last=True), meta(dtype, channels)
        program: tuple[Any, ...] = (
            ("batch_norm", (0, 1, 2, 3, 4), {"eps": 1e-5}),
            ("relu", (5,), {}),
        )
        problem = Problem(
            op="pointwise", inputs=(x, *[vector] * 4), outputs=(x,),
            attrs={"program": program, "results": (6,)}, constant=(1, 2, 3, 4),
        )  # fmt: skip
        yield f"norm + ReLU {dtype} N={batch}", f"{channels} @{size}", problem


def _row(family: str, name: str, problem: Problem, seconds: float) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    constants = {
        i: torch.randn(m.shape, generator=generator).to(getattr(torch, m.dtype))
        for i, m in enumerate(problem.inputs)
        if m is not None and i in problem.constant
    }
    inputs = sample_inputs(problem, CPU)
    if problem.op == "pointwise":
        constants = {i: tensor.abs() for i, tensor in constants.items()}  # a variance among them
    if problem.op == "max_pool2d":
        inputs = [x.abs() for x in inputs]
    options = SearchOptions(budget_s=seconds)
    trials = search.find(problem, constants, target="cpu", options=options, inputs=inputs)
    ran = [t for t in trials if t.refused is None and t.time_us is not None]
    ours = [t for t in ran if catalog.kernel(t.kernel).source in OWN]
    theirs = [t for t in ran if catalog.kernel(t.kernel).source not in OWN]
    peer = min(theirs, key=lambda t: t.time_us or 0.0)
    row = {"family": family, "name": name, "peer": peer.kernel}
    if not ours:
        refused = {t.kernel: t.refused for t in trials if catalog.kernel(t.kernel).source in OWN}
        return {**row, "refused": refused, "times_us": {"peer": peer.time_us}}
    best = min(ours, key=lambda t: t.time_us or 0.0)
    return {
        **row,
        "kernel": best.kernel,
        "config": best.config,
        "times_us": {"ours": best.time_us, "peer": peer.time_us},
        "ratio": round((peer.time_us or 0.0) / (best.time_us or 1.0), 3),
    }


def summary(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[object]]]:
    """A table with a line for each family."""
    lines: list[list[object]] = []
    for family in dict.fromkeys(row["family"] for row in rows):
        ratios = [row["ratio"] for row in rows if row["family"] == family and "ratio" in row]
        if not ratios:
            continue
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        lines.append([family, len(ratios), *(f"{r:.2f}" for r in (mean, min(ratios), max(ratios)))])
    return ["family", "shapes", "ratio (geometric mean)", "worst", "best"], lines


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.3, help="a problem, about")
    parser.add_argument("--out", type=Path, default=RESULTS / "kernels-cpu.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
