"""ONNX models read and interpreted, against ONNX Runtime; and the ones that must be refused."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from tessella.core.errors import CompileError, UnboundInput, UsageError
from tessella.core.spec import DimRange, TensorSpec
from tessella.graph import Dim, Graph, interpret
from tessella.graph.onnx import read, supported
from tessella.graph.onnx.read import OPERATORS
from tessella.graph.onnx.refused import REFUSED
from tests.support.onnx_models import RNG, external, ints, model, node, scalar, weight

Feeds = dict[str, np.ndarray[Any, Any]]


def runtime(data: bytes, feeds: Feeds) -> list[np.ndarray[Any, Any]]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def agree(made: onnx.ModelProto, feeds: Feeds, *, tolerance: float = 1e-5) -> Graph:
    """Our graph gives what ONNX Runtime gives."""
    data = made.SerializeToString()
    graph = read(data)
    got = interpret(graph, {n: torch.from_numpy(a) for n, a in feeds.items()})
    want = runtime(data, feeds)
    for (name, have), expected in zip(got.items(), want, strict=True):
        torch.testing.assert_close(
            have, torch.from_numpy(expected), rtol=tolerance, atol=tolerance, msg=name
        )
    return graph


def random(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.standard_normal(shape).astype(np.float32)


def cnn() -> onnx.ModelProto:
    """A residual network with an inception-like branch, as exporters write it."""
    nodes = [
        node("Conv", ["x", "w0", "b0"], ["c0"], "stem", kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        node("BatchNormalization", ["c0", "s", "t", "m", "v"], ["n0"], "norm", epsilon=1e-3),
        node("Relu", ["n0"], ["r0"]),
        node("MaxPool", ["r0"], ["p0"], kernel_shape=[3, 3], strides=[2, 2], pads=[0, 0, 1, 1]),
        node("Conv", ["p0", "w1"], ["c1"], kernel_shape=[3, 3], auto_pad="SAME_UPPER", group=2),
        node("Add", ["c1", "p0"], ["a1"]),
        node("AveragePool", ["a1"], ["q"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        node("Concat", ["a1", "q"], ["cat"], axis=1),
        node("LRN", ["cat"], ["lrn"], size=3, alpha=0.01),
        node("GlobalAveragePool", ["lrn"], ["g"]),
        node("Flatten", ["g"], ["f"]),
        node("Dropout", ["f"], ["d"]),
        node("Gemm", ["d", "w2", "b2"], ["z"], transB=1),
        node("Softmax", ["z"], ["y"], axis=-1),
    ]
    constants = [
        weight("w0", 8, 3, 3, 3), weight("b0", 8), weight("s", 8), weight("t", 8), weight("m", 8),
        weight("v", 8, positive=True), weight("w1", 8, 4, 3, 3), weight("w2", 5, 16),
        weight("b2", 5),
    ]  # fmt: skip
    return model(nodes, {"x": ["batch", 3, 9, 9]}, ["y"], constants)


def test_a_convolutional_network() -> None:
    made = cnn()
    for batch in (1, 3):
        graph = agree(made, {"x": random(batch, 3, 9, 9)})
    assert graph.inputs[0].shape == (Dim(), 3, 9, 9)
    assert [v.name for v in graph.outputs] == ["y"]
    count = Counter(n.op for n in graph.nodes)
    assert count["conv2d"] == 2
    assert count["linear"] == count["batch_norm"] == count["local_response_norm"] == 1
    assert graph.nodes[0].layer == "stem"
    assert [v.name for v in graph.nodes[0].inputs if v] == ["x", "w0", "b0"]


def test_a_transformer_with_shapes_computed_from_the_batch() -> None:
    nodes = [
        node("Conv", ["x", "patch"], ["p"], kernel_shape=[4, 4], strides=[4, 4]),
        # reshape to [N, 16, -1] the long way, as old exporters do
        node("Shape", ["p"], ["ps"]),
        node("Gather", ["ps", "zero"], ["n"], axis=0),
        node("Unsqueeze", ["n", "axis0"], ["n1"]),
        node("Concat", ["n1", "c16", "rest"], ["shape"], axis=0),
        node("Reshape", ["p", "shape"], ["flat"]),
        node("Transpose", ["flat"], ["tokens"], perm=[0, 2, 1]),
        # the class token, expanded by a shape with -1 for "as it is"
        node("Concat", ["n1", "minus", "minus"], ["ask"], axis=0),
        node("Equal", ["ask", "minus"], ["same"]),
        node("ConstantOfShape", ["three"], ["ones"], value=ints("", 1)),
        node("Where", ["same", "ones", "ask"], ["want"]),
        node("Expand", ["token", "want"], ["tokenN"]),
        node("Concat", ["tokenN", "tokens"], ["all"], axis=1),
        node("LayerNormalization", ["all", "g", "b"], ["ln"], axis=-1, epsilon=1e-6),
        node("MatMul", ["ln", "wqkv"], ["qkv0"]),
        node("Add", ["bqkv", "qkv0"], ["qkv"]),
        node("Split", ["qkv"], ["q0", "k0", "v0"], axis=2, num_outputs=3),
        *[
            step
            for s in "qkv"
            for step in (
                node("Reshape", [f"{s}0", "heads"], [f"{s}1"]),
                node("Transpose", [f"{s}1"], [s], perm=[0, 2, 1, 3]),
            )
        ],
        node("Transpose", ["k"], ["kt"], perm=[0, 1, 3, 2]),
        node("MatMul", ["q", "kt"], ["scores0"]),
        node("Div", ["scores0", "root"], ["scores"]),
        node("Softmax", ["scores"], ["mix"], axis=-1),
        node("MatMul", ["mix", "v"], ["o0"]),
        node("Transpose", ["o0"], ["o1"], perm=[0, 2, 1, 3]),
        node("Reshape", ["o1", "merge"], ["o"]),
        node("Add", ["all", "o"], ["r"]),
        # GELU through erf
        node("Div", ["r", "sqrt2"], ["e0"]),
        node("Erf", ["e0"], ["e1"]),
        node("Add", ["e1", "one"], ["e2"]),
        node("Mul", ["r", "e2"], ["e3"]),
        node("Mul", ["e3", "half"], ["e"]),
        node("Gather", ["e", "zero"], ["y"], axis=1),
    ]
    constants = [
        weight("patch", 16, 3, 4, 4), scalar("zero", 0), ints("axis0", 0), ints("c16", 16),
        ints("rest", -1), ints("minus", -1), ints("three", 3), weight("token", 1, 1, 16),
        weight("g", 16), weight("b", 16), weight("wqkv", 16, 48), weight("bqkv", 48),
        ints("heads", 0, -1, 2, 8), ints("merge", 0, 0, 16),
        numpy_helper.from_array(np.float32(8**0.5), "root"),
        numpy_helper.from_array(np.float32(2**0.5), "sqrt2"),
        numpy_helper.from_array(np.float32(1), "one"),
        numpy_helper.from_array(np.float32(0.5), "half"),
    ]  # fmt: skip
    made = model(nodes, {"x": ["N", 3, 8, 8]}, ["y"], constants)
    for batch in (1, 2, 5):
        graph = agree(made, {"x": random(batch, 3, 8, 8)})
    assert graph.outputs[0].shape == (Dim(), 16)
    assert not [n for n in graph.nodes if n.op == "fallback"]
    assert Counter(n.op for n in graph.nodes)["linear"] == 1


# Each node alone: operator, shapes of its inputs (x0, x1, …), constants after them, attributes.
IMAGE = [2, 4, 7, 6]
NODES: list[tuple[str, list[list[int]], list[TensorProto], dict[str, Any]]] = [
    ("Conv", [[1, 4, 9]], [weight("w", 6, 2, 3)], {"group": 2, "strides": [2], "pads": [2, 1]}),
    ("Conv", [[1, 2, 5, 6, 7]], [weight("w", 3, 2, 2, 2, 2), weight("b", 3)], {}),
    ("Conv", [IMAGE], [weight("w", 3, 4, 2, 3)],
     {"auto_pad": "SAME_LOWER", "strides": [2, 1], "dilations": [1, 1]}),
    ("Conv", [IMAGE, [3, 4, 3, 3]], [], {"dilations": [2, 1], "auto_pad": "VALID"}),
    ("ConvTranspose", [IMAGE], [weight("w", 4, 3, 3, 3)],
     {"strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 0]}),
    ("Gemm", [[3, 4]], [weight("b", 4, 5), weight("c", 1)], {"alpha": 0.5, "beta": 2.0}),
    ("Gemm", [[4, 3], [5, 4], [3, 5]], [], {"transA": 1, "transB": 1}),
    ("MatMul", [[2, 1, 3, 4], [5, 4, 2]], [], {}),
    ("InstanceNormalization", [IMAGE], [weight("s", 4), weight("b", 4)], {}),
    ("LayerNormalization", [IMAGE], [weight("s", 7, 6)], {"axis": 2}),
    ("MaxPool", [IMAGE], [], {"kernel_shape": [3, 2], "strides": [2, 2], "ceil_mode": 1,
                              "pads": [1, 0, 1, 0]}),
    ("MaxPool", [IMAGE], [], {"kernel_shape": [2, 2], "pads": [0, 1, 1, 0], "dilations": [2, 1]}),
    ("MaxPool", [[2, 3, 9]], [], {"kernel_shape": [3], "strides": [2]}),
    ("AveragePool", [IMAGE], [], {"kernel_shape": [3, 3], "pads": [0, 1, 2, 1]}),
    ("AveragePool", [IMAGE], [], {"kernel_shape": [3, 3], "pads": [0, 1, 2, 1],
                                  "count_include_pad": 1, "strides": [2, 1]}),
    ("AveragePool", [IMAGE], [], {"kernel_shape": [3, 2], "strides": [2, 1],
                                  "auto_pad": "SAME_UPPER"}),
    ("AveragePool", [[2, 3, 9]], [], {"kernel_shape": [4], "pads": [2, 2]}),
    ("GlobalAveragePool", [[2, 3, 5]], [], {}),
    ("GlobalMaxPool", [IMAGE], [], {}),
    ("Softmax", [IMAGE], [], {"axis": 1}),
    ("LogSoftmax", [IMAGE], [], {"axis": -2}),
    ("ReduceMean", [IMAGE], [ints("a", -1, 2)], {"keepdims": 0}),
    ("ReduceSum", [IMAGE], [], {}),
    ("ReduceSum", [IMAGE], [], {"noop_with_empty_axes": 1}),
    ("ReduceMax", [IMAGE], [ints("a", 1)], {}),
    ("ReduceMin", [IMAGE], [ints("a", 0, 1, 2, 3)], {"keepdims": 0}),
    ("ReduceL1", [IMAGE], [ints("a", 1)], {}),
    ("ReduceL2", [IMAGE], [ints("a", 3, 2)], {"keepdims": 0}),
    ("ReduceSumSquare", [IMAGE], [ints("a", 3)], {}),
    ("ReduceProd", [IMAGE], [ints("a", 3, 1)], {"keepdims": 0}),
    ("ArgMax", [IMAGE], [], {"axis": 1, "keepdims": 0}),
    ("ArgMin", [IMAGE], [], {"axis": -1}),
    *[(op, [[3, 4]], [], {}) for op in (
        "Relu", "Sigmoid", "Tanh", "HardSwish", "Mish", "Exp", "Neg", "Abs", "Erf", "LeakyRelu",
        "Elu", "Selu", "Celu", "HardSigmoid", "Softplus", "Softsign", "Floor", "Ceil", "Round",
        "Sign", "Sin", "Cos", "Tan", "Atan", "Sinh", "Cosh", "Asinh", "Identity", "Reciprocal",
    )],
    ("LeakyRelu", [[3, 4]], [], {"alpha": 0.3}),
    ("HardSigmoid", [[3, 4]], [], {"alpha": 1 / 6}),
    ("Celu", [[3, 4]], [], {"alpha": 2.0}),
    ("PRelu", [IMAGE], [weight("s", 4, 1, 1)], {}),
    ("PRelu", [IMAGE], [weight("s", 1)], {}),
    ("PRelu", [IMAGE], [weight("s", 7, 6)], {}),
    ("Clip", [[3, 4]], [numpy_helper.from_array(np.float32(-0.5), "low")], {}),
    ("Add", [[3, 4]], [weight("c", 1)], {}),
    ("Sub", [[3, 4], [4]], [], {}),
    ("Mul", [[3, 1], [3, 4]], [], {}),
    ("Div", [[3, 4]], [weight("c", 4, positive=True)], {}),
    ("Add", [[4]], [weight("wider", 1, 1, 1)], {}),
    ("Pow", [[3, 4]], [ints("two", 2)], {}),
    ("Max", [[3, 4], [4], [3, 1]], [], {}),
    ("Min", [[3, 4], [4]], [], {}),
    ("Sum", [[3, 4], [4], [3, 1]], [], {}),
    ("Mean", [[3, 4], [4], [3, 1]], [], {}),
    ("Mod", [[3, 4], [4]], [], {"fmod": 1}),
    *[(op, [[3, 4], [4]], [], {}) for op in ("Greater", "Less", "GreaterOrEqual", "LessOrEqual")],
    ("Reshape", [[4, 6]], [ints("s", 0, -1, 3)], {}),
    ("Flatten", [IMAGE], [], {"axis": -2}),
    ("Flatten", [IMAGE], [], {"axis": 0}),
    ("Squeeze", [[1, 3, 1, 4]], [ints("a", -2)], {}),
    ("Squeeze", [[1, 3, 1, 4]], [], {}),
    ("Unsqueeze", [[3, 4]], [ints("a", 3, 0)], {}),
    ("Transpose", [[2, 3, 4]], [], {}),
    ("Expand", [[3, 1]], [ints("s", 2, 1, 5)], {}),
    ("Tile", [[3, 2]], [ints("r", 2, 3)], {}),
    ("Concat", [[3, 4], [3, 2]], [], {"axis": -1}),
    ("Slice", [[8, 9]], [ints("s", 1, -1), ints("e", 7, -100), ints("a", 0, 1), ints("t", 3, -2)],
     {}),
    ("Slice", [[8, 9]], [ints("s", 2), ints("e", 2**63 - 1)], {}),
    ("Slice", [[8, 9]], [ints("s", 5), ints("e", 5)], {}),
    ("Gather", [[5, 4]], [numpy_helper.from_array(np.array([[0, -1], [2, 2]]), "i")], {"axis": 1}),
    ("GatherElements", [[3, 2]], [numpy_helper.from_array(np.array([[0, -1], [2, 0]]), "i")], {}),
    ("Pad", [[3, 4]], [ints("p", 1, 0, 0, 2), numpy_helper.from_array(np.float32(3), "v")], {}),
    ("Pad", [[3, 4]], [ints("p", 0, 2, 0, -1)], {}),
    ("Pad", [[2, 3, 4, 5]], [ints("p", 0, 0, 1, 0, 0, 0, 2, 3)], {"mode": "reflect"}),
    ("Pad", [[2, 3, 4, 5]], [ints("p", 0, 0, 1, 0, 0, 0, 2, 3)], {"mode": "edge"}),
    ("DepthToSpace", [[1, 8, 2, 3]], [], {"blocksize": 2}),
    ("DepthToSpace", [[1, 8, 2, 3]], [], {"blocksize": 2, "mode": "CRD"}),
    ("SpaceToDepth", [[1, 2, 4, 6]], [], {"blocksize": 2}),
    ("Trilu", [[4, 5]], [scalar("k", 1)], {"upper": 0}),
    ("CumSum", [[4, 5]], [scalar("a", 1)], {}),
    ("Einsum", [[2, 3], [3, 4]], [], {"equation": "ij,jk->ki"}),
]  # fmt: skip


@pytest.mark.parametrize(("op", "shapes", "constants", "attrs"), NODES)
def test_nodes(
    op: str, shapes: list[list[int]], constants: list[TensorProto], attrs: dict[str, Any]
) -> None:
    feeds = {f"x{i}": random(*shape) for i, shape in enumerate(shapes)}
    names = [*feeds, *(c.name for c in constants)]
    made = model([node(op, names, ["y"], **attrs)], dict(zip(feeds, shapes)), ["y"], constants)
    agree(made, feeds)


# Places inside of a [3, 4] along axis 1 (or both), by the shape of the index.
PLACED = [
    ("Gather", [2, 2], {"axis": 1}),
    ("GatherElements", [3, 4], {"axis": 1}),
    ("GatherND", [3, 1, 2], {}),
    ("ScatterElements", [3, 4], {"axis": 1}),
    ("ScatterElements", [3, 4], {"axis": 1, "reduction": "add"}),
    ("ScatterND", [2, 2], {}),
    ("ScatterND", [2, 2], {"reduction": "add"}),
    ("ScatterND", [2, 2], {"reduction": "max"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "shape", "attrs", "dtype"),
    [
        (*row, dtype)
        for row in PLACED
        for dtype in ("int64", "int32")
        if dtype == "int64" or not row[0].endswith("ND")  # which ONNX has for int64 alone
    ],
)
def test_places_that_are_data(op: str, shape: list[int], attrs: dict[str, Any], dtype: str) -> None:
    """Negative ones count from the end, as in ONNX Runtime; those outside are refused."""
    names, feeds = ["x", "i"], {"x": random(3, 4)}
    if op.startswith("Scatter"):
        names, feeds = (
            ["x", "i", "u"],
            {**feeds, "u": random(*([2] if op == "ScatterND" else [3, 4]))},
        )
    made = model(
        [node(op, names, ["y"], **attrs)],
        {"x": [3, 4], "i": shape, **({"u": list(feeds["u"].shape)} if "u" in feeds else {})},
        ["y"],
    )
    kind = TensorProto.INT64 if dtype == "int64" else TensorProto.INT32
    made.graph.input[1].type.tensor_type.elem_type = kind
    places = (np.arange(np.prod(shape)) * 5 % 7 % 3 - np.arange(np.prod(shape)) % 4).reshape(shape)
    if op == "ScatterElements":  # each place once: what wins otherwise is not defined
        places = np.broadcast_to(np.array([-1, 0, -3, 2]), (3, 4)).copy()
    if op == "ScatterND":
        places = np.array([[-1, 2], [0, -4]])
    agree(made, {**feeds, "i": places.astype(dtype)})
    graph = read(made.SerializeToString())
    for outside in (4, -5, 2**31 - 1):
        wrong = places.astype(dtype)
        wrong.flat[-1] = outside
        with pytest.raises(CompileError, match=r"out of (bounds|range)"):
            interpret(graph, {n: torch.from_numpy(a) for n, a in {**feeds, "i": wrong}.items()})


@pytest.mark.parametrize(
    ("attrs", "sizes"),
    [
        ({"mode": "nearest", "coordinate_transformation_mode": "asymmetric",
          "nearest_mode": "floor"}, [1, 2, 7, 9]),
        ({"mode": "nearest"}, [1, 2, 8, 10]),
        ({"mode": "linear"}, [1, 2, 7, 9]),
        ({"mode": "linear", "coordinate_transformation_mode": "align_corners"}, [1, 2, 7, 9]),
        ({"mode": "cubic"}, [1, 2, 8, 10]),
    ],
)  # fmt: skip
def test_resize(attrs: dict[str, Any], sizes: list[int]) -> None:
    nodes = [node("Resize", ["x", "", "", "s"], ["y"], **attrs)]
    made = model(nodes, {"x": [1, 2, 4, 5]}, ["y"], [ints("s", *sizes)])
    agree(made, {"x": random(1, 2, 4, 5)})


def test_old_and_new_forms() -> None:
    """What is an input today was an attribute once, and softmax had a flattened meaning."""
    x = {"x": [2, 3, 1, 4]}
    feeds = {"x": random(2, 3, 1, 4)}
    for opset, nodes in {
        9: [node("Unsqueeze", ["x"], ["u"], axes=[0]), node("Clip", ["u"], ["y"], min=-0.1)],
        10: [node("Slice", ["x", "b", "e", "a"], ["s"]), node("Softmax", ["s"], ["y"])],
        11: [node("Squeeze", ["x"], ["s"], axes=[2]), node("Pad", ["s", "p"], ["y"])],
        12: [node("Split", ["x"], ["s", "y"], axis=1, split=[1, 2]), node("Relu", ["s"], ["z"])],
        20: [node("Gelu", ["x"], ["g"], approximate="tanh"), node("Gelu", ["g"], ["y"])],
        21: [node("GroupNormalization", ["x", "w", "w"], ["y"], num_groups=1)],
    }.items():  # fmt: skip
        constants = [ints("b", 1), ints("e", 3), ints("a", 1), ints("p", 0, 1, 0, 0, 0, 2),
                     weight("w", 3)]  # fmt: skip
        agree(model(nodes, x, ["y"], constants, opset=opset), feeds)


def test_a_local_function_is_inlined() -> None:
    function = helper.make_function(
        "mine", "Double", ["a"], ["b"], [node("Add", ["a", "a"], ["b"])],
        [helper.make_opsetid("", 18)],
    )  # fmt: skip
    nodes = [node("Double", ["x"], ["y"], domain="mine")]
    agree(model(nodes, {"x": [2, 3]}, ["y"], functions=[function]), {"x": random(2, 3)})


def test_constants_are_folded_and_types_are_kept() -> None:
    nodes = [
        node("Constant", [], ["c"], value=weight("", 3, 4)),
        node("Transpose", ["c"], ["t"]),
        node("Cast", ["t"], ["d"], to=TensorProto.DOUBLE),
        node("Cast", ["x"], ["xd"], to=TensorProto.DOUBLE),
        node("MatMul", ["xd", "d"], ["y"]),
    ]
    graph = agree(model(nodes, {"x": ["N", 4]}, ["y"]), {"x": random(2, 4)})
    assert [n.op for n in graph.nodes] == ["to", "linear"]
    assert graph.outputs[0].dtype == "float64"


# ── the batch ─────────────────────────────────────────────────────────────────────────────────────


def test_the_batch_can_be_fixed() -> None:
    data = cnn().SerializeToString()
    fixed = read(data, batch=DimRange(min=4, opt=4, max=4))
    assert fixed.inputs[0].shape == (4, 3, 9, 9)
    assert read(data, batch=DimRange(min=1, opt=2, max=8)).inputs[0].shape[0] == Dim()
    static = model([node("Relu", ["x"], ["y"])], {"x": [2, 3]}, ["y"]).SerializeToString()
    assert read(static, batch=DimRange(min=1, opt=2, max=8)).inputs[0].shape == (2, 3)
    with pytest.raises(CompileError, match=r"has a fixed batch. Seen: 2 in the file, 4 asked"):
        read(static, batch=DimRange(min=4, opt=4, max=4))


@pytest.mark.parametrize(("target", "allowzero"), [((-1,), 0), ((0, 1), 0), ((1, -1), 1)])
def test_sizes_are_reshaped(target: tuple[int, ...], allowzero: int) -> None:
    """transformers' files do, with ``allowzero`` written out."""
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Reshape", ["s", "target"], ["row"], allowzero=allowzero),
        node("Reshape", ["row", "flat"], ["shape"]),
        node("Expand", ["one", "shape"], ["y"]),
    ]
    constants = [ints("target", *target), ints("flat", -1), scalar("one", 1)]
    graph = read(model(nodes, {"x": [4, 3]}, ["y"], constants).SerializeToString())
    assert graph.outputs[0].shape == (4, 3)


