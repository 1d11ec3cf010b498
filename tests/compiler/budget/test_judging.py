"""What samples can tell: exact intervals against scipy, flips and NaN by hand."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy import stats

from tessella.artifacts.receipt import Flip
from tessella.compiler.budget import judging
from tessella.compiler.budget.judging import (
    Judge,
    answers,
    binomial_interval,
    mcnemar,
    of_tensors,
    paired_interval,
)
from tessella.core.errors import CompileError, UsageError


@pytest.mark.parametrize(("hits", "count"), [(0, 20), (1, 20), (7, 300), (300, 300), (2, 50_000)])
@pytest.mark.parametrize("error", [0.05, 0.01])
def test_intervals_are_clopper_and_pearsons(hits: int, count: int, error: float) -> None:
    known = stats.binomtest(hits, count).proportion_ci(1 - error, method="exact")
    assert binomial_interval(hits, count, error) == pytest.approx((known.low, known.high), abs=1e-9)


@pytest.mark.parametrize(("lost", "won"), [(0, 0), (3, 3), (9, 1), (0, 6), (40, 20)])
def test_mcnemars_test_is_the_exact_one(lost: int, won: int) -> None:
    known = stats.binomtest(lost, lost + won).pvalue if lost + won else 1.0
    assert mcnemar(lost, won) == pytest.approx(known, abs=1e-9)


def test_paired_intervals_hold_the_truth_as_often_as_they_say() -> None:
    generator = torch.Generator().manual_seed(0)
    rates = torch.tensor([0.03, 0.01, 0.96]).double()
    interval = functools.cache(paired_interval)  # of the same counts it is the same
    missed = 0
    for _ in range(300):
        drawn = torch.multinomial(rates, 200, replacement=True, generator=generator)
        low, high = interval(int((drawn == 0).sum()), int((drawn == 1).sum()), 200)
        missed += not low <= 2.0 <= high
    assert missed <= 0.05 * 300


def data_of(count: int, classes: int = 3):
    labels = torch.arange(count) % classes
    names = [f"class {i}" for i in range(classes)]
    paths = [f"{i}.png" for i in range(count)]
    return of_tensors({"x": torch.zeros(count, 1)}, labels, paths=paths, classes=names)


def test_flips_are_listed_with_what_was_answered() -> None:
    data = data_of(6)
    before = torch.nn.functional.one_hot(data.truth, 3).float() * 4
    after = before.clone()
    after[4] = torch.tensor([0.0, 1.0, 2.0])  # right: 1
    judge = Judge(data=data, before={"scores": before})
    receipt = judge.receipt({"scores": after}, 20.0)
    assert (receipt.before, receipt.after, receipt.flipped) == (1.0, pytest.approx(5 / 6), 1)
    assert receipt.loss == pytest.approx(100 / 6)
    assert receipt.low <= receipt.loss <= receipt.high
    assert not receipt.resolved
    old, new = before[4].double().softmax(0).max(), after[4].double().softmax(0).max()
    assert receipt.flips == (
        Flip(
            index=4,
            path="4.png",
            label="class 1",
            before="class 1",
            after="class 2",
            probability_before=float(old),
            probability=float(new),
        ),
    )
    assert judge.receipt({"scores": after}, 17.0).within
    assert not judge.receipt({"scores": after}, 16.0).within


def test_with_a_budget_of_zero_no_answer_may_change_even_for_the_better() -> None:
    data = data_of(6)
    right = torch.nn.functional.one_hot(data.truth, 3).float()
    worse = right.clone()
    worse[0] = torch.tensor([0.0, 0.0, 1.0])
    judge = Judge(data=data, before={"scores": worse})
    assert judge.loss({"scores": right}) < 0
    assert judge.receipt({"scores": right}, 0.1).within
    assert not judge.receipt({"scores": right}, 0).within


def test_any_metric_judges_and_gets_an_interval() -> None:
    data = of_tensors({"x": torch.zeros(40, 1)}, torch.linspace(0, 1, 40))

    def within_a_tenth(outputs, labels) -> float:
        return float(((outputs["y"] - labels).abs() < 0.1).double().mean())

    exact = {"y": data.truth}
    judge = Judge(data=data, before=exact, metric=within_a_tenth)
    after = {"y": torch.where(torch.arange(40) < 8, data.truth + 1, data.truth)}
    receipt = judge.receipt(after, 1.0)
    assert receipt.metric == "within_a_tenth"
    assert receipt.loss == pytest.approx(20.0)
    assert 5 < receipt.low < 20 < receipt.high < 40
    assert receipt.flips == ()


def test_the_score_of_a_task_may_be_drawn_less_often_and_a_metric_of_the_user_s_may_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The samples are those of a task in both cases; the receipt says how often."""
    monkeypatch.setattr(judging, "SECONDS", 0.0)
    data = data_of(20)
    right = torch.nn.functional.one_hot(data.truth, 3).float()

    class ByTask:
        name = "share"

        def rows(self, outputs: Any, places: Any) -> Any:
            return outputs["scores"].numpy()

        def score(self, rows_NR: Any, places: Any) -> float:
            return float(rows_NR.argmax(1).mean())

        def changed(self, before: Any, after: Any) -> list[int]:
            return []

    def share(outputs: Any, labels: torch.Tensor) -> float:
        return float(outputs["scores"].argmax(1).double().mean())

    of_task = replace(data, score=ByTask())  # type: ignore[arg-type]
    for metric, times in ((share, judging.RESAMPLES), (None, judging.LEAST_RESAMPLES)):
        receipt = Judge(data=of_task, before={"scores": right}, metric=metric).receipt(
            {"scores": right.flip(1)}, 1.0
        )
        assert receipt.resamples == times
        assert f"from {times} resamples" in str(receipt)


def test_calibration_gets_samples_that_do_not_judge() -> None:
    data = data_of(103)
    judging, shown = data.parted()
    assert len(shown) == 25
    assert sorted(judging.places + shown.places) == list(range(103))
    assert data.parted()[1].places == shown.places
    assert [len(b["x"]) for b in judging.batches(32)] == [32, 32, 14]
    with pytest.raises(UsageError, match="too few"):
        data_of(3).parted()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_answers_that_are_no_numbers_are_refused(bad: float) -> None:
    with pytest.raises(CompileError, match="not finite"):
        answers(lambda batch: {"y": batch["x"] + bad}, data_of(5), 2)
