"""What an operation makes, without numbers: element types and shapes, allocating nothing.

The reference runs on torch's meta device. That device's own rules are Python and import a second's
worth of torch's compiler when the first is asked, so the common operations have a rule here; what
a rule does not understand goes to torch, which knows all and says what is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from tessella.core.dtype import dtype_name
from tessella.operations.operation import broadcast
from tessella.operations.table import operation
from tessella.operations.tensor_meta import TensorMeta

Tensor = torch.Tensor
Made = tuple[str, tuple[int, ...]]  # element type and shape
Shape = Sequence[int]
META = torch.device("meta")


def made(op: str, inputs: Sequence[TensorMeta | None], attrs: Mapping[str, Any]) -> list[Made]:
    """The element type and shape of each result of ``op``; raises what its reference raises."""
    tensors = [None if m is None else m.empty(META) for m in inputs]
    with ShapeRules():
        results = operation(op).call(tensors, attrs)
    return [(dtype_name(t.dtype), tuple(t.shape)) for t in results]


class ShapeRules(TorchFunctionMode):
    """Inside, rules answer for torch's functions of meta tensors where they can."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        rule = _RULES.get(func)
        result = rule(*args, **kwargs) if rule is not None else None
        return func(*args, **kwargs) if result is None else result


def _empty(like: Tensor, shape: Shape) -> Tensor:
    return torch.empty(tuple(shape), dtype=like.dtype, device=META)


def _floats(*tensors: Any) -> bool:
    """Whether all are tensors of one floating type (None may be among them)."""
    present = [t for t in tensors if t is not None]
    return all(
        isinstance(t, Tensor) and t.is_floating_point() and t.dtype == present[0].dtype
        for t in present
    )


def _plain(*values: Any) -> bool:
    """Whether these are numbers, and the like, that no function stumbles over."""
    return all(
        v is None
        or isinstance(v, bool)
        or v in ("none", "tanh")
        or (isinstance(v, int | float) and abs(v) < 2**31)
        for v in values
    )


def _sizes(values: Any, count: int, least: int) -> list[int] | None:
    """``values`` as ``count`` integers, one number standing for all; None if they are not."""
    listed = [values] * count if type(values) is int else values
    right = (
        isinstance(listed, list | tuple)
        and len(listed) == count
        and all(type(v) is int and least <= v < 2**31 for v in listed)
    )
    return list(listed) if right else None


def _same(x: Any, *numbers: Any, **named: Any) -> Tensor | None:
    """The shape rule of operations whose result has the shape and element type of the input."""
    if _floats(x) and _plain(*numbers, *named.values()):
        return _empty(x, x.shape)
    return None


def _both(x: Any, y: Any, **named: Any) -> Tensor | None:
    """Element by element; either may be a number."""
    x, y = (x, y) if isinstance(x, Tensor) else (y, x)
    if not _floats(x) or not _plain(*named.values()):
        return None
    if not isinstance(y, Tensor):
        return _empty(x, x.shape) if _plain(y) and y is not None else None
    shape = broadcast(x.shape, y.shape) if _floats(x, y) else None
    return None if shape is None else _empty(x, shape)


def _convolution(axes: int) -> Callable[..., Tensor | None]:
    def convolution(
        x: Any, w: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
        groups: Any = 1,
    ) -> Tensor | None:  # fmt: skip
        steps, edges = _sizes(stride, axes, 1), _sizes(padding, axes, 0)
        spread, apart = _sizes(dilation, axes, 1), _sizes(groups, 1, 1)
        if steps is None or edges is None or spread is None or apart is None:
            return None
        if not _floats(x, w, bias):
            return None
        if x.dim() != axes + 2 or w.dim() != axes + 2 or x.shape[1] != w.shape[1] * groups:
            return None
        if w.shape[0] % groups or (bias is not None and bias.shape != w.shape[:1]):
            return None
        places = zip(x.shape[2:], w.shape[2:], steps, edges, spread, strict=True)
        sizes = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in places]
        shape = [x.shape[0], w.shape[0], *sizes]
        return _empty(x, shape) if min(*shape, *x.shape, *w.shape) > 0 else None

    return convolution


