"""The references of recurrent layers beside torch's own layers in float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import rnn

from tessella.operations.table import operation

T, N, I, H = 6, 4, 5, 3
LENGTHS = torch.tensor([2, 6, 1, 4])
LAYERS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "lstm": (nn.LSTM, {}, {}),
    "projected": (nn.LSTM, {"proj_size": 2}, {}),
    "gru": (nn.GRU, {}, {"reset_after": True}),
    "rnn": (nn.RNN, {"nonlinearity": "relu"}, {"nonlinearity": "relu"}),
}


def stacked(layer: nn.RNNBase) -> dict[str, torch.Tensor]:
    """The weights of one layer by operand, [directions, …]."""
    names = [name for name, _ in layer.named_parameters() if not name.endswith("_reverse")]
    ends = ("", "_reverse") if layer.bidirectional else ("",)
    return {
        name.removesuffix("_l0"): torch.stack([getattr(layer, name + end) for end in ends]).detach()
        for name in names
    }


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_agrees_with_torch(name: str, both: bool, packed: bool) -> None:
    torch.manual_seed(0)
    cell, settings, attrs = LAYERS[name]
    layer = cell(I, H, bidirectional=both, bias=not packed, **settings).double()
    x = torch.randn(T, N, I, dtype=torch.float64)
    states = [torch.randn(1 + both, N, s, dtype=x.dtype) for s in (layer.proj_size or H, H)]
    states = states if cell is nn.LSTM else states[:1]
    row = operation("lstm" if cell is nn.LSTM else name)
    given = dict(zip(("h_0", "c_0"), states, strict=False))
    attrs = {"direction": "bidirectional" if both else "forward", **attrs}
    start = tuple(states) if cell is nn.LSTM else states[0]
    if packed:
        sequence = rnn.pack_padded_sequence(x, LENGTHS, enforce_sorted=False)
        output, lasts = layer(sequence, start)
        output, _ = rnn.pad_packed_sequence(output)
        given["lengths"] = LENGTHS
    else:
        output, lasts = layer(x, start)
    made = row.call(row.ordered(input=x, **stacked(layer), **given), attrs)
    for ours, theirs in zip(made, (output, *(lasts if cell is nn.LSTM else [lasts])), strict=True):
        torch.testing.assert_close(ours, theirs)
    meta = [None if t is None else t.to("meta") for t in row.ordered(input=x, **stacked(layer))]
    assert [t.shape for t in row.call(meta, attrs)] == [t.shape for t in made]


def test_backwards_is_the_second_of_both() -> None:
    torch.manual_seed(0)
    weights = {"weight_ih": torch.randn(2, 3 * H, I), "weight_hh": torch.randn(2, 3 * H, H)}
    row, x = operation("gru"), torch.randn(T, N, I)
    for after, lengths in itertools.product((True, False), (None, LENGTHS)):
        both, way = (
            row.call(
                row.ordered(input=x, lengths=lengths, **{n: w[d:] for n, w in weights.items()}),
                {"direction": direction, "reset_after": after},
            )
            for d, direction in enumerate(("bidirectional", "reverse"))
        )
        assert torch.equal(both[0][..., H:], way[0])
        assert torch.equal(both[1][1:], way[1])


def test_the_reset_gate_before_the_product() -> None:
    """One step from a state, as https://arxiv.org/abs/1406.1078 writes it."""
    torch.manual_seed(0)
    w, u, b, c = (torch.randn(*s) for s in ((3 * H, I), (3 * H, H), (3 * H,), (3 * H,)))
    x, h = torch.randn(I), torch.randn(H)
    r, z = ((w @ x + b + u @ h + c)[: 2 * H].sigmoid()).split(H)
    new = ((w @ x + b)[2 * H :] + u[2 * H :] @ (r * h) + c[2 * H :]).tanh()
    right = (1 - z) * new + z * h
    row = operation("gru")
    operands = row.ordered(
        input=x.view(1, 1, -1), weight_ih=w[None], weight_hh=u[None], bias_ih=b[None],
        bias_hh=c[None], h_0=h.view(1, 1, -1),
    )  # fmt: skip
    made, last = row.call(operands, {"direction": "forward", "reset_after": False})
    torch.testing.assert_close(made.view(-1), right)
    assert torch.equal(made, last)
