"""Fine-tuning beside loops of plain torch, and resumed."""

from __future__ import annotations

import copy
import math
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tessella.artifacts.dataset import Dataset
from tessella.artifacts.run import Augment, Recipe, Run, Solver
from tessella.core.errors import TrainError, UsageError
from tessella.data.loading import batches
from tessella.nn import zoo
from tessella.training.averaging import Average
from tessella.training.growing import share_of_side
from tessella.training.loop import train
from tessella.training.mixing import Mix, drawn_mix, mixed
from tessella.training.state import seed_step
from tests.support.training import PREPROCESS, curve, evaluate, losses, recipe

# Three stages: a stem with its norm, a block with norm and dropout, the head.
NETWORK = """
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        return x + self.drop(self.norm(self.conv(x)).relu())

class Net(nn.Module):
    def __init__(self, classes, channels, height, width):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(channels, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        )
        self.block = Block()
        self.head = nn.Linear(8 * 5 * 5, classes)

    def forward(self, x):
        return self.head(self.block(self.stem(x)).flatten(1))
"""
STEPS = 8  # two epochs


@pytest.fixture(scope="module")
def network(tmp_path_factory) -> str:
    source = tmp_path_factory.mktemp("network") / "net.py"
    source.write_text(NETWORK)
    return f"{source}:Net"


@pytest.fixture(scope="module")
def start(dataset, network, tmp_path_factory) -> Run:
    out = tmp_path_factory.mktemp("start") / "run"
    return train(recipe(dataset, network=network, epochs=1.0), out)


@pytest.fixture(scope="module")
def settings(dataset, network, start) -> Recipe:
    return recipe(dataset, network=network, epochs=2.0, init=str(start.latest().path))


class ByHand:
    """The training of a recipe in plain torch; ``run`` may be changed on the way."""

    def __init__(self, settings: Recipe, start: Run) -> None:
        self.settings = settings
        self.module = zoo.build(start.info.network)
        self.module.load_state_dict(start.latest().weights())
        self.optimizer = self.made({"": 1.0})

    def made(self, factors: dict[str, float]) -> torch.optim.Optimizer:
        """SGD with a factor of the rate for names that begin so."""
        groups = [
            {"params": [p], "factor": next(v for k, v in factors.items() if n.startswith(k)),
             "weight_decay": 1e-4 if p.ndim > 1 else 0.0}
            for n, p in self.module.named_parameters()
        ]  # fmt: skip
        return torch.optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True)

    def batch(self, step: int):
        stream = batches(
            Dataset(self.settings.dataset).train, PREPROCESS, batch_size=10, seed=7,
            epoch=step // 4, start=step % 4, augment=Augment(), training=True,
        )  # fmt: skip
        return next(iter(stream))

    def step(self, number: int, parts: int = 1) -> float:
        seed_step(7, number, 0, torch.device("cpu"))
        batch, total = self.batch(number), 0.0
        self.optimizer.zero_grad()
        for images, labels in zip(
            batch.images.chunk(parts), batch.labels.chunk(parts), strict=True
        ):
            loss = self.loss(number, images, labels) / parts
            loss.backward()
            total += loss.item()
        for group in self.optimizer.param_groups:
            rate = 0.01 * 0.5 * (1 + math.cos(math.pi * number / STEPS))
            group["lr"] = rate * group["factor"]
        self.optimizer.step()
        return total

    def loss(self, number: int, images, labels):
        return F.cross_entropy(self.module(images), labels)


def test_frozen_stages_keep_weights_and_statistics(settings, start, tmp_path):
    run = train(replace(settings, freeze=2), tmp_path / "run")
    hand = ByHand(settings, start)
    for part in (hand.module.stem, hand.module.block):
        part.requires_grad_(False)
        part.eval()
    assert losses(run) == pytest.approx([hand.step(n) for n in range(STEPS)], rel=1e-5)
    before, after = start.latest().weights(), run.latest().weights()
    kept = {name for name in before if torch.equal(before[name], after[name])}
    assert kept == {name for name in before if not name.startswith("head")}
    assert losses(train(replace(settings, freeze=-1), tmp_path / "same")) == losses(run)


def test_a_probe_trains_the_head_first(settings, start, tmp_path):
    run = train(replace(settings, probe_epochs=0.75), tmp_path / "run")
    hand = ByHand(settings, start)
    expected = []
    for number in range(STEPS):
        hand.module.train()
        for part in (hand.module.stem, hand.module.block):
            part.requires_grad_(number >= 3)
            part.train(number >= 3)
        expected.append(hand.step(number))
    assert losses(run) == pytest.approx(expected, rel=1e-5)


