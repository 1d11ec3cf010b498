"""What ``explain`` says of each pass is what the pass does, and what the pipeline does."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from tessella.compiler import explain, passes
from tessella.compiler.passes import PASSES, Pass, of_stage
from tessella.compiler.pipeline import optimized
from tessella.core.errors import CompileError, UsageError
from tessella.core.spec import DimRange, TensorSpec
from tessella.graph import capture
from tessella.graph.graph import Graph
from tessella.graph.show import text
from tests.support.networks import captured, plan

IMAGE = TensorSpec(name="image", dtype="float32", shape=(DimRange(min=1, opt=2, max=4), 3, 8, 8))
FIRST = of_stage("optimize")


def two_blocks() -> Graph:
    """Two times convolution, batch norm and ReLU."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Conv2d(c, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()) for c in (3, 4)
    ]
    return capture(nn.Sequential(*blocks, nn.Flatten()).eval(), (IMAGE,))


def test_names_each_pass_with_its_rewrites_and_nodes() -> None:
    records = explain(two_blocks())
    assert [r.name for r in records[: len(FIRST)]] == [p.name for p in FIRST]
    assert [r.why for r in records[: len(FIRST)]] == [p.why for p in FIRST]
    by_name = {r.name: r for r in records}
    # By hand: 2 × (conv, norm, relu) and a reshape; then without norms; then without activations.
    norms = by_name["fold_batch_norm"]
    assert (norms.rewrites, norms.nodes_before, norms.nodes_after) == (2, 7, 5)
    fused = by_name["fuse_epilogue"]
    assert (fused.nodes_before, fused.nodes_after) == (5, 3)
    assert (by_name["drop_no_ops"].rewrites, by_name["drop_no_ops"].diff) == (0, "")


def test_shows_the_graph_before_and_after() -> None:
    graph = two_blocks()
    was = text(graph)
    records = explain(graph)
    assert text(graph) == was == records[0].before
    assert all(a.after == b.before for a, b in pairwise(records[: len(FIRST)]))
    (norms,) = [r for r in records if r.name == "fold_batch_norm"]
    lines = norms.diff.splitlines()
    assert lines[:2] == ["--- before fold_batch_norm", "+++ after fold_batch_norm"]
    assert sum(line.startswith("-") and " = batch_norm(" in line for line in lines) == 2
    assert not any(line.startswith("+") and " = batch_norm(" in line for line in lines)


@pytest.mark.parametrize("name", ["lenet", "resnet18", "vit"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ends_with_the_graph_that_a_plan_holds(name: str, precision: str) -> None:
    records = explain(captured(name), precision=precision, target="reference")
    made = plan(captured(name), (1, 1, 1), precision=precision, target="reference")
    assert records[-1].after == made.graph
    assert records[len(FIRST) - 1].after == text(optimized(captured(name)))


def test_16_bit_values_are_more_passes() -> None:
    records = explain(two_blocks(), precision="fp16")
    extra = [r.name for r in records[len(FIRST) :]]
    assert extra == [
        "lower_precision",
        "fold_floors",
        "fuse_requantization",
        "fuse_rearrangements",
        "split_group_norms",
        "fuse_pointwise",
        "mark_non_negative",
        "assign_layout channels_last",
    ]
    lowered = records[len(FIRST)]
    assert lowered.nodes_after == lowered.nodes_before + 2  # a cast at each end
    assert "float16" in lowered.after
    assert "float16" not in lowered.before


def test_layouts_that_only_a_measurement_can_tell_apart_are_both_shown() -> None:
    last, dense = explain(two_blocks(), target="cpu")[-2:]
    assert (last.name, dense.name) == ("assign_layout channels_last", "assign_layout contiguous")
    assert last.before == dense.before
    assert last.rewrites == 1  # the image comes contiguous and is copied once
    assert last.nodes_after == last.nodes_before + 1
    assert (dense.rewrites, dense.diff) == (0, "")
    assert last.why.startswith("3 of ")  # the copy and two convolutions


def test_nothing_to_convolve_has_one_layout() -> None:
    graph = capture(nn.Sequential(nn.Flatten(), nn.Linear(192, 4)), (IMAGE,))
    assert explain(graph, target="cpu")[-1].name == "assign_layout contiguous"


def test_an_unknown_precision_is_told() -> None:
    with pytest.raises(UsageError, match="fp64"):
        explain(two_blocks(), precision="fp64")


def test_a_pass_that_breaks_the_graph_is_found_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Explain and the compiler share one list and one loop: both stop at the same pass."""

    def breaks(graph: Graph) -> int:
        graph.nodes = list(reversed(graph.nodes))
        return 0  # and does not even own up to it

    broken = (*PASSES, Pass("optimize", breaks, "a fault"))
    monkeypatch.setattr(passes, "PASSES", broken)
    for run in (explain, optimized):
        with pytest.raises(CompileError, match="made before it is read"):
            run(two_blocks())
