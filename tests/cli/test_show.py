"""``tessella show --passes``: what the compiler does, on whatever names a network."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from tessella.compiler.passes import of_stage
from tests.support.cli import Tessella

LENET = ("show", "--passes", "lenet", "--classes", "10")


def test_a_network_by_name_as_a_table(tessella: Tessella) -> None:
    answer = tessella(*LENET)
    assert answer.code == 0, answer.err
    title, head, *rows = answer.out.splitlines()
    assert title.split() == ["lenet,", "fp32"]
    assert head.split() == ["pass", "rewrites", "nodes", "after", "why"]
    fused = next(row.split() for row in rows if row.startswith("fuse_epilogue"))
    assert fused[:4] == ["fuse_epilogue", "1", "8", "7"]  # LeNet has one activation
    assert "batch norm after a convolution is a change of its weights" in answer.out
    assert tessella("show", "--passes", "network", "lenet", "--classes", "10").out == answer.out


def test_the_graphs_changed_lines(tessella: Tessella) -> None:
    answer = tessella(*LENET, "--graph")
    removed = [line for line in answer.out.splitlines() if line.startswith("-  %relu")]
    assert len(removed) == 1
    assert any(
        line.startswith("+  %relu") and "activation=relu" in line
        for line in answer.out.splitlines()
    )
    assert "-  %relu" not in tessella(*LENET).out


def test_as_json_with_the_graphs(tessella: Tessella) -> None:
    records = tessella(*LENET, "--precision", "fp16", "--json").json["passes"]
    names = [r["name"] for r in records]
    first = [p.name for p in of_stage("optimize")]
    assert names[: len(first)] == first
    assert "lower_precision" in names
    fused = records[names.index("fuse_epilogue")]
    assert fused["before"].count("\n") == fused["after"].count("\n") + 1
    assert "+++ after fuse_epilogue" in fused["diff"]
    assert all(r["before"].startswith("graph ") for r in records)


def test_an_onnx_file(tessella: Tessella, tmp_path: Path) -> None:
    weight = numpy_helper.from_array(np.ones((4, 3, 3, 3), np.float32), "w")
    nodes = [
        helper.make_node("Conv", ["image", "w"], ["c"]),
        helper.make_node("Relu", ["c"], ["scores"]),
    ]
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 3, 8, 8])
    scores = helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", 4, 6, 6])
    graph = helper.make_graph(nodes, "g", [image], [scores], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    path = tmp_path / "small.onnx"
    path.write_bytes(model.SerializeToString())
    answer = tessella("show", "--passes", path, "--json")
    assert answer.code == 0, answer.err
    counts = {r["name"]: (r["nodes_before"], r["nodes_after"]) for r in answer.json["passes"]}
    assert counts["fuse_epilogue"] == (2, 1)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("resnet51",), 2, "resnet50"),
        (("nowhere.onnx",), 6, "nowhere.onnx"),
        (("lenet", "--precision", "fp64"), 2, "fp64"),
        (("network",), 2, "a network's name is missing"),
    ],
)
def test_what_cannot_be_shown_is_told(
    tessella: Tessella, arguments: tuple[str, ...], code: int, says: str
) -> None:
    answer = tessella("show", "--passes", *arguments)
    assert answer.code == code
    assert says in answer.err


def test_lines_of_a_graph_are_those_that_passes_changed(tessella: Tessella) -> None:
    answer = tessella("show", "lenet", "--graph")
    assert answer.code == 2
    assert "--passes" in answer.err


def test_a_plan_is_compiled_already(tessella: Tessella, tmp_path: Path) -> None:
    path = tmp_path / "net.plan"
    path.write_bytes(b"")
    answer = tessella("show", "--passes", path)
    assert answer.code == 2
    assert "compiled already" in answer.err
