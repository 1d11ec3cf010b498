"""A graph becomes an ONNX file: each operation as ONNX's own operators, the batch left open.

What an operation becomes is in ``exports``, an operator of torch in ``export_fallbacks``.
"""

from __future__ import annotations

import os
from pathlib import Path

import onnx

from tessella.artifacts.files import write_atomic
from tessella.core.errors import CompileError, UsageError
from tessella.graph.graph import Graph
from tessella.graph.onnx.export_fallbacks import FALLBACKS
from tessella.graph.onnx.exports import EXPORTS
from tessella.graph.onnx.metadata import Metadata, add_metadata
from tessella.graph.onnx.writer import Writer

OLDEST, NEWEST = 17, 21
_ONE_FILE = 1 << 30  # bytes of constants in the file itself; protobuf ends at twice that


def write(
    graph: Graph, path: str | Path, *, opset: int = 17, metadata: Metadata | None = None
) -> None:
    """Write ``graph`` as an ONNX model, checked by onnx.

    Args:
        metadata: how images become its input, and its labels; they stand in ``metadata_props``.
        opset: 17 to 21. Constants of more than 1 GiB lie beside the model, in ``PATH.data``.

    Raises:
        UsageError: another opset.
        CompileError: an operation that ONNX does not have; the message lists all of them.
    """
    path = Path(path)
    made = model(graph, opset=opset)
    if metadata is not None:
        add_metadata(made, metadata)
    if made.ByteSize() <= _ONE_FILE:
        onnx.checker.check_model(made, full_check=True)
        write_atomic(path, made.SerializeToString())
        return
    data = f"{path.name}.data"
    (path.parent / data).unlink(missing_ok=True)  # onnx would append to it
    onnx.save_model(made, os.fspath(path), save_as_external_data=True, location=data)
    onnx.checker.check_model(os.fspath(path))


def model(graph: Graph, *, opset: int = 17) -> onnx.ModelProto:
    """``graph`` as a model in memory."""
    if not OLDEST <= opset <= NEWEST:
        raise UsageError(
            "ONNX is written in some of its versions", seen=opset, fix=f"use {OLDEST} to {NEWEST}"
        )
    _require_known(graph)
    writer = Writer(graph, opset)
    for node in graph.nodes:
        writer.layer = node.layer or node.op
        if node.op == "fallback":
            FALLBACKS[node.attrs["target"]](writer, node)
        else:
            EXPORTS[node.op](writer, node)
    return writer.finish()


def write_bytes(graph: Graph) -> bytes:
    """``graph`` as the content of an ONNX file."""
    made: bytes = model(graph).SerializeToString()
    return made


def _require_known(graph: Graph) -> None:
    unknown = {
        node.attrs["target"] if node.op in ("fallback", "user") else node.op
        for node in graph.nodes
        if (node.op != "fallback" and node.op not in EXPORTS)
        or (node.op == "fallback" and node.attrs["target"] not in FALLBACKS)
    }
    if unknown:
        raise CompileError(
            "the network has operations that cannot be written as ONNX",
            seen=", ".join(sorted(unknown)),
            fix="write these layers with other operators",
        )
