"""``compile`` takes a graph, so that inputs of an ONNX file can be bound."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import tessella as ts
from tessella.core.errors import UnboundInput, UsageError
from tessella.core.spec import TensorSpec
from tessella.graph.onnx import read
from tests.support.onnx_models import ints, model, node

SHAPE = {"shape": torch.tensor([-1, 2, 3])}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A model that reshapes to a shape that is an input."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 6])
    shape = helper.make_tensor_value_info("shape", TensorProto.INT64, [3])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", "a", "b"])
    node = helper.make_node("Reshape", ["x", "shape"], ["y"])
    model = helper.make_model(
        helper.make_graph([node], "shaped", [x, shape], [y]),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    onnx.save(model, tmp_path / "shaped.onnx")
    return tmp_path / "shaped.onnx"


def test_a_graph_with_a_bound_input(path: Path, tmp_path: Path) -> None:
    with pytest.raises(UnboundInput, match="shape") as raised:
        ts.compile(path, batch=(1, 2, 4), target="cpu")
    assert "ts.compile(tessella.graph.onnx.read(path, bound={'shape': tensor}))" in str(
        raised.value
    )
    network = read(path, bound=SHAPE)
    before = len(network.nodes)
    plan = ts.compile(network, batch=(1, 2, 4), target="cpu")
    assert len(network.nodes) == before
    assert "shaped" in plan.manifest.rebuild
    x = np.arange(18, dtype=np.float32).reshape(3, 6)
    made = ts.load(plan.save(tmp_path / "shaped.plan"))(x=x)["y"]
    assert np.array_equal(made, x.reshape(3, 2, 3))


def test_inputs_are_not_silently_ignored(path: Path) -> None:
    x = TensorSpec(name="x", dtype="float32", shape=(1, 6))
    with pytest.raises(UsageError, match="a graph says itself what it takes"):
        ts.compile(read(path, bound=SHAPE), inputs=[x], target="cpu")
    with pytest.raises(UsageError, match=r"no such input\. Seen: image"):
        ts.compile(path, inputs=[replace(x, name="image")], target="cpu")


@pytest.mark.parametrize("inputs", [{"x": torch.zeros(1, 6)}, ["x:float32:1x6"]])
def test_inputs_that_are_no_descriptions_are_told_what_to_be(inputs: Any) -> None:
    with pytest.raises(UsageError, match=r"Seen: .*x.*from tessella\.core\.spec import TensorSpec"):
        ts.compile(torch.nn.Linear(6, 2), inputs=inputs, target="cpu")


def test_constants_that_share_memory_are_saved(tmp_path: Path) -> None:
    """A reshape of a constant is the constant's own memory, which the file holds for each."""
    w = np.arange(6, dtype=np.float32)
    nodes = [
        node("Reshape", ["w", "by"], ["rows"]),
        node("Add", ["x", "w"], ["z"]),
        node("MatMul", ["z", "rows"], ["y"]),
    ]
    constants = [numpy_helper.from_array(w, "w"), ints("by", 6, 1)]
    content = model(nodes, {"x": ["N", 6]}, ["y", "z"], constants).SerializeToString()
    plan = ts.compile(read(content), batch=(1, 2, 4), target="cpu")
    x = np.ones((3, 6), np.float32)
    made = ts.load(plan.save(tmp_path / "shared.plan"))(x=x)
    np.testing.assert_allclose(made["y"], (x + w) @ w[:, None], rtol=1e-6)
    np.testing.assert_array_equal(made["z"], x + w)


def test_a_batch_may_be_the_command_lines_text(path: Path) -> None:
    network = read(path, bound=SHAPE)
    assert [b.batch for b in ts.compile(network, batch="1, 1, 2", target="cpu").program.buckets] \
        == [1, 2]  # fmt: skip
    with pytest.raises(UsageError, match=r"Seen: 1,8\. To do: write batch=8"):
        ts.compile(network, batch="1,8")
