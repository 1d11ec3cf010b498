"""Reading an ONNX file: checked, confined to its folder, and turned into a graph node by node.

An ONNX file is hostile until it is checked: it may name external files, and describe anything.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import onnx
import torch
from google.protobuf.message import DecodeError
from onnx import TensorProto, helper, inliner, numpy_helper

from tessella.core.errors import CompileError
from tessella.core.spec import DimRange, TensorSpec
from tessella.graph.build import Builder
from tessella.graph.check import check
from tessella.graph.graph import Dim, Graph, Value
from tessella.graph.onnx.call import Call, Result, Sizes, Translator
from tessella.graph.onnx.layers import LAYERS
from tessella.graph.onnx.movement import MOVEMENT
from tessella.graph.onnx.pointwise import POINTWISE
from tessella.graph.onnx.shapes import ON_SIZES, on_sizes

OPERATORS: dict[str, Translator] = {**ON_SIZES, **LAYERS, **POINTWISE, **MOVEMENT}
NEWEST_OPSET = 21

_DTYPES = {
    TensorProto.FLOAT: "float32",
    TensorProto.DOUBLE: "float64",
    TensorProto.FLOAT16: "float16",
    TensorProto.BFLOAT16: "bfloat16",
    TensorProto.INT64: "int64",
    TensorProto.INT32: "int32",
    TensorProto.INT16: "int16",
    TensorProto.INT8: "int8",
    TensorProto.UINT8: "uint8",
    TensorProto.BOOL: "bool",
}


def supported() -> tuple[str, ...]:
    """The ONNX operators that can be read."""
    return tuple(sorted(OPERATORS))


def read(source: str | Path | bytes, *, batch: DimRange | None = None, name: str = "") -> Graph:
    """The graph of an ONNX model.

    Args:
        source: a path, or the file's content. A model with external data needs its path.
        batch: for inputs whose first dimension has a name instead of a size: a range of one size
            fixes it; by default, and with a range of several, it stays symbolic.
        name: the graph's name; by default the one in the file.

    Raises:
        CompileError: the file is not valid ONNX, reaches outside its folder, is too new, or uses
            operators that are not known: then the message lists all of them.
    """
    model = _load(source)
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)
    if not 7 <= opset <= NEWEST_OPSET:
        raise CompileError(
            "the model's version of ONNX's operators cannot be read",
            seen=f"opset {opset}",
            fix=f"export it with opset_version={NEWEST_OPSET}, or use onnx.version_converter",
        )
    _refuse_unknown(model)
    graph = _Reader(model, opset, batch, name).read()
    check(graph)
    return graph


def _load(source: str | Path | bytes) -> onnx.ModelProto:
    """The checked model with all its data inside."""
    try:
        if isinstance(source, bytes):
            model = onnx.load_model_from_string(source)
        else:
            model = onnx.load(os.fspath(source), load_external_data=False)
    except (DecodeError, ValueError) as error:
        raise CompileError("this is not an ONNX file", seen=str(error)[:200]) from error
    except OSError as error:
        raise CompileError("the ONNX file cannot be opened", seen=error) from error
    folder = None if isinstance(source, bytes) else Path(source).parent
    for tensor in _tensors(model.graph):
        if tensor.data_location == TensorProto.EXTERNAL:
            _load_external(tensor, folder)
    if model.functions:
        model = inliner.inline_local_functions(model)
    try:
        onnx.checker.check_model(model)
    except (onnx.checker.ValidationError, ValueError) as error:
        raise CompileError("the ONNX file is not valid", seen=str(error).strip()[:400]) from error
    return model


def _tensors(graph: onnx.GraphProto) -> Iterator[TensorProto]:
    """Every tensor in a graph: initializers, attributes, and those of graphs inside."""
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            if attribute.HasField("g"):
                yield from _tensors(attribute.g)
            for inner in attribute.graphs:
                yield from _tensors(inner)


def _load_external(tensor: TensorProto, folder: Path | None) -> None:
    """Read a tensor's data from a file beside the model, which must really be beside it."""
    entries = {e.key: e.value for e in tensor.external_data}
    location = entries.get("location", "")

    def refused(why: str) -> CompileError:
        return CompileError(
            f"the external data of {tensor.name!r} cannot be read: {why}",
            seen=repr(location),
            fix="put the data file into the folder of the model, under a plain relative name",
        )

    if folder is None:
        raise refused("a model given as bytes has no folder")
    relative = PurePosixPath(location)
    if not location or relative.is_absolute() or ".." in relative.parts or "\\" in location:
        raise refused("its location leaves the folder of the model")
    path = folder
    for part in relative.parts:
        path = path / part
        if path.is_symlink():
            raise refused("its location is a link")
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # before it is opened: a pipe would wait
            raise refused("it is not a plain file")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            offset = int(entries.get("offset", 0))
            length = int(entries.get("length", size - offset))
            if offset < 0 or length < 0 or offset + length > size:
                raise refused(f"bytes {offset} to {offset + length} of {size}")
            file.seek(offset)
            tensor.raw_data = file.read(length)
    except OSError as error:
        raise refused(str(error)) from error
    except ValueError as error:
        raise refused("its offset or length is not a number") from error
    tensor.data_location = TensorProto.DEFAULT
    del tensor.external_data[:]


