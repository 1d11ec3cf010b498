"""Runs a warp-specialized Gluon kernel as plain Python: a thread for each role, NumPy for tensors.

Gluon has no interpreter. This shows that tiles, masks and sums are right, and that barriers are
waited for and given back in an order that neither hangs nor overwrites what is still read: copies
into shared memory are made when they are asked for; products read their factors, and copies out
their source, as late as the kernel allows (``late``), or at once. Layouts, and races inside a
warpgroup, it does not see. Barriers are Hopper's: one bit tells rounds apart.
"""

from __future__ import annotations

import math
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

PATIENCE_S = 10.0


class Scalar(int):
    """A number of the device."""

    def to(self, dtype: Any) -> Scalar:
        return self


def _scalar_method(name: str) -> Callable[..., Any]:
    def method(self: Scalar, other: Any) -> Any:
        made = getattr(int, name)(self, other)
        return Scalar(made) if isinstance(made, int) and not isinstance(made, bool) else made

    return method


for _name in ("add", "sub", "mul", "floordiv", "mod", "and", "or", "xor"):
    for _side in ("", "r"):
        setattr(Scalar, f"__{_side}{_name}__", _scalar_method(f"__{_side}{_name}__"))


def _range(*bounds: int) -> Iterator[Scalar]:
    return map(Scalar, range(*bounds))


class Array(np.ndarray):
    """A tensor of the device."""

    type = types.SimpleNamespace(layout=None)

    def to(self, dtype: Any) -> Array:
        return self.astype(dtype)

    def expand_dims(self, axis: int) -> Array:
        return np.expand_dims(self, axis).view(Array)


def _array(values: Any) -> Array:
    return np.asarray(values).view(Array)


class Pointer:
    """Addresses of elements of a tensor's storage."""

    def __init__(self, storage: np.ndarray, offsets: Any = 0) -> None:
        self.storage, self.offsets = storage, offsets

    def __add__(self, offsets: Any) -> Pointer:
        return Pointer(self.storage, self.offsets + offsets)

    def load(self, mask: Any, other: float) -> Array:
        offsets, mask = np.broadcast_arrays(self.offsets, mask)
        read = offsets[mask]
        assert read.size == 0 or (read.min() >= 0 and read.max() < self.storage.size)
        values = self.storage[np.where(mask, offsets, 0)]
        return _array(np.where(mask, values, self.storage.dtype.type(other)))


