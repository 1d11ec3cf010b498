"""Timing: what other work on the machine does to a measurement, and what it must not do."""

from __future__ import annotations

import time

import pytest
import torch

from tessella.search import timing
from tessella.search.timing import measure

CPU = torch.device("cpu")


def test_the_median_of_what_was_not_disturbed() -> None:
    quiet = [10.0, 10.2, 10.4]
    assert timing._timing(quiet).time_us == 10.2
    assert timing._timing([*quiet, 95.0, 80.0, 400.0, 51.0]).time_us == 10.2
    assert timing._timing([10.0, 14.0, 13.0, 12.0]).time_us == pytest.approx(12.5)
    assert timing._timing([7.0]).spread_us == 0.0


def test_a_burst_of_other_work_does_not_turn_the_order() -> None:
    """The faster call is interrupted in most of its rounds; the slower one never is."""
    calls = {"fast": 0, "slow": 0}

    def fast() -> None:
        calls["fast"] += 1
        time.sleep(0.03 if calls["fast"] % 3 else 0.001)

    def slow() -> None:
        calls["slow"] += 1
        time.sleep(0.004)

    times = measure({"fast": fast, "slow": slow}, device=CPU, budget_s=0.3)
    assert times["fast"].time_us < times["slow"].time_us
