"""How much work a problem is: arithmetic and bytes, to compare a kernel with a machine's limits."""

from __future__ import annotations

import math

from tessella.operations.problem import Problem


def flops(problem: Problem) -> int | None:
    """Floating-point operations (a multiply-add is two) of products; None for other operations."""
    out = math.prod(problem.outputs[0].shape)
    if problem.op in ("conv1d", "conv2d", "conv3d", "linear", "linear_norm"):
        weight = problem.inputs[1].shape
        return 2 * out * math.prod(weight[1:])
    if problem.op == "conv2d_pool":
        a, x, weight = problem.attrs, problem.inputs[0].shape, problem.inputs[1].shape
        places = [
            (size + 2 * pad - far * (tap - 1) - 1) // step + 1
            for size, pad, far, tap, step in zip(
                x[2:], a["padding"], a["dilation"], weight[2:], a["stride"], strict=True
            )
        ]
        return 2 * x[0] * math.prod(places) * math.prod(weight)
    if problem.op == "conv2d_chain":
        pixels = out // problem.outputs[0].shape[1]
        return 2 * pixels * sum(math.prod(problem.inputs[i].shape) for i in (1, 5))
    if problem.op.endswith("_dgrad"):  # of the convolution's result, as many as forward
        dy, weight = (t.shape for t in problem.inputs[:2])
        return 2 * math.prod(dy) * math.prod(weight[1:])
    if problem.op.endswith("_wgrad"):
        dy, weight = problem.inputs[0].shape, problem.outputs[0].shape
        return 2 * math.prod(dy) * math.prod(weight[1:])
    if problem.op == "matmul":
        rows, columns = problem.inputs[0].shape[-2:]
        return 2 * out * (rows if problem.attr("transpose_a") else columns)
    if problem.op == "scaled_dot_product_attention":
        query, key, value = (t.shape for t in problem.inputs[:3])
        pairs = math.prod(query[:-1]) * key[-2]
        return 2 * pairs * (query[-1] + value[-1])
    return None


def nbytes(problem: Problem) -> int:
    """Bytes of all inputs and outputs, each counted once: the least that must be moved."""
    return sum(t.nbytes for t in (*problem.inputs, *problem.outputs) if t is not None)