class Shared:
    """Shared memory: poisoned until it is written."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def index(self, i: int) -> Shared:
        assert 0 <= i < len(self.array)
        return Shared(self.array[i])

    def reshape(self, shape: Sequence[int]) -> Shared:
        return Shared(self.array.reshape(shape))

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.array.transpose(order))

    def load(self, layout: Any) -> Array:
        return _array(self.array.copy())

    def store(self, value: np.ndarray) -> None:
        assert (value.shape, value.dtype) == (self.shape, self.dtype)
        self.array[...] = value


class Barrier:
    """An mbarrier: a round ends when all have arrived and all announced bytes are there."""

    def __init__(self, changed: threading.Condition) -> None:
        self.changed, self.rounds, self.count, self.missing, self.nbytes = changed, 0, 0, 0, 0

    def update(self, arrived: int = 0, nbytes: int = 0) -> None:
        with self.changed:
            self.missing -= arrived
            self.nbytes += nbytes
            assert self.missing >= 0, "more arrived than the barrier counts"
            if self.missing == 0 and self.nbytes == 0:
                self.rounds, self.missing = self.rounds + 1, self.count
                self.changed.notify_all()


class Barriers(list[Barrier]):
    index = list.__getitem__  # type: ignore[assignment]


class _Mbarrier:
    """``mbarrier``."""

    MBarrierLayout = staticmethod(lambda: "mbarrier")

    @staticmethod
    def init(barrier: Barrier, count: int) -> None:
        barrier.count = barrier.missing = count

    @staticmethod
    def expect(barrier: Barrier, nbytes: int) -> None:
        barrier.update(arrived=1, nbytes=nbytes)

    @staticmethod
    def arrive(barrier: Barrier, count: int, pred: bool = True) -> None:
        if pred:
            barrier.update(arrived=count)

    @staticmethod
    def wait(barrier: Barrier, parity: int) -> None:
        with barrier.changed:
            done = barrier.changed.wait_for(lambda: barrier.rounds % 2 != parity, PATIENCE_S)
        assert done, "hangs"


class Descriptor:
    """A TMA descriptor."""

    def __init__(self, made: Any) -> None:
        base = made.base
        flat = base.as_strided((_extent(base),), (1,)).numpy()
        steps = [s * base.itemsize for s in made.strides]
        self.array = np.lib.stride_tricks.as_strided(flat, made.shape, steps)
        self.dtype, self.layout = self.array.dtype, None
        nbytes = math.prod(made.block_shape) * base.itemsize
        self.block_type = types.SimpleNamespace(shape=list(made.block_shape), nbytes=nbytes)

    def tile(self, at: Sequence[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Where a tile lies in the tensor, and which part of the tile that is."""
        inside, part = [], []
        for first, length, size in zip(at, self.block_type.shape, self.array.shape, strict=True):
            low, high = max(first, 0), min(first + length, size)
            inside.append(slice(low, max(high, low)))
            part.append(slice(low - first, max(high, low) - first))
        return tuple(inside), tuple(part)


def _extent(tensor: torch.Tensor) -> int:
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * step for size, step in pairs)


class _Role(threading.local):
    """What one warp or warpgroup has under way."""

    def __init__(self) -> None:
        self.products: list[_Product] = []
        self.stores: list[Callable[[], None]] = []


class _Product:
    """A product under way; ``value`` when it is waited for."""

    def __init__(self, compute: Callable[[], Array], late: bool) -> None:
        self.compute, self.value = compute, None if late else compute()

    def finish(self) -> None:
        self.value = self.compute() if self.value is None else self.value


