"""Runs a warp-specialized Gluon kernel as plain Python: roles take turns, copies come late.

Gluon has no interpreter. Here each role of ``warp_specialize`` is a thread, one runs at a time, and
a seeded generator says who is next. Bulk copies and tensor-core products happen at any moment
between their start and the wait for them, and read shared memory then: a buffer that is handed on
too early, or a barrier's phase that is taken for another, makes a wrong number or stops everything,
which is an error. Layouts, fences and warps of a role it does not see.
"""

from __future__ import annotations

import random
import threading
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from tessella.kernels.epilogue import ACTIVATIONS


class Deadlock(AssertionError):
    """All roles wait, and nothing is on its way."""


class Array(np.ndarray):
    """A tensor in registers."""

    type = types.SimpleNamespace(layout=None)

    def permute(self, order: Sequence[int]) -> Array:
        return self.transpose(order)

    def split(self) -> tuple[Array, Array]:
        return self[..., 0], self[..., 1]

    def expand_dims(self, axis: int) -> Array:
        return np.expand_dims(self, axis)


class Shared:
    """Shared memory, or a view of it."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.dtype, self.shape = array, array.dtype, array.shape

    def index(self, i: int) -> Shared:
        return Shared(self.array[i])

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.array.transpose(order))

    def load(self, layout: object) -> Array:
        return self.array.astype(np.float64).view(Array)

    def store(self, value: np.ndarray) -> None:
        self.array[...] = value


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes are there."""

    def __init__(self, count: int) -> None:
        self.count = self.missing = count
        self.bytes = self.phase = 0

    def change(self, arrivals: int, nbytes: int) -> None:
        self.missing -= arrivals
        self.bytes += nbytes
        assert self.missing >= 0, "more arrivals than the barrier counts"
        if self.missing == self.bytes == 0:
            self.missing, self.phase = self.count, self.phase + 1


class Descriptor:
    """A TMA descriptor of a matrix: zeros are read outside it, and nothing is written."""

    def __init__(self, tensor: torch.Tensor, block: Sequence[int]) -> None:
        self.array, self.layout = tensor.numpy(), None
        self.dtype = self.array.dtype
        nbytes = int(np.prod(block)) * self.dtype.itemsize
        self.block_type = types.SimpleNamespace(shape=list(block), nbytes=nbytes)

    def inside(self, at: Sequence[int]) -> tuple[slice, ...]:
        ends = zip(at, self.block_type.shape, self.array.shape, strict=True)
        return tuple(slice(min(i, size), min(i + n, size)) for i, n, size in ends)

    def load(self, at: Sequence[int], into: np.ndarray) -> None:
        part = self.array[self.inside(at)]
        into[...] = 0
        into[tuple(slice(n) for n in part.shape)] = part

    def store(self, at: Sequence[int], source: np.ndarray) -> None:
        part = self.array[self.inside(at)]
        part[...] = source[tuple(slice(n) for n in part.shape)]


class Product:
    """A product on its way."""

    def __init__(self, a: Shared, b: Shared, before: Any, use: bool) -> None:
        self._operands, self._before, self._use = (a, b), before, use
        self._made: Array | None = None

    def value(self) -> Array:
        if self._made is None:
            before = _value(self._before)
            wide = np.int64 if before.dtype.kind == "i" else np.float64
            a, b = (operand.array.astype(wide) for operand in self._operands)
            self._made = (a @ b + (before if self._use else 0)).view(Array)
        return self._made


def _value(sums: Any) -> Array:
    return sums.value() if isinstance(sums, Product) else sums


class Machine:
    """One block: its roles, and the copies and products that they have started."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._haste = self._random.choice((0.3, 0.05, 0.01))
        self._late: list[Callable[[], None]] = []
        self._turns: dict[int, threading.Semaphore] = {}
        self._waiting: set[int] = set()
        self._failed: BaseException | None = None
        self._stores: dict[int, list[bool]] = {}  # of a role: which have been read
        self._me = threading.local()

    def run(self, roles: Sequence[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
        self._turns = {i: threading.Semaphore(0) for i in range(len(roles))}
        threads = [
            threading.Thread(target=self._role, args=(i, *role)) for i, role in enumerate(roles)
        ]
        for thread in threads:
            thread.start()
        self._turns[0].release()
        for thread in threads:
            thread.join()
        for late in self._late:
            late()
        if self._failed:
            raise self._failed

    def _role(self, me: int, function: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._me.name = me
        self._turns[me].acquire()
        try:
            if self._failed is None:
                function(*args)
        except BaseException as error:
            self._failed = self._failed or error
        others = [i for i in self._turns if i != me]
        del self._turns[me]
        if others:
            self._turns[self._random.choice(others)].release()

    def switch(self) -> None:
        """Something late happens, perhaps; then it is somebody's turn."""
        if self._late and self._random.random() < self._haste:
            self._happen()
        me, chosen = self._me.name, self._random.choice(list(self._turns))
        if chosen != me:
            mine = self._turns[me]
            self._turns[chosen].release()
            mine.acquire()
        if self._failed:
            raise self._failed

    def wait_until(self, done: Callable[[], bool]) -> None:
        me = self._me.name
        while not done():
            self._waiting.add(me)
            if self._waiting >= set(self._turns):
                if not self._late:
                    raise Deadlock(f"{len(self._turns)} roles wait for each other")
                self._happen()
            self.switch()
        self._waiting.discard(me)

    def _happen(self) -> None:
        self._late.pop(self._random.randrange(len(self._late)))()
        self._waiting.clear()  # whom it was that they waited for, they see when it is their turn

    def later(self, happen: Callable[[], None]) -> None:
        self._late.append(happen)
        self.switch()

    # -------------------------------------------------------------- what device code calls
    def load_tile(self, source: Descriptor, at: Any, barrier: list[Barrier], into: Shared) -> None:
        into.array.fill(77)  # from now on it may be anything

        def arrive() -> None:
            source.load(at, into.array)
            barrier[0].change(0, -source.block_type.nbytes)

        self.later(arrive)

    def store_tile(self, target: Descriptor, at: Any, source: Shared) -> None:
        mine = self._stores.setdefault(self._me.name, [])
        number = len(mine)
        mine.append(False)

        def leave() -> None:
            target.store(at, source.array)
            mine[number] = True

        self.later(leave)

    def store_wait(self, pendings: int) -> None:
        """All but so many of the newest have been read."""
        mine = self._stores.setdefault(self._me.name, [])
        self.wait_until(lambda: all(mine[: max(0, len(mine) - pendings)]))

    def multiply(
        self, a: Shared, b: Shared, before: Any, use_acc: bool = True, **_: Any
    ) -> Product:
        product = Product(a, b, before, use_acc)
        self.later(product.value)
        return product

    def multiplied(self, pending: int, deps: Sequence[Any]) -> Any:
        assert pending == 0
        values = [_value(one) for one in deps]
        return values[0] if len(values) == 1 else values

    @property
    def mbarrier(self) -> types.SimpleNamespace:
        def init(place: Any, count: int) -> None:
            place[0] = Barrier(count)

        def arrive(place: Any, pred: bool = True) -> None:
            if pred:
                place[0].change(1, 0)
                self._waiting.clear()
            self.switch()

        def wait(place: Any, parity: int) -> None:
            self.wait_until(lambda: place[0].phase & 1 != parity)

        return types.SimpleNamespace(
            MBarrierLayout=lambda: None,
            init=init,
            arrive=arrive,
            wait=wait,
            expect=lambda place, nbytes: place[0].change(1, nbytes),
        )