def test_each_stage_learns_slower_than_the_next(settings, start, tmp_path):
    run = train(replace(settings, layer_decay=0.5), tmp_path / "run")
    hand = ByHand(settings, start)
    hand.optimizer = hand.made({"head": 1.0, "block": 0.5, "stem": 0.25})
    assert losses(run) == pytest.approx([hand.step(n) for n in range(STEPS)], rel=1e-5)


def test_the_average_is_validated_and_saved(dataset, settings, start, tmp_path):
    run = train(replace(settings, ema=0.7), tmp_path / "run")
    hand = ByHand(settings, start)
    average = copy.deepcopy(hand.module).eval()
    found = []
    for number in range(STEPS):
        found.append(hand.step(number))
        keep = min(0.7, (1 + number) / (10 + number))
        with torch.no_grad():
            for own, now in zip(
                average.state_dict().values(), hand.module.state_dict().values(), strict=True
            ):
                own.copy_(keep * own + (1 - keep) * now if own.is_floating_point() else now)
    assert losses(run) == pytest.approx(found, rel=1e-5)  # training itself is as without
    for name, value in run.latest().weights().items():
        torch.testing.assert_close(value, average.state_dict()[name])
    report = evaluate(average, Dataset(dataset).val, batch_size=10)
    assert run.latest().info.metrics["val/loss"] == pytest.approx(report.loss, rel=1e-4)


