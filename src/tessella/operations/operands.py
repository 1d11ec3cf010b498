"""Whether the operands of an operation belong together, whatever torch's own rules let through.

A plan and a call come from strangers, and a kernel reads a bias by its channels: one number too few
is somebody else's memory. So every kernel is asked only after this (``catalog.Kernel.refusal``).
torch's rules on the meta device check no length of a bias, and its product of MKL reads one number
as N.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tessella.operations.operation import OPS

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]  # by operand; one that is left out is not there
Rule = Callable[[Shapes, Shape, Mapping[str, Any]], str | None]


class HasShape(Protocol):
    """A description of a tensor."""

    @property
    def shape(self) -> Shape: ...


# What kernels take besides what a node of a graph may have: the rest of the epilogue.
_MORE = {"matmul": ("bias", "residual", "scale"), "conv1d": ("scale",), "conv3d": ("scale",)}


def names(op: str) -> tuple[str, ...]:
    """The operands of an operation in order; empty where it takes any number, or is unknown."""
    row = OPS.get(op)
    if row is None or row.variadic:
        return ()
    return (*row.inputs, *row.late, *_MORE.get(op, ()))


def wrong(
    op: str,
    inputs: Sequence[HasShape | None],
    results: Sequence[HasShape],
    attrs: Mapping[str, Any],
) -> str | None:
    """Why these operands are not those of one operation, or None.

    Args:
        inputs: in the operation's order; None where one is left out.
        results: what the operation is said to make.
    """
    known = names(op)
    if not known:
        return None
    if len(inputs) > len(known):
        return f"{op} takes {', '.join(known)}, not {len(inputs)} operands"
    shapes = {n: t.shape for n, t in zip(known, inputs, strict=False) if t is not None}
    row = OPS[op]
    if missing := [n for n in row.inputs if n not in shapes and n not in row.optional]:
        return f"{op} needs {', '.join(missing)}"
    rule = _RULES.get(op)
    return rule(shapes, results[0].shape, attrs) if rule is not None else None


def _differs(shapes: Shapes, name: str, right: Shape) -> str | None:
    """Why an operand has not exactly this shape, or None."""
    if name not in shapes or shapes[name] == right:
        return None
    return f"{name} has the shape {_text(shapes[name])}, not {_text(right)}"


def _first(*found: str | None) -> str | None:
    return next((reason for reason in found if reason is not None), None)


def _vectors(shapes: Shapes, channels: int, *wanted: str) -> str | None:
    return _first(*(_differs(shapes, name, (channels,)) for name in wanted))


def _text(shape: Shape) -> str:
    return "×".join(map(str, shape)) or "of one number"


def _convolution(shapes: Shapes, result: Shape, attrs: Mapping[str, Any]) -> str | None:
    """x [N, C, …], weight [K, C / groups, …] → [N, K, …]"""
    x, weight, groups = shapes["input"], shapes["weight"], attrs.get("groups", 1)
    if type(groups) is not int or groups < 1 or len(weight) != len(x) or len(x) < 3:
        return f"a weight {_text(weight)} of {groups} groups for an image {_text(x)}"
    if x[1] != weight[1] * groups or weight[0] % groups:
        return f"a weight {_text(weight)} of {groups} groups for {x[1]} channels"
    if len(result) != len(x) or result[:2] != (x[0], weight[0]):
        return f"a result {_text(result)} of {weight[0]} channels for {x[0]} images"
    return _vectors(shapes, weight[0], "bias", "scale") or _differs(shapes, "residual", result)


def _pooled(shapes: Shapes, result: Shape, attrs: Mapping[str, Any]) -> str | None:
    """A convolution, whose residual is added before its result is pooled."""
    x, weight = shapes["input"], shapes["weight"]
    strides, paddings, dilations = (attrs.get(n, ()) for n in ("stride", "padding", "dilation"))
    pairs = all(_is_pair(value) for value in (strides, paddings, dilations))
    if len(x) != 4 or len(weight) != 4 or not pairs:
        return "a convolution before pooling has two axes"
    places = zip(x[2:], weight[2:], strides, paddings, dilations, strict=True)
    sizes = [(n + 2 * p - d * (k - 1) - 1) // max(1, s) + 1 for n, k, s, p, d in places]
    between = (x[0], weight[0], *sizes)
    if result[:2] != between[:2]:
        return f"a result {_text(result)} of {weight[0]} channels for {x[0]} images"
    return _convolution(shapes, between, attrs)


def _is_pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and {*map(type, value)} == {int}


def _transposed(shapes: Shapes, result: Shape, attrs: Mapping[str, Any]) -> str | None:
    """x [N, C, …], weight [C, K / groups, …] → [N, K, …]"""
    x, weight, groups = shapes["input"], shapes["weight"], attrs.get("groups", 1)
    if type(groups) is not int or groups < 1 or len(weight) != len(x) or len(x) < 3:
        return f"a weight {_text(weight)} of {groups} groups for an image {_text(x)}"
    if x[1] != weight[0] or x[1] % groups:
        return f"a weight {_text(weight)} of {groups} groups for {x[1]} channels"
    return _vectors(shapes, weight[1] * groups, "bias")


def _chain(shapes: Shapes, result: Shape, attrs: Mapping[str, Any]) -> str | None:
    """Two 1 × 1 convolutions: the second reads what the first makes."""
    x, weight, following = shapes["input"], shapes["weight"], shapes["next_weight"]
    if len(x) != 4 or weight != (weight[0], x[1], 1, 1):
        return f"a weight {_text(weight)} for an image {_text(x)}"
    if following != (following[0], weight[0], 1, 1):
        return f"a next weight {_text(following)} for {weight[0]} channels"
    between = (x[0], weight[0], *x[2:])
    return _first(
        _vectors(shapes, weight[0], "bias", "scale"),
        _differs(shapes, "residual", between),
        _vectors(shapes, following[0], "next_bias", "next_scale"),
    )


def _linear(shapes: Shapes, result: Shape, attrs: Mapping[str, Any]) -> str | None:
    """x […, C], weight [K, C] → […, K]"""
    x, weight = shapes["input"], shapes["weight"]
    if len(weight) != 2 or not x or x[-1] != weight[1]:
        return f"a weight {_text(weight)} for rows {_text(x)}"
    made = (*x[:-1], weight[0])
    return _first(
        _vectors(shapes, weight[0], "bias", "scale", "norm_weight", "norm_bias"),
        _differs(shapes, "residual", made),
        _one(shapes, "code_scale"),
    )


def _one(shapes: Shapes, name: str) -> str | None:
    if name not in shapes or math.prod(shapes[name]) == 1:
        return None
    return f"{name} is one number, not {_text(shapes[name])}"


def _matmul(shapes: Shapes, result: Shape, attrs: Mapping[str, Any]) -> str | None:
    """a […, M, K], b […, K, N] → […, M, N], each perhaps transposed"""
    if not result:
        return None if shapes.keys() <= {"input", "other"} else "an epilogue of one number"
    epilogue = _vectors(shapes, result[-1], "bias", "scale")
    return epilogue or _differs(shapes, "residual", result)


def _channels(axis: int, *wanted: str) -> Rule:
    """Vectors with one number for each place on an axis of the input."""

    def rule(shapes: Shapes, result: Shape, attrs: Mapping[str, Any]) -> str | None:
        x = shapes["input"]
        if not -len(x) <= axis < len(x):
            return f"an input {_text(x)} without axis {axis}"
        return _vectors(shapes, x[axis], *wanted)

    return rule


def _norm(shapes: Shapes, result: Shape, attrs: Mapping[str, Any]) -> str | None:
    """A norm over the last axes: its factors have their shape."""
    inner = tuple(attrs.get("normalized_shape", ()))
    if not inner or shapes["input"][-len(inner) :] != inner:
        return f"a norm over {_text(inner)} of {_text(shapes['input'])}"
    return _differs(shapes, "weight", inner) or _differs(shapes, "bias", inner)


def _prelu(shapes: Shapes, result: Shape, attrs: Mapping[str, Any]) -> str | None:
    x, weight = shapes["input"], shapes["weight"]
    if math.prod(weight) == 1 or (len(x) > 1 and weight == (x[1],)):
        return None
    return f"weight has the shape {_text(weight)} for an input {_text(x)}"


def _quantized(shapes: Shapes, result: Shape, attrs: Mapping[str, Any]) -> str | None:
    """A scale and a zero point: one number each, or one for each place on ``axis``."""
    x, axis = shapes["input"], attrs.get("axis", 0)
    for name in ("scale", "zero_point"):
        if name not in shapes or math.prod(shapes[name]) == 1:
            continue
        if type(axis) is not int or not -len(x) <= axis < len(x) or shapes[name] != (x[axis],):
            return f"{name} has the shape {_text(shapes[name])} along axis {axis} of {_text(x)}"
    return None


def _attention(shapes: Shapes, result: Shape, attrs: Mapping[str, Any]) -> str | None:
    """query […, L, E], key […, S, E], value […, S, V]"""
    query, key, value = (shapes[n] for n in ("query", "key", "value"))
    if min(map(len, (query, key, value))) < 2:
        return f"queries {_text(query)}, keys {_text(key)}, values {_text(value)}"
    if query[-1] != key[-1] or key[-2] != value[-2]:
        return f"queries {_text(query)}, keys {_text(key)}, values {_text(value)}"
    mask = shapes.get("attn_mask")
    if mask is not None and not _reaches(mask, (query[-2], key[-2])):
        return f"a mask {_text(mask)} for {query[-2]} × {key[-2]} scores"
    return None


def _reaches(mask: Shape, scores: Shape) -> bool:
    """Whether the last axes broadcast to the scores."""
    return all(m in (1, s) for m, s in zip(reversed(mask), reversed(scores), strict=False))


_RULES: dict[str, Rule] = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _convolution),
    "conv2d_pool": _pooled,
    "conv2d_chain": _chain,
    "conv_transpose2d": _transposed,
    **dict.fromkeys(("linear", "linear_norm"), _linear),
    "matmul": _matmul,
    "batch_norm": _channels(1, "running_mean", "running_var", "weight", "bias"),
    "group_norm": _channels(1, "weight", "bias"),
    **dict.fromkeys(("layer_norm", "rms_norm"), _norm),
    "prelu": _prelu,
    **dict.fromkeys(("quantize", "dequantize"), _quantized),
    "scaled_dot_product_attention": _attention,
}
