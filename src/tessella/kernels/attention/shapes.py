"""Attention by its sizes, whatever the number of axes and the strides of its operands.

``out[n, h] = store(gamma · softmax(scale · Q[n, h] · K[n, g]ᵀ + mask[m, h]) · V[n, g])``, g the
group of head h, m = n mod M where a mask is given for M images or windows of which N is a multiple.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton

from tessella.core.dtype import FLOATS
from tessella.core.integers import power_of_two
from tessella.device.overlap import overlapping
from tessella.operations.operation import broadcast
from tessella.operations.problem import Problem

QUANTIZED = ("int8", "float8_e4m3fn")  # what results may be besides what they are made of


class Tile(NamedTuple):
    """What the Triton kernels hold at a time: queries, keys, and the widths of their heads.

    Attributes:
        BM, BN: queries and keys.
        BE, BV: of queries and keys, and of values, as powers of two.
    """

    BM: int
    BN: int
    BE: int
    BV: int


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of attention.

    Attributes:
        width: numbers in a query and in a key of a head.
        value_width: numbers in a value and in a result of a head.
    """

    batch: int
    heads: int
    queries: int
    keys: int
    width: int
    value_width: int


def sizes(problem: Problem) -> Sizes:
    """The sizes of a problem that ``refusal`` let pass; without a batch it is 1."""
    *leading, queries, width = problem["query"].shape
    batch, heads = leading if len(leading) == 2 else (1, *leading)
    keys, value_width = problem["value"].shape[-2:]
    return Sizes(
        batch=batch,
        heads=heads,
        queries=queries,
        keys=keys,
        width=width,
        value_width=value_width,
    )


def refusal(problem: Problem, dtypes: Sequence[str], widest: int) -> str | None:
    """Why no kernel over ``Operands`` can do it: types, axes and formats."""
    q, k, v = tensors = [problem[name] for name in ("query", "key", "value")]
    if q.dtype not in dtypes or any(t.dtype != q.dtype for t in (k, v)):
        return f"queries, keys and values of one of {', '.join(dtypes)}, not {q.dtype}"
    if problem.output.dtype not in (q.dtype, *QUANTIZED):
        return f"makes {', '.join((q.dtype, *QUANTIZED))}, not {problem.output.dtype}"
    if any(len(t.shape) != len(q.shape) or len(t.shape) not in (3, 4) for t in tensors):
        return f"[heads, L, E], with a batch before it or not; seen {q.shape}, {k.shape}, {v.shape}"
    if k.shape[-1] != q.shape[-1] or k.shape[-2] != v.shape[-2]:
        return f"keys as wide as queries, as many as values; seen {q.shape}, {k.shape}, {v.shape}"
    if not all(0 < t.shape[-1] <= widest for t in tensors):
        return f"heads 1 to {widest} wide, not {q.shape[-1]} and {v.shape[-1]}"
    if not _heads_match(q.shape[:-2], k.shape[:-2], v.shape[:-2], problem.attr("enable_gqa")):
        return f"as many heads of keys as of queries, or a group for each; seen {q.shape} {k.shape}"
    if problem.output.format == "channels_last":
        return "does not make channels_last"
    return _refused_mask(problem)


