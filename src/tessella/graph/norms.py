"""Norms over the last axes that files write as several operators, found again.

``(x - mean(x)) / sqrt(mean((x - mean(x))²) + ε) · weight + bias`` is a layer norm (Ba, Kiros and
Hinton 2016), as ONNX had none before opset 17; without the mean an RMS norm (Zhang and Sennrich
2019).
"""

from __future__ import annotations

from tessella.graph.graph import Graph, Node, Value


def recognize(graph: Graph) -> int:
    """Replace the last operator of each by the norm; returns how many."""
    found = 0
    for node in [n for n in graph.nodes if n.op in ("div", "mul") and n.attrs["scalar"] is None]:
        norm = _norm(graph, node)
        if norm is not None:
            norm, last = _affine(graph, norm)
            norm.outputs = last.outputs
            graph.nodes.replace(last, norm)
            found += 1
    return found


def _norm(graph: Graph, node: Node) -> Node | None:
    """The norm without weight and bias that ``node`` makes."""
    for rows, root in (node.inputs, node.inputs[::-1]):
        if node.op == "div" and rows is not node.inputs[0]:
            break
        square = _mean_of_square(graph, node.op, root)
        if rows is None or square is None:
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
    graph: Graph, op: str, value: Value | None
) -> tuple[Value, tuple[int, ...], float] | None:
    """Of ``sqrt(mean(square) + ε)``, or one over it for a product: what is squared, axes, and ε."""
    node = graph.producer(value)
    if op == "mul" and node is not None and node.op == "reciprocal":
        node, op = graph.producer(node.inputs[0]), "div"
    if node is None or node.op != ("sqrt" if op == "div" else "rsqrt"):
        return None
    shifted = graph.producer(node.inputs[0])
    if shifted is None or shifted.op != "add" or shifted.attrs["scalar"] is None:
        return None
    mean = graph.producer(shifted.inputs[0])
    if mean is None or not _is_mean(mean):
        return None
    squared = _root(graph.producer(mean.inputs[0]))
    eps = float(shifted.attrs["scalar"]) * shifted.attrs["alpha"]
    return None if squared is None else (squared, _axes(mean), eps)


def _is_mean(node: Node) -> bool:
    """Whether a node is a mean along some axes, which stay, in the type of what it reads."""
    plain = node.op == "mean" and node.attrs["keepdim"] and node.attrs["dim"]
    return bool(plain) and node.output.dtype == node.inputs[0].dtype


def _axes(mean: Node) -> tuple[int, ...]:
    return tuple(d % len(mean.inputs[0].shape) for d in mean.attrs["dim"])


def _root(square: Node | None) -> Value | None:
    """What is squared, or None."""
    if square is None:
        return None
    root = square.inputs[0]
    by_power = square.op == "pow" and square.attrs["scalar"] == 2
    return root if by_power or (square.op == "mul" and square.inputs[1] is root) else None


def _last_axes(rows: Value, dims: tuple[int, ...]) -> tuple[int, ...] | None:
    """Sizes of the axes, if they are the last ones."""
    rank = len(rows.shape)
    if sorted(dims) != list(range(rank - len(dims), rank)):
        return None
    sizes = rows.shape[rank - len(dims) :]
    return tuple(sizes) if all(isinstance(size, int) for size in sizes) else None


def _centred(graph: Graph, rows: Value, dims: tuple[int, ...]) -> Value | None:
    """x, where ``rows`` is x without its mean over these axes."""
    node = graph.producer(rows)
    if node is None or node.op != "sub" or node.attrs["scalar"] is not None:
        return None
    x, mean = node.inputs[0], graph.producer(node.inputs[1])
    if mean is None or mean.inputs[0] is not x or not _is_mean(mean):
        return None
    return x if node.attrs["alpha"] == 1 and sorted(_axes(mean)) == sorted(dims) else None


def _affine(graph: Graph, norm: Node) -> tuple[Node, Node]:
    """The norm with the weight and bias that follow it, and the last operator of them."""
    last = graph.producer(norm.output)
    for op, position in (("mul", 1), ("add", 2)):
        users = graph.users(last.output)
        if len(users) != 1 or last.output in graph.outputs or users[0].op != op:
            continue
        (user,) = users
        vector = user.inputs[1] if user.inputs[0] is last.output else user.inputs[0]
        fits = vector in graph.constants and vector.dtype == last.output.dtype
        fits = fits and vector.shape == norm.attrs["normalized_shape"]
        if not fits or user.attrs.get("alpha", 1) != 1 or len(norm.inputs) <= position:
            continue
        norm.inputs = (*norm.inputs[:position], vector, *norm.inputs[position + 1 :])
        last = user
    return norm, last
