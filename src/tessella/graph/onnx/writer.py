"""A model that grows operator by operator: names, constants, and sizes that follow the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx
import torch
from onnx import TensorProto, helper

from tessella.core.dtype import dtype_name
from tessella.core.version import VERSION
from tessella.graph.graph import Dim, Graph, Node, Shape, Value
from tessella.graph.onnx import own
from tessella.graph.onnx.types import NUMBERS
from tessella.graph.value import fixed


class Writer:
    """A model that grows node by node. Tensors are named by strings, as in the file.

    Attributes:
        layer: what the operators that follow belong to.
        last: the first result of the last operator.
    """

    def __init__(self, graph: Graph, opset: int) -> None:
        self.graph = graph
        self.opset = opset
        self.layer = self.last = ""
        self._nodes: list[onnx.NodeProto] = []
        self._constants: list[TensorProto] = []
        self._taken = {v.name for v in graph.values()}
        self._numbers: dict[tuple[Any, ...], str] = {}
        self._batch: str | None = None
        self._told: list[tuple[Node, list[onnx.NodeProto]]] = []
        for value, tensor in graph.constants.items():
            self._constants.append(_tensor(value.name, tensor))

    def fresh(self, like: str) -> str:
        name, count = like, 0
        while name in self._taken:
            count += 1
            name = f"{like}.{count}"
        self._taken.add(name)
        return name

    def add(
        self, op: str, inputs: Sequence[str], *, out: str | Sequence[str] = "", **attrs: Any
    ) -> str:
        """Append an operator; ``out`` names its results, else one new name. Returns the first."""
        outputs = [out] if isinstance(out, str) else list(out)
        outputs = [name or self.fresh(f"{self.layer}.{op}") for name in outputs]
        kept = {name: value for name, value in attrs.items() if value is not None}
        self.last = outputs[0]
        name = self.fresh(f"{self.layer}/{op}")
        self._nodes.append(helper.make_node(op, list(inputs), outputs, name=name, **kept))
        return outputs[0]

    def told(self, node: Node, export: Callable[[Writer, Node], object]) -> None:
        """Append an operation by ``export``, and say which operators are it: see ``own``."""
        begin = len(self._nodes)
        export(self, node)
        self._told.append((node, self._nodes[begin:]))

    def constant(self, tensor: torch.Tensor) -> str:
        """The name of a constant; the same numbers are one constant."""
        key = (str(tensor.dtype), tuple(tensor.shape), _bytes(tensor))
        if key not in self._numbers:
            self._numbers[key] = self.fresh("constant")
            self._constants.append(_tensor(self._numbers[key], tensor))
        return self._numbers[key]

    def number(self, number: float, like: Value) -> str:
        """A number in the element type of ``like``."""
        return self.constant(torch.tensor(number, dtype=getattr(torch, like.dtype)))

    def ints(self, *numbers: int) -> str:
        return self.constant(torch.tensor(numbers, dtype=torch.int64))

    def sizes(self, shape: Shape) -> str:
        """A shape as a tensor of integers, worked out from the batch where it follows it."""
        if not any(isinstance(d, Dim) for d in shape):
            return self.ints(*map(fixed, shape))
        parts = [self._size(d) if isinstance(d, Dim) else self.ints(d) for d in shape]
        return parts[0] if len(parts) == 1 else self.add("Concat", parts, axis=0)

    def _size(self, dim: Dim) -> str:
        made = self._batch_size()
        if dim.factor != 1:
            made = self.add("Mul", [made, self.ints(dim.factor)])
        return self.add("Add", [made, self.ints(dim.offset)]) if dim.offset else made

    def _batch_size(self) -> str:
        """The batch, [1], from the first input that has it."""
        if self._batch is None:
            value, axis = next(
                (v, i) for v in self.graph.inputs for i, d in enumerate(v.shape) if d == Dim()
            )
            self._batch = self.add("Shape", [value.name], start=axis, end=axis + 1)
        return self._batch

    def finish(self) -> onnx.ModelProto:
        read = {name for node in self._nodes for name in node.input}
        graph = helper.make_graph(
            self._nodes,
            self.graph.name or "network",
            [_info(v) for v in self.graph.inputs],
            [_info(v) for v in self.graph.outputs],
            [c for c in self._constants if c.name in read],
        )
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", self.opset)],
            ir_version=9 if self.opset < 21 else 10,  # the oldest that has this opset's types
            producer_name="tessella",
            producer_version=VERSION,
        )
        every = (own.said(node, made, self._constants) for node, made in self._told)
        own.add_operations(model, tuple(every))
        return model


def _info(value: Value) -> onnx.ValueInfoProto:
    shape = [str(d) if isinstance(d, Dim) else d for d in value.shape]
    return helper.make_tensor_value_info(value.name, NUMBERS[value.dtype], shape)


def _tensor(name: str, tensor: torch.Tensor) -> TensorProto:
    number = NUMBERS[dtype_name(tensor.dtype)]
    return helper.make_tensor(name, number, tuple(tensor.shape), _bytes(tensor), raw=True)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
