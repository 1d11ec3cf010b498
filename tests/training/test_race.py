"""The ways of a step: which a recipe can take, how they are timed, and that they train alike."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

from tessella.artifacts.dataset import Dataset
from tessella.core.record import from_plain, to_plain
from tessella.training import parallel, ways
from tessella.training import race as racing
from tessella.training.loop import train
from tessella.training.prepare import describe_run
from tessella.training.race import Order, Raced, described, fastest, race
from tessella.training.ways import Choice, refusal, usual_way
from tests.support.training import losses, recipe, told_ways, write_dataset

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
    monkeypatch.setattr(ways, "COMPILER", "eager")
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


def test_code_is_made_of_torchs_own_steps_alone(dataset, monkeypatch):
    monkeypatch.setenv("CXX", sys.executable)
    assert refusal("compile", recipe(dataset), CPU) is None
    assert "backend" in str(refusal("compile", recipe(dataset, backend="tessella"), CPU))
    assert "order of sums" in str(refusal("compile", recipe(dataset, deterministic=True), CPU))
    rounded = recipe(dataset, quantize="int8", init="runs/a")
    assert "roundings" in str(refusal("compile", rounded, torch.device("cuda")))
    assert "grow_from" in str(refusal("compile", recipe(dataset, grow_from=0.5), CPU))
    monkeypatch.setenv("CXX", "/no/compiler")
    assert "no C++ compiler" in str(refusal("compile", recipe(dataset), CPU))
    monkeypatch.setattr(ways, "can_fuse", lambda: False)
    for way in ("fused", "compile"):
        assert "Triton" in str(refusal(way, recipe(dataset), torch.device("cuda")))


def order(settings) -> Order:
    trained = Dataset(settings.dataset, deep=False).info.splits["train"]
    return Order(info=describe_run(settings), trained=trained)


def raced_here(settings, **options) -> tuple[Raced, ...]:
    made = order(settings)
    return race(made.info, made.trained, CPU, **options)


def test_the_program_times_a_way_without_the_dataset(tmp_path, tiny, monkeypatch, capsys):
    """It runs in this process: another one imports torch and Dynamo for 7 s, alone on a core."""
    copied = write_dataset(tmp_path / "data", train=40, val=18)
    made = order(recipe(copied, network=tiny))
    shutil.rmtree(copied)
    with (tmp_path / "order").open("w+b") as file:
        file.write(json.dumps(to_plain(made)).encode())
        file.seek(0)
        python, _, _, module, *arguments = racing.command_of(os.dup(file.fileno()), "eager")
        assert python == sys.executable
        with monkeypatch.context() as patch:
            patch.setattr(parallel, "end_with_parent", lambda: None)
            patch.setattr(sys, "argv", [module, *arguments])
            patch.delitem(sys.modules, module)
            with pytest.raises(SystemExit) as ended:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert ended.value.code == 0
    eager = from_plain(Raced, json.loads(capsys.readouterr().out.splitlines()[-1]), where="it")
    assert (eager.way, eager.problem, eager.failed) == ("eager", None, False)
    assert 0 < eager.step_s < eager.setup_s
    assert "ms a step, the first after" in described(eager)


def pretended(monkeypatch, **programs: str) -> list[str]:
    """Ways are these programs, each with an order's file; their names, as they are started."""
    started = []

    def command(file: int, way: str) -> list[str]:
        started.append(way)
        return [sys.executable, "-S", "-c", programs[way], str(file), way]

    monkeypatch.setattr(racing, "command_of", command)
    monkeypatch.setattr(racing, "refusal", lambda way, *_: None if way in programs else "no")
    return started


def test_a_way_that_fails_or_takes_too_long_is_told(dataset, monkeypatch):
    pretended(
        monkeypatch,
        eager="import sys; print('no'); sys.exit('out of everything')",
        compile="import time; time.sleep(600)",
    )
    began = time.monotonic()
    eager, _, compiled = raced_here(recipe(dataset), budget_s=1.0)
    assert time.monotonic() - began < 60
    assert (eager.failed, eager.passing) == (True, False)
    assert eager.problem == "it failed: out of everything"
    assert not compiled.failed
    assert compiled.problem.startswith("not ready after ")
    assert compiled.late_s == 1.0
    assert fastest((eager, compiled), "eager") == "eager"
    known = Raced(way="eager", step_s=0.01)
    _, _, compiled = raced_here(recipe(dataset), budget_s=0.0, known=[known])
    assert described(compiled) == "not timed: --race gives it seconds"
    late = Raced(way="compile", problem="late", late_s=9.0)
    for budget_s, same in ((0.0, True), (9.5, False)):
        pretended(monkeypatch, eager="", compile="import os; os.kill(os.getpid(), 9)")
        found = raced_here(recipe(dataset), budget_s=budget_s, known=[known, late])
        assert (found[2] == late) == same
    assert found[2].passing  # killed, as one is that the host has no memory for


