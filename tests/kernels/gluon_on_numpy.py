"""Runs the source of a Gluon kernel as plain Python on NumPy arrays, block by block.

Gluon has no interpreter. This shows that indices, masks and sums of a kernel are right; layouts,
barriers and races it does not see. It knows what our float32 kernels use, no more; every address
that is read or written unmasked must lie inside its tensor.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tessella.kernels.epilogue import ACTIVATIONS


class Array(np.ndarray):
    """A tensor of the device."""

    def to(self, dtype: Any) -> Array:
        return self

    def permute(self, order: Sequence[int]) -> Array:
        return self.transpose(order)


def _array(values: Any) -> Array:
    return np.atleast_1d(np.asarray(values)).view(Array)


class Pointer:
    """Addresses of elements of a tensor's storage."""

    def __init__(self, storage: np.ndarray, offsets: Any = 0) -> None:
        self.storage, self.offsets = storage, offsets
        self.dtype = types.SimpleNamespace(element_ty="float32")

    def __add__(self, offsets: Any) -> Pointer:
        return Pointer(self.storage, self.offsets + offsets)

    def load(self, mask: Any = True, other: float = 0.0) -> Array:
        offsets, mask = np.broadcast_arrays(self.offsets, mask)
        self._assert_inside(offsets[mask])
        return _array(np.where(mask, self.storage[np.where(mask, offsets, 0)], np.float32(other)))

    def store(self, value: Any, mask: Any = True) -> None:
        offsets, mask, value = np.broadcast_arrays(self.offsets, mask, value)
        self._assert_inside(offsets[mask])
        self.storage[offsets[mask]] = value[mask]

    def _assert_inside(self, offsets: np.ndarray) -> None:
        assert offsets.size == 0 or (offsets.min() >= 0 and offsets.max() < self.storage.size)


class Shared:
    """Shared memory: poisoned until it is written."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def index(self, i: Any) -> Shared:
        return Shared(self.array[int(i)])

    def slice(self, start: int, length: int, dim: int) -> Shared:
        assert dim == 0
        return Shared(self.array[start : start + length])

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.array.transpose(order))

    def load(self, layout: Any) -> Array:
        return _array(self.array.copy())

    def store(self, value: np.ndarray) -> None:
        self.array[...] = value


class _Language:
    """``gl``: layouts mean nothing here."""

    float32, int64 = "float32", "int64"
    arange = staticmethod(lambda low, high, layout: _array(np.arange(low, high)))
    zeros = staticmethod(lambda shape, dtype, layout: _array(np.zeros(shape, np.float32)))
    where = staticmethod(lambda c, a, b: np.where(c, a, b))
    join = staticmethod(lambda a, b: _array(np.stack([a, b], -1)))
    sum = staticmethod(lambda x, axis: x.sum(axis))
    convert_layout = staticmethod(lambda x, layout: x)
    load = staticmethod(lambda p, mask=True, other=0.0: p.load(mask, other))
    store = staticmethod(lambda p, value, mask=True: p.store(value, mask))
    static_range = range
    BlockedLayout = SliceLayout = SwizzledSharedLayout = staticmethod(lambda *a: None)
    PaddedSharedLayout = types.SimpleNamespace(with_identity_for=lambda *a: None)

    def __init__(self, block: int, warps: int) -> None:
        self.program_id = lambda axis: _array(block)
        self.num_warps = lambda: warps

    @staticmethod
    def allocate_shared_memory(dtype: Any, shape: Sequence[int], layout: Any) -> Shared:
        return Shared(np.full(shape, np.nan, np.float32))


def _finish(x, scale, bias, residual, alpha, beta, activation, dtype):  # type: ignore[no-untyped-def]
    x = x * alpha * (1 if scale is None else scale) + (0 if bias is None else bias)
    x = x + (0 if residual is None else residual * beta)
    return x if activation is None else _array(ACTIVATIONS[activation](torch.tensor(x)).numpy())


def _channel_vector(pointer: Pointer, offset: Any, limit: int, length: int, layout: Any) -> Array:
    i = offset + np.arange(length)
    return (pointer + i).load(i < limit)


def run(kernel: Any, grid: Sequence[int], *args: Any, num_warps: int = 4, **constants: Any) -> None:
    """``launch`` with NumPy as the device: float32 tensors, changed in place."""
    args = tuple(
        Pointer(np.frombuffer(memory(a), np.float32)) if isinstance(a, torch.Tensor) else a
        for a in args
    )
    for block in range(grid[0]):
        world = dict(kernel.fn.__globals__)
        replaced: dict[str, Any] = {
            "gl": _Language(block, num_warps),
            "copy_elements": lambda shared, pointers: shared.store(pointers.load()),
            "finish": _finish,
            "channel_vector": _channel_vector,
            **dict.fromkeys(("barrier", "commit_copies", "wait_for_copies"), lambda *a: None),
        }
        world.update(replaced)
        for name, value in kernel.fn.__globals__.items():
            if name not in replaced and hasattr(value, "fn") and callable(value.fn):
                world[name] = _function(value.fn, world)
        _function(kernel.fn, world)(*args, **constants)


def memory(tensor: torch.Tensor) -> Any:
    """The storage from the tensor's first element on, writable."""
    assert tensor.dtype == torch.float32
    flat = tensor.as_strided(
        (tensor.untyped_storage().nbytes() // 4 - tensor.storage_offset(),), (1,)
    )
    return flat.numpy()


def _function(function: Callable[..., Any], world: dict[str, Any]) -> Callable[..., Any]:
    return types.FunctionType(function.__code__, world, function.__name__, function.__defaults__)
