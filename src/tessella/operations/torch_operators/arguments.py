"""Arguments of torch's operators as a plan writes them, and what an operator's schema says of them.

torch's dispatcher takes an integer where it wants an element type, and reads memory that is not
there: so every argument is checked here, against the schema and the table in ``rules``, before an
operator sees it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tessella.core.dtype import DTYPES
from tessella.core.errors import CompileError
from tessella.operations.torch_operators import rules

MAX_ITEMS = 4096  # of a list
MAX_TEXT = 256  # characters: an equation of einsum is the longest

Inputs = Mapping[int, torch.Tensor] | Sequence[torch.Tensor | None]

# What a template may name, by its key. All else has no place in a plan: not a device, which is
# where the plan runs, and not a number for one of these, which torch would believe.
_CONSTANTS: dict[str, frozenset[str]] = {
    "dtype": frozenset({*DTYPES, "complex64", "complex128", "float8_e5m2"}),
    "memory_format": frozenset(
        {"contiguous_format", "preserve_format", "channels_last", "channels_last_3d"}
    ),
    "layout": frozenset({"strided"}),
}
_KINDS = {"ScalarType": "dtype", "MemoryFormat": "memory_format", "Layout": "layout"}

_OPTIONAL = re.compile(r"Optional\[(.+)\]")
_LIST = re.compile(r"List\[(.+)\]")


def arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any], inputs: Inputs
) -> tuple[list[Any], dict[str, Any]]:
    """Templates of arguments with their tensors put in.

    In a template, ``{"input": i}`` is the i-th tensor; ``{"dtype": "float32"}``,
    ``{"memory_format": …}`` and ``{"layout": …}`` are torch's constants; ``{"float": "-inf"}`` is
    a number that JSON cannot hold.
    """

    def fill(template: Any) -> Any:
        if isinstance(template, Mapping):
            ((kind, value),) = template.items()
            if kind == "input":
                return inputs[value]
            return float(value) if kind == "float" else _constant(kind, value)
        if isinstance(template, list | tuple):
            return [fill(t) for t in template]
        return template

    return [fill(t) for t in args], {name: fill(t) for name, t in kwargs.items()}


def _constant(kind: str, name: Any) -> Any:
    if kind not in _CONSTANTS or not isinstance(name, str) or name not in _CONSTANTS[kind]:
        raise CompileError(f"an operator's argument is not a {kind} of torch", seen=name)
    return getattr(torch, name)


def misfit(
    operator: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    inputs: Sequence[Any],
) -> str | None:
    """Why an operator may not be called with these templates, or None.

    Args:
        inputs: the tensors that the templates number (None where one is left out), or what else
            has a ``shape``.
    """
    given = _by_name(operator._schema, args, kwargs)
    if isinstance(given, str):
        return given
    name = operator._schema.name
    for argument in operator._schema.arguments:
        if argument.name not in given:
            if not argument.has_default_value():
                return f"{argument.name} is missing"
            continue
        value, wanted = given[argument.name], str(argument.real_type)
        length = argument.N  # type: ignore[attr-defined]
        reason = _wrong_type(value, wanted, length, inputs)
        if reason is None and "int" in wanted.lower():
            reason = rules.out_of_range(name, argument.name, value)
        if reason is not None:
            return f"{argument.name}: {reason}"
    return rules.broken(name, given, inputs)


def _by_name(
    schema: torch._C.FunctionSchema, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any] | str:
    """The templates by the schema's names, or why they are not its arguments."""
    if not isinstance(args, list | tuple) or not isinstance(kwargs, Mapping):
        return "the arguments are not a list, and an object"
    places = [a.name for a in schema.arguments if not a.kwarg_only]
    if len(args) > len(places):
        return f"{len(args)} arguments in order, of at most {len(places)}"
    given = dict(zip(places, args))
    known = {a.name for a in schema.arguments}
    if wrong := [str(n)[:40] for n in kwargs if n not in known or n in given]:
        return f"{wrong} unknown, or given twice"
    return given | dict(kwargs)


def _wrong_type(value: Any, wanted: str, length: int | None, inputs: Sequence[Any]) -> str | None:
    """Why a template is not of the type that a schema says, or None."""
    if optional := _OPTIONAL.fullmatch(wanted):
        return None if value is None else _wrong_type(value, optional[1], length, inputs)
    if listed := _LIST.fullmatch(wanted):
        if length is not None and listed[1] != "Tensor" and not isinstance(value, list | tuple):
            return _wrong_type(value, listed[1], None, inputs)  # one number stands for all
        if not isinstance(value, list | tuple) or len(value) > MAX_ITEMS:
            return f"{_shown(value)} is not a list of at most {MAX_ITEMS} items"
        reasons = (_wrong_type(v, listed[1], None, inputs) for v in value)
        return next((r for r in reasons if r is not None), None)
    return None if _is(value, wanted, inputs) else f"{_shown(value)} is not of the type {wanted}"


def _is(value: Any, wanted: str, inputs: Sequence[Any]) -> bool:
    """Whether a template is a value of one of a schema's types that are no list."""
    if wanted == "Tensor":
        return _is_input(value, inputs) or _is_number(value)  # torch makes a tensor of a number
    if wanted in ("int", "SymInt"):
        return type(value) is int
    if wanted in ("number", "Scalar"):
        return _is_number(value)
    if wanted == "float":
        return _is_number(value) and not isinstance(value, bool)
    if wanted == "bool":
        return isinstance(value, bool)
    if wanted == "str":
        return isinstance(value, str) and len(value) <= MAX_TEXT and value.isprintable()
    if wanted in _KINDS and isinstance(value, Mapping) and len(value) == 1:
        ((kind, name),) = value.items()
        return kind == _KINDS[wanted] and isinstance(name, str) and name in _CONSTANTS[kind]
    return False


def _is_input(value: Any, inputs: Sequence[Any]) -> bool:
    if not isinstance(value, Mapping) or set(value) != {"input"}:
        return False
    number = value["input"]
    return type(number) is int and 0 <= number < len(inputs) and inputs[number] is not None


def _is_number(value: Any) -> bool:
    if isinstance(value, Mapping):
        return set(value) == {"float"} and value["float"] in ("inf", "-inf", "nan")
    if isinstance(value, bool | float):
        return True
    return isinstance(value, int) and -(2**63) <= value < 2**63


def _shown(value: Any) -> str:
    return repr(value)[:80]
