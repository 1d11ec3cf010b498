"""Numbers as people read them."""

from __future__ import annotations

import pytest

from tessella.core.count import counted, numbered, with_spread


def test_one_and_several() -> None:
    assert counted(1, "image") == "1 image"
    assert counted(1234, "image") == "1,234 images"
    assert counted(2, "class", "classes") == "2 classes"
    assert numbered([4], "batch", "batches") == "batch 4"
    assert numbered([1, 2], "batch", "batches") == "batches 1, 2"


@pytest.mark.parametrize(
    ("value", "spread", "shown"),
    [
        (91.44, 4.31, "91.4 ± 4.3"),
        (4.214, 0.042, "4.21 ± 0.04"),
        (3.7, 0.0021, "3.700 ± 0.002"),
        (12577.3, 0.0, "12,577.300 ± < 0.001"),
        (10.04, None, "10.0"),
    ],
)
def test_a_spread_is_never_shown_as_nothing(value, spread, shown) -> None:
    assert with_spread(value, spread) == shown
