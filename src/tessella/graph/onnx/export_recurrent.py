"""Recurrent layers as ONNX: gates in its order, and directions as an axis of the output."""

from __future__ import annotations

from typing import Any

import torch

from tessella.graph.graph import Node
from tessella.graph.onnx.export import Export, cast, dtype_of, refused, static
from tessella.graph.onnx.writer import Writer

# The places in torch's order of what ONNX wants next: i f g o → i o f c, r z n → z r h.
_ORDER = {"lstm": (0, 3, 1, 2), "gru": (1, 0, 2), "rnn": (0,)}
_INPUTS = ("X", "W", "R", "B", "sequence_lens", "initial_h", "initial_c")  # ONNX's names
_STARTS = {"h_0": "initial_h", "c_0": "initial_c"}


def _layer(w: Writer, node: Node) -> None:
    if node.op == "lstm" and node.get("weight_hr") is not None:
        raise refused(node, "its cells have a projection")
    order, x, attrs = _ORDER[node.op], node["input"], node.attrs
    ways, rows, units = static(node, node["weight_hh"].shape)
    places = torch.arange(rows).view(len(order), units)[list(order)].flatten()

    def in_order(name: str) -> str:
        return w.add("Gather", [node[name].name, w.constant(places)], axis=1)

    given = {"X": x.name, "W": in_order("weight_ih"), "R": in_order("weight_hh")}
    biases = [name for name in ("bias_ih", "bias_hh") if node.get(name) is not None]
    if biases:
        zero = w.constant(torch.zeros(ways, rows, dtype=dtype_of(x)))
        both = [in_order(n) if n in biases else zero for n in ("bias_ih", "bias_hh")]
        given["B"] = w.add("Concat", both, axis=1)
    if (lengths := node.get("lengths")) is not None:
        given["sequence_lens"] = cast(w, lengths, "int32")
    for name in ("h_0", "c_0") if node.op == "lstm" else ("h_0",):
        if (start := node.get(name)) is not None:
            given[_STARTS[name]] = start.name
    settings: dict[str, Any] = {}
    if node.op == "gru":
        settings = {"linear_before_reset": int(attrs["reset_after"])}
    elif node.op == "rnn":
        settings = {"activations": [attrs["nonlinearity"].capitalize()] * ways}
    output, *lasts = node.outputs
    made = w.add(
        node.op.upper(),
        [given.get(name, "") for name in _INPUTS[: _INPUTS.index(list(given)[-1]) + 1]],
        out=["", *(last.name for last in lasts)],
        hidden_size=units,
        direction=attrs["direction"],
        **settings,
    )
    turned = w.add("Transpose", [made], perm=[0, 2, 1, 3])
    w.add("Reshape", [turned, w.sizes(output.shape)], out=output.name)


RECURRENT: dict[str, Export] = dict.fromkeys(_ORDER, _layer)