ANSWER = """
import json, sys
from known_here import IMAGES
asked = json.load(open(int(sys.argv[1])))
each_s = asked["info"]["recipe"]["batch_size"] / IMAGES / asked["trained"]["count"]
print(json.dumps({"way": sys.argv[2], "step_s": each_s}))
"""


def test_the_usual_way_runs_first_and_each_knows_the_order(dataset, tmp_path, monkeypatch):
    (tmp_path / "known_here.py").write_text("IMAGES = 2")
    monkeypatch.syspath_prepend(tmp_path)
    started = pretended(monkeypatch, **dict.fromkeys(ways.WAYS, ANSWER))
    monkeypatch.setattr(racing, "usual_way", lambda *_: Choice(way="fused", why="a GPU"))
    raced = raced_here(recipe(dataset), budget_s=60.0)
    assert started == ["fused", "compile", "eager"]
    assert [(r.way, r.step_s) for r in raced] == [(way, 0.125) for way in ways.WAYS]


def test_whatever_a_process_prints_is_no_error_here(dataset, monkeypatch):
    answer = """
print("a library says", end="")
print('\\n{"way": "eager", "step_s": 0.25}')
print('{"another": "line"}')
print('{"way": "compile", "step_s": 1.0}')
print("[" * 9999)
raise SystemExit(3)
"""
    pretended(monkeypatch, eager=answer, compile="pass")
    eager, _, compiled = raced_here(recipe(dataset), budget_s=60.0)
    assert eager == Raced(way="eager", step_s=0.25)
    assert (compiled.failed, compiled.step_s) == (True, None)
    assert "exit code 0, and it said nothing" in described(compiled)

    def refused(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(subprocess, "Popen", refused)
    eager, _, _ = raced_here(recipe(dataset), budget_s=60.0)
    assert eager.failed
    assert "cannot be started: [Errno 12]" in eager.problem


def test_a_process_without_memory_says_so_at_once(dataset, monkeypatch):
    seen = []

    def cramped(self, x):
        seen.append(len(x))
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")

    monkeypatch.setattr(nn.Conv2d, "forward", cramped)
    with pytest.raises(RuntimeError, match="can't allocate"):
        racing.measured(order(recipe(dataset)), "eager")
    assert seen == [10]  # no smaller batch


def test_only_what_is_clearly_faster_replaces_the_usual_way():
    def raced(eager, compiled):
        return [Raced(way="eager", step_s=eager), Raced(way="compile", step_s=compiled)]

    assert fastest(raced(1.0, 0.98), "eager") == "eager"
    assert fastest(raced(1.0, 0.9), "eager") == "compile"
    assert fastest(raced(None, 0.9), "eager") == "eager"  # it ran out of time
    failed = Raced(way="eager", problem="it failed: no", failed=True)
    assert fastest([failed, *raced(None, 0.9)[1:]], "eager") == "compile"
    assert fastest([failed, *raced(None, None)[1:]], "eager") == "eager"
    assert fastest(raced(None, None), "fused") == "fused"


def test_what_is_ready_sooner_wins_a_short_training():
    raced = [
        Raced(way="fused", step_s=0.03, setup_s=10.0),
        Raced(way="compile", step_s=0.02, setup_s=110.0),
    ]
    assert fastest(raced, "fused") == "compile"
    assert fastest(raced, "fused", 9_000) == "fused"  # 280 and 290 s
    assert fastest(raced, "fused", 10_000) == "fused"  # equal
    assert fastest(raced, "fused", 12_000) == "compile"  # 370 and 350 s


def test_compiled_steps_train_alike(dataset, tiny, tmp_path):
    plain = recipe(dataset, network=tiny, epochs=2.0, fuse=False)
    eager = train(plain, tmp_path / "eager")
    settings = recipe(dataset, network=tiny, epochs=2.0, compile=True)
    compiled = train(settings, tmp_path / "compiled")
    assert told_ways(compiled) == [f"steps: {ways.NAMES['compile']} (the recipe says compile)"]
    assert losses(compiled) == pytest.approx(losses(eager), rel=1e-4)
    assert eager.checkpoints()[-1].weights().keys() == compiled.checkpoints()[-1].weights().keys()
