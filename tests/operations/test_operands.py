"""Operands that do not belong together are refused for every kernel, whoever wrote the problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tessella.kernels import catalog
from tessella.operations.problem import Problem
from tessella.operations.table import OPERATIONS
from tessella.operations.tensor_meta import TensorMeta

WINDOW = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
CONV = {**WINDOW, "activation": None}
ROWS = {"stride": [1], "padding": [1], "dilation": [1], "groups": 1}
POOL = {"kernel_size": (2, 2), "pool_stride": (2, 2), "pool_padding": (0, 0),
        "pool_dilation": (1, 1), "ceil_mode": False}  # fmt: skip
X, W, Y = (2, 8, 6, 6), (4, 8, 3, 3), (2, 4, 6, 6)


@dataclass(frozen=True)
class Shaped:
    shape: tuple[int, ...]


def told(op: str, inputs: list[Any], result: tuple[int, ...], **attrs: Any) -> str | None:
    shaped = [None if shape is None else Shaped(shape) for shape in inputs]
    return OPERATIONS[op].misfit(shaped, [Shaped(result)], attrs)


RIGHT: dict[str, tuple[list[Any], tuple[int, ...], dict[str, Any]]] = {
    "conv1d": ([(2, 8, 6), (4, 8, 3), (4,), (2, 4, 6)], (2, 4, 6), ROWS),
    "conv2d": ([X, W, (4,), Y, (4,)], Y, CONV),
    "conv3d": ([(1, 2, 4, 4, 4), (4, 2, 1, 1, 1), (4,)], (1, 4, 4, 4, 4), {"groups": 1}),
    "conv_transpose2d": ([(2, 8, 3, 3), (8, 2, 2, 2), (4,)], (2, 4, 6, 6), {"groups": 2}),
    "conv_transpose3d": ([(1, 8, 2, 2, 2), (8, 4, 1, 1, 1)], (1, 4, 2, 2, 2), {"groups": 1}),
    "conv2d_pool": ([X, W, (4,), Y, (4,)], (2, 4, 3, 3), {**CONV, **POOL}),
    "conv2d_chain": (
        [X, (4, 8, 1, 1), (4,), (2, 4, 6, 6), (4,), (6, 4, 1, 1), (6,), (6,)], (2, 6, 6, 6), {},
    ),
    "linear": ([(2, 5, 8), (4, 8), (4,), (2, 5, 4), (4,)], (2, 5, 4), {}),
    "linear_norm": ([(5, 8), (4, 8), (4,), (5, 4), (4,), (4,), (4,), ()], (5, 4), {}),
    "conv2d_dgrad": ([Y, W], X, {**WINDOW, "input_size": X}),
    "conv2d_wgrad": ([Y, X], W, {**WINDOW, "kernel_size": (3, 3)}),
    "matmul": ([(3, 5, 8), (3, 8, 4), (4,), (3, 5, 4), (4,)], (3, 5, 4), {}),
    "batch_norm": ([X, (8,), (8,), (8,), (8,)], X, {}),
    "group_norm": ([X, (8,), (8,)], X, {"num_groups": 2}),
    "group_factors": ([X, (8,), (8,)], (2, 8, 1, 1), {"num_groups": 2}),
    "layer_norm": ([X, (6, 6), (6, 6)], X, {"normalized_shape": [6, 6]}),
    "rms_norm": ([X, (6,)], X, {"normalized_shape": [6]}),
    "prelu": ([X, (8,)], X, {}),
    "quantize": ([X, (8,), ()], X, {"axis": 1}),
    "dequantize": ([X, (8,), (8,)], X, {"axis": 1}),
    "scaled_dot_product_attention": (
        [(2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 4), (2, 1, 5, 7)], (2, 3, 5, 4), {},
    ),
    "lstm": (
        [(6, 3, 5), (2, 16, 5), (2, 16, 2), (2, 16), (2, 16), (2, 2, 4), (2, 3, 2), (2, 3, 4),
         (3,)], (6, 3, 4), {"direction": "bidirectional"},
    ),
    "gru": (
        [(6, 3, 5), (1, 12, 5), (1, 12, 4), (1, 12), (1, 12), (1, 3, 4), (3,)], (6, 3, 4),
        {"direction": "reverse", "reset_after": True},
    ),
    "rnn": (
        [(6, 3, 5), (1, 4, 5), (1, 4, 4), (1, 4), (1, 4), (1, 3, 4), (3,)], (6, 3, 4),
        {"direction": "forward", "nonlinearity": "relu"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("op", RIGHT)
def test_what_belongs_together(op: str) -> None:
    inputs, result, attrs = RIGHT[op]
    assert told(op, inputs, result, **attrs) is None


@pytest.mark.parametrize("op", RIGHT)
def test_every_operand_is_looked_at(op: str) -> None:
    """Each operand in turn is one number, one too short, one too long, of one axis more or less."""
    inputs, result, attrs = RIGHT[op]
    names = OPERATIONS[op].operands
    for position, shape in enumerate(inputs):
        if position == 0:
            continue
        last = shape[-1] if shape else 1
        for changed in (shape[:-1], (*shape[:-1], last - 1), (*shape[:-1], last + 1), (7, *shape)):
            if changed == shape or (changed == () and names[position] in ("scale", "zero_point")
                                    and op in ("quantize", "dequantize")):  # fmt: skip
                continue
            if op.startswith("conv") and position == 1 and len(changed) == len(shape):
                continue  # another filter, whose result is looked at by its own shape
            if op == "matmul" and position == 1:
                continue  # torch's own rule looks at it
            if changed == () and names[position] in ("weight", "code_scale") and op != "linear":
                continue  # one number for all
            if op == "scaled_dot_product_attention" and changed == (7, *shape):
                continue  # axes of the batch broadcast
            if (
                op == "scaled_dot_product_attention"
                and position == 2
                and changed[:-1] == shape[:-1]
            ):
                continue  # values may have any size
            given = [*inputs[:position], changed, *inputs[position + 1 :]]
            assert told(op, given, result, **attrs), (names[position], changed)


BY_ONE = {**WINDOW, "padding": [0, 0]}


@pytest.mark.parametrize(
    ("op", "inputs", "attrs"),
    [
        ("conv1d", [(1, 8, 1), (4, 8, 1), None, (1, 4, 6)], {**ROWS, "padding": [0]}),
        ("conv2d", [(1, 8, 1, 1), (4, 8, 1, 1), None, (1, 4, 6, 6)], BY_ONE),
        ("conv2d", [(1, 8, 1, 1), (4, 8, 1, 1), None, (1, 4, 1, 1)], {**BY_ONE, "stride": 1}),
        ("matmul", [(2, 1, 8), (8, 4), None, (2, 5, 4)], {}),
        ("matmul", [(8, 1), (8, 4), None, (5, 4)], {"transpose_a": True}),
        ("matmul", [(5, 8), (8, 4), None, (3, 5, 4)], {}),
        ("matmul", [(8,), (8, 4), None, (5, 4)], {}),
    ],
)  # fmt: skip
def test_a_residual_is_no_larger_than_what_it_is_added_to(
    op: str, inputs: list[Any], attrs: dict[str, Any]
) -> None:
    """The reference broadcasts, and a kernel's grid would leave parts of the result unwritten."""
    assert told(op, inputs, inputs[3], **attrs)


