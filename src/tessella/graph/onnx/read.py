"""Reading an ONNX file: checked, confined to its folder, and turned into a graph node by node.

An ONNX file is hostile until it is checked: it may name external files, and describe anything.
"""

from __future__ import annotations

import math
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import onnx
import torch
from google.protobuf.message import DecodeError
from onnx import TensorProto, helper, inliner, numpy_helper

from tessella.artifacts.files import read_file
from tessella.core.errors import ArtifactError, CompileError, TessellaError, UnboundInput
from tessella.core.spec import DimRange, TensorSpec
from tessella.graph.check import check
from tessella.graph.graph import Dim, Graph, Value
from tessella.graph.onnx import linear_models, own
from tessella.graph.onnx.budget import (
    MOST_SIZES,
    Budget,
    BudgetedBuilder,
    External,
    check_functions,
    check_size,
)
from tessella.graph.onnx.call import Attributes, Call, Result, Sizes, Translator
from tessella.graph.onnx.control import CONTROL
from tessella.graph.onnx.functions import FUNCTIONS, body, version
from tessella.graph.onnx.indexing import INDEXING
from tessella.graph.onnx.layers import LAYERS
from tessella.graph.onnx.movement import MOVEMENT
from tessella.graph.onnx.open_sizes import said_sizes
from tessella.graph.onnx.pointwise import POINTWISE
from tessella.graph.onnx.pool import POOL
from tessella.graph.onnx.quantize import QUANTIZE
from tessella.graph.onnx.recurrent import RECURRENT
from tessella.graph.onnx.reduce import REDUCE
from tessella.graph.onnx.refused import REFUSED
from tessella.graph.onnx.resize import RESIZE
from tessella.graph.onnx.shapes import ON_SIZES, on_sizes
from tessella.graph.onnx.signal import SIGNAL
from tessella.graph.onnx.types import DTYPES, NUMBERS
from tessella.graph.recognize import recognize

OPERATORS: dict[str, Translator] = {
    **ON_SIZES,
    **LAYERS,
    **POOL,
    **REDUCE,
    **POINTWISE,
    **MOVEMENT,
    **INDEXING,
    **RESIZE,
    **QUANTIZE,
    **RECURRENT,
    **linear_models.LINEAR_MODELS,
    **SIGNAL,
    **CONTROL,
}
NEWEST_OPSET = 28
_BY_DATA = (
    "a plan's shapes are fixed: export the model up to where its boxes are sorted out, and do that "
    "with what the plan answers (torchvision.ops.nms)"
)


def supported() -> tuple[str, ...]:
    """The ONNX operators that can be read."""
    return tuple(sorted(OPERATORS))


