"""Matrix products, convolutions and the other layers, each by several kernels: the fastest wins."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tessella.search.functional import (
        conv1d,
        conv2d,
        conv2d_dgrad,
        conv2d_wgrad,
        conv3d,
        linear,
        matmul,
    )
    from tessella.search.report import find

__all__ = [
    "conv1d",
    "conv2d",
    "conv2d_dgrad",
    "conv2d_wgrad",
    "conv3d",
    "find",
    "linear",
    "matmul",
]


def __getattr__(name: str) -> Any:
    """Resolve a name on first use: an engine that loads a plan searches nothing."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    room = "report" if name == "find" else "functional"
    return getattr(importlib.import_module(f"tessella.search.{room}"), name)


def __dir__() -> list[str]:
    """What belongs to a user, resolved yet or not: for Tab and ``help``."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
