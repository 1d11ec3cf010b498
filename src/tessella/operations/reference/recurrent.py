"""Recurrent layers in plain torch: one layer, one or both directions, one step after another.

Letters: T steps, N samples, I inputs, H units, P numbers that are handed on (H, or the projection's
rows), D directions (2 for ``bidirectional``, in which ``forward`` comes first), G gates.
Weights are stacked by direction, gates lie in torch's order: weight_ih [D, G·H, I], weight_hh
[D, G·H, P], both biases [D, G·H]. Where no state is given, it is zero. ``lengths`` [N] says how
many steps a sample has: after its last its states stay and its outputs are 0, and ``reverse``
begins there.

What is computed between two steps is float32 at least.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from tessella.operations.operation import (
    Attributes,
    Rule,
    Shape,
    Shapes,
    Work,
    differs,
    first_of,
    row,
    shown,
)

Tensor = torch.Tensor
States = tuple[Tensor, ...]
Cell = Callable[[Tensor, States, int], States]  # inputs [N, I], states, direction → states

DIRECTIONS = ("forward", "reverse", "bidirectional")
NONLINEARITIES = ("tanh", "relu")


def lstm(
    input: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None,
    weight_hr: Tensor | None = None,
    h_0: Tensor | None = None,
    c_0: Tensor | None = None,
    lengths: Tensor | None = None,
    *,
    direction: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Long short-term memory; gates: input, forget, cell, output.

    input [T, N, I], weight_hr [D, P, H], h_0 [D, N, P], c_0 [D, N, H] → output [T, N, D·P], the
    last h [D, N, P] and c [D, N, H].
    """
    handed = (weight_hh if weight_hr is None else weight_hr).shape[-1 if weight_hr is None else 1]
    sizes = (handed, weight_hh.shape[1] // 4)
    w_ih, w_hh, b_ih, b_hh, w_hr = map(_wide, (weight_ih, weight_hh, bias_ih, bias_hh, weight_hr))

    def cell(x: Tensor, states: States, d: int) -> States:
        h, c = states
        gates = _times(x, w_ih, b_ih, d) + _times(h, w_hh, b_hh, d)
        i, f, g, o = gates.chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return (h if w_hr is None else h @ w_hr[d].mT), c

    output, h, c = _layer(input, cell, (h_0, c_0), sizes, lengths, direction)
    return output, h, c


def gru(
    input: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None,
    h_0: Tensor | None = None,
    lengths: Tensor | None = None,
    *,
    direction: str,
    reset_after: bool,
) -> tuple[Tensor, Tensor]:
    """Gated recurrent units; gates: reset, update, new.

    input [T, N, I], h_0 [D, N, H] → output [T, N, D·H], the last h [D, N, H].

    Args:
        reset_after: the reset gate multiplies ``h · weight + bias`` of the new state, as in torch,
            and not h itself, as in https://arxiv.org/abs/1406.1078.
    """
    units = weight_hh.shape[-1]
    w_ih, w_hh, b_ih, b_hh = map(_wide, (weight_ih, weight_hh, bias_ih, bias_hh))

    def cell(x: Tensor, states: States, d: int) -> States:
        (h,) = states
        r_x, z_x, n_x = _times(x, w_ih, b_ih, d).chunk(3, 1)
        r_h, z_h, n_h = _times(h, w_hh, b_hh, d).chunk(3, 1)
        r, z = torch.sigmoid(r_x + r_h), torch.sigmoid(z_x + z_h)
        if reset_after:
            n = torch.tanh(n_x + r * n_h)
        else:
            n = torch.tanh(n_x + _times(r * h, w_hh, b_hh, d).chunk(3, 1)[2])
        return ((1 - z) * n + z * h,)

    output, h = _layer(input, cell, (h_0,), (units,), lengths, direction)
    return output, h


def rnn(
    input: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None,
    h_0: Tensor | None = None,
    lengths: Tensor | None = None,
    *,
    direction: str,
    nonlinearity: str,
) -> tuple[Tensor, Tensor]:
    """A layer of Elman: ``h = tanh(x · weight_ihᵀ + h · weight_hhᵀ)`` with biases, or relu.

    input [T, N, I], h_0 [D, N, H] → output [T, N, D·H], the last h [D, N, H].
    """
    units = weight_hh.shape[-1]
    w_ih, w_hh, b_ih, b_hh = map(_wide, (weight_ih, weight_hh, bias_ih, bias_hh))
    bent = {"tanh": torch.tanh, "relu": torch.relu}[nonlinearity]

    def cell(x: Tensor, states: States, d: int) -> States:
        return (bent(_times(x, w_ih, b_ih, d) + _times(states[0], w_hh, b_hh, d)),)

    output, h = _layer(input, cell, (h_0,), (units,), lengths, direction)
    return output, h


def _wide(tensor: Tensor | None) -> Tensor | None:
    """16-bit numbers as float32."""
    return None if tensor is None else tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _times(x: Tensor, weight: Tensor | None, bias: Tensor | None, d: int) -> Tensor:
    assert weight is not None
    return F.linear(x, weight[d], None if bias is None else bias[d])


def _layer(
    input: Tensor,
    cell: Cell,
    starts: tuple[Tensor | None, ...],
    sizes: tuple[int, ...],
    lengths: Tensor | None,
    direction: str,
) -> tuple[Tensor, ...]:
    """Output [T, N, D·P], and each last state [D, N, size]."""
    steps, samples = input.shape[:2]
    backward = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[direction]
    ways = len(backward)
    if input.is_meta:  # shapes alone: a meta step takes as long as a real one
        made = [(steps, samples, ways * sizes[0]), *((ways, samples, size) for size in sizes)]
        return tuple(input.new_empty(shape) for shape in made)
    x = _wide(input)
    assert x is not None
    outputs, lasts = [], []
    for d, back in enumerate(backward):
        given = (None if start is None else start[d] for start in starts)
        states = tuple(
            x.new_zeros(samples, size) if start is None else start.to(x.dtype)
            for start, size in zip(given, sizes, strict=True)
        )
        rows: list[Tensor] = [x] * steps
        for t in reversed(range(steps)) if back else range(steps):
            new = cell(x[t], states, d)
            rows[t] = new[0]
            if lengths is not None:
                going = (t < lengths).view(-1, 1)
                rows[t] = torch.where(going, new[0], 0.0)
                new = tuple(torch.where(going, a, b) for a, b in zip(new, states, strict=True))
            states = new
        outputs.append(torch.stack(rows))
        lasts.append(states)
    results = (torch.cat(outputs, 2), *(torch.stack(s) for s in zip(*lasts, strict=True)))
    return tuple(result.to(input.dtype) for result in results)


def _fits(gates: int) -> Rule:
    def rule(shapes: Shapes, result: Shape, attrs: Attributes) -> str | None:
        """Every operand by its letters."""
        if (direction := attrs.get("direction")) not in DIRECTIONS:
            return f"a layer runs {', '.join(DIRECTIONS)}, not {direction!r}"
        if attrs.get("nonlinearity", "tanh") not in NONLINEARITIES:
            return f"a layer bends by {' or '.join(NONLINEARITIES)}"
        if not isinstance(attrs.get("reset_after", True), bool):
            return "reset_after is true or false"
        x, w_hh = shapes["input"], shapes["weight_hh"]
        if len(x) != 3 or not x[0]:
            return f"an input is [T, N, I] with a step at least, not {shown(x)}"
        if len(w_hh) != 3 or not w_hh[1] or w_hh[1] % gates:
            return f"weight_hh is [D, {gates}·H, P], not {shown(w_hh)}"
        ways, units, handed = 1 + (direction == "bidirectional"), w_hh[1] // gates, w_hh[2]
        if handed != units and "weight_hr" not in shapes:
            return f"{units} units hand {units} numbers on, not {handed}"
        wide = (ways, gates * units)
        return first_of(
            differs(shapes, "weight_ih", (*wide, x[2])),
            differs(shapes, "weight_hh", (*wide, handed)),
            differs(shapes, "bias_ih", wide),
            differs(shapes, "bias_hh", wide),
            differs(shapes, "weight_hr", (ways, handed, units)),
            differs(shapes, "h_0", (ways, x[1], handed)),
            differs(shapes, "c_0", (ways, x[1], units)),
            differs(shapes, "lengths", (x[1],)),
            differs({"the output": result}, "the output", (x[0], x[1], ways * handed)),
        )

    return rule


def _products(gates: int) -> Work:
    def flops(shapes: Shapes, result: Shape, attrs: Attributes) -> int:
        steps, samples, inputs = shapes["input"]
        ways, rows, handed = shapes["weight_hh"]
        projection = handed * (rows // gates) if "weight_hr" in shapes else 0
        return 2 * steps * samples * ways * (rows * (inputs + handed) + projection)

    return flops


_STATELESS = "input weight_ih weight_hh bias_ih? bias_hh?"

ROWS = (
    row(
        lstm,
        f"{_STATELESS} weight_hr? h_0? c_0? lengths?",
        "direction",
        rule=_fits(4),
        flops=_products(4),
        many=True,
    ),
    row(
        gru,
        f"{_STATELESS} h_0? lengths?",
        "direction reset_after",
        rule=_fits(3),
        flops=_products(3),
        many=True,
    ),
    row(
        rnn,
        f"{_STATELESS} h_0? lengths?",
        "direction nonlinearity",
        rule=_fits(1),
        flops=_products(1),
        many=True,
    ),
)
