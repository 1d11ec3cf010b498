"""Runs a warp-specialized Gluon kernel as plain Python: roles take turns, copies come late.

Tensors are ``gluon_on_numpy``'s. Each role of ``warp_specialize`` is a thread, one runs at a time,
and a seeded generator says who is next. Bulk copies and tensor-core products happen at any moment
between their start and the wait for them, those of one kind as late as can be, and read shared
memory then: a buffer that is handed on too early, or a barrier's phase that is taken for another
(one bit tells phases apart), makes a wrong number or stops everything, which is an error at once.
What was never written, or may be overwritten at any moment, is NaN. Layouts, fences, the order of
writes to memory, and the warps inside a role it does not see.
"""

from __future__ import annotations

import math
import random
import threading
import types
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.support.emulators.gluon_on_numpy import NAMES, Array, Language, Shared, play
from tests.support.emulators.gluon_on_numpy import function as device_function


class Deadlock(AssertionError):
    """All roles wait, and nothing is on its way."""


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes are there."""

    def __init__(self) -> None:
        self.count = self.missing = self.bytes = self.phase = 0

    def init(self, count: int) -> None:
        self.count = self.missing = count

    def change(self, arrivals: int, nbytes: int) -> None:
        self.missing -= arrivals
        self.bytes += nbytes
        assert self.missing >= 0, "more arrivals than the barrier counts"
        if self.missing == self.bytes == 0:
            self.missing, self.phase = self.count, self.phase + 1


class Barriers(list[Barrier]):
    index = list.__getitem__  # type: ignore[assignment]


class Descriptor:
    """A TMA descriptor: zeros are read outside its tensor, and nothing is written."""

    def __init__(self, made: Any) -> None:
        self.array, self.layout = made.base.numpy(), None
        self.dtype, shape = self.array.dtype, list(made.block_shape)
        nbytes = math.prod(shape) * self.dtype.itemsize
        self.block_type = types.SimpleNamespace(shape=shape, nbytes=nbytes)

    def parts(self, at: Sequence[int], tile: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What the tensor and a tile have in common: views of both."""
        inside, part = [], []
        for first, length, size in zip(at, tile.shape, self.array.shape, strict=True):
            low, high = min(max(first, 0), size), min(max(first + length, 0), size)
            inside.append(slice(low, high))
            part.append(slice(low - first, high - first))
        return self.array[tuple(inside)], tile[tuple(part)]


class Product:
    """A product on its way."""

    def __init__(self, a: Any, b: Shared, before: Any, use: bool) -> None:
        self._operands, self._before, self._use = (a, b), before, use
        self._made: Array | None = None

    def value(self) -> Array:
        if self._made is None:
            before = _value(self._before)
            a, b = (x.array if isinstance(x, Shared) else x for x in self._operands)
            made = a.astype(np.float64) @ b.astype(np.float64)
            made = made + before if self._use else made
            self._made = made.astype(before.dtype).view(Array)
        return self._made


def _value(sums: Any) -> Any:
    return sums.value() if isinstance(sums, Product) else sums


Roles = Sequence[tuple[Callable[..., None], tuple[Any, ...]]]