def test_a_shape_of_a_shape_is_known() -> None:
    """What torch writes for ``expand`` with −1: ones as long as the shape, compared with it."""
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Shape", ["s"], ["rank"]),
        node("ConstantOfShape", ["rank"], ["ones"], value=ints("", 1)),
        node("Mul", ["ones", "minus"], ["kept"]),
        node("Equal", ["s", "kept"], ["same"]),
        node("Where", ["same", "ones", "s"], ["shape"]),
        node("Expand", ["row", "shape"], ["wide"]),
        node("Add", ["x", "wide"], ["y"]),
    ]
    made = model(nodes, {"x": ["N", 3]}, ["y"], [ints("minus", -1), weight("row", 1, 3)])
    assert agree(made, {"x": random(5, 3)}).inputs[0].shape == (Dim(), 3)


def test_sizes_that_a_file_leaves_open_are_said() -> None:
    """Once for each name, in whichever input; the batch stays open."""
    nodes = [node("Add", ["x", "z"], ["sum"]), node("ReduceSum", ["sum", "last"], ["y"])]
    names: dict[str, list[int | str]] = {"x": ["N", "s", 4], "z": ["N", "s", 4]}
    data = model(nodes, names, ["y"], [ints("last", 2)]).SerializeToString()

    def said(name: str, *shape: int, dtype: str = "float32") -> Graph:
        return read(data, inputs=[TensorSpec(name=name, dtype=dtype, shape=shape)])

    graph = said("z", 1, 6, 4)
    assert [v.shape for v in graph.inputs] == [(Dim(), 6, 4)] * 2
    feeds = {"x": random(2, 6, 4), "z": random(2, 6, 4)}
    (got,) = interpret(graph, {n: torch.from_numpy(a) for n, a in feeds.items()}).values()
    torch.testing.assert_close(got, torch.from_numpy(runtime(data, feeds)[0]))
    with pytest.raises(UsageError, match=r"no such input\. Seen: image\. To do: name one of x, z"):
        said("image", 1, 6, 4)
    for wrong in ((1, 6, 5), (1, 6), (1, 6, 4, 1)):
        with pytest.raises(UsageError, match="input 'x' of the file is another one"):
            said("x", *wrong)
    with pytest.raises(UsageError, match="is another one"):
        said("x", 1, 6, 4, dtype="int64")
    both = [TensorSpec(name=n, dtype="float32", shape=(1, s, 4)) for n, s in (("x", 6), ("z", 7))]
    with pytest.raises(UsageError, match=r"two sizes for 's'\. Seen: 6 and 7"):
        read(data, inputs=both)
    with pytest.raises(CompileError, match="--inputs x:float32:1x128x4"):
        read(data)


