"""Reshapes between element-wise operations move out of the way, so that these are one step.

A window of attention (Swin) adds a bias to [N·W, heads, T, T], a mask to the same numbers as
[N, W, heads, T, T], and takes the softmax of the first shape again. In one shape it is one chain::

    reshape(op(x, c))  →  op(reshape(x), c)     where the reshape cuts the first axis
    op(reshape(x), c)  →  reshape(op(x, c))     where it joins the first axes
"""

from __future__ import annotations

from tessella.compiler.rewrites.fuse_epilogue import only_use
from tessella.graph.graph import Graph, Node, Shape, Value
from tessella.kernels.pointwise.program import ELEMENTWISE

STEPS = (ELEMENTWISE - {"batch_norm"}) | {"softmax", "log_softmax", "layer_norm", "rms_norm"}


def apply(graph: Graph) -> int:
    """Move reshapes that stand between two steps; returns how many moves."""
    moved = 0
    while any(_up(graph, n) or _down(graph, n) for n in graph.nodes if n.op == "reshape"):
        moved += 1
    return moved


def _up(graph: Graph, reshape: Node) -> bool:
    """Before the step whose result is cut, if steps follow."""
    value, cut = reshape.inputs[0], reshape.output
    step, readers = graph.producer().get(value), graph.users()[cut]
    if step is None or not readers or not _cuts(value.shape, cut.shape):
        return False
    if not all(map(_is_step, (step, *readers))) or not only_use(graph, value, reshape):
        return False
    inputs = _in_shape(graph, step, value.shape)
    if inputs is None:
        return False
    place = graph.nodes.index(step)
    for i, other in enumerate(inputs):
        if other is not None and other.shape == value.shape:
            inputs[i] = Value(graph.fresh_name(f"{other.name}.cut"), other.dtype, cut.shape)
            attrs = {"shape": cut.shape}
            graph.nodes.insert(place, Node("reshape", (other,), (inputs[i],), attrs, step.layer))
            place += 1
    step.inputs, step.outputs = tuple(inputs), reshape.outputs
    graph.nodes.remove(reshape)
    return True


def _down(graph: Graph, reshape: Node) -> bool:
    """Behind the step that reads what is joined, if a step is before."""
    value, joined = reshape.inputs[0], reshape.output
    maker, readers = graph.producer().get(value), graph.users()[joined]
    if maker is None or len(readers) != 1 or not _cuts(joined.shape, value.shape):
        return False
    (step,) = readers
    if not _is_step(maker) or not _is_step(step) or not only_use(graph, joined, step):
        return False
    inputs = _in_shape(graph, step, joined.shape)
    if inputs is None or [v for v in inputs if v is not None and v.shape == joined.shape] != [
        joined
    ]:
        return False
    result = step.output
    step.inputs = tuple(value if v is joined else v for v in inputs)
    step.outputs = (Value(graph.fresh_name(f"{result.name}.cut"), result.dtype, value.shape),)
    reshape.inputs, reshape.outputs = step.outputs, (result,)
    graph.nodes.remove(reshape)
    graph.nodes.insert(graph.nodes.index(step) + 1, reshape)
    return True


def _is_step(node: Node) -> bool:
    return node.op in STEPS and len(node.outputs) == 1


def _cuts(whole: Shape, cut: Shape) -> bool:
    """Whether one shape is the other with its first axis in two."""
    return len(cut) == len(whole) + 1 and cut[2:] == whole[1:]


def _in_shape(graph: Graph, step: Node, shape: Shape) -> list[Value | None] | None:
    """A step's inputs as it takes them when the first axis is two; None if it cannot be.

    Those of the whole shape are to be reshaped. The step's axes count from the last then.
    """
    inputs = list(step.inputs)
    for i, value in enumerate(inputs):
        if value is None or len(value.shape) < len(shape):
            continue
        if value in graph.constants and value.shape[0] == 1:
            row = graph.constants[value][0]
            inputs[i] = graph.add_constant(f"{value.name}.row", row)
        elif value.shape != shape or value in graph.constants:
            return None
    if "dim" in step.attrs:
        axis = step.attrs["dim"] % len(shape)
        if axis == 0:
            return None
        step.attrs["dim"] = axis - len(shape)
    return inputs
