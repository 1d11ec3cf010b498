"""A captured CUDA graph as the driver sees it: its nodes, and what its kernels are launched by."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator

from tessella.device.driver import Driver

# numbers of cuda.h
KERNEL, MEMSET, EMPTY = 0, 2, 5
# One thread at a time changes or launches a graph: on driver 580, one that changed a kernel's
# parameters while another launched another graph ended the process.
GRAPH_LOCK = threading.Lock()


class Kernel(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS."""

    _fields_ = [
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("parameters", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    ]

    @classmethod
    def of(cls, driver: Driver, node: int) -> Kernel:
        """The launch of a graph's node. The driver owns the memory that ``parameters`` points
        to.
        """
        made = cls()
        driver.call("cuGraphKernelNodeGetParams_v2", ctypes.c_void_p(node), ctypes.byref(made))
        return made


def nodes(driver: Driver, graph: int) -> Iterator[tuple[int, int]]:
    """Each node of the graph with its kind, such as a kernel launch or a copy."""
    count = ctypes.c_size_t()
    driver.call("cuGraphGetNodes", ctypes.c_void_p(graph), None, ctypes.byref(count))
    found = (ctypes.c_void_p * count.value)()
    driver.call("cuGraphGetNodes", ctypes.c_void_p(graph), found, ctypes.byref(count))
    for node in found:
        kind = ctypes.c_int()
        driver.call("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
        yield node or 0, kind.value
