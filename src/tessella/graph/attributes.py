"""What an attribute of a node may be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tessella.graph.graph import Dim


def is_attribute(value: Any) -> bool:
    """Whether a node's attribute may hold ``value``: what JSON holds (no infinity), and ``Dim``."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, Mapping):
        return all(isinstance(k, str) and is_attribute(v) for k, v in value.items())
    if isinstance(value, tuple | list):
        return all(is_attribute(v) for v in value)
    return value is None or isinstance(value, bool | int | str | Dim)
