from __future__ import annotations

import pytest
import torch
from torch import nn, optim

from tessella.artifacts.run import Solver
from tessella.core.errors import TrainError, UsageError
from tessella.training.solver import optimizer_for, set_rate

# Each solver as torch.optim spells it, for lr 0.02, momentum 0.8 and weight decay 0.1.
REFERENCES = {
    "sgd": lambda p: optim.SGD(p, lr=0.02, momentum=0.8),
    "nesterov": lambda p: optim.SGD(p, lr=0.02, momentum=0.8, nesterov=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.02),
    "adadelta": lambda p: optim.Adadelta(p, lr=0.02, rho=0.8),
    "adam": lambda p: optim.Adam(p, lr=0.02, betas=(0.8, 0.999)),
    "adamw": lambda p: optim.AdamW(p, lr=0.02, betas=(0.8, 0.999)),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.02, momentum=0.8),
}


def small_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def descend(module: nn.Module, optimizer: optim.Optimizer, steps: int) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 6, generator=generator)
    labels = (x @ torch.randn(6, 3, generator=generator)).argmax(1)
    out = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(x), labels)
        loss.backward()
        optimizer.step()
        out.append(loss.item())
    return out


@pytest.mark.parametrize("name", REFERENCES)
def test_equals_torch_with_decay_on_weights_only(name):
    ours, theirs = small_network(), small_network()
    solver = Solver(name=name, lr=0.02, momentum=0.8, weight_decay=0.1)
    reference = REFERENCES[name](
        [
            {"params": [theirs[0].weight, theirs[3].weight], "weight_decay": 0.1},
            {
                "params": [theirs[0].bias, theirs[1].weight, theirs[1].bias, theirs[3].bias],
                "weight_decay": 0.0,
            },
        ]
    )
    mine = descend(ours, optimizer_for(ours, solver), 10)
    assert mine == descend(theirs, reference, 10)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", REFERENCES)
def test_reduces_the_loss(name):
    module = small_network()
    # AdaDelta finds its own step length, from almost nothing: its rate is a factor around 1.
    rate = 1.0 if name == "adadelta" else 0.01
    curve = descend(module, optimizer_for(module, Solver(name=name, lr=rate)), 60)
    assert curve[-1] < 0.8 * curve[0]


def test_rate_applies_to_all_parameters():
    module = small_network()
    optimizer = optimizer_for(module, Solver(name="sgd", momentum=0.0, weight_decay=0.0))
    set_rate(optimizer, 0.0, 0.0)
    before = [p.clone() for p in module.parameters()]
    descend(module, optimizer, 2)
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


@pytest.mark.parametrize(
    ("name", "seen"),
    [("sgd", "momentum"), ("nesterov", "momentum"), ("rmsprop", "momentum"), ("adadelta", "rho")],
)
def test_momentum_is_set_where_the_solver_has_one(name, seen):
    optimizer = optimizer_for(small_network(), Solver(name=name))
    set_rate(optimizer, 0.1, 0.85)
    assert {group[seen] for group in optimizer.param_groups} == {0.85}


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_momentum_is_adams_first_beta(name):
    optimizer = optimizer_for(small_network(), Solver(name=name))
    set_rate(optimizer, 0.1, 0.85)
    assert {group["betas"] for group in optimizer.param_groups} == {(0.85, 0.999)}


def test_frozen_parameters_stay_out():
    module = small_network()
    module[0].requires_grad_(False)
    optimizer = optimizer_for(module, Solver())
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in [*module[1].parameters(), *module[3].parameters()]}


def test_what_cannot_work_is_said():
    with pytest.raises(UsageError, match="nesterov needs momentum"):
        optimizer_for(small_network(), Solver(name="nesterov", momentum=0.0))
    with pytest.raises(TrainError, match="no parameters"):
        optimizer_for(nn.ReLU(), Solver())
