"""Addresses in a captured graph, in a driver that holds its kernels' parameters in our memory."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import pytest

from tessella.device.cuda_graphs import Kernel
from tessella.device.graph_parameters import Addresses, Parameters

AT, SIZE = 0x7F00_0000_1000, 4096
KERNEL, MEMCPY, MEMSET, EMPTY = 0, 1, 2, 5


class Graph:
    """Nodes by handle: (kind, parameters), each parameter its bytes."""

    def __init__(self, *nodes: tuple[int, list[bytes]]) -> None:
        self.nodes = {100 + i: node for i, node in enumerate(nodes)}
        self.set: dict[int, list[bytes]] = {}
        self._kept: list[Any] = []

    def call(self, name: str, *args: Any) -> None:
        getattr(self, name)(*args)

    def answers(self, name: str, handle: Any, index: Any, offset: Any, size: Any) -> bool:
        assert name == "cuFuncGetParamInfo"
        parameters = self.nodes[handle.value][1]
        if index.value >= len(parameters):
            return False
        size._obj.value = len(parameters[index.value])
        return True

    def cuGraphGetNodes(self, graph: Any, nodes: Any, count: Any) -> None:
        if nodes is None:
            count._obj.value = len(self.nodes)
        else:
            nodes[:] = list(self.nodes)

    def cuGraphNodeGetType(self, node: Any, kind: Any) -> None:
        kind._obj.value = self.nodes[node.value][0]

    def cuGraphMemsetNodeGetParams(self, node: Any, described: Any) -> None:
        described[0] = int.from_bytes(self.nodes[node.value][1][0], "little")

    def cuGraphKernelNodeGetParams_v2(self, node: Any, made: Any) -> None:
        parts = [ctypes.create_string_buffer(p, len(p)) for p in self.nodes[node.value][1]]
        places = (ctypes.c_void_p * len(parts))(*map(ctypes.addressof, parts))
        self._kept += [parts, places]
        made._obj.function = node.value
        made._obj.parameters = ctypes.cast(places, ctypes.POINTER(ctypes.c_void_p))

    def cuGraphExecKernelNodeSetParams_v2(self, executable: Any, node: Any, kernel: Any) -> None:
        assert executable.value == 7
        made: Kernel = kernel._obj
        self.set[node.value] = [
            ctypes.string_at(made.parameters[i], len(old))
            for i, old in enumerate(self.nodes[node.value][1])
        ]


def word(value: int) -> bytes:
    return struct.pack("<Q", value)


def find(graph: Graph) -> Addresses | None:
    return Parameters(graph, 1).find(AT, SIZE)  # type: ignore[arg-type]


def test_every_kernel_that_reads_it_is_told_and_nothing_else_changes() -> None:
    number = struct.pack("<i", 42)
    reads, other = [word(5), word(AT), number], [word(AT + SIZE), number]
    graph = Graph((KERNEL, reads), (KERNEL, other), (EMPTY, []), (KERNEL, [word(AT), word(AT)]))
    found = find(graph)
    assert found is not None
    assert len(found) == 2
    found.point(7, AT)
    assert graph.set == {}
    found.point(7, 0xABCD00)
    moved = word(0xABCD00)
    assert graph.set == {100: [word(5), moved, number], 103: [moved, moved]}
    found.point(7, AT)
    assert graph.set == {100: reads, 103: [word(AT), word(AT)]}


@pytest.mark.parametrize(
    "node",
    [
        (KERNEL, [word(AT + 16)]),  # an address inside, computed before
        (KERNEL, [word(AT) + bytes(120)]),  # a description of the tensor
        (KERNEL, [bytes(8) + word(AT + 64)]),
        (MEMCPY, []),
        (MEMSET, [word(AT + 8)]),
    ],
    ids=["inside", "described", "in a structure", "copied", "set"],
)
def test_what_may_use_it_otherwise_is_left_alone(node: tuple[int, list[bytes]]) -> None:
    assert find(Graph((KERNEL, [word(AT)]), node)) is None


def test_other_memory_may_be_set_and_nobody_may_read() -> None:
    assert find(Graph((KERNEL, [word(AT)]), (MEMSET, [word(AT - 8)]))) is not None
    assert find(Graph((KERNEL, [word(3)]))) is None


def test_a_kernel_that_reads_two_is_told_both() -> None:
    other = AT + 2 * SIZE
    graph = Graph((KERNEL, [word(AT), word(other), word(7)]))
    parameters = Parameters(graph, 1)  # type: ignore[arg-type]
    first, second = parameters.find(AT, SIZE), parameters.find(other, SIZE)
    assert first is not None
    assert second is not None
    first.point(7, 0xAAAA00)
    second.point(7, 0xBBBB00)
    assert graph.set == {100: [word(0xAAAA00), word(0xBBBB00), word(7)]}
    first.point(7, AT)
    assert graph.set == {100: [word(AT), word(0xBBBB00), word(7)]}
