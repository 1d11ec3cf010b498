"""Parameters of captured kernels that hold a tensor's address, to be told another one."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

from tessella.device.cuda_graphs import EMPTY, KERNEL, MEMSET, Kernel, nodes
from tessella.device.driver import Driver

_ADDRESS_BYTES = 8


class Parameters:
    """What the kernels of a graph are launched with, in copies: the driver owns what it shows.

    One for a graph: a kernel that reads two tensors has one list of parameters for both.
    """

    def __init__(self, driver: Driver, graph: int) -> None:
        self._driver, self._graph = driver, graph
        self._known: dict[int, _Copy] = {}

    def find(self, address: int, size: int) -> Addresses | None:
        """Where the graph reads ``size`` bytes at an address; None where something in it may use
        them otherwise.
        """
        cell, read = ctypes.c_uint64(address), []
        for node, kind in nodes(self._driver, self._graph):
            if kind == KERNEL:
                found = self._of(node).places(address, size)
                if found is None:
                    return None
                read += [(node, i) for i in found]
            elif kind != EMPTY and (
                kind != MEMSET or 0 <= _set_from(self._driver, node) - address < size
            ):
                return None
        for node, i in read:
            self._known[node].parameters[i] = ctypes.addressof(cell)
        kernels = {node: self._known[node].kernel for node, _ in read}
        return Addresses(self._driver, self, cell, kernels) if read else None

    def _of(self, node: int) -> _Copy:
        if node not in self._known:
            self._known[node] = _Copy.of(self._driver, node)
        return self._known[node]


class Addresses:
    """All places where the kernels of a graph read a tensor's address.

    Attributes:
        now: what they hold.
    """

    def __init__(
        self,
        driver: Driver,
        parameters: Parameters,
        cell: ctypes.c_uint64,
        kernels: dict[int, Kernel],
    ) -> None:
        self.now = cell.value
        self._driver, self._cell, self._kernels = driver, cell, kernels
        self._parameters = parameters  # what the kernels point to

    def __len__(self) -> int:
        return len(self._kernels)

    def point(self, executable: int, address: int) -> None:
        """Let later launches of an instantiated graph read there; under ``GRAPH_LOCK``."""
        if address == self.now:
            return
        self._cell.value = address
        for node, kernel in self._kernels.items():
            self._driver.call(
                "cuGraphExecKernelNodeSetParams_v2",
                ctypes.c_void_p(executable),
                ctypes.c_void_p(node),
                ctypes.byref(kernel),
            )
        self.now = address


@dataclass
class _Copy:
    """A kernel's parameters in our memory.

    Attributes:
        kernel: what launches it, with ``parameters``.
        values: the bytes of each parameter as they were captured.
        parameters: the place of each.
    """

    kernel: Kernel
    values: list[ctypes.Array[ctypes.c_char]]
    parameters: ctypes.Array[ctypes.c_void_p]
    is_plain: bool

    @classmethod
    def of(cls, driver: Driver, node: int) -> _Copy:
        kernel = Kernel.of(driver, node)
        plain = not kernel.extra and bool(kernel.parameters)
        sizes = list(_sizes(driver, kernel)) if plain else []
        values = [
            ctypes.create_string_buffer(ctypes.string_at(kernel.parameters[i], size), size)
            for i, size in enumerate(sizes)
        ]
        parameters = (ctypes.c_void_p * len(sizes))(*map(ctypes.addressof, values))
        kernel.parameters = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))
        return cls(kernel, values, parameters, plain)

    def places(self, address: int, size: int) -> list[int] | None:
        """Which parameters are this address; None if one is, or seems, an address inside.

        Such is one that was computed before, or a description of the tensor (TMA).
        """
        if not self.is_plain:
            return None
        found = []
        for i, value in enumerate(self.values):
            raw = value.raw
            words = [int.from_bytes(raw[j : j + 8], "little") for j in range(0, len(raw) - 7, 8)]
            if len(raw) == _ADDRESS_BYTES and words == [address]:
                found.append(i)
            elif any(0 <= word - address < max(size, 1) for word in words):
                return None
        return found


def _set_from(driver: Driver, node: int) -> int:
    """The address from which on memory is set: the first word of what describes it."""
    described = (ctypes.c_uint64 * 8)()
    driver.call("cuGraphMemsetNodeGetParams", ctypes.c_void_p(node), described)
    return described[0]


def _sizes(driver: Driver, kernel: Kernel) -> Iterator[int]:
    """Bytes of each parameter, in the machine code's own words."""
    name = "cuFuncGetParamInfo" if kernel.function else "cuKernelGetParamInfo"
    handle = ctypes.c_void_p(kernel.function or kernel.kernel)
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    index = 0
    found = ctypes.byref(offset), ctypes.byref(size)
    while driver.answers(name, handle, ctypes.c_size_t(index), *found):
        yield size.value
        index += 1
