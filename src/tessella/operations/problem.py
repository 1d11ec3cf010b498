"""A problem: what a kernel is asked to do, apart from the numbers. The key of tuning."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import torch

from tessella.core.dtype import Math
from tessella.core.errors import KernelError, UsageError
from tessella.core.record import digest
from tessella.operations.epilogue import NUMBERS, TENSORS, Epilogue
from tessella.operations.named import NamedOperands
from tessella.operations.tensor_meta import TensorMeta


@dataclass(frozen=True, kw_only=True)
class Problem(NamedOperands[TensorMeta]):
    """One operation on concrete shapes.

    Attributes:
        op: the operation's name, for example ``conv2d``.
        inputs: in the operation's order; None where an optional one is left out.
        outputs: what comes out.
        attrs: the operation's attributes, JSON values.
        constant: positions of the inputs that are known when the plan is built (weights).
        in_place: positions of the inputs that lie in the output already: parts of a ``cat`` that
            were written where it wants them.
        dying: positions of inputs that nothing needs afterwards, so that a kernel may take their
            memory for its result.
        math: ``ieee`` or ``tf32``: how float32 products may be rounded.
    """

    op: str
    inputs: tuple[TensorMeta | None, ...]
    outputs: tuple[TensorMeta, ...]
    attrs: dict[str, Any] = field(default_factory=dict)
    constant: tuple[int, ...] = ()
    in_place: tuple[int, ...] = ()
    dying: tuple[int, ...] = ()
    math: Math = "ieee"

    def __post_init__(self) -> None:
        if self.math not in get_args(Math):
            raise UsageError(
                "float32 products are rounded in one of two ways",
                seen=self.math,
                fix=f"use math={' or '.join(get_args(Math))}",
            )

    def meta(self, position: int) -> TensorMeta | None:
        """An input of an operation that takes any number of them; None where it is left out."""
        return self.inputs[position] if position < len(self.inputs) else None

    @property
    def given(self) -> tuple[TensorMeta, ...]:
        """The inputs that are not left out."""
        return tuple(meta for meta in self.inputs if meta is not None)

    def is_constant(self, operand: str) -> bool:
        """Whether the operand's numbers are known when the plan is built."""
        return self.operation.position(operand) in self.constant

    def place_in_call(self, operand: str) -> int:
        """Where an operand stands among the tensors that a bound kernel is called with: those that
        are given and not constant.
        """
        given = self.operation.shapes(self.inputs)
        return [name for name in given if not self.is_constant(name)].index(operand)

    def is_dying(self, operand: str) -> bool:
        """Whether nothing needs the operand afterwards, so that a kernel may take its memory."""
        return self.operation.position(operand) in self.dying

    def attr(self, name: str) -> Any:
        """An attribute, or what the operation says it is where the problem does not."""
        return self.attrs.get(name, self.default(name))

    def default(self, name: str) -> Any:
        """What the operation says of an attribute that is left out; None where it says nothing."""
        return self.operation.defaults.get(name)

    @functools.cached_property
    def epilogue(self) -> Epilogue[TensorMeta]:
        """What is done to the product before it is stored; an empty one for other operations."""
        row = self.operation
        bias, residual, scale = (self.get(n) if n in row.operands else None for n in TENSORS)
        known = {*row.attributes, *row.defaults}
        numbers: dict[str, Any] = {n: self.attr(n) for n in NUMBERS if n in known}
        return Epilogue(bias=bias, residual=residual, scale=scale, **numbers)

    @property
    def constants(self) -> tuple[str, ...]:
        """The names of the operands whose numbers are known when the plan is built."""
        return tuple(self.operation.operands[position] for position in self.constant)

    @property
    def gamma(self) -> float | None:
        """The factor behind the activation as device code takes it: None where it is 1."""
        gamma = float(self.epilogue.gamma)
        return None if gamma == 1 else gamma

    @property
    def factors(self) -> tuple[float, float, float | None]:
        """Alpha, beta and gamma as device code takes them."""
        return float(self.epilogue.alpha), float(self.epilogue.beta), self.gamma

    @property
    def plain(self) -> str | None:
        """None if the product is only added to (bias, residual) and activated; else what more."""
        if not self.epilogue.is_plain:
            return "no scale, alpha, beta or gamma"
        if self["input"].dtype != self.output.dtype:
            return f"makes {self['input'].dtype}, not {self.output.dtype}"
        return None

    @functools.cached_property
    def misfit(self) -> str | None:
        """Why these operands are not those of one operation, or None."""
        return self.operation.misfit(self.inputs, self.outputs, self.attrs)

    @property
    def flops(self) -> int | None:
        """Floating-point operations (a multiply-add is two) of products; None for others."""
        work = self.operation.flops
        shapes = self.operation.shapes(self.inputs)
        return None if work is None else work(shapes, self.outputs[0].shape, self.attrs)

    @property
    def nbytes(self) -> int:
        """Bytes of all inputs and outputs, each counted once: the least that must be moved."""
        return sum(t.nbytes for t in (*self.inputs, *self.outputs) if t is not None)

    def require_constants(self, constants: Mapping[int, torch.Tensor]) -> None:
        """Refuse constants that are not what the problem says: machine code reads by addresses.

        Raises:
            KernelError: one is missing, or of another shape or element type.
        """
        for position in self.constant:
            meta, given = self.meta(position), constants.get(position)
            if given is None or meta is None or not meta.matches(given):
                seen = "none" if given is None else f"{given.dtype} {tuple(given.shape)}"
                raise KernelError(
                    f"constant {position} of {self.op} is not what the step says",
                    seen=f"{seen}, not {meta}",
                    fix="build the plan again",
                )

    def operands(
        self, constants: Mapping[int, torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """All operands by position, joined from the constants and from the other inputs in their
        order.
        """
        rest = iter(inputs)
        return [
            constants[i] if i in constants else None if meta is None else next(rest)
            for i, meta in enumerate(self.inputs)
        ]

    def tensors(
        self, constants: Mapping[int, torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """``operands`` but for those that are left out."""
        return [t for t in self.operands(constants, inputs) if t is not None]

    def product_operands(
        self, constants: Mapping[int, torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, Epilogue[torch.Tensor]]:
        """The two factors and the epilogue of a convolution's or a matrix product's call.

        All their rows have the input, the weight (or the other matrix), bias, residual and scale in
        this order.
        """
        x, weight, bias, residual, scale = (*self.operands(constants, inputs), None, None, None)[:5]
        assert x is not None
        assert weight is not None
        return x, weight, self.epilogue.of(bias, residual, scale)

    @property
    def output(self) -> TensorMeta:
        """The only output."""
        (meta,) = self.outputs
        return meta

    @property
    def output_is_empty(self) -> bool:
        """Nothing to compute."""
        return 0 in self.output.shape

    @functools.cached_property
    def key(self) -> str:
        """Equal keys, equal problems: what the timing cache looks up."""
        return digest(self)
