"""Layers that torch and ONNX files write as several operators, found again and made one."""

from __future__ import annotations

from tessella.graph import activations, norms
from tessella.graph.build import drop_unused
from tessella.graph.graph import Graph, Node


def recognize(graph: Graph) -> None:
    """Replace each local response normalization's ten operators by one, norms and activations."""
    for node in [n for n in graph.nodes if n.op == "matmul"]:
        _take_rounded_layer(graph, node)
    norms.recognize(graph)
    activations.recognize(graph)
    for node in [n for n in graph.nodes if n.op == "div"]:
        if (found := _local_response_norm(graph, node)) is not None:
            graph.nodes.replace(node, found)
    drop_unused(graph)


def _take_rounded_layer(graph: Graph, node: Node) -> None:
    """``x · transposed dequantize(weight) + bias``: a linear layer, whose weight is rounded.

    ONNX has no linear layer for more than two axes, and a rounded weight is no constant that could
    be turned in the file.
    """
    turned = graph.producer(node["other"])
    if turned is None or turned.op != "permute" or len(turned.output.shape) != 2:
        return
    weight = turned["input"]
    rounded = graph.producer(weight)
    if rounded is None or rounded.op != "dequantize" or tuple(turned.attrs["dims"]) != (1, 0):
        return
    last, bias, reader = node, None, graph.only_reader(node.output)
    if reader is not None and reader.op == "add" and reader.attrs.get("alpha", 1) == 1:
        added = [v for v in reader.inputs if v is not node.output]
        other = added[0] if len(added) == 1 else None
        if other in graph.constants and other is not None and other.shape == weight.shape[:1]:
            last, bias = reader, other
    linear = Node("linear", (node["input"], weight, bias, None), last.outputs)
    linear.attrs, linear.layer = {"activation": None}, node.layer
    if last is not node:
        graph.nodes.remove(node)
    graph.nodes.replace(last, linear)


def _local_response_norm(graph: Graph, div: Node) -> Node | None:
    """``x / (k + alpha · mean over channels of x²) ** beta``, as torch.nn.functional writes it."""

    def before(node: Node | None, op: str) -> Node | None:
        source = None if node is None else graph.producer(node.first)
        return source if source is not None and source.op == op else None

    x, power = div["input"], graph.producer(div.get("other"))
    if power is None or power.op != "pow" or power.attrs["scalar"] is None:
        return None
    shift = before(power, "add")
    scale = before(shift, "mul")
    if shift is None or scale is None or None in (shift.attrs["scalar"], scale.attrs["scalar"]):
        return None
    node: Node | None = scale
    while (reshaped := before(node, "reshape")) is not None:
        node = reshaped
    pool = before(node, "avg_pool2d") or before(node, "fallback")
    pad = before(pool, "pad")
    wide = before(pad, "reshape")
    square = before(wide, "mul")
    if pool is None or pad is None or square is None or square.inputs != (x, x):
        return None
    size = _channels(pool)
    around = (*[0] * (len(pad.attrs["pad"]) - 2), size // 2, (size - 1) // 2)
    if size == 0 or pad.attrs["pad"] != around or pad.attrs["value"] not in (0, None):
        return None
    attrs = {
        "size": size,
        "alpha": scale.attrs["scalar"],
        "beta": power.attrs["scalar"],
        "k": shift.attrs["scalar"],
    }
    return Node("local_response_norm", (x,), div.outputs, attrs, div.layer)


def _channels(pool: Node) -> int:
    """How many channels a pooling of ``(size, 1, …)`` with stride 1 covers; 0 for any other."""
    kernel, stride = pool.attrs.get("kernel_size"), pool.attrs.get("stride")
    if pool.op == "fallback":
        if pool.attrs["target"] != "aten::avg_pool3d" or len(pool.attrs["args"]) != 3:
            return 0
        _, kernel, stride = pool.attrs["args"]
    if kernel is None or stride is None or set(kernel[1:]) != {1} or set(stride) != {1}:
        return 0
    return int(kernel[0])