def read(
    source: str | Path | bytes,
    *,
    batch: DimRange | None = None,
    name: str = "",
    bound: Mapping[str, torch.Tensor] | None = None,
    inputs: Sequence[TensorSpec] = (),
) -> Graph:
    """The graph of an ONNX model.

    Args:
        source: a path, or the file's content. A model with external data needs its path.
        batch: for inputs whose first dimension has a name instead of a size: a range of one size
            fixes it; by default, and with a range of several, it stays symbolic.
        name: the graph's name; by default the one in the file.
        bound: values of inputs that thereby become constants: a shape, axes, an empty tensor.
        inputs: sizes for inputs whose other dimensions have names, too. What one of them says of a
            name holds for all; the first dimension stays what ``batch`` says.

    Raises:
        UsageError: ``inputs`` do not fit those of the file.
        UnboundInput: shapes depend on the value of an input; its ``input`` says which.
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
    graph = _Reader(model, opset, batch, name, bound or {}, inputs).read()
    recognize(graph)
    check(graph)
    return graph


def _load(source: str | Path | bytes) -> onnx.ModelProto:
    """The checked model with all its data inside."""
    try:
        content = source if isinstance(source, bytes) else read_file(Path(source), "ONNX file")
        model = onnx.load_model_from_string(content)
    except ArtifactError as error:
        raise CompileError("the ONNX file cannot be opened", seen=error.seen) from error
    except (DecodeError, ValueError) as error:
        raise CompileError("this is not an ONNX file", seen=str(error)[:200]) from error
    folder = None if isinstance(source, bytes) else Path(source).parent
    external = External()
    for tensor in _tensors([model.graph.node, *(f.node for f in model.functions)], model.graph):
        if tensor.data_location == TensorProto.EXTERNAL:
            _load_external(tensor, folder, external)
    check_functions(model)
    try:
        if model.functions:
            model = inliner.inline_local_functions(model)
        onnx.checker.check_model(model)
    except (onnx.checker.ValidationError, ValueError, RuntimeError) as error:
        raise CompileError("the ONNX file is not valid", seen=str(error).strip()[:400]) from error
    if strange := [node.op_type for node in _nodes(model.graph) if node.domain == own.DOMAIN]:
        raise CompileError(
            f"the domain {own.DOMAIN!r} has no operators in files", seen=", ".join(strange)[:200]
        )
    own.restore(model)
    return model


def _tensors(
    bodies: Iterable[Iterable[onnx.NodeProto]], *graphs: onnx.GraphProto
) -> Iterator[TensorProto]:
    """Every tensor in graphs and in lists of nodes: initializers, attributes, and those inside."""
    for graph in graphs:
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield from (sparse.values, sparse.indices)
    for node in chain.from_iterable(bodies):
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            for inner in (*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs):
                yield from _tensors([inner.node], inner)


def _load_external(tensor: TensorProto, folder: Path | None, external: External) -> None:
    """Read a tensor's data from a file beside the model, which must really be beside it."""
    entries = {e.key: e.value for e in tensor.external_data}
    location = entries.get("location", "")

    def refused(why: str) -> CompileError:
        return CompileError(
            f"the external data of {tensor.name[:80]!r} cannot be read: {why}",
            seen=repr(location[:200]),
            fix="put the data file into the folder of the model, under a plain relative name",
        )

    if folder is None:
        raise refused("a model given as bytes has no folder")
    wanted = math.prod(tensor.dims) * getattr(torch, _dtype(tensor.data_type)).itemsize
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
            found = os.fstat(file.fileno())
            offset = int(entries.get("offset", 0))
            length = int(entries.get("length", wanted))
            if length != wanted:
                raise refused(f"its {list(tensor.dims)} take {wanted} bytes, not {length}")
            if offset < 0 or length < 0 or offset + length > found.st_size:
                raise refused(f"bytes {offset} to {offset + length} of {found.st_size}")
            external.read((found.st_dev, found.st_ino), found.st_size, length)
            file.seek(offset)
            tensor.raw_data = file.read(length)
    except OSError as error:
        raise refused(str(error)) from error
    except ValueError as error:
        raise refused("its offset or length is not a number") from error
    tensor.data_location = TensorProto.DEFAULT
    del tensor.external_data[:]


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Every node in a graph, and those of the graphs inside."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs):
                yield from _nodes(inner)


def _unknown(node: onnx.NodeProto) -> bool:
    if node.domain == linear_models.DOMAIN:
        return node.op_type not in linear_models.LINEAR_MODELS
    if node.domain not in ("", "ai.onnx"):
        return node.domain != own.DOMAIN or node.op_type not in own.OWN
    defined = node.op_type in FUNCTIONS and node.op_type not in REFUSED
    return not defined and node.op_type not in OPERATORS


def _refuse_unknown(model: onnx.ModelProto) -> None:
    """Name every operator that cannot be read, at once."""
    unknown = Counter(
        node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"
        for node in _nodes(model.graph)
        if _unknown(node)
    )
    if unknown:
        reasons = [f"{op}: {REFUSED[op]}" for op in sorted(unknown) if op in REFUSED]
        raise CompileError(
            "the model uses ONNX operators that cannot be read",
            seen="; ".join(
                [", ".join(f"{op} ({count}×)" for op, count in sorted(unknown.items())), *reasons]
            ),
            fix=linear_models.advice([op.rpartition(".")[2] for op in sorted(unknown)])
            or (_BY_DATA if {*unknown} & {"NonMaxSuppression", "NonZero"} else None)
            or "export the model without them, or compile the torch module instead",
        )


