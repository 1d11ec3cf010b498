"""What the forms make of a person's choices, read back by the command line's own parser."""

from dataclasses import replace
from pathlib import Path

import pytest
import typer

from tessella.artifacts.plan import load_plan
from tessella.artifacts.run import Recipe
from tessella.cli import compile as compile_verb
from tessella.cli import diff, profile, train
from tessella.compiler.budget.mixes import OFFERED, offered
from tessella.compiler.calibration import METHOD
from tessella.compiler.histogram import METHODS as KNOWN_METHODS
from tessella.compiler.samples import COUNT
from tessella.core.dtype import PRECISIONS as KNOWN
from tessella.core.errors import UsageError
from tessella.jobs import commands
from tessella.studio import wanted
from tessella.studio.plan_profile import trace_of
from tessella.studio.wanted import Wanted, followed, rounds
from tests.studio.made import make_plan, make_receipt

ONE = Wanted(source="runs/a b", name="")
INT8 = replace(ONE, precision="int8", calibrate=("data/x", "train", 512, "mse"))
BUDGET = replace(ONE, how="budget", points=0.3, judge="data/x")


def parsed(spec) -> dict:
    """The options as the command line understands them."""
    app = typer.Typer()
    for module in (compile_verb, diff, profile, train):
        module.register(app)
    group = typer.main.get_command(app)
    verb, *rest = (a.replace("{job}/", "") for a in spec.argv)
    command = group.commands[verb]
    return command.make_context(verb, rest).params


@pytest.mark.parametrize(
    ("asked", "understood"),
    [
        (ONE, {"precision": "fp32", "batch": "1,8,32", "out": Path("plans/a-b.plan")}),
        (replace(ONE, name="x y", batches="4"), {"batch": "4", "out": Path("plans/x-y.plan")}),
        (replace(ONE, precision="bf16"), {"out": Path("plans/a-b-bf16.plan"), "calibrate": None}),
        (replace(ONE, uint8=True), {"uint8": True, "budget": None, "lock": None}),
        (INT8, {"calibrate": Path("data/x"), "calibrate_split": None, "calibrate_samples": None,
                "calibrate_method": None}),
        (replace(INT8, calibrate=("-x", "test", 99, "entropy")),
         {"calibrate": Path("./-x"), "calibrate_split": "test", "calibrate_samples": 99,
          "calibrate_method": "entropy"}),
        (BUDGET, {"budget": 0.3, "data": Path("data/x"), "precision": "fp32",
                  "front_folder": Path("plans/a-b-budget.front")}),
        (replace(BUDGET, precision="int8", points=0.0), {"budget": 0.0, "precision": "int8"}),
        (replace(ONE, how="lock", lock="plans/q.plan"),
         {"lock": Path("plans/q.plan"), "out": Path("plans/a-b-again.plan"), "cache": None}),
        (replace(ONE, time_limit_s=90.0),
         {"time_limit": 90.0, "cache": Path(".studio/timings.jsonl")}),
    ],
)  # fmt: skip
def test_a_choice_becomes_options_that_the_command_line_reads(asked, understood):
    params = parsed(asked.spec())
    assert {name: params[name] for name in understood} == understood
    assert params["source"] == Path("runs/a b")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (replace(ONE, precision="int8"), "dataset to calibrate"),
        (replace(INT8, calibrate=("x", "train", 0, "mse")), "needs samples"),
        (replace(BUDGET, judge=None), "a dataset that judges"),
        (replace(BUDGET, points=None), "points"),
        (replace(BUDGET, points=-1.0), "percentage points"),
        (replace(ONE, how="lock"), "no plan to follow"),
        (replace(ONE, batches="8, 1, 32"), "a batch is"),
        (replace(ONE, batches=""), "a batch is"),
        (replace(ONE, batches="²"), "a batch is"),
        (replace(ONE, batches="9" * 5_000), "a batch is"),
        (replace(ONE, time_limit_s=0.0), "time limit"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(asked, words):
    with pytest.raises(UsageError, match=words):
        asked.spec()


def test_what_is_offered_is_what_the_compiler_takes():
    assert set(wanted.PRECISIONS) == set(KNOWN)
    assert set(wanted.METHODS) == set(KNOWN_METHODS)
    assert (wanted.USUAL_METHOD, wanted.USUAL_SAMPLES) == (METHOD, COUNT)
    assert set(wanted.LEAST) == set(OFFERED) == set(wanted.TARGETS)
    for target, names in wanted.LEAST.items():
        assert all(offered(target, name) for name in names)


def test_a_plan_that_is_followed_decides_the_rest(tmp_path):
    plain = make_plan(tmp_path / "a.plan", built_from="runs/first")
    assert followed(plain) == {
        "target": "cpu", "precision": "fp32", "batches": "1, 8, 8", "uint8": False,
    }  # fmt: skip
    assert not rounds(plain)
    judged = make_plan(tmp_path / "b.plan", built_from="runs/first", receipt=make_receipt(1))
    assert followed(load_plan(tmp_path / "b.plan"))["precision"] == "fp32"
    assert rounds(judged)  # so a calibration is asked for
    by_hand = replace(judged, manifest=replace(judged.manifest, receipt=None))
    with pytest.raises(UsageError, match="given in Python"):
        followed(by_hand)


def test_a_sweep_is_every_combination_once():
    recipe = Recipe(network="lenet", dataset="d")
    specs = commands.sweep(
        recipe, "runs/s", group="s", networks=("lenet", "timm/x y"), lr="0.1, 0.01", seeds="0,1"
    )
    read = [parsed(s) for s in specs]
    assert {(p["network"], p["lr"], p["seed"]) for p in read} == {
        (n, lr, seed) for n in ("lenet", "timm/x y") for lr in (0.1, 0.01) for seed in (0, 1)
    }
    assert {p["batch_size"] for p in read} == {recipe.batch_size}
    assert [p["out"].parent for p in read] == [Path("runs")] * 8
    assert len({p["out"] for p in read}) == 8
    assert specs[-1].name == "s-timm-x-y-lr0.01-s1"
    assert {s.group for s in specs} == {"s"}


def test_profiles_and_differences_are_commands_that_read_back():
    spec = commands.profile("plans/a.plan", batch=8, trace="t.json")
    params = parsed(spec)
    assert (params["batch"], params["trace_file"]) == (8, Path("t.json"))
    assert "events" in params  # the scheduler appends it
    assert parsed(commands.diff("-a.plan", "b.plan"))["a"] == Path("./-a.plan")


def test_what_is_no_trace_is_refused(tmp_path):
    path = tmp_path / "trace.json"
    for content in ('{"traceEvents": []}', "[]", '{"otherData": {"batch": 1}}', "{"):
        path.write_text(content)
        with pytest.raises(Exception, match="trace"):
            trace_of(path)