def test_open_sizes_and_broken_lines_are_refused() -> None:
    wide = model([node("Relu", ["x"], ["y"])], {"x": ["N", 3, "H", "W"]}, ["y"])
    with pytest.raises(CompileError, match=r"may be open. Seen: \['N', 3, 'H', 'W'\]"):
        read(wide.SerializeToString())
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Gather", ["s", "zero"], ["n"]),
        node("Mul", ["n", "n"], ["nn"]),
        node("Unsqueeze", ["nn", "zeros"], ["shape"]),
        node("ConstantOfShape", ["shape"], ["y"]),
    ]
    squared = model(nodes, {"x": ["N", 3]}, ["y"], [scalar("zero", 0), ints("zeros", 0)])
    with pytest.raises(CompileError, match="not a multiple of the batch plus a constant"):
        read(squared.SerializeToString())
    fixed = read(squared.SerializeToString(), batch=DimRange(min=3, opt=3, max=3))
    assert fixed.outputs[0].shape == (9,)


# ── what must be refused ──────────────────────────────────────────────────────────────────────────


def test_all_unknown_operators_are_named_at_once() -> None:
    nodes = [
        node("NonZero", ["x"], ["a"]),
        node("NonZero", ["x"], ["b"]),
        node("Relu", ["x"], ["y"]),
        node("Unique", ["x"], ["c"]),
        node("FusedMatMul", ["x", "x"], ["d"], domain="com.microsoft"),
    ]
    made = helper.make_model(
        helper.make_graph(
            nodes,
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 2])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 2])],
        ),
        opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)],
    )
    with pytest.raises(CompileError) as caught:
        read(made.SerializeToString())
    assert "NonZero (2×), Unique (1×), com.microsoft.FusedMatMul (1×)" in str(caught.value)
    assert "Relu" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid"),
        (b"\x00\x01 nonsense", "not an ONNX file"),
        (b"<html></html>", "not an ONNX file"),
    ],
)
def test_other_files(content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=message):
        read(content)
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(CompileError, match=message):
        read(path)
    with pytest.raises(CompileError, match="cannot be opened"):
        read(tmp_path / "missing.onnx")


