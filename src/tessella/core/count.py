"""How many of something there are, in words."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """``1 image``, ``1,234 images``, ``2 classes`` (whose plural is told)."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
