"""A call of one of torch's operators, as ``capture`` finds it and ``aten`` translates it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tessella.graph.graph import Shape, Value


@dataclass(frozen=True, kw_only=True)
class OperatorCall:
    """One call in torch's graph.

    Attributes:
        operator: the overload.
        args, kwargs: as in torch's graph; tensors are ``Value``, symbolic sizes ``Dim``.
        arguments: all of them by the schema's names, with its defaults.
        shapes: what torch says of the results: one shape for each, None for what is not a tensor.
        dtypes: likewise.
        read: which of the results something reads.
    """

    operator: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    arguments: Mapping[str, Any]
    shapes: tuple[Shape | None, ...]
    dtypes: tuple[str | None, ...]
    read: frozenset[int]

    @property
    def overload(self) -> str:
        """``conv2d.default``."""
        return str(self.operator).split(".", 1)[1]

    @property
    def name(self) -> str:
        """``conv2d``."""
        return self.overload.split(".")[0]

    @property
    def target(self) -> str:
        """The name in a fallback: ``aten::topk``, ``aten::max.dim``."""
        return self.operator._schema.name + (
            f".{o}" if (o := self.operator._schema.overload_name) else ""
        )

    @property
    def input(self) -> Value:
        """The first tensor."""
        value: Value = self.arguments["self" if "self" in self.arguments else "input"]
        return value
