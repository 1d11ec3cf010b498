"""Run a graph on the reference kernels: the plain meaning that all else is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tessella.core.dtype import SIXTEEN_BIT, dtype_name
from tessella.core.errors import CompileError, InputError
from tessella.core.memory import is_out_of_memory
from tessella.execution import liveness
from tessella.execution.liveness import Use
from tessella.graph.graph import Dim, Graph, Node, Value, shape_at
from tessella.operations.epilogue import store
from tessella.operations.table import operation

Watch = Callable[[Node, Sequence[torch.Tensor | None], Sequence[torch.Tensor]], None]


@torch.no_grad()
def interpret(
    graph: Graph,
    inputs: Mapping[str, torch.Tensor],
    *,
    upcast: torch.dtype | None = None,
    once: bool = False,
    watch: Watch | None = None,
) -> dict[str, torch.Tensor]:
    """The outputs of ``graph`` by name.

    Args:
        inputs: a tensor for each graph input, on one device, of its element type and shape.
        upcast: compute everything that floats in this type instead (``torch.float64`` for a
            reference), and complex numbers of two such.
        once: a node that reads 16-bit numbers computes in float64 and rounds its results once, to
            their element types. So do kernels, but in float32; torch rounds to 16 bits between a
            product, its epilogue and a quantized result.
        watch: called after each node, with the tensors that it read and made.

    Raises:
        InputError: an input is missing, unknown, or of another shape or element type.
        CompileError: an operation does not take such numbers: an index that is out of range.
    """
    batch = _batch(graph, inputs)
    device = next((t.device for t in inputs.values()), torch.device("cpu"))
    live: dict[Value, torch.Tensor] = {v: _cast(inputs[v.name], upcast) for v in graph.inputs}
    concrete = graph.at_batch(batch)
    attrs_of = [
        n.attrs if upcast is None else _upcast_attrs(n.attrs, upcast) for n in concrete.nodes
    ]
    uses = [Use(node.inputs, node.outputs) for node in graph.nodes]
    frees = liveness.ended(uses, (*graph.outputs, *graph.constants))
    for index, (node, attrs) in enumerate(zip(graph.nodes, attrs_of, strict=True)):
        tensors = [
            None
            if v is None
            else live[v]
            if v in live
            else _cast(graph.constants[v].to(device), upcast)
            for v in node.inputs
        ]
        if once and any(t is not None and dtype_name(t.dtype) in SIXTEEN_BIT for t in tensors):
            wide = [None if t is None else _cast(t, torch.float64) for t in tensors]
            made = _computed(node, wide, attrs)
            types = (getattr(torch, v.dtype) for v in node.outputs)
            made = tuple(store(t, dtype) for t, dtype in zip(made, types, strict=True))
        else:
            made = _computed(node, tensors, attrs)
        if watch is not None:
            watch(node, tensors, made)
        live.update(zip(node.outputs, made, strict=True))
        for value in frees[index]:
            del live[value]
    return {v.name: live[v] for v in graph.outputs}


def _computed(
    node: Node, tensors: Sequence[torch.Tensor | None], attrs: Mapping[str, Any]
) -> tuple[torch.Tensor, ...]:
    """The results of a node. Shapes were checked before; torch decides about types and indices."""
    try:
        return operation(node.op).call(tensors, attrs)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        if is_out_of_memory(error):
            raise
        raise CompileError(
            f"{node.op} cannot compute with these inputs",
            seen=f"{node.outputs[0]}: {str(error).strip()[:300]}",
            fix="correct the element types, indices or attributes in the network or its file",
        ) from error


def _batch(graph: Graph, inputs: Mapping[str, torch.Tensor]) -> int:
    """The batch size that the inputs have; refuses inputs that do not fit the graph."""
    names = {v.name for v in graph.inputs}
    if set(inputs) != names:
        raise InputError(
            "the inputs do not have the network's names",
            seen=", ".join(sorted(inputs)) or "none",
            fix=f"give {', '.join(sorted(names))}",
        )
    batch = next(
        (
            (size - dim.offset) // dim.factor
            for v in graph.inputs
            for dim, size in zip(v.shape, inputs[v.name].shape)
            if isinstance(dim, Dim)
        ),
        1,
    )
    for value in graph.inputs:
        tensor = inputs[value.name]
        dtype = dtype_name(tensor.dtype)
        if (dtype, tuple(tensor.shape)) != (value.dtype, shape_at(value.shape, batch)):
            raise InputError(
                f"input {value.name!r} does not fit",
                seen=f"{dtype}{list(tensor.shape)}",
                fix=f"give {value}",
            )
    return batch


def _cast(tensor: torch.Tensor, upcast: torch.dtype | None) -> torch.Tensor:
    return tensor if upcast is None else tensor.to(_wider(tensor.dtype, upcast))


def _upcast_attrs(attr: Any, upcast: torch.dtype) -> Any:
    """Attributes with every element type in them that floats or is complex replaced."""
    if isinstance(attr, dict):
        return {
            k: dtype_name(_wider(getattr(torch, a), upcast))
            if k == "dtype" and isinstance(a, str)
            else _upcast_attrs(a, upcast)
            for k, a in attr.items()
        }
    if isinstance(attr, tuple | list):
        return tuple(_upcast_attrs(a, upcast) for a in attr)
    return attr


def _wider(dtype: torch.dtype, upcast: torch.dtype) -> torch.dtype:
    """The type to compute in instead; fp8 is what a value is rounded to on purpose, and stays."""
    if dtype.is_complex:
        return upcast.to_complex()
    return upcast if dtype.is_floating_point and dtype.itemsize > 1 else dtype