def _refuse_unknown(model: onnx.ModelProto) -> None:
    """Name every operator that cannot be read, at once."""
    unknown = Counter(
        node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"
        for node in model.graph.node
        if node.domain not in ("", "ai.onnx") or node.op_type not in OPERATORS
    )
    if unknown:
        raise CompileError(
            "the model uses ONNX operators that cannot be read",
            seen=", ".join(f"{op} ({count}×)" for op, count in sorted(unknown.items())),
            fix="export the model without them, or compile the torch module instead",
        )


class _Reader:
    """Walks the nodes once; names in the file become values, or sizes that follow the batch."""

    def __init__(
        self, model: onnx.ModelProto, opset: int, batch: DimRange | None, name: str
    ) -> None:
        graph = model.graph
        names = [v.name for v in (*graph.input, *graph.output)]
        self.source = graph
        self.opset = opset
        self.batch = batch
        self.build = Builder(name or graph.name or "onnx", reserved=names, fold=True)
        self.known: dict[str, Value | Sizes] = {}

    def read(self) -> Graph:
        for tensor in self.source.initializer:
            self.known[tensor.name] = self.build.constant(tensor.name, _to_torch(tensor))
        if self.source.sparse_initializer:
            raise CompileError("a model with sparse initializers cannot be read")
        for info in self.source.input:
            if info.name not in self.known:  # old files list their initializers as inputs too
                self.known[info.name] = self._input(info)
        for node in self.source.node:
            self._node(node)
        outputs = [self._output(info.name) for info in self.source.output]
        return self.build.finish(outputs, [info.name for info in self.source.output])

    def _input(self, info: onnx.ValueInfoProto) -> Value:
        tensor = info.type.tensor_type
        if not info.type.HasField("tensor_type") or not tensor.HasField("shape"):
            raise CompileError(f"input {info.name!r} is not a tensor of known rank")
        dims = [d.dim_value if d.HasField("dim_value") else None for d in tensor.shape.dim]
        if None in dims[1:] or any(d is not None and d < 1 for d in dims):
            shown = [d.dim_param or d.dim_value or "?" for d in tensor.shape.dim]
            raise CompileError(
                f"only the first dimension of input {info.name!r}, the batch, may be open",
                seen=shown,
                fix="export the model with the other sizes fixed",
            )
        dynamic = bool(dims) and dims[0] is None
        if dynamic and self.batch is not None and self.batch.min == self.batch.max:
            dims[0], dynamic = self.batch.opt, False
        if self.batch is not None and not dynamic and dims and dims[0] not in self.batch:
            raise CompileError(
                f"input {info.name!r} has a fixed batch",
                seen=f"{dims[0]} in the file, {self.batch} asked for",
                fix="export the model with a named first dimension",
            )
        shape = (DimRange(min=1, opt=1, max=2) if dynamic else dims[0], *dims[1:]) if dims else ()
        spec = TensorSpec(name=info.name, dtype=_dtype(tensor.elem_type), shape=shape)
        return self.build.input(spec, dynamic=dynamic)

    def _node(self, node: onnx.NodeProto) -> None:
        self.build.layer = node.name
        call = Call(
            op=node.op_type,
            name=node.name,
            attrs={a.name: _attribute(a) for a in node.attribute},
            inputs=tuple(self.known[i] if i else None for i in node.input),
            outputs=tuple(node.output),
            opset=self.opset,
            build=self.build,
        )
        translator = on_sizes(call) or OPERATORS[node.op_type]
        try:
            made: Result = translator(call)
        except ArithmeticError as error:
            raise CompileError(
                "a size in the network is not a multiple of the batch plus a constant",
                seen=f"{error} in {node.op_type} {node.name!r}",
                fix="fix the batch: batch=DimRange(min=n, opt=n, max=n)",
            ) from error
        results = [made] if isinstance(made, Value | np.ndarray) else list(made)
        for name, result in zip(node.output, results):
            self.known[name] = self._settle(name, result)

    def _settle(self, name: str, result: Value | Sizes) -> Value | Sizes:
        """Sizes that do not follow the batch are a constant like any other."""
        if isinstance(result, Value) or any(isinstance(d, Dim) for d in result.flat):
            return result
        return self.build.constant(name, torch.tensor(result.astype(np.int64)))

    def _output(self, name: str) -> Value:
        made = self.known[name]
        if isinstance(made, Value):
            return made
        raise CompileError(
            "an output of the model is the batch size itself",
            seen=name,
            fix="export the model without this output",
        )


def _dtype(element: int) -> str:
    if element not in _DTYPES:
        raise CompileError(
            "the model has tensors of an element type that cannot be read",
            seen=TensorProto.DataType.Name(element),
            fix=f"use one of {', '.join(_DTYPES.values())}",
        )
    return _DTYPES[element]


def _to_torch(tensor: TensorProto) -> torch.Tensor:
    dtype = _dtype(tensor.data_type)
    array = np.array(numpy_helper.to_array(tensor))  # a copy that may be written
    if dtype == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _attribute(attribute: onnx.AttributeProto) -> Any:
    """An attribute as Python's types; tensors as torch's, element types by name."""
    value = helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, TensorProto):
        return _to_torch(value)
    if attribute.name in ("to", "dtype") and isinstance(value, int):
        return _dtype(value)
    if attribute.type == onnx.AttributeProto.STRINGS:
        return [v.decode() for v in value]
    return list(value) if attribute.type in _LISTS else value


_LISTS = (onnx.AttributeProto.INTS, onnx.AttributeProto.FLOATS)
