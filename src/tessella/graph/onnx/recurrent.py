"""ONNX's recurrent layers: one operation for a whole sequence, as torch has them.

What these cannot say (peepholes, coupled gates, limits, activations of the file's own) is written
step by step, and its number of steps is known when a plan is made then.

Letters as in ONNX: X [T, N, I], W [D, G·H, I], R [D, G·H, H], B [D, 2·G·H], states [D, N, H].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tessella.graph.graph import Value
from tessella.graph.onnx.call import Call, Result, Translator, table
from tessella.graph.onnx.indexing import reversed_sequences
from tessella.graph.onnx.layers import static
from tessella.graph.recurrent import is_zero, layer

_MOST_STEPS = 512

Activation = Callable[[Value], Value]


@dataclass(frozen=True, kw_only=True)
class _Direction:
    """One direction of a layer, with its weights taken out of the stack.

    Attributes:
        from_input: X · Wᵀ plus the biases of the input, for all steps: [T, N, G·H].
        recurrent: R, [G·H, H]; ``bias`` its own, [G·H].
        act: the activations, in ONNX's order.
    """

    call: Call
    from_input: Value
    recurrent: Value
    bias: Value | None
    peephole: Value | None
    act: tuple[Activation, ...]
    hidden: int
    clip: float | None

    def gates(self, step: int, state: Value, count: int) -> list[Value]:
        """What each gate gets at ``step``: [N, H] each."""
        now = self.call.emit("select", self.from_input, dim=0, index=step)
        back = self.call.emit("linear", state, self.recurrent, self.bias)
        return self.split(self.call.emit("add", now, back, alpha=1), count)

    def split(self, x: Value, count: int) -> list[Value]:
        axis = len(x.shape) - 1
        sizes = [self.hidden] * count
        if count == 1:
            return [x]
        name = self.call.outputs[0] or "gates"
        return list(self.call.build.node("split", [x], name=name, sizes=sizes, dim=axis))

    def clipped(self, x: Value) -> Value:
        if self.clip is None:
            return x
        return self.call.emit("clamp", x, min=-self.clip, max=self.clip)


def _layer(cell: Callable[..., tuple[Value, ...]], gates: int, states: int) -> Translator:
    """A layer of ``cell``, with ``gates`` gates and ``states`` states (2: LSTM's cell)."""

    def translator(call: Call) -> Result:
        if _is_plain(call):
            return _whole(call, gates)
        x = call.value(0)
        batch_first = bool(call.attrs.get("layout", 0))
        x = call.emit("permute", x, dims=(1, 0, 2)) if batch_first else x
        steps = static(call, x.shape[:1])[0]
        if steps > _MOST_STEPS:
            raise call.wrong(f"it has more than {_MOST_STEPS} steps", seen=steps)
        direction = call.attrs.get("direction", "forward")
        lengths = call.optional(4)
        rows, lasts = [], []
        backwards = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}
        for index, back in enumerate(backwards[direction]):
            made, last = _run(call, x, cell, gates, states, index, back, lengths)
            rows.append(made)
            lasts.append(last)
        return _results(call, rows, lasts, batch_first)

    return translator


_DEFAULT = {"RNN": ["tanh"], "GRU": ["sigmoid", "tanh"], "LSTM": ["sigmoid", "tanh", "tanh"]}
# ONNX's order of gates, by the places of torch's: i o f c → i f c o, z r h → r z h
_ORDER = {"RNN": (0,), "GRU": (1, 0, 2), "LSTM": (0, 2, 3, 1)}


def _is_plain(call: Call) -> bool:
    """Whether torch's cells say all of it."""
    named = [n.lower() for n in call.attrs.get("activations", ())]
    usual = _DEFAULT[call.op]
    plain = not named or named in (usual, usual * 2)
    if call.op == "RNN":
        plain = plain or set(named) == {"relu"}
    special = [call.attrs.get(f"activation_{g}", ()) for g in ("alpha", "beta")]
    if call.op == "LSTM" and (call.has(7) or call.attrs.get("input_forget", 0)):
        return False
    return plain and not any(map(len, special)) and "clip" not in call.attrs


