"""The time of the passes on large graphs, and its growth with the graph:
``python -m benchmarks.rewriting --out benchmarks/results/rewriting.json``.

Graphs of 1,000 and 10,000 nodes go through every rewrite (with the check after each), their
siblings are fused and a layout is assigned. No kernel is measured; the seconds are processor time
on one core.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import document
from tessella.compiler.passes import Request, steps
from tessella.compiler.rewrites import assign_layout, dead_code, fuse_siblings
from tessella.core.spec import DimRange, TensorSpec
from tessella.graph.build import Builder
from tessella.graph.check import check
from tessella.graph.graph import Graph, Value
from tessella.graph.value import Dim, shape_at

SIZES = (1_000, 10_000)
MOST_SECONDS, MOST_GROWTH = 20.0, 12.0
CHANNELS = 16
WHERE = (("cpu", "fp32"), ("sm_90", "fp16"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--passes", action="store_true", help="print the slowest passes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for kind in args.kinds.split(","):
        for target, precision in WHERE:
            small, large = (measured(kind, n, target, precision) for n in SIZES)
            growth = round(large["seconds"] / small["seconds"], 1)
            rows += [small, large | {"growth": growth}]
            times = ", ".join(f"{r['seconds']} s for {r['nodes']} nodes" for r in (small, large))
            print(f"{kind}, {target} {precision}: {times}: {growth} times", flush=True)
            if args.passes:
                print("  ", large["slowest"])
    if args.out is not None:
        args.out.write_text(json.dumps(document("cpu", rows), indent=1) + "\n")
    grown = [row for row in rows if "growth" in row]
    too_slow = [r for r in grown if r["seconds"] > MOST_SECONDS or r["growth"] > MOST_GROWTH]
    return int(bool(too_slow))


def measured(kind: str, nodes: int, target: str, precision: str) -> dict[str, Any]:
    """Processor seconds of all passes on a graph of about so many nodes, and of the slowest."""
    graph = graph_of(kind, nodes)
    count, seconds = len(graph.nodes), {}
    gc.collect()
    gc.disable()  # as timeit does: how often it runs depends on what else there is
    begun = last = time.process_time()
    for step, _ in steps(graph, Request(target=target, precision=precision)):
        now = time.process_time()
        seconds[step.name], last = round(now - last, 2), now
    fuse_siblings.apply(graph)
    dead_code.apply(graph)
    assign_layout.apply(graph, "channels_last")
    check(graph)
    ended = time.process_time()
    gc.enable()
    seconds["layout"] = round(ended - last, 2)
    slowest = sorted(seconds, key=seconds.__getitem__, reverse=True)[:4]
    return {
        "graph": kind, "target": target, "precision": precision, "nodes": count,
        "nodes_after": len(graph.nodes), "seconds": round(ended - begun, 2),
        "slowest": {name: seconds[name] for name in slowest},
    }  # fmt: skip


def graph_of(kind: str, nodes: int) -> Graph:
    """A graph of about so many nodes."""
    torch.manual_seed(0)
    build = Builder(kind)
    size, block = KINDS[kind]
    spec = TensorSpec(name="x", dtype="float32", shape=(DimRange(min=1, opt=2, max=8), *size))
    x = build.input(spec, dynamic=True)
    while len(build.graph.nodes) < nodes:
        x = block(build, x)
    return build.finish([x], ["y"])


def _weight(build: Builder, *shape: int | Dim) -> Value:
    return build.constant("weight", torch.randn(shape_at(shape, 1)) / 8)


WINDOW: dict[str, Any] = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}


def _conv(build: Builder, x: Value) -> Value:
    weight = _weight(build, CHANNELS, x.shape[1], 1, 1)
    return build.one("conv2d", [x, weight, None], **WINDOW)


def _residual(build: Builder, x: Value) -> Value:
    """Convolution, batch norm, sum and ReLU: a chain."""
    ones, zeros = torch.ones(CHANNELS), torch.zeros(CHANNELS)
    vectors = [build.constant("norm", t) for t in (zeros, ones, ones, zeros)]
    y = build.one("batch_norm", [_conv(build, x), *vectors], eps=1e-5)
    y = build.one("add", [y, x], alpha=1)
    return build.one("relu", [y])


def _elements(build: Builder, x: Value) -> Value:
    """Pointwise operations that no layer can fuse, one of which is read twice."""
    y = build.one("sigmoid", [build.one("mul", [x, None], scalar=0.5)])
    return build.one("tanh", [build.one("add", [y, x], alpha=1)])


def _branches(build: Builder, x: Value) -> Value:
    """Four convolutions of one value, concatenated, and a convolution that joins them."""
    parts = [build.one("relu", [_conv(build, x)]) for _ in range(4)]
    return build.one("relu", [_conv(build, build.one("cat", parts, dim=1))])


def _dense(build: Builder, x: Value) -> Value:
    """Concatenations of concatenations, DenseNet's, eight layers long."""
    for _ in range(8):
        x = build.one("cat", [x, build.one("relu", [_conv(build, x)])], dim=1)
    return _conv(build, x)


