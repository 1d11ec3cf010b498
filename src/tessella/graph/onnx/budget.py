"""What reading an ONNX file may cost: a file of a kilobyte can describe any amount of work.

Every bound of the reader stands here. They are far above what networks need, and far below what
hurts: whatever a file describes, it is read or refused in seconds, within about a gigabyte more
than the file holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import onnx
import torch

from tessella.core.errors import CompileError
from tessella.graph.build import Builder
from tessella.graph.graph import Shape, Value
from tessella.graph.value import shape_at
from tessella.operations.operation import Operation

MOST_NODES = 1 << 15  # of ONNX, with functions in their places and loops unrolled; one a turn, too
MOST_OPERATIONS = 1 << 16  # of ours that are made of them, with those that are computed at once
MOST_TURNS = 512  # a network's loops run over layers or steps
MOST_LEVELS = 32  # of functions that call functions
MOST_BYTES = 1 << 30  # of the file, once its functions are in their places
MOST_ELEMENTS = 1 << 24  # of one constant that is computed; more than any network counts
MOST_SIZES = 1 << 10  # of an array that shapes are computed with
MOST_AXES = 64  # torch has no more
MOST_ROWS = 1 << 16  # of a matrix that is made row by row
LONGEST_TRANSFORM = 8192  # its matrix has the square of it
LARGEST = 1 << 40  # elements of a tensor at batch 1
_ALL_ELEMENTS = 1 << 27  # of all constants that are computed, and 4 for each that the file holds
_ALL_WORK = 1 << 31  # multiplications for constants, and 64 for each element that the file holds
_EXTERNAL_TIMES = 4  # that a byte of external data may be read: tensors may share it


class Budget:
    """The operations, elements and work that the rest of one file may still take.

    Args:
        elements: of all tensors that the file holds.
    """

    def __init__(self, elements: int) -> None:
        self._nodes = MOST_NODES
        self._operations = MOST_OPERATIONS
        self._elements = _ALL_ELEMENTS + 4 * elements
        self._work = _ALL_WORK + 64 * elements

    def node(self) -> None:
        """One more node, or one more turn of a loop."""
        self._nodes -= 1
        if self._nodes < 0:
            raise _refused("the model's loops make too many operations", MOST_NODES)

    def operation(self) -> None:
        """One more operation of ours."""
        self._operations -= 1
        if self._operations < 0:
            raise _refused("the model makes too many operations", MOST_OPERATIONS)

    def constant(self, elements: int) -> None:
        """One more constant."""
        self._elements -= elements
        if self._elements < 0:
            raise _refused("the model's constants make too many numbers", _ALL_ELEMENTS)

    def work(self, amount: int) -> None:
        """Elements to be read, written or multiplied for a constant."""
        self._work -= amount
        if self._work < 0:
            raise _refused("the model's constants take too long to compute", _ALL_WORK)


def _refused(wrong: str, most: int) -> CompileError:
    return CompileError(
        wrong,
        seen=f"more than {most:,}",
        fix="export the model with its loops and constants computed",
    )


class BudgetedBuilder(Builder):
    """A graph that grows within a budget."""

    def __init__(self, name: str, reserved: Sequence[str], budget: Budget) -> None:
        super().__init__(name, reserved, fold=True)
        self._budget = budget

    def constant(self, name: str, tensor: torch.Tensor) -> Value:
        self._budget.constant(tensor.numel())
        return super().constant(name, tensor)

    def node(
        self,
        op: str,
        inputs: Sequence[Value | None],
        *,
        name: str | None = None,
        **attrs: Any,
    ) -> tuple[Value, ...]:
        self._budget.operation()
        made = super().node(op, inputs, name=name, **attrs)
        for value in made:
            check_size(value.name, value.shape)
        return made

    def _before_folding(
        self,
        row: Operation,
        inputs: Sequence[Value | None],
        kinds: Sequence[tuple[str, Shape]],
        attrs: Mapping[str, Any],
    ) -> None:
        shapes = [None if v is None else shape_at(v.shape, 1) for v in inputs]
        made = [shape_at(shape, 1) for _, shape in kinds]
        self._budget.work(_cost(row, shapes, made, attrs))


def check_size(name: str, shape: Shape) -> None:
    """Refuse a tensor that no memory could hold."""
    if len(shape) > MOST_AXES or math.prod(shape_at(shape, 1)) > LARGEST:
        raise CompileError(
            "the model has a tensor that no memory could hold",
            seen=f"{name[:80]!r}: {' × '.join(map(str, shape[:8]))}",
            fix="export the model with the sizes that it is used with",
        )


def _cost(
    row: Operation,
    shapes: Sequence[tuple[int, ...] | None],
    made: Sequence[tuple[int, ...]],
    attrs: Mapping[str, Any],
) -> int:
    """About how many elements an operation reads, writes and multiplies."""
    read = sum(math.prod(s) for s in shapes if s is not None)
    written = sum(map(math.prod, made))
    products = 0
    if row.flops is not None:
        named = dict(zip(row.operands, shapes))
        present = {name: shape for name, shape in named.items() if shape is not None}
        products = row.flops(present, made[0], attrs)
    elif row.name == "fallback":
        if "pool" in attrs["target"]:
            products = written * _window(attrs["args"][1])
        elif "linalg" in attrs["target"]:
            products = read * math.isqrt(read)
    else:
        products = written * _window(attrs.get("kernel_size") or attrs.get("size") or 1)
    return read + written + products


def _window(sizes: Any) -> int:
    """The elements of a window, whose sides may be one number."""
    return math.prod(sizes) if isinstance(sizes, tuple) else int(sizes)


# --- before functions are put into their places ---------------------------------------------------

_Key = tuple[str, str, str]  # domain, name and overload of a function


def check_functions(model: onnx.ModelProto) -> None:
    """Refuse functions that call themselves, or whose calls multiply beyond what is read."""
    functions = {_key(f.domain, f.name, f.overload): f for f in model.functions}
    known: dict[_Key, tuple[int, int]] = {}
    open_: set[_Key] = set()

    def cost(nodes: Sequence[onnx.NodeProto], level: int) -> tuple[int, int]:
        """Nodes, and their bytes, when each call is replaced by its function."""
        if level > MOST_LEVELS:
            raise _refused("the model's functions call each other too deeply", MOST_LEVELS)
        count = size = 0
        for node in nodes:
            key = _key(node.domain, node.op_type, node.overload)
            more = called(key, level) if key in functions else (1, node.ByteSize())
            count, size = count + more[0], size + more[1]
            for attribute in node.attribute:
                for graph in (attribute.g, *attribute.graphs):
                    more = cost(graph.node, level + 1)
                    count, size = count + more[0], size + more[1]
        if count > MOST_NODES or size > MOST_BYTES:
            raise _refused("the model's functions make too many operations", MOST_NODES)
        return count, size

    def called(key: _Key, level: int) -> tuple[int, int]:
        if key in open_:
            raise CompileError(
                "a function of the model calls itself",
                seen=key[1][:80],
                fix="export the model without local functions",
            )
        if key not in known:
            open_.add(key)
            known[key] = cost(functions[key].node, level + 1)
            open_.discard(key)
        return known[key]

    cost(model.graph.node, 0)
    for key in functions:
        called(key, 0)


def _key(domain: str, name: str, overload: str) -> _Key:
    return ("" if domain == "ai.onnx" else domain, name, overload)


class External:
    """How much external data one model may read."""

    def __init__(self) -> None:
        self._files: dict[tuple[int, int], int] = {}  # sizes by device and inode
        self._read = 0

    def read(self, file: tuple[int, int], size: int, length: int) -> None:
        """``length`` more bytes of a file of ``size`` bytes."""
        self._files[file] = size
        self._read += length
        if self._read > _EXTERNAL_TIMES * sum(self._files.values()):
            raise CompileError(
                "the model's tensors name the same external data again and again",
                seen=f"{self._read:,} bytes of files that hold {sum(self._files.values()):,}",
                fix="save the model with each tensor's data once",
            )
