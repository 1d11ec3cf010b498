"""What the forms make of a person's choices, read back by the command line's own parser."""

from dataclasses import replace
from pathlib import Path

import pytest

from tessella.artifacts.plan import load_plan
from tessella.artifacts.run import Recipe
from tessella.cli import compile as compile_verb
from tessella.compiler.budget.mixes import offered
from tessella.compiler.calibration import METHOD
from tessella.compiler.histogram import METHODS as KNOWN_METHODS
from tessella.compiler.samples import COUNT
from tessella.core.architectures import TARGETS
from tessella.core.dtype import PRECISIONS as KNOWN
from tessella.core.errors import UsageError
from tessella.jobs import commands
from tessella.studio import compile_request, usual_target, workspace
from tessella.studio.compile_request import (
    describe_followed,
    followed,
    joined,
    precisions_for,
    requested,
    rounds,
)
from tessella.studio.plan_front import rebuilt
from tessella.studio.plan_profile import trace_of
from tests.support.cli import context
from tests.support.studio.workspaces import make_plan, make_receipt

ONE = {"source": "runs/a b"}
INT8 = {**ONE, "precision": "int8", "calibration": "data/x"}
BUDGET = {**ONE, "budget": 0.3, "data": "data/x"}


@pytest.mark.parametrize(
    ("how", "name", "settings", "expected"),
    [
        ("one", "", ONE, {"out": "plans/a-b.plan"}),
        ("one", "x y", {**ONE, "batch": (4,)}, {"out": "plans/x-y.plan", "batch": (4,)}),
        ("one", "", {**ONE, "precision": "bf16"}, {"out": "plans/a-b-bf16.plan"}),
        ("one", "", {**ONE, "budget": 0.3, "data": "x", "lock": "y"},
         {"budget": None, "data": None, "lock": None}),
        ("one", "", INT8, {"out": "plans/a-b-int8.plan", "calibration": "data/x"}),
        ("budget", "", {**BUDGET, "lock": "x"},
         {"budget": 0.3, "front": "plans/a-b-budget.front", "lock": None}),
        ("budget", "", {**BUDGET, "precision": "int8", "budget": 0.0}, {"budget": 0.0}),
        ("lock", "", {**BUDGET, "lock": "plans/q.plan"},
         {"lock": "plans/q.plan", "out": "plans/a-b-again.plan", "cache": None, "data": None}),
        ("one", "", {**ONE, "time_limit_s": 90.0}, {"cache": ".studio/timings.jsonl"}),
    ],
)  # fmt: skip
def test_a_choice_becomes_a_request_that_the_command_line_reads(how, name, settings, expected):
    request = requested(how, name, **settings)
    assert {field: getattr(request, field) for field in expected} == expected
    spec = commands.compile_plan(request)
    assert compile_verb.requested(context(spec.argv)) == request
    assert commands.shown(spec) == request.command()