def _views(build: Builder, x: Value) -> Value:
    """Reshapes and permutes around a linear layer, as exporters write them."""
    width = x.shape[2]
    y = build.one("reshape", [x], shape=(*x.shape[:2], 4, width // 4))
    y = build.one("permute", [y], dims=(0, 2, 1, 3))
    y = build.one("permute", [y], dims=(0, 2, 1, 3))
    y = build.one("permute", [build.one("reshape", [y], shape=x.shape)], dims=(1, 0, 2))
    y = build.one("linear", [y, _weight(build, width, width), None])
    return build.one("add", [build.one("permute", [y], dims=(1, 0, 2)), x], alpha=1)


def _attention(build: Builder, x: Value) -> Value:
    """Attention written out, the layer norm before it too."""
    batch, tokens, width = x.shape
    heads = 2

    def mean(value: Value) -> Value:
        return build.one("mean", [value], dim=(2,), keepdim=True)

    def linear(value: Value) -> Value:
        return build.one("linear", [value, _weight(build, width, width), None])

    def turned(value: Value, *dims: int) -> Value:
        cut = build.one("reshape", [linear(value)], shape=(batch, tokens, heads, width // heads))
        return build.one("permute", [cut], dims=dims)

    centred = build.one("sub", [x, mean(x)], alpha=1)
    square = build.one("pow", [centred, None], scalar=2.0)
    root = build.one("sqrt", [build.one("add", [mean(square), None], scalar=1e-5, alpha=1)])
    rows = build.one("div", [centred, root])
    q, k, v = (turned(rows, *dims) for dims in ((0, 2, 1, 3), (0, 2, 3, 1), (0, 2, 1, 3)))
    products = build.one("mul", [build.one("matmul", [q, k]), None], scalar=0.5)
    made = build.one("matmul", [build.one("softmax", [products], dim=-1), v])
    made = build.one("permute", [made], dims=(0, 2, 1, 3))
    made = build.one("reshape", [made], shape=x.shape)
    return build.one("add", [linear(made), x], alpha=1)


def _rounded(build: Builder, x: Value) -> Value:
    """An ONNX file's own int8: quantized before each layer, with a pooling between."""
    scale = build.constant("scale", torch.tensor(0.05))
    zero = build.constant("zero", torch.tensor(0, dtype=torch.int8))
    numbers = torch.randint(-127, 128, (CHANNELS, CHANNELS, 1, 1), dtype=torch.int8)
    quantized = build.constant("quantized", numbers)
    y = build.one("quantize", [x, scale, zero], axis=0, dtype="int8")
    y = build.one("dequantize", [y, scale, zero], axis=0, dtype="float32")
    weight = build.one("dequantize", [quantized, scale, None], axis=0, dtype="float32")
    y = build.one("relu", [build.one("conv2d", [y, weight, None], **WINDOW)])
    return build.one(
        "max_pool2d", [y], kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), dilation=(1, 1),
        ceil_mode=False,
    )  # fmt: skip


IMAGE, WORDS = (CHANNELS, 8, 8), (8, CHANNELS)
KINDS: dict[str, tuple[tuple[int, ...], Callable[[Builder, Value], Value]]] = {
    "residual": (IMAGE, _residual),
    "elements": (IMAGE, _elements),
    "branches": (IMAGE, _branches),
    "dense": (IMAGE, _dense),
    "views": (WORDS, _views),
    "attention": (WORDS, _attention),
    "rounded": (IMAGE, _rounded),
}


if __name__ == "__main__":
    sys.exit(main())