def _whole(call: Call, gates: int) -> Result:
    """The layer as one operation; results as ONNX lays them out."""
    weights = [call.value(1), call.value(2)]
    if any(len(w.shape) != 3 or not isinstance(w.shape[1], int) for w in weights):
        raise call.wrong("its weights have three axes", seen=", ".join(map(str, weights)))
    hidden = call.attrs.get("hidden_size", weights[1].shape[2])
    layout = call.attrs.get("layout", 0)
    direction = call.attrs.get("direction", "forward")
    first = (1, 0, 2)  # the batch's axis and the next, exchanged
    x = call.value(0)
    x = call.emit("permute", x, dims=first) if layout else x
    operands = {"weight_ih": _in_order(call, weights[0], gates)}
    operands["weight_hh"] = _in_order(call, weights[1], gates)
    if call.has(3):
        sizes = [gates * hidden] * 2
        both = call.build.node("split", [call.value(3)], name="bias", sizes=sizes, dim=1)
        for name, bias in zip(("bias_ih", "bias_hh"), both, strict=True):
            operands[name] = _in_order(call, bias, gates)
    if call.has(4):
        operands["lengths"] = call.value(4)
    for place, name in zip((5, 6), ("h_0", "c_0"), strict=True):
        if (name == "h_0" or call.op == "LSTM") and call.has(place):
            start = call.value(place)
            if not is_zero(call.build.graph, start):
                operands[name] = call.emit("permute", start, dims=first) if layout else start
    attrs: dict[str, Any] = {"direction": direction}
    if call.op == "GRU":
        attrs["reset_after"] = bool(call.attrs.get("linear_before_reset", 0))
    elif call.op == "RNN":
        named = call.attrs.get("activations", ("tanh",))
        attrs["nonlinearity"] = named[0].lower()
    named_like = next(filter(None, call.outputs), None)
    output, *lasts = layer(call.build, call.op.lower(), x, operands, attrs, named_like)
    steps, n, _ = output.shape
    wide = call.emit("reshape", output, shape=(steps, n, _ways(direction), hidden))
    made = [call.emit("permute", wide, dims=(1, 0, 2, 3) if layout else (0, 2, 1, 3)), *lasts]
    if layout:
        made[1:] = [call.emit("permute", last, dims=first) for last in lasts]
    return made


def _ways(direction: str) -> int:
    return 2 if direction == "bidirectional" else 1