def _window(
    x: Any, kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil: Any
) -> Tensor | None:
    """The shape of a result whose windows of two axes move over [N, C, H, W]."""
    size, edges = _sizes(kernel_size, 2, 1), _sizes(padding, 2, 0)
    steps, spread = _sizes(stride, 2, 1), _sizes(dilation, 2, 1)
    if size is None or edges is None or steps is None or spread is None:
        return None
    if not isinstance(ceil, bool) or not _floats(x) or x.dim() != 4:
        return None
    if any(2 * p > k for p, k in zip(edges, size, strict=True)):
        return None
    places = zip(x.shape[2:], size, steps, edges, spread, strict=True)
    shape = [*x.shape[:2], *(_windows(ceil, *place) for place in places)]
    return _empty(x, shape) if min(*shape, *x.shape) > 0 else None


def _windows(ceil: bool, n: int, k: int, s: int, p: int, d: int) -> int:
    """Windows along an axis; with ``ceil`` the last may reach past the edge, not begin there."""
    rest = n + 2 * p - d * (k - 1) - 1
    count = (rest + (s - 1 if ceil else 0)) // s + 1
    return count - (ceil and (count - 1) * s >= n + p)


def _max_pool(
    x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    ceil_mode: Any = False, return_indices: Any = False,
) -> Tensor | None:  # fmt: skip
    if return_indices is not False or not isinstance(x, Tensor):
        return None
    # an int8 network's maxima have the shapes of a floating one's
    like = torch.empty(x.shape, device=META) if x.dtype == torch.int8 else x
    made = _window(like, kernel_size, stride, padding, dilation, ceil_mode)
    return None if made is None else _empty(x, made.shape)


def _cat(tensors: Any, dim: Any = 0) -> Tensor | None:
    """Tensors of one type and as many axes, alike but for one axis."""
    if not isinstance(tensors, list | tuple) or not all(isinstance(t, Tensor) for t in tensors):
        return None
    rank = min((t.dim() for t in tensors), default=0)
    if rank == 0 or type(dim) is not int or not -rank <= dim < rank:
        return None
    dim %= rank
    alike = {(t.dtype, t.dim(), t.shape[:dim], t.shape[dim + 1 :]) for t in tensors}
    if len(alike) > 1 or any(0 in t.shape for t in tensors):
        return None
    shape = list(tensors[0].shape)
    shape[dim] = sum(t.shape[dim] for t in tensors)
    return _empty(tensors[0], shape)


def _relu(x: Any, inplace: Any = False) -> Tensor | None:
    known = isinstance(x, Tensor) and inplace is False
    return _empty(x, x.shape) if known and (_floats(x) or x.dtype == torch.int8) else None


def _avg_pool(
    x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: Any = False,
    count_include_pad: Any = True, divisor_override: Any = None,
) -> Tensor | None:  # fmt: skip
    known = isinstance(count_include_pad, bool) and divisor_override is None
    return _window(x, kernel_size, stride, padding, 1, ceil_mode) if known else None


def _adaptive_pool(x: Any, output_size: Any) -> Tensor | None:
    sizes = _sizes(output_size, 2, 1)
    if sizes is None or not _floats(x) or x.dim() != 4 or min(x.shape) == 0:
        return None
    return _empty(x, [*x.shape[:2], *sizes])


def _linear(x: Any, w: Any, bias: Any = None) -> Tensor | None:
    right = _floats(x, w, bias) and x.dim() > 0 and w.dim() == 2 and x.shape[-1] == w.shape[1]
    if not right or (bias is not None and bias.shape != w.shape[:1]):
        return None
    return _empty(x, [*x.shape[:-1], w.shape[0]])


def _matmul(a: Any, b: Any) -> Tensor | None:
    if not _floats(a, b) or min(a.dim(), b.dim()) < 2 or a.shape[-1] != b.shape[-2]:
        return None
    batch = broadcast(a.shape[:-2], b.shape[:-2])
    return None if batch is None else _empty(a, [*batch, a.shape[-2], b.shape[-1]])


def _attention(
    q: Any, k: Any, v: Any, mask: Any = None, is_causal: Any = False, scale: Any = None,
    enable_gqa: Any = False,
) -> Tensor | None:  # fmt: skip
    if not _floats(q, k, v) or enable_gqa is not False or not _plain(is_causal, scale):
        return None
    if min(t.dim() for t in (q, k, v)) < 3 or not q.shape[:-2] == k.shape[:-2] == v.shape[:-2]:
        return None
    if k.shape[-1] != q.shape[-1] or k.shape[-2] != v.shape[-2]:
        return None
    weights = [*q.shape[:-1], k.shape[-2]]
    if mask is not None and mask.dim() == len(weights) == 4 and mask.shape[0] > 1:
        weights[0] = mask.shape[0] if weights[0] % mask.shape[0] == 0 else weights[0]
    if mask is not None and (is_causal or broadcast(mask.shape, weights) != tuple(weights)):
        return None
    return _empty(q, [*q.shape[:-1], v.shape[-1]])


