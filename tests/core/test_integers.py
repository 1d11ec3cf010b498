"""Rounding up agrees with a search for the number."""

from __future__ import annotations

import math

from tessella.core.integers import ceil_div, power_of_two, round_up


def test_whole_numbers_are_rounded_up() -> None:
    for value in range(70):
        for step in (1, 3, 16):
            assert ceil_div(value, step) == math.ceil(value / step)
            assert round_up(value, step) == next(
                n for n in range(value, value + step) if n % step == 0
            )
        assert power_of_two(value) == next(2**i for i in range(8) if 2**i >= value)
