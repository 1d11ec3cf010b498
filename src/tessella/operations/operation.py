"""What an operation is: the row that graph, compiler, plans and kernels read.

A new operation is a row and a function: a plain torch function that says what the operation means,
and the row beside it, in a file of ``operations/reference``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Protocol

import torch

from tessella.operations import epilogue
from tessella.operations.epilogue import Epilogue
from tessella.operations.user_operators import as_tuple

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]  # by operand; one that is left out is not there
Attributes = Mapping[str, Any]
Rule = Callable[[Shapes, Shape, Attributes], str | None]
Work = Callable[[Shapes, Shape, Attributes], int]


class HasShape(Protocol):
    """A description of a tensor."""

    @property
    def shape(self) -> Shape: ...


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation. Its names are torch.nn.functional's.

    Attributes:
        name: what graphs and plans call it.
        reference: a plain torch function, called ``reference(*inputs, **attributes)``, with None
            for an input that is left out. It is right for every floating element type, and on the
            meta device, where it gives shapes only.
        inputs: names of its tensors, in order. A node of a graph has exactly as many, None where
            one is left out.
        optional: those of the inputs that may be left out.
        late: names of tensors that may follow; a node without them is shorter.
        attributes: names of attributes. A node has exactly these, and any of ``defaults``.
        defaults: attributes that may be left out, with what they are then.
        hints: attributes that tell something about the constants or the inputs, or how exact sums
            must be. They change no exact result; the reference does not take them.
        aten: torch's overloads whose arguments of the same names say the same.
        epilogues: prefixes of the names of an epilogue's tensors and numbers: ``""`` for ``bias``
            and ``activation``, ``"next_"`` for ``next_bias`` … The reference takes each as one
            ``Epilogue``, the argument ``epilogue`` or ``next_epilogue``.
        rule: why shapes of operands and of the first result do not belong together, or None.
            Plans and calls come from strangers, and torch's rules on the meta device check no
            length of a bias, which a kernel reads by its channels.
        flops: floating-point operations of its products from the same arguments; a multiply-add is
            two.
        pair: the two operations that it does in one, where that is faster.
        variadic: takes any number of tensors instead of ``inputs``.
        elementwise: each element of the result depends on one element of each input (broadcast).
        view: only reinterprets shape or strides; the elements need not move.
        many: makes one or more outputs, by its attributes.
    """

    name: str
    reference: Callable[..., Any]
    inputs: tuple[str, ...]
    optional: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    hints: tuple[str, ...] = ()
    aten: tuple[str, ...] = ()
    epilogues: tuple[str, ...] = ()
    rule: Rule | None = None
    flops: Work | None = None
    pair: tuple[str, str] | None = None
    variadic: bool = False
    elementwise: bool = False
    view: bool = False
    many: bool = False

    @property
    def operands(self) -> tuple[str, ...]:
        """The names of all tensors that it may take, in order; none where it takes any number."""
        return (*self.inputs, *self.late)

    @property
    def family(self) -> str:
        """The folder of its kernels: ``conv``, ``pointwise``, …"""
        return self.reference.__module__.rpartition(".")[2]

    def ordered(self, **operands: Any) -> tuple[Any, ...]:
        """Operands by name in the operation's order; None for those that are not given."""
        return tuple(operands.get(name) for name in self.operands)

    def positions(self, operands: Iterable[str]) -> tuple[int, ...]:
        return tuple(map(self.position, operands))

    def position(self, operand: str) -> int:
        """Where an operand stands among the inputs; raises ``KeyError`` if it has no such one."""
        try:
            return self.operands.index(operand)
        except ValueError:
            known = ", ".join(self.operands) or "operands without names"
            raise KeyError(f"{self.name} has no operand {operand!r}: it takes {known}") from None

    def call(
        self, inputs: Sequence[torch.Tensor | None], attributes: Attributes
    ) -> tuple[torch.Tensor, ...]:
        """What the operation means: its reference's results, one tensor an output."""
        given = {name: value for name, value in attributes.items() if name not in self.hints}
        if self.epilogues:
            inputs, given = self._with_epilogues(inputs, given)
        return as_tuple(self.reference(*inputs, **given))

    def _with_epilogues(
        self, inputs: Sequence[torch.Tensor | None], given: dict[str, Any]
    ) -> tuple[list[torch.Tensor | None], dict[str, Any]]:
        """Inputs and attributes of a call, with each epilogue as one argument."""
        tensors = dict(zip(self.operands, inputs, strict=False))
        if len(inputs) > len(self.operands):
            raise TypeError(f"{self.name} takes {', '.join(self.operands)}")
        for prefix in self.epilogues:
            bias, residual, scale = (tensors.pop(prefix + n, None) for n in epilogue.TENSORS)
            numbers = {n: given.pop(prefix + n) for n in epilogue.NUMBERS if prefix + n in given}
            given[f"{prefix}epilogue"] = Epilogue(
                bias=bias, residual=residual, scale=scale, **numbers
            )
        return list(tensors.values()), given

    def misfit(
        self, inputs: Sequence[HasShape | None], results: Sequence[HasShape], attrs: Attributes
    ) -> str | None:
        """Why these operands are not those of one operation, or None.

        Args:
            inputs: in the operation's order; None where one is left out.
            results: what the operation is said to make.
        """
        if unknown := sorted(set(attrs) - {*self.attributes, *self.defaults}):
            return f"{self.name} has no attribute {unknown[0]}"
        if self.variadic:
            return None
        if len(inputs) > len(self.operands):
            return f"{self.name} takes {', '.join(self.operands)}, not {len(inputs)} operands"
        shapes = self.shapes(inputs)
        if missing := [n for n in self.inputs if n not in shapes and n not in self.optional]:
            return f"{self.name} needs {', '.join(missing)}"
        return None if self.rule is None else self.rule(shapes, results[0].shape, attrs)

    def shapes(self, inputs: Sequence[HasShape | None]) -> dict[str, Shape]:
        """The shapes of operands by name, without those that are left out."""
        named = zip(self.operands, inputs, strict=False)
        return {name: tensor.shape for name, tensor in named if tensor is not None}


