"""The compiler as a backend of the onnx package, and what of its node tests counts as ours.

An input whose value decides a shape (the axes of a reduction, the sizes of a Resize) is a constant
of the plan, so a plan is made when the first inputs are there: ``run`` compiles.
"""

from __future__ import annotations

import warnings
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import torch
from onnx import TensorProto, numpy_helper
from onnx.backend.base import Backend, BackendRep
from onnx.backend.test.case.test_case import TestCase
from onnx.backend.test.loader import load_model_tests
from onnx.backend.test.runner import Runner

import tessella as ts
from tessella.compiler.pipeline import compile_graph
from tessella.compiler.settings import About, Measuring
from tessella.core.errors import TessellaError, UnboundInput
from tessella.core.spec import DimRange
from tessella.graph import Graph
from tessella.graph.onnx import read
from tessella.graph.sample import one_sample

Array = np.ndarray[Any, Any]

_TYPES = "FLOAT DOUBLE FLOAT16 BFLOAT16 INT8 INT16 INT32 INT64 UINT8 UINT16 UINT32 UINT64 BOOL"
ONE = DimRange(min=1, opt=1, max=1)
NUMBERS = frozenset(_TYPES.split())


def cases(newest: int | None = None) -> list[TestCase]:
    """The float and integer operator cases, up to a version of ONNX's operators.

    All node cases of the domain ai.onnx whose inputs and outputs are dense tensors of floating
    point (16 to 64 bits), integers (8 to 64 bits) or truth values: nothing else is left out, not
    control flow, random numbers, training, nor shapes that depend on data.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they divide by zero on purpose
        every = load_model_tests(kind="node")
    return [
        case
        for case in every
        if _kinds(case.model.graph) <= NUMBERS
        and {n.domain for n in case.model.graph.node} == {""}
        and (newest is None or opset(case) <= newest)
    ]


def opset(case: TestCase) -> int:
    return int(case.model.opset_import[0].version)


def _kinds(graph: onnx.GraphProto) -> set[str]:
    kinds = set()
    for value in (*graph.input, *graph.output):
        kind = value.type.WhichOneof("value")
        dense = kind == "tensor_type"
        kinds.add(TensorProto.DataType.Name(value.type.tensor_type.elem_type) if dense else kind)
    return kinds


class Prepared(BackendRep):
    """A model that waits for its inputs."""

    def __init__(self, model: onnx.ModelProto, target: str) -> None:
        self.model = model
        self.target = target

    def run(self, inputs: Any, **kwargs: Any) -> list[Array]:
        feeds = {v.name: tensor(a) for v, a in zip(self.model.graph.input, inputs, strict=True)}
        graph = bound(self.model, feeds)
        shapes = {v.name: v.shape for v in graph.outputs}
        sample = one_sample(graph, ONE)
        wide = {v.name: feeds[v.name].reshape(v.shape) for v in sample.inputs}
        plan = compile_graph(
            sample,
            target=self.target,
            batch=ONE,
            samples=wide,
            about=About(built_from="a node test", rebuild="none"),
            measuring=Measuring(untuned=True),  # to try each kernel takes half as long again
        )
        made = ts.load(plan)(**wide)
        return [array(made[v.name].reshape(shapes[v.name])) for v in self.model.graph.output]


class TessellaBackend(Backend):
    """Compiles a model for ``cpu`` (or another target) and runs its plan."""

    target = "cpu"

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> Prepared:
        return Prepared(model, cls.target)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        return device == "CPU"


def bound(model: onnx.ModelProto, feeds: dict[str, torch.Tensor]) -> Graph:
    """The graph, with just those inputs as constants that decide shapes."""
    data, values = model.SerializeToString(), {}
    while True:
        try:
            return read(data, bound=values)
        except UnboundInput as error:
            values[error.input] = feeds[error.input]


def outcome(case: TestCase, backend: type[TessellaBackend] = TessellaBackend) -> str | None:
    """None if a case passes by its own tolerances, else why not."""
    try:
        for inputs, expected in case.data_sets:
            made = backend.prepare(case.model).run([_array(i) for i in inputs])
            wanted = [_array(o) for o in expected]
            Runner.assert_similar_outputs(wanted, made, case.rtol, case.atol)
    except TessellaError as error:
        return f"refused: {error.wrong}" + (f" ({error.seen})" if error.seen else "")
    except AssertionError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return f"differs: {' '.join(lines[:3])[:160]}"
    return None


def _array(given: Any) -> Array:
    return numpy_helper.to_array(given) if isinstance(given, TensorProto) else np.asarray(given)


def tensor(array: Array) -> torch.Tensor:
    array = np.array(array)  # a copy that may be written
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def array(tensor: torch.Tensor) -> Array:
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