@pytest.mark.parametrize(
    ("how", "settings", "words"),
    [
        ("one", {**ONE, "precision": "int8"}, "needs a calibration"),
        ("one", {**INT8, "calibration_samples": 0}, "needs samples"),
        ("budget", {**BUDGET, "data": None}, "needs labelled data"),
        ("budget", {**BUDGET, "budget": None}, "points"),
        ("budget", {**BUDGET, "budget": -1.0}, "percentage points"),
        ("lock", ONE, "no plan to follow"),
        ("one", {**ONE, "time_limit_s": 0.0}, "time limit"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(how, settings, words):
    with pytest.raises(UsageError, match=words):
        requested(how, "", **settings)


def test_what_is_offered_is_what_the_compiler_takes():
    assert set(compile_request.PRECISIONS) == set(KNOWN)
    assert set(compile_request.METHODS) == set(KNOWN_METHODS)
    assert (compile_request.USUAL_METHOD, compile_request.USUAL_SAMPLES) == (METHOD, COUNT)
    assert set(compile_request.LEAST) == set(compile_request.TARGETS) == set(TARGETS)
    for target, names in compile_request.LEAST.items():
        assert all(offered(target, name) for name in names)


def test_several_targets_take_what_suits_them_all():
    assert joined("cpu", "sm_80, sm_90,") == "cpu,sm_80,sm_90"
    assert joined("cpu", "") == joined("cpu", None) == "cpu"
    assert precisions_for(["sm_75"], "one") == ("fp32", "fp16", "int8")
    assert precisions_for(["cpu", "sm_80"], "one") == ("fp32", "bf16", "fp16", "int8")
    assert precisions_for(["cpu"], "budget") == compile_request.LEAST["cpu"]
    built = requested("one", "", source="runs/a", target=joined("cpu", "sm_80"))
    assert "--target cpu,sm_80" in built.command()


def test_a_plan_that_is_followed_decides_the_rest(tmp_path):
    plain = make_plan(tmp_path / "a.plan", built_from="runs/first")
    assert followed(plain) == {
        "target": "cpu", "precision": "fp32", "precisions": None, "batch": (1, 8, 8),
        "input": "float32",
    }  # fmt: skip
    assert not rounds(plain)
    gpu = replace(plain.manifest.fingerprint, target="sm_80", arch="sm_80")
    other = replace(plain, manifest=replace(plain.manifest, fingerprint=gpu))
    several = replace(plain, others=(other,))
    assert followed(several)["target"] == followed(several.at("sm_80"))["target"] == "cpu,sm_80"
    assert describe_followed(several).startswith("cpu, sm_80, fp32")
    judged = make_plan(tmp_path / "b.plan", built_from="runs/first", receipt=make_receipt(1))
    assert followed(load_plan(tmp_path / "b.plan"))["precision"] == "fp32"
    assert rounds(judged)  # so a calibration is asked for
    by_hand = replace(judged, manifest=replace(judged.manifest, receipt=None))
    assert followed(by_hand)["precisions"] == {"conv1": "int8"}


def test_a_page_shows_the_program_of_this_machine(tmp_path, monkeypatch):
    plain = make_plan(tmp_path / "a.plan", built_from="runs/first")
    gpu = replace(plain.manifest.fingerprint, target="sm_80", arch="sm_80")
    other = replace(plain, manifest=replace(plain.manifest, fingerprint=gpu))
    replace(plain, others=(other,)).save(tmp_path / "plans" / "b.plan")
    for here, shown in (("sm_80", "sm_80"), ("sm_90", "cpu"), ("cpu", "cpu")):
        monkeypatch.setattr(workspace, "usual_target", lambda here=here: here)
        workspace._plan_at.cache_clear()
        plan = workspace.Workspace(tmp_path).plan("plans/b.plan")
        assert (plan.target, plan.targets) == (shown, ("cpu", "sm_80"))
    workspace._plan_at.cache_clear()


def test_a_point_of_a_front_says_which(tmp_path):
    point, command = tmp_path / "a.front" / "3.plan", "tessella compile r --out r.plan --budget 1"
    assert rebuilt(point, command, out="a.front/3.plan") == f"{command} --point 3"
    line = "tessella.compile(module)  # in Python: module is of the class Net"
    assert rebuilt(point, line, out="a.front/3.plan") == f"{line}; of its table the plan 3"


def test_a_plans_command_writes_where_it_is_told(tmp_path):
    def again(command: str) -> str:
        return rebuilt(tmp_path / "my own.plan", command, out="plans/my own.plan")

    assert again("tessella compile 'my runs/r' --out r.plan --batch 1,8,32") == (
        "tessella compile 'my runs/r' --out 'plans/my own.plan' --batch 1,8,32"
    )
    for other in ("tessella.compile(module)  # in Python", "tessella compile r"):
        assert again(other) == other


def test_a_sweep_is_every_combination_once():
    recipe = Recipe(network="lenet", dataset="d")
    specs = commands.sweep(
        recipe, "runs/s", group="s", networks=("lenet", "timm/x y"), lr="0.1, 0.01", seeds="0,1"
    )
    read = [context(s.argv).params for s in specs]
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
    params = context(spec.argv).params
    assert (params["batch"], params["trace_file"]) == (8, Path("t.json"))
    assert "events" in params  # the scheduler appends it
    assert context(commands.diff("-a.plan", "b.plan").argv).params["a"] == Path("./-a.plan")


def test_what_is_no_trace_is_refused(tmp_path):
    path = tmp_path / "trace.json"
    for content in ('{"traceEvents": []}', "[]", '{"otherData": {"batch": 1}}', "{"):
        path.write_text(content)
        with pytest.raises(Exception, match="trace"):
            trace_of(path)


def test_the_form_begins_with_the_target_of_the_newest_gpu(monkeypatch):
    """Told by the driver: torch, which would say it too, holds memory of the GPU."""

    def usual(*capabilities):
        monkeypatch.setattr(usual_target, "visible_gpus", lambda: tuple(range(len(capabilities))))
        monkeypatch.setattr(usual_target, "capability", lambda index: capabilities[index])
        return usual_target.usual_target()

    assert usual() == usual((7, 0)) == usual(None) == "cpu"
    assert usual((8, 6), (12, 0), None) == "sm_120"
    assert usual((9, 0)) == "sm_90"
    assert usual((8, 7)) == "sm_86"