def _in_order(call: Call, weight: Value, gates: int) -> Value:
    """Weights or a bias [D, G·H, …] with torch's order of gates."""
    if gates == 1:
        return weight
    sizes = [weight.shape[1] // gates] * gates
    parts = call.build.node("split", [weight], name="gates", sizes=sizes, dim=1)
    return call.emit("cat", *(parts[place] for place in _ORDER[call.op]), dim=1)


def _run(
    call: Call,
    x: Value,
    cell: Callable[..., tuple[Value, ...]],
    gates: int,
    states: int,
    index: int,
    back: bool,
    lengths: Value | None,
) -> tuple[Value, tuple[Value, ...]]:
    """One direction: its outputs [T, N, H], and its last states [N, H] each."""
    steps, hidden = static(call, x.shape[:1])[0], call.attrs["hidden_size"]
    call.modest(hidden)
    n, dtype = x.shape[1], getattr(torch, x.dtype)
    if back:
        x = (
            call.aten("flip", x, [0])
            if lengths is None
            else reversed_sequences(call, x, lengths, 0, 1)
        )
    way = _direction(call, x, gates, index)
    layout = call.attrs.get("layout", 0)
    state = []
    for i in range(states):
        if call.has(5 + i):
            start = call.emit("select", call.value(5 + i), dim=layout, index=index)
        else:
            zeros = call.tensor(torch.zeros(1, hidden, dtype=dtype))
            start = call.emit("expand", zeros, shape=(n, hidden))
        state.append(start)
    rows = []
    for step in range(steps):
        made = cell(call, way, step, *state)
        row = made[0]
        if lengths is not None:  # past a sample's end its states stay, and its outputs are zero
            going = call.emit("reshape", call.aten("gt.Scalar", lengths, step), shape=(n, 1))
            zero = call.tensor(torch.zeros((), dtype=dtype))
            row = call.aten("where.self", going, made[0], zero)
            made = tuple(
                call.aten("where.self", going, new, old)
                for new, old in zip(made, state, strict=True)
            )
        state = list(made)
        rows.append(call.emit("reshape", row, shape=(1, n, hidden)))
    joined = call.emit("cat", *rows, dim=0)
    if back:
        joined = (
            call.aten("flip", joined, [0])
            if lengths is None
            else reversed_sequences(call, joined, lengths, 0, 1)
        )
    return joined, tuple(state)


def _direction(call: Call, x: Value, gates: int, index: int) -> _Direction:
    hidden = call.attrs["hidden_size"]
    weight, recurrent = (call.emit("select", call.value(i), dim=0, index=index) for i in (1, 2))
    bias = peephole = None
    if call.has(3):
        both = call.emit("select", call.value(3), dim=0, index=index)
        sizes = [gates * hidden] * 2
        first, bias = call.build.node("split", [both], name="bias", sizes=sizes, dim=0)
        from_input = call.emit("linear", x, weight, first)
    else:
        from_input = call.emit("linear", x, weight)
    if call.op == "LSTM" and call.has(7):
        peephole = call.emit("select", call.value(7), dim=0, index=index)
    count = {"RNN": 1, "GRU": 2, "LSTM": 3}[call.op]
    names = call.attrs.get("activations", _DEFAULT[call.op] * 2)
    slopes = [call.attrs.get(f"activation_{g}", ()) for g in ("alpha", "beta")]
    if any(len(s) for s in slopes):
        raise call.wrong("activations with settings", seen=slopes)
    names = names[index * count : (index + 1) * count]
    return _Direction(
        call=call,
        from_input=from_input,
        recurrent=recurrent,
        bias=bias,
        peephole=peephole,
        act=tuple(_activation(call, n) for n in names),
        hidden=hidden,
        clip=call.attrs.get("clip", None),
    )


def _activation(call: Call, name: str) -> Activation:
    known = {"tanh": "tanh", "sigmoid": "sigmoid", "relu": "relu"}
    if name.lower() not in known:
        raise call.wrong("an activation that is not known", seen=name)
    return lambda x: call.emit(known[name.lower()], x)


def _rnn(call: Call, way: _Direction, step: int, h: Value) -> tuple[Value, ...]:
    (gate,) = way.gates(step, h, 1)
    return (way.act[0](way.clipped(gate)),)


def _gru(call: Call, way: _Direction, step: int, h: Value) -> tuple[Value, ...]:
    """z and r by the first activation, the new h by the second; ``(1 − z) ∘ new + z ∘ h``."""
    f, g = way.act
    now = call.emit("select", way.from_input, dim=0, index=step)
    z_now, r_now, h_now = way.split(now, 3)
    if call.attrs.get("linear_before_reset", 0):
        back = call.emit("linear", h, way.recurrent, way.bias)
        z_back, r_back, h_back = way.split(back, 3)
        r = f(way.clipped(call.emit("add", r_now, r_back, alpha=1)))
        new = call.emit("mul", r, h_back)
    else:
        weights = _thirds(call, way.recurrent, way.hidden)
        biases = [None] * 3 if way.bias is None else _thirds(call, way.bias, way.hidden)
        z_back, r_back = (
            call.emit("linear", h, w, b) for w, b in zip(weights[:2], biases[:2], strict=True)
        )
        r = f(way.clipped(call.emit("add", r_now, r_back, alpha=1)))
        new = call.emit("linear", call.emit("mul", r, h), weights[2], biases[2])
    z = f(way.clipped(call.emit("add", z_now, z_back, alpha=1)))
    new = g(way.clipped(call.emit("add", h_now, new, alpha=1)))
    change = call.emit("mul", z, call.emit("sub", h, new, alpha=1))
    return (call.emit("add", new, change, alpha=1),)


def _thirds(call: Call, x: Value, hidden: int) -> list[Value]:
    return list(call.build.node("split", [x], name="weights", sizes=[hidden] * 3, dim=0))


def _lstm(call: Call, way: _Direction, step: int, h: Value, c: Value) -> tuple[Value, ...]:
    """Gates i, o, f, c; a peephole lets i and f see the old cell, and o the new one."""
    if call.attrs.get("input_forget", 0):
        raise call.wrong("coupled input and forget gates")
    f, g, out = way.act
    gates = way.gates(step, h, 4)
    i, o, forget, new = gates
    if way.peephole is not None:
        p_i, p_o, p_f = _thirds(call, way.peephole, way.hidden)
        i = call.emit("add", i, call.emit("mul", c, p_i), alpha=1)
        forget = call.emit("add", forget, call.emit("mul", c, p_f), alpha=1)
    kept = call.emit("mul", f(way.clipped(forget)), c)
    added = call.emit("mul", f(way.clipped(i)), g(way.clipped(new)))
    cell = call.emit("add", kept, added, alpha=1)
    if way.peephole is not None:
        o = call.emit("add", o, call.emit("mul", cell, p_o), alpha=1)
    return call.emit("mul", f(way.clipped(o)), out(cell)), cell


def _results(
    call: Call, rows: list[Value], lasts: list[tuple[Value, ...]], batch_first: bool
) -> Result:
    """Y [T, D, N, H] and the last states [D, N, H]; or [N, T, D, H], [N, D, H]: batch first."""
    steps, n, hidden = rows[0].shape
    wide = [call.emit("reshape", r, shape=(steps, 1, n, hidden)) for r in rows]
    made = [call.emit("cat", *wide, dim=1) if len(wide) > 1 else wide[0]]
    for states in zip(*lasts, strict=True):
        columns = [call.emit("reshape", s, shape=(1, n, hidden)) for s in states]
        made.append(call.emit("cat", *columns, dim=0) if len(columns) > 1 else columns[0])
    if batch_first:
        orders = [(2, 0, 1, 3), *[(1, 0, 2)] * (len(made) - 1)]
        made = [call.emit("permute", v, dims=o) for v, o in zip(made, orders, strict=True)]
    return made


RECURRENT: dict[str, Translator] = table(
    ("RNN", _layer(_rnn, 1, 1)),
    ("GRU", _layer(_gru, 3, 1)),
    ("LSTM", _layer(_lstm, 4, 2)),
)
