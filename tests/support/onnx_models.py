"""Small ONNX models for tests, made from nodes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

RNG = np.random.default_rng(0)


def weight(name: str, *shape: int, positive: bool = False) -> TensorProto:
    array = RNG.standard_normal(shape).astype(np.float32) * 0.5
    return numpy_helper.from_array(np.abs(array) + 0.1 if positive else array, name)


def ints(name: str, *values: int) -> TensorProto:
    return numpy_helper.from_array(np.array(values, dtype=np.int64), name)


def scalar(name: str, value: int) -> TensorProto:
    return numpy_helper.from_array(np.array(value, dtype=np.int64), name)


def model(
    nodes: list[onnx.NodeProto],
    inputs: dict[str, list[int | str]],
    outputs: list[str],
    constants: list[TensorProto] = (),  # type: ignore[assignment]
    opset: int = 18,
    functions: list[onnx.FunctionProto] = (),  # type: ignore[assignment]
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in inputs.items()],
        [helper.make_empty_tensor_value_info(n) for n in outputs],
        list(constants),
    )
    opsets = [helper.make_opsetid("", opset)] + [
        helper.make_opsetid(f.domain, 1) for f in functions
    ]
    made = helper.make_model(graph, opset_imports=opsets, functions=list(functions), ir_version=8)
    inferred = onnx.shape_inference.infer_shapes(made)
    for output in inferred.graph.output:  # where inference knows nothing: like the input
        if not output.type.tensor_type.elem_type:
            output.type.CopyFrom(inferred.graph.input[0].type)
    return inferred


node = helper.make_node


def external(folder: Path, location: str, **entries: str) -> Path:
    """A model whose weight lies in an external file."""
    made = model([node("Add", ["x", "w"], ["y"])], {"x": [2]}, ["y"], [weight("w", 2)])
    tensor = made.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **entries}.items():
        tensor.external_data.add(key=key, value=value)
    path = folder / "model.onnx"
    path.write_bytes(made.SerializeToString())
    return path
