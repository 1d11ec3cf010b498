"""Writing a graph, shared by capture and the ONNX reader: unique names, inferred shapes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from tessella.core.dtype import dtype_name
from tessella.core.errors import CompileError
from tessella.core.spec import TensorSpec
from tessella.graph import infer
from tessella.graph.attributes import is_attribute
from tessella.graph.graph import Dim, Graph, Node, Shape, Value
from tessella.graph.value import fixed
from tessella.operations.operation import Operation
from tessella.operations.table import operation
from tessella.operations.torch_operators.operators import refusal
from tessella.operations.user_operators import named

# A folded constant may be larger than what it is made of, up to this many elements.
_FOLD_ELEMENTS = 1 << 20

_NO_SHAPE = (
    "a plan's shapes are fixed: keep all places, and a mask of those that count; or compile the "
    "network up to here"
)
# what to do where torch's operator may not run
_INSTEAD = {
    "aten::histc": "count classes with torch.nn.functional.one_hot(ids, n).sum(0)",
    "aten::bincount": "count classes with torch.nn.functional.one_hot(ids, n).sum(0)",
    "aten::nonzero": _NO_SHAPE,
    "aten::masked_select": _NO_SHAPE,
    "aten::_unique2": _NO_SHAPE,
    "torchvision::nms": "use torch.ops.tessella.nms(boxes[None], scores[None, None], "
    "iou_threshold=0.5, score_threshold=None, most=100)[0, 0], which tells 100 places, −1 behind "
    "the last; or compile the network up to its boxes and scores, and run torchvision.ops.nms on "
    "what the plan answers",
}


class Builder:
    """A graph that grows node by node.

    Args:
        reserved: names that are kept for the graph's inputs and outputs.
        fold: compute at once what depends on constants alone.
    """

    def __init__(self, name: str, reserved: Sequence[str] = (), *, fold: bool = False) -> None:
        self.graph = Graph(name)
        self.layer = ""
        self._fold = fold
        self._taken = set(reserved)
        self._counts: dict[str, int] = {}  # how often a name like this one was asked for

    def fresh(self, like: str) -> str:
        """A name like ``like`` that nothing else has, taken from now on."""
        name, count = like, self._counts.get(like, 0)
        while name in self._taken:
            count += 1
            name = f"{like}.{count}"
        self._counts[like] = count
        self._taken.add(name)
        return name

    def input(self, spec: TensorSpec, *, dynamic: bool) -> Value:
        """A graph input; dimension 0 is the batch if ``dynamic``."""
        shape: Shape = ()
        if spec.shape:
            shape = (Dim() if dynamic else spec.batch.opt, *spec.at(1)[1:])
        value = Value(spec.name, spec.dtype, shape)
        self.graph.inputs.append(value)
        return value

    def constant(self, name: str, tensor: torch.Tensor) -> Value:
        """A constant; the name is changed if it is taken."""
        tensor = tensor.detach().cpu().contiguous()
        dtype = dtype_name(tensor.dtype)
        value = Value(self.fresh(name), dtype, tuple(tensor.shape))
        self.graph.constants[value] = tensor
        return value

    def node(
        self,
        op: str,
        inputs: Sequence[Value | None],
        *,
        name: str | None = None,
        **attrs: Any,
    ) -> tuple[Value, ...]:
        """Append an operation and return its outputs, with the shapes that its reference gives.

        Inputs that are left out at the end may be missing, and ``activation`` where it is None.
        """
        row = operation(op)
        if not row.variadic:
            inputs = (*inputs, *[None] * (len(row.inputs) - len(inputs)))
        attrs = {a: freeze(attrs.get(a)) for a in row.attributes}
        kinds = infer.outputs(op, inputs, attrs)
        like = name or op
        names = [like] if len(kinds) == 1 else [f"{like}.{i}" for i in range(len(kinds))]
        a_weight = op == "dequantize" and len(kinds[0][1]) > 1  # quantized, as a layer reads it
        if self._fold and not a_weight and self._foldable(inputs, kinds, attrs):
            self._before_folding(row, inputs, kinds, attrs)
            tensors = [self.graph.constant(v) for v in inputs]
            made = row.call(tensors, attrs)
            return tuple(self.constant(n, t) for n, t in zip(names, made, strict=True))
        outputs = tuple(
            Value(self.fresh(n), dtype, shape)
            for n, (dtype, shape) in zip(names, kinds, strict=True)
        )
        self.graph.nodes.append(Node(op, tuple(inputs), outputs, attrs, self.layer))
        return outputs

    def one(
        self, op: str, inputs: Sequence[Value | None], *, name: str | None = None, **attrs: Any
    ) -> Value:
        """``node`` for an operation with one output."""
        (output,) = self.node(op, inputs, name=name, **attrs)
        return output

    def _foldable(
        self,
        inputs: Sequence[Value | None],
        kinds: Sequence[tuple[str, Shape]],
        attrs: Mapping[str, Any],
    ) -> bool:
        if any(v is not None and v not in self.graph.constants for v in inputs):
            return False
        if infer.follows_batch(inputs, attrs):
            return False
        read = sum(self.graph.constants[v].numel() for v in inputs if v is not None)
        made = sum(math.prod(map(fixed, shape)) for _, shape in kinds)
        return made <= max(_FOLD_ELEMENTS, read)

    def _before_folding(
        self,
        row: Operation,
        inputs: Sequence[Value | None],
        kinds: Sequence[tuple[str, Shape]],
        attrs: Mapping[str, Any],
    ) -> None:
        """Called before a constant is computed: a builder with a budget refuses here."""

    def fallback(
        self, target: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, name: str = ""
    ) -> tuple[Value, ...]:
        """Append torch's operator ``target`` (``aten::roll``); tensors in its arguments are values.

        Raises:
            CompileError: it may not run as a fallback.
        """
        if (reason := refusal(target)) is not None:
            raise CompileError(
                "the network uses an operator that cannot be part of a plan",
                seen=f"{reason} (in {self.layer or 'the network itself'})",
                fix=_INSTEAD.get(target.split(".")[0], "write this layer with other operators"),
            )
        tensors: list[Value] = []
        return self.node(
            "fallback",
            tensors,
            name=name or target.split("::")[1].split(".")[0],
            target=target,
            args=[_template(a, tensors) for a in args],
            kwargs={k: _template(a, tensors) for k, a in kwargs.items()},
        )

    def user(self, target: str, args: Sequence[Any]) -> tuple[Value, ...]:
        """Append the operator ``target`` of a user's own; tensors in its arguments are values.

        Raises:
            CompileError: it has no reference, so nothing could tell whether a plan is right.
        """
        if named(target).reference is None:
            raise CompileError(
                "an operator of your own has no reference, which a plan is checked against",
                seen=target,
                fix="give reference= where it is defined: the same in plain torch",
            )
        tensors: list[Value] = []
        templates = [_template(a, tensors) for a in args]
        name = target.split("::")[1]
        return self.node("user", tensors, name=name, target=target, args=templates)

    def finish(self, outputs: Sequence[Value], names: Sequence[str]) -> Graph:
        """The graph with its outputs named, without what they do not need."""
        if len(set(names)) != len(names) or {v.name for v in self.graph.inputs} & set(names):
            raise CompileError(
                "the outputs of a network need names of their own",
                seen=", ".join(names),
                fix="give each output another name, different from the inputs' names",
            )
        self._fold = False
        owned = set(self.graph.inputs) | set(self.graph.constants)
        for value, name in zip(outputs, names, strict=True):
            if value in owned:  # an input, a constant, or an output under another name
                self.layer = ""
                value = self.one("clone", [value])
            self.graph.rename(value, name)
            owned.add(value)
            self.graph.outputs.append(value)
        drop_unused(self.graph)
        return self.graph


def _template(arg: Any, tensors: list[Value]) -> Any:
    """An argument as JSON for ``torch_operators.arguments``; its tensors go to ``tensors``."""
    if isinstance(arg, Value):
        if arg not in tensors:
            tensors.append(arg)
        return {"input": tensors.index(arg)}
    if isinstance(arg, list | tuple):
        return tuple(_template(a, tensors) for a in arg)
    if isinstance(arg, float) and not math.isfinite(arg):
        return {"float": str(arg)}
    for kind in (torch.dtype, torch.memory_format, torch.layout):
        if isinstance(arg, kind):
            return {kind.__name__: dtype_name(arg)}
    if isinstance(arg, torch.device):
        return None  # a plan decides where it runs
    if is_attribute(arg):
        return arg
    raise CompileError(
        "an operator's argument cannot be written to a plan", seen=f"{arg!r} ({type(arg).__name__})"
    )


def drop_unused(graph: Graph) -> int:
    """Remove the nodes and constants that no output depends on; returns how many nodes went."""
    needed, before = set(graph.outputs), len(graph.nodes)
    for node in reversed(list(graph.nodes)):
        if needed.intersection(node.outputs):
            needed.update(v for v in node.inputs if v is not None)
        else:
            graph.nodes.remove(node)
    graph.constants = {v: t for v, t in graph.constants.items() if v in needed}
    return before - len(graph.nodes)


def drop_unread(graph: Graph, values: Iterable[Value | None]) -> None:
    """Remove the makers of values that nothing reads any more, and so on; constants stay."""
    waiting = list(values)
    while waiting:
        node = graph.producer(waiting.pop())
        if node is None or any(graph.users(v) or v in graph.outputs for v in node.outputs):
            continue
        graph.nodes.remove(node)
        waiting += node.inputs


def freeze(attr: Any) -> Any:
    """Lists as tuples, all the way down."""
    if isinstance(attr, list | tuple):
        return tuple(freeze(a) for a in attr)
    if isinstance(attr, Mapping):
        return {k: freeze(a) for k, a in attr.items()}
    return attr