class _Barriers:
    def __init__(self, count: int) -> None:
        self._places: list[list[Any]] = [[None] for _ in range(count)]

    def index(self, i: int) -> list[Any]:
        return self._places[i]


class _Language:
    """``gl``: layouts mean nothing here."""

    int8, int32, int64, float32 = np.dtype("i1"), np.dtype("i4"), np.dtype("i8"), np.dtype("f4")
    static_range = range
    minimum = min
    SliceLayout = NVMMADistributedLayout = staticmethod(lambda *a, **k: None)
    convert_layout = staticmethod(lambda x, layout: x)

    def __init__(self, machine: Machine, block: int, blocks: int) -> None:
        self.program_id = lambda axis: block
        self.num_programs = lambda axis: blocks
        self.warp_specialize = lambda roles, warps, registers: machine.run(roles)

    @staticmethod
    def zeros(shape: Sequence[int], dtype: np.dtype, layout: object) -> Array:
        return np.zeros(shape, dtype).view(Array)

    @staticmethod
    def allocate_shared_memory(dtype: np.dtype, shape: Sequence[int], layout: object) -> Any:
        if dtype == np.int64:
            return _Barriers(shape[0])
        return Shared(np.full([int(n) for n in shape], 77, dtype))


def _finish(
    sums: Array, scale: Any, bias: Any, added: Any, alpha: float, beta: float, act: Any, dtype: Any
) -> np.ndarray:
    x = sums.astype(np.float64) * alpha * (1 if scale is None else scale)
    x = x + (0 if bias is None else bias) + (0 if added is None else added * beta)
    return x if act is None else ACTIVATIONS[act](torch.from_numpy(np.asarray(x))).numpy()


def _channel_vector(vector: torch.Tensor, offset: int, limit: int, length: int, layout: Any) -> Any:
    found = np.zeros(length)
    found[: max(0, min(length, limit - offset))] = vector[offset : min(offset + length, limit)]
    return found.view(Array)


def run(kernel: Any, grid: Sequence[int], *args: Any, seed: int = 0, **constants: Any) -> None:
    """``launch`` with this as the device, for kernels whose descriptors are ``Descriptor``."""
    for option in ("num_warps", "launch_pdl", "maxnreg"):
        constants.pop(option, None)
    for block in range(grid[0]):
        machine = Machine(seed * 1000 + block)
        world = dict(kernel.fn.__globals__)
        replaced: dict[str, Any] = {
            "gl": _Language(machine, block, grid[0]),
            "mbarrier": machine.mbarrier,
            "load_tile": machine.load_tile,
            "store_tile": machine.store_tile,
            "store_wait": machine.store_wait,
            "warpgroup_mma": machine.multiply,
            "warpgroup_mma_wait": machine.multiplied,
            "warpgroup_mma_init": lambda x: x,
            "finish": _finish,
            "channel_vector": _channel_vector,
            "float_of_small": lambda x: x,
            "float_of_int8": lambda x: x,
            "int8_of_float": lambda x: np.clip(np.rint(x), -128, 127),
            "sorted_layout": lambda layout: layout,
            **dict.fromkeys(_NOTHING, lambda *a: None),
        }
        world.update(replaced)
        for name, value in kernel.fn.__globals__.items():
            if name not in replaced and hasattr(value, "fn") and callable(value.fn):
                world[name] = types.FunctionType(value.fn.__code__, world, name)
        types.FunctionType(kernel.fn.__code__, world)(*args, **constants)


_NOTHING: Iterable[str] = (
    "barrier", "fence_async_shared", "launch_dependents", "wait_for_dependencies"
)  # fmt: skip
