"""The rules of a graph. They are checked after capture and after every pass that changed it."""

from __future__ import annotations

from tessella.core.dtype import dtype_name
from tessella.core.errors import CompileError
from tessella.graph import infer
from tessella.graph.attributes import is_attribute
from tessella.graph.graph import Graph, Node, Value, shape_at
from tessella.operations import pointwise_program as program
from tessella.operations.table import OPERATIONS
from tessella.operations.torch_operators.operators import refusal

# Two sizes fix a line; 1 is the case that broadcasting treats differently.
_BATCHES = (1, 3)


def check(graph: Graph) -> None:
    """Raise ``CompileError`` naming the node and the rule that it breaks.

    The rules: names are unique, and every value has one producer; a value is made before it is
    read; operations are known and have the inputs and attributes of their row; attributes can be
    written to JSON; every shape and element type is what the reference kernels give; constants
    have the shape that their value says; and the outputs exist.
    """
    _names(graph)
    made: set[Value] = {*graph.inputs, *graph.constants}
    for value, tensor in graph.constants.items():
        kind = (dtype_name(tensor.dtype), tuple(tensor.shape))
        if kind != (value.dtype, value.shape):
            raise CompileError(
                f"constant {value.name!r} is not what its value says",
                seen=f"{kind[0]}{list(kind[1])} for {value}",
            )
    for node in graph.nodes:
        _row(node)
        for read in node.inputs:
            if read is not None and read not in made:
                raise _broken(node, "every value is made before it is read", repr(read))
        for name, attr in node.attrs.items():
            if not is_attribute(attr):
                raise _broken(node, "attributes can be written to JSON", f"{name}={attr!r}")
        made.update(node.outputs)
    for value in graph.outputs:
        if value not in made:
            raise CompileError("an output of the graph is never made", seen=value)
    _shapes(graph)


def _names(graph: Graph) -> None:
    values: set[Value] = set()
    names: set[str] = set()
    for value in graph.values():
        if value in values:
            raise CompileError("a value has two producers", seen=value)
        if value.name in names:
            raise CompileError("a name is used for two values", seen=value)
        values.add(value)
        names.add(value.name)
    if len({v.name for v in graph.outputs}) != len(graph.outputs):
        raise CompileError(
            "an output of the graph is named twice", seen=", ".join(v.name for v in graph.outputs)
        )


def _row(node: Node) -> None:
    """The node has the inputs and attributes that its operation's row asks for."""
    row = OPERATIONS.get(node.op)
    if row is None:
        raise _broken(node, "operations are known", node.op)
    if not set(row.attributes) <= set(node.attrs) <= {*row.attributes, *row.defaults}:
        known = ", ".join(row.attributes) or "none"
        raise _broken(node, f"the attributes are {known}", ", ".join(node.attrs))
    if row.variadic:
        if not node.inputs or None in node.inputs:
            raise _broken(node, "it takes one or more tensors, none left out", str(node.inputs))
    elif not 0 <= len(node.inputs) - len(row.inputs) <= len(row.late):
        raise _broken(node, f"the inputs are {', '.join(row.inputs)}", f"{len(node.inputs)} inputs")
    for name, value in zip(row.inputs, node.inputs):
        if value is None and name not in row.optional:
            raise _broken(node, f"the input {name} may not be left out", "None")
    if "scalar" in row.attributes and (node.get("other") is None) == (node.attrs["scalar"] is None):
        raise _broken(node, "either other or scalar is given", f"scalar={node.attrs['scalar']}")
    if not row.many and len(node.outputs) != 1:
        raise _broken(node, "it has one output", f"{len(node.outputs)} outputs")
    if node.op == "fallback" and (reason := refusal(node.attrs["target"])) is not None:
        raise _broken(node, "its operator may run as a fallback", reason)
    if node.op == "pointwise":
        program.parse(node.attrs["program"], len(node.inputs), node.attrs["results"])


def _shapes(graph: Graph) -> None:
    """Shapes and element types are what the references give, at each of two batch sizes."""
    for batch in _BATCHES:
        for node in graph.nodes:
            try:
                kinds = infer.at_batch(node.op, node.inputs, node.attrs, batch)
            except CompileError as error:
                raise _broken(node, "the operation accepts its inputs", str(error.seen)) from error
            claimed = tuple((v.dtype, shape_at(v.shape, batch)) for v in node.outputs)
            if kinds != claimed:
                raise _broken(
                    node,
                    "shapes and element types are what the operation gives",
                    f"{claimed} where it gives {kinds}, at batch {batch}",
                )


def _broken(node: Node, rule: str, seen: str) -> CompileError:
    names = ", ".join(v.name for v in node.outputs) or "no output"
    layer = f" (layer {node.layer})" if node.layer else ""
    return CompileError(f"node {node.op} → {names}{layer} breaks a rule: {rule}", seen=seen)
