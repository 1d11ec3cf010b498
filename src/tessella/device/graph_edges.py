"""Which kernels of a captured graph may start while the one before them still runs.

Ours let the next one start early, and wait themselves (``overlap``). A library's need not: cuDNN's
are launched so that they start early too, and read a residual without waiting for the kernel that
makes it. ResNet-50 at batch 1 answered NaN.
"""

from __future__ import annotations

import ctypes

from tessella.device.cuda_graphs import Kernel
from tessella.device.driver import Driver

_PROGRAMMATIC = 1  # CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC


class _Edge(ctypes.Structure):
    """CUgraphEdgeData; all zero: the second node waits until the first has ended."""

    _fields_ = [
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("type", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    ]


def let_libraries_wait(driver: Driver, graph: int) -> int:
    """Before it is instantiated: kernels that are not ours start when what is before them has
    ended. Returns how many edges that changes.
    """
    count = ctypes.c_size_t()
    handle = ctypes.c_void_p(graph)
    driver.call("cuGraphGetEdges_v2", handle, None, None, None, ctypes.byref(count))
    if not count.value:
        return 0
    begins, ends = (ctypes.c_void_p * count.value)(), (ctypes.c_void_p * count.value)()
    edges = (_Edge * count.value)()
    driver.call("cuGraphGetEdges_v2", handle, begins, ends, edges, ctypes.byref(count))
    early = [e for e in zip(begins, ends, edges, strict=True) if e[2].type == _PROGRAMMATIC]
    ours = driver.handles() if early else set()
    changed = 0
    for begin, end, edge in early:  # only from kernel to kernel
        if Kernel.of(driver, end).function in ours:
            continue
        one = ctypes.c_void_p(begin), ctypes.c_void_p(end)
        pair = [ctypes.byref(place) for place in one]
        driver.call(
            "cuGraphRemoveDependencies_v2", handle, *pair, ctypes.byref(edge), ctypes.c_size_t(1)
        )
        driver.call(
            "cuGraphAddDependencies_v2", handle, *pair, ctypes.byref(_Edge()), ctypes.c_size_t(1)
        )
        changed += 1
    return changed
