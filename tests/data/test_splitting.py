"""The held-out images: stratified, seeded, and never all of a class."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessella.data.splitting import TEST, TRAIN, VAL, hold_out


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=8).filter(any),
    st.floats(0, 0.45),
    st.floats(0, 0.45),
    st.integers(-5, 2**70),
)
def test_every_class_gives_its_share(counts: list[int], val: float, test: float, seed: int) -> None:
    labels = np.repeat(np.arange(len(counts)), counts)
    splits = hold_out(labels, val=val, test=test, seed=seed)
    for label, count in enumerate(counts):
        mine = splits[labels == label]
        held = {split: int((mine == split).sum()) for split in (TRAIN, VAL, TEST)}
        assert count == 0 or held[TRAIN] >= 1
        assert abs(held[VAL] - count * val) <= 1
        assert held[TEST] <= count * test + 1
    if min(counts) >= 20:
        assert abs((splits == VAL).sum() - len(labels) * val) <= 1
        assert abs((splits == TEST).sum() - len(labels) * test) <= 1


def test_only_the_seed_decides() -> None:
    labels = np.repeat([0, 1, 2], [50, 30, 20])
    one = hold_out(labels, val=0.2, test=0.1, seed=7)
    assert np.array_equal(one, hold_out(labels, val=0.2, test=0.1, seed=7))
    other = hold_out(labels, val=0.2, test=0.1, seed=8)
    assert not np.array_equal(one, other)
    assert np.array_equal(np.bincount(one), np.bincount(other))
    assert np.bincount(one).tolist() == [70, 20, 10]


@pytest.mark.parametrize(("count", "expected"), [(1, [1, 0]), (2, [1, 1]), (3, [2, 1])])
def test_tiny_classes(count: int, expected: list[int]) -> None:
    splits = hold_out(np.zeros(count, np.int64), val=0.1, test=0.0, seed=0)
    assert np.bincount(splits, minlength=2).tolist() == expected


def test_many_tiny_classes_still_hold_out_the_fraction() -> None:
    labels = np.repeat(np.arange(100), 3)
    splits = hold_out(labels, val=0.1, test=0.0, seed=0)
    assert (splits == VAL).sum() == 30