def test_invalid_models() -> None:
    unknown_input = model([node("Relu", ["ghost"], ["y"])], {"x": [2]}, ["y"])
    with pytest.raises(CompileError, match=r"not valid.*ghost"):
        read(unknown_input.SerializeToString())
    older = cnn()
    older.opset_import[0].version = 6
    with pytest.raises(CompileError, match=r"opset 6|not valid"):
        read(older.SerializeToString())
    nodes = [node("Reshape", ["x", "s"], ["y"])]
    impossible = model(nodes, {"x": [2, 3]}, ["y"], [ints("s", 7)], opset=12)
    with pytest.raises(CompileError, match="reshape does not accept its inputs"):
        read(impossible.SerializeToString())


@pytest.mark.parametrize(
    ("op", "attrs", "constants", "message"),
    [
        ("Softmax", {"axis": 2}, [], "there is no axis 2"),
        ("Concat", {"axis": -3}, [], "there is no axis -3"),
        ("Squeeze", {}, [ints("a", 5)], "there is no axis 5"),
        ("Squeeze", {}, [ints("a", 0)], "an axis to drop is not 1"),
        ("LRN", {"size": 4}, [], "window is even"),
        ("BatchNormalization", {"training_mode": 1}, [weight(c, 3) for c in "abcd"], "training"),
        ("Pad", {"mode": "reflect"}, [ints("p", 9, 9, 9, 9)], "does not accept its inputs"),
        ("Trilu", {}, [weight("k", 2)], "must be one number"),
    ],
)
def test_nodes_that_make_no_sense(
    op: str, attrs: dict[str, Any], constants: list[TensorProto], message: str
) -> None:
    names = ["x", *(c.name for c in constants)]
    made = model([node(op, names, ["y"], **attrs)], {"x": [2, 3]}, ["y"], constants)
    with pytest.raises(CompileError, match=message):
        read(made.SerializeToString())


FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def body(nodes: list[onnx.NodeProto], inputs: dict[str, int], outputs: dict[str, int]) -> Any:
    """A graph inside a node: its tensors by name and element type."""
    infos = [
        [
            helper.make_tensor_value_info(n, t, ["n", 3] if t == FLOAT else [])
            for n, t in given.items()
        ]
        for given in (inputs, outputs)
    ]
    return helper.make_graph(nodes, "body", *infos)


def powers(turns: int, depth: int = 1) -> onnx.ModelProto:
    """x ↦ x · 2 ** (turns ** depth), by loops in loops; and its states on the way."""
    nodes = [node("Add", ["s", "s"], ["t"])]
    for level in range(depth):
        nodes = [*nodes, node("Identity", ["go"], ["on"])]
        inner = body(nodes, {"i": INT64, "go": BOOL, "s": FLOAT}, {"on": BOOL, "t": FLOAT})
        name = "x" if level == depth - 1 else "s"
        nodes = [node("Loop", ["turns", "true", name], ["t"], body=inner)]
    nodes.append(node("Identity", ["t"], ["y"]))
    always = numpy_helper.from_array(np.array(True), "true")
    made = model(nodes, {"x": ["batch", 3]}, ["y"], [scalar("turns", turns), always])
    made.graph.output[0].type.CopyFrom(made.graph.input[0].type)
    return made


