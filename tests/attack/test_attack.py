"""A small seeded run of each attack: ``python -m tests.attack all --count 20000`` runs more."""

from __future__ import annotations

import pytest

from tests.attack.__main__ import SUBJECTS, run
from tests.attack.children import attack
from tests.attack.known import KNOWN

# How many cases: seconds each.
FEW = {"fallback": 400, "plans": 72, "images": 400, "onnx": 120, "prototxt": 60, "datasets": 60,
       "http": 40, "stops": 6}  # fmt: skip
BOTH = 0.02  # so many at least are refused, and so many taken, or an attack tests nothing


def test_every_attack_is_run() -> None:
    assert set(FEW) == set(SUBJECTS)


@pytest.mark.parametrize("kind", FEW)
def test_hostile_input_is_refused_or_answered(kind: str) -> None:
    report = run(kind, 0, 0, FEW[kind])
    assert report.failures == []
    taken = sum(report.outcomes[word] for word in ("answered", "same", "alone"))
    assert taken > FEW[kind] * BOTH
    assert report.outcomes["refused"] > FEW[kind] * BOTH or kind == "stops"


def test_calls_that_ended_the_process() -> None:
    report = attack("tests.attack.known", 0, 0, len(KNOWN))
    assert report.failures == []
    assert report.words == [wanted for _, (wanted, *_) in KNOWN]
