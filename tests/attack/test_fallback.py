"""Fallback steps with hostile arguments: children that run them do not die."""

from __future__ import annotations

from tests.attack.children import attack
from tests.attack.known import KNOWN

FEW = 600  # ``python -m tests.attack fallback --count 100000`` runs more


def test_calls_that_ended_the_process() -> None:
    report = attack("tests.attack.known", 0, 0, len(KNOWN))
    assert report.failures == []
    assert report.words == [wanted for _, (wanted, *_) in KNOWN]


def test_hostile_arguments() -> None:
    report = attack("tests.attack.fallback", 0, 0, FEW)
    assert report.failures == []
    assert report.outcomes["answered"] > FEW / 4
    assert report.outcomes["refused"] > FEW / 4
