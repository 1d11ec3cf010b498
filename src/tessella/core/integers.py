"""Whole numbers rounded up: to a quotient, a multiple, or a power of two."""

from __future__ import annotations


def ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def power_of_two(value: int) -> int:
    """The least power of two that is not less."""
    return 1 << max(0, value - 1).bit_length()
