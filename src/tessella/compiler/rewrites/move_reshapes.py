"""Reshapes between element-wise operations move out of the way, so that these are one step.

A window of attention (Swin) adds a bias to [N·W, heads, T, T], a mask to the same numbers as
[N, W, heads, T, T], and takes the softmax of the first shape again. In one shape it is one chain::

    reshape(op(x, c))  →  op(reshape(x), c)     where the reshape cuts the first axis
    op(reshape(x), c)  →  reshape(op(x, c))     where it joins the first axes
    f(permute(x))      →  permute(f(x))         where a step makes x, as a norm over channels does

A permute that follows a permute then is one with it.
"""

from __future__ import annotations

from collections.abc import Collection

from tessella.compiler.rewrites.worklist import until_done, values_of
from tessella.graph.graph import Graph, Node, Shape, Value
from tessella.operations.pointwise_program import ELEMENTWISE

STEPS = (ELEMENTWISE - {"batch_norm"}) | {"softmax", "log_softmax", "layer_norm", "rms_norm"}


def apply(graph: Graph) -> int:
    """Move reshapes and permutes that stand between two steps; returns how many moves."""
    return until_done(graph, _move)


def _move(graph: Graph, node: Node) -> Collection[Value]:
    if node.op == "permute":
        return _join(graph, node) or _turn(graph, node)
    return (_up(graph, node) or _down(graph, node)) if node.op == "reshape" else ()


def _turn(graph: Graph, permute: Node) -> Collection[Value]:
    """Move a permute of a step's result behind the function of one number that alone reads it."""
    value, turned = permute["input"], permute.output
    maker, step = graph.producer(value), graph.only_reader(turned)
    if maker is None or step is None or graph.only_reader(value) is not permute:
        return ()
    read = [v for v in step.inputs if v is not None]
    if not _is_step(maker) or step.op not in ELEMENTWISE - {"batch_norm"} or read != [turned]:
        return ()
    changed, result = values_of(permute, step), step.output
    straight = Value(graph.fresh_name(f"{result.name}.straight"), result.dtype, value.shape)
    step.rebind(input=value)
    step.outputs, permute.inputs, permute.outputs = (straight,), (straight,), (result,)
    graph.nodes.remove(permute)
    graph.nodes.insert_after(step, permute)
    return [*changed, *values_of(step)]


def _join(graph: Graph, permute: Node) -> Collection[Value]:
    """Make one permute of two; none, where the second undoes the first."""
    first = graph.producer(permute["input"])
    if first is None or first.op != "permute" or graph.only_reader(first.output) is not permute:
        return ()
    dims = tuple(first.attrs["dims"][d] for d in permute.attrs["dims"])
    if dims == tuple(range(len(dims))) and permute.output in graph.outputs:
        return ()
    changed = values_of(first, permute)
    permute.rebind(input=first["input"])
    permute.attrs["dims"] = dims
    graph.nodes.remove(first)
    if dims == tuple(range(len(dims))):
        graph.replace_uses(permute.output, permute["input"])
        graph.nodes.remove(permute)
    return changed


def _up(graph: Graph, reshape: Node) -> Collection[Value]:
    """Move a reshape that cuts a step's result before the step, if steps read the parts."""
    value, cut = reshape["input"], reshape.output
    step, readers = graph.producer(value), graph.users(cut)
    if step is None or not readers or not _cuts(value.shape, cut.shape):
        return ()
    if not all(map(_is_step, (step, *readers))) or graph.only_reader(value) is not reshape:
        return ()
    inputs = _in_shape(graph, step, value.shape)
    if inputs is None:
        return ()
    changed = values_of(step, reshape)
    parts: list[Value | None] = []
    for other in inputs:
        part = other
        if other is not None and other.shape == value.shape:
            part = Value(graph.fresh_name(f"{other.name}.cut"), other.dtype, cut.shape)
            made = Node("reshape", (other,), (part,), {"shape": cut.shape}, step.layer)
            graph.nodes.insert_before(step, made)
        parts.append(part)
    step.inputs, step.outputs = tuple(parts), reshape.outputs
    graph.nodes.remove(reshape)
    return [*changed, *values_of(step)]


def _down(graph: Graph, reshape: Node) -> Collection[Value]:
    """Move a reshape that joins a step's result behind the one step that reads the whole."""
    value, joined = reshape["input"], reshape.output
    maker, readers = graph.producer(value), graph.users(joined)
    if maker is None or len(readers) != 1 or not _cuts(joined.shape, value.shape):
        return ()
    (step,) = readers
    if not _is_step(maker) or not _is_step(step) or graph.only_reader(joined) is not step:
        return ()
    inputs = _in_shape(graph, step, joined.shape)
    if inputs is None or [v for v in inputs if v is not None and v.shape == joined.shape] != [
        joined
    ]:
        return ()
    changed, result = values_of(step, reshape), step.output
    step.inputs = tuple(value if v is joined else v for v in inputs)
    step.outputs = (Value(graph.fresh_name(f"{result.name}.cut"), result.dtype, value.shape),)
    reshape.inputs, reshape.outputs = step.outputs, (result,)
    graph.nodes.remove(reshape)
    graph.nodes.insert_after(step, reshape)
    return [*changed, *values_of(step)]


def _is_step(node: Node) -> bool:
    return node.op in STEPS and len(node.outputs) == 1


def _cuts(whole: Shape, cut: Shape) -> bool:
    """Whether ``cut`` is ``whole`` with its first axis split in two."""
    return len(cut) == len(whole) + 1 and cut[2:] == whole[1:]


def _in_shape(graph: Graph, step: Node, shape: Shape) -> list[Value | None] | None:
    """A step's inputs as it takes them when the first axis is two; None if it cannot be.

    Those of the whole shape are to be reshaped. The step's axes count from the last then.
    """
    inputs: list[Value | None] = []
    for value in step.inputs:
        taken = value
        if value is None or len(value.shape) < len(shape):
            pass
        elif value in graph.constants and value.shape[0] == 1:
            taken = graph.add_constant(f"{value.name}.row", graph.constants[value][0])
        elif value.shape != shape or value in graph.constants:
            return None
        inputs.append(taken)
    if "dim" in step.attrs:
        axis = step.attrs["dim"] % len(shape)
        if axis == 0:
            return None
        step.attrs["dim"] = axis - len(shape)
    return inputs
