"""The problems that the kernels' benchmark measures, by family, each with its peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.cases import attention, conv, gemm, pairs, transform
from benchmarks.cases.case import Case

FAMILIES: dict[str, Callable[[], Iterator[Case]]] = {
    "gemm_fp16": lambda: gemm.plain("float16"),
    "gemm_bf16": lambda: gemm.plain("bfloat16"),
    "gemm_fp8": gemm.fp8,
    "gemm_int8": gemm.int8,
    "gemm_fused": gemm.fused,
    "gemm_thin": gemm.thin,
    "gemm_float32": gemm.float32,
    "gemm_sparse": lambda: (c for d in ("float16", "int8") for c in gemm.sparse(d)),
    "conv": lambda: conv.forward(128, fused=False),
    "conv_n1": lambda: conv.forward(1, fused=False),
    "conv_fused": lambda: conv.forward(128, fused=True),
    "conv_groups": conv.groups,
    "stem": conv.stem,
    "backward": conv.backward,
    "conv_int8": conv.int8,
    "chain": lambda: (c for n in (128, 1) for d in ("float16", "int8") for c in pairs.chain(n, d)),
    "linear_norm": lambda: (c for d in ("float16", "float8_e4m3fn") for c in pairs.normed(d)),
    "conv_pool": lambda: (
        c for n in (128, 1) for d in ("float16", "int8") for c in pairs.pooled(n, d)
    ),
    "published": conv.published,
    "attention": attention.forward,
    "rearrange": transform.forward,
}
