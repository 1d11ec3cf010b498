"""Which way a training takes: by times that are known, or by a race where that pays."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

from tessella.artifacts.dataset import Dataset
from tessella.artifacts.run import Augment, Run
from tessella.core.errors import ArtifactError
from tessella.core.events import silent
from tessella.core.record import to_plain
from tessella.nn import zoo
from tessella.training import choosing, worker
from tessella.training.choosing import (
    GAINS,
    Prospect,
    kind_of,
    prospect_of,
    recalled,
    remember,
    way_of,
)
from tessella.training.expected import kept_bytes
from tessella.training.loop import train
from tessella.training.parallel import alone
from tessella.training.prepare import begin, describe_run
from tessella.training.race import Raced
from tessella.training.ways import Choice
from tests.support.training import recipe, told_ways

TIMES = (
    Raced(way="eager", step_s=0.02, setup_s=1.0),
    Raced(way="fused", problem="our kernels for it run on a GPU"),
    Raced(way="compile", step_s=0.01, setup_s=31.0),
)


@pytest.fixture
def raced(monkeypatch) -> list[float]:
    """A CPU whose trainings may be raced, with these times; the budgets of races, in seconds."""
    budgets: list[float] = []

    def race(*_, budget_s: float, known: Sequence[Raced]) -> tuple[Raced, ...]:
        budgets.append(budget_s)
        return TIMES

    monkeypatch.setattr(choosing, "RACED_ON", ("cpu",))
    monkeypatch.setattr(choosing, "race", race)
    monkeypatch.setenv("CXX", sys.executable)
    return budgets


def way_for(settings, folder, steps: int, told=silent) -> Choice:
    run, _ = begin(settings, folder, resume=folder.exists())
    return way_of(run, Dataset(settings.dataset).train.info, alone(), steps, emit=told)


def test_a_race_pays_or_not_and_is_remembered(dataset, tmp_path, monkeypatch, raced):
    """In the user's own words: how long the training takes, and what could be saved."""
    settings, events = recipe(dataset), []
    estimated = prospect_of(describe_run(settings), 1000).seconds
    assert estimated == pytest.approx(1000 * prospect_of(describe_run(settings), 1).seconds)
    long = int(1000 * 2 * choosing.RACE_COSTS_S / GAINS["no batch norms"] / estimated)
    short = way_for(settings, tmp_path / "short", long // 4)
    assert (short.way, raced) == ("eager", [])
    assert "a race would cost 2.5 min" in short.why
    assert choosing.in_words(20_000) == "6 h"
    chosen = way_for(settings, tmp_path / "long", long, events.append)
    assert chosen.way == "compile"
    assert raced == [pytest.approx(300, rel=0.01)]
    assert "network with no batch norms, of which torch.compile may save 5 min" in events[0].text
    assert chosen.why.startswith(
        "raced: eager 20 ms a step, the first after 1 s; fused our kernels"
    )
    # by the same times another run decides at once, and a shorter one otherwise
    again = way_for(settings, tmp_path / "again", 10_000)
    assert (again.way, len(raced)) == ("compile", 1)
    assert again.why.startswith("remembered: ")
    assert again.why.endswith(", 2.2 min for 10,000 steps")
    assert way_for(settings, tmp_path / "shorter", 2_000).way == "eager"
    # a run that goes on takes the way that it began with, whatever is remembered since
    remember(describe_run(settings), [replace(TIMES[2], step_s=1.0)])
    assert way_for(settings, tmp_path / "again", 10_000) == again
    # other settings have other times
    other = way_for(recipe(dataset, batch_size=20), tmp_path / "other", 10_000)
    assert "a race would cost" in other.why
    for decided in ({"fuse": False}, {"deterministic": True}):
        assert "race" not in way_for(recipe(dataset, **decided), tmp_path / str(decided), long).why
    assert len(raced) == 1


def test_what_is_kept_of_a_race(dataset, tmp_path, monkeypatch, raced):
    """Not what went wrong for a moment, and nothing instead of a time; late is late in a time."""
    info, known = describe_run(recipe(dataset)), {}
    usual, _, code = TIMES
    moment = Raced(way="compile", failed=True, passing=True, problem="it failed: out of memory")
    lasting = replace(moment, passing=False, problem="it failed: no compiler")
    late = Raced(way="compile", problem="not ready after 140 s", late_s=150.0)

    def kept(*found: Raced) -> list[Raced]:
        choosing._place(info).unlink(missing_ok=True)
        for one in found:
            remember(info, [one])
        return list(recalled(info))

    assert kept(usual, moment) == [usual]
    assert kept(code, lasting, late) == [code]
    assert kept(usual, lasting, code) == [usual, code]
    assert kept(usual, late) == [usual, late]
    # a race of no more seconds would be as late; one of more is run, with what is known
    monkeypatch.setattr(choosing, "race", lambda *_, known=(), **__: known_of(known))

    def known_of(found: Sequence[Raced]) -> tuple[Raced, ...]:
        known.update({r.way: r for r in found})
        return TIMES

    per_step = prospect_of(info, 1).saved_s
    for number, (saved, way) in enumerate(((151, "eager"), (149, "eager"), (200, "compile"))):
        kept(usual, replace(late, late_s=170.0))
        assert way_for(recipe(dataset), tmp_path / f"{number}", int(saved / per_step)).way == way
        assert (known != {}) == (way == "compile")
    assert known == {"eager": usual, "compile": replace(late, late_s=170.0)}
    assert choosing._tells([replace(late, way="eager")], Choice(way="eager", why=""), 150.0)
    mixes = replace(info, recipe=recipe(dataset, augment=Augment(mixup=0.2)))
    assert choosing._place(mixes) != choosing._place(info)  # its steps are no graphs


def test_broken_memories_are_none(dataset, caplog):
    info = describe_run(recipe(dataset))
    assert recalled(info) == ()
    remember(info, TIMES)
    assert [r.way for r in recalled(info)] == ["eager", "compile"]  # what is no time is not kept
    path = choosing._place(info)
    for text in ("{", "3", '[{"way": "by foot"}]', "[" * 9999):
        path.write_text(text)
        assert recalled(info) == ()
    assert "earlier times" in caplog.text


@pytest.mark.parametrize(
    ("name", "options", "kind"),
    [
        ("resnet18", None, "convolutions"),
        ("timm/mobilenetv3_small_100", None, "depthwise convolutions"),
        ("timm/vit_tiny_patch16_224", {"patch_size": 8}, "no batch norms"),
    ],
)
def test_kinds_of_networks(name, options, kind):
    with torch.device("meta"):
        module = zoo.build(zoo.network(name, classes=5, size=(64, 64), options=options))
    assert kind_of(module) == kind
    assert kind_of(nn.Sequential(nn.Conv3d(1, 1, 1), nn.LayerNorm(3))) == "volumes"


def test_a_step_is_estimated_by_products_or_by_memory(dataset, monkeypatch):
    """Products: 6 operations for each weight and place, forward and backward."""
    info = describe_run(recipe(dataset, precision="bf16", batch_size=10))
    weights = {n: p.numel() for n, p in zoo.build(info.network).named_parameters() if p.dim() > 1}
    monkeypatch.setattr(choosing, "BYTES_PER_S", 1e30)
    places = dict.fromkeys(weights, 1)
    first, second = list(weights)[:2]
    places[first], places[second] = 12 * 12, 6 * 6  # LeNet's convolutions, padded here
    found = prospect_of(info, 7).seconds * choosing.FLOPS_PER_S[2] / 7
    assert found == pytest.approx(6 * 10 * sum(n * places[name] for name, n in weights.items()))
    monkeypatch.undo()
    monkeypatch.setattr(choosing, "FLOPS_PER_S", {2: 1e30})
    kept = kept_bytes(zoo.build(info.network), (10, 1, 12, 12), "bf16")
    moved = prospect_of(info, 7).seconds * choosing.BYTES_PER_S / 7
    assert moved == pytest.approx(choosing.MOVED * kept)
    assert Prospect(kind="convolutions", seconds=None).pays is False


def test_a_run_that_goes_on_takes_the_way_that_it_began_with(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(choosing, "RACED_ON", ("cpu",))
    failed = Raced(way="compile", failed=True, problem="it failed: no compiler")
    remember(describe_run(recipe(dataset)), [Raced(way="eager", step_s=0.002), failed])
    run = train(recipe(dataset, epochs=2.0), tmp_path / "run")
    run = train(recipe(dataset, epochs=3.0), run.path, resume=True)
    first, again = told_ways(run)
    assert first == again
    assert "remembered: eager 2 ms a step; compile it failed: no compiler" in first
    short = train(recipe(dataset, batch_size=20), tmp_path / "short")  # too short for a race
    assert not (short.path / choosing.FILE).exists()

    def kept(text: str) -> Choice:
        (run.path / choosing.FILE).write_text(text)
        return way_of(run, Dataset(dataset).train.info, alone(), 12, emit=silent)

    monkeypatch.setenv("CXX", sys.executable)
    assert kept(json.dumps({"way": "compile", "why": "it was faster"})).way == "compile"
    elsewhere = kept(json.dumps({"way": "fused", "why": "it was faster on a GPU"}))
    assert elsewhere.way == "eager"
    assert elsewhere.why == (
        "way.json says fused, which cannot run here: our kernels for it run on a GPU"
    )
    with pytest.raises(ArtifactError, match="no way of a step"):
        kept("[1]")


def test_trials_of_a_sweep_are_not_raced(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(choosing, "RACED_ON", ("cpu",))
    monkeypatch.setattr(choosing, "RACE_COSTS_S", 0.0)
    monkeypatch.setattr(choosing, "race", lambda *_, **__: pytest.fail("a trial is raced"))
    monkeypatch.setattr(worker, "end_with_parent", lambda heard: None)
    asked, out = tmp_path / "recipe.json", tmp_path / "trial"
    asked.write_text(json.dumps(to_plain(recipe(dataset, epochs=1.0))))
    monkeypatch.setattr(sys, "argv", ["worker", str(out), "--recipe", str(asked)])
    assert worker.main() == 0
    assert "nothing is fused" in told_ways(Run(out))[0]
    with pytest.raises(pytest.fail.Exception):
        train(recipe(dataset, epochs=1.0), tmp_path / "alone")