def test_loops_with_a_known_number_of_turns_are_unrolled() -> None:
    graph = agree(powers(3), {"x": random(2, 3)})
    assert [n.op for n in graph.nodes].count("add") == 3
    agree(powers(2, depth=3), {"x": random(2, 3)})


def test_loops_cannot_make_a_graph_without_end() -> None:
    with pytest.raises(CompileError, match="more than 512 turns"):
        read(powers(10**9).SerializeToString())
    with pytest.raises(CompileError, match="too many operations"):
        read(powers(100, depth=3).SerializeToString())


def test_a_branch_is_taken_where_its_condition_is_known() -> None:
    branches = {
        f"{name}_branch": body([node(op, ["x"], [name])], {}, {name: FLOAT})
        for name, op in (("then", "Relu"), ("else", "Neg"))
    }
    for condition, op in ((True, "relu"), (False, "neg")):
        known = numpy_helper.from_array(np.array(condition), "condition")
        nodes = [node("If", ["condition"], ["y"], **branches)]
        graph = agree(model(nodes, {"x": ["batch", 3]}, ["y"], [known]), {"x": random(2, 3)})
        assert [n.op for n in graph.nodes] == [op]


def test_a_condition_that_is_data_is_an_input_to_bind() -> None:
    branches = {
        f"{name}_branch": body([node(op, ["x"], [name])], {}, {name: FLOAT})
        for name, op in (("then", "Relu"), ("else", "Neg"))
    }
    nodes = [node("Cast", ["c"], ["b"], to=BOOL), node("If", ["b"], ["y"], **branches)]
    data = model(nodes, {"x": [2, 3], "c": [1]}, ["y"]).SerializeToString()
    with pytest.raises(UnboundInput, match="input 'c'") as caught:
        read(data)
    assert caught.value.input == "c"
    graph = read(data, bound={"c": torch.tensor([1.0])})
    assert [v.name for v in graph.inputs] == ["x"]


