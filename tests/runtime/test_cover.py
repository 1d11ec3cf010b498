"""Cutting a batch into buckets: all samples covered, and no cheaper way exists."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessella.runtime.cover import OVERHEAD_US, covers


def price(sizes: tuple[int, ...], costs: dict[int, float]) -> float:
    return sum(costs[s] + OVERHEAD_US for s in sizes)


@given(st.dictionaries(st.integers(1, 6), st.floats(1, 1000), min_size=1, max_size=3))
def test_the_cheapest_cover(costs: dict[int, float]) -> None:
    found = covers(costs)
    assert len(found) == max(costs) + 1
    for count, sizes in enumerate(found):
        assert sum(sizes) >= count
        assert sum(sizes[:-1]) < max(count, 1)  # only the last run is padded
        assert list(sizes) == sorted(sizes, reverse=True)
        every = [
            c
            for length in range(count + 1)
            for c in itertools.combinations_with_replacement(sorted(costs), length)
            if sum(c) >= count
        ]
        assert price(sizes, costs) == pytest.approx(min(price(c, costs) for c in every))


def test_without_times_a_batch_is_padded_to_the_next_bucket() -> None:
    assert covers({1: None, 4: None, 6: None}) == [(), (1,), (4,), (4,), (4,), (6,), (6,)]


def test_splits_where_padding_costs_more() -> None:
    assert covers({1: 100.0, 2: 200.0, 4: 1000.0})[3] == (2, 1)
    assert covers({1: 100.0, 2: 110.0, 4: 120.0})[3] == (4,)