class Machine:
    """A block, or several: their roles, and the copies and products that they have started."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._haste = self._random.choice((0.3, 0.05, 0.01))
        self._slow = self._random.choice(("load_tile", "store_tile", "multiply"))
        self._late: list[Callable[[], object]] = []
        self._last: list[Callable[[], object]] = []  # the slow ones, when nothing else can happen
        self._turns: dict[int, threading.Semaphore] = {}
        self._waiting: set[int] = set()
        self._failed: BaseException | None = None
        # of each role: products not waited for, and which copies out have been read
        self._products: defaultdict[int, list[Product]] = defaultdict(list)
        self._stores: defaultdict[int, list[bool]] = defaultdict(list)
        self._me = threading.local()

    def run(self, roles: Roles) -> None:
        self._turns = {i: threading.Semaphore(0) for i in range(len(roles))}
        threads = [
            threading.Thread(target=self._role, args=(i, *role)) for i, role in enumerate(roles)
        ]
        for thread in threads:
            thread.start()
        self._turns[0].release()
        for thread in threads:
            thread.join()
        if self._failed:
            raise self._failed

    def _role(self, me: int, function: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._me.name = me
        self._turns[me].acquire()
        try:
            if self._failed is None:
                with np.errstate(all="ignore"):  # NaN and infinity, as on a GPU
                    function(*args)
                assert all(self._stores[me]), "ends before its copies out have been read"
                assert not self._products[me], "ends before its products are made"
        except BaseException as error:
            self._failed = self._failed or error
        others = [i for i in self._turns if i != me]
        del self._turns[me]
        if others:
            self._turns[self._random.choice(others)].release()

    def switch(self) -> None:
        """Something late happens, perhaps; then it is the turn of somebody who may go on."""
        if self._late and self._random.random() < self._haste:
            self._happen()
        me = self._me.name
        chosen = self._random.choice([i for i in self._turns if i not in self._waiting])
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
                if not self._late and not self._last:
                    raise Deadlock(f"{len(self._turns)} roles wait for each other")
                self._happen()
            self.switch()
        self._waiting.discard(me)

    def _happen(self) -> None:
        late = self._late or self._last
        late.pop(self._random.randrange(len(late)))()
        self._waiting.clear()  # whom it was that they waited for, they see when it is their turn

    def later(self, kind: str, happen: Callable[[], object]) -> None:
        (self._last if kind == self._slow else self._late).append(happen)
        self.switch()

    # -------------------------------------------------------------- what device code calls
    def announce(self, counter: Any, share: int) -> None:
        """One more at a counter in memory."""
        counter.storage[counter.offsets] += share
        self._waiting.clear()
        self.switch()

    def wait_for_all(self, counter: Any, complete: int) -> None:
        def is_complete() -> bool:
            ahead = int(counter.storage[counter.offsets]) - int(complete)
            return (ahead + 2**31) % 2**32 >= 2**31  # counters wrap

        self.wait_until(is_complete)

    def load_tile(self, source: Descriptor, at: Any, barrier: Barrier, into: Shared) -> None:
        into.poison()

        def arrive() -> None:
            there, here = source.parts(at, into.array)
            into.array.fill(0)
            here[...] = there
            barrier.change(0, -source.block_type.nbytes)

        self.later("load_tile", arrive)

    def store_tile(self, target: Descriptor, at: Any, source: Shared) -> None:
        mine = self._stores[self._me.name]
        number = len(mine)
        mine.append(False)

        def leave() -> None:
            there, here = target.parts(at, source.array)
            there[...] = here
            mine[number] = True

        self.later("store_tile", leave)

    def store_wait(self, pendings: int) -> None:
        """All but so many of the newest have been read."""
        mine = self._stores[self._me.name]
        self.wait_until(lambda: all(mine[: max(0, len(mine) - pendings)]))

    def multiply(self, a: Any, b: Shared, before: Any, use_acc: bool = True, **_: Any) -> Product:
        product = Product(a, b, before, use_acc)
        self._products[self._me.name].append(product)
        self.later("multiply", product.value)
        return product

    def multiplied(self, pending: int, deps: Sequence[Any]) -> Any:
        """All but so many of the newest are made."""
        mine = self._products[self._me.name]
        done = len(mine) - pending
        for product in mine[:done]:
            product.value()
        del mine[:done]
        values = [one if one in mine else _value(one) for one in deps]
        return values[0] if len(values) == 1 else values

    def arrive(self, barrier: Barrier, count: int = 1, pred: bool = True) -> None:
        if pred:
            barrier.change(count, 0)
            self._waiting.clear()
        self.switch()

    def wait(self, barrier: Barrier, parity: int) -> None:
        self.wait_until(lambda: barrier.phase & 1 != parity)

    def names(
        self,
        block: int,
        blocks: int,
        warps: int,
        roles_of: Callable[[Roles], None] | None = None,
    ) -> dict[str, Any]:
        """What these names mean in a kernel.

        Args:
            roles_of: is told the roles of the block; they run at once if it is None.
        """
        language: Any = Language(block, blocks, warps)
        allocate = language.allocate_shared_memory
        language.allocate_shared_memory = lambda dtype, shape, layout: (
            Barriers(Barrier() for _ in range(shape[0]))
            if layout == "mbarrier"
            else allocate(dtype, shape, layout)
        )
        language.warp_specialize = lambda roles, warps, registers: (roles_of or self.run)(roles)
        return {
            **NAMES,
            "gl": language,
            "mbarrier": types.SimpleNamespace(
                MBarrierLayout=lambda: "mbarrier",
                init=Barrier.init,
                expect=lambda barrier, nbytes: barrier.change(1, nbytes),
                arrive=self.arrive,
                wait=self.wait,
            ),
            "announce": self.announce,
            "wait_for_all": self.wait_for_all,
            "load_tile": self.load_tile,
            "store_tile": self.store_tile,
            "store_wait": self.store_wait,
            "warpgroup_mma": self.multiply,
            "warpgroup_mma_wait": self.multiplied,
            "warpgroup_mma_init": lambda x: x,
            "float_of_small": lambda x: x.to(np.float32),
            "float_of_int8": lambda x: x.to(np.float32),
            "int8_of_float": lambda x: np.clip(np.rint(x), -128, 127).to(np.int8),
            "fma": _fma,
            "float_of_shifted_int8": lambda x: x.to(np.float32) + np.float32(2**15 + 128),
            "pack_int8": lambda x: np.minimum(x - np.float32(1.5 * 2**23), 127).to(np.int8),
            "sorted_layout": lambda layout: layout,
        }


def _fma(x: Any, y: Any, z: Any, saturated: bool) -> Any:
    """x · y + z, rounded once: float64 holds the product, and nearly the sum."""
    made = (x.astype(np.float64) * y + z).to(np.float32)
    return np.clip(made, 0, 1) if saturated else made


def call(function: Any, *args: Any) -> Any:
    """What a device function answers; arrays and numbers as they are."""
    return device_function(function, Machine(0).names(0, 1, 4))(*args)


def run(
    kernel: Any,
    grid: Sequence[int],
    *args: Any,
    seed: int = 0,
    num_warps: int = 4,
    together: bool = False,
    **constants: Any,
) -> None:
    """``launch`` with this as the device; tensors on the CPU, changed in place.

    Args:
        together: all blocks at the same time, as where they wait for each other.
    """
    given = [Descriptor(arg) if hasattr(arg, "block_shape") else arg for arg in args]
    if together:
        machine, roles = Machine(seed), []
        for block in range(grid[0]):
            names = machine.names(block, grid[0], num_warps, roles.extend)
            play(kernel, names, given, {**constants, "num_warps": num_warps})
        machine.run(roles)
        return
    for block in range(grid[0]):
        names = Machine(seed * 1000 + block).names(block, grid[0], num_warps)
        play(kernel, names, given, {**constants, "num_warps": num_warps})
