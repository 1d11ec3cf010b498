"""Parameters of captured kernels that hold a tensor's address, to be told another one."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

from tessella.kernels.captured import EMPTY, KERNEL, MEMSET, Kernel, nodes
from tessella.kernels.driver import Driver

_ADDRESS_BYTES = 8


class Addresses:
    """All places where the kernels of a graph read a tensor's address.

    Attributes:
        now: what they hold.
    """

    def __init__(self, driver: Driver, address: int, size: int) -> None:
        self.now = address
        self._driver = driver
        self._size = size
        self._cell = ctypes.c_uint64(address)
        self._kernels: list[tuple[int, Kernel]] = []
        self._kept: list[object] = []  # what the structures point to

    def __len__(self) -> int:
        return len(self._kernels)

    def point(self, executable: int, address: int) -> None:
        """Let later launches of an instantiated graph read there; under ``captured.GRAPHS``."""
        if address == self.now:
            return
        self._cell.value = address
        for node, kernel in self._kernels:
            self._driver.call(
                "cuGraphExecKernelNodeSetParams_v2",
                ctypes.c_void_p(executable),
                ctypes.c_void_p(node),
                ctypes.byref(kernel),
            )
        self.now = address

    def _take(self, node: int) -> bool:
        """Look at a kernel's parameters; False if one is, or seems, an address inside the tensor.

        Such is one that was computed before, or a description of the tensor (TMA).
        """
        kernel = Kernel.of(self._driver, node)
        if kernel.extra or not kernel.parameters:
            return False
        sizes = list(_sizes(self._driver, kernel))
        # copies: of what the node's parameters point to, the driver does not say how long it lasts
        copies = [
            ctypes.create_string_buffer(ctypes.string_at(place, size), size)
            for place, size in zip(kernel.parameters[: len(sizes)], sizes, strict=True)
        ]
        places = (ctypes.c_void_p * len(sizes))(*map(ctypes.addressof, copies))
        found = False
        for i, size in enumerate(sizes):
            words = copies[i].raw
            seen = [int.from_bytes(words[j : j + 8], "little") for j in range(0, size - 7, 8)]
            inside = [0 <= word - self.now < max(self._size, 1) for word in seen]
            if size == _ADDRESS_BYTES and seen == [self.now]:
                places[i] = ctypes.addressof(self._cell)
                found = True
            elif any(inside):
                return False
        if found:
            kernel.parameters = ctypes.cast(places, ctypes.POINTER(ctypes.c_void_p))
            self._kernels.append((node, kernel))
            self._kept.append((places, copies))
        return True

    @classmethod
    def find(cls, driver: Driver, graph: int, address: int, size: int) -> Addresses | None:
        """Those of ``size`` bytes at ``address``; None where something in the graph may use them
        otherwise.
        """
        made = cls(driver, address, size)
        for node, kind in nodes(driver, graph):
            if kind == KERNEL:
                if not made._take(node):
                    return None
            elif kind != EMPTY and (
                kind != MEMSET or 0 <= _set_from(driver, node) - address < size
            ):
                return None
        return made if len(made) else None


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