class _Block:
    """One block: its shared memory, and the functions of Gluon as it sees them."""

    def __init__(self, block: int, blocks: int, late: bool) -> None:
        self.role, self.late, self.changed = _Role(), late, threading.Condition()
        self.failed: list[BaseException] = []
        self.language = types.SimpleNamespace(
            float32=np.float32, int64=np.int64, uint8=np.uint8,
            program_id=lambda axis: Scalar(block), num_programs=lambda axis: Scalar(blocks),
            to_tensor=lambda value: Scalar(value) if isinstance(value, int) else value,
            static_range=range,
            arange=lambda low, high, layout: _array(np.arange(low, high)),
            zeros=lambda shape, dtype, layout: _array(np.zeros(shape, dtype)),
            full=lambda shape, value, dtype, layout: _array(np.full(shape, value, dtype)),
            where=lambda c, a, b: _where(c, a, b),
            maximum=lambda a, b: _array(np.maximum(a, b)),
            minimum=lambda a, b: Scalar(min(a, b)),
            max=lambda x, axis: x.max(axis), sum=lambda x, axis: x.sum(axis),
            exp2=np.exp2, convert_layout=lambda x, layout: x,
            load=lambda p, mask, other: p.load(mask, other),
            allocate_shared_memory=self.allocate, warp_specialize=self.specialize,
            BlockedLayout=_no_layout, SliceLayout=_no_layout, SwizzledSharedLayout=_no_layout,
            NVMMADistributedLayout=_no_layout, DotOperandLayout=_no_layout,
        )  # fmt: skip

    def names(self) -> dict[str, Any]:
        """What the kernel's module imports."""
        return {
            "gl": self.language,
            "mbarrier": _Mbarrier,
            "range": _range,
            "load_tile": self.load_tile,
            "store_tile": self.store_tile,
            "store_wait": self.store_wait,
            "warpgroup_mma": self.multiply,
            "warpgroup_mma_wait": self.wait,
            **dict.fromkeys(
                ("barrier", "fence_async_shared", "launch_dependents", "wait_for_dependencies"),
                lambda: None,
            ),
        }

    def allocate(self, dtype: Any, shape: Sequence[int], layout: Any) -> Any:
        if layout == "mbarrier":
            return Barriers(Barrier(self.changed) for _ in range(shape[0]))
        return Shared(np.full(shape, np.nan, dtype))

    def specialize(self, roles: Sequence[Any], warps: Sequence[int], registers: Any) -> None:
        def play(function: Callable[..., None], args: Sequence[Any]) -> None:
            try:
                with np.errstate(over="ignore"):  # where numbers become infinite on a GPU too
                    function(*args)
            except BaseException as error:
                self.failed.append(error)

        threads = [threading.Thread(target=play, args=role) for role in roles]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failed:
            raise self.failed[0]

    def load_tile(self, source: Descriptor, at: Sequence[int], ready: Barrier, to: Shared) -> None:
        inside, part = source.tile(at)
        to.array[...] = 0
        to.array[part] = source.array[inside]
        ready.update(nbytes=-source.block_type.nbytes)

    def store_tile(self, into: Descriptor, at: Sequence[int], source: Shared) -> None:
        inside, part = into.tile(at)

        def store() -> None:
            into.array[inside] = source.array[part]

        self.role.stores.append(store)
        if not self.late:
            self.store_wait(0)

    def store_wait(self, pending: int) -> None:
        assert pending == 0
        for store in self.role.stores:
            store()
        self.role.stores.clear()

    def multiply(
        self, a: Any, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = False
    ) -> _Product:
        def compute() -> Array:
            left = a.array if isinstance(a, Shared) else a
            made = left.astype(np.float32) @ b.array.astype(np.float32)
            return _array(made + acc if use_acc else made)

        self.role.products.append(product := _Product(compute, self.late))
        return product

    def wait(self, pending: int, deps: Sequence[Any]) -> Any:
        done = len(self.role.products) - pending
        for product in self.role.products[:done]:
            product.finish()
        del self.role.products[:done]
        values = [
            d.value if isinstance(d, _Product) and d not in self.role.products else d for d in deps
        ]
        return values[0] if len(values) == 1 else tuple(values)


def _no_layout(*args: Any, **named: Any) -> None:
    return None


def _where(condition: Any, a: Any, b: Any) -> Array:
    return _array(np.where(condition, a, b).astype(np.float32))


def run(kernel: Any, grid: Sequence[int], *args: Any, late: bool = True, **constants: Any) -> None:
    """``launch`` with threads and NumPy as the device; tensors on the CPU, changed in place."""
    options = ("num_warps", "launch_pdl")
    given = [_given(arg) for arg in args]
    named = {name: value for name, value in constants.items() if name not in options}
    for block in range(grid[0]):
        names = _Block(block, grid[0], late).names()
        world = dict(kernel.fn.__globals__)
        for name, value in kernel.fn.__globals__.items():
            if hasattr(value, "fn") and callable(value.fn):
                world[name] = _function(value.fn, world)
            elif type(value).__name__ == "constexpr":
                world[name] = value.value
        world.update(names)
        _function(kernel.fn, world)(*given, **named)


def _given(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        size = arg.untyped_storage().nbytes() // arg.itemsize - arg.storage_offset()
        return Pointer(arg.as_strided((size,), (1,)).numpy())
    if hasattr(arg, "block_shape"):
        return Descriptor(arg)
    return Scalar(arg) if isinstance(arg, int) and not isinstance(arg, bool) else arg


def _function(function: Callable[..., Any], world: dict[str, Any]) -> Callable[..., Any]:
    return types.FunctionType(function.__code__, world, function.__name__, function.__defaults__)
