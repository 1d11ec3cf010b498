"""How sizes, ranges, times and modes are written on the command line."""

from __future__ import annotations

import re
from typing import get_args

from tessella.core.errors import UsageError
from tessella.core.preprocess import ResizeMode


def parse_size(text: str) -> tuple[int, int]:
    """``224`` or ``224x320`` (height × width) as (height, width)."""
    parts = text.lower().replace("×", "x").split("x")
    if len(parts) in (1, 2) and all(p.strip().isdigit() for p in parts):
        return int(parts[0]), int(parts[-1])
    raise UsageError(
        "a size is one number or height x width", seen=text, fix="write 224 or 224x320"
    )


def parse_resize(text: str) -> ResizeMode:
    modes: tuple[ResizeMode, ...] = get_args(ResizeMode)
    for mode in modes:
        if mode == text:
            return mode
    raise UsageError("unknown resize mode", seen=text, fix="squash, crop, fill or half_crop")


def parse_sizes(text: str) -> tuple[int, ...]:
    """``8`` or ``1,8,32,64``: batch sizes to measure."""
    parts = text.split(",")
    if all(p.strip().isdigit() and int(p) > 0 for p in parts):
        return tuple(int(p) for p in parts)
    raise UsageError("batch sizes are positive numbers", seen=text, fix="write 8 or 1,8,32")


def parse_counts(text: str) -> tuple[int, ...]:
    """``0`` or ``0,2,4``: numbers to try."""
    parts = text.split(",")
    if all(p.strip().isdecimal() for p in parts):
        return tuple(int(p) for p in parts)
    raise UsageError("numbers to try are 0 or more", seen=text, fix="write 2 or 0,2,4")


def parse_duration(text: str) -> float:
    """``20ms``, ``1.5s`` or ``800us`` in seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(s|ms|us|µs)", text.strip())
    if found is None:
        raise UsageError("a time has a unit", seen=text, fix="write 20ms, 1.5s or 800us")
    return float(found[1]) * {"s": 1.0, "ms": 1e-3}.get(found[2], 1e-6)
