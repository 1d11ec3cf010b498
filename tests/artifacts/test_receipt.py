"""A receipt is read like the rest of a plan: what contradicts itself is refused."""

from __future__ import annotations

import pytest

from tessella.artifacts.receipt import MAX_FLIPS, Flip, Receipt
from tessella.core.errors import CorruptArtifact
from tessella.core.record import from_plain, to_plain

FLIP = Flip(
    index=3, path="3.png", label="a", before="a", after="b", probability_before=0.6, probability=0.5
)
RECEIPT = Receipt(
    metric="top1", samples=200, before=0.98, after=0.975, loss=0.5, low=-1.0, high=2.5, p_value=1.0,
    budget=1.0, flipped=1, flips=(FLIP,),
)  # fmt: skip


def test_it_comes_back_and_says_what_it_cost() -> None:
    assert from_plain(Receipt, to_plain(RECEIPT), where="receipt") == RECEIPT
    assert not RECEIPT.resolved
    assert "loses 0.50 points" in str(RECEIPT)
    assert "3.png: a; a (0.600) → b (0.500)" in str(RECEIPT)


@pytest.mark.parametrize(
    "lie",
    [
        {"flipped": 2}, {"flipped": -1}, {"samples": 0}, {"flips": []}, {"low": 3.0},
        {"flipped": MAX_FLIPS + 1}, {"loss": float("nan")}, {"high": float("inf")},
        {"before": None}, {"samples": "200"}, {"more": 1},
    ],
)  # fmt: skip
def test_lies_are_refused(lie: dict) -> None:
    with pytest.raises(CorruptArtifact):
        from_plain(Receipt, {**to_plain(RECEIPT), **lie}, where="receipt")
