"""A user's operator as a candidate for an operation of ours: ``linear.skinny`` beside cuBLASLt."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, get_args

import torch
from torch import Tensor

from tessella.kernels.catalog import Call, Config, Kernel
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta


class Runs(Protocol):
    """The part of a user's operator that its row in the catalog calls."""

    signature: inspect.Signature
    dtypes: tuple[str, ...]

    def run(self, *args: Any, out: Any = None) -> Any: ...

    def empty(self, *args: Any) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class UserKernel(Kernel):
    """A row of the catalog that holds its code itself: it is its own kernel module.

    Attributes:
        operator: what runs.
        refuses: the user's own reasons to refuse a problem.
    """

    operator: Runs
    refuses: Callable[[Problem], str | None] | None = None
    gamma: bool = True  # ``fits`` refuses every attribute that the operator does not take

    def load(self) -> UserKernel:
        return self

    def outclassed(self, problem: Problem) -> str | None:
        return None

    def configs(self, problem: Problem) -> tuple[Config, ...]:
        return ({},)

    def workspace_bytes(self, problem: Problem, config: Config) -> int:
        return 0

    def fits(self, problem: Problem) -> str | None:
        """None, or why a problem is refused: it asks for something that the operator lacks."""
        tensors, numbers = _split(self.operator.signature)
        asked = [m for m in problem.inputs if m is not None]
        for position in range(len(tensors), len(problem.inputs)):
            if problem.meta(position) is not None:
                return f"takes {len(tensors)} tensors, not input {position}"
        for position, parameter in enumerate(tensors):
            if problem.meta(position) is None and not _is_optional(parameter):
                return f"needs its tensor {parameter.name!r}"
        taken = {p.name for p in numbers}
        for name, value in problem.attrs.items():
            if name not in (*taken, *problem.operation.hints) and value != problem.default(name):
                return f"does not take {name}={value!r}"
        if missing := [p.name for p in numbers if not (_usual(p) or _given(problem, p.name))]:
            return f"{problem.op} has no attribute {missing[0]!r}"
        floats = {m.dtype for m in (*asked, *problem.outputs) if _floats(m)}
        if other := sorted(floats - set(self.operator.dtypes)):
            return f"takes {', '.join(self.operator.dtypes)}, not {other[0]}"
        if len(problem.outputs) != 1:
            return f"makes one output, not {len(problem.outputs)}"
        return self._other_result(problem) or (self.refuses(problem) if self.refuses else None)

    def bind(self, problem: Problem, constants: Mapping[int, Tensor], **config: Any) -> Call:
        def call(*inputs: Tensor, out: Tensor) -> Tensor:
            arguments = self._arguments(problem, problem.operands(constants, inputs))
            made: Tensor = self.operator.run(*arguments, out=out)
            return made

        return call

    def _other_result(self, problem: Problem) -> str | None:
        """Why the operator's result would not be the problem's."""
        meta = torch.device("meta")
        operands = [None if m is None else m.empty(meta) for m in problem.inputs]
        made = self.operator.empty(*self._arguments(problem, operands))
        if not isinstance(made, Tensor) or not problem.output.matches(made):
            return f"its shape function does not give {problem.output}"
        return None

    def _arguments(self, problem: Problem, operands: list[Tensor | None]) -> tuple[Any, ...]:
        """The operator's arguments in order: tensors by position, attributes by name."""
        signature = self.operator.signature
        tensors, numbers = _split(signature)
        named = dict(zip((p.name for p in tensors), operands))
        named |= {p.name: problem.attr(p.name) for p in numbers if _given(problem, p.name)}
        bound = signature.bind(**named)
        bound.apply_defaults()
        return bound.args


def _split(
    signature: inspect.Signature,
) -> tuple[list[inspect.Parameter], list[inspect.Parameter]]:
    """Tensor parameters, and the others."""
    tensors = [p for p in signature.parameters.values() if Tensor in _kinds(p)]
    return tensors, [p for p in signature.parameters.values() if Tensor not in _kinds(p)]


def _kinds(parameter: inspect.Parameter) -> tuple[Any, ...]:
    return get_args(parameter.annotation) or (parameter.annotation,)


def _is_optional(parameter: inspect.Parameter) -> bool:
    return types.NoneType in _kinds(parameter)


def _usual(parameter: inspect.Parameter) -> bool:
    """Whether a parameter has a default."""
    return parameter.default is not parameter.empty


def _given(problem: Problem, name: str) -> bool:
    return name in problem.attrs or name in problem.operation.defaults


def _floats(meta: TensorMeta) -> bool:
    return bool(getattr(torch, meta.dtype).is_floating_point)
