"""The list of passes is the pipeline, and docs/passes.md is the list.

``python -m tests.compiler.test_pass_list`` writes the document.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from tessella import compiler
from tessella.compiler import passes
from tessella.compiler.passes import PASSES, STAGES, Request, of_stage, request_for, run
from tessella.compiler.pipeline import optimized
from tessella.core.errors import UsageError
from tessella.core.events import Event
from tessella.core.spec import DimRange, TensorSpec
from tessella.graph import capture
from tessella.graph.graph import Graph
from tessella.graph.show import text
from tests.support.networks import captured, plan

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "passes.md"
BEGINNING = """# The passes, from a captured graph to a plan

This is `PASSES` of `src/tessella/compiler/passes.py`, written by
`python -m tests.compiler.test_pass_list`; a test compares. `graph.check` runs after each change.
`tessella show MODEL --passes` shows what each does to a network.
"""


def document() -> str:
    parts = [BEGINNING]
    for stage, what in STAGES.items():
        parts.append(f"\n## {stage}: {what}\n\n| pass | when | why |\n| --- | --- | --- |\n")
        for step in of_stage(stage):
            folder = Path(*step.apply.__module__.split(".")).with_suffix(".py")
            link = f"[`{step.name}`](../src/{folder.as_posix()})"
            parts.append(f"| {link} | {step.when.__doc__} | {step.why} |\n")
    return "".join(parts)


def test_the_document_is_the_list() -> None:
    assert DOCUMENT.read_text() == document(), "run python -m tests.compiler.test_pass_list"


def test_every_pass_is_listed_once_and_in_the_order_of_its_stage() -> None:
    folders = [ROOT / "src/tessella/compiler" / name for name in ("rewrites", "choices")]
    known = {
        f.stem for folder in folders for f in folder.glob("*.py") if "\ndef apply(" in f.read_text()
    }
    names = [step.name for step in PASSES]
    assert sorted(names) == sorted(known)
    stages = [list(STAGES).index(step.stage) for step in PASSES]
    assert stages == sorted(stages)
    assert set(stages) == set(range(len(STAGES)))


@pytest.fixture(scope="module")
def graph() -> Graph:
    return captured("resnet18")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_parts_of_the_list_are_the_whole(graph: Graph, precision: str) -> None:
    """Compile stops in between, to verify; explain and the budget do not."""
    whole = run(graph, Request(target="cpu", precision=precision))
    exact = optimized(graph)
    request = Request(target="cpu", precision=precision).assigned(exact)
    made, stages = exact, ["optimize", "lower", "narrow", "mark"]
    for after, until in pairwise(stages):
        made = run(made, request, after=after, until=until)
    assert text(made) == text(whole)
    assert text(exact) == text(run(graph, Request(target="sm_90"), until="optimize"))


def test_what_a_build_runs_is_decided_by_its_request() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(16, 16, 3), nn.GELU(), nn.Conv2d(16, 4, 3), nn.Flatten())
    spec = TensorSpec(name="x", dtype="float32", shape=(DimRange(min=1, opt=2, max=2), 16, 8, 8))
    graph = capture(module.eval(), (spec,))
    found = compiler.calibrate(graph, [{"x": torch.randn(2, 16, 8, 8)}])

    def runs(target: str, precision: str) -> set[str]:
        request = Request(target=target, precision=precision, calibration=found)
        made = [step.name for step, _ in passes.steps(graph.copy(), request)]
        assert made == [step.name for step in PASSES if step.name in made]
        return {*made} - {step.name for step in of_stage("optimize")}

    always = {
        "fuse_requantization", "fuse_rearrangements", "split_group_norms", "fuse_pointwise",
    }  # fmt: skip
    assert runs("reference", "fp32") == always
    assert runs("cpu", "bf16") == always | {"fold_floors", "lower_precision", "mark_non_negative"}
    rounds = always | {"insert_quantization", "lower_quantization"}
    assert runs("cpu", "int8") == rounds | {
        "fold_floors", "keep_pixels", "mark_non_negative", "mark_wide_sums",
    }  # fmt: skip
    gpu = {
        "pad_channels", "lower_precision", "keep_pixels", "widen_results", "mark_sparse_weights",
        "fold_floors",
    }  # fmt: skip
    assert runs("sm_90", "int8") == rounds | gpu


def test_the_compiler_chooses_in_the_order_of_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def watched(step: passes.Pass) -> passes.Pass:
        def apply(graph, choices, tuner, emit):
            asked.append(step.name)
            return step.apply(graph, choices, tuner, emit)

        return passes.Pass(step.stage, apply, step.why)

    changed = tuple(watched(s) if s.stage == "choose" else s for s in PASSES)
    names = [step.name for step in of_stage("choose")]
    monkeypatch.setattr(passes, "PASSES", changed)
    events: list[Event] = []
    plan(captured("lenet"), (1, 1, 1), emit=events.append)
    assert asked == names


def test_bytes_need_a_record() -> None:
    with pytest.raises(UsageError, match="preprocessing record"):
        Request(target="cpu", input="uint8")
    with pytest.raises(UsageError, match="int4"):
        Request(target="cpu", input="int4")


def test_an_assignment_that_is_given_is_taken(graph: Graph) -> None:
    exact = optimized(graph)
    assignment = Request(target="cpu", precision="bf16").assigned(exact).assignment
    made = run(exact, request_for(exact, assignment), after="optimize")
    assert text(made) == text(run(graph, Request(target="cpu", precision="bf16")))


if __name__ == "__main__":
    DOCUMENT.write_text(document())
