"""Linear models and scalers of ``ai.onnx.ml`` beside ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

import tessella as ts
from tessella.core.errors import CompileError
from tessella.graph.onnx import read

ROWS = np.array([[0.5, -2.0, 1.0], [0, 0, 0], [3, 1, 2], [-1, 4, 0.25], [-1, -2, -3]], np.float32)
WEIGHT = [0.5, -1.0, 2.0, 1.0, 0.25, -0.5, -1.0, 0.0, 1.0]
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "regressor": ("LinearRegressor", {"coefficients": WEIGHT[:6], "intercepts": [0.1, -0.2],
                                      "targets": 2}, 1),
    "classifier": ("LinearClassifier", {"coefficients": WEIGHT, "intercepts": [0.1, 0.2, 0.3],
                                        "classlabels_ints": [7, 3, 5], "multi_class": 1}, 2),
    "softmax": ("LinearClassifier", {"coefficients": WEIGHT, "classlabels_ints": [0, 1, 2],
                                     "intercepts": [0.1, 0.2, 0.3],
 "post_transform": "SOFTMAX"}, 2),
    "logistic": ("LinearClassifier", {"coefficients": WEIGHT, "classlabels_ints": [0, 1, 2],
                                      "intercepts": [0.1, 0.2, 0.3],
 "post_transform": "LOGISTIC"}, 2),
    "scaler": ("Scaler", {"offset": [0.5, 1.0, -1.0], "scale": [2.0, 0.5, 1.0]}, 1),
    "one scale": ("Scaler", {"offset": [0.5], "scale": [2.0]}, 1),
    "max": ("Normalizer", {"norm": "MAX"}, 1),
    "l1": ("Normalizer", {"norm": "L1"}, 1),
    "l2": ("Normalizer", {"norm": "L2"}, 1),
    "binarizer": ("Binarizer", {"threshold": 0.5}, 1),
}  # fmt: skip


def model(op: str, attrs: dict[str, Any], outputs: int, path: Path) -> Path:
    kinds = (TensorProto.INT64, TensorProto.FLOAT)[-outputs:]
    made = [helper.make_tensor_value_info(f"y{i}", kind, None) for i, kind in enumerate(kinds)]
    for info, rank in zip(made, (1, 2)[-outputs:], strict=True):
        for axis in range(rank):
            info.type.tensor_type.shape.dim.add().dim_param = "NC"[axis]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3])
    node = helper.make_node(op, ["x"], [i.name for i in made], domain="ai.onnx.ml", **attrs)
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    graph = helper.make_graph([node], "linear", [x], made)
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8), path)
    return path


@pytest.mark.parametrize("name", MODELS)
def test_linear_models_answer_as_onnx_runtime_does(name: str, tmp_path: Path) -> None:
    path = model(*MODELS[name], tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    made = ts.load(ts.compile(path, batch=(1, 2, 4), target="cpu"))(x=ROWS)
    for ours, theirs in zip(made.values(), session.run(None, {"x": ROWS}), strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(torch.from_numpy(ours), torch.from_numpy(theirs))


def test_elements_are_taken_by_places_as_scikit_learn_finds_labels(tmp_path: Path) -> None:
    """The places of a row as a constant, and the labels of a network's classes by its answer."""
    names = {"columns": [2, 0, 0], "labels": [70, 30, 50], "end": [-1]}
    made = [helper.make_tensor(n, TensorProto.INT64, [len(v)], v) for n, v in names.items()]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3])
    kinds = {"taken": (TensorProto.FLOAT, ["N", 3]), "label": (TensorProto.INT64, ["N"])}
    outputs = [helper.make_tensor_value_info(n, *kind) for n, kind in kinds.items()]

    def extract(*ends: str) -> onnx.NodeProto:
        return helper.make_node("ArrayFeatureExtractor", ends[:2], ends[2:], domain="ai.onnx.ml")

    nodes = [
        extract("x", "columns", "taken"),
        helper.make_node("ArgMax", ["x"], ["best"], axis=1),
        extract("labels", "best", "row"),
        helper.make_node("Reshape", ["row", "end"], ["label"]),
    ]
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    graph = helper.make_graph(nodes, "extractor", [x], outputs, made)
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8), path)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    answers = ts.load(ts.compile(path, batch=(1, 2, 4), target="cpu", untuned=True))(x=ROWS)
    for name, theirs in zip(kinds, session.run(None, {"x": ROWS}), strict=True):
        np.testing.assert_array_equal(answers[name], theirs)
    made[0].int64_data[0] = 3
    graph = helper.make_graph(nodes, "outside", [x], outputs, made)
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8), path)
    with pytest.raises(CompileError, match="outside of its axis"):
        read(path)


@pytest.mark.parametrize(
    ("op", "attrs", "said"),
    [
        ("TreeEnsembleRegressor", {}, "ONNX Runtime"),
        ("LinearClassifier", {"coefficients": WEIGHT, "classlabels_strings": ["a", "b", "c"]},
         "labels are strings"),
        ("LinearRegressor", {"coefficients": WEIGHT, "targets": 2}, "another length"),
        ("LinearRegressor", {"coefficients": WEIGHT[:3], "post_transform": "PROBIT"}, "PROBIT"),
    ],
)  # fmt: skip
def test_what_is_not_a_linear_model_is_told(
    op: str, attrs: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(CompileError, match=said):
        read(model(op, attrs, 1 + (op == "LinearClassifier"), tmp_path / "model.onnx"))


def test_numbering_the_samples_is_refused_with_the_way_around(tmp_path: Path) -> None:
    """``Range`` to the batch size, as exported text classifiers pick their last token."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 6])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 6])
    numbers = [
        helper.make_tensor(name, TensorProto.INT64, [], [n]) for name, n in zip("ab", (0, 1))
    ]
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "a"], ["n"]),
        helper.make_node("Range", ["a", "n", "b"], ["range"]),
        helper.make_node("Gather", ["x", "range"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "numbered", [x], [y], numbers)
    imports = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8), tmp_path / "n.onnx")
    with pytest.raises(CompileError, match="used as a number") as raised:
        ts.compile(tmp_path / "n.onnx", batch=(1, 2, 4), target="cpu")
    assert "batch=8" in str(raised.value.fix)
    assert ts.compile(tmp_path / "n.onnx", batch=8, target="cpu").program.buckets[0].batch == 8
