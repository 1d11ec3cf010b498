"""Each rule of a graph: a graph that breaks it is refused, and the message names node and rule."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tessella.core.errors import CompileError
from tessella.graph import Dim, Graph, Node, Value, capture, check
from tessella.graph.infer import infer
from tessella.operations.table import OPERATIONS, operation
from tests.support.graphs import Residual, image


@pytest.fixture
def graph() -> Graph:
    return capture(Residual(), image(3, 8, 8))


def find(graph: Graph, op: str) -> Node:
    return next(n for n in graph.nodes if n.op == op)


def test_a_captured_graph_keeps_the_rules(graph: Graph) -> None:
    check(graph)
    check(graph.at_batch(4))


def read_early(g: Graph) -> None:
    g.nodes = list(reversed(g.nodes))


def same_name(g: Graph) -> None:
    g.nodes[0].output.name = "image"


def two_producers(g: Graph) -> None:
    g.nodes.append(Node("neg", (g.inputs[0],), g.nodes[0].outputs))


def unknown_op(g: Graph) -> None:
    find(g, "relu").op = "frobnicate"


def wrong_arity(g: Graph) -> None:
    node = find(g, "relu")
    node.inputs = (*node.inputs, None)


def left_out(g: Graph) -> None:
    node = find(g, "conv2d")
    node.inputs = (node.inputs[0], None, *node.inputs[2:])


def attribute_missing(g: Graph) -> None:
    del find(g, "conv2d").attrs["stride"]


def attribute_unknown(g: Graph) -> None:
    find(g, "relu").attrs["inplace"] = True


def not_json(g: Graph) -> None:
    find(g, "batch_norm").attrs["eps"] = float("inf")


def a_tensor_in_attributes(g: Graph) -> None:
    find(g, "batch_norm").attrs["eps"] = torch.tensor(1e-5)


def neither_other_nor_scalar(g: Graph) -> None:
    node = find(g, "add")
    node.inputs = (node.inputs[0], None)


def both_other_and_scalar(g: Graph) -> None:
    find(g, "add").attrs["scalar"] = 1


def wrong_shape(g: Graph) -> None:
    find(g, "relu").output.shape = (Dim(), 8, 8, 7)


def fixed_batch(g: Graph) -> None:
    find(g, "relu").output.shape = (3, 8, 8, 8)


def wrong_dtype(g: Graph) -> None:
    find(g, "relu").output.dtype = "float16"


def impossible(g: Graph) -> None:
    node = find(g, "linear")
    node.inputs = (node.inputs[0], find(g, "conv2d").inputs[1], *node.inputs[2:])


def constant_shape(g: Graph) -> None:
    value = next(iter(g.constants))
    g.constants[value] = torch.zeros(1)


def output_missing(g: Graph) -> None:
    g.outputs.append(Value("ghost", "float32", (1,)))


def output_twice(g: Graph) -> None:
    g.outputs *= 2


def fallback_forbidden(g: Graph) -> None:
    node = find(g, "relu")
    node.op = "fallback"
    node.attrs = {"target": "aten::relu_", "args": ({"input": 0},), "kwargs": {}}


@pytest.mark.parametrize(
    ("breaks", "message"),
    [
        (read_early, "made before it is read"),
        (same_name, "a name is used for two values"),
        (two_producers, "two producers"),
        (unknown_op, "operations are known. Seen: frobnicate"),
        (wrong_arity, "the inputs are input. Seen: 2 inputs"),
        (left_out, "input weight may not be left out"),
        (attribute_missing, "the attributes are stride, padding"),
        (attribute_unknown, "the attributes are none. Seen: inplace"),
        (not_json, "attributes can be written to JSON. Seen: eps=inf"),
        (a_tensor_in_attributes, "attributes can be written to JSON"),
        (neither_other_nor_scalar, "either other or scalar"),
        (both_other_and_scalar, "either other or scalar"),
        (wrong_shape, "shapes and element types are what the operation gives"),
        (fixed_batch, "shapes and element types are what the operation gives"),
        (wrong_dtype, "shapes and element types are what the operation gives"),
        (impossible, "the operation accepts its inputs"),
        (constant_shape, "constant 'conv.weight' is not what its value says"),
        (output_missing, "an output of the graph is never made"),
        (output_twice, "named twice"),
        (fallback_forbidden, "aten::relu_ changes its arguments"),
    ],
)
def test_rules(graph: Graph, breaks: Callable[[Graph], None], message: str) -> None:
    breaks(graph)
    with pytest.raises(CompileError) as caught:
        check(graph)
    assert message in str(caught.value)


def test_the_message_names_node_and_layer(graph: Graph) -> None:
    del find(graph, "conv2d").attrs["stride"]
    with pytest.raises(CompileError, match=r"node conv2d → conv2d \(layer conv\) breaks a rule"):
        check(graph)


def test_infer_follows_the_inputs_alone(graph: Graph) -> None:
    find(graph, "relu").output.shape = (1, 2, 3)
    kinds = infer(graph, 5)
    assert kinds["relu"] == ("float32", (5, 8, 8, 8))
    assert kinds["output"] == ("float32", (5, 4))


def test_every_row_has_a_reference_and_every_reference_a_row() -> None:
    for name, row in OPERATIONS.items():
        assert row.name == name
        assert callable(row.reference)
    with pytest.raises(CompileError, match="unknown operation"):
        operation("frobnicate")
