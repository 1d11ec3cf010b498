"""The reference kernels against NumPy in float64, on meta, and with a plan's lists for tuples."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import sliding_window_view

from tessella.core.errors import CompileError
from tessella.operations.epilogue import ACTIVATIONS
from tessella.operations.table import operation

Array = np.ndarray[Any, Any]


def windows(x: Array, kernel: Any, stride: Any, padding: Any, fill: float = 0.0) -> Array:
    """[N, C, H, W] → [N, C, H', W', R, S]."""
    (r, s), (sh, sw), (ph, pw) = kernel, stride, padding
    padded = np.pad(x, ((0, 0), (0, 0), (ph, ph), (pw, pw)), constant_values=fill)
    return sliding_window_view(padded, (r, s), axis=(2, 3))[:, :, ::sh, ::sw]


def conv2d(x, w, b, residual, *, stride, padding, dilation, groups, activation):
    spread = np.zeros((*w.shape[:2], *((k - 1) * d + 1 for k, d in zip(w.shape[2:], dilation))))
    spread[:, :, :: dilation[0], :: dilation[1]] = w
    columns = windows(x, spread.shape[2:], stride, padding)
    parts = [
        np.einsum("nchwrs,kcrs->nkhw", c, k)
        for c, k in zip(np.split(columns, groups, 1), np.split(spread, groups, 0))
    ]
    out = np.concatenate(parts, 1) + b[:, None, None] + residual
    return np.maximum(out, 0) if activation == "relu" else out


def max_pool2d(x, *, kernel_size, stride, padding, dilation, ceil_mode):
    return windows(x, kernel_size, stride, padding, -np.inf).max((-1, -2))


def avg_pool2d(x, *, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override):
    total = windows(x, kernel_size, stride, padding).sum((-1, -2))
    ones = windows(np.ones_like(x), kernel_size, stride, padding).sum((-1, -2))
    return total / (math.prod(kernel_size) if count_include_pad else ones)


def adaptive_avg_pool2d(x, *, output_size):
    out = np.empty((*x.shape[:2], *output_size))
    for i, j in itertools.product(*map(range, output_size)):
        rows, columns = (
            slice(k * n // m, -(-(k + 1) * n // m))
            for k, n, m in zip((i, j), x.shape[2:], output_size)
        )
        out[:, :, i, j] = x[:, :, rows, columns].mean((2, 3))
    return out


def moments(x, axes, eps):
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + eps)


def batch_norm(x, mean, var, w, b, *, eps):
    mean, var, w, b = (v[:, None, None] for v in (mean, var, w, b))
    return (x - mean) / np.sqrt(var + eps) * w + b


def group_norm(x, w, b, *, num_groups, eps):
    grouped = x.reshape(x.shape[0], num_groups, -1)
    return moments(grouped, 2, eps).reshape(x.shape) * w[:, None, None] + b[:, None, None]


def group_factors(x, w, b, *, num_groups, eps):
    grouped = x.reshape(x.shape[0], num_groups, -1)
    factor = np.repeat(1 / np.sqrt(grouped.var(2) + eps), 4 // num_groups, 1) * w
    mean = np.repeat(grouped.mean(2), 4 // num_groups, 1)
    return [factor[:, :, None, None], (b - mean * factor)[:, :, None, None]]


def local_response_norm(x, *, size, alpha, beta, k):
    padded = np.pad(x**2, ((0, 0), (size // 2, (size - 1) // 2), (0, 0), (0, 0)))
    mean = sliding_window_view(padded, size, axis=1).mean(-1)
    return x / (k + alpha * mean) ** beta


def softmax(x, *, dim, dtype):
    e = np.exp(x - x.max(dim, keepdims=True))
    return e / e.sum(dim, keepdims=True)


def attention(q, k, v, mask, *, is_causal, scale, enable_gqa):
    scores = q @ np.swapaxes(k, -1, -2) / math.sqrt(q.shape[-1])
    if is_causal:
        scores = np.where(np.tril(np.ones(scores.shape[-2:])) > 0, scores, -np.inf)
    if mask is not None:
        scores = scores + mask
    return softmax(scores, dim=-1, dtype=None) @ v


erf = np.vectorize(math.erf)
CONV = {"stride": [2, 1], "padding": [1, 2], "dilation": [1, 2], "groups": 2}
IMAGE = (2, 4, 7, 9)

# operation, shapes of the inputs (None: left out), attributes, what it means
CASES: list[tuple[str, list[tuple[int, ...] | None], dict[str, Any], Callable[..., Any]]] = [
    ("conv2d", [IMAGE, (6, 2, 3, 3), (6,), (2, 6, 4, 9)], {**CONV, "activation": "relu"}, conv2d),
    ("linear", [(2, 5, 4), (3, 4), (3,), (2, 5, 3)], {"activation": "tanh"},
     lambda x, w, b, r, activation: np.tanh(x @ w.T + b + r)),
    ("matmul", [(2, 1, 3, 4), (5, 4, 2)], {}, np.matmul),
    ("batch_norm", [IMAGE, (4,), (4,), (4,), (4,)], {"eps": 0.1}, batch_norm),
    ("layer_norm", [(2, 3, 4), (3, 4), (3, 4)], {"normalized_shape": [3, 4], "eps": 0.1},
     lambda x, w, b, normalized_shape, eps: moments(x, (1, 2), eps) * w + b),
    ("group_norm", [IMAGE, (4,), (4,)], {"num_groups": 2, "eps": 0.1}, group_norm),
    ("group_factors", [IMAGE, (4,), (4,)], {"num_groups": 2, "eps": 0.1}, group_factors),
    ("rms_norm", [(2, 4), (4,)], {"normalized_shape": [4], "eps": 0.1},
     lambda x, w, normalized_shape, eps: x / np.sqrt((x**2).mean(1, keepdims=True) + eps) * w),
    ("local_response_norm", [IMAGE], {"size": 3, "alpha": 0.5, "beta": 0.7, "k": 2.0},
     local_response_norm),
    ("local_response_norm", [IMAGE], {"size": 2, "alpha": 0.5, "beta": 0.7, "k": 2.0},
     local_response_norm),
    ("max_pool2d", [IMAGE], {"kernel_size": [3, 2], "stride": [2, 1], "padding": [1, 1],
     "dilation": [1, 1], "ceil_mode": False}, max_pool2d),
    ("avg_pool2d", [IMAGE], {"kernel_size": [3, 3], "stride": [2, 2], "padding": [1, 1],
     "ceil_mode": False, "count_include_pad": False, "divisor_override": None}, avg_pool2d),
    ("avg_pool2d", [IMAGE], {"kernel_size": [3, 3], "stride": [2, 2], "padding": [1, 1],
     "ceil_mode": False, "count_include_pad": True, "divisor_override": None}, avg_pool2d),
    ("adaptive_avg_pool2d", [IMAGE], {"output_size": [3, 2]}, adaptive_avg_pool2d),
    ("softmax", [(3, 4, 5)], {"dim": 1, "dtype": None}, softmax),
    ("log_softmax", [(3, 4)], {"dim": 1, "dtype": "float64"},
     lambda x, **a: np.log(softmax(x, **a))),
    ("scaled_dot_product_attention", [(2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 7), (5, 6)],
     {"is_causal": False, "scale": None, "enable_gqa": False}, attention),
    ("scaled_dot_product_attention", [(2, 3, 5, 4), (2, 3, 5, 4), (2, 3, 5, 7), None],
     {"is_causal": True, "scale": None, "enable_gqa": False}, attention),
    ("mean", [(3, 4, 5)], {"dim": [0, 2], "keepdim": True, "dtype": None},
     lambda x, **_: x.mean((0, 2), keepdims=True)),
    ("sum", [(3, 4, 5)], {"dim": None, "keepdim": False, "dtype": None}, lambda x, **_: x.sum()),
    ("amax", [(3, 4, 5)], {"dim": [1], "keepdim": False}, lambda x, **_: x.max(1)),
    ("amin", [(3, 4, 5)], {"dim": None, "keepdim": False}, lambda x, **_: x.min()),
    ("add", [(3, 4), (4,)], {"scalar": None, "alpha": 2}, lambda x, y, **_: x + 2 * y),
    ("sub", [(3, 4), None], {"scalar": 1.5, "alpha": 2}, lambda x, y, **_: x - 3),
    ("mul", [(3, 4), (3, 1)], {"scalar": None}, lambda x, y, **_: x * y),
    ("div", [(3, 4), None], {"scalar": 7}, lambda x, y, **_: x / 7),
    ("pow", [(3, 4), None], {"scalar": 3}, lambda x, y, **_: x**3),
    ("maximum", [(3, 4), (4,)], {"scalar": None}, lambda x, y, **_: np.maximum(x, y)),
    ("minimum", [(3, 4), None], {"scalar": 0.25}, lambda x, y, **_: np.minimum(x, 0.25)),
    ("prelu", [IMAGE, (4,)], {}, lambda x, w: np.where(x > 0, x, x * w[:, None, None])),
    ("reshape", [(3, 4)], {"shape": [2, 6]}, lambda x, shape: x.reshape(shape)),
    ("permute", [(3, 4, 5)], {"dims": [2, 0, 1]}, lambda x, dims: x.transpose(dims)),
    ("rearrange", [(3, 6, 4)], {"sizes": [3, 2, 3, 4], "rolls": [[[1, 2], 5]],
     "dims": [0, 2, 1, 3], "shape": [9, 8]},
     lambda x, **_: np.roll(x, 5, 1).reshape(3, 2, 3, 4).transpose(0, 2, 1, 3).reshape(9, 8)),
    ("rearrange", [(6, 3, 4)], {"sizes": [2, 3, 3, 4], "rolls": [[[1, 2], 2], [[3], 1]],
     "dims": [0, 3, 1, 2], "shape": [2, 4, 9]},
     lambda x, **_: np.roll(x.reshape(2, 9, 4), (2, 1), (1, 2)).transpose(0, 2, 1)),
    ("expand", [(3, 1, 5)], {"shape": [2, 3, 4, 5]}, lambda x, shape: np.broadcast_to(x, shape)),
    ("cat", [(3, 4), (3, 1), (3, 2)], {"dim": 1}, lambda *x, dim: np.concatenate(x, dim)),
    ("split", [(3, 7)], {"sizes": [1, 4, 2], "dim": 1},
     lambda x, sizes, dim: np.split(x, np.cumsum(sizes)[:-1], dim)),
    ("slice", [(3, 9)], {"dim": 1, "start": 1, "end": None, "step": 3},
     lambda x, **_: x[:, 1::3]),
    ("slice", [(3, 9)], {"dim": 1, "start": -4, "end": 99, "step": 1}, lambda x, **_: x[:, -4:]),
    ("select", [(3, 9)], {"dim": 1, "index": -1}, lambda x, **_: x[:, -1]),
    ("pad", [(3, 4)], {"pad": [1, 2], "mode": "constant", "value": 5.0},
     lambda x, **_: np.pad(x, ((0, 0), (1, 2)), constant_values=5.0)),
    ("pad", [(2, 3, 4)], {"pad": [2, 1], "mode": "reflect", "value": None},
     lambda x, **_: np.pad(x, ((0, 0), (0, 0), (2, 1)), mode="reflect")),
    ("interpolate", [(1, 2, 3, 4)], {"size": [6, 8], "scale_factor": None, "mode": "nearest",
     "align_corners": None, "antialias": False},
     lambda x, **_: x.repeat(2, axis=2).repeat(2, axis=3)),
    ("to", [(3, 4)], {"dtype": "int64"}, lambda x, dtype: x.astype(np.int64)),
    ("clone", [(3, 4)], {}, lambda x: x),
    ("relu", [(3, 4)], {}, lambda x: np.maximum(x, 0)),
    ("relu6", [(3, 4)], {}, lambda x: np.clip(x, 0, 6)),
    ("sigmoid", [(3, 4)], {}, lambda x: 1 / (1 + np.exp(-x))),
    ("tanh", [(3, 4)], {}, np.tanh),
    ("silu", [(3, 4)], {}, lambda x: x / (1 + np.exp(-x))),
    ("gelu", [(3, 4)], {"approximate": "none"}, lambda x, **_: x * (1 + erf(x / 2**0.5)) / 2),
    ("gelu", [(3, 4)], {"approximate": "tanh"}, lambda x, **_:
     x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2),
    ("hardswish", [(3, 4)], {}, lambda x: x * np.clip(x + 3, 0, 6) / 6),
    ("hardsigmoid", [(3, 4)], {}, lambda x: np.clip(x + 3, 0, 6) / 6),
    ("mish", [(3, 4)], {}, lambda x: x * np.tanh(np.log1p(np.exp(x)))),
    ("leaky_relu", [(3, 4)], {"negative_slope": 0.2}, lambda x, **_: np.where(x > 0, x, 0.2 * x)),
    ("elu", [(3, 4)], {"alpha": 2.0, "scale": 3.0, "input_scale": 0.5},
     lambda x, **_: np.where(x > 0, 3 * x, 6 * np.expm1(x / 2))),
    ("softplus", [(3, 4)], {"beta": 2.0, "threshold": 20.0},
     lambda x, **_: np.log1p(np.exp(2 * x)) / 2),
    ("clamp", [(3, 4)], {"min": -0.5, "max": None}, lambda x, **_: np.maximum(x, -0.5)),
    ("exp", [(3, 4)], {}, np.exp),
    ("neg", [(3, 4)], {}, np.negative),
    ("abs", [(3, 4)], {}, np.abs),
    ("reciprocal", [(3, 4)], {}, lambda x: 1 / x),
    ("erf", [(3, 4)], {}, erf),
    ("sin", [(3, 4)], {}, np.sin),
    ("cos", [(3, 4)], {}, np.cos),
]  # fmt: skip


def inputs(shapes: list[tuple[int, ...] | None], op: str) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    made = [
        None if s is None else torch.randn(s, generator=generator, dtype=torch.float64) * 2
        for s in shapes
    ]
    if op == "batch_norm":
        made[2] = made[2].abs()  # type: ignore[union-attr]
    return made


@pytest.mark.parametrize(("op", "shapes", "attrs", "meaning"), CASES)
def test_values_in_float64(
    op: str,
    shapes: list[tuple[int, ...] | None],
    attrs: dict[str, Any],
    meaning: Callable[..., Any],
) -> None:
    assert json.loads(json.dumps(attrs)) == attrs  # as a plan holds them
    tensors = inputs(shapes, op)
    want = meaning(*(None if t is None else t.numpy() for t in tensors), **attrs)
    wanted = want if isinstance(want, list) else [want]
    got = operation(op).call(tensors, attrs)
    for have, expected in zip(got, wanted, strict=True):
        torch.testing.assert_close(have, torch.tensor(np.array(expected)), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("op", "shapes", "attrs", "meaning"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_meta_gives_the_same_shapes_and_types(
    op: str,
    shapes: list[tuple[int, ...] | None],
    attrs: dict[str, Any],
    meaning: Callable[..., Any],
    dtype: torch.dtype,
) -> None:
    tensors = [None if t is None else t.to(dtype) for t in inputs(shapes, op)]
    real = operation(op).call(tensors, attrs)
    meta = operation(op).call([None if t is None else t.to("meta") for t in tensors], attrs)
    assert [(t.shape, t.dtype) for t in meta] == [(t.shape, t.dtype) for t in real]


@pytest.mark.parametrize(("op", "meaning"), [("sqrt", np.sqrt), ("log", np.log)])
def test_roots_and_logarithms(op: str, meaning: Callable[[Array], Array]) -> None:
    x = torch.rand(5, dtype=torch.float64) + 0.1
    torch.testing.assert_close(operation(op).call([x], {})[0], torch.as_tensor(meaning(x.numpy())))


def test_rsqrt_and_embedding() -> None:
    x = torch.rand(5, dtype=torch.float64) + 0.1
    torch.testing.assert_close(operation("rsqrt").call([x], {})[0], x**-0.5)
    rows, weight = torch.tensor([[2, 0]]), torch.randn(3, 4)
    torch.testing.assert_close(operation("embedding").call([rows, weight], {})[0], weight[rows])


def test_one_and_three_axes_agree_with_two() -> None:
    """A convolution over one or three axes is that over two, with axes of one added or taken."""
    x, w, b = (torch.randn(s, dtype=torch.float64) for s in ((2, 4, 9), (6, 2, 3), (6,)))
    two = {"groups": 2, "activation": "silu", "stride": [2, 1], "padding": [1, 0],
           "dilation": [2, 1]}  # fmt: skip
    one = {k: v[:1] if isinstance(v, list) else v for k, v in two.items()}
    three = {k: [*v, v[1]] if isinstance(v, list) else v for k, v in two.items()}
    (want,) = operation("conv2d").call([x[..., None], w[..., None], b, None], two)
    (flat,) = operation("conv1d").call([x, w, b, None], one)
    (deep,) = operation("conv3d").call([x[..., None, None], w[..., None, None], b, None], three)
    torch.testing.assert_close(flat, want[..., 0])
    torch.testing.assert_close(deep[..., 0], want)


def test_a_transposed_convolution_is_the_adjoint_of_a_convolution() -> None:
    """<conv(x), y> = <x, conv_transpose(y)>."""
    x, y, w = (
        torch.randn(s, dtype=torch.float64) for s in ((1, 2, 8, 8), (1, 3, 4, 4), (3, 2, 3, 3))
    )
    conv = {"stride": [2, 2], "padding": [1, 1], "dilation": [1, 1], "groups": 1}
    (forward,) = operation("conv2d").call([x, w, None, None], conv)
    (backward,) = operation("conv_transpose2d").call(
        [y, w, None], {**conv, "output_padding": [1, 1]}
    )
    torch.testing.assert_close((forward * y).sum(), (x * backward).sum())


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_of_the_epilogue_is_the_operation_of_its_name(activation: str) -> None:
    x = torch.randn(4, 8, dtype=torch.float64)
    attrs = {"approximate": "tanh" if activation == "gelu_tanh" else "none"}
    op = activation.removesuffix("_tanh")
    (want,) = operation(op).call([x], attrs if op == "gelu" else {})
    eye = torch.eye(8, dtype=torch.float64)
    (got,) = operation("linear").call([x, eye, None, None], {"activation": activation})
    torch.testing.assert_close(got, want)


def test_family_and_unknown_names() -> None:
    assert operation("conv2d").family == "conv"
    assert operation("layer_norm").family == "norm"
    with pytest.raises(CompileError, match=r"unknown operation. Seen: frobnicate"):
        operation("frobnicate").call([], {})
    with pytest.raises(TypeError, match="a tensor or a scalar"):
        operation("add").call([torch.zeros(1), None], {"scalar": None, "alpha": 1})


@pytest.mark.parametrize("groups", [2, 8], ids=("groups", "each channel"))
@pytest.mark.parametrize("sides", [(9,), (19, 17), (5, 9, 7)], ids=str)
def test_a_group_norm_keeps_its_digits_wherever_the_channels_lie(groups, sides):
    """Far from zero, and of a constant, which becomes the bias."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 8, *sides, generator=generator) + 1000
    x[1] = 3.3333
    last = x.movedim(1, -1).contiguous().movedim(-1, 1)
    weight, bias = torch.randn(2, 8, generator=generator)
    wanted = torch.group_norm(x.double(), groups, weight.double(), bias.double())
    attrs = {"num_groups": groups, "eps": 1e-5}
    (made,) = operation("group_norm").call((last, weight, bias), attrs)
    assert (made - wanted).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_group_norm_of_16_bits_is_as_right_where_channels_lie_last(dtype):
    """Of small numbers, and of those whose difference is more than float16 holds."""
    x = torch.randn(2, 8, 5, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[1] = -20000
    x[1, 0, 0, 0] = 60000
    last = x.contiguous(memory_format=torch.channels_last)
    wanted = torch.group_norm(x.double(), 2)
    (made,) = operation("group_norm").call((last, None, None), {"num_groups": 2, "eps": 1e-5})
    assert made.stride() == last.stride()
    tolerance = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(made.double(), wanted, rtol=tolerance, atol=tolerance)
