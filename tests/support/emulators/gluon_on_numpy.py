"""Runs the source of a Gluon kernel as plain Python on NumPy arrays, block by block.

Gluon has no interpreter. This shows that indices, masks and sums of a kernel are right; layouts,
barriers and races it does not see. It knows what our kernels use, no more; every address that is
read or written unmasked must lie inside its tensor. ``gluon_roles`` adds warps with roles.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tessella.operations.epilogue import ACTIVATIONS


class Scalar(int):
    """A whole number of the device."""

    def to(self, dtype: Any) -> Scalar:
        return self


def _method(name: str) -> Callable[[Scalar, Any], Any]:
    compute = getattr(int, name)

    def method(self: Scalar, other: Any) -> Any:
        made = compute(self, other)
        return made if made is NotImplemented else Scalar(made)

    return method


for _name in ("add", "sub", "mul", "floordiv", "mod", "and", "or", "xor"):
    for _side in ("", "r"):
        setattr(Scalar, f"__{_side}{_name}__", _method(f"__{_side}{_name}__"))


class Array(np.ndarray):
    """A tensor in registers."""

    type = types.SimpleNamespace(layout=None)
    __iadd__ = np.ndarray.__add__  # type: ignore[assignment]  # another may have the old one

    def to(self, dtype: Any, bitcast: bool = False) -> Array:
        return self.view(dtype) if bitcast else self.astype(dtype)

    def permute(self, order: Sequence[int]) -> Array:
        return self.transpose(order)

    def split(self) -> tuple[Array, Array]:
        return self[..., 0], self[..., 1]

    def expand_dims(self, axis: int) -> Array:
        return np.expand_dims(self, axis)


def _tensor(values: Any) -> Any:
    """What NumPy made, as on the device, where Python's numbers have 32 bits."""
    values = np.asarray(values)
    if values.ndim == 0 and values.dtype.kind == "i":
        return Scalar(values)
    return (values.astype(np.float32) if values.dtype == np.float64 else values).view(Array)


class Pointer:
    """Addresses of elements of a tensor's storage, from the tensor's first on."""

    def __init__(self, storage: np.ndarray, offsets: Any = 0) -> None:
        self.storage, self.offsets = storage, offsets
        self.dtype = types.SimpleNamespace(element_ty=storage.dtype)

    def __add__(self, offsets: Any) -> Pointer:
        return Pointer(self.storage, self.offsets + offsets)

    def load(self, mask: Any = True, other: float = 0.0) -> Array:
        offsets, mask = np.broadcast_arrays(self.offsets, mask)
        self._assert_inside(offsets[mask])
        values = self.storage[np.where(mask, offsets, 0)]
        return np.where(mask, values, self.storage.dtype.type(other)).view(Array)

    def store(self, value: Any, mask: Any = True) -> None:
        offsets, mask, value = np.broadcast_arrays(self.offsets, mask, value)
        self._assert_inside(offsets[mask])
        self.storage[offsets[mask]] = value[mask]

    def _assert_inside(self, offsets: np.ndarray) -> None:
        assert offsets.size == 0 or (offsets.min() >= 0 and offsets.max() < self.storage.size)


class Dtype(str):
    """The element type of shared memory, by NumPy's name for it."""

    @property
    def primitive_bitwidth(self) -> int:
        return 8 * np.dtype(self).itemsize

    def is_int(self) -> bool:
        return np.dtype(self).kind == "i"


