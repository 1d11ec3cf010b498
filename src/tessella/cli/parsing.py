"""How sizes, ranges and modes are written on the command line."""

from __future__ import annotations

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
