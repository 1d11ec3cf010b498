"""LSTM, GRU and RNN as one large product of all inputs and small steps: projections, lengths, all.

16-bit layers keep what lies between two products in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from tessella.device.packing import onednn_layout, packed
from tessella.kernels.catalog import Call, Config
from tessella.kernels.recurrent.layer import (
    FLOATS,
    Run,
    Weights,
    backward,
    joined,
    refusal,
    weights,
)
from tessella.kernels.shared.onednn import has_onednn
from tessella.operations.problem import Problem

ONEDNN_FROM = 1 << 20  # products of a step: 4 samples, 256 units (35 µs beside 49)

Tensor = torch.Tensor
Product = Callable[[Tensor, Tensor], Tensor]  # addend [N, G·H], h [N, P] → addend + h · weightᵀ
# what the input gives the gates [N, G·H], the states → the states after it
Cell = Callable[[Tensor, tuple[Tensor, ...]], tuple[Tensor, ...]]


def fits(problem: Problem) -> str | None:
    return refusal(problem, *FLOATS)


def configs(problem: Problem) -> tuple[Config, ...]:
    """Who multiplies: oneDNN's packed products cost 15 µs a call, and are up to twice as fast."""
    by_torch, by_onednn = {"product": "aten"}, {"product": "onednn"}
    samples, weight = problem["input"].shape[1], problem["weight_hh"]
    if weight.dtype != "float32" or samples == 1 or not has_onednn():
        return (by_torch,)
    large = samples * math.prod(weight.shape[1:]) >= ONEDNN_FROM
    return (by_onednn, by_torch) if large else (by_torch, by_onednn)


def bind(problem: Problem, constants: Mapping[int, Tensor], product: str = "aten") -> Call:
    each = zip(backward(problem), weights(problem, constants), strict=True)
    onednn = product == "onednn" and next(iter(constants.values())).device.type == "cpu"
    return joined(problem, [_direction(problem, back, given, onednn) for back, given in each])


def _direction(problem: Problem, back: bool, given: Weights, onednn: bool) -> Run:
    x, dtype = problem["input"], given.weight_ih.dtype
    (cell, bias), handed = _CELLS[problem.op](problem, given, onednn), problem.outputs[1].shape[2]
    names = ("h_0", "c_0") if problem.op == "lstm" else ("h_0",)
    wide = torch.promote_types(dtype, torch.float32)
    samples = x.shape[1]
    sizes = (handed, given.weight_hh.shape[0] // 4)

    def run(x: Tensor, states: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        by_input = F.linear(x, given.weight_ih, bias).unbind(0)
        now = tuple(
            states[name].to(wide) if name in states else x.new_zeros(samples, size, dtype=wide)
            for name, size in zip(names, sizes, strict=False)
        )
        going = None
        if "lengths" in states:
            counted = torch.arange(len(by_input), device=x.device).view(-1, 1)
            going = (counted < states["lengths"]).unsqueeze(2).unbind(0)
        rows = [x] * len(by_input)
        for t in reversed(range(len(by_input))) if back else range(len(by_input)):
            after = cell(by_input[t], now)
            rows[t] = after[0]
            if going is not None:
                rows[t] = torch.where(going[t], after[0], 0.0)
                after = tuple(torch.where(going[t], a, b) for a, b in zip(after, now, strict=True))
            now = after
        return tuple(made.to(dtype) for made in (torch.stack(rows), *now))

    return run


def _product(given: Weights, samples: int, onednn: bool, rows: slice = slice(None)) -> Product:
    """``addend + h · weightᵀ`` in float32 at least; the addend's memory may be taken.

    Args:
        rows: those of the weight.
    """
    weight, key = given.weight_hh[rows], (given.way, rows.start)
    if onednn:
        ready = packed(
            given.whole,
            ("recurrent.onednn", *key),
            lambda _: torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), samples),
            layout=onednn_layout,
        )
        binary = torch.ops.mkldnn._linear_pointwise.binary
        return lambda addend, h: binary(h, addend, ready, None, "add")
    turned = packed(given.whole, ("recurrent.turned", *key), lambda _: weight.t().contiguous())
    dtype = weight.dtype
    if dtype in (torch.float32, torch.float64):
        return lambda addend, h: addend.addmm_(h, turned)
    return lambda addend, h: torch.addmm(addend, h.to(dtype), turned).float()


def _lstm(problem: Problem, given: Weights, onednn: bool) -> tuple[Cell, Tensor | None]:
    product = _product(given, problem["input"].shape[1], onednn)
    units, w_hr = given.weight_hh.shape[0] // 4, given.weight_hr
    project = None if w_hr is None else w_hr.to(torch.promote_types(w_hr.dtype, torch.float32))

    def cell(by_input: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        h, c = states
        gates = product(by_input, h)
        i, f, g, o = torch.split(gates, units, 1)
        gates[:, : 2 * units].sigmoid_()
        c = (f * c).addcmul_(i, g.tanh_())
        h = c.tanh().mul_(o.sigmoid_())
        return h if project is None else F.linear(h, project), c

    return cell, _sum(given)


def _gru(problem: Problem, given: Weights, onednn: bool) -> tuple[Cell, Tensor | None]:
    samples, units = problem["input"].shape[1], given.weight_hh.shape[1]
    rz_product = _product(given, samples, onednn, slice(0, 2 * units))
    n_product = _product(given, samples, onednn, slice(2 * units, 3 * units))
    reset_after, bias = problem.attrs["reset_after"], _sum(given)
    if reset_after and bias is not None and given.bias_ih is not None:
        bias = torch.cat((bias[: 2 * units], given.bias_ih[2 * units :]))
    n_bias = given.weight_hh.new_zeros(units)
    if given.bias_hh is not None:
        n_bias = given.bias_hh[2 * units :]
    new = n_bias.expand(samples, units)

    def cell(by_input: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (h,) = states
        rz_x, n_x = torch.split(by_input, [2 * units, units], 1)
        r, z = torch.split(rz_product(rz_x, h).sigmoid_(), units, 1)
        if reset_after:
            n = torch.addcmul(n_x, r, n_product(new.clone(), h))
        else:
            n = n_product(n_x, r * h)
        return (torch.lerp(n.tanh_(), h, z),)

    return cell, bias


def _rnn(problem: Problem, given: Weights, onednn: bool) -> tuple[Cell, Tensor | None]:
    product = _product(given, problem["input"].shape[1], onednn)
    bent = {"tanh": torch.tanh_, "relu": torch.relu_}[problem.attrs["nonlinearity"]]

    def cell(by_input: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (bent(product(by_input, states[0])),)

    return cell, _sum(given)


def _sum(given: Weights) -> Tensor | None:
    """The sum of both biases, for cells that only ever add them together."""
    if given.bias_ih is None or given.bias_hh is None:
        return None
    return given.bias_ih + given.bias_hh


_CELLS = {"lstm": _lstm, "gru": _gru, "rnn": _rnn}