class Shared:
    """Shared memory, or a view of it."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.dtype, self.shape = array, Dtype(array.dtype.name), array.shape

    def index(self, i: Any) -> Shared:
        assert 0 <= i < len(self.array)
        return Shared(self.array[int(i)])

    def slice(self, start: int, length: int, dim: int) -> Shared:
        assert dim == 0
        return Shared(self.array[start : start + length])

    def reshape(self, shape: Sequence[int]) -> Shared:
        return Shared(self.array.reshape(shape))

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.array.transpose(order))

    def load(self, layout: Any) -> Array:
        return self.array.copy().view(Array)

    def store(self, value: np.ndarray) -> None:
        assert (value.shape, value.dtype) == (self.shape, self.dtype)
        self.array[...] = value

    def poison(self) -> None:
        """Nobody may use what is there."""
        self.array.fill(math.nan if self.array.dtype.kind == "f" else 77)


def _reinterpret(shared: Shared, dtype: Any, shape: Sequence[int], layout: Any) -> Shared:
    """Other than the old tile, the new one may reach as far as what was allocated."""
    old = shared.array
    whole = old if old.base is None else old.base
    at = old.ctypes.data - whole.ctypes.data
    return Shared(np.ndarray(shape, dtype, buffer=whole.data, offset=at))


class Language:
    """``gl``: layouts mean nothing here."""

    float32, int64, int32, int8, uint8 = (np.dtype(n) for n in ("f4", "i8", "i4", "i1", "u1"))
    float8e4nv = None  # NumPy has none
    arange = staticmethod(lambda low, high, layout: np.arange(low, high).view(Array))
    zeros = staticmethod(lambda shape, dtype, layout: np.zeros(shape, dtype).view(Array))
    full = staticmethod(lambda shape, x, dtype, layout: np.full(shape, x, dtype).view(Array))
    broadcast = staticmethod(lambda a, b: [x.view(Array) for x in np.broadcast_arrays(a, b)])
    to_tensor = staticmethod(lambda x: Scalar(x) if isinstance(x, int) else x)
    where = staticmethod(lambda c, a, b: _tensor(np.where(c, a, b)))
    maximum = staticmethod(lambda a, b, propagate_nan=None: _tensor(np.maximum(a, b)))
    minimum = staticmethod(lambda a, b: _tensor(np.minimum(a, b)))
    join = staticmethod(lambda a, b: np.stack([a, b], -1).view(Array))
    sum = staticmethod(lambda x, axis: x.sum(axis))
    max = staticmethod(lambda x, axis: x.max(axis))
    exp2, abs = np.exp2, np.abs
    rsqrt = staticmethod(lambda x: (1 / np.sqrt(x)).astype(np.float32))
    convert_layout = staticmethod(lambda x, layout: x)
    load = staticmethod(lambda p, mask=True, other=0.0: p.load(mask, other))
    store = staticmethod(lambda p, value, mask=True: p.store(value, mask))
    static_range = range
    BlockedLayout = SliceLayout = SwizzledSharedLayout = NVMMADistributedLayout = (
        DotOperandLayout
    ) = staticmethod(lambda *a, **named: None)
    PaddedSharedLayout = types.SimpleNamespace(with_identity_for=lambda *a: None)

    def __init__(self, block: int, blocks: int, warps: int) -> None:
        self.program_id = lambda axis: Scalar(block)
        self.num_programs = lambda axis: Scalar(blocks)
        self.num_warps = lambda: warps

    @staticmethod
    def allocate_shared_memory(dtype: Any, shape: Sequence[int], layout: Any) -> Any:
        made = Shared(np.empty([int(n) for n in shape], dtype))
        made.poison()
        return made


def _activate(x: np.ndarray, activation: str | None) -> Array:
    if activation is not None:
        x = ACTIVATIONS[activation](torch.tensor(np.asarray(x))).numpy()
    return x.view(Array)


def _quantize(x: Array, dtype: Any) -> Array:
    return (x.round().clip(-128, 127) if dtype == np.int8 else x).to(dtype)


NAMES: dict[str, Any] = {
    "range": lambda *bounds: map(Scalar, range(*bounds)),
    "activate": _activate,
    "quantize": _quantize,
    "reinterpret": _reinterpret,
    "copy_elements": lambda shared, pointers: shared.store(pointers.load()),
    **dict.fromkeys(
        (
            "barrier", "commit_copies", "wait_for_copies", "fence_async_shared",
            "wait_for_dependencies",
        ),
        lambda *a: None,
    ),
}  # fmt: skip


def run(kernel: Any, grid: Sequence[int], *args: Any, num_warps: int = 4, **constants: Any) -> None:
    """``launch`` with NumPy as the device; tensors on the CPU, changed in place."""
    for block in range(grid[0]):
        play(kernel, {**NAMES, "gl": Language(block, grid[0], num_warps)}, args, constants)


def play(
    kernel: Any, names: Mapping[str, Any], args: Sequence[Any], constants: Mapping[str, Any]
) -> None:
    """Call a kernel; in its module, and in those of the functions it calls, names mean these."""
    known = {name: value for name, value in constants.items() if name in kernel.arg_names}
    _function(kernel.fn, names, {})(*map(_given, args), **known)


def function(device: Any, names: Mapping[str, Any]) -> Callable[..., Any]:
    """A device function as one of Python."""
    return _function(device.fn, names, {})


def _given(arg: Any) -> Any:
    if isinstance(arg, tuple):
        made = [_given(one) for one in arg]
        return type(arg)(*made) if hasattr(arg, "_fields") else tuple(made)
    if isinstance(arg, torch.Tensor):
        size = arg.untyped_storage().nbytes() // arg.itemsize - arg.storage_offset()
        return Pointer(arg.as_strided((size,), (1,)).numpy())
    return Scalar(arg) if isinstance(arg, int) and not isinstance(arg, bool) else arg


def _function(
    function: Callable[..., Any], names: Mapping[str, Any], worlds: dict[str, dict[str, Any]]
) -> Callable[..., Any]:
    module = function.__module__
    if module not in worlds:
        world = worlds[module] = {**function.__globals__, **names}
        for name, value in function.__globals__.items():
            if name not in names and callable(getattr(value, "fn", None)):
                world[name] = _function(value.fn, names, worlds)
            elif type(value).__name__ == "constexpr":
                world[name] = value.value
    world = worlds[module]
    return types.FunctionType(function.__code__, world, function.__name__, function.__defaults__)
