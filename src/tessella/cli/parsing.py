"""How sizes, ranges, times and modes are written on the command line."""

from __future__ import annotations

import re
from typing import get_args

from tessella.core.errors import UsageError
from tessella.core.preprocess import ResizeMode


def parse_size(text: str) -> tuple[int, int]:
    """``224`` or ``224x320`` (height × width) as (height, width)."""
    parts = text.lower().replace("×", "x").split("x")
    if len(parts) in (1, 2) and all(p.strip().isdecimal() for p in parts):
        return int(parts[0]), int(parts[-1])
    raise UsageError(
        "a size is one number or height x width", seen=text, fix="write 224 or 224x320"
    )


def parse_sides(text: str) -> int | tuple[int, ...]:
    """``128``, ``224x320`` (height × width) or ``64x128x128`` (slices × height × width)."""
    parts = text.lower().replace("×", "x").split("x")
    if len(parts) <= 3 and all(p.strip().isdecimal() for p in parts):
        return int(parts[0]) if len(parts) == 1 else tuple(map(int, parts))
    raise UsageError(
        "a size is one number, height x width, or of volumes slices x height x width",
        seen=text,
        fix="write 224, 224x320 or 64x128x128",
    )


def parse_window(text: str) -> tuple[float, float]:
    """``-160:240``: the values that become black and white."""
    try:
        low, high = map(float, text.split(":"))
    except ValueError as error:
        raise UsageError(
            "a window is two numbers with a colon between", seen=text, fix="write -160:240"
        ) from error
    return low, high


def parse_resize(text: str) -> ResizeMode:
    modes: tuple[ResizeMode, ...] = get_args(ResizeMode)
    for mode in modes:
        if mode == text:
            return mode
    raise UsageError("unknown resize mode", seen=text, fix="squash, crop, fill or half_crop")


def parse_sizes(text: str) -> tuple[int, ...]:
    """``8`` or ``1,8,32,64``: batch sizes to measure."""
    parts = text.split(",")
    if all(p.strip().isdecimal() and int(p) > 0 for p in parts):
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
