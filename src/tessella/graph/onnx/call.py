"""One ONNX node as its translation sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tessella.core.errors import CompileError
from tessella.graph.build import Builder
from tessella.graph.graph import Dim, Value

# What shapes are computed with: a small array of objects, each an int or a Dim.
Sizes = np.ndarray[Any, np.dtype[np.object_]]
Result = Value | Sizes | Sequence[Value | Sizes]


@dataclass(frozen=True, kw_only=True)
class Call:
    """A node: its operator, its attributes, and what its inputs have become.

    Attributes:
        inputs: a ``Value``, or ``Sizes`` where a shape that follows the batch is computed with;
            None where an optional input is left out.
        outputs: the names of its outputs, empty where one is left out.
        opset: the version of ONNX's operators.
    """

    op: str
    name: str
    attrs: dict[str, Any]
    inputs: tuple[Value | Sizes | None, ...]
    outputs: tuple[str, ...]
    opset: int
    build: Builder

    def emit(self, op: str, *inputs: Value | None, **attrs: Any) -> Value:
        """Append an operation of ours with one output, under this node's name."""
        return self.build.one(op, inputs, name=self.outputs[0], **attrs)

    def aten(self, target: str, *args: Any, **kwargs: Any) -> Value:
        """Append torch's operator ``target`` as a fallback with one output."""
        (made,) = self.build.fallback(f"aten::{target}", args, kwargs, name=self.outputs[0])
        return made

    def has(self, index: int) -> bool:
        return index < len(self.inputs) and self.inputs[index] is not None

    def value(self, index: int) -> Value:
        """The ``index``-th input, which must be a tensor."""
        given = self.inputs[index]
        if isinstance(given, np.ndarray):
            if any(isinstance(d, Dim) for d in given.flat):
                raise self.wrong("the batch size is used as a number in a tensor")
            return self.build.constant(self.outputs[0], torch.tensor(given.astype(np.int64)))
        if given is None:
            raise self.wrong(f"input {index} is missing")
        return given

    def optional(self, index: int) -> Value | None:
        return self.value(index) if self.has(index) else None

    def constant(self, index: int) -> torch.Tensor | None:
        """The ``index``-th input if it is a constant, None if it is computed or left out."""
        given = self.inputs[index] if self.has(index) else None
        return self.build.graph.constants.get(given) if isinstance(given, Value) else None

    def sizes(self, index: int) -> Sizes:
        """The ``index``-th input as integers that are known now, up to the batch."""
        given = self.inputs[index]
        if isinstance(given, np.ndarray):
            return given
        tensor = self.constant(index)
        if tensor is None:
            raise self.wrong(f"input {index} must be a constant", seen="it is computed from data")
        return tensor.numpy().astype(object)

    def ints(self, index: int, attr: str, default: Any = None) -> tuple[Any, ...] | None:
        """Integers (or ``Dim``), an input in new versions and an attribute in old ones."""
        if self.has(index):
            return tuple(self.sizes(index).flat)
        return tuple(self.attrs[attr]) if attr in self.attrs else default

    def number(self, index: int, attr: str, default: Any = None) -> Any:
        """One number, an input in new versions and an attribute in old ones."""
        if not self.has(index):
            return self.attrs.get(attr, default)
        tensor = self.constant(index)
        if tensor is None or tensor.numel() != 1:
            raise self.wrong(f"input {index} must be one constant number")
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
        return axis % max(rank, 1)

    def only_first_output(self) -> None:
        if any(self.outputs[1:]):
            raise self.wrong("only its first output is known", seen=", ".join(self.outputs))

    def wrong(self, what: str, *, seen: object = None) -> CompileError:
        where = f"{self.op} {self.name or self.outputs[0]!r}"
        return CompileError(f"the ONNX node {where} cannot be read: {what}", seen=seen)


Translator = Callable[[Call], Result]


def table(*groups: tuple[str, Translator]) -> dict[str, Translator]:
    """Operator names, several to a string, and what translates them."""
    return {name: function for names, function in groups for name in names.split()}
