from __future__ import annotations

import pytest
import torch
from torch import nn, optim

from tessella.artifacts.dataset import Dataset
from tessella.artifacts.run import Solver
from tessella.core.errors import TrainError, UsageError
from tessella.training.parallel import alone
from tessella.training.prepare import describe_run
from tessella.training.solver import optimizer_for, set_rate
from tessella.training.trainer import Trainer
from tests.support.training import recipe

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


def test_filters_lose_the_means_of_their_gradients_and_other_weights_do_not():
    def stepped(*, centralize: bool) -> tuple[nn.Module, list[torch.Tensor]]:
        torch.manual_seed(0)
        module = nn.Sequential(
            nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3),
            nn.Conv2d(4, 4, 3, groups=4, bias=False), nn.ConvTranspose2d(4, 4, 3, bias=False),
            nn.Conv2d(4, 4, 1, bias=False), nn.Flatten(), nn.Linear(64, 3, bias=False),
        )  # fmt: skip
        before = [p.detach().clone() for p in module.parameters()]
        solver = Solver(name="sgd", lr=1.0, momentum=0, weight_decay=0, centralize=centralize)
        optimizer = optimizer_for(module, solver)
        module(torch.randn(5, 3, 8, 8)).square().sum().backward()
        optimizer.step()
        return module, [p.detach() - b for p, b in zip(module.parameters(), before, strict=True)]

    module, plain = stepped(centralize=False)
    for name, change, ours in zip(
        dict(module.named_parameters()), plain, stepped(centralize=True)[1], strict=True
    ):
        if name in ("0.weight", "5.weight"):
            mean = change.flatten(1).mean(1)[:, None, None, None]
            assert mean.abs().max() > 1e-3
            torch.testing.assert_close(ours, change - mean, rtol=1e-4, atol=1e-5)
        else:
            torch.testing.assert_close(ours, change, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("centralize", [False, True])
def test_filters_that_are_drawn_begin_without_their_means(dataset, centralize):
    settings = recipe(dataset, network="resnet18", solver=Solver(centralize=centralize))
    info = describe_run(settings)
    module = Trainer(info, Dataset(settings.dataset).train.info, alone()).module
    means = module.layer1[0].conv1.weight.flatten(1).mean(1).abs()
    assert (means.max() < 1e-7) == centralize
    assert module.fc.weight.mean().abs() > 1e-7


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