def test_what_is_not_understood_of_a_node_is_refused() -> None:
    """An attribute, an input or an output that a translation does not look at."""
    made = model([node("CumSum", ["x", "axis"], ["y"])], {"x": [2, 3]}, ["y"], [scalar("axis", 1)])
    made.graph.node[0].attribute.append(helper.make_attribute("exclusive", 1))
    agree(made, {"x": random(2, 3)})
    nodes = [node("LRN", ["x"], ["y"], size=3, alpha=0.5)]
    made = model(nodes, {"x": [1, 3, 4, 4]}, ["y"])
    call_with = {"LRN": lambda call: call.emit("relu", call.value(0))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(OPERATORS, "LRN", call_with["LRN"])
        with pytest.raises(CompileError, match=r"attribute that is not known.*alpha=0.5"):
            read(made.SerializeToString())


def test_a_small_file_cannot_ask_for_much_memory() -> None:
    """Constants that are only described, not given, are not made."""
    bounds = [scalar("from", 0), scalar("to", 2**62), scalar("step", 1)]
    nodes = [node("Range", ["from", "to", "step"], ["r"]), node("Identity", ["x"], ["y"])]
    with pytest.raises(CompileError, match="it makes too many numbers"):
        read(model(nodes, {"x": [2]}, ["y"], bounds).SerializeToString())
    nodes = [
        node("ConstantOfShape", ["huge"], ["h"]),
        node("ReduceMax", ["h"], ["m"], keepdims=0),
        node("Add", ["x", "m"], ["y"]),
    ]
    made = model(nodes, {"x": [2]}, ["y"], [ints("huge", 2**20, 2**20)])
    graph = read(made.SerializeToString())
    assert sum(t.numel() for t in graph.constants.values()) == 1


def test_external_data_beside_the_model(tmp_path: Path) -> None:
    data = np.array([9, 1.5, -2], dtype=np.float32).tobytes()
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "w.bin").write_bytes(data)
    graph = read(external(tmp_path, "parts/w.bin", offset="4", length="8"))
    got = interpret(graph, {"x": torch.zeros(2)})["y"]
    torch.testing.assert_close(got, torch.tensor([1.5, -2.0]))