class _Reader:
    """Walks the nodes once; names in the file become values, or sizes that follow the batch."""

    def __init__(
        self,
        model: onnx.ModelProto,
        opset: int,
        batch: DimRange | None,
        name: str,
        bound: Mapping[str, torch.Tensor],
        inputs: Sequence[TensorSpec],
    ) -> None:
        graph = model.graph
        names = [v.name for v in (*graph.input, *graph.output)]
        self.source = graph
        self.opset = opset
        self.batch = batch
        self.bound = bound
        self.sizes = said_sizes(graph.input, inputs)
        held = sum(math.prod(t.dims) for t in _tensors([graph.node], graph))
        held = min(held, model.ByteSize())  # what the checker let pass takes a byte or more each
        self.budget = Budget(held)
        self.build = BudgetedBuilder(name or graph.name or "onnx", names, self.budget)
        self.known: dict[str, Value | Sizes | None] = {}

    def read(self) -> Graph:
        if self.source.sparse_initializer:
            raise CompileError("a model with sparse initializers cannot be read")
        with _told("the ONNX file is not valid"):
            for tensor in self.source.initializer:
                self.known[tensor.name] = self.build.constant(tensor.name, _to_torch(tensor))
            for info in self.source.input:
                if info.name in self.bound:
                    value = self.bound[info.name]
                    self.known[info.name] = self.build.constant(f"{info.name}.bound", value)
                elif info.name not in self.known:  # old files list their initializers as inputs
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
        dims = [self.sizes.get((info.name, i)) if d is None else d for i, d in enumerate(dims)]
        if 0 in dims:
            raise UnboundInput(
                f"input {info.name!r} has no elements",
                input=info.name,
                seen=dims,
                fix="make it a constant of the model, or give its value: "
                f"ts.compile(tessella.graph.onnx.read(path, bound={{{info.name!r}: tensor}}))",
            )
        if None in dims[1:] or any(d is not None and d < 1 for d in dims):
            shown = [d.dim_param or d.dim_value or "?" for d in tensor.shape.dim]
            said = "x".join(str(d or 128) for d in [1, *dims[1:]])
            raise CompileError(
                f"only the first dimension of input {info.name!r}, the batch, may be open",
                seen=shown,
                fix="say the other sizes, as --inputs "
                f"{info.name}:{_dtype(tensor.elem_type)}:{said} (in Python inputs=[TensorSpec(…)])"
                ", or export the model with them fixed",
            )
        first, batch = dims[0] if dims else None, self.batch
        dynamic = bool(dims) and first is None
        shape: list[int | DimRange] = [d for d in dims if d is not None]
        if dynamic and batch is not None and batch.min == batch.max:
            shape, dynamic = [batch.opt, *shape], False
        elif dynamic:
            shape = [DimRange(min=1, opt=1, max=2), *shape]
        elif first is not None and batch is not None and batch.max > 1 and first not in batch:
            raise CompileError(
                f"input {info.name!r} has a fixed batch",
                seen=f"{first} in the file, {batch} asked for",
                fix="export the model with a named first dimension",
            )
        check_size(info.name, tuple(d if isinstance(d, int) else d.max for d in shape))
        spec = TensorSpec(name=info.name, dtype=_dtype(tensor.elem_type), shape=tuple(shape))
        return self.build.input(spec, dynamic=dynamic)

    def _node(self, node: onnx.NodeProto) -> None:
        self.budget.node()
        where = f"{node.op_type} {(node.name or ', '.join(node.output))[:80]!r}"
        with _told(f"the ONNX node {where} cannot be read"):
            if node.domain == own.DOMAIN:
                self._translated(node, own.OWN[node.op_type])
            elif node.op_type in OPERATORS:
                self._translated(node, OPERATORS[node.op_type])
            else:
                self._defined(node)

    def _translated(self, node: onnx.NodeProto, usual: Translator) -> None:
        """A node whose operator is translated."""
        self.build.layer = node.name or self.build.layer
        call = Call(
            op=node.op_type,
            name=node.name,
            attrs=Attributes({a.name: _attribute(a) for a in node.attribute}),
            inputs=tuple(self.known[i] if i else None for i in node.input),
            outputs=tuple(node.output),
            opset=self.opset,
            build=self.build,
            inner=self._inner,
        )
        made: Result = (on_sizes(call) or usual)(call)
        results = [made] if isinstance(made, Value | np.ndarray) else list(made)
        call.check_all_read(len(results))
        for name, result in zip(node.output, results):
            self.known[name] = self._settle(name, result)

    def _defined(self, node: onnx.NodeProto) -> None:
        """A node whose operator ONNX defines by others: these, in a scope of their own."""
        given = [self.known[i] if i else None for i in node.input]
        kinds = [
            self.build.constant(f"{node.name}.shape", _settled(v))
            if isinstance(v, np.ndarray)
            else v
            for v in given
        ]
        function = body(node, kinds, self.opset, NUMBERS)
        if function is None or node.op_type in REFUSED:
            why = REFUSED.get(node.op_type, f"opset {self.opset} does not define it by others")
            raise CompileError(f"the ONNX operator {node.op_type} cannot be read", seen=why)
        outer, opset = self.known, self.opset
        names = zip(function.input, [*given, *[None] * len(function.input)])
        self.known, self.opset = dict(names), version(function)
        for inner in function.node:
            self._node(inner)
        made = [self.known.get(name) for name in function.output]
        self.known, self.opset = outer, opset
        self.known |= {name: value for name, value in zip(node.output, made) if name}

    def _inner(
        self, graph: onnx.GraphProto, inputs: Sequence[Value | Sizes]
    ) -> list[Value | Sizes]:
        """The outputs of a graph inside a node, which sees the names around it."""
        self.budget.node()
        outer = dict(self.known)
        self.known |= {
            tensor.name: self.build.constant(tensor.name, _to_torch(tensor))
            for tensor in graph.initializer
        }
        self.known |= {v.name: given for v, given in zip(graph.input, inputs, strict=True)}
        for node in graph.node:
            self._node(node)
        made = [self.known[v.name] for v in graph.output]
        self.known = outer
        return [value for value in made if value is not None]

    def _settle(self, name: str, result: Value | Sizes) -> Value | Sizes:
        """Sizes that do not follow the batch are a constant like any other."""
        if isinstance(result, Value):
            return result
        if result.size > MOST_SIZES:
            raise CompileError("a shape in the model has too many sizes", seen=result.size)
        dims = [d for d in result.flatten().tolist() if isinstance(d, Dim)]
        for dim in dims:
            check_size(name, (max(abs(dim.factor), abs(dim.offset)),))
        if dims:
            return result
        return self.build.constant(name, _settled(result))

    def _output(self, name: str) -> Value:
        made = self.known[name]
        if isinstance(made, Value):
            return made
        raise CompileError(
            "an output of the model is the batch size itself",
            seen=name,
            fix="export the model without this output",
        )