def _refused_mask(problem: Problem) -> str | None:
    mask = problem.get("attn_mask")
    if mask is None:
        return None
    if problem.attr("is_causal"):
        return "a mask, or is_causal, not both"
    weights = (*problem["query"].shape[:-1], problem["key"].shape[-2])
    if (times := repeats(problem)) > 1:
        weights = (weights[0] // times, *weights[1:])
    if mask.dtype not in ("bool", *FLOATS) or broadcast(mask.shape, weights) != weights:
        return f"a mask of bool or numbers that broadcasts to {weights}, not {mask.shape}"
    return None


def repeats(problem: Problem) -> int:
    """How many images use each mask, N / M; 1 for a mask that broadcasts, and without a mask."""
    mask, shape = problem.get("attn_mask"), problem["query"].shape
    if mask is None or len(mask.shape) < 4 or len(shape) < 4 or mask.shape[0] in (0, 1):
        return 1
    return shape[0] // mask.shape[0] if shape[0] % mask.shape[0] == 0 else 1


def _heads_match(q: Sequence[int], k: Sequence[int], v: Sequence[int], shared: bool) -> bool:
    """Whether keys and values have the queries' leading axes, or one head for a group of theirs."""
    if not shared:
        return all(broadcast(each, q) == tuple(q) for each in (k, v))
    return k == v and k[:-1] == q[:-1] and k[-1] > 0 and q[-1] % k[-1] == 0


@dataclass(frozen=True, kw_only=True)
class Operands:
    """Views of four axes: q [N, H, L, E], k [N, G, S, E], v [N, G, S, V], mask [M, H, L, S].

    H is a multiple of G and N one of M. A broadcast axis of the mask has stride 0; its bools are
    bytes.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None

    @property
    def mask_strides(self) -> tuple[int, ...]:
        """Zeros where there is no mask."""
        return (0, 0, 0, 0) if self.mask is None else self.mask.stride()

    def strides(self, out: torch.Tensor) -> tuple[tuple[int, ...], ...]:
        """Those of q, k, v, the mask and a result."""
        q, k, v = (t.stride() for t in (self.q, self.k, self.v))
        return q, k, v, self.mask_strides, out.stride()

    @property
    def group(self) -> int:
        """Heads of queries that share one of keys."""
        return self.q.shape[1] // self.k.shape[1]


def settings(problem: Problem, tile: Tile) -> dict[str, Any]:
    """What the Triton kernels are compiled with."""
    return {
        "TILE": tile,
        "CAUSAL": bool(problem.attr("is_causal")),
        "PRECISION": problem.math,
        # the interpreter's bfloat16 products are garbage
        "WIDEN": problem["query"].dtype == "bfloat16" and triton.knobs.runtime.interpret,
        **overlapping(),
    }


def operands(
    problem: Problem, constants: Mapping[int, torch.Tensor], inputs: Sequence[torch.Tensor]
) -> Operands:
    """The tensors of a call as views; nothing is copied."""
    q, k, v, *masks = problem.tensors(constants, inputs)
    mask = masks[0] if masks else None
    if mask is not None:
        weights = (*q.shape[:-1], k.shape[-2])
        if (times := repeats(problem)) > 1:
            weights = (weights[0] // times, *weights[1:])
        mask = mask.expand(weights)
        mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
        mask = mask if mask.dim() == 4 else mask[None]
    if not problem.attr("enable_gqa"):
        k, v = (t.expand(*q.shape[:-2], *t.shape[-2:]) for t in (k, v))
    q, k, v = (t if t.dim() == 4 else t[None] for t in (q, k, v))
    return Operands(q=q, k=k, v=v, mask=mask)


def result(problem: Problem, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for the result, as [N, H, L, V] and as the problem's shape.

    Where it may have any strides a token's heads lie side by side, as the layer after wants them.
    """
    made, dtype = sizes(problem), getattr(torch, problem.output.dtype)
    n, h, rows, columns = made.batch, made.heads, made.queries, made.value_width
    if problem.output.format == "strided":
        out = q.new_empty(n, rows, h, columns, dtype=dtype).transpose(1, 2)
    else:
        out = q.new_empty(n, h, rows, columns, dtype=dtype)
    return out, out if len(problem.output.shape) == 4 else out[0]


def padded(width: int) -> int:
    """The width of a head in a tile: a power of two that tensor cores take."""
    return max(16, power_of_two(width))


def factor(problem: Problem) -> float:
    """What products are multiplied by before the softmax."""
    scale = problem.attr("scale")
    return 1 / math.sqrt(problem["query"].shape[-1]) if scale is None else float(scale)
