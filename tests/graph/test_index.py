"""What a graph says of makers, readers, order and names, against a walk over all its nodes."""

from __future__ import annotations

import random

import pytest
import torch

from tessella.graph.graph import Graph, Node, Value


def value(name: str) -> Value:
    return Value(name, "float32", (2,))


def assert_true(graph: Graph) -> None:
    """The index says what a walk says."""
    nodes = list(graph.nodes)
    assert list(reversed(graph.nodes)) == nodes[::-1]
    assert len(graph.nodes) == len(nodes)
    assert all(a < b for a, b in zip(nodes, nodes[1:]))  # noqa: RUF007
    for v in graph.values():
        readers = [n for n in nodes for i in n.inputs if i is v]
        assert graph.users(v) == readers
        makers = [n for n in nodes if v in n.outputs]
        assert [graph.producer(v)] == (makers or [None])
        alone = len(readers) == 1 and v not in graph.outputs
        assert graph.only_reader(v) is (readers[0] if alone else None)
    taken = {v.name for v in graph.values()}
    for like in ("v", "constant", "v.1", "x"):
        free = (f"{like}.{i}" for i in range(1, len(taken) + 2))
        name = like if like not in taken else next(n for n in free if n not in taken)
        assert graph.fresh_name(like) == name


def changed(graph: Graph, dice: random.Random) -> None:
    """One change, of those that rewrites make; values may be left without a maker."""
    nodes = list(graph.nodes)
    values = list(graph.values())
    node = dice.choice(nodes)
    made = value(graph.fresh_name(dice.choice(("v", "v.1", "w"))))
    new = Node("add", (dice.choice(values), dice.choice([*values, None])), (made,))
    kind = dice.randrange(9)
    if kind == 0:
        graph.nodes.append(new)
    elif kind == 1:
        graph.nodes.insert_before(node, new)
    elif kind == 2:
        graph.nodes.insert_after(node, new)
    elif kind == 3:
        graph.nodes.insert_first(new)
    elif kind == 4 and len(nodes) > 3:
        graph.replace_uses(node.output, graph.inputs[0])
        graph.nodes.remove(node)
    elif kind == 5:
        node.inputs = (dice.choice(values), None, *node.inputs[:1])
    elif kind == 6:  # as fusions do: one node makes what the other made
        other = dice.choice(nodes)
        if other is not node:
            node.outputs = other.outputs
            graph.nodes.remove(other)
    elif kind == 7:
        graph.nodes.replace(node, Node("relu", node.inputs, node.outputs), new)
    else:
        graph.add_constant(dice.choice(("constant", "v")), torch.zeros(2))
        if dice.random() < 0.3:
            kept = list(graph.constants.items())[1:]
            graph.constants = dict(kept)


@pytest.mark.parametrize("seed", range(8))
def test_the_index_is_true_after_any_change(seed: int) -> None:
    dice = random.Random(seed)
    x = value("x")
    graph = Graph("g", [x], [], [Node("relu", (x,), (value("v"),))])
    graph.outputs = [graph.nodes[0].output]
    for _ in range(120):
        changed(graph, dice)
        assert_true(graph)


def test_there_is_always_room_between_two_nodes() -> None:
    """Every insertion halves a gap: places are given anew when none is left."""
    x = value("x")
    last = Node("relu", (x,), (value("last"),))
    graph = Graph("g", [x], [last.output], [Node("relu", (x,), (value("first"),)), last])
    for i in range(400):
        graph.nodes.insert_before(last, Node("relu", (x,), (value(f"v{i}"),)))
    names = [n.output.name for n in graph.nodes]
    assert names == ["first", *(f"v{i}" for i in range(400)), "last"]
    assert_true(graph)
    assert_true(graph.copy())


def test_a_node_is_in_one_graph() -> None:
    x = value("x")
    node = Node("relu", (x,), (value("v"),))
    graph = Graph("g", [x], [], [node])
    with pytest.raises(ValueError, match="in a graph already"):
        Graph("other", [x], [], [node])
    graph.nodes.remove(node)
    assert node not in graph.nodes
    with pytest.raises(ValueError, match="not in this graph"):
        graph.nodes.remove(node)


def test_a_value_that_is_renamed_leaves_its_name() -> None:
    x = value("x")
    graph = Graph("g", [x], [], [Node("relu", (x,), (value("v"),))])
    graph.rename(graph.nodes[0].output, "w")
    assert (graph.fresh_name("v"), graph.fresh_name("w")) == ("v", "w.1")
