"""A node of an ONNX file, with the values that its inputs have in our graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import torch

from tessella.core.errors import CompileError, UnboundInput
from tessella.graph.build import Builder
from tessella.graph.graph import Dim, Graph, Value
from tessella.graph.onnx.budget import MOST_ELEMENTS, MOST_SIZES

# What shapes are computed with: a small array of objects, each an int or a Dim.
Sizes = np.ndarray[Any, np.dtype[np.object_]]
Result = Value | Sizes | Sequence[Value | Sizes]

# What changes no result: hints for training, for the order of indices nobody reads, and for types
# that are refused by themselves.
_MEANS_NOTHING = frozenset(
    {"kernel_shape", "storage_order", "momentum", "ratio", "seed", "spatial", "stash_type"}
    | {"saturate", "round_mode", "consumed_inputs", "is_test", "layout_hint"}
)


class Attributes(Mapping[str, Any]):
    """A node's attributes, which remember what was read: one that nobody reads is not obeyed."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = dict(given)
        self._read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        return self._given[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)

    def unread(self) -> dict[str, Any]:
        ignored = self._read | _MEANS_NOTHING
        return {name: value for name, value in self._given.items() if name not in ignored}


@dataclass(frozen=True, kw_only=True)
class Call:
    """A node: its operator, its attributes, and what its inputs have become.

    Attributes:
        inputs: a ``Value``, or ``Sizes`` where a shape that follows the batch is computed with;
            None where an optional input is left out.
        inner: appends a graph that an attribute holds, and returns its outputs.
        read: positions of the inputs that the translation has looked at.
        outputs: the names of its outputs, empty where one is left out.
        opset: the version of ONNX's operators.
    """

    op: str
    name: str
    attrs: Attributes
    inputs: tuple[Value | Sizes | None, ...]
    outputs: tuple[str, ...]
    opset: int
    build: Builder
    inner: Callable[[onnx.GraphProto, Sequence[Value | Sizes]], list[Value | Sizes]]
    read: set[int] = field(default_factory=set)

    def emit(self, op: str, *inputs: Value | None, **attrs: Any) -> Value:
        """Append an operation of ours with one output, under this node's name."""
        return self.build.one(op, inputs, name=self.outputs[0], **attrs)

    def aten(self, target: str, *args: Any, **kwargs: Any) -> Value:
        """Append torch's operator ``target`` as a fallback with one output."""
        (made,) = self.build.fallback(f"aten::{target}", args, kwargs, name=self.outputs[0])
        return made

    def atens(self, target: str, *args: Any, **kwargs: Any) -> tuple[Value, ...]:
        """Append torch's operator ``target`` as a fallback with several outputs."""
        return self.build.fallback(f"aten::{target}", args, kwargs, name=self.outputs[0])

    def tensor(self, tensor: torch.Tensor) -> Value:
        """A constant of the graph."""
        return self.build.constant(self.outputs[0], tensor)

    def modest(self, *sizes: int) -> None:
        """Refuse to make a constant of these sizes if a small file could ask for much memory."""
        if min(sizes, default=0) < 0 or math.prod(sizes) > MOST_ELEMENTS:
            raise self.wrong("it makes too many numbers", seen=" × ".join(map(str, sizes)))

    def has(self, index: int) -> bool:
        return index < len(self.inputs) and self.inputs[index] is not None

    def given(self, index: int) -> Value | Sizes:
        """The ``index``-th input, whatever it is."""
        found = self._given(index)
        if found is None:
            raise self.wrong(f"input {index} is missing")
        return found

    def value(self, index: int) -> Value:
        """The ``index``-th input, which must be a tensor."""
        given = self.given(index)
        if isinstance(given, np.ndarray):
            if any(isinstance(d, Dim) for d in given.flat):
                raise self.wrong(
                    "the batch size is used as a number in a tensor",
                    fix="compile it for one batch size (batch=8), or export it without that: "
                    "samples may be run in parts, so none knows its number",
                )
            return self.tensor(torch.tensor(given.astype(np.int64)))
        return given

    def values(self) -> list[Value]:
        """All inputs, which must be tensors."""
        return [self.value(i) for i in range(len(self.inputs))]

    def optional(self, index: int) -> Value | None:
        return self.value(index) if self.has(index) else None

    def constant(self, index: int) -> torch.Tensor | None:
        """The ``index``-th input if it is a constant, None if it is computed or left out."""
        given = self._given(index)
        return self.build.graph.constants.get(given) if isinstance(given, Value) else None

    def known(self, index: int) -> torch.Tensor:
        """The ``index``-th input, which must be a constant.

        Raises:
            UnboundInput: it is an input of the model, or computed from one.
            CompileError: it is computed otherwise, or missing.
        """
        tensor = self.constant(index)
        if tensor is not None:
            return tensor
        value = self.value(index)
        behind = _inputs_behind(self.build.graph, value)
        if value in self.build.graph.constants or not behind:
            return self.build.graph.constants[value]
        raise UnboundInput(
            f"the ONNX node {self.op} {self.name or self.outputs[0]!r} cannot be read: its "
            f"input {index} must be known when the plan is made",
            input=behind[0],
            seen=f"it comes from the model's input {behind[0]!r}",
            fix="make it a constant of the model, or give its value: "
            f"ts.compile(tessella.graph.onnx.read(path, bound={{{behind[0]!r}: tensor}}))",
        )

    def sizes(self, index: int) -> Sizes:
        """The ``index``-th input as integers that are known now, up to the batch."""
        given = self._given(index)
        if isinstance(given, np.ndarray):
            return given
        tensor = self.known(index)
        if tensor.numel() > MOST_SIZES:
            raise self.wrong(f"input {index} has too many numbers for a shape", seen=tensor.numel())
        return tensor.numpy().astype(object)

    def _given(self, index: int) -> Value | Sizes | None:
        self.read.add(index)
        return self.inputs[index] if index < len(self.inputs) else None

    def ints(self, index: int, attr: str, default: Any = None) -> tuple[Any, ...] | None:
        """Integers (or ``Dim``), an input in new versions and an attribute in old ones."""
        if self.has(index):
            return tuple(self.sizes(index).flat)
        return tuple(self.attrs[attr]) if attr in self.attrs else default

    def number(self, index: int, attr: str, default: Any = None) -> Any:
        """One number, an input in new versions and an attribute in old ones."""
        if not self.has(index):
            return self.attrs.get(attr, default)
        tensor = self.known(index)
        if tensor.numel() != 1:
            raise self.wrong(f"input {index} must be one number", seen=list(tensor.shape))
        return tensor.item()

    def axis(self, default: int = 0) -> int:
        """The attribute ``axis`` of the first input, counted from 0."""
        return self.from_front(self.attrs.get("axis", default), len(self.value(0).shape))

    def axes(self, index: int) -> tuple[int, ...] | None:
        """The axes that are an input or an attribute, counted from 0, in their order."""
        given = self.ints(index, "axes")
        if not given:
            return None
        return tuple(self.from_front(a, len(self.value(0).shape)) for a in given)

    def from_front(self, axis: Any, rank: int) -> int:
        """An axis that may be negative, counted from 0; refuses one that does not exist."""
        if not -rank <= axis < max(rank, 1):
            raise self.wrong(f"there is no axis {axis}", seen=f"{rank} axes")
        return int(axis % max(rank, 1))

    def wants(self, index: int) -> bool:
        """Whether the model reads the ``index``-th output."""
        return index < len(self.outputs) and bool(self.outputs[index])

    def check_all_read(self, made: int) -> None:
        """Refuse the node if something of it was not looked at, or if it has more outputs."""
        if unread := self.attrs.unread():
            shown = ", ".join(f"{name}={value}" for name, value in unread.items())
            raise self.wrong("an attribute that is not known", seen=shown)
        if ignored := [i for i in range(len(self.inputs)) if self.has(i) and i not in self.read]:
            raise self.wrong(f"its input {ignored[0]} is not known")
        if any(self.outputs[made:]):
            known = "output is" if made == 1 else f"{made} outputs are"
            raise self.wrong(f"only its first {known} known", seen=", ".join(self.outputs))

    def wrong(self, what: str, *, seen: object = None, fix: str | None = None) -> CompileError:
        where = f"{self.op} {(self.name or self.outputs[0])[:80]!r}"
        return CompileError(f"the ONNX node {where} cannot be read: {what}", seen=seen, fix=fix)


def _inputs_behind(graph: Graph, value: Value) -> list[str]:
    """The graph's inputs that a value is computed from."""
    inputs = set(graph.inputs)
    found: dict[Value, None] = {}
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if value not in found:
            found[value] = None
            maker = graph.producer(value)
            waiting += [] if maker is None else [v for v in maker.inputs if v is not None]
    return [v.name for v in found if v in inputs]


Translator = Callable[[Call], Result]


def table(*groups: tuple[str, Translator]) -> dict[str, Translator]:
    """Operator names, several to a string, and what translates them."""
    return {name: function for names, function in groups for name in names.split()}
