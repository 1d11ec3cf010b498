"""Operations of ours that ONNX can only say in many operators whose sizes depend on the data.

A file has these operators, which everybody runs, and says under a key of its ``metadata_props``
which of them are which operation: who reads it back here has the operation. Functions of ONNX would
say the same, but OpenVINO 2026.4 crashes on a file with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import onnx
from onnx import helper

from tessella.core.errors import CompileError, CorruptArtifact
from tessella.core.record import canonical_json, from_plain, parse_json
from tessella.graph.graph import Node
from tessella.graph.onnx.call import Call, Result, Translator

DOMAIN, KEY = "tessella", "tessella.operations"
MAX_CHARACTERS, MOST, LARGEST = 1 << 20, 256, 1 << 20  # of the record, its operations, a number
# By operation: its attributes with their types, of which those that are None are left out.
ATTRIBUTES: dict[str, dict[str, type]] = {
    "nms": {"iou_threshold": float, "score_threshold": float, "most": int},
    "pyramid_roi_align": {"sizes": list, "strides": list, "side": int, "samples": int},
}
OPTIONAL = ("score_threshold",)
INPUTS = {"nms": (2, 3), "pyramid_roi_align": (3, 3)}  # how many, at least and at most


@dataclass(frozen=True, kw_only=True)
class Said:
    """An operation, and the names of the operators in the file that are it.

    Attributes:
        numbers: of each attribute, one or several.
        digest: of these operators and the constants that they read: see ``_digest``.
    """

    op: str
    inputs: tuple[str, ...]
    output: str
    nodes: tuple[str, ...]
    numbers: dict[str, tuple[float, ...]]
    digest: str


@dataclass(frozen=True, kw_only=True)
class Operations:
    """All of a file."""

    said: tuple[Said, ...] = ()


def said(node: Node, made: Sequence[onnx.NodeProto], constants: Iterable[onnx.TensorProto]) -> Said:
    """The record, in an exported file, of an operation that became the operators ``made``."""
    given = {name: node.attrs[name] for name in ATTRIBUTES[node.op]}
    lists = {n: v if isinstance(v, tuple | list) else (v,) for n, v in given.items()}
    return Said(
        op=node.op,
        inputs=tuple(v.name for v in node.inputs if v is not None),
        output=node.output.name,
        nodes=tuple(one.name for one in made),
        digest=_digest(made, constants),
        numbers={n: tuple(map(float, v)) for n, v in lists.items() if v != (None,)},
    )


def _digest(nodes: Sequence[onnx.NodeProto], constants: Iterable[onnx.TensorProto]) -> str:
    """The SHA-256 of operators, in order, but for their names, and of the constants they read."""
    hashed, tensors = sha256(), {tensor.name: tensor for tensor in constants}
    for node in nodes:
        plain = onnx.NodeProto(
            op_type=node.op_type, domain=node.domain, input=node.input, output=node.output,
            attribute=node.attribute,
        )  # fmt: skip
        hashed.update(plain.SerializeToString(deterministic=True))
        for tensor in (tensors[name] for name in node.input if name in tensors):
            hashed.update(f"{tensor.data_type} {list(tensor.dims)}".encode() + tensor.raw_data)
    return hashed.hexdigest()


def add_operations(model: onnx.ModelProto, every: tuple[Said, ...]) -> None:
    """Write it into a model."""
    if every:
        model.metadata_props.add(key=KEY, value=canonical_json(Operations(said=every)))


def restore(model: onnx.ModelProto) -> None:
    """Put the operations in the place of their operators, where these are as they were written.

    Raises:
        CompileError: what the file says of them is no such record.
    """
    text = next((p.value for p in model.metadata_props if p.key == KEY), "{}")
    if len(text) > MAX_CHARACTERS:
        raise CompileError(f"{KEY} of the ONNX file is too long", seen=f"{len(text):,} characters")
    try:
        found = from_plain(Operations, parse_json(text, where=KEY), where=KEY)
    except CorruptArtifact as error:
        raise CompileError(
            f"{KEY} of the ONNX file cannot be read",
            seen=error,
            fix="remove it from its metadata_props, or export the file again",
        ) from error
    if len(found.said) > MOST:
        raise CompileError(f"{KEY} of the ONNX file names too many", seen=len(found.said))
    for one in found.said:
        modest = all(-LARGEST < v < LARGEST for numbers in one.numbers.values() for v in numbers)
        if modest and one.op in ATTRIBUTES and set(one.numbers) <= set(ATTRIBUTES[one.op]):
            _restored(model.graph, one)


def _restored(graph: onnx.GraphProto, one: Said) -> None:
    names, mine = Counter(node.name for node in graph.node), set(one.nodes)
    inside = [node for node in graph.node if node.name in mine]
    outside = [node for node in graph.node if node.name not in mine]
    made = {name for node in inside for name in node.output}
    read = {name for node in outside for name in node.input} | {v.name for v in graph.output}
    there = {name for node in outside for name in node.output} | {v.name for v in graph.input}
    there |= {tensor.name for tensor in graph.initializer}
    as_written = all(names[name] == 1 for name in mine) and one.output in made
    by_name = {node.name: node for node in inside}
    as_written = as_written and one.digest == _digest(
        [by_name[name] for name in one.nodes], graph.initializer
    )
    if not as_written or (read & made) - {one.output} or not set(one.inputs) <= there:
        return  # somebody has changed the file
    attrs: dict[str, Any] = {}
    for name, numbers in one.numbers.items():
        kind = ATTRIBUTES[one.op][name]
        if kind is list:
            attrs[name] = [int(number) for number in numbers]
        elif numbers:
            attrs[name] = kind(numbers[0])
    call = helper.make_node(
        one.op, one.inputs, [one.output], name=one.nodes[-1], domain=DOMAIN, **attrs
    )
    last = next(node.name for node in inside if one.output in node.output)
    order = [
        call if node.name == last else node
        for node in graph.node
        if node.name == last or node.name not in mine
    ]
    del graph.node[:]
    graph.node.extend(order)


def _same(op: str) -> Translator:
    def translated(call: Call) -> Result:
        least, most = INPUTS[op]
        if not least <= len(call.inputs) <= most:
            raise call.wrong(f"it has {least} to {most} inputs", seen=len(call.inputs))
        attrs = {name: call.attrs.get(name) for name in ATTRIBUTES[op]}
        for name, kind in ATTRIBUTES[op].items():
            left_out = attrs[name] is None and name in OPTIONAL
            if not left_out and type(attrs[name]) is not kind:
                raise call.wrong(f"{name} is no {kind.__name__}", seen=attrs[name])
        call.modest(*(v for v in attrs.values() if isinstance(v, int)))
        attrs = {n: tuple(v) if isinstance(v, list) else v for n, v in attrs.items()}
        return call.emit(op, *call.values(), **attrs)

    return translated


OWN: dict[str, Translator] = {op: _same(op) for op in ATTRIBUTES}
