"""Norms over the last axes that files write as several operators, found again.

``(x - mean(x)) / sqrt(mean((x - mean(x))²) + ε) · weight + bias`` is a layer norm (Ba, Kiros and
Hinton 2016), as ONNX had none before opset 17; without the mean an RMS norm (Zhang and Sennrich
2019).
"""

from __future__ import annotations

from tessella.graph.graph import Dim, Graph, Node, Value
from tessella.graph.value import fixed


def recognize(graph: Graph) -> int:
    """Replace the last operator of each by the norm; returns how many."""
    found = 0
    for node in [n for n in graph.nodes if n.op in ("div", "mul") and n.attrs["scalar"] is None]:
        norm = _norm(graph, node)
        if norm is not None:
            last = _take_affine(graph, norm, node)
            norm.outputs = last.outputs
            graph.nodes.replace(last, norm)
            found += 1
    return found


def _norm(graph: Graph, node: Node) -> Node | None:
    """The norm without weight and bias that ``node`` makes."""
    left, right = node["input"], node["other"]
    for rows, root in ((left, right), (right, left)):
        if node.op == "div" and rows is not left:
            break
        square = _mean_of_square(graph, node.op, root)
        if square is None:
            continue
        if (rows.shape, rows.dtype) != (node.output.shape, node.output.dtype):
            continue
        squared, dims, eps = square
        axes, x = _last_axes(rows, dims), _centred(graph, rows, dims)
        again = squared is not rows and _centred(graph, squared, dims)  # x - mean(x) twice
        if axes is None or not (squared is rows or (x is not None and again is x)):
            continue
        attrs = {"normalized_shape": axes, "eps": eps}
        if x is not None:
            return Node("layer_norm", (x, None, None), node.outputs, attrs, node.layer)
        return Node("rms_norm", (rows, None), node.outputs, attrs, node.layer)
    return None


def _mean_of_square(
    graph: Graph, op: str, value: Value
) -> tuple[Value, tuple[int, ...], float] | None:
    """What is squared, axes, and ε of ``sqrt(mean(square) + ε)``, or of its reciprocal."""
    node = graph.producer(value)
    if op == "mul" and node is not None and node.op == "reciprocal":
        node, op = graph.producer(node["input"]), "div"
    if node is None or node.op != ("sqrt" if op == "div" else "rsqrt"):
        return None
    shifted = graph.producer(node["input"])
    if shifted is None or shifted.op != "add" or shifted.attrs["scalar"] is None:
        return None
    mean = graph.producer(shifted["input"])
    if mean is None or not _is_mean(mean):
        return None
    squared = _root(graph.producer(mean["input"]))
    eps = float(shifted.attrs["scalar"]) * shifted.attrs["alpha"]
    return None if squared is None else (squared, _axes(mean), eps)


def _is_mean(node: Node) -> bool:
    """Whether a node is a mean along some axes, which stay, in the type of what it reads."""
    plain = node.op == "mean" and node.attrs["keepdim"] and node.attrs["dim"]
    return bool(plain) and node.output.dtype == node["input"].dtype


def _axes(mean: Node) -> tuple[int, ...]:
    return tuple(d % len(mean["input"].shape) for d in mean.attrs["dim"])


def _root(square: Node | None) -> Value | None:
    """What is squared, or None."""
    if square is None or square.op not in ("mul", "pow"):
        return None
    root = square["input"]
    squares = square.attrs["scalar"] == 2 if square.op == "pow" else square.get("other") is root
    return root if squares else None


def _last_axes(rows: Value, dims: tuple[int, ...]) -> tuple[int, ...] | None:
    """Sizes of the axes, if they are the last ones."""
    rank = len(rows.shape)
    if sorted(dims) != list(range(rank - len(dims), rank)):
        return None
    sizes = rows.shape[rank - len(dims) :]
    return None if any(isinstance(d, Dim) for d in sizes) else tuple(map(fixed, sizes))


def _centred(graph: Graph, rows: Value, dims: tuple[int, ...]) -> Value | None:
    """x, where ``rows`` is x without its mean over these axes."""
    node = graph.producer(rows)
    if node is None or node.op != "sub" or node.attrs["scalar"] is not None:
        return None
    x, mean = node["input"], graph.producer(node["other"])
    if mean is None or not _is_mean(mean) or mean["input"] is not x:
        return None
    return x if node.attrs["alpha"] == 1 and sorted(_axes(mean)) == sorted(dims) else None


def _take_affine(graph: Graph, norm: Node, last: Node) -> Node:
    """Give a norm the weight and bias that follow it; returns the last operator of the whole.

    Args:
        last: the operator that makes the norm's result so far.
    """
    for op, operand in (("mul", "weight"), ("add", "bias")):
        user = graph.only_reader(last.output)
        if user is None or user.op != op or operand not in norm.operation.operands:
            continue
        vector = user.get("other") if user["input"] is last.output else user["input"]
        if vector is None or vector not in graph.constants or user.attrs.get("alpha", 1) != 1:
            continue
        if (vector.dtype, vector.shape) == (last.output.dtype, norm.attrs["normalized_shape"]):
            norm.rebind(**{operand: vector})
            last = user
    return last
