"""How many of something there are, in words; and a measured time with its spread."""

from __future__ import annotations

from collections.abc import Sequence

MOST_DECIMALS = 3  # of a microsecond: what a timing is rounded to


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """``1 image``, ``1,234 images``, ``2 classes`` (whose plural is told)."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def numbered(numbers: Sequence[int], noun: str, plural: str | None = None) -> str:
    """``batch 4``, ``batches 1, 2, 8`` (whose plural is told)."""
    several = noun if len(numbers) == 1 else plural or noun + "s"
    return f"{several} {', '.join(map(str, numbers))}"


def with_spread(value: float, spread: float | None) -> str:
    """``91.4 ± 4.3``, ``4.21 ± 0.04``: as many decimals as the spread needs to be seen.

    A spread below the last decimal is ``< 0.001``: no measurement is without one.
    """
    if spread is None:
        return f"{value:,.1f}"
    decimals = 1
    while decimals < MOST_DECIMALS and round(spread, decimals) == 0:
        decimals += 1
    shown = f"{spread:.{decimals}f}" if round(spread, decimals) else f"< {10**-decimals:g}"
    return f"{value:,.{decimals}f} ± {shown}"