def test_the_average_of_what_is_shared_or_put_in_another_s_place():
    """A weight of two layers moves once a step; a buffer may be another tensor each time."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    module.register_buffer("seen", torch.zeros(()))
    average = Average(module, 0.5)
    before = module[0].weight.detach().clone()
    with torch.no_grad():
        module[0].weight += 1
    module.seen = torch.ones(())
    average.update(1000)
    torch.testing.assert_close(average.module[1].weight.data, before + 0.5)
    assert average.module.seen == 0.5


def test_parts_of_a_batch_add_up(settings, start, tmp_path):
    run = train(replace(settings, accumulate=2), tmp_path / "run")
    hand = ByHand(settings, start)
    assert losses(run) == pytest.approx([hand.step(n, parts=2) for n in range(STEPS)], rel=1e-5)
    with pytest.raises(UsageError, match=r"GPUs times parts.*use batch_size=12"):
        replace(settings, accumulate=3)


# A network that pools at its end, and so takes images of any size.
POOLED = NETWORK.replace("8 * 5 * 5", "8").replace(
    "self.block(self.stem(x)).flatten(1)", "self.block(self.stem(x)).mean((2, 3))"
)


@pytest.fixture(scope="module")
def pooled(dataset, tmp_path_factory) -> tuple[Recipe, Run]:
    folder = tmp_path_factory.mktemp("pooled")
    source = folder / "pooled.py"
    source.write_text(POOLED)
    settings = recipe(dataset, network=f"{source}:Net", epochs=1.0)
    start = train(settings, folder / "start")
    return replace(settings, epochs=2.0, init=str(start.latest().path), grow_from=0.5), start


def test_images_grow(pooled, tmp_path):
    """Twelve pixels, from six on: whole in the last quarter."""
    grows, start = pooled
    hand, sides = ByHand(grows, start), []

    def loss(number, images, labels):
        sides.append(round(12 * share_of_side(0.5, number / STEPS)))
        small = F.interpolate(images, (sides[-1],) * 2, mode="bilinear", antialias=True)
        return F.cross_entropy(hand.module(small), labels)

    hand.loss = loss
    found = losses(train(grows, tmp_path / "run"))
    assert found == pytest.approx([hand.step(n) for n in range(STEPS)], rel=1e-5)
    assert sides[0] == 6
    assert sides == sorted(sides)
    assert sides[-2:] == [12, 12]


def test_a_network_of_one_size_cannot_begin_small(settings, tmp_path):
    with pytest.raises(UsageError, match="does not take smaller images"):
        train(replace(settings, grow_from=0.6), tmp_path / "run")


def test_what_is_computed_again_is_the_same(settings, tmp_path):
    plain = train(settings, tmp_path / "plain")
    again = train(replace(settings, recompute=True), tmp_path / "again")
    assert curve(again) == curve(plain)
    weights = plain.latest().weights()
    assert all(torch.equal(v, weights[k]) for k, v in again.latest().weights().items())


def test_recomputing_keeps_less(settings, start):
    """Of the block its input alone is kept, and not what lies between."""
    module = zoo.build(start.info.network)
    kept: list[int] = []

    def held() -> int:
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.append(t.numel()) or t, lambda t: t
        ):
            module(torch.randn(4, 1, 12, 12))
        return sum(kept)

    before = held()
    assert trainer_recomputes(module) == 1
    assert held() < before


def trainer_recomputes(module: nn.Module) -> int:
    from tessella.training.recomputing import recompute_blocks

    with pytest.raises(TrainError, match="no blocks to compute again"):
        recompute_blocks(nn.Sequential(nn.Conv2d(1, 1, 3), nn.Linear(2, 2)))
    return recompute_blocks(module)


# --- mixing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "augment", [Augment(mixup=0.4), Augment(cutmix=1.0), Augment(mixup=0.4, cutmix=1.0)]
)
def test_mixed_images_have_mixed_labels(settings, start, tmp_path, augment):
    """Cross entropy with soft labels, as torch has it, on images that are mixed by hand."""
    run = train(replace(settings, augment=augment), tmp_path / "run")
    hand = ByHand(settings, start)

    def loss(number, images, labels):
        mix = drawn_mix(augment, seed=7, step=number)
        made, share = mixed(images, mix)
        hot = F.one_hot(labels, 3).float()
        soft = share * hot + (1 - share) * hot.roll(1, 0)
        return F.cross_entropy(hand.module(made), soft)

    hand.loss = loss
    assert losses(run) == pytest.approx([hand.step(n) for n in range(STEPS)], rel=1e-5)


def test_a_mix_takes_pixels_of_the_neighbour():
    images = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 1, 20, 30)
    made, share = mixed(images, Mix(share=0.3))
    assert share == 0.3
    torch.testing.assert_close(made, 0.3 * images + 0.7 * images.roll(1, 0))
    for step in range(40):
        mix = drawn_mix(Augment(cutmix=1.0), seed=0, step=step)
        made, share = mixed(images, mix)
        foreign = (made != images)[1]
        assert foreign.float().mean().item() == pytest.approx(1 - share)
        assert made[1][foreign].unique().tolist() in ([], [0.0])
        rows, columns = foreign[0].any(1), foreign[0].any(0)  # a window, without holes
        assert foreign.sum() == rows.sum() * columns.sum()
    both = [drawn_mix(Augment(mixup=0.2, cutmix=1.0), seed=0, step=n) for n in range(200)]
    assert 60 < sum(mix.window is None for mix in both) < 140
    assert drawn_mix(Augment(), seed=0, step=0) is None


# --- all of it, resumed ---------------------------------------------------------------------------


def test_all_of_it_resumes_bit_for_bit(pooled, tmp_path):
    """Stopped in the probe, and behind it."""
    everything = replace(
        pooled[0],
        freeze=1,
        probe_epochs=0.75,
        layer_decay=0.7,
        ema=0.9,
        accumulate=2,
        recompute=True,
        solver=Solver(name="adamw", lr=0.01),
        augment=Augment(flip=True, mixup=0.3, cutmix=0.5),
    )
    whole = train(everything, tmp_path / "whole")

    def stop(event):
        if event.kind == "metric" and event.step in (2, 5):
            signal.raise_signal(signal.SIGINT)

    out: Path = tmp_path / "broken"
    for resume in (False, True):
        with pytest.raises(KeyboardInterrupt):
            train(everything, out, resume=resume, emit=stop)
    resumed = train(everything, out, resume=True)
    assert curve(resumed) == curve(whole)
    expected = whole.latest().weights()
    assert all(torch.equal(v, expected[k]) for k, v in resumed.latest().weights().items())


def test_what_cannot_be_tuned_is_said(dataset, settings, tmp_path):
    with pytest.raises(UsageError, match=r"have learned something.*init='pretrained'"):
        recipe(dataset, freeze=1)
    with pytest.raises(UsageError, match=r"a part of epochs.*freeze=-1"):
        replace(settings, probe_epochs=2.0)
    with pytest.raises(UsageError, match="layer_decay and grow_from are above 0"):
        replace(settings, layer_decay=0.0)
    with pytest.raises(UsageError, match=r"no stage of the network would learn.*at most 2"):
        train(replace(settings, freeze=3), tmp_path / "run")
