"""The held-out images: stratified, seeded, and never all of a class."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessella.data.importing import ImportSettings, import_images
from tessella.data.splitting import TEST, TRAIN, VAL, hold_out, hold_out_groups
from tests.support.pictures.folders import write_picture


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


def test_groups_stay_together_and_the_shares_are_kept() -> None:
    """Sixty patients with one to nine pictures each, of three classes that are not even."""
    rng = np.random.default_rng(0)
    groups = [f"p{n}" for n in range(60) for _ in range(int(rng.integers(1, 10)))]
    labels = rng.choice(3, len(groups), p=[0.6, 0.3, 0.1])
    splits = hold_out_groups(labels, groups, val=0.2, test=0.1, seed=3)
    of = {name: {s for g, s in zip(groups, splits.tolist()) if g == name} for name in groups}
    assert all(len(found) == 1 for found in of.values())
    for label in range(3):
        shares = np.bincount(splits[labels == label], minlength=3) / (labels == label).sum()
        assert shares == pytest.approx([0.7, 0.2, 0.1], abs=0.08)
    again = hold_out_groups(labels, groups, val=0.2, test=0.1, seed=3)
    other = hold_out_groups(labels, groups, val=0.2, test=0.1, seed=4)
    assert np.array_equal(splits, again)
    assert not np.array_equal(splits, other)
    assert not (hold_out_groups(labels, groups, val=0.2, test=0.0, seed=0) == TEST).any()


def test_a_table_s_groups_are_kept(tmp_path: Path) -> None:
    """The column is no label; a picture without a group is one of its own."""
    lines = ["path,label,Group"]
    for n in range(40):
        write_picture(tmp_path / f"{n}.png", n)
        lines.append(f"{n}.png,{'ab'[n % 2]},{'' if n < 4 else n // 4}")
    (tmp_path / "t.csv").write_text("\n".join(lines))
    settings = ImportSettings(size=8, holdout=0.2, test=0.2)
    dataset = import_images(tmp_path / "t.csv", tmp_path / "out", settings)
    assert dataset.classes == ("a", "b")
    where: dict[int, set[str]] = {}
    for name in ("train", "val", "test"):
        assert len(dataset.split(name)) >= 4
        for example in dataset.split(name):
            number = int(example.path.removesuffix(".png"))
            where.setdefault(number // 4 if number >= 4 else -number, set()).add(name)
    assert all(len(names) == 1 for names in where.values())
