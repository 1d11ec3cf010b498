"""Matrix products in plain torch: what every kernel of them must agree with.

They answer in the element type that they are given; integers and fp8 are computed exactly, in
float64. ``epilogue.store`` says how a result becomes int8 or fp8.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from tessella.operations.epilogue import (
    NOTHING,
    Epilogue,
    bias_inside,
    exact,
    finish,
    finish_as,
    store,
)
from tessella.operations.operation import (
    Attributes,
    Shape,
    Shapes,
    broadcast,
    differs,
    first_of,
    row,
    shown,
    vectors,
)
from tessella.operations.reference.conv import FACTORS, PRODUCT, products
from tessella.operations.reference.quant import quantize

Tensor = torch.Tensor
Added = Epilogue[torch.Tensor]


def linear(
    input: Tensor,
    weight: Tensor,
    *,
    epilogue: Added = NOTHING,
    dtype: str | None = None,
) -> Tensor:
    """The epilogue of ``input · weightᵀ``.

    input [..., K], weight [N, K], bias and scale [N], residual like the result → [..., N], stored
    as ``dtype`` if one is given.
    """
    x, w = exact(input), exact(weight)
    bias, rest = bias_inside(epilogue, x.dtype)
    return finish_as(dtype, F.linear(x, w, bias), rest, axis=-1)


def linear_norm(
    input: Tensor,
    weight: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    code_scale: Tensor | None = None,
    *,
    eps: float,
    results: Sequence[str],
    dtype: str | None = None,
    code_dtype: str | None = None,
    epilogue: Added = NOTHING,
) -> tuple[Tensor, ...]:
    """``linear`` with its epilogue, and the layer norm over the result's rows.

    norm_weight and norm_bias [N], code_scale one number → what ``results`` names: ``sum`` is the
    linear's result, ``norm`` the normalized, both stored as ``dtype``; ``codes`` are
    ``norm / code_scale`` stored as ``code_dtype``. With ``dtype`` nothing is rounded between.
    """
    if not results or not {*results} <= {"norm", "codes", "sum"} or len({*results}) < len(results):
        raise ValueError(f"results are norm, codes and sum, each once, not {results!r}")
    if not isinstance(eps, int | float) or not 0 <= eps < math.inf:
        raise ValueError(f"eps is a number from zero on, not {eps!r}")
    wide = None if dtype is None else "float64"
    total = linear(input, weight, epilogue=epilogue, dtype=wide)
    by, plus = (_as(vector, total.dtype) for vector in (norm_weight, norm_bias))
    norm = F.layer_norm(total, [total.shape[-1]], by, plus, eps)
    stored = total.dtype if dtype is None else getattr(torch, dtype)
    made = {"sum": _as(total, stored), "norm": _as(norm, stored)}
    if "codes" in results:
        if code_scale is None or code_scale.numel() != 1 or code_dtype is None:
            raise ValueError("quantized values have an element type, and a scale of one number")
        made["codes"] = quantize(norm, code_scale, axis=0, dtype=code_dtype)
    return tuple(made[name] for name in results)


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As stored; on the meta device, whose own rules are slow to import, only its shape."""
    return torch.empty(x.shape, dtype=dtype, device="meta") if x.is_meta else store(x, dtype)


def matmul(
    input: Tensor,
    other: Tensor,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    epilogue: Added = NOTHING,
) -> Tensor:
    """The epilogue of ``op(input) · op(other)``.

    op(input) [..., M, K], op(other) [..., K, N], bias and scale [N], residual like the result →
    [..., M, N]; leading axes broadcast. Transposing swaps the last two axes.
    """
    a = exact(input.mT if transpose_a else input)
    b = exact(other.mT if transpose_b else other)
    return finish(torch.matmul(a, b), epilogue)


def _linear(shapes: Shapes, result: Shape, attrs: Attributes) -> str | None:
    """x […, C], weight [K, C] → […, K]"""
    x, weight = shapes["input"], shapes["weight"]
    if len(weight) != 2 or not x or x[-1] != weight[1]:
        return f"a weight {shown(weight)} for rows {shown(x)}"
    made = (*x[:-1], weight[0])
    return first_of(
        vectors(shapes, weight[0], "bias", "scale", "norm_weight", "norm_bias"),
        differs(shapes, "residual", made),
        _one(shapes, "code_scale"),
    )


def _one(shapes: Shapes, name: str) -> str | None:
    if name not in shapes or math.prod(shapes[name]) == 1:
        return None
    return f"{name} is one number, not {shown(shapes[name])}"


def _matmul(shapes: Shapes, result: Shape, attrs: Attributes) -> str | None:
    """a […, M, K], b […, K, N] → […, M, N], each perhaps transposed"""
    if not result:
        return None if shapes.keys() <= {"input", "other"} else "an epilogue of one number"
    reason = vectors(shapes, result[-1], "bias", "scale")
    if reason or "residual" not in shapes:
        return reason
    a, b = shapes["input"], shapes["other"]
    rows = a[-1 if attrs.get("transpose_a") else -2 : len(a)][:1] if len(a) > 1 else ()
    columns = b[-2 if attrs.get("transpose_b") else -1 :][:1] if len(b) > 1 else ()
    batch = broadcast(a[:-2], b[:-2])
    if batch is None:
        return f"a product of {shown(a)} with {shown(b)}"
    # a reference adds a larger one, too, and then has its shape
    return differs(shapes, "residual", (*batch, *rows, *columns))


def _products(shapes: Shapes, result: Shape, attrs: Attributes) -> int:
    a = shapes["input"]
    added = a[-2] if len(a) > 1 and attrs.get("transpose_a") else a[-1]
    return 2 * math.prod(result) * added


ROWS = (
    row(
        linear,
        "input weight bias? residual?",
        "activation",
        aten="linear.default",
        late="scale",
        **PRODUCT,
        rule=_linear,
        flops=products,
    ),
    # results are the norm, that in quantized values, and what it reads
    row(
        linear_norm,
        "input weight bias? residual? scale? norm_weight norm_bias code_scale?",
        "activation eps results",
        **{**PRODUCT, "defaults": {**PRODUCT["defaults"], "code_dtype": None}},
        rule=_linear,
        flops=products,
        pair=("linear", "layer_norm"),
        many=True,
    ),
    row(
        matmul,
        "input other",
        aten="matmul.default",
        late="bias residual scale",
        defaults={
            "activation": None,
            **FACTORS,
            "transpose_a": False,
            "transpose_b": False,
            "fast_accumulation": False,
        },
        hints="fast_accumulation",
        epilogues=("",),
        rule=_matmul,
        flops=_products,
    ),
)
