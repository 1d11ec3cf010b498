"""Recurrent layers are captured whole, from torch and from ONNX, and say what these say."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper, numpy_helper
from torch import nn
from torch.nn.utils import rnn
from torch.nn.utils.rnn import pack_padded_sequence

from tessella.core.errors import CompileError
from tessella.core.spec import DimRange, TensorSpec
from tessella.graph import Graph, capture, interpret
from tessella.graph.onnx import read

BATCH = DimRange(min=1, opt=2, max=8)
OPS = ("lstm", "gru", "rnn")


def layers(graph: Graph) -> list[str]:
    return [node.op for node in graph.nodes if node.op in OPS]


class Layer(nn.Module):
    """A layer whose states are answered too, batch first."""

    def __init__(self, cell: nn.RNNBase) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: torch.Tensor, *starts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        states = [s.transpose(0, 1) for s in starts]
        given = (x, tuple(states) if len(states) == 2 else states[0]) if states else (x,)
        output, lasts = self.cell(*given)
        lasts = lasts if isinstance(lasts, tuple) else (lasts,)
        return (output, *(last.transpose(0, 1) for last in lasts))


class Started(Layer):
    def forward(
        self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return super().forward(x, h, c)


CELLS = {
    "lstm": (lambda: nn.LSTM(5, 4, 2, batch_first=True, bidirectional=True, dropout=0.5), 2),
    "projected": (lambda: nn.LSTM(5, 4, batch_first=True, proj_size=3), 1),
    "gru": (lambda: nn.GRU(5, 4, 2, batch_first=True, bias=False), 2),
    "rnn": (lambda: nn.RNN(5, 4, nonlinearity="relu", batch_first=True), 1),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections")  # torch's own
@pytest.mark.parametrize("name", CELLS)
def test_torchs_layers_are_one_operation_each(name: str) -> None:
    torch.manual_seed(0)
    make, count = CELLS[name]
    module = Layer(make()).eval()
    # 5 steps, as many as torch.export's usual example has samples
    graph = capture(module, [TensorSpec(name="x", dtype="float32", shape=(BATCH, 5, 5))])
    assert len(layers(graph)) == count
    assert all(node.get("h_0") is None for node in graph.nodes if node.op in OPS)
    for n in (1, 3):
        x = torch.randn(n, 5, 5)
        made = interpret(graph, {"x": x})
        for ours, theirs in zip(made.values(), module(x), strict=True):
            torch.testing.assert_close(ours, theirs)


def test_states_may_be_given_and_the_first_axis_may_be_time() -> None:
    torch.manual_seed(0)
    module = Started(nn.LSTM(5, 4, 2, batch_first=True)).eval()
    specs = [TensorSpec(name="x", dtype="float32", shape=(BATCH, 6, 5))]
    specs += [TensorSpec(name=n, dtype="float32", shape=(BATCH, 2, 4)) for n in "hc"]
    graph = capture(module, specs)
    given = {"x": torch.randn(3, 6, 5), "h": torch.randn(3, 2, 4), "c": torch.randn(3, 2, 4)}
    for ours, theirs in zip(interpret(graph, given).values(), module(*given.values()), strict=True):
        torch.testing.assert_close(ours, theirs)
    over_time = nn.Sequential(nn.GRU(5, 4)).eval()
    graph = capture(over_time, [TensorSpec(name="x", dtype="float32", shape=(BATCH, 2, 5))])
    for steps in (1, 8):
        x = torch.randn(steps, 2, 5)
        torch.testing.assert_close(interpret(graph, {"x": x})["output"], over_time(x)[0])


class Packed(nn.Module):
    def __init__(self, cell: nn.RNNBase, sort: bool, behind: Any = None) -> None:
        super().__init__()
        self.cell, self.sort, self.behind = cell, sort, behind

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> Any:
        packed = rnn.pack_padded_sequence(x, n, batch_first=True, enforce_sorted=not self.sort)
        if self.behind is not None:
            return self.behind(packed.data)
        packed, last = self.cell(packed)
        output, lengths = rnn.pad_packed_sequence(packed, batch_first=True, padding_value=-1.0)
        return output, last[0][-1], lengths


@pytest.mark.parametrize("sort", [False, True])
def test_packed_sequences_keep_their_lengths(sort: bool) -> None:
    torch.manual_seed(0)
    module = Packed(nn.LSTM(5, 4, 2, bidirectional=True, batch_first=True), sort).eval()
    specs = [TensorSpec(name="x", dtype="float32", shape=(3, 7, 5))]
    specs.append(TensorSpec(name="n", dtype="int64", shape=(3,)))
    graph = capture(module, specs)
    assert layers(graph) == ["lstm", "lstm"]
    x, n = torch.randn(3, 7, 5), torch.tensor([3, 7, 2] if sort else [7, 3, 2])
    for ours, theirs in zip(interpret(graph, {"x": x, "n": n}).values(), module(x, n), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("sort", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_packed_sequences_for_any_batch(kind: type[nn.RNNBase], sort: bool) -> None:
    """Given a first state, too; neither sorting nor a state fixes how many samples there are."""
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = kind(4, 4, batch_first=True)

        def forward(self, x: torch.Tensor, n: torch.Tensor, h: torch.Tensor) -> Any:
            packed = pack_padded_sequence(x, n, batch_first=True, enforce_sorted=not sort)
            first = h.transpose(0, 1)
            output, _ = self.cell(packed, (first, first) if kind is nn.LSTM else first)
            again, last = self.cell(output)
            last = last[0] if isinstance(last, tuple) else last
            return rnn.pad_packed_sequence(again, batch_first=True)[0], last[-1]

    module = Net().eval()
    specs = [TensorSpec(name="x", dtype="float32", shape=(BATCH, 7, 4))]
    specs.append(TensorSpec(name="n", dtype="int64", shape=(BATCH,)))
    specs.append(TensorSpec(name="h", dtype="float32", shape=(BATCH, 1, 4)))
    graph = capture(module, specs)
    assert "aten::sort" not in str(graph)
    for lengths in ([7], [2, 7, 4], [7, 7, 3, 5]):
        n = torch.tensor(lengths if sort else sorted(lengths, reverse=True))
        given = {"x": torch.randn(len(n), 7, 4), "n": n, "h": torch.randn(len(n), 1, 4)}
        made = interpret(graph, given).values()
        for ours, theirs in zip(made, module(*given.values()), strict=True):
            torch.testing.assert_close(ours, theirs)
    assert rnn.invert_permutation(torch.tensor([1, 2, 0])).tolist() == [2, 0, 1]  # as it was
    assert vars(rnn)["torch"] is torch


def test_packed_rows_are_not_read_otherwise() -> None:
    specs = [TensorSpec(name="x", dtype="float32", shape=(3, 7, 5))]
    specs.append(TensorSpec(name="n", dtype="int64", shape=(3,)))
    for behind in (lambda data: data.mean(0, keepdim=True), lambda data: data.relu().sum(0)):
        with pytest.raises(CompileError, match="rows of a packed sequence"):
            capture(Packed(nn.LSTM(5, 4), False, behind), specs)


def model(op: str, *, direction: str, extra: frozenset[str], layout: int, before: int) -> Any:
    """An ONNX model of one layer, and what it is fed: 6 steps, 3 samples, 5 inputs, 4 units."""
    t, n, i, h, d = 6, 3, 5, 4, 1 + (direction == "bidirectional")
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[op]
    random = np.random.default_rng(0)

    def numbers(*shape: int) -> np.ndarray[Any, Any]:
        return (random.standard_normal(shape) / 2).astype(np.float32)

    def turned(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.ascontiguousarray(array.swapaxes(0, 1)) if layout else array

    known = {"W": numbers(d, gates * h, i), "R": numbers(d, gates * h, h)}
    feeds = {"x": turned(numbers(t, n, i))}
    names = ["x", "W", "R", "", "", "", ""]
    if "bias" in extra:
        known["B"], names[3] = numbers(d, 2 * gates * h), "B"
    if "lengths" in extra:
        feeds["lengths"], names[4] = np.array([6, 2, 4], np.int32), "lengths"
    if "states" in extra:
        for place, name in zip((5, 6), ("h", "c") if op == "LSTM" else ("h",), strict=False):
            feeds[name], names[place] = turned(numbers(d, n, h)), name
    while not names[-1]:
        names.pop()
    attrs = {"linear_before_reset": before} if op == "GRU" else {}
    outputs = ["Y", "Y_h", "Y_c"][: 3 if op == "LSTM" else 2]
    node = helper.make_node(
        op, names, outputs, hidden_size=h, direction=direction, layout=layout, **attrs
    )
    kinds = {"float32": onnx.TensorProto.FLOAT, "int32": onnx.TensorProto.INT32}
    infos = [
        helper.make_tensor_value_info(k, kinds[v.dtype.name], v.shape) for k, v in feeds.items()
    ]
    results = [
        helper.make_tensor_value_info(o, 1, list("abcd")[: 4 if o == "Y" else 3]) for o in outputs
    ]
    constants = [numpy_helper.from_array(v, k) for k, v in known.items()]
    graph = helper.make_graph([node], "layer", infos, results, constants)
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    ), feeds


EXTRAS = [frozenset(some) for k in range(4) for some in itertools.combinations(
    ("bias", "lengths", "states"), k)]  # fmt: skip


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("op", ["LSTM", "GRU", "RNN"])
def test_onnx_layers_say_what_onnx_runtime_says(op: str, direction: str, tmp_path: Path) -> None:
    """ONNX Runtime has no layout 1: its answers are turned."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    for extra, before in itertools.product(EXTRAS, (0, 1) if op == "GRU" else (0,)):
        settings = {"direction": direction, "extra": extra, "before": before}
        (plain, feeds), (first, turned) = (model(op, layout=k, **settings) for k in (0, 1))
        session = onnxruntime.InferenceSession(
            plain.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        right = [torch.from_numpy(array) for array in session.run(None, feeds)]
        for made, given in ((plain, feeds), (first, turned)):
            path = tmp_path / "layer.onnx"
            onnx.save(made, path)
            graph = read(path)
            assert layers(graph) == [op.lower()]
            found = interpret(graph, {k: torch.from_numpy(v) for k, v in given.items()})
            for ours, theirs in zip(found.values(), right, strict=True):
                if made is first:
                    order = (1, 2, 0, 3) if ours.dim() == 4 else (1, 0, 2)
                    ours = ours.permute(order)
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_what_torch_has_not_is_still_read_step_by_step(tmp_path: Path) -> None:
    made, feeds = model("LSTM", direction="forward", extra=frozenset({"bias"}), layout=0, before=0)
    made.graph.node[0].attribute.append(helper.make_attribute("clip", 0.4))
    path = tmp_path / "layer.onnx"
    onnx.save(made, path)
    graph = read(path)
    assert layers(graph) == []
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    found = interpret(graph, {k: torch.from_numpy(v) for k, v in feeds.items()})
    for ours, theirs in zip(found.values(), session.run(None, feeds), strict=True):
        torch.testing.assert_close(ours, torch.from_numpy(theirs), rtol=1e-5, atol=1e-6)
