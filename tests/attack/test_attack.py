"""A small seeded run of each attack: ``python -m tests.attack all --count 20000`` runs more."""

from __future__ import annotations

import pytest

from tests.attack.__main__ import SUBJECTS, run
from tests.attack.children import attack
from tests.attack.known import KNOWN

# How many cases: seconds each.
FEW = {"fallback": 600, "plans": 240, "images": 600, "onnx": 250, "prototxt": 120, "datasets": 120,
       "http": 90}  # fmt: skip
MOSTLY_REFUSED = 0.02  # of what is spoilt so many a subject still takes, or it tests nothing


def test_every_attack_is_run() -> None:
    assert set(FEW) == set(SUBJECTS)


@pytest.mark.parametrize("kind", FEW)
def test_hostile_input_is_refused_or_answered(kind: str) -> None:
    report = run(kind, 0, 0, FEW[kind])
    assert report.failures == []
    assert report.outcomes["refused"] > FEW[kind] / 5
    assert FEW[kind] - report.outcomes["refused"] > FEW[kind] * MOSTLY_REFUSED


def test_calls_that_ended_the_process() -> None:
    report = attack("tests.attack.known", 0, 0, len(KNOWN))
    assert report.failures == []
    assert report.words == [wanted for _, (wanted, *_) in KNOWN]