def test_external_data_stays_in_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    secret = tmp_path / "secret.bin"
    secret.write_bytes(bytes(8))
    (folder / "link.bin").symlink_to(secret)
    (folder / "up").symlink_to(tmp_path)
    (folder / "short.bin").write_bytes(bytes(4))
    os.mkfifo(folder / "pipe")
    cases = {
        "../secret.bin": "leaves the folder",
        str(secret): "leaves the folder",
        "sub/../../secret.bin": "leaves the folder",
        "..\\secret.bin": "leaves the folder",
        "": "leaves the folder",
        "link.bin": "is a link",
        "up/secret.bin": "is a link",
        "missing.bin": "No such file",
        ".": "not a plain file",
        "pipe": "not a plain file",
    }
    for location, message in cases.items():
        with pytest.raises(CompileError, match=message):
            read(external(folder, location))
    for entries in ({"length": "8"}, {"offset": "-4"}, {"offset": "nine"}, {"offset": "99"}):
        with pytest.raises(CompileError, match="external data of 'w' cannot be read"):
            read(external(folder, "short.bin", **entries))
    with pytest.raises(CompileError, match="bytes has no folder"):
        read(external(folder, "short.bin").read_bytes())


def test_the_list_of_operators() -> None:
    known = supported()
    assert {"Conv", "Gemm", "LayerNormalization", "Shape", "Resize"} <= set(known)
    assert not set(known) & set(REFUSED)
    standard = {s.name for s in onnx.defs.get_all_schemas()}
    assert set(known) <= standard
