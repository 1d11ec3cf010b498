"""Our kernels of a step as operators of torch, so that a compiler's tracing leaves them whole.

``traced`` says whether a call is being traced; else kernels are called as they are, which takes the
host a third of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tessella.device.listing import open_list
from tessella.kernels.conv import trained as depthwise
from tessella.kernels.conv import volumes
from tessella.kernels.conv.trained import Window
from tessella.kernels.norm import batch, layer, projection
from tessella.kernels.norm.batch import Norm, Statistics
from tessella.kernels.norm.projection import Kept, Projection
from tessella.kernels.pointwise import trained as pointwise
from tessella.kernels.pool import trained as pool
from tessella.kernels.softmax import entropy

Made = list[Tensor]
Rounded = tuple[Tensor, Tensor, Tensor]  # the result, its 8-bit numbers, and their scales
RoundedWithSums = tuple[Tensor, Tensor, Tensor, Tensor]


def traced(x: Tensor) -> bool:
    """Whether a tensor stands for another one, of which a graph is being made."""
    return type(x) is not Tensor


def call(name: str, *args: Any) -> Any:
    """Run one of the functions below: as an operator where it is traced."""
    function, operator = _OPERATORS[name]
    found = args[0][0] if isinstance(args[0], list) else args[0]
    apart = traced(found) and open_list() is None  # whose tensors stand for others, too
    return (operator if apart else function)(*args)


def _normalize(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor | None, variance: Tensor | None,
    x2: Tensor | None, weight2: Tensor | None, bias2: Tensor | None, mean2: Tensor | None,
    variance2: Tensor | None, numbers: list[float], residual: Tensor | None, activation: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    """``batch.normalize``: the result, both statistics of each of two norms, and the bits; what is
    not there is empty, since an operator that writes into tensors always returns as many.
    """
    norms = [Norm(x, weight, bias, _pair(mean, variance), *numbers[:2])]
    if x2 is not None:
        norms.append(Norm(x2, weight2, bias2, _pair(mean2, variance2), *numbers[2:]))  # type: ignore[arg-type]
    y, found, bits = batch.normalize(norms, residual=residual, activation=_activation(activation))
    made = [t for statistics in found for t in statistics]
    made += [_nothing(x) for _ in range(4 - len(made))]
    return (y, *made, _nothing(x) if bits is None else bits)


def _normalize_shapes(*args: Any) -> tuple[Tensor, ...]:
    x, x2, residual, activation = args[0], args[5], args[11], args[12]
    rows, channels = x.numel() // x.shape[1], x.shape[1]
    numbers = [channels, channels, *([0, 0] if x2 is None else [channels, channels])]
    made = [x.new_empty(count, dtype=torch.float32) for count in numbers]
    bits = _nothing(x)
    if activation == "relu" and not (residual is None and x2 is None):
        bits = x.new_empty((rows, channels // 8), dtype=torch.uint8)
    return (torch.empty_like(x), *made, bits)


def _nothing(like: Tensor) -> Tensor:
    return like.new_empty(0, dtype=torch.float32)


def _normalize_backward(
    gradients: Made, tensors: Made, statistics: Made, bits: Tensor | None, residual: bool,
    activation: str,
) -> Made:  # fmt: skip
    """``batch.backward``: each norm's three gradients, and the residual's, if there was one."""
    norms = [
        Norm(x, weight, bias)
        for x, weight, bias in zip(tensors[::3], tensors[1::3], tensors[2::3], strict=True)
    ]
    found = [Statistics(*statistics[n : n + 2]) for n in range(0, len(statistics), 2)]
    made, joined = batch.backward(
        gradients, norms, found, bits, residual=residual, activation=_activation(activation)
    )
    flat = [t for one in made for t in one]
    return flat if joined is None else [*flat, joined]


def _normalize_backward_shapes(
    gradients: Made, tensors: Made, statistics: Made, bits: Tensor | None, residual: bool,
    activation: str,
) -> Made:  # fmt: skip
    made = [torch.empty_like(t) for t in tensors]
    return [*made, torch.empty_like(tensors[0])] if residual else made


def _project(
    x: Tensor, weight: Tensor, gamma: Tensor, beta: Tensor, mean: Tensor | None,
    variance: Tensor | None, x2: Tensor | None, weight2: Tensor | None, gamma2: Tensor | None,
    beta2: Tensor | None, mean2: Tensor | None, variance2: Tensor | None, numbers: list[float],
    residual: Tensor | None, relu: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """``projection.project``: the result, the bits, and what is kept of one or two; see above."""
    given = [Projection(x, weight, gamma, beta, _pair(mean, variance), numbers[0], numbers[1])]
    if x2 is not None:
        others: Any = (x2, weight2, gamma2, beta2, _pair(mean2, variance2), *numbers[2:])
        given.append(Projection(*others))
    y, kept, bits = projection.project(given, residual=residual, relu=relu)
    made = [t for one in kept for t in one]
    made += [_nothing(x) for _ in range(8 - len(made))]
    return (y, _nothing(x) if bits is None else bits, *made)


def _project_shapes(*args: Any) -> tuple[Tensor, ...]:
    x, weight, relu = args[0], args[1], args[14]
    channels, rows = weight.shape[0], x.numel() // x.shape[1]
    bits = x.new_empty((rows, channels // 8), dtype=torch.uint8) if relu else _nothing(x)
    made = []
    for one in (args[1], args[7]):
        wide, deep = (0, 0) if one is None else one.shape[:2]
        sizes = (deep * deep + deep,), (wide,), (wide,), (wide, deep)
        made += [x.new_empty(size, dtype=torch.float32) for size in sizes]
    made = [_nothing(x) if tensor.numel() == 0 else tensor for tensor in made]
    return (_last(x, (x.shape[0], channels, *x.shape[2:])), bits, *made)


def _project_backward(
    gradients: Made, tensors: Made, kept: Made, bits: Tensor | None, residual: bool
) -> Made:
    """``projection.backward``: each one's four gradients, and the residual's, if there was one."""
    fours = zip(*(tensors[n::4] for n in range(4)), strict=True)
    given = [Projection(x, weight, gamma, beta) for x, weight, gamma, beta in fours]
    found = [Kept(*kept[n : n + 4]) for n in range(0, len(kept), 4)]
    made, joined = projection.backward(gradients, given, found, bits, residual=residual)
    flat = [t for one in made for t in one]
    return flat if joined is None else [*flat, joined]


def _project_backward_shapes(
    gradients: Made, tensors: Made, kept: Made, bits: Tensor | None, residual: bool
) -> Made:
    made = [torch.empty_like(t) for t in tensors]
    return [*made, torch.empty_like(gradients[0])] if residual else made


def _depthwise(x: Tensor, weight: Tensor, bias: Tensor | None, window: list[int]) -> Tensor:
    return depthwise.convolve(x, weight, bias, _window(window))


def _depthwise_shape(x: Tensor, weight: Tensor, bias: Tensor | None, window: list[int]) -> Tensor:
    return _last(x, depthwise.out_size(x, _window(window)))


def _depthwise_backward(
    gradient: Tensor, weight: Tensor, shape: list[int], window: list[int]
) -> Tensor:
    return depthwise.input_gradient(gradient, weight, shape, _window(window))


def _volumes(x: Tensor, weight: Tensor) -> Tensor:
    return volumes.convolve(x, weight)


def _volumes_shape(x: Tensor, weight: Tensor) -> Tensor:
    return volumes.out_of(x, weight)


def _pool(x: Tensor, window: list[int]) -> Made:
    return [*pool.max_pool(x, pool.Window(*_pairs(window)))]


def _pool_shapes(x: Tensor, window: list[int]) -> Made:
    sides = zip(x.shape[2:], *_pairs(window), strict=True)
    y = _last(x, (*x.shape[:2], *((side + 2 * p - k) // s + 1 for side, k, s, p in sides)))
    return [y, torch.empty_like(y, dtype=torch.uint8)]


def _pool_backward(gradient: Tensor, places: Tensor, shape: list[int], window: list[int]) -> Tensor:
    return pool.max_pool_backward(gradient, places, torch.Size(shape), pool.Window(*_pairs(window)))


def _entropy(scores: Tensor, targets: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    return entropy.losses(scores, targets, ignored)


def _entropy_shapes(scores: Tensor, targets: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    made = [scores.new_empty(len(scores), dtype=torch.float32) for _ in range(2)]
    return made[0], made[1]


def _entropy_backward(
    scores: Tensor, targets: Tensor, norms: Tensor, factor: Tensor, ignored: int
) -> Tensor:
    return entropy.gradient(scores, targets, norms, factor, ignored)


def _entropy_backward_shape(
    scores: Tensor, targets: Tensor, norms: Tensor, factor: Tensor, ignored: int
) -> Tensor:
    return torch.empty_like(scores)


def _layer_norm_backward(
    given: Made, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor, beside: Tensor | None,
    low: torch.dtype | None, sums: bool,
) -> Made:  # fmt: skip
    """``layer.gradients``, without what is None."""
    made = layer.gradients(given, x, mean, inverse, weight, beside=beside, low=low, sums=sums)
    return [tensor for tensor in made if tensor is not None]


def _layer_norm_backward_shapes(
    given: Made, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor, beside: Tensor | None,
    low: torch.dtype | None, sums: bool,
) -> Made:  # fmt: skip
    rows = [torch.empty_like(x)] + ([] if low is None else [torch.empty_like(x, dtype=low)])
    return rows + [torch.empty_like(weight) for _ in range(3 if sums else 2)]


def _gelu_backward(gradient: Tensor, x: Tensor, bias: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    return pointwise.gelu_gradients(gradient, x, bias, tanh=tanh)


def _gelu_backward_shapes(
    gradient: Tensor, x: Tensor, bias: Tensor, tanh: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(bias)


def _rounded_gelu(x: Tensor, bias: Tensor, dtype: torch.dtype, tanh: bool) -> Rounded:
    return pointwise.rounded_gelu(x, bias, dtype, tanh=tanh)


def _rounded_gelu_shapes(x: Tensor, bias: Tensor, dtype: torch.dtype, tanh: bool) -> Rounded:
    codes = x.flatten(0, -2)
    scales = codes.new_empty(len(codes), 1, dtype=torch.float32)
    return torch.empty_like(x), torch.empty_like(codes, dtype=dtype), scales


def _rounded_gelu_backward(
    gradient: Tensor, x: Tensor, bias: Tensor, factors: Tensor, dtype: torch.dtype, tanh: bool
) -> RoundedWithSums:
    return pointwise.rounded_gelu_gradients(gradient, x, bias, factors, dtype, tanh=tanh)


def _rounded_gelu_backward_shapes(
    gradient: Tensor, x: Tensor, bias: Tensor, factors: Tensor, dtype: torch.dtype, tanh: bool
) -> RoundedWithSums:
    made, *codes = _rounded_gelu_shapes(x, bias, dtype, tanh)
    return made, torch.empty_like(bias), codes[0], codes[1]


def _rounded_join(parts: Made, factors: Tensor, dtype: torch.dtype) -> RoundedWithSums:
    return pointwise.rounded_join(parts, factors, dtype)


def _rounded_join_shapes(parts: Made, factors: Tensor, dtype: torch.dtype) -> RoundedWithSums:
    made, sums = _joined_shapes(parts)
    return made, sums, *_rounded_gelu_shapes(made, sums, dtype, False)[1:]


def _joined(parts: Made) -> tuple[Tensor, Tensor]:
    return pointwise.joined(parts)


def _joined_shapes(parts: Made) -> tuple[Tensor, Tensor]:
    first = parts[0]
    width = 3 * first.shape[-1]
    sums = first.new_empty(width, dtype=torch.float32)
    return first.new_empty(*first.shape[:-1], width), sums


def _shaped(gradient: Tensor, other: Tensor, shape: list[int], window: list[int]) -> Tensor:
    return _last(gradient, shape)


def _pair(mean: Tensor | None, variance: Tensor | None) -> tuple[Tensor, Tensor] | None:
    return None if mean is None or variance is None else (mean, variance)


def _activation(name: str) -> Any:
    return name or None


def _pairs(window: list[int]) -> list[Any]:
    return [(window[n], window[n + 1]) for n in (0, 2, 4)]


def _window(window: list[int]) -> Window:
    return Window(*_pairs(window))


def _last(like: Tensor, shape: Any) -> Tensor:
    return torch.empty(
        tuple(shape), dtype=like.dtype, device=like.device, memory_format=torch.channels_last
    )


def _operator(
    name: str, function: Callable[..., Any], shapes: Callable[..., Any], schema: str, *writes: str
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    made = torch.library.custom_op(
        f"tessella::{name}", function, mutates_args=writes, schema=schema
    )
    made.register_fake(shapes)
    return function, made


_OPERATORS = {
    "normalize": _operator(
        "normalize", _normalize, _normalize_shapes,
        "(Tensor x, Tensor weight, Tensor bias, Tensor(a!)? mean, Tensor(b!)? variance, Tensor? x2,"
        " Tensor? weight2, Tensor? bias2, Tensor(c!)? mean2, Tensor(d!)? variance2,"
        " float[] numbers, Tensor? residual, str activation)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        "mean", "variance", "mean2", "variance2",
    ),
    "normalize_backward": _operator(
        "normalize_backward", _normalize_backward, _normalize_backward_shapes,
        "(Tensor[] gradients, Tensor[] tensors, Tensor[] statistics, Tensor? bits, bool residual,"
        " str activation) -> Tensor[]",
    ),
    "project": _operator(
        "project", _project, _project_shapes,
        "(Tensor x, Tensor weight, Tensor gamma, Tensor beta, Tensor(a!)? mean,"
        " Tensor(b!)? variance, Tensor? x2, Tensor? weight2, Tensor? gamma2, Tensor? beta2,"
        " Tensor(c!)? mean2, Tensor(d!)? variance2, float[] numbers, Tensor? residual, bool relu)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        "mean", "variance", "mean2", "variance2",
    ),
    "project_backward": _operator(
        "project_backward", _project_backward, _project_backward_shapes,
        "(Tensor[] gradients, Tensor[] tensors, Tensor[] kept, Tensor? bits, bool residual)"
        " -> Tensor[]",
    ),
    "depthwise": _operator(
        "depthwise", _depthwise, _depthwise_shape,
        "(Tensor x, Tensor weight, Tensor? bias, int[] window) -> Tensor",
    ),
    "depthwise_backward": _operator(
        "depthwise_backward", _depthwise_backward, _shaped,
        "(Tensor gradient, Tensor weight, int[] shape, int[] window) -> Tensor",
    ),
    "volumes": _operator(
        "volumes", _volumes, _volumes_shape, "(Tensor x, Tensor weight) -> Tensor"
    ),
    "entropy": _operator(
        "entropy", _entropy, _entropy_shapes,
        "(Tensor scores, Tensor targets, int ignored) -> (Tensor, Tensor)",
    ),
    "entropy_backward": _operator(
        "entropy_backward", _entropy_backward, _entropy_backward_shape,
        "(Tensor scores, Tensor targets, Tensor norms, Tensor factor, int ignored) -> Tensor",
    ),
    "layer_norm_backward": _operator(
        "layer_norm_backward", _layer_norm_backward, _layer_norm_backward_shapes,
        "(Tensor[] given, Tensor x, Tensor mean, Tensor inverse, Tensor weight, Tensor? beside,"
        " ScalarType? low, bool sums) -> Tensor[]",
    ),
    "gelu_backward": _operator(
        "gelu_backward", _gelu_backward, _gelu_backward_shapes,
        "(Tensor gradient, Tensor x, Tensor bias, bool tanh) -> (Tensor, Tensor)",
    ),
    "rounded_gelu": _operator(
        "rounded_gelu", _rounded_gelu, _rounded_gelu_shapes,
        "(Tensor x, Tensor bias, ScalarType dtype, bool tanh) -> (Tensor, Tensor, Tensor)",
    ),
    "rounded_gelu_backward": _operator(
        "rounded_gelu_backward", _rounded_gelu_backward, _rounded_gelu_backward_shapes,
        "(Tensor gradient, Tensor x, Tensor bias, Tensor factors, ScalarType dtype, bool tanh)"
        " -> (Tensor, Tensor, Tensor, Tensor)",
    ),
    "rounded_join": _operator(
        "rounded_join", _rounded_join, _rounded_join_shapes,
        "(Tensor[] parts, Tensor factors, ScalarType dtype) -> (Tensor, Tensor, Tensor, Tensor)",
    ),
    "joined": _operator(
        "joined", _joined, _joined_shapes, "(Tensor[] parts) -> (Tensor, Tensor)"
    ),
    "max_pool": _operator(
        "max_pool", _pool, _pool_shapes, "(Tensor x, int[] window) -> Tensor[]"
    ),
    "max_pool_backward": _operator(
        "max_pool_backward", _pool_backward, _shaped,
        "(Tensor gradient, Tensor places, int[] shape, int[] window) -> Tensor",
    ),
}  # fmt: skip
