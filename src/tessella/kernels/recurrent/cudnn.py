"""LSTM, GRU and RNN by cuDNN through torch: a whole sequence in one call."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tessella.device.packing import packed
from tessella.kernels.catalog import Call
from tessella.kernels.recurrent.layer import WEIGHTS, backward, operands, refusal, weights
from tessella.operations.problem import Problem

Tensor = torch.Tensor

# cuDNN's numbers for cells, in torch's operator
MODES = {"rnn relu": 0, "rnn tanh": 1, "lstm": 2, "gru": 3}


def fits(problem: Problem) -> str | None:
    if problem.get("lengths") is not None:
        return "lengths are known to the host only"
    if problem.op == "gru" and not problem.attrs["reset_after"]:
        return "the reset gate comes after the product"
    return refusal(problem, "float32", "float16", "bfloat16")


def bind(problem: Problem, constants: Mapping[int, Tensor]) -> Call:
    ways = backward(problem)
    each = weights(problem, constants)
    listed = [weight for way in each for weight in way.listed]
    mode = MODES[" ".join((problem.op, problem.attrs.get("nonlinearity", ""))).strip()]
    inputs, units, projection = problem["input"].shape[2], each[0].weight_ih.shape[0], 0
    units //= {"lstm": 4, "gru": 3, "rnn": 1}[problem.op]
    if each[0].weight_hr is not None:
        projection = each[0].weight_hr.shape[0]
    each_way, both, turned = len(each[0].listed), len(ways) == 2, ways == (True,)

    def flat(_: Tensor) -> Tensor:
        made: Tensor = torch._cudnn_rnn_flatten_weight(
            [w.clone() for w in listed], each_way, inputs, mode, units, projection, 1, False, both
        )
        return made

    held = packed(constants[1], ("recurrent.cudnn", each_way), flat)
    samples, handed = problem["input"].shape[1], projection or units
    zeros = [held.new_zeros(len(ways), samples, size) for size in (handed, units)]
    names = [name for name in operands(problem) if name not in WEIGHTS]

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(names, tensors, strict=True))
        x = given["input"].contiguous()
        h, c = (given.get(n, z).contiguous() for n, z in zip(("h_0", "c_0"), zeros, strict=True))
        output, h, c, *_ = torch._cudnn_rnn(
            x.flip(0) if turned else x, listed, each_way, held, h,
            c if problem.op == "lstm" else None, mode, units, projection, 1, False, 0.0, False,
            both, [], None,
        )  # fmt: skip
        output = output.flip(0) if turned else output
        return (output, h, c) if problem.op == "lstm" else (output, h)

    return run
