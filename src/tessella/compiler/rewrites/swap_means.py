"""A mean over windows and a 1×1 convolution change places where less is computed and moved.

Both are linear, one over pixels and one over channels, so their order does not matter to the
result::

    avg_pool2d → conv2d 1×1 → + bias     where the convolution leaves few channels (Inception)
    conv2d 1×1 → avg_pool2d → + bias
    conv2d 1×1 → avg_pool2d              where the mean leaves few pixels (DenseNet)
    avg_pool2d → conv2d 1×1
"""

from __future__ import annotations

import math

from tessella.graph.graph import Graph, Node, Value
from tessella.graph.value import fixed

FEWER = 3  # times fewer channels, for which the bias may be a step of its own


def apply(graph: Graph) -> int:
    """Swap what is better the other way round; returns how many pairs."""
    swapped = 0
    for node in list(graph.nodes):
        if node.op not in ("conv2d", "avg_pool2d"):
            continue
        maker = graph.producer(node["input"])
        if maker is None or graph.only_reader(node["input"]) is not node:
            continue
        if maker.op == "avg_pool2d" and _better_last(graph, maker, node):
            _mean_last(graph, maker, node)
        elif node.op == "avg_pool2d" and _better_first(graph, maker, node):
            _mean_first(graph, maker, node)
        else:
            continue
        swapped += 1
    return swapped


def is_product(graph: Graph, node: Node) -> bool:
    """Whether a node is a 1×1 convolution of every pixel and nothing else."""
    if node.op != "conv2d":
        return False
    a, weight = node.attrs, graph.constant(node["weight"])
    return (
        weight is not None
        and tuple(weight.shape[2:]) == (1, 1)
        and (tuple(a["stride"]), tuple(a["padding"]), a["groups"]) == ((1, 1), (0, 0), 1)
        and a["activation"] is None
        and (node.get("bias") is None or node["bias"] in graph.constants)
        and node.has_only("input", "weight", "bias")
    )


def _better_last(graph: Graph, mean: Node, product: Node) -> bool:
    """Whether the product leaves few channels, and the mean as many pixels as there were."""
    if not is_product(graph, product) or mean["input"].shape[2:] != mean.output.shape[2:]:
        return False
    return FEWER * fixed(product.output.shape[1]) <= fixed(product["input"].shape[1])


def _better_first(graph: Graph, product: Node, mean: Node) -> bool:
    """Whether the mean of what the product reads takes less than the product's result."""
    if not is_product(graph, product) or (product.get("bias") and not _averages(mean)):
        return False
    before, after = (math.prod(map(fixed, n.output.shape[2:])) for n in (product, mean))
    channels = fixed(product["input"].shape[1])
    return after < before and channels * after <= fixed(product.output.shape[1]) * before


def _averages(mean: Node) -> bool:
    """Whether the mean of a constant is that constant, at the edges too."""
    a = mean.attrs
    padded = any(a["padding"]) or a["ceil_mode"]
    return a["divisor_override"] is None and not (padded and a["count_include_pad"])


def _mean_last(graph: Graph, mean: Node, product: Node) -> None:
    result, x, bias = product.output, mean["input"], product.get("bias")
    shape = (*x.shape[:1], result.shape[1], *x.shape[2:])
    product.rebind(input=x, bias=None)
    product.outputs = (Value(graph.fresh_name(f"{result.name}.pixels"), result.dtype, shape),)
    mean.inputs, mean.outputs = (product.output,), (result,)
    graph.nodes.remove(product)
    graph.nodes.insert_before(mean, product)
    if bias is not None:
        column = graph.constants[bias].reshape(-1, 1, 1)
        added = graph.add_constant(f"{bias.name}.column", column)
        name = graph.fresh_name(f"{result.name}.mean")
        mean.outputs = (Value(name, result.dtype, result.shape),)
        add = Node("add", (mean.output, added), (result,), {"scalar": None, "alpha": 1})
        add.layer = product.layer
        graph.nodes.insert_after(mean, add)


def _mean_first(graph: Graph, product: Node, mean: Node) -> None:
    result, x = mean.output, product["input"]
    shape = (*x.shape[:2], *result.shape[2:])
    mean.inputs = (x,)
    mean.outputs = (Value(graph.fresh_name(f"{result.name}.mean"), x.dtype, shape),)
    product.rebind(input=mean.output)
    product.outputs = (result,)
    graph.nodes.remove(product)
    graph.nodes.insert_after(mean, product)