def row(
    reference: Callable[..., Any],
    inputs: str,
    attributes: str = "",
    *,
    name: str = "",
    aten: str = "",
    late: str = "",
    hints: str = "",
    **facts: Any,
) -> Operation:
    """A row in few words: an input that may be left out ends in ``?``.

    The operation's name is that of its reference, if none is given.
    """
    words = inputs.split()
    return Operation(
        name=name or reference.__name__,
        reference=reference,
        inputs=tuple(w.removesuffix("?") for w in words),
        optional=tuple(w.removesuffix("?") for w in words if w.endswith("?")),
        late=tuple(late.split()),
        attributes=tuple(attributes.split()),
        hints=tuple(hints.split()),
        aten=tuple(aten.split()),
        **facts,
    )


# What a rule is made of.


def differs(shapes: Shapes, name: str, right: Shape) -> str | None:
    """Why an operand has not exactly this shape, or None."""
    if name not in shapes or shapes[name] == right:
        return None
    return f"{name} has the shape {shown(shapes[name])}, not {shown(right)}"


def first_of(*found: str | None) -> str | None:
    """The first reason that is not None."""
    return next((reason for reason in found if reason is not None), None)


def broadcast(first: Sequence[int], *others: Sequence[int]) -> Shape | None:
    """The shape that shapes broadcast to, or None. (torch's own function imports sympy.)"""
    found = tuple(first)
    for other in others:
        pairs = list(zip_longest(reversed(found), reversed(other), fillvalue=1))
        if any(a != b and 1 not in (a, b) for a, b in pairs):
            return None
        found = tuple(b if a == 1 else a for a, b in reversed(pairs))
    return found


def vectors(shapes: Shapes, channels: int, *names: str) -> str | None:
    """Why one of these operands has not one number a channel, or None."""
    return first_of(*(differs(shapes, name, (channels,)) for name in names))


def shown(shape: Shape) -> str:
    """A shape in a sentence."""
    return "×".join(map(str, shape)) or "of one number"