def _reduction(x: Any, dim: Any, keepdim: Any = False, dtype: Any = None) -> Tensor | None:
    axes = _axes(x, dim) if _floats(x) and dtype is None and isinstance(keepdim, bool) else None
    if axes is None:
        return None
    kept = [(1 if i in axes else n) for i, n in enumerate(x.shape) if keepdim or i not in axes]
    return _empty(x, kept)


def _along(x: Any, dim: Any = None, dtype: Any = None) -> Tensor | None:
    """The shape rule of operations along an axis whose result is like the input."""
    known = _floats(x) and dtype is None and _axes(x, [dim]) is not None
    return _empty(x, x.shape) if known else None


def _axes(x: Tensor, dim: Any) -> set[int] | None:
    """Axes by number from the front; None where they are not there, or named twice."""
    if not isinstance(dim, list | tuple) or not dim or any(type(d) is not int for d in dim):
        return None
    if not all(-x.dim() <= d < x.dim() for d in dim):
        return None
    axes = {d % x.dim() for d in dim}
    return axes if len(axes) == len(dim) else None


def _layer_norm(
    x: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: Any = 1e-5
) -> Tensor | None:
    if not _floats(x, weight, bias) or not _plain(eps) or not isinstance(normalized_shape, list):
        return None
    inner = tuple(normalized_shape)
    if not inner or tuple(x.shape[-len(inner) :]) != inner:
        return None
    if any(t is not None and tuple(t.shape) != inner for t in (weight, bias)):
        return None
    return _empty(x, x.shape)


def _batch_norm(
    x: Any, mean: Any, variance: Any, weight: Any = None, bias: Any = None, **named: Any
) -> Tensor | None:
    channels = [t for t in (mean, variance, weight, bias) if t is not None]
    if not _floats(x, *channels) or x.dim() < 2 or not _plain(*named.values()):
        return None
    right = all(t.shape == x.shape[1:2] for t in channels) and math.prod(x.shape) > 0
    return _empty(x, x.shape) if right else None


def _group_norm(
    x: Any, num_groups: Any, weight: Any = None, bias: Any = None, eps: Any = 1e-5
) -> Tensor | None:
    vectors = [t for t in (weight, bias) if t is not None]
    if not _floats(x, *vectors) or x.dim() < 2 or not _plain(eps) or type(num_groups) is not int:
        return None
    if num_groups < 1 or x.shape[1] % num_groups or any(t.shape != x.shape[1:2] for t in vectors):
        return None
    # of one number a group torch says that it has no variance
    return _empty(x, x.shape) if math.prod(x.shape) > num_groups else None


_UNARY = (
    F.leaky_relu, F.relu6, F.silu, F.gelu, F.hardswish, F.hardsigmoid, F.mish, torch.relu,
    torch.sigmoid, torch.tanh, torch.exp, torch.log, torch.sqrt, torch.rsqrt, torch.reciprocal,
    torch.neg, torch.abs, torch.erf, torch.sin, torch.cos, torch.round, Tensor.round, torch.clamp,
    Tensor.clamp,
)  # fmt: skip
_BINARY = (
    torch.add, torch.sub, torch.mul, torch.div, Tensor.add, Tensor.sub, Tensor.mul, Tensor.div,
    Tensor.__rmul__, Tensor.__radd__, Tensor.__rsub__,
)  # fmt: skip
_RULES: dict[Any, Callable[..., Tensor | None]] = {
    **dict.fromkeys(_UNARY, _same),
    **dict.fromkeys(_BINARY, _both),
    F.conv1d: _convolution(1),
    F.conv2d: _convolution(2),
    F.conv3d: _convolution(3),
    F.relu: _relu,
    torch.cat: _cat,
    F.max_pool2d: _max_pool,
    F.avg_pool2d: _avg_pool,
    F.adaptive_avg_pool2d: _adaptive_pool,
    F.linear: _linear,
    torch.matmul: _matmul,
    F.scaled_dot_product_attention: _attention,
    torch.mean: _reduction,
    torch.sum: _reduction,
    torch.softmax: _along,
    torch.log_softmax: _along,
    F.layer_norm: _layer_norm,
    F.batch_norm: _batch_norm,
    F.group_norm: _group_norm,
}