@contextmanager
def _told(wrong: str) -> Iterator[None]:
    """Tell what Python, torch or onnx say of a file that makes no sense as an error of ours."""
    try:
        yield
    except TessellaError:
        raise
    except (
        ArithmeticError, LookupError, TypeError, ValueError, RuntimeError, MemoryError,
        onnx.defs.SchemaError, onnx.checker.ValidationError,
    ) as error:  # fmt: skip
        if type(error) is ArithmeticError:  # a ``Dim``'s
            raise CompileError(
                "a size in the network is not a multiple of the batch plus a constant",
                seen=f"{error}: {wrong}",
                fix="fix the batch: batch=DimRange(min=n, opt=n, max=n)",
            ) from error
        seen = f"{type(error).__name__}: {error}"
        raise CompileError(wrong, seen=seen[:300], fix="check this node in the file") from error


def _settled(sizes: Sizes) -> torch.Tensor:
    numbers = [0 if isinstance(d, Dim) else int(d) for d in sizes.flatten().tolist()]
    return torch.tensor(numbers, dtype=torch.int64).reshape(sizes.shape)


_TYPE_NAMES = {number: name for name, number in TensorProto.DataType.items()}


def _dtype(element: int) -> str:
    if element not in DTYPES:
        raise CompileError(
            "the model has tensors of an element type that cannot be read",
            seen=_TYPE_NAMES.get(element, element),
            fix=f"use one of {', '.join(DTYPES.values())}",
        )
    return DTYPES[element]


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
    if attribute.name in _TYPES and isinstance(value, int):
        return _dtype(value) if value else None
    if attribute.type == onnx.AttributeProto.STRINGS:
        return [v.decode() for v in value]
    return list(value) if attribute.type in _LISTS else value


_TYPES = ("to", "dtype", "output_dtype", "precision", "output_datatype", "softmax_precision")
_LISTS = (onnx.AttributeProto.INTS, onnx.AttributeProto.FLOATS)
