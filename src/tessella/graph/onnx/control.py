"""ONNX's control flow, decided when the plan is made: branches taken, loops unrolled."""

from __future__ import annotations

import numpy as np
import torch

from tessella.graph.graph import Dim, Value
from tessella.graph.onnx.budget import MOST_TURNS
from tessella.graph.onnx.call import Call, Result, Sizes, Translator, table


def _if(call: Call) -> Result:
    taken = "then_branch" if bool(call.known(0).item()) else "else_branch"
    branches = {name: call.attrs[name] for name in ("then_branch", "else_branch")}
    return call.inner(branches[taken], [])


def _loop(call: Call) -> Result:
    """A loop whose number of turns and conditions do not depend on data."""
    turns = int(call.known(0).item()) if call.has(0) else MOST_TURNS + 1
    go_on = bool(call.known(1).item()) if call.has(1) else True
    state = [call.given(i) for i in range(2, len(call.inputs))]
    body = call.attrs["body"]
    rows: list[list[Value]] = [[] for _ in range(len(body.output) - 1 - len(state))]
    turn = 0
    while go_on and turn < turns:
        if turn == MOST_TURNS:
            raise call.wrong(f"it makes more than {MOST_TURNS} turns")
        numbers = [call.tensor(torch.tensor(turn)), call.tensor(torch.tensor(True))]
        go, *made = call.inner(body, [*numbers, *state])
        go_on = _decided(call, go)
        state = made[: len(state)]
        for row, value in zip(rows, made[len(state) :], strict=True):
            row.append(_tensor(call, value))
        turn += 1
    if not turn and rows:
        raise call.wrong("it makes no turn, so the kind of its results is not known")
    return [*state, *(_stacked(call, row, 0) for row in rows)]


def _scan(call: Call) -> Result:
    """A loop over slices of tensors, whose length is known."""
    count, body = call.attrs["num_scan_inputs"], call.attrs["body"]
    if call.opset < 9:  # then with a batch axis, and the lengths of its sequences
        raise call.wrong("it is of a version that scans each sample of a batch")
    state = [call.given(i) for i in range(len(call.inputs) - count)]
    scanned = [call.value(i) for i in range(len(call.inputs) - count, len(call.inputs))]
    made_count = len(body.output) - len(state)
    axes, backwards = (call.attrs.get(f"scan_input_{k}", [0] * count) for k in _SCAN)
    out_axes, out_backwards = (call.attrs.get(f"scan_output_{k}", [0] * made_count) for k in _SCAN)
    axes = [call.from_front(a, len(x.shape)) for a, x in zip(axes, scanned, strict=True)]
    turns = scanned[0].shape[axes[0]]
    if isinstance(turns, Dim) or turns > MOST_TURNS:
        raise call.wrong("its number of turns is not known, or large", seen=turns)
    rows: list[list[Value]] = [[] for _ in range(made_count)]
    for turn in range(turns):
        slices = [
            call.emit("select", x, dim=a, index=turns - 1 - turn if back else turn)
            for x, a, back in zip(scanned, axes, backwards, strict=True)
        ]
        made = call.inner(body, [*state, *slices])
        state = made[: len(state)]
        for row, value in zip(rows, made[len(state) :], strict=True):
            row.append(_tensor(call, value))
    ordered = [r[::-1] if back else r for r, back in zip(rows, out_backwards, strict=True)]
    return [*state, *(_stacked(call, r, a) for r, a in zip(ordered, out_axes, strict=True))]


_SCAN = ("axes", "directions")


def _decided(call: Call, condition: Value | Sizes) -> bool:
    if isinstance(condition, np.ndarray):
        return bool(condition.item())
    known = call.build.graph.constants.get(condition)
    if known is None:
        raise call.wrong("when it ends depends on data")
    return bool(known.item())


def _tensor(call: Call, value: Value | Sizes) -> Value:
    if isinstance(value, Value):
        return value
    raise call.wrong("a result follows the batch size")


def _stacked(call: Call, values: list[Value], axis: int) -> Value:
    rank = len(values[0].shape) + 1
    axis = call.from_front(axis, rank)
    shape = values[0].shape
    wide = [call.emit("reshape", v, shape=(*shape[:axis], 1, *shape[axis:])) for v in values]
    return call.emit("cat", *wide, dim=axis)


CONTROL: dict[str, Translator] = table(("If", _if), ("Loop", _loop), ("Scan", _scan))
