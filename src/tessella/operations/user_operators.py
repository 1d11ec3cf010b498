"""Which operators of a user's own are defined in this process, by name.

A plan names such operators and never brings their code: what it needs must have been imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from tessella.core.errors import ArtifactError

Tensors = torch.Tensor | tuple[torch.Tensor, ...]


class Defined(Protocol):
    """What a graph and a plan use of an operator (``user.operator.Operator``)."""

    name: str
    module: str
    dtypes: tuple[str, ...]
    reference: Callable[..., Tensors] | None

    def run(self, *args: Any) -> Tensors: ...

    def empty(self, *args: Any) -> Tensors: ...


OPERATORS: dict[str, Defined] = {}  # "examples::saxpy" → the operator
CANDIDATES: dict[str, str] = {}  # kernel id, as in "linear.skinny" → the module that registers it


def module(name: str) -> str | None:
    """The module that defines an operator or a kernel of a user's own; None for what is ours."""
    return OPERATORS[name].module if name in OPERATORS else CANDIDATES.get(name)


def require(needed: Mapping[str, str]) -> None:
    """Check that what a plan needs is defined here.

    Args:
        needed: operator or kernel id → the module that defines it.

    Raises:
        ArtifactError: something is not; names the modules to import.
    """
    missing = {n: m for n, m in needed.items() if n not in OPERATORS and n not in CANDIDATES}
    if missing:
        modules = ", ".join(sorted(set(missing.values())))
        raise ArtifactError(
            "the plan needs kernels of a user's own that are not defined here",
            seen=", ".join(sorted(missing)),
            fix=f"import {modules} before loading the plan (tessella --import {modules} …)",
        )


def named(name: str) -> Defined:
    """The operator called ``name``.

    Raises:
        ArtifactError: nothing that was imported has defined it.
    """
    require({} if name in OPERATORS else {name: f"the module that defines {name}"})
    return OPERATORS[name]


def as_tuple(made: Any) -> tuple[torch.Tensor, ...]:
    """What an operator or a kernel has made, one tensor or several, as a tuple."""
    return (made,) if isinstance(made, torch.Tensor) else tuple(made)
