"""A problem: what a kernel is asked to do, apart from the numbers. The key of tuning."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from tessella.core.record import digest

Format = Literal["contiguous", "channels_last"]


@dataclass(frozen=True, kw_only=True)
class TensorMeta:
    shape: tuple[int, ...]
    dtype: str
    format: Format = "contiguous"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One operation on concrete shapes.

    Attributes:
        op: the operation's name, for example ``conv2d``.
        inputs: in the operation's order; None where an optional one is left out.
        outputs: what comes out.
        attrs: the operation's attributes, JSON values.
        constant: positions of the inputs that are known when the plan is built (weights).
        math: ``ieee`` or ``tf32``: how float32 products may be rounded.
    """

    op: str
    inputs: tuple[TensorMeta | None, ...]
    outputs: tuple[TensorMeta, ...]
    attrs: dict[str, Any] = field(default_factory=dict)
    constant: tuple[int, ...] = ()
    math: Literal["ieee", "tf32"] = "ieee"

    @property
    def key(self) -> str:
        """Equal keys, equal problems: what the timing cache looks up."""
        return digest(self)
