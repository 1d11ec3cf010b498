"""Two steps fused into one kernel, beside the same steps one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F

from benchmarks.cases.case import Case, Peer, best, drawn, meta, operand
from benchmarks.cases.conv import NHWC
from tessella.operations import problems
from tessella.operations.problem import Problem
from tessella.search import find as search

# channels of x, of the wide result, of the next block's first convolution; pixels
CHAINS = (
    (64, 256, 64, 56), (64, 256, 128, 56), (128, 512, 128, 28), (128, 512, 256, 28),
    (256, 1024, 256, 14), (512, 2048, 512, 7),
)  # fmt: skip


def chain(n: int, dtype: str) -> Iterator[Case]:
    """ResNet-50: a block's last convolution with its residual, and the first of the next block."""
    for c, k, out, size in CHAINS:
        int8 = dtype == "int8"
        first = _layer(n, c, k, size, dtype=dtype, residual=True, scaled=int8)
        second = _layer(n, k, out, size, dtype=dtype, scaled=int8)
        in_fp16 = [_layer(n, *ends, size, dtype="float16") for ends in ((c, k), (k, out))]
        yield Case(
            family=f"chain {dtype} N={n}",
            name=f"N{n} {c}->{k}->{out} 1x1@{size}",
            problem=problems.conv2d_chain(first, second),
            algorithms=("back_to_back",),
            peers={
                "ours apart": _apart(first, second),
                "cudnn fp16 + add + relu": _cudnn(*in_fp16),
            },
        )


def pooled(n: int, out: str) -> Iterator[Case]:
    """ResNet's first layer and its pooling, in FP16 to FP16 and to int8."""
    first = problems.conv(
        meta("float16", n, 3, 224, 224, last=True), meta("float16", 64, 3, 7, 7, last=True),
        meta("float16", 64), stride=2, padding=3, activation="relu", constant=(1, 2),
        out_dtype=out, gamma=40.0 if out == "int8" else 1.0,
    )  # fmt: skip
    if out == "int8":
        first = replace(first, attrs={**first.attrs, "dtype": out})
    pool = Problem(
        op="max_pool2d",
        inputs=(first.output,),
        outputs=(meta(out, n, 64, 56, 56, last=True),),
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


def normed(dtype: str) -> Iterator[Case]:
    """A linear layer with a residual, and the layer norm of its output."""
    eight = dtype != "float16"
    for name, (m, n, k, keep) in NORMED.items():
        vector = meta("float32", n)
        first = problems.linear(
            meta(dtype, m, k), meta(dtype, n, k), vector, meta("float16", m, n),
            vector if eight else None, out_dtype="float16", fast_accumulation=eight,
            constant=(1, 2, 4) if eight else (1, 2),
        )  # fmt: skip
        second = Problem(
            op="layer_norm",
            inputs=(first.output, meta("float16", n), meta("float16", n)),
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
    vector, out = meta("float32", k), meta(dtype, n, k, size, size, last=True)
    return problems.conv(
        meta(dtype, n, c, size, size, last=True), meta(dtype, k, c, 1, 1, last=True), vector,
        out if residual else None, vector if scaled else None,
        activation="relu", constant=(1, 2, 4) if scaled else (1, 2),
    )  # fmt: skip


def _apart(first: Problem, second: Problem, algorithms: tuple[str, ...] = NHWC) -> Peer:
    """A run of both steps one after the other, each by our fastest kernel."""
    calls = [best(problem, algorithms, search.OWN) for problem in (first, second)]
    return lambda *inputs: calls[1](calls[0](*inputs))


def _cudnn(first: Problem, second: Problem) -> Peer:
    """A run of cuDNN's FP16 convolutions and separate pointwise operations, on own operands."""
    x, w, v = (drawn(operand(p, i)) for p, i in ((first, 0), (first, 1), (second, 1)))
    r = drawn(first.output)
    b, d = (torch.randn(len(t), device="cuda").half() for t in (w, v))

    def run(*_: torch.Tensor) -> torch.Tensor:
        return F.conv2d(F.conv2d(x, w, b).add_(r).relu_(), v, d).relu_()

    return run
