"""Learning-rate policies against Caffe's formulas, which count iterations."""

from __future__ import annotations

import math

import pytest
import torch

from tessella.core.errors import UsageError
from tessella.core.policies import Policy

MAX_ITER = 1000
BASE = 0.3


def rates(policy: Policy) -> list[float]:
    return [BASE * policy.factor(i / MAX_ITER) for i in range(MAX_ITER)]


CAFFE = {
    "fixed": (Policy(name="fixed"), lambda i: BASE),
    "step": (Policy(name="step", gamma=0.5, steps=10), lambda i: BASE * 0.5 ** (i // 100)),
    "step of 1": (Policy(name="step", gamma=0.99, steps=1000), lambda i: BASE * 0.99**i),
    "multistep": (
        Policy(name="multistep", gamma=0.1, at=(0.29, 0.58)),
        lambda i: BASE * 0.1 ** sum(i >= value for value in (290, 580)),
    ),
    # Caffe: base · gamma ** iter
    "exp": (Policy(name="exponential", gamma=0.999**MAX_ITER), lambda i: BASE * 0.999**i),
    # Caffe: base · (1 + gamma · iter) ** −power
    "inv": (
        Policy(name="inverse", gamma=0.01 * MAX_ITER, power=0.75),
        lambda i: BASE * (1 + 0.01 * i) ** -0.75,
    ),
    "poly": (Policy(name="polynomial", power=2.0), lambda i: BASE * (1 - i / MAX_ITER) ** 2),
    # Caffe: base / (1 + exp(−gamma · (iter − stepsize))), falling for a negative gamma
    "sigmoid": (
        Policy(name="sigmoid", gamma=0.02 * MAX_ITER),
        lambda i: BASE / (1 + math.exp(0.02 * (i - MAX_ITER / 2))),
    ),
}


@pytest.mark.parametrize("name", CAFFE)
def test_caffe_formulas(name: str) -> None:
    policy, formula = CAFFE[name]
    expected = [formula(i) for i in range(MAX_ITER)]
    assert rates(policy) == pytest.approx(expected, rel=1e-12)


def test_cosine_falls_from_one_to_the_floor() -> None:
    policy = Policy(name="cosine", floor=0.1)
    assert policy.factor(0.0) == 1.0
    assert policy.factor(0.5) == pytest.approx(0.55)
    assert policy.factor(1.0) == pytest.approx(0.1)


def test_warm_up_rises_linearly_and_then_leaves_the_policy_alone() -> None:
    plain, warm = Policy(name="cosine"), Policy(name="cosine", warmup=0.1)
    for t in (0.0, 0.025, 0.05, 0.0999):
        assert warm.factor(t) == pytest.approx(plain.factor(t) * t / 0.1)
    assert warm.factor(0.1) == plain.factor(0.1)


@pytest.mark.parametrize("base", [0.3, 0.9])
def test_onecycle_is_torchs(base: float) -> None:
    steps, rises = 100, 0.3  # torch counts the steps from 0 to the last one inclusive
    policy = Policy(name="onecycle", warmup=rises)
    solver = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=BASE, betas=(base, 0.999))
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        solver, BASE, total_steps=steps + 1, pct_start=(rises * steps + 1) / (steps + 1),
        base_momentum=base - 0.05, max_momentum=base + 0.05,
    )  # fmt: skip
    for step in range(steps):
        group = solver.param_groups[0]
        assert BASE * policy.factor(step / steps) == pytest.approx(group["lr"], rel=1e-12)
        assert policy.momentum(base, step / steps) == pytest.approx(group["betas"][0], rel=1e-12)
        solver.step()
        theirs.step()


def test_momentum_changes_in_onecycle_only_and_stays_a_momentum() -> None:
    cycle = Policy(name="onecycle", warmup=0.3)
    for t in (0.0, 0.1, 0.3, 0.7, 1.0):
        assert Policy(name="cosine", warmup=0.3).momentum(0.9, t) == 0.9
        assert cycle.momentum(0.0, t) == 0.0
        assert 0.0 <= cycle.momentum(0.02, t) < cycle.momentum(0.99, t) <= 0.99


def test_onecycle_without_warm_up_only_falls() -> None:
    curve = [Policy(name="onecycle").factor(i / 10) for i in range(11)]
    assert curve[0] == 1.0
    assert curve == sorted(curve, reverse=True)


def test_progress_beyond_the_end_is_the_end() -> None:
    for name in ("polynomial", "cosine", "step", "sigmoid"):
        policy = Policy(name=name, power=0.5)
        assert policy.factor(1.0 + 1e-9) == policy.factor(1.0)


def test_curve_spans_the_training() -> None:
    curve = Policy(name="polynomial").curve(0.2, points=5)
    assert [t for t, _ in curve] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert [rate for _, rate in curve] == pytest.approx([0.2, 0.15, 0.1, 0.05, 0.0])


@pytest.mark.parametrize(
    "bad", [{"warmup": 1.0}, {"warmup": -0.1}, {"gamma": 0.0}, {"steps": 0}, {"floor": 1.5}]
)
def test_settings_that_cannot_work(bad: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        Policy(**bad)