@pytest.mark.parametrize(
    ("inputs", "attrs"),
    [
        ([(8,), (8, 4), None, (4,)], {}),
        ([(3, 5, 8), (8,), None, (3, 5)], {}),
        ([(2, 1, 8, 5), (3, 4, 8), None, (2, 3, 5, 4)], {"transpose_a": True, "transpose_b": True}),
    ],
)
def test_products_of_vectors_and_transposed_ones_have_residuals(
    inputs: list[Any], attrs: dict[str, Any]
) -> None:
    assert told("matmul", inputs, inputs[3], **attrs) is None


def test_every_operation_with_vectors_has_a_rule() -> None:
    vectors = {"bias", "scale", "weight", "residual", "running_mean"}
    with_vectors = {n for n, row in OPERATIONS.items() if vectors & {*row.inputs, *row.late}}
    gradients = {f"conv{axes}d_dgrad" for axes in (1, 3)}  # the rule of two axes
    assert with_vectors - {"embedding", *gradients} <= RIGHT.keys()


@pytest.mark.parametrize("op", ["conv2d", "linear"])
def test_no_kernel_takes_a_short_bias(op: str) -> None:
    inputs, result, attrs = RIGHT[op]
    inputs = [*inputs[:2], (1,), *inputs[3:]]
    for row in catalog.rows():
        if row.op not in (op, "*"):
            continue
        problem = Problem(
            op=op,
            inputs=tuple(TensorMeta(shape=shape, dtype="float32") for shape in inputs),
            outputs=(TensorMeta(shape=result, dtype="float32"),),
            attrs={**attrs, "activation": None},
            constant=(1, 2, 4),
        )
        assert row.refusal(problem) == "bias has the shape 1, not 4", row.id


def test_every_product_has_its_operands_in_one_order() -> None:
    """``Problem.product_operands`` counts on it."""
    products = [row for row in OPERATIONS.values() if "" in row.epilogues]
    assert {"conv2d", "conv2d_pool", "linear", "matmul"} <= {row.name for row in products}
    for row in products:
        assert row.operands[2:5] == ("bias", "residual", "scale"), row.name
