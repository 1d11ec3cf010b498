"""How many operations a problem is, counted by torch's own counter."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tessella.operations import problems
from tessella.operations.problem import Problem
from tessella.operations.table import operation
from tessella.operations.tensor_meta import TensorMeta


def float32(*shape: int) -> TensorMeta:
    return TensorMeta(shape=shape, dtype="float32")


X, W = float32(2, 6, 9, 8), float32(4, 6, 3, 2)
WINDOW = {"stride": (2, 1), "padding": (1, 0)}
DY = problems.conv(X, W, **WINDOW).output


@pytest.mark.parametrize(
    "problem",
    [
        problems.conv(X, W, **WINDOW),
        problems.conv_dgrad(DY, W, X.shape, **WINDOW),
        problems.conv_wgrad(DY, X, (3, 2), **WINDOW),
        problems.linear(float32(5, 7), float32(3, 7)),
        problems.matmul(float32(2, 7, 5), float32(2, 7, 3), transpose_a=True),
    ],
    ids=lambda problem: problem.op,
)
def test_operations_are_those_that_torch_counts(problem: Problem) -> None:
    with torch.device("meta"):
        inputs = [torch.empty(meta.shape) for meta in problem.inputs]
    with FlopCounterMode(display=False) as counter:
        operation(problem.op).call(inputs, problem.attrs)
    assert problem.flops == counter.get_total_flops()


@pytest.mark.parametrize(("shape", "made"), [((5, 3), (3,)), ((5,), ()), ((2, 5, 3), (2, 3))])
def test_products_of_vectors(shape: tuple[int, ...], made: tuple[int, ...]) -> None:
    inputs = float32(5), float32(*shape)
    for attrs in ({}, {"transpose_a": True}):
        problem = Problem(op="matmul", inputs=inputs, outputs=(float32(*made),), attrs=attrs)
        assert problem.flops == 2 * 5 * math.prod(made)


@pytest.mark.parametrize("projection", [0, 3])
def test_recurrent_layers_do_what_torch_counts(projection: int) -> None:
    layer = torch.nn.LSTM(5, 4, bidirectional=True, proj_size=projection)
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", *["weight_hr"] * bool(projection))
    weights = [
        torch.stack([getattr(layer, f"{name}_l0{end}") for end in ("", "_reverse")])
        for name in names
    ]
    inputs = [torch.zeros(7, 2, 5), *(w.detach() for w in weights)]
    row, attrs = operation("lstm"), {"direction": "bidirectional"}
    with FlopCounterMode(display=False) as counter:
        output = row.call(inputs, attrs)[0]
    flops = row.flops(row.shapes(inputs), tuple(output.shape), attrs)
    assert flops == counter.get_total_flops()


def test_bytes_are_those_of_every_operand_once() -> None:
    assert problems.conv(X, W, **WINDOW).nbytes == X.nbytes + W.nbytes + DY.nbytes
