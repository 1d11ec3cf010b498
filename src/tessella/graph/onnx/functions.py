"""Operators that ONNX defines by other operators: their bodies, ready to be read in their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
from onnx import AttributeProto, TensorProto, TypeProto, helper

from tessella.graph.graph import Value

# What ONNX defines by other operators, in some version.
FUNCTIONS = frozenset(
    schema.name
    for schema in onnx.defs.get_all_schemas_with_history()
    if not schema.domain and (schema.has_function or schema.has_context_dependent_function)
)


def body(
    node: onnx.NodeProto, inputs: Sequence[Value | None], opset: int, types: Mapping[str, int]
) -> onnx.FunctionProto | None:
    """The definition of a node's operator, with the node's attributes in their places.

    Args:
        inputs: what the node reads; some bodies depend on the element types and ranks.
        opset: the model's version. A body may be written in a later one: see its opset_import.
        types: ONNX's numbers of our element types.

    Returns:
        None if there is no definition that fits.
    """
    schema = onnx.defs.get_schema(node.op_type, max_inclusive_version=opset)
    if schema.has_context_dependent_function:
        version = _version(schema.context_dependent_function_opset_versions, opset)
        kinds = [_type(v, types).SerializeToString() for v in inputs]
        data = schema.get_context_dependent_function_with_opset_version(
            version, node.SerializeToString(), kinds
        )
    elif schema.has_function:
        version = _version(schema.function_opset_versions, opset)
        data = schema.get_function_with_opset_version(version)
    else:
        return None
    function: onnx.FunctionProto = onnx.FunctionProto.FromString(data)
    if not function.node or not function.opset_import:  # onnx could not build it for these inputs
        return None
    given = {name: a.default_value for name, a in schema.attributes.items()}
    given = {name: a for name, a in given.items() if a.type != AttributeProto.UNDEFINED}
    given |= {a.name: a for a in node.attribute}
    _fill(function.node, given)
    return function


def version(function: onnx.FunctionProto) -> int:
    """The version of ONNX's operators that a body is written in."""
    versions = (o.version for o in function.opset_import if o.domain in ("", "ai.onnx"))
    return int(next(versions))


def _version(known: Sequence[int], opset: int) -> int:
    """The newest body that is not newer than the model, or the oldest."""
    return max((v for v in known if v <= opset), default=min(known))


def _fill(
    nodes: Sequence[onnx.NodeProto],
    given: Mapping[str, AttributeProto],
) -> None:
    """Put the caller's attributes where a body refers to them; drop references to nothing."""
    for node in nodes:
        kept = []
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _fill(attribute.g.node, given)
            if not attribute.ref_attr_name:
                kept.append(attribute)
            elif attribute.ref_attr_name in given:
                filled = AttributeProto()
                filled.CopyFrom(given[attribute.ref_attr_name])
                filled.name = attribute.name
                kept.append(filled)
        kept = [AttributeProto.FromString(a.SerializeToString()) for a in kept]
        del node.attribute[:]
        node.attribute.extend(kept)


def _type(value: Value | None, types: Mapping[str, int]) -> TypeProto:
    if value is None:
        return TypeProto()
    shape = [d if isinstance(d, int) else str(d) for d in value.shape]
    return helper.make_tensor_type_proto(types.get(value.dtype, TensorProto.UNDEFINED), shape)
