"""LSTM by oneDNN through torch: a whole sequence in one call, the weights packed once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tessella.device.packing import onednn_layout, packed
from tessella.kernels.catalog import Call
from tessella.kernels.recurrent.layer import Run, Weights, backward, joined, refusal, weights
from tessella.kernels.shared.onednn import has_onednn
from tessella.operations.problem import Problem

LSTM = 2  # oneDNN's number for the cell, in torch's operator

Tensor = torch.Tensor


def fits(problem: Problem) -> str | None:
    if not has_onednn():
        return "this torch was built without oneDNN"
    if problem.get("weight_hr") is not None or problem.get("lengths") is not None:
        return "neither a projection nor lengths"
    if why := refusal(problem, "float32", "bfloat16"):
        return why
    is_bfloat16 = problem["input"].dtype == "bfloat16"
    if is_bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this CPU has no bfloat16 instructions"
    return None


def bind(problem: Problem, constants: Mapping[int, Tensor]) -> Call:
    each = zip(backward(problem), weights(problem, constants), strict=True)
    return joined(problem, [_direction(problem, back, given) for back, given in each])


def _direction(problem: Problem, back: bool, given: Weights) -> Run:
    shape = list(problem["input"].shape)
    units = given.weight_hh.shape[1]
    has_biases = given.bias_ih is not None
    ready_ih, ready_hh = torch.ops.mkldnn._reorder_mkldnn_rnn_layer_weight(
        given.weight_ih, given.weight_hh, units, back, has_biases, False, shape
    )
    whole, how = given.whole, ("lstm.onednn", given.way)
    w_ih = packed(whole, (*how, "ih"), lambda _: ready_ih, layout=onednn_layout)
    w_hh = packed(whole, (*how, "hh"), lambda _: ready_hh, layout=onednn_layout)
    b_ih, b_hh = given.bias_ih, given.bias_hh
    if b_ih is None or b_hh is None:
        b_ih = b_hh = given.weight_ih.new_zeros(4 * units)
    zero = given.weight_ih.new_zeros(shape[1], units)
    settings: tuple[Any, ...] = (back, [], LSTM, units, 1, has_biases, False, False, False)
    layer = torch.ops.aten.mkldnn_rnn_layer.default

    def run(x: Tensor, states: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        h, c = (states.get(name, zero) for name in ("h_0", "c_0"))
        output, h, c, _ = layer(x, w_ih, w_hh, b_ih, b_hh, h, c, *settings)
        return output, h.view(zero.shape), c.view(zero.shape)

    return run
