"""Which operators of torch may run without an operation of ours, and with which arguments.

Only pure functions of tensors may run, by their names: a plan is data from a stranger, and must not
reach an operator that writes files, changes its arguments, draws random numbers or trusts raw
sizes.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tessella.core.errors import CompileError
from tessella.operations.torch_operators.allowed import ALLOWED
from tessella.operations.torch_operators.arguments import misfit
from tessella.operations.torch_operators.guards import guarded

NAMESPACES = ("aten", "torchvision")

_TARGET = re.compile(r"([a-z]+)::(\w+)(?:\.(\w+))?")


def refusal(target: str) -> str | None:
    """Why ``target`` (``aten::roll``, ``aten::max.dim``) may not run as a fallback, or None."""
    match = _TARGET.fullmatch(target)
    if match is None:
        return f"{target!r} is not the name of an operator"
    namespace, name, _ = match.groups()
    if namespace not in NAMESPACES:
        return f"{target}: only operators of {' and '.join(NAMESPACES)} may run"
    operator = _find(target)
    if operator is None:
        return f"this torch ({torch.__version__}) has no operator {target}"
    if (reason := _impurity(operator, name)) is not None:
        return reason.format(target)
    if f"{namespace}::{name}" not in ALLOWED:
        return f"{target} is not on the list of operators that may run (torch_operators.allowed)"
    return None


def _impurity(operator: torch._ops.OpOverload, name: str) -> str | None:
    """Why this overload is no function of tensors, whatever the list says of its name."""
    schema = operator._schema
    if schema.is_mutable:
        return "{} changes its arguments"
    if not any("Tensor" in str(a.type) for a in schema.arguments):
        return "{} takes no tensor"
    returns = [str(r.type) for r in schema.returns]
    if not returns or any(r not in ("Tensor", "List[Tensor]") for r in returns):
        return "{} does not return tensors"
    if torch.Tag.nondeterministic_seeded in operator.tags:
        return "{} draws random numbers"
    # Indexing by numbers has a shape that follows from the arguments; only a mask's does not.
    if torch.Tag.dynamic_output_shape in operator.tags and name != "index":
        return "the shape of the result of {} depends on the data"
    return None


def unfit(target: str, args: Any, kwargs: Any, inputs: Sequence[Any]) -> str | None:
    """Why an operator may not run with templates like these, or None."""
    return refusal(target) or _misfit(target, args, kwargs, inputs)


def resolve(
    target: str, args: Sequence[Any], kwargs: Mapping[str, Any], inputs: Sequence[Any]
) -> Callable[..., Any]:
    """The operator as a function, if it may run with templates like these.

    Args:
        inputs: what the templates number: tensors, or what else has a shape.

    Raises:
        CompileError: it may not; says why.
    """
    if reason := unfit(target, args, kwargs, inputs):
        raise CompileError("an operator cannot run as a fallback", seen=reason)
    return guarded(_operator(target), inputs)


def _misfit(
    target: str, args: Sequence[Any], kwargs: Mapping[str, Any], inputs: Sequence[Any]
) -> str | None:
    reason = misfit(_operator(target), args, kwargs, inputs)
    return None if reason is None else f"{target}: {reason}"


def _operator(target: str) -> torch._ops.OpOverload:
    """The operator of a target that ``refusal`` has nothing against."""
    operator = _find(target)
    assert operator is not None
    return operator


@functools.cache
def _find(target: str) -> torch._ops.OpOverload | None:
    if (named := _TARGET.fullmatch(target)) is None:
        return None
    namespace, name, overload = named.groups()
    if namespace == "torchvision":
        importlib.import_module("torchvision")  # importing it registers its operators
    packet = getattr(getattr(torch.ops, namespace), name, None)
    found = getattr(packet, overload or "default", None)
    return found if isinstance(found, torch._ops.OpOverload) else None
