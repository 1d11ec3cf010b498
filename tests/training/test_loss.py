from __future__ import annotations

from tessella.training.loss import not_finite
from tests.support.training import recipe


def test_divergence_says_where_and_what_to_do():
    text = str(not_finite(float("nan"), 17, 0.25, recipe("data", precision="fp16")))
    for part in ("nan at step 17", "learning rate 0.25", "lr=0.001", "precision fp32", "warmup"):
        assert part in text
