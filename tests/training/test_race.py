"""The ways of a step: which a recipe can take, how they are timed, and that they train alike."""

from __future__ import annotations

import json
import sys
import time

import pytest
import torch

from tessella.artifacts.run import Run
from tessella.core.errors import ArtifactError
from tessella.core.events import read_events, silent
from tessella.training import race as racing
from tessella.training import ways
from tessella.training.loop import train
from tessella.training.parallel import alone
from tessella.training.race import Raced, described, fastest, race, way_of
from tessella.training.ways import refusal, usual_way
from tests.support.training import losses, recipe

CPU = torch.device("cpu")
NETWORK = """
from torch import nn

class Tiny(nn.Sequential):
    def __init__(self, num_classes=3):
        super().__init__(nn.Flatten(), nn.Linear(144, 16), nn.ReLU(), nn.Linear(16, num_classes))
"""


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A network of two layers in a file, of which Dynamo makes graphs that torch runs: code of a
    C++ compiler takes 12 to 40 s, and gives the same losses (within 1e-4, tried by hand).
    """
    monkeypatch.setattr(ways, "COMPILER", "aot_eager")
    file = tmp_path / "tiny.py"
    file.write_text(NETWORK)
    return f"{file}:Tiny"


@pytest.mark.parametrize(
    ("changes", "way", "why"),
    [
        ({}, "eager", "run on a GPU"),
        ({"compile": True}, "compile", "the recipe says compile"),
        ({"fuse": False}, "eager", "the recipe says fuse=False"),
        ({"backend": "tessella"}, "eager", "backend='tessella'"),
        ({"quantize": "int8", "init": "runs/a"}, "eager", "roundings"),
    ],
)
def test_the_usual_way_of_a_recipe_and_why(dataset, changes, way, why):
    found = usual_way(recipe(dataset, **changes), CPU)
    assert found.way == way
    assert why in found.why


def test_code_is_made_of_torchs_own_steps_alone(dataset):
    assert refusal("compile", recipe(dataset), CPU) is None
    assert "backend" in str(refusal("compile", recipe(dataset, backend="tessella"), CPU))
    rounded = recipe(dataset, quantize="int8", init="runs/a")
    assert "roundings" in str(refusal("compile", rounded, torch.device("cuda")))


def test_ways_are_timed_in_processes_and_what_cannot_run_says_why(dataset, tiny):
    settings = recipe(dataset, network=tiny)
    here = racing.measured(settings, "compile")  # a process takes 4 s or more
    eager, fused, compiled = race(settings, CPU, budget_s=120.0, known=[here])
    assert [eager.way, fused.way, compiled.way] == ["eager", "fused", "compile"]
    assert fused.problem == "our kernels for it run on a GPU"
    assert (eager.problem, compiled.problem) == (None, None)
    assert 0 < eager.step_s < eager.setup_s
    assert 0 < compiled.step_s < 0.5 * compiled.setup_s
    assert "ms a step, the first after" in described(compiled)


def test_a_way_that_fails_or_takes_too_long_is_told(dataset, monkeypatch):
    programs = {
        "eager": "import sys; print('no'); sys.exit('out of everything')",
        "compile": "import time; time.sleep(600)",
    }
    monkeypatch.setattr(
        racing, "command_of", lambda recipe, way: [sys.executable, "-c", programs[way]]
    )
    began = time.monotonic()
    eager, _, compiled = race(recipe(dataset), CPU, budget_s=1.0)
    assert time.monotonic() - began < 5
    assert eager.problem == "it failed: out of everything"
    assert compiled.problem.startswith("not ready after 0.")
    assert fastest((eager, compiled), "eager") == "eager"
    known = Raced(way="eager", step_s=0.01)
    _, _, compiled = race(recipe(dataset), CPU, budget_s=0.0, known=[known])
    assert described(compiled) == "no time was left for it"


def test_only_what_is_clearly_faster_replaces_the_usual_way():
    def raced(eager, compiled):
        return [Raced(way="eager", step_s=eager), Raced(way="compile", step_s=compiled)]

    assert fastest(raced(1.0, 0.98), "eager") == "eager"
    assert fastest(raced(1.0, 0.9), "eager") == "compile"
    assert fastest(raced(None, 0.9), "eager") == "compile"
    assert fastest(raced(None, None), "fused") == "fused"


def told_ways(run: Run) -> list[str]:
    events, _ = read_events(run.path / "events.jsonl")
    return [e.text for e in events if e.kind == "phase" and e.name == "way"]


def test_a_run_that_goes_on_takes_the_way_that_it_began_with(dataset, tmp_path, monkeypatch):
    raced = [Raced(way="eager", step_s=0.002), Raced(way="compile", problem="no compiler")]
    monkeypatch.setattr(racing, "RACED_ON", ("cpu",))
    monkeypatch.setattr(racing, "LEAST_STEPS", 5)
    monkeypatch.setattr(racing, "race", lambda *_, **__: raced)
    run = train(recipe(dataset, epochs=2.0), tmp_path / "run")
    monkeypatch.setattr(racing, "race", lambda *_, **__: pytest.fail("it was raced already"))
    run = train(recipe(dataset, epochs=3.0), run.path, resume=True)
    first, again = told_ways(run)
    assert first == again
    assert "eager 2 ms a step; compile no compiler" in first
    short = train(recipe(dataset, epochs=1.0), tmp_path / "short")  # too short for a race
    assert not (short.path / racing.FILE).exists()

    file = run.path / racing.FILE
    file.write_text(json.dumps({"way": "compile", "why": "it was faster"}))
    assert way_of(run, alone(), 12, silent).way == "compile"
    file.write_text("[1]")
    with pytest.raises(ArtifactError, match="no way of a step"):
        way_of(run, alone(), 12, silent)


def test_compiled_steps_train_alike(dataset, tiny, tmp_path):
    plain = recipe(dataset, network=tiny, epochs=2.0, fuse=False)
    eager = train(plain, tmp_path / "eager")
    settings = recipe(dataset, network=tiny, epochs=2.0, compile=True)
    compiled = train(settings, tmp_path / "compiled")
    assert told_ways(compiled) == ["steps: torch.compile (the recipe says compile)"]
    assert losses(compiled) == pytest.approx(losses(eager), rel=1e-4)
    assert eager.checkpoints()[-1].weights().keys() == compiled.checkpoints()[-1].weights().keys()
