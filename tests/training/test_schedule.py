from __future__ import annotations

import pytest

from tessella.core.policies import Policy
from tessella.training.schedule import Schedule
from tests.support.training import recipe


def schedule(steps_per_epoch: int, **changes) -> Schedule:
    return Schedule(recipe=recipe("data", **changes), steps_per_epoch=steps_per_epoch)


@pytest.mark.parametrize(
    ("epochs", "per_epoch", "total"), [(3, 7, 21), (0.1, 7, 1), (0.001, 7, 1), (2.3, 10, 23)]
)
def test_total(epochs, per_epoch, total):
    assert schedule(per_epoch, epochs=epochs).total == total


def test_intervals_may_be_fractions_and_the_end_is_always_due():
    plan = schedule(10, epochs=2.5, val_interval=0.3, snapshot_interval=1.0)
    assert [s for s in range(1, 26) if plan.validates(s)] == [3, 6, 9, 12, 15, 18, 21, 24, 25]
    assert [s for s in range(1, 26) if plan.snapshots(s)] == [10, 20, 25]


def test_an_interval_that_is_no_whole_number_of_steps_is_kept_on_average():
    plan = schedule(7, epochs=10, val_interval=0.5)
    due = [s for s in range(1, 71) if plan.validates(s)]
    assert due[:4] == [4, 7, 11, 14]
    assert len(due) == 20


def test_an_interval_shorter_than_a_step_is_due_at_each():
    plan = schedule(4, epochs=1, val_interval=0.01)
    assert all(plan.validates(s) for s in range(1, 5))


def test_the_rate_follows_the_policy():
    plan = schedule(10, epochs=2, policy=Policy(name="multistep", at=(0.5, 0.75), gamma=0.1))
    rates = [plan.rate(done) / 0.01 for done in range(20)]
    assert rates == pytest.approx([1.0] * 10 + [0.1] * 5 + [0.01] * 5)


def test_the_momentum_follows_the_policy():
    plan = schedule(10, epochs=2, policy=Policy(name="onecycle", warmup=0.3))
    found = [plan.momentum(done) for done in range(20)]
    assert found[0] == pytest.approx(0.95)
    assert min(found) == found[6] == pytest.approx(0.85)
    assert schedule(10).momentum(5) == 0.9
