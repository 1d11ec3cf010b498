"""ONNX files that ask for much or make no sense: refused by our error, soon, in little memory.

``python -m tests.attack onnx`` makes more of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from tessella.core.errors import CompileError
from tessella.graph import interpret
from tessella.graph.onnx import read
from tests.support.onnx_models import external, ints, model, node, scalar, weight
from tests.support.pictures.hostile import peak_bytes


def calls(depth: int, times: int, *, circle: bool = False, tensor: int = 0) -> onnx.ModelProto:
    """x ↦ x through functions that call the next one several times; the last one is Relu."""
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("local", 1)]
    functions = []
    for level in range(depth):
        last = level == depth - 1 and not circle
        name = "Relu" if last else f"F{(level + 1) % depth}"
        results = [f"y{k}" for k in range(times)]
        nodes = [node(name, ["x"], [y], domain="" if last else "local") for y in results]
        if tensor:
            nodes.append(node("Constant", [], ["c"], value=weight("c", tensor)))
        functions.append(
            helper.make_function("local", f"F{level}", ["x"], results[-1:], nodes, opsets)
        )
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [node("F0", ["x"], ["y"], domain="local")],
        "calls", [value("x", TensorProto.FLOAT, [2])], [value("y", TensorProto.FLOAT, [2])],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=8)


def in_loops(nodes: list[onnx.NodeProto], turns: int, depth: int) -> onnx.ModelProto:
    """Nodes inside of loops in loops, which hand on a truth value that nobody reads."""
    for level in range(depth):
        state, kept = (
            helper.make_tensor_value_info(f"{n}{level}", TensorProto.BOOL, []) for n in "sk"
        )
        number = helper.make_tensor_value_info(f"i{level}", TensorProto.INT64, [])
        go, on = (helper.make_tensor_value_info(f"{n}{level}", TensorProto.BOOL, []) for n in "go")
        body = helper.make_graph(
            [*(node("Identity", [go.name], [n]) for n in (on.name, kept.name)), *nodes],
            "body", [number, go, state], [on, kept],
        )  # fmt: skip
        nodes = [node("Loop", ["turns", "true", "true"], [f"made{level}"], body=body)]
    always = numpy_helper.from_array(np.array(True), "true")
    nodes.append(node("Relu", ["x"], ["y"]))
    return model(nodes, {"x": [2]}, ["y"], [scalar("turns", turns), always])


def of_type(number: int, *, constant: bool) -> onnx.ModelProto:
    made = model([node("Add", ["x", "w"], ["y"])], {"x": [2]}, ["y"], [weight("w", 2)])
    if constant:
        made.graph.initializer[0].data_type = number
    else:
        made.graph.input[0].type.tensor_type.elem_type = number
    return made


def doubled_shape() -> onnx.ModelProto:
    """A shape that follows the batch, twice as long each time."""
    nodes = [node("Shape", ["x"], ["s0"])]
    nodes += [node("Concat", [f"s{k}"] * 2, [f"s{k + 1}"], axis=0) for k in range(60)]
    return model([*nodes, node("Relu", ["x"], ["y"])], {"x": ["N", 3]}, ["y"])


def constants(*, count: int, size: int) -> onnx.ModelProto:
    fill = node("ConstantOfShape", ["size"], ["big"])
    made = in_loops([fill, node("Exp", ["big"], ["more"])], count, 1)
    made.graph.initializer.append(ints("size", size))
    return made


def products(size: int) -> onnx.ModelProto:
    """Constants of few bytes whose product takes long, many times."""
    nodes = [node("ConstantOfShape", ["size"], ["a"]), node("MatMul", ["a", "a"], ["b"])]
    made = in_loops(nodes, 500, 1)
    made.graph.initializer.append(ints("size", size, size))
    return made


def resized(scale: float, end: float = 1.0) -> onnx.ModelProto:
    """A picture of one row; what of it is taken ends at ``end``, its width being 1."""
    scales = numpy_helper.from_array(np.array([1, 1, scale], np.float32), "s")
    region = numpy_helper.from_array(np.array([0, 0, 0, 1, 1, end], np.float32), "r")
    how = {"mode": "cubic", "antialias": 1}
    how |= {"coordinate_transformation_mode": "tf_crop_and_resize"} if end > 1 else {}
    resize = node("Resize", ["x", "r", "s"], ["y"], **how)
    return model([resize], {"x": [1, 1, 9]}, ["y"], [scales, region])


def sliced(step: int) -> onnx.ModelProto:
    cut = [ints("a", 0), ints("b", 1), ints("c", 0), ints("d", step)]
    return model([node("Slice", ["x", *"abcd"], ["y"])], {"x": [2]}, ["y"], cut)


def wide(*sizes: int | str) -> onnx.ModelProto:
    return model([node("Relu", ["x"], ["y"])], {"x": list(sizes)}, ["y"])


def ranged(*numbers: float) -> onnx.ModelProto:
    names = ["start", "limit", "delta"]
    given = [numpy_helper.from_array(np.array(n, np.float32), k) for n, k in zip(numbers, names)]
    nodes = [node("Range", names, ["r"]), node("Relu", ["x"], ["y"])]
    return model(nodes, {"x": [2]}, ["y"], given)


def gathered(index: int, op: str = "Gather") -> onnx.ModelProto:
    """An index that the file holds, into three columns."""
    places = [ints("i", index)] if op == "Gather" else [helper.make_tensor("i", 7, [1, 1], [index])]
    return model([node(op, ["x", "i"], ["y"], axis=1)], {"x": [1, 3]}, ["y"], places)


def turned(*order: int) -> onnx.ModelProto:
    return model([node("Transpose", ["x"], ["y"], perm=list(order))], {"x": [2, 3, 4]}, ["y"])


def largest(count: int) -> onnx.ModelProto:
    return model([node("TopK", ["x", "k"], ["y", "at"])], {"x": [2, 3]}, ["y"], [ints("k", count)])


def sliced_twice() -> onnx.ModelProto:
    cut = [ints("a", 0, 0), ints("b", 2, 1), ints("c", 1, -1)]
    return model([node("Slice", ["x", *"abc"], ["y"])], {"x": [2, 3]}, ["y"], cut)


HOSTILE: dict[str, tuple[Callable[[], onnx.ModelProto], str]] = {
    "2³⁰ calls": (lambda: calls(30, 2), "functions make too many operations"),
    "2³⁰ calls that nobody makes": (lambda: calls(2, 40_000), "functions make too many operations"),
    "calls in a circle": (lambda: calls(3, 1, circle=True), "calls itself"),
    "calls 400 deep": (lambda: calls(400, 1), "too deeply"),
    "a megabyte in each of 2¹² calls": (
        lambda: calls(13, 2, tensor=1 << 18), "functions make too many operations",
    ),
    "loops without an end in loops": (lambda: in_loops([], 512, 6), "too many operations"),
    "an input of type 99": (lambda: of_type(99, constant=False), "element type.*99"),
    "a constant of type 99": (lambda: of_type(99, constant=True), "element type.*99"),
    "a shape of 2⁶¹ sizes": (doubled_shape, "too many"),
    "512 constants": (lambda: constants(count=512, size=1 << 20), "too many numbers"),
    "500 products": (lambda: products(1000), "too long to compute"),
    "a filter of 10³⁰": (lambda: resized(1e-30, 1e30), "too many numbers"),
    "10⁹ times as large": (lambda: resized(1e9), "too many numbers"),
    "a step of 0": (lambda: sliced(0), "Slice.*cannot be read.*step cannot be zero"),
    "a size of 2⁶²": (lambda: wide(2**62), "no memory could hold"),
    "sizes of 2¹²⁴": (lambda: wide(2**62, 2**62), "no memory could hold"),
    "a size of 2⁶² behind the batch": (lambda: wide("N", 2**62), "no memory could hold"),
    "a range to infinity": (lambda: ranged(0, np.inf, 1), "Range.*cannot be read"),
    "a range in steps of 0": (lambda: ranged(0, 1, 0), "Range.*cannot be read"),
    "a range to no number": (lambda: ranged(0, np.nan, 1), "Range.*cannot be read"),
    "an index behind the last": (lambda: gathered(3), "outside of its axis.*3 of 3"),
    "an index before the first": (
        lambda: gathered(-4, "GatherElements"), "outside of its axis.*-4 of 3",
    ),
    "an order that names an axis twice": (lambda: turned(0, 0, 1), "permute does not accept"),
    "an order without an axis": (lambda: turned(0, 1), "permute does not accept"),
    "more of the largest than there are": (lambda: largest(4), "asks for more.*4"),
    "fewer of the largest than none": (lambda: largest(-1), "fewer than none.*-1"),
    "an axis that is cut twice": (sliced_twice, "more than once"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_models(name: str) -> None:
    make, message = HOSTILE[name]
    content = make().SerializeToString()
    before, start = peak_bytes(), time.process_time()
    with pytest.raises(CompileError, match=message):
        read(content)
    assert time.process_time() - start < 20  # 0.1 s to 3 s
    assert peak_bytes() - before < 1 << 30


def test_a_function_that_multiplies_a_little_is_read() -> None:
    assert [n.op for n in read(calls(5, 1).SerializeToString()).nodes] == ["relu"]


@pytest.mark.parametrize("path", ["/dev/zero", "/proc/self/mem", "/proc/self", "/", "x" * 5000])
def test_what_is_no_plain_file(path: str) -> None:
    with pytest.raises(CompileError, match=r"cannot be opened|not valid"):
        read(path)


def test_external_data_are_as_long_as_their_tensor(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    with pytest.raises(CompileError, match="take 8 bytes, not 16"):
        read(external(tmp_path, "w.bin", length="16"))
    graph = read(external(tmp_path, "w.bin", offset="8"))  # without a length: the tensor's own
    assert next(iter(graph.constants.values())).tolist() == [2, 3]


def test_external_data_are_not_read_again_and_again(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(bytes(8))
    made = onnx.load(external(tmp_path, "w.bin"), load_external_data=False)
    for k in range(5):
        made.graph.initializer.append(made.graph.initializer[0])
        made.graph.initializer[-1].name = f"w{k}"
    path = tmp_path / "model.onnx"
    path.write_bytes(made.SerializeToString())
    with pytest.raises(CompileError, match="same external data again and again"):
        read(path)


def test_numbers_that_an_operation_does_not_take_are_told() -> None:
    """What only the numbers show, such as an index that is out of range, is our error, too."""
    made = model([node("Gather", ["w", "i"], ["y"])], {"i": [1]}, ["y"], [weight("w", 3, 2)])
    made.graph.input[0].type.tensor_type.elem_type = TensorProto.INT64
    graph = read(made.SerializeToString())
    with pytest.raises(CompileError, match=r"embedding cannot compute with these inputs.*range"):
        interpret(graph, {"i": torch.tensor([3])})
